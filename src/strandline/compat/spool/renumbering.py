"""New lsns for a spool whose own leave gaps or go back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from strandline.compat.spool.format import SpoolRecord
from strandline.log.slots.rules import put_at
from strandline.model.retention import SlotState

OLD_LSN: Final = "spool-lsn"
"""The header in which a renumbered record keeps its old lsn, in decimal digits."""


@dataclass(frozen=True, slots=True)
class LsnGap:
    """A place where the lsns of a spool are not consecutive."""

    index: int
    """Index of the record after it, from 0."""
    after: int
    """The lsn of the record before."""
    found: int
    """The lsn of this one."""

    @property
    def missing(self) -> int:
        """Number of missing lsns; 0 where they go back."""
        return max(0, self.found - self.after - 1)

    def __str__(self) -> str:
        """The missing lsns, or how they go back."""
        if self.missing:
            return f"{self.after + 1}" if self.missing == 1 else f"{self.after + 1}-{self.found - 1}"
        return f"{self.found} after {self.after}"


@dataclass(frozen=True, slots=True)
class Renumbering:
    """New lsns for the records of a spool, in order: the first keeps its own, and the others follow."""

    start: int
    """The offset of the first record."""
    lsns: Sequence[int]
    """The old lsns."""
    gaps: tuple[LsnGap, ...]

    @property
    def missing(self) -> int:
        """Total number of missing lsns."""
        return sum(gap.missing for gap in self.gaps)

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.start + len(self.lsns)

    def records(self, found: Iterable[SpoolRecord]) -> Iterator[SpoolRecord]:
        """The records with their new lsns."""
        for lsn, record in enumerate(found, self.start + 1):
            yield record._replace(lsn=lsn)

    def old_lsns(self, first: int, count: int) -> Sequence[int]:
        """The old lsns of ``count`` records from a new lsn on."""
        return self.lsns[first - 1 - self.start : first - 1 - self.start + count]

    def slots(self, slots: Iterable[SlotState]) -> list[SlotState]:
        """The slots at their new positions: before the first record that their consumers do not have.

        Where lsns go back, a consumer may get records again, and never misses one. A slot before the spool's first
        record, or past its last, stays so.
        """
        highest = list(accumulate(self.lsns, max))
        lowest = min(self.lsns)

        def moved(position: int) -> int:
            if position + 1 < lowest:
                return min(position, self.start - 1)  # its next record is missing
            if position > highest[-1]:
                return self.end + position - highest[-1]
            # All records up to the first with a higher lsn are at or below its own: it has them.
            return self.start + bisect_right(highest, position)

        return [put_at(slot, max(0, moved(slot.position))) for slot in slots]


def plan_renumbering(lsns: Sequence[int], last: int) -> Renumbering | None:
    """New lsns for these records; None if their lsns are consecutive, up to ``last``.

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
