"""What arrives at a replica, and whether it may be applied: a feed to follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, final
from uuid import UUID

from strandline.errors import CorruptData, Diverged, Fenced, Gap
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor
from strandline.model.node import Beat
from strandline.node.messages import Feed

AHEAD_BYTES: Final = 64 << 20
"""A replica keeps no more than so much, or one batch, that its primary's disk does not have yet."""


class Verdict(Enum):
    """What to do with a batch that arrived."""

    SKIP = "older than what is compared"
    COMPARE = "ends with the record before: equal, or diverged"
    APPLY = "next"
    COMPARE_AND_APPLY = "holds the record before, and the next"


def judge(batch: LogBatch, at: Cursor, beat: Beat, *, seen: int) -> Verdict:
    """Whether a batch may be applied by a replica that is at ``at`` and has seen the term ``seen``.

    ``Fenced`` from a primary of a lower term, and for records of one: terms never go down along a log. ``Gap`` if it
    is not what follows. A batch stands for its records: they are of one term, and next to each other.
    """
    if beat.term < seen:
        raise Fenced(
            f"A primary of term {beat.term} sends records, and this replica has seen term {seen}: nothing of it was "
            "applied. Follow the primary of that term."
        )
    if batch.term > beat.term:
        raise CorruptData(f"A primary of term {beat.term} sends records of term {batch.term}; nothing was applied.")
    if batch.first > at.next:
        raise Gap(
            f"Records from offset {batch.first} on arrived, and this replica needs {at.next}: {batch.first - at.next} "
            "are missing. Nothing was applied; it has to bootstrap again."
        )
    if batch.next < at.next:
        return Verdict.SKIP
    if batch.next > at.next and batch.term < at.term:
        raise Fenced(
            f"Records of term {batch.term} arrived behind records of term {at.term}, which a primary that was replaced "
            "has written: nothing of it was applied."
        )
    if batch.first == at.next:
        return Verdict.APPLY
    return Verdict.COMPARE if batch.next == at.next else Verdict.COMPARE_AND_APPLY


def diverged(at: Cursor) -> Diverged:
    """The error for a record that is here with another content."""
    return Diverged(
        f"The record before offset {at.next} is another one on the primary than here, in the same place: nothing was "
        "applied. Find out which of the two is right, and let the other bootstrap again."
    )


@final
class Arrivals:
    """A feed to follow: what it gives has arrived, was judged, and follows the sink's position.

    Satisfies :class:`~strandline.followers.run.Arriving`.
    """

    def __init__(
        self, log_id: UUID, feed: Feed, seen: Callable[[], int], compare: Callable[[LogBatch, Cursor], bool]
    ) -> None:
        """``compare`` tells whether the record before a position is here as it is in a batch."""
        self._log_id = log_id
        self._feed = feed
        self._seen = seen
        self._compare = compare
        self._arrived: Sequence[LogBatch] = ()
        """What was not given yet: it came while it was waited for, or the primary's disk may not have it."""

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._log_id

    def arrived(self, since: Cursor) -> list[LogBatch]:
        """All that has arrived from a position on; what does not follow raises, before any of it is applied."""
        if not self._arrived:
            self._arrived = self._feed.take(0.0)
        beat = self._feed.beat
        if beat is None or not self._arrived:
            return []
        found: list[LogBatch] = []
        at, seen = since, self._seen()
        for batch in self._durable(beat):
            if found:
                at = Cursor(at.log_id, found[-1].next, found[-1].term)
            verdict = judge(batch, at, beat, seen=seen)
            if verdict is Verdict.SKIP:
                continue
            # Only the sink's own record can differ: what arrived together comes from one log.
            if verdict is not Verdict.APPLY and at == since and not self._compare(batch, at):
                raise diverged(at)
            if verdict is not Verdict.COMPARE:
                found.append(batch)
        return found

    def _durable(self, beat: Beat) -> Sequence[LogBatch]:
        """What the primary's disk has of what has arrived; the rest is kept."""
        arrived = self._arrived
        count = len(arrived)
        while count and arrived[count - 1].next > beat.durable:
            count -= 1
        self._arrived = arrived[count:]
        if len(self._arrived) > 1 and sum(batch.size for batch in self._arrived) > AHEAD_BYTES:
            raise CorruptData(
                f"A primary whose disk has everything below {beat.durable} has sent all below {arrived[-1].next}, and "
                "that is too much to be kept: nothing of it was applied. Connect again."
            )
        return arrived[:count]

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until something can be applied (True), perhaps nothing new, or the time is over (False)."""
        del past
        if not self._arrived:
            self._arrived = self._feed.take(timeout)
        if self._arrived and not self._can_apply():  # the primary's word that its disk has it is on its way
            self._arrived = [*self._arrived, *self._feed.take(timeout)]
        return self._can_apply()

    def _can_apply(self) -> bool:
        beat = self._feed.beat
        return bool(self._arrived) and (beat is None or self._arrived[0].next <= beat.durable)
