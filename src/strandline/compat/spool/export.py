"""Export of a log as a spool for programs of older versions: a single file, and its slots beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.compat.spool.format import SPOOL, SPOOL_SLOTS, encode_record_frame
from strandline.errors import AlreadyExists, Fenced, InvalidInput, NotFound, StorageError
from strandline.formats.wal.slots import slot_fields
from strandline.log.reading import read_spans
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import Address, as_folder
from strandline.model.cursor import Bounds, Cursor
from strandline.model.records import Op
from strandline.model.retention import SlotState
from strandline.storage.disk import DISK, AppendFile, Disk, replace_file

_EXPORTING: Final = ".exporting"
"""Behind a file's name until it is whole."""

_PIECE: Final = 1 << 20
"""About so many bytes are written at a time."""
_PARTS: Final = 3 << 14
"""At most so many pieces of frames wait for that."""


@dataclass(frozen=True, slots=True)
class SpoolExport:
    """What was written."""

    path: str
    """The spool."""
    slots_path: str
    records: int
    first: int
    """The lsn of its first record; one above ``last`` if there is none."""
    last: int
    size: int
    """The bytes of the spool."""
    slots: int


def export_spool(
    log: WalLog | WalReader,
    path: Address,
    *,
    disk: Disk = DISK,
    told: Callable[[int], None] | None = None,
) -> SpoolExport:
    """Durably write everything that is retained now as a spool of version-3 frames, with the log's slots beside it.

    ``path`` is the spool's name, with ``.logical.wal`` behind it or without. It appears as a whole, and only when its
    slots are there: after a crash there is no spool, and this can be done again. The log goes on meanwhile, and nothing
    of it is changed. ``told`` is given the number of records written so far, now and then.

    Records keep lsn, term, payload and time, to the millisecond. Programs that read spools put a frame's term into a
    payload that is a change record of another term.

    ``AlreadyExists`` if there is such a spool, ``Fenced`` if another process writes it, ``CursorExpired`` if the log
    was trimmed meanwhile; ``InvalidInput`` with the offset for what a spool cannot hold: records that are more than a
    value, and the end of a log that was used and retains nothing. Nothing is left behind then.
    """
    named = PurePath(as_folder(path).removesuffix(SPOOL))
    base = f"{named.parent}/{named.name}"
    spool, beside = f"{base}{SPOOL}", f"{base}{SPOOL_SLOTS}"
    # First the slots, then the end: no slot is behind it, though the log goes on.
    slots, slots_data = _slots(log)
    bounds = log.bounds()
    if bounds.next and not bounds.count:
        raise InvalidInput(
            f"The log in {log.folder} retains no records, and a spool cannot tell that it goes on at lsn "
            f"{bounds.next + 1}: append a record first."
        )
    _refuse_taken(spool, beside, slots_data, disk=disk)
    temporary = f"{spool}{_EXPORTING}"
    with disk.try_locked(temporary) as is_mine:
        if not is_mine:
            raise Fenced(f"Another process is writing {spool}: wait for it, or name another file.")
        try:
            # Again: who held the lock may have been done just now, and a rename would replace what it made.
            _refuse_taken(spool, beside, slots_data, disk=disk)
            size = _write(log, bounds, temporary, disk=disk, told=told)
            replace_file(disk, beside, slots_data, temporary=f"{beside}{_EXPORTING}")
            disk.rename(temporary, spool)
        except Exception:
            with contextlib.suppress(StorageError):
                disk.remove(temporary)
            raise
    disk.sync_folder(str(PurePath(spool).parent))
    return SpoolExport(spool, beside, bounds.count, bounds.first + 1, bounds.next, size, len(slots))


def _refuse_taken(spool: str, beside: str, slots: bytes, *, disk: Disk) -> None:
    """Refuse to replace a file; the same slots without their spool are what a crash has left, and no obstacle."""
    with contextlib.suppress(NotFound):
        disk.size(spool)
        raise AlreadyExists(f"{spool} exists already: move it away, or name another file.")
    with contextlib.suppress(NotFound):
        if disk.read(beside) != slots:
            raise AlreadyExists(f"{beside} exists already and has other slots: move it away, or name another file.")


def _write(
    log: WalLog | WalReader, bounds: Bounds, path: str, *, disk: Disk, told: Callable[[int], None] | None
) -> int:
    file = disk.open_append(path)
    with contextlib.closing(file):
        file.cut(0)  # what an interrupted export has left
        return _fill(file, log, bounds, told)


def _fill(file: AppendFile, log: WalLog | WalReader, bounds: Bounds, told: Callable[[int], None] | None) -> int:
    parts: list[bytes | memoryview] = []
    waiting = size = 0
    lsn = bounds.first
    for term, batch in _batches(log, bounds):
        times = batch.column("timestamp").view(pa.int64()).to_pylist()
        for value, time in zip(batch.column("value").to_pylist(), times, strict=True):
            lsn += 1
            parts += encode_record_frame(term, lsn, time // 1000, value)
            waiting += len(value)
            if waiting >= _PIECE or len(parts) >= _PARTS:
                size += _flush(file, parts)
                waiting = 0
                if told is not None:
                    told(lsn - bounds.first)
    size += _flush(file, parts)
    file.sync()
    if told is not None:
        told(lsn - bounds.first)
    return size


def _flush(file: AppendFile, parts: list[bytes | memoryview]) -> int:
    data = b"".join(parts)
    parts.clear()
    file.write([data])
    return len(data)


def _batches(log: WalLog | WalReader, bounds: Bounds) -> Iterator[tuple[int, pa.RecordBatch]]:
    """All records in order, with their terms; every one of them is a value and nothing else."""
    for behind, batches in read_spans(log, Cursor(log.log_id, bounds.first), bounds.next, None):
        for batch in batches:
            _refuse_more_than_values(batch)
            yield behind.term, batch


def _refuse_more_than_values(batch: pa.RecordBatch) -> None:
    offsets, _, ops, keys, values, headers = batch.columns
    plain = keys.null_count == headers.null_count == batch.num_rows and not values.null_count
    if plain and pc.max(ops).as_py() == Op.PUT:
        return
    more = pc.or_(pc.is_valid(keys), pc.is_valid(headers))
    less = pc.or_(pc.is_null(values), pc.not_equal(ops, int(Op.PUT)))
    at = offsets[pc.index(pc.or_(more, less), value=True).as_py()].as_py()
    raise InvalidInput(
        f"Offset {at} (lsn {at + 1}) cannot be exported: a spool keeps values and nothing else, and this record has a "
        "key, headers, another operation than put, or no value."
    )


def _slots(log: WalLog | WalReader) -> tuple[list[SlotState], bytes]:
    slots = list(log.slots.list())
    fields = {"slots": [{**slot_fields(slot), **_older_fields(slot)} for slot in slots]}
    return slots, json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def _older_fields(slot: SlotState) -> dict[str, Any]:
    """The same under the names that older programs know: they drop a slot that lacks one of its two lsns."""
    fields: dict[str, Any] = {
        "restart_lsn": slot.position,
        "confirmed_lsn": slot.position,
        "last_seen_at_unix_ms": slot.last_seen // 1000,
    }
    if slot.invalid is not None:
        fields["invalidation_reason"] = str(slot.invalid.reason)
        fields["invalidated_at_unix_ms"] = slot.invalid.at // 1000
    return fields
