"""Snapshots in an object store: one consumer publishes, new consumers download."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from strandline.errors import AlreadyExists, Contended, CorruptData, Fenced, NotFound, NotReady, StorageError
from strandline.formats.snapshot.manifest import decode_snapshot
from strandline.formats.snapshot.pointer import PointerCodec
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Duration, Named, Positive, checked
from strandline.model.cursor import SECOND, Cursor
from strandline.model.json_values import LARGEST
from strandline.model.sink import Store
from strandline.model.snapshot import Artifact, Pointer, Snapshot, SnapshotFile
from strandline.model.stamp import OpId
from strandline.model.times import TOLERANCE
from strandline.snapshots.pointer import (
    StalePayload,
    abandoned,
    forget,
    generation_of,
    give_up,
    is_newer,
    location_of,
    plan_sweep,
    point,
)
from strandline.snapshots.sealed import DATA, MANIFEST, read_snapshot
from strandline.snapshots.staging import scratch_folder, staged
from strandline.storage.cell import StoreCell
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.disk import DISK, Disk
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.lease import Lease
from strandline.storage.store import ObjectStore, cautious_now
from strandline.storage.urls import store_at

GRACE: Final = 3600.0
"""Seconds that a superseded payload is kept for those that are reading it, and one that was left unfinished."""

PART: Final = 8 << 20
"""Bytes of a file that go into one object. Stores take an object as a whole, so that this bounds the memory."""

WORKERS: Final = 4
"""How many objects are put, fetched or deleted at once."""

_TRIES: Final = 5
_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class _Trimmed(StorageError):
    """A payload's object is not there. Handled by reading the pointer again."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of an export: published; or what is published is as new, or recent enough; or another is at it.

    ``cursor`` is that of the newest published snapshot; None if there is none, or if nobody looked.
    """

    outcome: Literal["published", "current", "busy"]
    cursor: Cursor | None = None


@bound_to_process()
@checked
class Artifacts:
    """Published snapshots below a prefix of a store, with one pointer to the newest, which never goes back.

    Any number of processes may publish, fetch and trim at once, and die at any moment. What the pointer names is
    whole and is never deleted. All calls block on the store and raise ``StorageError``.
    """

    def __init__(
        self,
        store: ObjectStore | Address,
        prefix: str = "",
        *,
        grace: float = GRACE,
        part: Positive = PART,
        workers: Positive = WORKERS,
        disk: Disk = DISK,
        clock: Clock = CLOCK,
        chance: Chance = CHANCE,
    ) -> None:
        """Use ``store``, or the one at an address; nothing is read or written yet."""
        self._store = store_at(store)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._grace = grace
        self._part = part
        self._workers = workers
        self._disk = disk
        self._clock = clock
        self._chance = chance
        self._cell = StoreCell(self._store, f"{self._prefix}pointer.json", PointerCodec(), clock=clock, chance=chance)
        self._origin = Origin(f"The snapshots in {self._store.url}/{self._prefix}", self)

    def __repr__(self) -> str:
        return f"Artifacts({self._store.url!r}, {self._prefix!r})"

    def newest(self) -> Artifact | None:
        """What the pointer names now; None if nothing was ever published here."""
        return self._pointer().current

    def lease(self, holder: Named, *, seconds: Duration = 60.0) -> Lease:
        """The lease that exporters to this place share."""
        path = f"{self._prefix}lease.json"
        return Lease(self._store, path, holder, seconds=seconds, clock=self._clock, chance=self._chance)

    # --- publishing --------------------------------------------------------------------------------------------

    def publish(self, folder: Address, *, replace: bool = False, guard: Callable[[], object] | None = None) -> Cursor:
        """Upload a sealed folder and point at it; returns the cursor that is published then.

        If a snapshot as new or newer is published, that stays, and nothing is uploaded. ``Diverged`` if what is
        published is of another log, unless ``replace``. ``CorruptData`` if a file is not what the manifest says: then
        the pointer stays. ``guard`` is called before the pointer moves, each time that is tried, and may refuse.
        """
        folder = as_folder(folder)
        snapshot = read_snapshot(folder, disk=self._disk)
        manifest = self._disk.read(f"{folder}/{MANIFEST}", 0, LARGEST + 1)
        op = self._op()
        for _ in range(_TRIES):
            pointer = self._made()
            current = pointer.current
            other = replace and current is not None and current.cursor.log_id != snapshot.cursor.log_id
            if current is not None and not other and not is_newer(snapshot.cursor, current):
                return current.cursor
            artifact = self._upload(snapshot, manifest, pointer.generation)

            def edit(pointer: Pointer, artifact: Artifact = artifact) -> Pointer:
                if guard is not None:
                    guard()
                return point(pointer, artifact, replacing=replace)

            try:
                pointer = self._cell.update(op, edit)
            except StalePayload:
                continue  # so slow that a trim has given it up, and may have deleted it
            self._trim_quietly()
            return snapshot.cursor if pointer.current is None else pointer.current.cursor
        raise Contended(
            f"{self._cell.where}: {folder} was given up by trims {_TRIES} times while it was uploaded; nothing was "
            "published. Trim less often, or with a longer grace period."
        )

    def _upload(self, snapshot: Snapshot, manifest: bytes, generation: int) -> Artifact:
        sha256 = hashlib.sha256(manifest).hexdigest()
        location = location_of(generation, snapshot.cursor, sha256)

        def parts() -> Iterator[tuple[str, bytes]]:
            for number, file in enumerate(snapshot.files):
                yield from self._parts_of(snapshot.folder, number, file)
            # Last, so that a payload with a manifest is whole.
            yield MANIFEST, manifest

        def put(part: tuple[str, bytes]) -> None:
            self._store.put(f"{self._prefix}{location}/{part[0]}", part[1])

        for _ in _ahead(put, parts(), self._workers):
            pass
        return Artifact(
            location=location,
            cursor=snapshot.cursor,
            kind=snapshot.kind,
            kind_version=snapshot.kind_version,
            size=sum(file.size for file in snapshot.files),
            part=self._part,
            sha256=sha256,
            published=self._clock.now(),
        )

    def _parts_of(self, folder: str, number: int, file: SnapshotFile) -> Iterator[tuple[str, bytes]]:
        """The pieces of a file with their names; what is uploaded is what is hashed."""
        digest, path = hashlib.sha256(), f"{folder}/{DATA}/{file.path}"
        for index, start in enumerate(range(0, file.size, self._part)):
            piece = self._disk.read(path, start, min(self._part, file.size - start))
            digest.update(piece)
            yield _part_name(number, index), piece
        if self._disk.size(path) != file.size or digest.hexdigest() != file.sha256:
            raise CorruptData(
                f"The snapshot {folder} is damaged: {DATA}/{file.path} was altered. Nothing was published; take "
                "another snapshot."
            )

    def export(
        self,
        store: Store,
        lease: Lease | None = None,
        *,
        scratch: Address,
        pause: float = 0.0,
        replace: bool = False,
    ) -> Publication:
        """Publish a store's state, unless as much is published already, or something within ``pause`` seconds.

        With a ``lease`` only its holder does the work: of many identical consumers that call this again and again,
        one. It is acquired if it is free, kept while the work is under way, and not released when that went well;
        whoever loses it does not move the pointer (``Fenced``). The snapshot is sealed in a folder of its own below
        ``scratch``, which is removed again.
        """
        scratch = as_folder(scratch)
        if lease is None:
            return self._export(store, None, scratch, pause=pause, replace=replace)
        if not lease.try_acquire():
            return Publication("busy")
        try:
            with lease.kept():
                return self._export(store, lease, scratch, pause=pause, replace=replace)
        except Fenced:
            raise
        except Exception:
            lease.release()  # another consumer may do better, and need not wait for it
            raise

    def _export(self, store: Store, lease: Lease | None, scratch: str, *, pause: float, replace: bool) -> Publication:
        at, current = store.standing().cursor, self.newest()
        if at is None:
            raise NotReady(f"The store has no cursor yet, so that there is nothing to publish to {self._cell.where}.")
        if current is not None and not (replace and current.cursor.log_id != at.log_id):
            # One that seems to be of the future was published by a clock that was wrong.
            recent = -TOLERANCE <= self._clock.now() - current.published < pause * SECOND
            if recent or not is_newer(at, current):
                return Publication("current", current.cursor)
        with scratch_folder(f"{scratch}/export", disk=self._disk, chance=self._chance) as hidden:
            store.export_to(f"{hidden}/snapshot")
            # The lease only saves work: what makes two exporters at once harmless is the pointer's own rule.
            guard = None if lease is None else lease.ensure
            return Publication("published", self.publish(f"{hidden}/snapshot", replace=replace, guard=guard))

    # --- fetching ----------------------------------------------------------------------------------------------

    def fetch(self, dest: Address) -> Snapshot:
        """Bring the newest published snapshot here, as a sealed folder again; on failure ``dest`` is as it was.

        ``NotFound`` if nothing is published, ``AlreadyExists`` unless ``dest`` is absent or empty, ``CorruptData`` if
        an object is not what it was.
        """
        dest = as_folder(dest)
        for _ in range(_TRIES):
            artifact = self.newest()
            if artifact is None:
                raise NotFound(f"Nothing is published at {self._cell.where}: publish a snapshot first.")
            try:
                return self._fetch(artifact, dest)
            except _Trimmed as error:
                now = self.newest()
                if now is not None and now.location == artifact.location:
                    raise CorruptData(
                        f"{self._store.url}/{self._prefix}{artifact.location} is damaged: {error} The pointer names "
                        "it. Publish another snapshot."
                    ) from error
        raise Contended(f"{self._cell.where} moved on {_TRIES} times while a snapshot was fetched. Try again.")

    def _fetch(self, artifact: Artifact, dest: str) -> Snapshot:
        place = f"{self._prefix}{artifact.location}"
        manifest = bytes(self._get(f"{place}/{MANIFEST}"))
        if hashlib.sha256(manifest).hexdigest() != artifact.sha256:
            raise CorruptData(f"{self._store.url}/{place}/{MANIFEST} is not what was published.")
        snapshot = decode_snapshot(manifest, f"{self._store.url}/{place}/{MANIFEST}", dest)
        if snapshot.cursor != artifact.cursor:
            raise CorruptData(f"{self._store.url}/{place}/{MANIFEST} tells another cursor than the pointer.")
        with staged(dest, disk=self._disk, chance=self._chance) as hidden:
            self._disk.make_folders(f"{hidden}/{DATA}")
            names = (
                f"{place}/{_part_name(number, index)}"
                for number, file in enumerate(snapshot.files)
                for index in range(-(-file.size // artifact.part))
            )
            with contextlib.closing(_ahead(self._get, names, self._workers)) as parts:
                for file in snapshot.files:
                    self._write(f"{hidden}/{DATA}/{file.path}", file, parts, place)
            self._disk.write_new(f"{hidden}/{MANIFEST}", [manifest])
        return snapshot

    def _get(self, path: str) -> bytes | memoryview:
        try:
            return self._store.get(path).data
        except NotFound as error:
            raise _Trimmed(str(error)) from error

    def _write(self, path: str, file: SnapshotFile, parts: Iterator[bytes | memoryview], place: str) -> None:
        """Write one file from the parts that come next; what is written is what is hashed."""
        if "/" in file.path:
            self._disk.make_folders(path.rpartition("/")[0])
        digest, left = hashlib.sha256(), file.size
        opened = self._disk.open_append(path)
        try:
            while left > 0:
                piece = next(parts, b"")
                if not piece:
                    break
                digest.update(piece)
                opened.write([piece])
                left -= len(piece)
            opened.sync()
        finally:
            opened.close()
        if left or digest.hexdigest() != file.sha256:
            raise CorruptData(
                f"{self._store.url}/{place} is damaged: the parts of {file.path} are not what was published. Publish "
                "another snapshot."
            )

    # --- trimming ----------------------------------------------------------------------------------------------

    def trim(self) -> list[str]:
        """Delete payloads that were superseded, or left unfinished, a grace period ago; returns which.

        Never one that the pointer names or may yet name: an exporter whose unfinished payload is given up here is
        refused when it wants to point at it, and uploads again.
        """
        try:
            pointer = self._cell.read().value
        except NotFound:
            return []
        now = cautious_now(self._store, f"{self._prefix}clock/now", clock=self._clock)
        before = now - round(self._grace * SECOND)
        newest: dict[str, int] = {}
        objects: dict[str, list[str]] = {}
        for item in self._store.list(f"{self._prefix}payloads/"):
            location = "/".join(item.path.removeprefix(self._prefix).split("/")[:3])
            if generation_of(location) is not None:
                newest[location] = max(newest.get(location, 0), item.modified)
                objects.setdefault(location, []).append(item.path)
        generation = abandoned(pointer, newest, before=before)
        if generation is not None:
            # First nobody can point at them any more; only then are they deleted.
            pointer = self._cell.update(self._op(), lambda now: give_up(now, generation))
        old = [location for location, modified in newest.items() if modified <= before]
        sweep = plan_sweep(pointer, old, before=before)
        gone = [*sweep.superseded, *sweep.unlisted]
        # The manifest goes first ("M" is after the digits): a payload that has one is whole.
        for _ in _ahead(
            self._store.delete,
            (path for location in gone for path in reversed(objects.get(location, []))),
            self._workers,
        ):
            pass
        if sweep.superseded:
            self._cell.update(self._op(), lambda now: forget(now, sweep.superseded))
        return gone

    def _trim_quietly(self) -> None:
        try:
            self.trim()
        except StorageError as error:
            _LOGGER.warning("Superseded snapshots at %s stay for now: %s", self._cell.where, error)

    def _pointer(self) -> Pointer:
        try:
            return self._cell.read().value
        except NotFound:
            return Pointer()

    def _made(self) -> Pointer:
        """The pointer, created if there is none."""
        try:
            return self._cell.read().value
        except NotFound:
            with contextlib.suppress(AlreadyExists):
                return self._cell.create(self._op(), Pointer())
        return self._cell.read().value

    def _op(self) -> OpId:
        return OpId(self._chance.uuid())


def _part_name(file: int, index: int) -> str:
    return f"{file:08d}-{index:08d}"


def _ahead(work: Callable[[T], R], items: Iterable[T], workers: int) -> Generator[R]:
    """The results of some work in the order of its items, with ``workers`` of them under way and no more."""
    with ThreadPoolExecutor(workers, thread_name_prefix="strandline-artifacts") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
