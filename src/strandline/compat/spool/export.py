"""Export of a log as a spool for programs of older versions: a single file, and its slots beside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.compat.spool.format import SPOOL, SPOOL_SLOTS, encode_record_frame
from strandline.errors import AlreadyExists, Fenced, InvalidInput, NotFound, StorageError
from strandline.formats.json.slots import slot_fields
from strandline.log.read.reading import read_spans
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import Address, as_folder
from strandline.model.cursor import Bounds, Cursor
from strandline.model.records import Op
from strandline.model.retention import SlotState
from strandline.storage.disk import AppendFile, Disk, replace_file
from strandline.storage.env import SYSTEM, Env

_EXPORTING: Final = ".exporting"
"""Suffix of a file's name until it is whole."""

_PIECE: Final = 1 << 20
"""Bytes written at a time."""
_PARTS: Final = 3 << 14
"""Largest number of buffered pieces of frames."""


@dataclass(frozen=True, slots=True)
class SpoolExport:
    """Result of an export."""

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
    log: WalLog | WalReader, path: Address, *, env: Env = SYSTEM, on_progress: Callable[[int], object] = lambda _: None
) -> SpoolExport:
    """Durably write everything that is retained now as a spool of version-3 frames, with the log's slots beside it.

    ``path`` is the spool's name, with or without the suffix ``.logical.wal``. It appears as a whole, after its
    slots: after a crash there is no spool, and this can be repeated. Appends may continue meanwhile; the log is not
    changed. ``on_progress`` is called with the number of records written so far.

    Records keep lsn, term, payload and time, to the millisecond. Programs that read spools write a frame's term into a
    payload that is a change record of another term.

    ``AlreadyExists`` if there is such a spool, ``Fenced`` if another process writes it, ``CursorExpired`` if the log
    was trimmed meanwhile; ``InvalidInput`` with the offset for records that a spool cannot hold: those with more than a
    value, and for a used log that retains no record. After an error no file is left.
    """
    named = PurePath(as_folder(path).removesuffix(SPOOL))
    base = f"{named.parent}/{named.name}"
    spool, beside = f"{base}{SPOOL}", f"{base}{SPOOL_SLOTS}"
    # First the slots, then the end: no slot is past it, though appends continue.
    slots, slots_data = _slots(log)
    bounds = log.bounds()
    if bounds.next and not bounds.count:
        raise InvalidInput(
            f"The log in {log.folder} retains no records, and a spool cannot store that it continues at lsn "
            f"{bounds.next + 1}: append a record first."
        )
    _refuse_taken(spool, beside, slots_data, disk=env.disk)
    temporary = f"{spool}{_EXPORTING}"
    with env.disk.try_locked(temporary) as is_mine:
        if not is_mine:
            raise Fenced(f"Another process is writing {spool}: wait for it, or name another file.")
        try:
            # Again: the lock's former holder may have just finished, and a rename would replace its file.
            _refuse_taken(spool, beside, slots_data, disk=env.disk)
            size = _write(log, bounds, temporary, disk=env.disk, on_progress=on_progress)
            replace_file(env.disk, beside, slots_data, temporary=f"{beside}{_EXPORTING}")
            env.disk.rename(temporary, spool)
        except Exception:
            with contextlib.suppress(StorageError):
                env.disk.remove(temporary)
            raise
    env.disk.sync_folder(str(PurePath(spool).parent))
    return SpoolExport(spool, beside, bounds.count, bounds.first + 1, bounds.next, size, len(slots))


def _refuse_taken(spool: str, beside: str, slots: bytes, *, disk: Disk) -> None:
    """Refuse to replace a file; equal slots without their spool are the leftovers of a crash, and allowed."""
    with contextlib.suppress(NotFound):
        disk.size(spool)
        raise AlreadyExists(f"{spool} exists already: move it away, or name another file.")
    with contextlib.suppress(NotFound):
        if disk.read(beside) != slots:
            raise AlreadyExists(f"{beside} exists already and has other slots: move it away, or name another file.")


def _write(
    log: WalLog | WalReader, bounds: Bounds, path: str, *, disk: Disk, on_progress: Callable[[int], object]
) -> int:
    parts: list[bytes | memoryview] = []
    waiting = size = 0
    lsn = bounds.first
    with contextlib.closing(disk.open_append(path)) as file:
        file.cut(0)  # leftovers of an interrupted export
        for cursor, batches in read_spans(log.plan, Cursor(log.log_id, lsn), bounds.next, None):
            for batch in batches:
                _refuse_more_than_values(batch)
                times = batch.column("timestamp").view(pa.int64()).to_pylist()
                for value, time in zip(batch.column("value").to_pylist(), times, strict=True):
                    lsn += 1
                    parts += encode_record_frame(cursor.term, lsn, time // 1000, value)
                    waiting += len(value)
                    if waiting >= _PIECE or len(parts) >= _PARTS:
                        size += _flush(file, parts)
                        waiting = 0
                        on_progress(lsn - bounds.first)
        size += _flush(file, parts)
        file.sync()
    on_progress(lsn - bounds.first)
    return size


def _flush(file: AppendFile, parts: list[bytes | memoryview]) -> int:
    data = b"".join(parts)
    parts.clear()
    file.write([data])
    return len(data)


def _refuse_more_than_values(batch: pa.RecordBatch) -> None:
    offsets, _, ops, keys, values, headers = batch.columns
    plain = keys.null_count == headers.null_count == batch.num_rows and not values.null_count
    if plain and pc.max(ops).as_py() == Op.PUT:
        return
    more = pc.or_(pc.is_valid(keys), pc.is_valid(headers))
    less = pc.or_(pc.is_null(values), pc.not_equal(ops, int(Op.PUT)))
    at = offsets[pc.index(pc.or_(more, less), value=True).as_py()].as_py()
    raise InvalidInput(
        f"Offset {at} (lsn {at + 1}) cannot be exported: a spool stores values only, and this record has a "
        "key, headers, another operation than put, or no value."
    )


def _slots(log: WalLog | WalReader) -> tuple[list[SlotState], bytes]:
    slots = list(log.slots.list())
    fields = {"slots": [{**slot_fields(slot), **_older_fields(slot)} for slot in slots]}
    return slots, json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def _older_fields(slot: SlotState) -> dict[str, Any]:
    """The fields under the names that older programs use: they drop a slot that lacks one of its two lsns."""
    fields: dict[str, Any] = {
        "restart_lsn": slot.position,
        "confirmed_lsn": slot.position,
        "last_seen_at_unix_ms": slot.last_seen // 1000,
    }
    if slot.invalid is not None:
        fields["invalidation_reason"] = str(slot.invalid.reason)
        fields["invalidated_at_unix_ms"] = slot.invalid.at // 1000
    return fields
