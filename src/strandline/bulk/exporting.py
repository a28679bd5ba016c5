"""Export: a range of a log as Parquet or JSON lines, with a manifest. Restartable at any moment."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.bulk.range_jobs import RangeJob, parts_of
from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.formats.json.records import record_fields, rows_of
from strandline.log.addressed import log_at
from strandline.log.contract import READING, LogReading, require
from strandline.log.read.span_tasks import records_between
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Span, Start
from strandline.model.records import READ_SCHEMA
from strandline.storage.objects.store import ObjectStore
from strandline.storage.objects.urls import open_store
from strandline.storage.task_pool import TaskPool, ThreadPool

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]
"""Parquet with the columns of records, or one JSON document per record."""

PLAN: Final = "plan.json"
MANIFEST: Final = "manifest.json"
PART_BYTES: Final = 64 << 20
"""About how many stored bytes of the log go into one part."""

_REMEDY: Final = "export into another folder"


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
        job = RangeJob(source, open_store(target, options), pool or ThreadPool(), on_progress, _REMEDY)
        with contextlib.suppress(NotFound):
            whole = job.stored(MANIFEST, ExportManifest)
            _check_same(whole, job, since, upto, format)
            return whole

        def new() -> ExportPlan:
            first = source.position_of(since)
            cursor, cuts = job.cut(first, upto, part_bytes)
            return ExportPlan(source.log_id, first, cursor.next, format, cuts, str(cursor))

        plan = job.begun(PLAN, ExportPlan, new, ["part-"])
        _check_same(plan, job, since, upto, format)
        try:
            names = parts_of(plan.since, plan.cuts, plan.upto, f"part-{{:020d}}-{{:020d}}.{format}")
        except ValueError as error:
            raise job.damaged(PLAN, error) from error
        sizes = job.write(names, partial(PartTask, job.store, format), f"export to {job.store.url}")
        parts = tuple(ExportedPart(name, first, end, sizes[name]) for name, first, end in names)
        job.check_history(plan.cursor)  # the log may have been restored meanwhile
        _check_stored(parts, job.store)
        total = plan.upto - plan.since
        manifest = ExportManifest(plan.log_id, plan.since, plan.upto, format, total, parts, plan.cursor)
        job.store.put(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        return manifest


def _check_same(
    found: ExportPlan | ExportManifest, job: RangeJob, since: Start, upto: int | None, kind: ExportFormat
) -> None:
    """``InvalidInput`` if the export at the target is of another log, range or format."""
    log, url = job.log, job.store.url
    if found.log_id != log.log_id:
        raise InvalidInput(f"{url} has an export of another log ({found.log_id}): export into another folder.")
    if found.format != kind:
        raise InvalidInput(f"{url} has an export as {found.format}: export as {kind} into another folder.")
    is_elsewhere = since != "retained" and log.position_of(since) != found.since
    if isinstance(since, datetime) and found.since < log.bounds().first:
        is_elsewhere = False  # the records of that time are no longer in the log
    if is_elsewhere or (upto is not None and upto != found.upto):
        raise InvalidInput(
            f"{url} has an export from offset {found.since:,} up to {found.upto:,}: ask for the same range, or "
            "export into another folder."
        )
    job.check_history(found.cursor)


def _check_stored(parts: Sequence[ExportedPart], store: ObjectStore) -> None:
    """``NotFound`` if a part is not where its task has stored it: executors may have another disk."""
    there = {item.path: item.size for item in store.list("part-")}
    if missing := next((part for part in parts if there.get(part.path) != part.bytes), None):
        raise NotFound(
            f"A task has stored {missing.path}, and it is not at {store.url}: executors write to their own disks, or "
            "the part was deleted. Export to an address that all machines reach."
        )


@dataclass(frozen=True)
class PartTask:
    """Writes one part, whole or not at all; returns its size. Writing it again gives the same records."""

    store: ObjectStore
    format: ExportFormat
    name: str
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
