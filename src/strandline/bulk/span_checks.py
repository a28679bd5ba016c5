"""Checks of spans: tasks that read a range of a log in one tier or in both, and report what is wrong with it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData, CursorExpired, NotFound
from strandline.log.findings import FindingKind
from strandline.log.object.log import ObjectSpan
from strandline.log.read.erased_records import same_unless_erased
from strandline.log.read.reading import fetch_in_order
from strandline.log.read.span_tasks import AHEAD
from strandline.model.cursor import Span
from strandline.model.records import READ_SCHEMA, Op
from strandline.tier.copy.segment_files import (
    ColdSpan,
    SegmentSpan,
    check_between_columns,
    forget_tails,
    read_whole_group,
    segment_path,
)

_SHOWN: Final = 40
"""Bytes of a value that are shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the offsets ``first`` up to ``next``. It may vanish once the records are located again."""

    kind: FindingKind
    first: int
    next: int
    message: str
    where: str | None = None
    """The object that has it, if it is one object."""
    is_read: bool = False
    """Whether the records were read all the same: only their copies are missing, or differ."""
    is_missing: bool = False
    """Whether an object was not found, and nothing of it was read."""


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """Counts and problems that one task found."""

    records: int
    compared: int
    """How many of them were compared with their copies in the cold tier."""
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Reads the offsets ``first`` up to ``next``, and compares them with their copies. Changes nothing; repeatable."""

    first: int
    next: int
    spans: tuple[Span, ...]
    copies: tuple[Span, ...] = ()

    def __call__(self) -> CheckedRange:
        """Read every span; an error is reported, and reading continues with the next span."""
        forget_tails()  # those that an earlier task of this process read prove nothing about the store
        copies, own = _CheckedSpans(self.copies), _CheckedSpans(self.spans)
        copied = copies.tables()
        rest: list[pa.Table] = []
        records = compared = 0
        differing: list[Problem] = []
        for rows in own.tables():
            records += rows.num_rows
            _, end = _offsets_of(rows)
            while copies.reached < end and (copy := next(copied, None)) is not None:
                rest.append(copy)
            for copy in rest:
                ours, theirs = _common(rows, copy)
                compared += ours.num_rows
                differing += _differences(ours, theirs)
            rest = [copy for copy in rest if _offsets_of(copy)[1] > end]
        for _ in copied:  # copies without a counterpart are checked, too
            pass
        unread = [replace(problem, is_read=True) for problem in copies.problems]
        return CheckedRange(records, compared, (*own.problems, *unread, *_adjacent(differing)))


@dataclass(slots=True)
class _CheckedSpan:
    """A span whose ``fetch`` keeps an error instead of raising it, so that the next span is read, too."""

    span: Span
    is_first: bool = False
    """Whether it is the first of its object: then bytes of a segment that are in no row group are checked, too."""
    problem: Problem | None = None

    @property
    def size(self) -> int:
        return self.span.size

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        first, end = self.span.first, self.span.next
        where = object_of(self.span)
        kind = FindingKind.SEGMENT if is_cold(self.span) else FindingKind.BATCH
        try:
            batches = [batch for batch in self._read(columns) if batch.num_rows]
            for batch in batches:
                batch.validate(full=True)
            _check_times(self.span, batches)
        except CursorExpired as error:
            self.problem = Problem(FindingKind.TRIM, first, end, str(error), where)
        except (CorruptData, NotFound, pa.ArrowException) as error:
            what = f"Offsets {first} to {end - 1} cannot be read: {error}"
            self.problem = Problem(kind, first, end, what, where, is_missing=isinstance(error, NotFound))
        else:
            given = [batch.column("offset") for batch in batches]
            if given and pa.concat_arrays(given).equals(_offsets(self.span, sum(map(len, given)))):
                return batches
            what = f"The span of offsets {first} to {end - 1} has other records."
            self.problem = Problem(FindingKind.CONTINUITY, first, end, what, where)
        return []

    def _read(self, columns: Sequence[str] | None) -> list[pa.RecordBatch]:
        match self.span:
            case ColdSpan():
                if self.is_first:
                    check_between_columns(self.span)
                return read_whole_group(self.span)
            case SegmentSpan():
                parts = self.span.parts()
                check_between_columns(parts[0])
                return [batch for part in parts for batch in read_whole_group(part)]
            case _:
                return self.span.fetch(columns)


def _check_times(span: Span, batches: Sequence[pa.RecordBatch]) -> None:
    """``CorruptData`` unless the records of a whole batch object have the times with which it is listed."""
    if (
        not batches
        or not isinstance(span, ObjectSpan)
        or (span.first, span.next) != (span.entry.first, span.entry.next)
    ):
        return
    times = [pc.min_max(batch["timestamp"].cast(pa.int64())) for batch in batches]
    found = min(pair["min"].as_py() for pair in times), max(pair["max"].as_py() for pair in times)
    if found != (span.entry.oldest, span.entry.newest):
        raise CorruptData(
            f"{span.store.url}/{span.entry.location} is wrong: it holds records of the times {found}, and is listed "
            f"with {(span.entry.oldest, span.entry.newest)}. Restore the object."
        )


def _offsets(span: Span, records: int) -> pa.Array:
    """The offsets that the records of a span have to have."""
    if hasattr(span, "numbers_batches"):
        return pa.repeat(pa.scalar(span.first, pa.int64()), records)
    return pa.arange(span.first, span.next)


@dataclass(slots=True)
class _CheckedSpans:
    """The records of some spans, one span at a time, and their problems."""

    spans: tuple[Span, ...]
    problems: list[Problem] = field(default_factory=list)
    reached: int = -1
    """The offset after the last span that was read."""

    def tables(self) -> Iterator[pa.Table]:
        paths = [span.path if isinstance(span, ColdSpan) else None for span in self.spans]
        marked = (
            _CheckedSpan(span, is_first=path is not None and path != before)
            for span, path, before in zip(self.spans, paths, [None, *paths], strict=False)
        )
        for checked, batches in fetch_in_order(marked, columns=READ_SCHEMA.names, ahead=AHEAD):
            self.reached = checked.span.next
            if checked.problem is not None:
                self.problems.append(checked.problem)
            elif batches:
                yield pa.Table.from_batches(batches)


def is_cold(span: Span) -> bool:
    """Whether a span reads a segment."""
    return isinstance(span, ColdSpan | SegmentSpan)


def object_of(span: Span) -> str | None:
    """The object that a span reads; None if that is not one object of a store."""
    match span:
        case ObjectSpan():
            return span.entry.location
        case ColdSpan():
            return span.path
        case SegmentSpan():
            return segment_path(span.segment.segment, span.segment.start)
        case _:
            return None


def _offsets_of(rows: pa.Table) -> tuple[int, int]:
    """The first offset of contiguous records, and the one after the last."""
    first = rows.column("offset")[0].as_py()
    return first, first + rows.num_rows


def _common(rows: pa.Table, copy: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The records at the offsets that both have."""
    (a, b), (c, d) = _offsets_of(rows), _offsets_of(copy)
    low, high = max(a, c), max(min(b, d), a, c)
    return rows.slice(low - a, high - low), copy.slice(low - c, high - low)


def _differences(ours: pa.Table, theirs: pa.Table) -> list[Problem]:
    """From the first to the last record that is not the same on both sides; none if all are."""
    if same_unless_erased(ours, theirs):
        return []
    # Equal prefixes end at the first difference, suffixes begin behind the last: two binary searches.
    count = ours.num_rows
    shorter = range(1, count)
    low = bisect(shorter, False, key=lambda some: not same_unless_erased(ours.slice(0, some), theirs.slice(0, some)))
    high = count - bisect(
        shorter, False, key=lambda some: not same_unless_erased(ours.slice(count - some), theirs.slice(count - some))
    )
    first = _offsets_of(ours)[0] + low
    here, there = ours.slice(low, 1), theirs.slice(low, 1)
    columns = [name for name in READ_SCHEMA.names if not here.column(name).equals(there.column(name))]
    message = (
        f"At offset {first} the tiers differ in {', '.join(columns)}: the log has {_shown(here)}, its segment has "
        f"{_shown(there)}. Restore the object that was changed."
    )
    return [Problem(FindingKind.DIFFERENCE, first, first + high - low, message, is_read=True)]


def _shown(row: pa.Table) -> str:
    op, key, value = (row.column(name)[0].as_py() for name in ("op", "key", "value"))
    time = row.column("timestamp").cast(pa.int64())[0]
    return f"{Op(op).name.lower()} {short_bytes(key)} = {short_bytes(value)}, {time} µs"


def short_bytes(value: bytes | None) -> str:
    """Bytes for a message, cut.

    >>> short_bytes(None), short_bytes(b"a"), short_bytes(bytes(50))[-5:]
    ('None', "'a'", "x00'…")
    """
    text = repr(value) if value is None or len(value) <= _SHOWN else f"{value[:_SHOWN]!r}…"
    return text.removeprefix("b")


def _adjacent(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, in order, those of touching ranges as one with the message of the first."""
    found: list[Problem] = []
    for problem in sorted(problems, key=lambda one: one.first):
        if found and found[-1].next >= problem.first:
            found[-1] = replace(found[-1], next=max(found[-1].next, problem.next))
        else:
            found.append(problem)
    return found


def objects_within(spans: Sequence[Span], first: int, end: int) -> list[tuple[Any, ...]]:
    """The objects that spans read within a range, without regard to where the spans are cut."""
    return [_identity(span) for span in spans if span.first < end and first < span.next]


def _identity(span: Any) -> tuple[Any, ...]:
    """The object that a span reads, without the bounds of the span."""
    return (is_cold(span), *(getattr(span, name, None) for name in ("entry", "frame", "path", "group", "urls")))
