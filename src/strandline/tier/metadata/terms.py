"""Offset index of one term: finds the segment that holds an offset, also where segments overlap. Pure.

The index is over *stretches*: the part of a segment that one term wrote. The rules are those of Apache Kafka's remote
log: of several that hold an offset, the one that starts last wins, and a copy that reaches at least as far as all
before it supersedes those that start within it. One rule is added: a superseded stretch still answers for offsets that
no other stretch has, so no stored record becomes unreadable.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from strandline.tier.metadata.columns import END, WIDTH, SegmentColumns

NONE: Final = -1
"""No stretch."""
_CHUNK: Final = 512

_Rank = tuple[int, int, int, int, int]


class Starts:
    """A sorted map from first offset to stretch, in chunks of plain numbers; each operation costs the logarithm."""

    __slots__ = ("_firsts", "_starts", "_stretches")

    def __init__(self, starts: array[int], stretches: array[int]) -> None:
        places = range(0, len(starts), _CHUNK)
        self._starts = [starts[at : at + _CHUNK] for at in places]
        self._stretches = [stretches[at : at + _CHUNK] for at in places]
        self._firsts = [chunk[0] for chunk in self._starts]

    def floor(self, offset: int) -> int:
        """The last stretch that starts at or before the offset."""
        chunk = bisect_right(self._firsts, offset) - 1
        return NONE if chunk < 0 else self._stretches[chunk][bisect_right(self._starts[chunk], offset) - 1]

    def above(self, offset: int) -> int:
        """The first stretch that starts after the offset."""
        chunk = bisect_right(self._firsts, offset)
        if chunk:
            within = bisect_right(self._starts[chunk - 1], offset)
            if within < len(self._starts[chunk - 1]):
                return self._stretches[chunk - 1][within]
        return self._stretches[chunk][0] if chunk < len(self._firsts) else NONE

    def first(self) -> int:
        """The first start."""
        return self._firsts[0] if self._firsts else NONE

    def last(self) -> tuple[int, int]:
        """The last start, and its stretch."""
        return (self._starts[-1][-1], self._stretches[-1][-1]) if self._firsts else (NONE, NONE)

    def put(self, start: int, stretch: int) -> int:
        """Enter a stretch; returns the one with the same start that it replaces, or NONE."""
        chunk = bisect_right(self._firsts, start) - 1
        if chunk < 0:
            if not self._firsts:
                self._insert_chunk(0, array("q", (start,)), array("i", (stretch,)))
                return NONE
            chunk = 0
        starts, stretches = self._starts[chunk], self._stretches[chunk]
        at = bisect_left(starts, start)
        if at < len(starts) and starts[at] == start:
            replaced, stretches[at] = stretches[at], stretch
            return replaced
        if at == len(starts) >= _CHUNK and chunk == len(self._firsts) - 1:
            # Most come in order: full chunks stay full instead of being split into halves that never grow.
            self._insert_chunk(chunk + 1, array("q", (start,)), array("i", (stretch,)))
            return NONE
        starts.insert(at, start)
        stretches.insert(at, stretch)
        self._firsts[chunk] = starts[0]
        if len(starts) > 2 * _CHUNK:
            self._insert_chunk(chunk + 1, starts[_CHUNK:], stretches[_CHUNK:])
            del starts[_CHUNK:], stretches[_CHUNK:]
        return NONE

    def remove(self, start: int) -> None:
        """Take out the stretch that has this start; there must be one."""
        chunk = bisect_right(self._firsts, start) - 1
        starts = self._starts[chunk]
        at = bisect_left(starts, start)
        del starts[at], self._stretches[chunk][at]
        if starts:
            self._firsts[chunk] = starts[0]
        else:
            del self._firsts[chunk], self._starts[chunk], self._stretches[chunk]

    def _insert_chunk(self, at: int, starts: array[int], stretches: array[int]) -> None:
        self._firsts.insert(at, starts[0])
        self._starts.insert(at, starts)
        self._stretches.insert(at, stretches)


class Overlaps:
    """The stretches that overlap others, by range and rank. They are few: each question looks at all of them."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[_Rank, int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def first(self) -> int:
        """The lowest offset that one of the ranges holds."""
        return min((start for _, start, _ in self._ranges.values()), default=NONE)

    def above(self, offset: int) -> int:
        """The first start of a range after the offset."""
        return min((start for _, start, _ in self._ranges.values() if start > offset), default=NONE)

    def last(self) -> int:
        """The highest offset that one of the ranges holds."""
        return max((end for _, _, end in self._ranges.values()), default=NONE)

    def add(self, rank: _Rank, start: int, end: int) -> None:
        """Enter a range of at least one offset, or give it another rank. The last number of a rank is its stretch."""
        self._ranges[rank[-1]] = rank, start, end

    def discard(self, stretch: int) -> None:
        """Take the stretch out, if it is there."""
        self._ranges.pop(stretch, None)

    def find(self, offset: int) -> int:
        """The stretch highest in rank that holds the offset."""
        holding = (rank for rank, start, end in self._ranges.values() if start <= offset <= end)
        best = max(holding, default=None)
        return NONE if best is None else best[-1]


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
        self._overlaps = Overlaps()
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
        return self._overlaps.find(offset) if self._overlaps else NONE

    def lowest(self) -> int:
        """The lowest offset that is found."""
        return min((first for first in (self._starts.first(), self._overlaps.first()) if first != NONE), default=NONE)

    def next_start(self, offset: int) -> int:
        """The first offset after this one at which a stretch starts."""
        above = self._starts.above(offset)
        found = (NONE if above == NONE else self._columns.start_of(above), self._overlaps.above(offset))
        return min((start for start in found if start != NONE), default=NONE)

    def reach(self) -> int:
        """The highest offset that is found."""
        _, last = self._starts.last()
        return max(NONE if last == NONE else self._columns.end_of(last), self._overlaps.last())

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
        self._overlaps.discard(stretch)

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
        self._overlaps.add((columns.answers[stretch], start, -end, segment, stretch), start, end)
