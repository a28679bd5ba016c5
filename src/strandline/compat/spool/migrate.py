"""Migration of a spool of older versions into a write-ahead log."""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Final, NamedTuple, NoReturn
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.compat.spool.format import (
    SPOOL,
    SPOOL_SLOTS,
    LegacyEnding,
    LegacyScanner,
    LegacyStop,
    SpoolRun,
    decode_slots,
    frame_behind,
    runs,
    spool_records,
)
from strandline.compat.spool.renumbering import OLD_LSN, Renumbering, plan_renumbering
from strandline.errors import AlreadyExists, CorruptData, Fenced, InvalidInput, NotFound, StorageError, WrongKind
from strandline.formats.wal.folder import SlotsFile
from strandline.log.slots.rules import check_name, invalidate
from strandline.log.wal.log import WalLog
from strandline.log.wal.migrated_spool import note_migrated, refuse_changed_spool
from strandline.log.wal.names import IDENTITY, LOCK, NEW, SLOTS_FILE, data_name
from strandline.log.wal.recover.repair import begin, record_of_log
from strandline.log.wal.slots import write_slots_file
from strandline.model.addresses import Address, as_folder
from strandline.model.cursor import Bounds
from strandline.model.records import HEADERS, RECORD_SCHEMA, TIMESTAMP, no_headers
from strandline.model.retention import InvalidReason, SlotState
from strandline.storage.disk import Disk, exists
from strandline.storage.env import Env

MIGRATING: Final = ".migrating"
"""Suffix of the temporary folder in which the log is built."""

LAST_LSN: Final = (1 << 63) - 1
"""Offsets have 63 bits."""
LAST_TIME: Final = ((1 << 63) - 1) // 1000
"""The last valid millisecond: times are microseconds of 63 bits."""

_FRAME_BYTES: Final = 1 << 20
_FRAME_RECORDS: Final = 1 << 14
_GROUP_BYTES: Final = 16 << 20
"""Bytes written between two syncs."""

_LOGGED_GAPS: Final = 100
"""Number of gaps that are logged one by one."""

_LOGGER: Final = logging.getLogger(__name__)


def folder_of(path: Address, *, migrate: bool, env: Env, renumber: bool = False, valid_prefix: bool = False) -> str:
    """The folder of the log at ``path``; with ``migrate``, a spool of that name is moved there.

    ``WrongKind`` if there is a spool, but no folder, without ``migrate``: an empty log would hide the spool.
    ``Diverged`` if the spool was written since it was migrated.
    """
    named = as_folder(path).removesuffix(SPOOL)
    folder = named.rstrip("/") or named  # 'orders/' has the spool of 'orders'
    if exists(f"{folder}/{IDENTITY}", disk=env.disk) or not exists(f"{folder}{SPOOL}", disk=env.disk):
        refuse_changed_spool(folder, disk=env.disk)
        return folder
    if not migrate:
        raise WrongKind(
            f"{folder}{SPOOL} is a spool of an older version, and no write-ahead log: open it with migrate, or "
            f"use 'strandline wal migrate', which moves its records and slots into the folder {folder} and keeps the "
            "file."
        )
    migrate_spool(folder, env=env, renumber=renumber, valid_prefix=valid_prefix)
    return folder


def migrate_spool(folder: str, *, env: Env, renumber: bool = False, valid_prefix: bool = False) -> Renumbering | None:
    """Create the log in this folder from the spool beside it, whole and with its slots, or not at all.

    After a crash at any moment this can be repeated. The spool and its slots are not changed. Of two processes the
    second waits, and finds it done.

    The log holds the spool up to its torn tail, if it has one; with ``valid_prefix`` also up to damage that records
    follow. What is left out is logged as a warning. An empty spool becomes an empty log, which continues after the
    highest slot: its consumer has applied records up to there that were trimmed since. A slot that needs missing
    records is invalid in the log (``wal-removed``).

    With ``renumber`` records whose lsns leave gaps or go back get new ones, in the order of the file, and keep the old
    ones in the header ``spool-lsn``; slots are moved so that no consumer misses a record. Each gap is logged, and the
    renumbering is returned; None if none was needed.

    Nothing is changed if it raises: ``Fenced`` if the files were written meanwhile; ``CorruptData`` for damage that
    records follow, for lsns that are not consecutive, terms that decrease, damaged slots, a valid slot past the end,
    and a file that does not begin with a record; ``InvalidInput`` for records that a log cannot hold.
    """
    with env.disk.locked(f"{folder}{MIGRATING}.lock"):
        if exists(f"{folder}/{IDENTITY}", disk=env.disk):
            return None  # another process was faster
        hidden = f"{folder}{MIGRATING}"
        for path in (folder, hidden):
            _refuse_file(path, folder, disk=env.disk)
        _refuse_other_content(folder, disk=env.disk)
        env.disk.remove_folder(hidden)  # leftovers of an interrupted migration
        try:
            source = _Spool.read(folder, disk=env.disk)
            if not valid_prefix:
                source.check_whole()
            renumbering = _make(source, hidden, env=env, log_id=env.chance.uuid(), renumber=renumber)
            source.check_unchanged(disk=env.disk)
            _put_in_place(hidden, folder, disk=env.disk)
        except Exception:
            with contextlib.suppress(StorageError):  # the next migration removes it
                env.disk.remove_folder(hidden)
            raise
        return renumbering


# --- folder ----------------------------------------------------------------------------------------------------


def _named(path: str, *, disk: Disk, is_folder: bool) -> bool:
    """Whether something has this name: a folder, or a file or link of whatever kind."""
    name = PurePath(path)
    rows = [row for row in disk.scan(str(name.parent)) if row.name == name.name]
    return any((row.is_folder and not row.is_link) is is_folder for row in rows)


def _refuse_file(path: str, folder: str, *, disk: Disk) -> None:
    if _named(path, disk=disk, is_folder=False):
        raise AlreadyExists(
            f"{path} is a file or a link, and the migration of {folder}{SPOOL} makes a folder of that name: nothing "
            "was changed. Move it away, and migrate again."
        )


def _refuse_other_content(folder: str, *, disk: Disk) -> None:
    """Refuse a folder with content other than the leftovers of an interrupted creation of a log."""
    left = (LOCK, SLOTS_FILE, f"{SLOTS_FILE}{NEW}", f"{IDENTITY}{NEW}", data_name(0))
    names = [row.name for row in disk.scan(folder) if row.name not in left]
    strange = names[0] if names else record_of_log(folder, disk=disk)
    if strange:
        raise InvalidInput(
            f"The log from {folder}{SPOOL} has to be created in {folder}, which has {strange} in it: move the "
            "folder away, and migrate again."
        )


def _put_in_place(hidden: str, folder: str, *, disk: Disk) -> None:
    """Rename the finished, durable log into place; afterwards its name is durable, too."""
    with contextlib.ExitStack() as held:
        if disk.scan(folder):
            if not held.enter_context(disk.try_locked(f"{folder}/{LOCK}")):
                raise Fenced(f"Another process is creating a log in {folder}: close it there, and migrate again.")
            _refuse_other_content(folder, disk=disk)
            disk.remove_folder(folder)
        disk.rename(hidden, folder)
    disk.sync_folder(str(PurePath(folder).parent))


# --- the log ---------------------------------------------------------------------------------------------------


class _Spool(NamedTuple):
    """The spool and its slots, as they were when they were read."""

    spool: str
    beside: str
    data: memoryview
    slots: bytes | None
    """None without a file of slots."""

    @classmethod
    def read(cls, folder: str, *, disk: Disk) -> _Spool:
        """Read both; first the slots, so that none of them is past the spool's end even if it is written meanwhile."""
        spool, beside = f"{folder}{SPOOL}", f"{folder}{SPOOL_SLOTS}"
        if _named(beside, disk=disk, is_folder=True):
            raise InvalidInput(f"{beside} is a folder, and no file of slots: move it away, and migrate again.")
        slots = _read_if_there(beside, disk=disk)
        return cls(spool, beside, memoryview(disk.read(spool)), slots)

    def check_whole(self) -> None:
        """``CorruptData`` if records follow damage: only a torn tail is what a crash leaves."""
        scanner = LegacyScanner(self.data)
        records = sum(1 for _ in scanner)
        behind = frame_behind(self.data, scanner.stop)
        if behind is not None:
            raise CorruptData(
                f"{self.spool} is damaged at byte {scanner.stop.at:,} ({scanner.stop.why}), and records follow from "
                f"byte {behind:,} on; nothing was changed. Restore the file; or migrate only the records before the "
                f"damage, {records:,}, without those behind it ('strandline wal migrate --valid-prefix')."
            )

    def check_unchanged(self, *, disk: Disk) -> None:
        """``Fenced`` if either was written since: the files have more than was read."""
        if disk.size(self.spool) != len(self.data) or _read_if_there(self.beside, disk=disk) != self.slots:
            raise Fenced(
                f"{self.spool} is written by another program: stop that, and migrate again. Nothing was changed."
            )


def _read_if_there(path: str, *, disk: Disk) -> bytes | None:
    try:
        return bytes(disk.read(path))
    except NotFound:
        return None


def _make(source: _Spool, hidden: str, *, env: Env, log_id: UUID, renumber: bool) -> Renumbering | None:
    """Durably build the log, under a temporary name."""
    spool, beside, data, _ = source
    slots = _spool_slots(source.slots, beside, now=env.clock.now())
    renumbering = None
    if renumber:
        renumbering = plan_renumbering(array("Q", (frame.lsn for frame in LegacyScanner(data))), LAST_LSN)
    if renumbering is not None:
        start, slots = renumbering.start, renumbering.slots(slots)
    elif data:
        first = next(iter(LegacyScanner(data)), None)
        start = 0 if first is None else _checked_first(first.lsn, spool)
    else:
        start = max((slot.position for slot in slots), default=0)
    if start > LAST_LSN:
        raise InvalidInput(f"{beside} has a slot at {start:,}, but no log reaches so far: correct the slot.")
    env.disk.make_folders(hidden)
    begin(hidden, SlotsFile(log_id, start), (), disk=env.disk)
    with WalLog.open(hidden, create=False, tail_bytes=0, pending_bytes=_GROUP_BYTES, background=False, env=env) as log:
        end = _copy(data, start, log, spool, renumbering)
    if renumbering is not None:
        _warn_of_gaps(renumbering, spool)
    slots = _settled(slots, Bounds(start, end), now=env.clock.now(), where=beside)
    note_migrated(hidden, size=len(data), end=end, disk=env.disk)
    # Syncs the folder, too: every name in it is durable before its own is.
    write_slots_file(hidden, SlotsFile(log_id, start, tuple(slots)), disk=env.disk)
    return renumbering


def _copy(data: memoryview, start: int, log: WalLog, spool: str, renumbering: Renumbering | None) -> int:
    """Append every record; returns the offset after the last one, when they are durable."""
    scanner = LegacyScanner(data)
    now = log.env.clock.now() // 1000
    offset, term, clamped, handle = start, 0, 0, None
    records = spool_records(scanner)
    if renumbering is not None:
        records = renumbering.records(records)
    for run in runs(records, max_count=_FRAME_RECORDS, max_bytes=_FRAME_BYTES):
        if run.first != offset + 1 or run.term < term or run.first + len(run.payloads) - 1 > LAST_LSN:
            _refuse_run(run, offset, term, data, offset - start, spool)
        # A frame has the time of its latest record, so that a search by time skips none; but a time in the future would
        # be repeated by all later frames.
        latest = max(run.timestamps)
        clamped += 0 if latest <= LAST_TIME else sum(time > LAST_TIME for time in run.timestamps)
        try:
            handle = log.append_batch(
                _batch_of(run, renumbering), expect=offset, term=run.term, timestamp=min(latest, now)
            )
        except InvalidInput as error:  # only a run of one record can be that large
            raise InvalidInput(
                f"{spool} has a record that fits no frame, lsn {run.first} with {run.payloads[0].nbytes:,} bytes; "
                "nothing was changed: it can be read there only by a program of the older version."
            ) from error
        offset, term = offset + len(run.payloads), run.term
    if handle is not None:
        handle.result()
    _warn_of_remainder(scanner.stop, data, spool)
    if clamped:
        _LOGGER.warning(
            "%s has %d records with a time out of range; in the log they have the latest valid time.", spool, clamped
        )
    return offset


def _batch_of(run: SpoolRun, renumbering: Renumbering | None) -> pa.RecordBatch:
    count = len(run.payloads)
    stored = pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(array("Q", run.timestamps))])
    milliseconds = pc.min_element_wise(stored, pa.scalar(LAST_TIME, pa.uint64())).cast(pa.int64())
    columns = [
        pc.multiply(milliseconds, 1000).view(TIMESTAMP),
        pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))]),
        pa.nulls(count, pa.binary()),
        # As bytes: Arrow leaks each view that it gets, and with it the whole spool.
        pa.array(list(map(bytes, run.payloads)), pa.binary()),
        no_headers(count) if renumbering is None else _lsn_headers(renumbering.old_lsns(run.first, count)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _lsn_headers(lsns: Sequence[int]) -> pa.Array:
    texts = pa.array(lsns, pa.uint64()).cast(pa.string()).cast(pa.binary())
    names = pa.repeat(pa.scalar(OLD_LSN), len(lsns))
    return pa.MapArray.from_arrays(pa.array(range(len(lsns) + 1), pa.int32()), names, texts).cast(HEADERS)


def _checked_first(lsn: int, spool: str) -> int:
    if not 1 <= lsn <= LAST_LSN:
        raise CorruptData(
            f"{spool} is damaged at byte 0: its first record has lsn {lsn}, which no record has; nothing was changed. "
            "Restore the file, or move it away to begin a new log."
        )
    return lsn - 1


def _refuse_run(run: SpoolRun, offset: int, term: int, data: memoryview, index: int, spool: str) -> NoReturn:
    frame = next(islice(LegacyScanner(data), index, None))
    remedy = ""
    if run.first != offset + 1:
        why = f"lsn {run.first} is there instead of {offset + 1}"
        remedy = (
            "; or renumber all its records, with a report of each gap ('strandline wal migrate --renumber', "
            "or renumber=True in a program)"
        )
    elif run.term < term:
        why = f"lsn {run.first} is of term {run.term}, but the one before it of term {term}"
    else:
        why = f"lsns continue from {run.first}, but none may be above {LAST_LSN}"
    raise CorruptData(
        f"{spool} is damaged at byte {frame.start}, in record {index} counted from 0: {why}; nothing was changed. "
        f"Restore the file, or migrate a copy that is cut at byte {frame.start}, which holds the records before "
        f"it{remedy}."
    )


def _warn_of_remainder(stop: LegacyStop, data: memoryview, spool: str) -> None:
    """Warn of bytes that were not migrated; ``CorruptData`` if none were, and a crash cannot have caused that."""
    if not stop.at and stop.ending not in (LegacyEnding.CLEAN, LegacyEnding.TORN):
        raise CorruptData(
            f"{spool} does not begin with a record ({stop.why}), so that it may be no spool at all; nothing was "
            "changed. Restore the file, or move it away to begin a new log."
        )
    if stop.ending is not LegacyEnding.CLEAN:
        _LOGGER.warning(
            "%s is valid up to byte %d, which was migrated; the %d bytes after that are in this file only: "
            "%s (%s).", spool, stop.at, len(data) - stop.at, stop.why, stop.ending.value,
        )  # fmt: skip


def _warn_of_gaps(renumbering: Renumbering, spool: str) -> None:
    for gap in renumbering.gaps[:_LOGGED_GAPS]:
        _LOGGER.warning("%s has a gap before record %d: %s.", spool, gap.index, gap)
    _LOGGER.warning(
        "%s was renumbered: %d records, %d gaps with %d lsns missing; each record keeps its lsn in the header %r.",
        spool, len(renumbering.lsns), len(renumbering.gaps), renumbering.missing, OLD_LSN,
    )  # fmt: skip


# --- slots -----------------------------------------------------------------------------------------------------


def _spool_slots(data: bytes | None, path: str, *, now: int) -> list[SlotState]:
    """The slots of a spool; none without a file. ``InvalidInput`` for a name that no slot of a log may have."""
    slots = [] if data is None else decode_slots(data, path, now=now)
    for slot in slots:
        try:
            check_name(slot.name)
        except InvalidInput as error:
            raise InvalidInput(f"{path} has a slot that no log may have: {error}") from error
    return slots


def _settled(slots: Iterable[SlotState], bounds: Bounds, *, now: int, where: str) -> list[SlotState]:
    """The slots of the log: those that need records which it no longer retains are invalid from now on.

    ``CorruptData`` for a valid slot past the end: its consumer got records that are missing here, and would
    skip the next ones with their numbers.
    """
    settled = []
    for slot in slots:
        if slot.pins and slot.position > bounds.next:
            raise CorruptData(
                f"{where} has slot {slot.name!r} at {slot.position}, but the spool ends at {bounds.next}: records are "
                "lost that its consumer has; nothing was changed. Restore the spool, or remove the slot from "
                "the file and bootstrap its consumer again."
            )
        if slot.pins and slot.position < bounds.first:
            _LOGGER.warning(
                "Slot %r of %s needs records from offset %d on, but the spool begins at %d: it is invalid, and its "
                "consumer has to bootstrap again.", slot.name, where, slot.position, bounds.first,
            )  # fmt: skip
            settled.append(invalidate(slot, slot, InvalidReason.WAL_REMOVED, now))
        else:
            settled.append(slot)
    return settled
