"""Planning shared by all logs: limits, clipping to offsets, column selection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Generic, Protocol, TypeVar

import pyarrow as pa

from strandline.errors import Diverged, InvalidInput
from strandline.model.cursor import Cursor, Limit, OffsetRange, Span
from strandline.model.records import READ_SCHEMA


class Fingerprinted(Protocol):
    """A batch that can be distinguished from any other batch at the same offset."""

    @property
    def fingerprint(self) -> int | None:
        """The :func:`~strandline.model.cursor.batch_fingerprint` of the batch's identity; None: unknown."""


class StoredBatch(OffsetRange, Fingerprinted, Protocol):
    """A stored batch with its fingerprint."""


E = TypeVar("E", bound=OffsetRange)
B = TypeVar("B", bound=StoredBatch)
S = TypeVar("S", bound=Span)
A = TypeVar("A")


def cursor_after(since: Cursor, span: Span) -> Cursor:
    """The cursor after this span, for a consumer that has applied everything below ``since``.

    It has the span's term and the fingerprint of its batch, if the log has them.
    """
    return Cursor(since.log_id, span.next, getattr(span, "term", since.term), getattr(span, "fingerprint", None))


def joined(spans: Iterable[A], fits: Callable[[A, A], bool] = lambda *_: True) -> Iterator[A]:
    """The same offsets in fewer spans, where one call per span would cost more than reading its records.

    Spans are joined while they fit; a span that cannot be joined is given before the next one is looked at.
    """
    held: Any = None
    for span in spans:
        both = held.join(span) if held is not None and fits(held, span) else None
        if both is not None:
            held = both
            continue
        if held is not None:
            yield held
        held = span if hasattr(span, "join") else None
        if held is None:
            yield span
    if held is not None:
        yield held


def divided_spans(spans: Iterable[A]) -> Iterator[A]:
    """The spans, and the parts of those that are divisible."""
    for span in spans:
        yield from span.parts() if hasattr(span, "parts") else (span,)


FULL_PARTITION: Final = 128 << 20
"""Most bytes per task, as far as whole batches allow."""

SMALL_PARTITION: Final = 1 << 20
"""Below this a further task costs more (25 to 30 ms) than it saves."""


def pack(spans: Sequence[S], cores: int, size: Callable[[S], int] | None = None) -> list[list[S]]:
    """Distribute spans over tasks: contiguous, balanced by bytes, each span in exactly one task and in order.

    ``size`` gives the bytes of a span; by default they are the stored ones.

    About one task per core and per 128 MiB: more data gives more tasks, in multiples of the cores, so that the last
    round is a full one; little data gives fewer.
    """
    total = sum(span.size if size is None else size(span) for span in spans)
    return [task for task in divided(spans, _tasks(total, cores)) if task]


def divided(spans: Sequence[S], wanted: int) -> list[list[S]]:
    """The spans in ``wanted`` groups, of which some may be empty: contiguous, balanced by bytes, in order."""
    total = sum(span.size for span in spans)
    tasks: list[list[S]] = [[] for _ in range(wanted)]
    before = 0
    for span in spans:
        # The task whose share of the bytes contains the span's middle.
        tasks[min(wanted - 1, (2 * before + span.size) * wanted // max(1, 2 * total))].append(span)
        before += span.size
    return tasks


def _tasks(total: int, cores: int) -> int:
    worthwhile = max(1, min(cores, -(-total // SMALL_PARTITION)))
    needed = -(-total // FULL_PARTITION)
    return worthwhile if needed <= worthwhile else -(-needed // cores) * cores


def entries_after(since: Cursor, first: int, entries_from: Callable[[int], Iterator[B]]) -> Iterator[B]:
    """The entries after a cursor; ``Diverged`` if the batch before it is not the one that the cursor was made from.

    ``entries_from(offset)`` gives the entries from the one with that offset on. Below ``first`` there are none, and
    the cursor's history cannot be checked.
    """
    if since.fingerprint is None or since.next <= first:
        return entries_from(since.next)
    entries = entries_from(since.next - 1)
    before = next(entries, None)
    if before is None:
        return entries
    check_fingerprint(since, before)
    return chain([before], entries) if before.next > since.next else entries


def check_fingerprint(since: Cursor, before: Fingerprinted) -> None:
    """``Diverged`` if the batch that holds the record before the cursor is not the one that the consumer applied."""
    if since.fingerprint is not None and before.fingerprint not in (None, since.fingerprint):
        raise Diverged(
            f"The record at offset {since.next - 1}, the last one that the consumer at this cursor has applied, is in "
            "another batch than it was then: the log was restored from a copy, or overwritten by one, and has grown "
            "differently since. Build the consumer's state again, from the beginning or from a snapshot of this log."
        )


def known_columns(columns: Sequence[str]) -> list[str]:
    """The columns; ``InvalidInput`` if a log does not have them."""
    unknown = [name for name in columns if name not in READ_SCHEMA.names]
    if unknown:
        raise InvalidInput(f"There is no column {unknown}; a log has {READ_SCHEMA.names}.")
    return list(columns)


def clipped(batches: list[pa.RecordBatch], first: int, end: int) -> list[pa.RecordBatch]:
    """Numbered batches without records below ``first`` or not below ``end``; copies nothing."""
    kept = []
    for batch in batches:
        start = batch.column(0)[0].as_py() if batch.num_rows else first
        skip = max(0, first - start)
        rows = min(batch.num_rows, end - start) - skip
        if rows > 0:
            kept.append(batch if rows == batch.num_rows else batch.slice(skip, rows))
    return kept


def plan_entries(entries: Iterable[E], since: int, limit: Limit) -> list[tuple[E, int, int]]:
    """Consecutive entries from ``since`` on with the needed offsets of each, within the limit but at least one."""
    if limit.is_bounded_by_offset_only:
        return _entries_upto(entries, since, limit.upto)
    planned: list[tuple[E, int, int]] = []
    records = size = 0
    for entry in entries:
        end = entry.next if limit.upto is None else min(entry.next, limit.upto)
        first = max(entry.first, since)
        records += end - first
        size += entry.size
        fits = limit.allows(records=records, size=size, batches=len(planned) + 1)
        if end <= first or (planned and not fits):
            break
        planned.append((entry, first, end))
        # The next entry may cost the read of a chunk: skip it if it cannot fit.
        if not limit.allows(records=records + 1, size=size + 1, batches=len(planned) + 1):
            break
    return planned


def _entries_upto(entries: Iterable[E], since: int, upto: int | None) -> list[tuple[E, int, int]]:
    """The same without a limit of size: plans may have a million spans, so that each must cost little."""
    planned: list[tuple[E, int, int]] = []
    for entry in entries:
        end = entry.next if upto is None else min(entry.next, upto)
        first = max(entry.first, since)
        if end <= first:
            break
        planned.append((entry, first, end))
        if end == upto:
            break
    return planned


class PlanBuilder(Generic[E]):
    """A plan built from several plans: in order, within one limit, but at least one span."""

    def __init__(self, limit: Limit) -> None:
        self.spans: list[E] = []
        self._limit = limit
        self._records = self._size = 0

    def add(self, spans: Iterable[E]) -> bool:
        """Add as many spans as fit; returns whether all did."""
        for span in spans:
            records, size = self._records + span.next - span.first, self._size + span.size
            if self.spans and not self._limit.allows(records=records, size=size, batches=len(self.spans) + 1):
                return False
            self.spans.append(span)
            self._records, self._size = records, size
        return True

    @property
    def is_full(self) -> bool:
        """Whether nothing more can fit."""
        size, count = self._size + 1, len(self.spans) + 1
        return bool(self.spans) and not self._limit.allows(records=self._records + 1, size=size, batches=count)

    @property
    def rest(self) -> Limit:
        """The remaining limit, at least one of each."""
        limit = self._limit
        return Limit(
            None if limit.records is None else max(1, limit.records - self._records),
            None if limit.bytes is None else max(1, limit.bytes - self._size),
            None if limit.batches is None else max(1, limit.batches - len(self.spans)),
            limit.upto,
        )
