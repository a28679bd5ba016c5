"""Loads files into an object log, exactly once by the name of the job: tasks stage batches, one commit lists them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from strandline.bulk.load_files import FilePart, RecordFields, codec_for, opened
from strandline.bulk.load_sources import LoadedFile, files_at, listed
from strandline.errors import (
    AlreadyExists,
    Diverged,
    InvalidInput,
    NotFound,
    SchemaRefused,
    StrandlineError,
    Unsupported,
)
from strandline.log.addressed import log_at
from strandline.log.object import ObjectLog
from strandline.log.object.head.edits import BatchListing
from strandline.log.object.staging import FOLDER, StagedAppend
from strandline.log.read.planning import SMALL_PARTITION
from strandline.log.writers.source import source_writer
from strandline.model.addresses import Address
from strandline.model.arguments import Named, checked
from strandline.model.head import WriterId
from strandline.storage.objects.store import ABSENT
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tier.read.tiered_log import hot_tier
from strandline.values.contract import Codec

T = TypeVar("T")

PART_BYTES: Final = 64 << 20
"""Approximate bytes of files that one task loads. Only Parquet files are split."""
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A job that is in the log: its ``records`` begin at offset ``first``; None if there are none."""

    job: str
    files: int
    records: int
    first: int | None


class LoadNote(msgspec.Struct, frozen=True):
    """The files of a job, stored with its staged batches: a job that is continued must load the same files."""

    digest: str
    files: tuple[tuple[str, int, int], ...]
    """Address, size and time of each file."""
    kind: Literal["strandline-load"] = "strandline-load"
    version: Literal[1] = 1


@checked
def load(
    sources: Address | Sequence[Address],
    log: Address | Any,
    *,
    job: Named,
    format: Literal["jsonl", "csv", "parquet", "arrow"] | None = None,  # noqa: A002 - the field's own word
    key: str | None = None,
    op: str | None = None,
    timestamp: str | None = None,
    value: str | None = None,
    truncate_times: bool = False,
    pool: TaskPool | None = None,
    options: dict[str, str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Loaded:
    """Append the rows of files to an object log, all of them in one commit, exactly once by the name of the ``job``.

    ``sources`` are files, or folders, of which all files are loaded whose names begin with neither ``.`` nor ``_``: in
    the given order, those of a folder by name; the order within a file is kept. Their names say the ``format``, unless
    it is given: JSON lines and CSV, also with ``.gz`` or ``.zst``, Parquet and Arrow.

    ``key``, ``op`` (put, delete, purge), ``timestamp`` (with a zone) and ``value`` name fields or columns of the files.
    Without ``value`` the whole row is the value: in the format that the log names, else as a JSON object, of JSON lines
    the line itself. Files with the columns of records, such as those of an export, are records, and so are JSON lines
    that ``strandline tail --json`` printed. A time that is finer than a microsecond is refused, unless
    ``truncate_times`` cuts it.

    ``pool`` runs the tasks: threads of this process, or ``sl.spark.executors(spark)``. Killed at any moment and called
    again, it continues within a day; a job that is in the log is not loaded again. ``options`` are for the store of the
    sources. ``on_progress`` gets the bytes of files loaded so far, and all.

    ``InvalidInput`` for a row that cannot be a record, with file and row, and if a file has changed since the job
    began; ``Diverged`` if the log has the job with other files or fields. Nothing is appended then. ``Unsupported`` for
    a log that is no object log: load into one, and move that with ``sl.ingest``.
    """
    given = [sources] if isinstance(sources, str) or not isinstance(sources, Sequence) else sources
    fields = RecordFields(key, op, timestamp, value, truncates_times=truncate_times)
    with log_at(log) as found:
        target = _object_log(found)
        work = _LoadJob(target, job, files_at(given, format, options), fields, pool or ThreadPool(), on_progress)
        return work.run()


def _object_log(log: Any) -> ObjectLog:
    found = hot_tier(log)
    if not isinstance(found, ObjectLog):
        raise Unsupported(
            f"Files are loaded into object logs, and {log!r} is none: load them into one, and move that with "
            "'strandline ingest'."
        )
    return found


_NotedBatch: TypeAlias = tuple[str, int, int, int, int, int, WriterId, int, int]


def _noted(batch: BatchListing) -> _NotedBatch:
    """A staged batch as it is noted: the first fields of its listing; it has no metadata."""
    times = batch.oldest, batch.newest
    return (batch.location, batch.generation, batch.count, batch.size, *times, batch.writer, batch.number, batch.born)


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Stages the records of some files, or of row groups of one, and notes which batches they are. Repeatable."""

    append: StagedAppend
    number: int
    parts: tuple[FilePart, ...]
    fields: RecordFields
    codec: Codec | None

    @property
    def note(self) -> str:
        """Where the staged batches are noted; a run that divides the files differently has other notes."""
        what = msgspec.json.encode([(part.file.where, part.groups) for part in self.parts])
        return f"{FOLDER}{self.append.job}/task-{self.number:08d}-{hashlib.sha256(what).hexdigest()[:16]}.json"

    @property
    def size(self) -> int:
        """Bytes of its files. A file that is split counts in the task with its first row group."""
        return sum(part.file.size for part in self.parts if not part.groups or part.groups[0] == 0)

    def __call__(self) -> tuple[BatchListing, ...]:
        """Stage the records; the note is stored last."""
        batches = self.append.write(self._records())
        self.append.store.put(self.note, msgspec.json.encode([_noted(batch) for batch in batches]))
        return tuple(batches)

    def _records(self) -> Iterator[pa.RecordBatch]:
        for part in self.parts:
            yield from part.records(self.fields, self.codec)


@dataclass(frozen=True, slots=True)
class _LoadJob:
    log: ObjectLog
    job: str
    files: Sequence[LoadedFile]
    fields: RecordFields
    pool: TaskPool
    on_progress: Callable[[int, int], None]

    def run(self) -> Loaded:
        note = self._note()
        name = f"load-{hashlib.sha256(self.job.encode()).hexdigest()[:32]}"
        writer = source_writer(f"bulk-load:{self.job}")
        append = StagedAppend(self.log.store, self.log.log_id, writer, name, run=note.digest)
        if self._is_loaded(writer):
            return self._committed(append, [])
        self._begin(append, note)
        codec = codec_for(self.log)
        parts = enumerate(self._parts())
        tasks = [LoadTask(append, number, part, self.fields, codec) for number, part in parts]
        try:
            batches = self._staged(append, tasks)
            self._check_unchanged()
        except (InvalidInput, SchemaRefused):
            self._discarded(append)  # a retry does not help: the job begins again, with corrected files
            raise
        try:
            return self._committed(append, batches)
        except NotFound:
            if self._is_loaded(writer):  # by another process, which has discarded what was staged
                return self._committed(append, [])
            self._discarded(append)  # staged batches are gone: the notes of the others are worth nothing
            raise

    def _note(self) -> LoadNote:
        files = tuple((file.where, file.size, file.modified) for file in self.files)
        named = [(file.where, file.size, file.modified, file.format) for file in self.files]
        named_fields = [self.fields.key, self.fields.op, self.fields.timestamp, self.fields.value]
        what = msgspec.json.encode([named, named_fields, *(["truncated"] if self.fields.truncates_times else [])])
        return LoadNote(hashlib.sha256(what).hexdigest(), files)

    def _is_loaded(self, writer: Any) -> bool:
        return writer in self.log.head().writers

    def _begin(self, append: StagedAppend, note: LoadNote) -> None:
        """Store what the job loads; ``InvalidInput`` if it began with something else."""
        path = f"{FOLDER}{append.job}/load.json"
        try:
            self.log.store.put_if(path, msgspec.json.encode(note), ABSENT)
        except AlreadyExists:
            begun = msgspec.json.decode(self.log.store.get(path).data, type=LoadNote)
            if begun.digest != note.digest:
                raise InvalidInput(
                    f"The job {self.job!r} began {_difference(begun, note)}: give it the same files and fields, or "
                    "load these under another name. Nothing was appended."
                ) from None

    def _parts(self) -> Iterator[tuple[FilePart, ...]]:
        """What each task loads: small files together, large Parquet files by row groups."""
        # Small files share a task, up to a size that is worth a task and leaves work for every worker.
        share = sum(file.size for file in self.files) // (2 * self.pool.count)
        together = min(PART_BYTES // 2, max(SMALL_PARTITION, share))
        for is_large, files in groupby(self.files, lambda file: file.format == "parquet" and file.size > PART_BYTES):
            if is_large:
                yield from ((FilePart(file, groups),) for file in files for groups in _row_groups(file))
            else:
                yield from (tuple(map(FilePart, some)) for some in _together(files, lambda file: file.size, together))

    def _staged(self, append: StagedAppend, tasks: Sequence[LoadTask]) -> list[BatchListing]:
        """The batches of all tasks, in order; those that an earlier run has noted are not staged again."""
        total, done = sum(task.size for task in tasks), 0
        noted = {item.path for item in append.store.list(f"{FOLDER}{append.job}/task-")}
        found: dict[int, Sequence[BatchListing]] = {}
        for task in tasks:
            if task.note in noted:
                rows = msgspec.json.decode(append.store.get(task.note).data, type=list[_NotedBatch])
                found[task.number] = [BatchListing(*row) for row in rows]
                done += task.size
        self.on_progress(done, total)
        missing = [task for task in tasks if task.number not in found]
        for place, batches in self.pool.run(missing, f"load {self.job} into {self.log.store.url}"):
            found[missing[place].number] = batches
            done += missing[place].size
            self.on_progress(done, total)
        return [batch for task in tasks for batch in found[task.number]]

    def _check_unchanged(self) -> None:
        """``InvalidInput`` if a file changed while it was read: some of its rows may be old and others new."""
        stores = {file.store.url: file.store for file in self.files}
        for url, store in stores.items():
            files = [file for file in self.files if file.store.url == url]
            now = {row.path: (row.size, row.modified) for row in listed(store, {file.path for file in files})}
            if changed := next((file for file in files if now.get(file.path) != (file.size, file.modified)), None):
                raise InvalidInput(
                    f"{changed.where} changed while it was loaded, and nothing was appended: load it again."
                )

    def _committed(self, append: StagedAppend, batches: Sequence[BatchListing]) -> Loaded:
        receipt = append.commit(batches)
        if receipt.count and not append.listed_by_this_run(receipt):
            raise Diverged(
                f"{self.log.url} has the job {self.job!r} with other files or fields, from offset {receipt.first} on, "
                "and nothing was appended: load these under another name."
            )
        self._discarded(append)
        return Loaded(self.job, len(self.files), receipt.count, receipt.first)

    def _discarded(self, append: StagedAppend) -> None:
        try:
            append.discard()
        except StrandlineError as error:
            _LOGGER.warning("Staged batches of %s were left for the next trim: %s", self.log.url, error)


def _row_groups(file: LoadedFile) -> Iterator[tuple[int, ...]]:
    """The row groups of a Parquet file, in groups of about :data:`PART_BYTES` bytes."""
    with opened(file) as raw:
        try:
            metadata = pq.ParquetFile(pa.PythonFile(raw)).metadata
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(f"{file.where} cannot be read as parquet: {error}") from error
        sizes = [
            sum(group.column(number).total_compressed_size for number in range(group.num_columns))
            for group in (metadata.row_group(number) for number in range(metadata.num_row_groups))
        ]
    yield from _together(range(len(sizes)), sizes.__getitem__, PART_BYTES)


def _together(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[tuple[T, ...]]:
    """The items, in order, in groups of at most this size; a larger item is a group of its own."""
    waiting: list[T] = []
    total = 0
    for item in items:
        if waiting and total + size(item) > most:
            yield tuple(waiting)
            waiting, total = [], 0
        waiting.append(item)
        total += size(item)
    if waiting:
        yield tuple(waiting)


def _difference(begun: LoadNote, now: LoadNote) -> str:
    """Name the first difference between the files that a job began with and those that it is given now."""
    before, after = ({path: rest for path, *rest in note.files} for note in (begun, now))
    for path, rest in after.items():
        if path not in before:
            return f"without {path}"
        if before[path] != rest:
            return f"with another content of {path}, which has changed since"
    gone = next((path for path in before if path not in after), None)
    return "with other fields, or with the files in another order" if gone is None else f"with {gone}, too"
