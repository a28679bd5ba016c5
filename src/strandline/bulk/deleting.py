"""Deletion of a whole log: marks it as being deleted, deletes its objects, and removes the mark last.

So a log is whole, or its deletion has begun and can be finished; nothing that was killed leaves a part of a log that
seems to be one. The identity of a new log at the same place is another one: cursors of the old log are refused there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput, NotALog, NotFound, Unsupported
from strandline.formats.object.head import HeadCodec
from strandline.formats.object.identity import decode_identity
from strandline.log.folders import FolderKind, check_missing, contents
from strandline.log.object.head.edits import Outdated, begin_deletion
from strandline.log.object.log import IDENTITY, ObjectLog
from strandline.log.wal.names import DATA, INDEX, LOCK, MARK, NEW, REWIND, SLOTS_FILE, TORN, hold_lock
from strandline.log.wal.recover.repair import write_identity
from strandline.log.wal.recover.scan_tail import read_log_json, read_slots_file
from strandline.model.addresses import Address, ParsedAddress
from strandline.model.arguments import checked
from strandline.model.head import Head
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import COLD_FILE, COLD_FOLDER
from strandline.model.stamp import OpId
from strandline.opening import log_place
from strandline.storage.cell import StoreCell
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectInfo, ObjectStore
from strandline.storage.objects.urls import store_at
from strandline.storage.task_pool import side_by_side
from strandline.tier.attachment import ColdCell

_HEAD: Final = "head"
_FOLDERS: Final = ("batches/", "chunks/", "trimmed/", "staged/", "dead-letter/", "sources/", "clock/", "slots/")
"""The objects of an object log, but those that are deleted last."""
_SPOOL: Final = "spool.json"
_AT_ONCE: Final = 1000
_THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Deletion:
    """What the deletion of a log removes, or has removed."""

    url: str
    log_id: UUID | None
    """None if an earlier deletion has removed the identity already."""
    objects: int
    """Objects of an object log, files of a write-ahead log; those of a cold tier that goes are included."""
    bytes: int
    slots: tuple[str, ...]
    """The slots, without that of the tierer."""
    cold_tier: str | None
    """The address of the cold tier; None if there is none."""
    keeps_cold_tier: bool
    """Whether its segments and events stay, because they are not beside the log: other logs may have theirs there."""
    deleted: bool
    """Whether it is done; False of a dry run."""


@checked
def delete(
    address: Address | ObjectStore,
    *,
    force: bool = False,
    dry_run: bool = False,
    options: Mapping[str, str] | None = None,
    on_progress: Callable[[int], object] | None = None,
    env: Env = SYSTEM,
) -> Deletion:
    """Delete an object log or a write-ahead log, with all records, slots, dead letters, and its cold tier beside it.

    Refused, as ``InvalidInput`` that names them, while valid slots pin the log, unless with ``force``; ``Fenced`` while
    a process has the write-ahead log open. Producers that still run fail, and cannot bring the log back. If it is
    killed, the log is still whole, or every call says that its deletion has begun: call this again. Other files and
    objects at the address stay, and so does a cold tier at an address of its own. Create no log there before this has
    returned.

    ``dry_run`` changes nothing. ``on_progress`` gets the number of objects deleted so far. ``NotALog`` if there is
    none, ``Unsupported`` for the log of a node and for its folders.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-delete", create=True)
    >>> slot = log.slots.create("billing", 0)
    >>> sl.bulk.delete(log.store)
    Traceback (most recent call last):
    strandline.errors.InvalidInput: The log at memory://doctest-delete is pinned by slot billing; nothing was deleted. \
Drop it first, or delete the log by force.
    >>> sl.bulk.delete(log.store, force=True).deleted
    True
    """
    place = None if isinstance(address, ObjectStore) else log_place(address)
    if place is not None and place.is_node:
        raise Unsupported(
            f"{place.text} is the log of a node, whose copies are on several machines: nothing was deleted. Stop its "
            "nodes, and remove their folders."
        )
    progress = on_progress or (lambda _: None)
    folder = None if place is None else _wal_folder(place, env.disk)
    if folder is not None:
        return _WalDeletion(folder, env).run(force=force, dry_run=dry_run, on_progress=progress)
    return _ObjectDeletion(store_at(address, options), env).run(force=force, dry_run=dry_run, on_progress=progress)


def _wal_folder(place: ParsedAddress, disk: Disk) -> str | None:
    if place.folder is None:
        return None
    kinds = contents(place.folder, disk=disk).kinds
    if not place.is_wal and FolderKind.WAL not in kinds:
        return None
    check_missing(place.folder, FolderKind.WAL, disk=disk)
    path = Path(place.folder).absolute()
    if FolderKind.NODE in contents(str(path.parent), disk=disk).kinds:
        raise Unsupported(
            f"{place.folder} is the copy of a node in {path.parent}: nothing was deleted. Stop the node, and remove "
            "its folder."
        )
    return place.folder


def _refuse_pinned(url: str, states: Iterable[SlotState]) -> None:
    pinning = [state.name for state in states if state.pins and state.name != TIER_SLOT]
    if pinning:
        one = len(pinning) == 1
        raise InvalidInput(
            f"The log at {url} is pinned by {'slot' if one else 'slots'} {', '.join(pinning)}; nothing was deleted. "
            f"Drop {'it' if one else 'them'} first, or delete the log by force."
        )


class _ObjectDeletion:
    """The deletion of an object log: mark the head, delete all objects but two, the identity, the head."""

    def __init__(self, store: ObjectStore, env: Env) -> None:
        self._store = store
        self._env = env
        self._cell: StoreCell[Head] = StoreCell(store, _HEAD, HeadCodec(deleting=True), env=env)

    def run(self, *, force: bool, dry_run: bool, on_progress: Callable[[int], object]) -> Deletion:
        head = self._head()
        slots = tuple(name for name in head.slots if name != TIER_SLOT)
        with contextlib.suppress(NotFound):
            found = decode_identity(self._store.get(IDENTITY).data, f"{self._store.url}/{IDENTITY}")
            if not head.deleting and not force:
                _refuse_pinned(self._store.url, ObjectLog(self._store, found, env=self._env).slots.list())
        cold, keeps = _cold_tier(self._store, head.log_id, self._env)
        if not dry_run:
            self._begin(head)
        count = size = 0
        for group in self._groups(None if keeps else cold):
            count, size = count + len(group), size + sum(item.size for item in group)
            if not dry_run:
                side_by_side(
                    self._store.delete, [item.path for item in group], threads=_THREADS, name="strandline-delete"
                )
                on_progress(count)
        if not dry_run:
            self._store.delete(IDENTITY)
            if self._cell.read().value.log_id == head.log_id:  # no other log was created here meanwhile
                self._store.delete(_HEAD)
        return Deletion(self._store.url, head.log_id, count + 2, size, slots, cold, keeps, deleted=not dry_run)

    def _head(self) -> Head:
        try:
            return self._cell.read().value
        except NotFound as error:
            raise NotALog(f"There is no log at {self._store.url}: nothing was deleted. Check the address.") from error

    def _begin(self, head: Head) -> None:
        """Mark the head: from here on nothing is listed, read or pinned."""
        try:
            self._cell.update(OpId(self._env.chance.uuid()), lambda now: begin_deletion(now, head.membership))
        except Outdated as error:
            raise InvalidInput(
                f"A slot of the log at {self._store.url} was created or dropped just now; nothing was deleted. Try "
                "again."
            ) from error

    def _groups(self, cold: str | None) -> Iterator[list[ObjectInfo]]:
        """All objects but the identity and the head, in groups; what describes the cold tier after the tier itself."""
        folders = _FOLDERS if cold is None else (*_FOLDERS, f"{COLD_FOLDER}/")
        for folder in folders:
            group: list[ObjectInfo] = []
            for item in self._store.list(folder):
                group.append(item)
                if len(group) == _AT_ONCE:
                    yield group
                    group = []
            yield group
        yield [item for item in self._store.list(COLD_FILE) if item.path == COLD_FILE]


def _cold_tier(store: ObjectStore, log_id: UUID, env: Env) -> tuple[str | None, bool]:
    """The address of the log's cold tier, and whether it stays: it is not in the folder that only this log has."""
    cold = ColdCell(store, log_id, env=env).read()
    if cold is None:
        return None, False
    own = f"{store.url.rstrip('/')}/{COLD_FOLDER}"
    is_own = cold.store.rstrip("/") == own and cold.events.startswith(f"{own}/")
    return cold.store, not is_own


class _WalDeletion:
    """The deletion of a write-ahead log: mark the identity, remove all files but two, the identity, the lock."""

    def __init__(self, folder: str, env: Env) -> None:
        self._folder = folder
        self._disk = env.disk
        self._env = env

    def run(self, *, force: bool, dry_run: bool, on_progress: Callable[[int], object]) -> Deletion:
        with contextlib.ExitStack() as held:
            hold_lock(held, self._folder, disk=self._disk)
            identity = read_log_json(self._folder, disk=self._disk, deleting=True)
            slots: tuple[SlotState, ...] = ()
            if not identity.deleting:
                slots = read_slots_file(self._folder, identity.log_id, disk=self._disk).slots
                if not force:
                    _refuse_pinned(self._folder, slots)
            store = store_at(Path(self._folder).absolute().as_uri(), None)
            cold, keeps = _cold_tier(store, identity.log_id, self._env)
            rows = [row for row in self._disk.scan(self._folder) if _is_own(row)]
            cold_objects = [] if cold is None or keeps else list(store.list(f"{COLD_FOLDER}/"))
            count = len(rows) + len(cold_objects) + 1
            size = sum(row.size for row in rows) + sum(item.size for item in cold_objects)
            if not dry_run:
                write_identity(self._folder, replace(identity, deleting=True), disk=self._disk)
                self._remove(rows, has_cold=bool(cold) and not keeps, on_progress=on_progress)
            names = tuple(slot.name for slot in slots if not slot.dropped and slot.name != TIER_SLOT)
            return Deletion(self._folder, identity.log_id, count, size, names, cold, keeps, deleted=not dry_run)

    def _remove(self, rows: list[FolderRow], *, has_cold: bool, on_progress: Callable[[int], object]) -> None:
        if has_cold:  # before the file that says where it is
            self._disk.remove_folder(f"{self._folder}/{COLD_FOLDER}")
            self._disk.sync_folder(self._folder)
        for number, row in enumerate(rows, 1):
            self._disk.remove(f"{self._folder}/{row.name}")
            on_progress(number)
        self._disk.sync_folder(self._folder)  # all of it, before the identity: that says that the deletion has begun
        self._disk.remove(f"{self._folder}/{IDENTITY}")
        self._disk.sync_folder(self._folder)


def _is_own(row: FolderRow) -> bool:
    """Whether a file belongs to the log, and is removed before the identity.

    The lock stays: another process may wait for it, and two would hold one each if it were made again.
    """
    name = row.name.removesuffix(NEW)
    return (
        not row.is_folder
        and row.name not in (IDENTITY, LOCK)
        and (
            name in (SLOTS_FILE, MARK, REWIND, IDENTITY, COLD_FILE, _SPOOL)
            or (name[:20].isdigit() and name.endswith((DATA, INDEX, TORN)))
        )
    )
