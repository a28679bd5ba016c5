"""Reports of workers: which records they were given, and which files they wrote; together they cover a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from strandline.errors import CorruptData
from strandline.tables.rows.partitions import PartitionValues

Takes: TypeAlias = Literal["offsets", "keys"]
"""``offsets``: each worker is given its own records. ``keys``: it is given all, and takes those of its keys."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file that a worker wrote: nothing refers to it yet."""

    path: str
    """Relative to the table."""
    size: int
    rows: int
    statistics: Mapping[str, ColumnStatistics] = field(default_factory=dict)
    partition: PartitionValues = ()
    """The values of its partition, in the order of the table's layout."""


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Lowest and highest value of a column in a file (None: all are null, or they are unknown), and its nulls."""

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
    others: int = 0
    """How many of the records that it took are for other tables of a route."""
    shared: int = 0
    """How many records share the offset of another one, as those of a batch in a queue of version 1 do."""


def check_coverage(written: Sequence[Written], takes: Takes, parts: int, since: int, upto: int) -> None:
    """``CorruptData`` unless the workers together saw each record of the range, and took each of them once."""
    if any(one.role != "part" for one in written):
        _check_shuffled(written, takes, parts, since, upto)
        return
    if len(written) != parts:
        raise CorruptData(f"{len(written)} of {parts} parts were written. Nothing was committed; try again.")
    if takes == "offsets":
        _check_offsets(written, since, upto)
        return
    expected = upto - since
    for one in written:
        if (one.first, one.next, one.records) != (since, upto, expected) and expected:
            raise _not_covered(one.records, one.first, one.next, since, upto)
    taken = sum(one.taken for one in written)
    if taken != expected:
        raise _not_covered(taken, since, upto, since, upto)


def _check_shuffled(written: Sequence[Written], takes: Takes, parts: int, since: int, upto: int) -> None:
    readers = [one for one in written if one.role == "reader"]
    writers = [one for one in written if one.role == "writer"]
    _check_offsets(readers, since, upto)
    numbers = sorted(one.number for one in writers)
    if len(readers) + len(writers) != len(written) or (takes == "keys" and numbers != list(range(parts))):
        raise CorruptData(f"Not each of {parts} parts was written once. Nothing was committed; try again.")
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
