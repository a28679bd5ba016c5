"""Export: a range of a log as Parquet or JSON lines, with a manifest. Restartable at any moment."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final, Literal, TypeAlias, TypeVar
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.errors import AlreadyExists, CorruptData, Diverged, InvalidInput, NotFound, Unsupported
from strandline.formats.json.records import record_fields, rows_of
from strandline.log.addressed import log_at
from strandline.log.contract import READING, LogReading, require
from strandline.log.read.planning import divided
from strandline.log.read.span_tasks import is_same_history, records_between, run_located, spans_between
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Span, Start
from strandline.model.records import READ_SCHEMA
from strandline.storage.objects.store import ABSENT, ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.storage.task_pool import TaskPool, ThreadPool

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]
"""Parquet with the columns of records, or one JSON document per record."""

PLAN: Final = "plan.json"
MANIFEST: Final = "manifest.json"
PART_BYTES: Final = 64 << 20
"""About how many stored bytes of the log go into one part."""

T = TypeVar("T")

_LOG: Final = "log.json"
_SUFFIX: Final = {"parquet": "parquet", "jsonl": "jsonl"}


class ExportedPart(msgspec.Struct, frozen=True):
    """One file of an export, with offsets ``first`` up to and without ``next``."""

    path: str
    first: int
    next: int
    bytes: int


class ExportPlan(msgspec.Struct, frozen=True):
    """The range of an export and its parts. Fixed when the export begins, so that it can be continued."""

    log_id: UUID
    since: int
    upto: int
    format: ExportFormat
    cuts: tuple[int, ...]
    """The first offsets of the parts."""
    cursor: str
    """The log's cursor at ``upto``: a log that was restored and grew differently has another one."""
    kind: Literal["strandline-export-plan"] = "strandline-export-plan"
    version: Literal[1] = 1


class ExportManifest(msgspec.Struct, frozen=True):
    """A whole export: written last, so that an export with a manifest is complete."""

    log_id: UUID
    since: int
    upto: int
    format: ExportFormat
    records: int
    parts: tuple[ExportedPart, ...]
    cursor: str
    """The log's cursor at ``upto``: where a consumer that has loaded the export continues."""
    kind: Literal["strandline-export"] = "strandline-export"
    version: Literal[1] = 1


@checked
def export(
    log: LogReading | Address,
    target: Address,
    *,
    since: Start = "retained",
    upto: int | None = None,
    format: Literal["parquet", "jsonl"] = "parquet",  # noqa: A002 - the field's own word
    pool: TaskPool | None = None,
    options: dict[str, str] | None = None,
    part_bytes: int = PART_BYTES,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> ExportManifest:
    """Write the records of a range, each once and in order, as files ``part-<first>-<next>``; returns the manifest.

    The first call fixes the range and its parts in ``plan.json``: from ``since`` up to ``upto``, or the end of the log
    at that moment. Killed at any moment and called again, it writes the parts that are missing. ``manifest.json`` is
    written last. ``pool`` runs the tasks: threads of this process, or ``sl.spark.executors(spark)``. ``on_progress``
    gets the records written so far, and all.

    ``InvalidInput`` if there is an export of another range or log at the target; ``Diverged`` if the log was restored
    since, and has other records there; ``CursorExpired`` if records were deleted before they were exported.
    """
    with log_at(log) as source:
        require(source, "exported", *READING)
        if source.counts_batches:
            raise Unsupported(
                f"{source!r} is a queue of version 1, whose offsets number batches and not records: copy it into a log "
                "with 'strandline ingest', and export that."
            )
        store = open_store(target, options)
        with contextlib.suppress(NotFound):
            whole = _decoded(store, MANIFEST, ExportManifest)
            _check_same(whole, source, store, since, upto, format)
            return whole
        plan = _planned(source, store, since, upto, format, part_bytes)
        ends = [*plan.cuts, plan.upto][1:]
        names = [f"part-{first:020d}-{end:020d}.{_SUFFIX[format]}" for first, end in zip(plan.cuts, ends, strict=True)]
        sizes = {item.path: item.size for item in store.list("part-") if item.size}  # an empty one is no part
        total, done = plan.upto - plan.since, 0
        missing: list[PartTask] = []
        for name, first, end in zip(names, plan.cuts, ends, strict=True):
            if name in sizes:
                done += end - first
            else:
                missing.append(PartTask(store, name, format, first, end, spans_between(source, first, end)))
        on_progress(done, total)
        for task, size in run_located(source, missing, pool or ThreadPool(), f"export to {store.url}"):
            sizes[task.name] = size
            done += task.next - task.first
            on_progress(done, total)
        parts = [
            ExportedPart(name, first, end, sizes[name]) for name, first, end in zip(names, plan.cuts, ends, strict=True)
        ]
        _check_history(plan, source, store)  # the log may have been restored meanwhile
        _check_stored(parts, store)
        manifest = ExportManifest(plan.log_id, plan.since, plan.upto, format, total, tuple(parts), plan.cursor)
        store.put(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        return manifest


def _planned(
    log: LogReading,
    store: ObjectStore,
    since: Start,
    upto: int | None,
    kind: ExportFormat,
    part_bytes: int,
) -> ExportPlan:
    """The stored plan; a new one if there is none."""
    if any(item.path == _LOG for item in store.list(_LOG)):
        raise InvalidInput(
            f"{store.url} holds a log, and an export must not lie among its objects: export into another folder."
        )
    found = next(iter(store.list("part-")), None)  # first: the plan of any part is stored before it
    try:
        plan = _decoded(store, PLAN, ExportPlan)
    except NotFound:
        if found is not None:
            raise InvalidInput(
                f"{store.url} has {found.path}, and no {PLAN} that says of which export it is: export into another "
                "folder, or delete the parts."
            ) from None
        plan = _new_plan(log, since, upto, kind, part_bytes)
        try:
            store.put_if(PLAN, msgspec.json.encode(plan), ABSENT)
        except AlreadyExists:  # another process was first, or the answer was lost
            plan = _decoded(store, PLAN, ExportPlan)
    _check_same(plan, log, store, since, upto, kind)
    ends = [*plan.cuts, plan.upto]
    if ends[0] != plan.since or any(first >= end for first, end in pairwise(ends)):
        raise CorruptData(f"{store.url}/{PLAN} is damaged: its parts leave its range. Export into another folder.")
    return plan


def _new_plan(
    log: LogReading,
    since: Start,
    upto: int | None,
    kind: ExportFormat,
    part_bytes: int,
) -> ExportPlan:
    first, end = log.position_of(since), log.bounds().next
    if upto is not None and upto > end:
        raise InvalidInput(f"upto is {upto:,}, and the log ends at {end:,}: export less, or later.")
    end = end if upto is None else upto
    if end < first:
        raise InvalidInput(
            f"The range begins at {first:,}, which is behind its end, {end:,}: begin earlier, or end later."
        )
    cursor = log.cursor_at(end)  # before the spans, so that a restore in between is detected
    spans = spans_between(log, first, end)
    wanted = max(1, -(-sum(span.size for span in spans) // max(1, part_bytes)))
    cuts = tuple(group[0].first for group in divided(spans, wanted) if group)
    return ExportPlan(log.log_id, first, end, kind, cuts, str(cursor))


def _check_same(
    stored: ExportPlan | ExportManifest,
    log: LogReading,
    store: ObjectStore,
    since: Start,
    upto: int | None,
    kind: ExportFormat,
) -> None:
    """``InvalidInput`` if the export at the target is of another log, range or format."""
    if stored.log_id != log.log_id:
        raise InvalidInput(f"{store.url} has an export of another log ({stored.log_id}): export into another folder.")
    if stored.format != kind:
        raise InvalidInput(f"{store.url} has an export as {stored.format}: export as {kind} into another folder.")
    is_elsewhere = since != "retained" and log.position_of(since) != stored.since
    if isinstance(since, datetime) and stored.since < log.bounds().first:
        is_elsewhere = False  # the records of that time are no longer in the log
    if is_elsewhere or (upto is not None and upto != stored.upto):
        raise InvalidInput(
            f"{store.url} has an export from offset {stored.since:,} up to {stored.upto:,}: ask for the same range, or "
            "export into another folder."
        )
    _check_history(stored, log, store)


def _check_history(stored: ExportPlan | ExportManifest, log: LogReading, store: ObjectStore) -> None:
    """``Diverged`` if the log has other records in the range now."""
    if not is_same_history(log, Cursor.parse(stored.cursor)):
        raise Diverged(
            f"{store.url} has an export of records that {log!r} does not have now: the log was restored from a copy, "
            "and has grown differently since. Export into another folder."
        )


def _check_stored(parts: Sequence[ExportedPart], store: ObjectStore) -> None:
    """``NotFound`` if a part is not where its task has stored it: executors may have another disk."""
    there = {item.path: item.size for item in store.list("part-")}
    if missing := next((part for part in parts if there.get(part.path) != part.bytes), None):
        raise NotFound(
            f"A task has stored {missing.path}, and it is not at {store.url}: executors write to their own disks, or "
            "the part was deleted. Export to an address that all machines reach."
        )


def _decoded(store: ObjectStore, path: str, kind: type[T]) -> T:
    data = store.get(path).data
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"{store.url}/{path} is damaged, or not of an export: {error}. Export into another folder."
        ) from error


@dataclass(frozen=True)
class PartTask:
    """Writes one part, whole or not at all; returns its size. Writing it again gives the same records."""

    store: ObjectStore
    name: str
    format: ExportFormat
    first: int
    next: int
    spans: tuple[Span, ...]

    def __call__(self) -> int:
        """Fetch the records, check that they are all of the part, and store the file."""
        records = records_between(self.spans, self.first, self.next)
        data = (_parquet if self.format == "parquet" else _json_lines)(records)
        self.store.put(self.name, data)
        return len(data)


def _parquet(batches: Iterator[pa.RecordBatch]) -> memoryview:
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, READ_SCHEMA, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
    return memoryview(out.getvalue())


def _json_lines(batches: Iterator[pa.RecordBatch]) -> bytes:
    encoder, out = msgspec.json.Encoder(), io.BytesIO()
    for batch in batches:
        out.write(encoder.encode_lines(map(record_fields, rows_of(batch))))
    return out.getvalue()
