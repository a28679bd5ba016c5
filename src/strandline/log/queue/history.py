"""Last batch that a consumer was given: detects a queue that was restored or replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strandline.errors import Diverged
from strandline.model.head import Descriptor


class GivenBatches:
    """Remembers the last batch that a queue gave its consumer, and refuses a queue that has another one in its place.

    A queue that was restored from an older copy while its consumer runs goes on with other batches under the same
    sequences. The consumer would pass over those that it believes to have read, and acknowledge them with the next.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Nothing was given yet."""
        self._last: Descriptor | None = None

    def note(self, batches: Sequence[Descriptor]) -> None:
        """These consecutive batches are given."""
        if batches and (self._last is None or batches[-1].sequence > self._last.sequence):
            self._last = batches[-1]

    def check(self, url: str, end: int, listed: Callable[[int], Descriptor | None]) -> None:
        """``Diverged`` if the queue, whose next batch is ``end``, does not have the last batch that was given.

        ``listed`` gives the batch of a sequence, or None if that is no longer listed; then nothing can be told.
        """
        last = self._last
        if last is None:
            return
        found = listed(last.sequence) if last.sequence < end else None
        if last.sequence >= end or (found is not None and found.location != last.location):
            raise Diverged(
                f"Batch {last.sequence} of {url} is not the one that this consumer was given ({last.location}): the "
                "queue was restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done "
                "with batches of the other history, and open a new consumer, which begins where the slot stands."
            )
