"""Offset index of one term: finds the segment that holds an offset, also where segments overlap. Pure.

The index is over *stretches*: the part of a segment that one term wrote. The rules are those of Apache Kafka's remote
log: of several that hold an offset, the one that starts last wins, and a copy that reaches at least as far as all
before it supersedes those that start within it. One rule is added: a superseded stretch still answers for offsets that
no other stretch has, so no stored record becomes unreadable.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from strandline.tier.metadata.columns import END, WIDTH, SegmentColumns

NONE: Final = -1
"""No stretch."""

_Rank = tuple[int, int, int, int, int]
"""Superseded stretches rank last. The last number is the stretch."""
_NO_RANK: Final = (NONE, NONE, NONE, NONE, NONE)


class Starts:
    """A sorted map from first offset to stretch, in plain numbers.

    A lookup costs the logarithm, and so does a change at either end. One in between moves the numbers after it, at
    gigabytes per second: it is rare, and follows the copy of a segment.
    """

    __slots__ = ("_head", "_starts", "_stretches")

    def __init__(self, starts: array[int], stretches: array[int]) -> None:
        self._starts, self._stretches = starts, stretches
        self._head = 0
        """How many at the beginning are removed: the oldest are the first to expire."""

    def floor(self, offset: int) -> int:
        """The last stretch that starts at or before the offset."""
        at = bisect_right(self._starts, offset, self._head)
        return self._stretches[at - 1] if at > self._head else NONE

    def above(self, offset: int) -> int:
        """The first stretch that starts after the offset."""
        at = bisect_right(self._starts, offset, self._head)
        return self._stretches[at] if at < len(self._stretches) else NONE

    def first(self) -> int:
        """The first start."""
        return self._starts[self._head] if self._head < len(self._starts) else NONE

    def last(self) -> tuple[int, int]:
        """The last start, and its stretch."""
        return (self._starts[-1], self._stretches[-1]) if self._head < len(self._starts) else (NONE, NONE)

    def put(self, start: int, stretch: int) -> int:
        """Enter a stretch; returns the one with the same start that it replaces, or NONE."""
        at = bisect_left(self._starts, start, self._head)
        if at < len(self._starts) and self._starts[at] == start:
            replaced, self._stretches[at] = self._stretches[at], stretch
            return replaced
        self._starts.insert(at, start)
        self._stretches.insert(at, stretch)
        return NONE

    def remove(self, start: int) -> None:
        """Take out the stretch that has this start; there must be one."""
        at = first = bisect_left(self._starts, start, self._head)
        if at == self._head:
            self._head += 1
            if self._head <= len(self._starts) // 2:
                return
            first = self._head = 0
        del self._starts[first : at + 1], self._stretches[first : at + 1]


class TermIndex:
    """The stretches of one term of one partition."""

    __slots__ = ("_columns", "_overlaps", "_starts", "highest", "size", "stretches")

    def __init__(
        self,
        columns: SegmentColumns,
        *,
        highest: int = NONE,
        stretches: array[int] | None = None,
        starts: Starts | None = None,
        overlapping: array[int] | None = None,
    ) -> None:
        self._columns = columns
        self._starts = Starts(array("q"), array("i")) if starts is None else starts
        self._overlaps: dict[int, tuple[_Rank, int, int]] = {}
        """Rank and range of the stretches that overlap others, which are few: each question looks at all of them."""
        self.highest = highest
        """The highest offset of any finished copy, including removed ones; -1 without any."""
        self.stretches = array("i") if stretches is None else stretches
        """Of all segments with the term, including removed ones."""
        self.size: int | None = None
        """Total bytes of the segments with the term; computed on first use."""
        for stretch in overlapping or ():
            self._overlap(stretch)

    def find(self, offset: int) -> int:
        """The stretch that answers for the offset, if any holds it."""
        found = self._starts.floor(offset)
        if found != NONE:
            columns = self._columns
            row = columns.row_of[found]
            # Most segments have one term: then the segment's end is the stretch's end.
            if columns.fixed[row * WIDTH + END] >= offset and (
                columns.first[row + 1] - columns.first[row] == 1 or columns.end_of(found) >= offset
            ):
                return found
        holding = (rank for rank, start, end in self._overlaps.values() if start <= offset <= end)
        return max(holding, default=_NO_RANK)[-1] if self._overlaps else NONE

    def lowest(self) -> int:
        """The lowest offset that is found."""
        return self._least([self._starts.first(), *(start for _, start, _ in self._overlaps.values())])

    def next_start(self, offset: int) -> int:
        """The first offset after this one at which a stretch starts."""
        above = self._starts.above(offset)
        overlapping = (start for _, start, _ in self._overlaps.values() if start > offset)
        return self._least([NONE if above == NONE else self._columns.start_of(above), *overlapping])

    @staticmethod
    def _least(offsets: Iterable[int]) -> int:
        return min((offset for offset in offsets if offset != NONE), default=NONE)

    def reach(self) -> int:
        """The highest offset that is found."""
        _, last = self._starts.last()
        ends = (end for _, _, end in self._overlaps.values())
        return max([NONE if last == NONE else self._columns.end_of(last), *ends])

    def finish(self, stretch: int) -> None:
        """Enter a stretch whose copy has finished; it may supersede others."""
        columns = self._columns
        start, end = columns.start_of(stretch), columns.end_of(stretch)
        highest = self.highest
        if highest < end and start <= end + 1:
            self.highest = end
        if start > end:
            # The next term starts at the same offset: the stretch is empty and must supersede nothing.
            return
        last_start, last = self._starts.last()
        while last_start >= start and highest <= end:
            self._starts.remove(last_start)
            self._supersede(last)
            last_start, last = self._starts.last()
        if last_start < start:
            before, after = last, NONE
        else:
            before, after = self._starts.floor(start - 1), self._starts.above(start)
        replaced = self._starts.put(start, stretch)
        columns.answers[stretch] = 1
        if replaced != NONE:
            self._supersede(replaced)
        if before != NONE and columns.end_of(before) >= start:
            self._overlap(before)
        if after != NONE and columns.start_of(after) <= end:
            self._overlap(stretch)

    def withdraw(self, stretch: int) -> None:
        """Take out a stretch whose deletion has started; stretches that it superseded answer again."""
        if self._columns.answers[stretch]:
            self._columns.answers[stretch] = 0
            self._starts.remove(self._columns.start_of(stretch))
        self._overlaps.pop(stretch, None)

    def is_spare(self, stretch: int) -> bool:
        """Whether stretches that are not superseded hold every offset of this superseded one."""
        offset, end = self._columns.start_of(stretch), self._columns.end_of(stretch)
        while offset <= end:
            found = self.find(offset)
            if found == NONE or not self._columns.answers[found]:
                return False
            offset = self._columns.end_of(found) + 1
        return True

    def _supersede(self, stretch: int) -> None:
        self._columns.answers[stretch] = 0
        self._overlap(stretch)

    def _overlap(self, stretch: int) -> None:
        """Enter the stretch among those that overlap, where superseded ones rank last."""
        columns = self._columns
        start, end = columns.start_of(stretch), columns.end_of(stretch)
        segment = columns.id_of(columns.row_of[stretch])
        self._overlaps[stretch] = (columns.answers[stretch], start, -end, segment, stretch), start, end
