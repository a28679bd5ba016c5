"""A range in as many commits as memory allows: what does not fit is tried again in smaller pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from strandline.errors import JobFailed
from strandline.log.contract import Log
from strandline.model.cursor import Cursor
from strandline.tables.work import RangeTooLarge

_LOGGER: Final = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Pieces:
    """Divides the ranges of one follower. Each commit has its cursor, so that none is applied twice."""

    log: Log
    _count: int = 1
    """Into how many commits a range is divided."""

    def store(
        self,
        items: Sequence[T],
        since: Cursor,
        upto: Cursor,
        *,
        after: Callable[[Cursor, T], Cursor],
        commit: Callable[[Sequence[T], Cursor, Cursor], None],
        within: Callable[[Sequence[T]], Sequence[T]] = lambda items: items,
    ) -> None:
        """Commit a range of batches, in order: as many at once as ``within`` says, and as fit into memory.

        ``after`` gives the cursor after a batch. One batch is not divided: its ``MemoryError`` is raised.
        """
        rest, fewer = items, len(items)
        while rest:
            some = within(rest[: max(1, min(fewer, len(items) // self._count))])
            rest = rest[len(some) :]
            end = after(since, some[-1]) if rest else upto
            try:
                commit(some, since, end)
            except RangeTooLarge:
                rest, fewer = [*some, *rest], len(some) - 1  # what it takes is known now
            except MemoryError as error:
                if len(some) == 1:
                    error.add_note(
                        f"Offsets {since.next} to {end.next - 1} of {self.log!r} are one batch, which is not divided: "
                        "give the follower, or Spark's workers, more memory."
                    )
                    raise
                self._count *= 2
                _LOGGER.warning(
                    "Offsets %d to %d did not fit into memory, and are tried again in smaller pieces.",
                    since.next, end.next - 1,
                )  # fmt: skip
                rest = [*some, *rest]
            except JobFailed:
                # A worker that took too much memory may have been killed: the next try takes less at once.
                self._count = min(2 * self._count, len(items))
                raise
            else:
                since, fewer = end, len(items)
        self._count = max(1, self._count // 2)
