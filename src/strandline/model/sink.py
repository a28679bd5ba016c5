"""Sinks and stores: a sink stores data and cursor atomically; a store can be read, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, Gap, NullKey
from strandline.model.addresses import Address
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.snapshot import Snapshot


@runtime_checkable
class Sink(Protocol):
    """Stores records together with its cursor, which alone determines its position.

    All calls may block. After a ``StorageError`` either nothing was stored, or both data and cursor were;
    :meth:`cursor` shows which.
    """

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The stored cursor in that log; None for a new sink. ``Diverged`` if the sink follows another log."""

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Store the records of offsets ``since`` up to ``upto`` and the cursor ``upto``, atomically, exactly once.

        ``records`` has the columns of :data:`~strandline.model.records.READ_SCHEMA`; a sink that keeps the newest
        record per key may be given only those. A range at or below the sink's cursor changes nothing; of one that
        overlaps it, records below the cursor are dropped; one that starts above it is ``Gap``. ``Fenced`` if another
        follower committed at the same time.
        """


@runtime_checkable
class LogAwareSink(Protocol):
    """A sink that asks its log for something, such as the codec of the values."""

    def meet(self, log: Any) -> None:
        """Called by a follower before anything else, with the log that the sink follows."""


@runtime_checkable
class RestorableSink(Sink, Protocol):
    """A sink that other writers can change, and that has earlier versions: a table."""

    def resume(self, log_id: UUID) -> Cursor | None:
        """The cursor for a follower that starts; earlier knowledge of this object is discarded.

        ``Diverged`` if the sink's data does not match its cursor.
        """

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the last version of the sink whose data matches its cursor, if needed; returns the cursor.

        ``serves``: whether the log can continue from a cursor. ``Diverged`` if there is no such version.
        """


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a worker wrote: nothing refers to it yet."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    statistics: Mapping[str, ColumnStatistics] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Lowest and highest value of a column in a file (None: unknown), and its nulls."""

    low: Any
    high: Any
    nulls: int


LetterId: TypeAlias = tuple[int, int]
"""A bad record: its offset, and 64 bits that its content has."""


@dataclass(frozen=True, slots=True)
class Written:
    """Report of a worker: which records it was given, and which files it wrote. No reader sees these files yet."""

    first: int
    """The lowest offset that it was given."""
    next: int
    """One past the highest; equal to ``first`` if it was given nothing."""
    records: int
    """How many records it was given."""
    taken: int
    """How many of them belong to its part."""
    added: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()
    """Files of the table that the added ones replace."""
    bad: tuple[DataFile, ...] = ()
    """Files of records that could not become rows, for the dead-letter table."""
    bad_records: int = 0
    first_bad: str = ""
    """Offset and reason of one of them."""
    bad_again: tuple[LetterId, ...] = ()
    """Those that an interrupted attempt has stored already, which are in no file of ``bad``."""
    role: Literal["part", "reader", "writer"] = "part"
    """``part``: it read records and wrote the rows of its part. If rows were shuffled in between, a ``reader`` read
    records, and a ``writer`` wrote the rows of the part ``number``; ``taken`` counts the rows that either passed on or
    took, and is 0 on both sides of a transform."""
    number: int = 0
    offered: tuple[tuple[int, bytes], ...] = ()
    """Columns that the table lacks, and that self-describing values bring: an offset, and an Arrow schema."""
    decoded: int = 0
    """Bytes in memory of the records that it was given."""
    shared: int = 0
    """How many records share the offset of another one, as those of a batch in a queue of version 1 do."""


class Part(Protocol):
    """One worker's share of a range. Picklable. Several workers may do its work, also at the same time."""

    @property
    def takes(self) -> Literal["offsets", "keys"]:
        """``offsets``: it is given its own records. ``keys``: it is given all records, and takes those of its keys."""

    @property
    def most_refetched(self) -> int:
        """The most parts by keys that may each fetch all records. With more parts, the rows are shuffled instead."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Write data files of these records, in the order of their offsets. Changes nothing that a reader sees."""

    def reader(self) -> RowReader:
        """Reads records for all parts, whose rows are shuffled."""

    def numbers(self, rows: pa.Table, parts: int) -> Any:
        """The part of each of these rows, as a numpy array; ``parts`` is how many there are."""

    def write_rows(self, tables: Iterable[pa.Table], *, number: int) -> Written:
        """Write data files of shuffled rows of this part, in any order."""


class RowReader(Protocol):
    """Turns records into rows for other workers, and counts what it was given."""

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """The rows of these records, which come in the order of their offsets."""

    def report(self) -> Written:
        """Count of its input, and the bad records. Call it after ``rows`` has ended."""


class TableTransaction(Protocol):
    """One range on its way into a table: workers write its parts, then one commit makes them visible."""

    @property
    def parts(self) -> Sequence[Part]:
        """The parts for the workers."""

    def commit(self, written: Sequence[Written]) -> None:
        """Commit what the workers wrote, atomically with the cursor.

        ``CorruptData`` if they did not see each record exactly once. ``Conflict`` if the table changed since, so that
        the parts have to be written again; ``Fenced`` if another follower changed it. Nothing was committed then.
        """

    def abandon(self, error: BaseException) -> None:
        """Remove what failed workers wrote, except for files that something may refer to."""


@runtime_checkable
class TableSink(Sink, Protocol):
    """A sink whose writing can be spread over workers: ``apply`` is one transaction with one part, written here."""

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> TableTransaction | None:
        """Prove that the table is the known one and at its cursor; plan at most ``tasks`` parts.

        None if the table has the range already. Raises as ``apply`` does.
        """


@runtime_checkable
class TransformableSink(TableSink, Protocol):
    """A table whose rows another engine may transform between decoding and writing."""

    def decoded_schema(self) -> pa.Schema:
        """The columns of decoded changes. ``InvalidInput`` if the sink has a transform of its own."""

    def with_rows(self, rows: pa.Schema) -> TableSink:
        """The same table, for workers that are given transformed rows with these columns."""


def check_coverage(written: Sequence[Written], parts: Sequence[Part], since: int, upto: int) -> None:
    """``CorruptData`` unless the workers together saw each record of the range, and took each of them once."""
    if any(one.role != "part" for one in written):
        _check_shuffled(written, parts, since, upto)
        return
    if len(written) != len(parts):
        raise CorruptData(f"{len(written)} of {len(parts)} parts were written. Nothing was committed; try again.")
    expected = upto - since
    by_keys = [one for one, part in zip(written, parts, strict=True) if part.takes == "keys"]
    for one in by_keys:
        if (one.first, one.next, one.records) != (since, upto, expected) and expected:
            raise _not_covered(one.records, one.first, one.next, since, upto)
    if by_keys:
        taken = sum(one.taken for one in by_keys)
        if taken != expected:
            raise _not_covered(taken, since, upto, since, upto)
        return
    _check_offsets(written, since, upto)


def _check_shuffled(written: Sequence[Written], parts: Sequence[Part], since: int, upto: int) -> None:
    readers = [one for one in written if one.role == "reader"]
    writers = [one for one in written if one.role == "writer"]
    _check_offsets(readers, since, upto)
    numbers = sorted(one.number for one in writers)
    if len(readers) + len(writers) != len(written) or (parts[0].takes == "keys" and numbers != list(range(len(parts)))):
        raise CorruptData(f"Not each of {len(parts)} parts was written once. Nothing was committed; try again.")
    given, taken = sum(one.taken for one in readers), sum(one.taken for one in writers)
    if given != taken:
        raise CorruptData(
            f"Workers passed on {given} rows of the offsets {since} to {upto - 1}, and {taken} arrived. Nothing was "
            "committed; start it again."
        )


def _check_offsets(written: Sequence[Written], since: int, upto: int) -> None:
    at = since
    for one in sorted(written, key=lambda one: (one.first, one.next)):
        if one.records != one.next - one.first or (one.records and one.first != at):
            raise _not_covered(one.records, one.first, one.next, since, upto)
        at = max(at, one.next)
    if at != upto:
        raise _not_covered(at - since, since, at, since, upto)


def _not_covered(records: int, first: int, end: int, since: int, upto: int) -> CorruptData:
    return CorruptData(
        f"Workers were given {records} records between offsets {first} and {end} where each of the offsets {since} to "
        f"{upto - 1} is expected once: records were lost or duplicated. Nothing was committed; start it again."
    )


@runtime_checkable
class BatchSink(Protocol):
    """A replica's copy of a log: takes whole batches, with their metadata. Its cursor alone determines its position."""

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The stored cursor; None for a new replica."""

    def take(self, batches: Sequence[LogBatch], *, since: Cursor, upto: Cursor) -> None:
        """Durably append the batches of offsets ``since`` up to ``upto``, all of them or a first part.

        Batches below the cursor are skipped; a range that starts above it is ``Gap``.
        """


def without_key(offset: int) -> NullKey:
    """The error for a record without key in a table of the latest values."""
    return NullKey(
        f"The record at offset {offset} has no key, and a table of the latest values keeps one row per key: follow "
        "into a table of mode 'append', or stop producing records without key. Nothing was applied."
    )


def not_a_state(offset: int) -> NullKey:
    """The error for a record without key in a store, or in a snapshot for one."""
    return NullKey(
        f"The record at offset {offset} has no key, and a store keeps one value per key: only a log whose records all "
        "have keys has such a state. Nothing was applied."
    )


def is_applied(*, since: Cursor, upto: Cursor, at: Cursor | None) -> bool:
    """Whether a sink at ``at`` has a range already: the exactly-once rule. ``Gap`` if it starts above the sink."""
    if upto.next < since.next:
        raise Gap(f"A range cannot end ({upto.next}) before it starts ({since.next}).")
    if at is None:
        return False
    if since.next > at.next:
        raise Gap(
            f"The range starts at offset {since.next} and the sink is at {at.next}: applying it would skip "
            f"{since.next - at.next} records. Follow from the sink's own cursor."
        )
    return upto.next <= at.next


def remaining(records: Any, *, since: Cursor, upto: Cursor, at: Cursor | None) -> Any:
    """The part of a range that a sink at ``at`` still has to store; None for nothing: the exactly-once rule.

    ``records`` is a table; other types are passed through if nothing is dropped. A new sink (``at`` is None) takes the
    whole range: the follower chooses its start.
    """
    if is_applied(since=since, upto=upto, at=at):
        return None
    if at is None:
        return records
    if since.next == at.next:
        return records
    return records.filter(pc.greater_equal(records.column("offset"), at.next))


@dataclass(frozen=True, slots=True)
class StorePosition:
    """Position of a store. While ``resync`` names a stream, the state belongs to no cursor.

    The cursor is then that from before the resync; following continues only after a resync that was finished.
    """

    cursor: Cursor | None
    resync: UUID | None = None


@runtime_checkable
class Store(Sink, Protocol):
    """Keyed state on disk or in memory, written by one follower, read by any thread.

    ``apply`` is the sink's: puts set, deletes and purges delete, a null value is empty, a record without key is
    ``NullKey``. Each write is atomic. Whether it is durable when the call returns is an option of the store
    (``sync``). During a resync ``apply``, ``cursor`` and ``export_to`` raise ``NotReady``.

    After a failed write :meth:`position` shows what is stored; the same write may be retried.
    """

    def position(self) -> StorePosition:
        """The cursor, of any stream, and whether a resync is running. Never raises for another log."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call.

        Streamed: beyond the keys, a large range takes no more memory than a small one.
        """

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark that a resync with a stream is running. May be repeated, also with another stream."""

    def resync(self, records: pa.Table) -> None:
        """Apply puts and deletes without the rule of offsets; the cursor stays. ``InvalidInput`` without a resync."""

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync at a cursor. ``InvalidInput`` without a resync, or for another stream."""

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call as a snapshot in a folder that must be absent or empty.

        Its cursor matches its data exactly. ``AlreadyExists`` if the folder is occupied, ``NotReady`` for a
        store without cursor. Reads and writes continue meanwhile.
        """

    def close(self) -> None:
        """Close the store; stored data stays. Idempotent."""
