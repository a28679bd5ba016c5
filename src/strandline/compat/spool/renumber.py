"""Renumbering of spool records whose lsns have gaps or go back: pure decisions over the lsns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from strandline.compat.spool.format import SpoolRecord
from strandline.log.slots import put_at
from strandline.model.retention import SlotState

OLD_LSN: Final = "spool-lsn"
"""The header in which a renumbered record keeps the lsn that it had, in decimal digits."""


@dataclass(frozen=True, slots=True)
class LsnGap:
    """A place where the lsns of a spool do not follow each other."""

    index: int
    """Which record it is before, counted from 0."""
    after: int
    """The lsn of the record before."""
    found: int
    """The lsn of this one."""

    @property
    def missing(self) -> int:
        """How many lsns were passed over; 0 where they go back."""
        return max(0, self.found - self.after - 1)

    def __str__(self) -> str:
        """The lsns that are missing, or how they go back."""
        if self.missing:
            return f"{self.after + 1}" if self.missing == 1 else f"{self.after + 1}-{self.found - 1}"
        return f"{self.found} after {self.after}"


@dataclass(frozen=True, slots=True)
class Renumbering:
    """New lsns for the records of a spool, in their order: the first keeps its own, and each further one follows."""

    start: int
    """The offset of the first record."""
    lsns: Sequence[int]
    """The lsns as they were."""
    gaps: tuple[LsnGap, ...]

    @property
    def missing(self) -> int:
        """How many lsns were passed over in all."""
        return sum(gap.missing for gap in self.gaps)

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return self.start + len(self.lsns)

    def records(self, found: Iterable[SpoolRecord]) -> Iterator[SpoolRecord]:
        """The same records with their new lsns."""
        for lsn, record in enumerate(found, self.start + 1):
            yield record._replace(lsn=lsn)

    def old_lsns(self, first: int, count: int) -> Sequence[int]:
        """What ``count`` records from a new lsn on were numbered before."""
        return self.lsns[first - 1 - self.start : first - 1 - self.start + count]

    def slots(self, slots: Iterable[SlotState]) -> list[SlotState]:
        """The slots at their new positions: before the first record that their consumers do not have.

        Where lsns go back, a consumer may be given records again, and never misses one. A slot that needs records from
        before the spool's first, or is past its last, stays so.
        """
        highest = list(accumulate(self.lsns, max))
        lowest = min(self.lsns)

        def moved(position: int) -> int:
            if position + 1 < lowest:
                return min(position, self.start - 1)  # what it needs next is not there
            if position > highest[-1]:
                return self.end + position - highest[-1]
            # Up to the first record with a higher lsn all are at or below its own: it has them.
            return self.start + bisect_right(highest, position)

        return [put_at(slot, max(0, moved(slot.position))) for slot in slots]


def plan_renumbering(lsns: Sequence[int], last: int) -> Renumbering | None:
    """How to number these records anew; None if their lsns follow each other, up to ``last``, as they are.

    >>> plan = plan_renumbering([7, 8, 11, 10], last=100)
    >>> plan.start, [str(gap) for gap in plan.gaps], plan.missing
    (6, ['9-10', '10 after 11'], 2)
    """
    if not lsns:
        return None
    gaps = tuple(
        LsnGap(index, after, found) for index, (after, found) in enumerate(pairwise(lsns), 1) if found != after + 1
    )
    fits = 1 <= lsns[0] <= last - len(lsns) + 1
    return None if fits and not gaps else Renumbering(lsns[0] - 1 if fits else 0, lsns, gaps)
