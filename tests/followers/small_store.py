"""A small store on a disk, and a disk that fails or crashes at a chosen operation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import UUID

from strandline.errors import CorruptData, Diverged, NotFound, StorageError
from strandline.model.cursor import Cursor
from strandline.model.records import Op
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.snapshots.sealed import seal, unpack
from strandline.storage.disk import DISK, Disk
from strandline.storage.env import SYSTEM, Env
from strandline.testing.faulty import Crash
from tests.disk_doubles import _PassingDisk

LOG = UUID(int=7)
OTHER_LOG = UUID(int=8)


def cursor(offset: int, log_id: UUID = LOG, term: int = 0) -> Cursor:
    return Cursor(log_id, offset, term)


class TinyStore:
    """A store in one JSON file that each change writes again, beside a folder with a second file."""

    kind, version = "tiny", 1

    def __init__(self, folder: str, *, disk: Disk = DISK) -> None:
        self.folder = folder
        self.disk = disk
        self.state: dict[str, str] = {}
        self.at: Cursor | None = None
        try:
            fields = json.loads(disk.read(f"{folder}/state/all.json"))
        except NotFound:
            return
        except ValueError as error:
            raise CorruptData(f"{folder} is damaged: {error}.") from error
        self.state, self.at = fields["state"], Cursor.parse(fields["cursor"])

    def position(self) -> StorePosition:
        return StorePosition(self.at)

    def cursor(self, log_id: UUID) -> Cursor | None:
        if self.at is not None and self.at.log_id != log_id:
            raise Diverged("of another log")
        return self.at

    def get(self, key: bytes) -> bytes | None:
        value = self.state.get(key.hex())
        return None if value is None else bytes.fromhex(value)

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        pairs = sorted((bytes.fromhex(key), bytes.fromhex(value)) for key, value in self.state.items())
        return (pair for pair in pairs if pair[0].startswith(prefix))

    def apply(self, records, *, since: Cursor, upto: Cursor) -> None:
        state = dict(self.state)
        for row in records.select(["op", "key", "value"]).to_pylist():
            if row["op"] == int(Op.PUT):
                state[row["key"].hex()] = (row["value"] or b"").hex()
            else:
                state.pop(row["key"].hex(), None)
        self.set(state, upto)

    def set(self, state: dict[str, str], at: Cursor) -> None:
        self.write(self.folder, state, at, self.disk)
        self.state, self.at = state, at

    @staticmethod
    def write(folder: str, state: dict[str, str], at: Cursor, disk: Disk) -> None:
        disk.make_folders(f"{folder}/state")
        disk.remove(f"{folder}/state/all.json")
        disk.write_new(f"{folder}/state/all.json", [json.dumps({"state": state, "cursor": str(at)}).encode()])
        disk.remove(f"{folder}/NOTE")
        disk.write_new(f"{folder}/NOTE", [b"a second file"])

    @classmethod
    def held(cls, folder: str, *, disk: Disk = DISK) -> Cursor:
        found = cls(folder, disk=disk).at
        if found is None:
            raise CorruptData(f"{folder} holds nothing.")
        return found

    def export_to(self, folder: str, **options) -> Snapshot:
        state, at, env = dict(self.state), self.at, options.get("env", Env(disk=self.disk))
        assert at is not None
        return seal(
            folder,
            kind=self.kind,
            kind_version=self.version,
            cursor=at,
            fill=lambda data: self.write(data, state, at, env.disk),
            verify=lambda data: self.held(data, disk=env.disk),
            **{"env": env, **options},
        )

    @classmethod
    def import_from(cls, snapshot: str, dest: str, *, env: Env = SYSTEM, **options) -> TinyStore:
        verify = lambda folder: cls.held(folder, disk=env.disk)
        unpack(snapshot, dest, kind=cls.kind, kind_version=cls.version, verify=verify, env=env, **options)
        return cls(dest, disk=env.disk)

    def close(self) -> None:
        pass


def tiny(folder: str, offset: int = 5, **pairs: str) -> TinyStore:
    store = TinyStore(folder)
    store.set({key.encode().hex(): value.encode().hex() for key, value in pairs.items()}, cursor(offset))
    return store


class DyingDisk(_PassingDisk):
    """A disk whose operation number ``at`` raises an error once, or with ``dies`` fails and so does all that follows.

    With ``after`` the operation takes effect before it fails.
    """

    def __init__(self, at: int | None = None, *, dies: bool = False, after: bool = False) -> None:
        super().__init__()
        self.at, self.dies, self.after = at, dies, after
        self.done: list[str] = []
        self.dead = False


def _watched(name: str):
    def call(self: DyingDisk, *args, **options):
        if self.dead:
            raise Crash("dead already")
        number = len(self.done)
        self.done.append(f"{name} {args[0]}")
        hit = number == self.at
        if hit and not self.after:
            self.dead = self.dies
            raise Crash(name) if self.dies else StorageError(f"The disk failed at {name} {args[0]}.")
        answer = getattr(self._inner, name)(*args, **options)
        if hit:
            self.dead = self.dies
            raise Crash(name) if self.dies else StorageError(f"The disk failed after {name} {args[0]}.")
        return answer

    return call


for _name in (
    "read", "size", "write_new", "copy", "remove_folder", "rename", "link", "remove", "sync_file", "sync_folder",
    "make_folders", "scan", "locked", "try_locked",
):  # fmt: skip
    setattr(DyingDisk, _name, _watched(_name))
