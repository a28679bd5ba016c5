"""What a replica exchanges with its primary: incoming batches, each checked before it is applied; acknowledgements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, final
from uuid import UUID

from strandline.errors import CorruptData, Diverged, Fenced, Gap, SlotInvalid, StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.node.messages import Caller, ReplicaProgress, ReplicationFeed, Upstream
from strandline.storage.clock import Clock

AHEAD_BYTES: Final = 64 << 20
"""Limit on buffered batches that are not durable on the primary yet; one batch may be larger."""


class BatchDecision(Enum):
    """Decision about an incoming batch."""

    SKIP = "older than the record to compare"
    COMPARE = "ends with the last local record: equal, or diverged"
    APPLY = "next"
    COMPARE_AND_APPLY = "holds the last local record, and the next one"


def decide(batch: LogBatch, at: Cursor, heartbeat: Heartbeat, *, seen: int) -> BatchDecision:
    """Whether a replica at ``at``, which has seen the term ``seen``, may apply a batch.

    ``Fenced`` from a primary of a lower term, and for records of one: terms never decrease along a log. ``Gap`` if
    records are missing before it. The records of a batch are contiguous and of one term.
    """
    if heartbeat.term < seen:
        raise Fenced(
            f"A primary of term {heartbeat.term} sends records, but this replica has seen term {seen}: nothing "
            "was applied. Follow the primary of that term."
        )
    if batch.term > heartbeat.term:
        raise CorruptData(
            f"A primary of term {heartbeat.term} sends records of term {batch.term}; nothing was applied."
        )
    if batch.first > at.next:
        raise Gap(
            f"Records from offset {batch.first} on arrived, and this replica needs {at.next}: {batch.first - at.next} "
            "are missing. Nothing was applied; it has to bootstrap again."
        )
    if batch.next < at.next:
        return BatchDecision.SKIP
    if batch.next > at.next and batch.term < at.term:
        raise Fenced(
            f"Records of term {batch.term} arrived after records of term {at.term}: a replaced primary has written "
            "them, and nothing was applied."
        )
    if batch.first == at.next:
        return BatchDecision.APPLY
    return BatchDecision.COMPARE if batch.next == at.next else BatchDecision.COMPARE_AND_APPLY


def diverged(at: Cursor) -> Diverged:
    """The error for a record that differs from the primary's."""
    return Diverged(
        f"The record before offset {at.next} differs between the primary and this replica: nothing was "
        "applied. Find out which of the two is right, and let the other bootstrap again."
    )


@final
class IncomingBatches:
    """A feed for the follower: checked batches that continue the sink's position.

    Satisfies :class:`~strandline.followers.run.PushedLog`.
    """

    def __init__(
        self, log_id: UUID, feed: ReplicationFeed, seen: Callable[[], int], compare: Callable[[LogBatch, Cursor], bool]
    ) -> None:
        """``compare`` says whether the local record before a position equals the one in a batch."""
        self._log_id = log_id
        self._feed = feed
        self._seen = seen
        self._compare = compare
        self._received: Sequence[LogBatch] = ()
        """Received batches that were not returned yet: received during a wait, or not durable on the primary yet."""

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._log_id

    def arrived(self, since: Cursor) -> list[LogBatch]:
        """All received batches from a position on; raises, before any is applied, if one does not continue it."""
        if not self._received:
            self._received = self._feed.take(0.0)
        heartbeat = self._feed.heartbeat
        if heartbeat is None or not self._received:
            return []
        found: list[LogBatch] = []
        at, seen = since, self._seen()
        for batch in self._durable(heartbeat):
            if found:
                at = Cursor(at.log_id, found[-1].next, found[-1].term)
            decision = decide(batch, at, heartbeat, seen=seen)
            if decision is BatchDecision.SKIP:
                continue
            # Only the last local record can differ: batches received together come from one log.
            if decision is not BatchDecision.APPLY and at == since and not self._compare(batch, at):
                raise diverged(at)
            if decision is not BatchDecision.COMPARE:
                found.append(batch)
        return found

    def _durable(self, heartbeat: Heartbeat) -> Sequence[LogBatch]:
        """The received batches that are durable on the primary; the rest stays buffered."""
        arrived = self._received
        count = len(arrived)
        while count and arrived[count - 1].next > heartbeat.durable:
            count -= 1
        self._received = arrived[count:]
        if len(self._received) > 1 and sum(batch.size for batch in self._received) > AHEAD_BYTES:
            raise CorruptData(
                f"A primary with everything below {heartbeat.durable} durable has sent everything below "
                f"{arrived[-1].next}: that exceeds the buffer, and nothing was applied. Connect again."
            )
        return arrived[:count]

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until a batch can be applied (True), or until the timeout (False)."""
        del past
        if not self._received:
            self._received = self._feed.take(timeout)
        if self._received and not self._can_apply():
            # The heartbeat with the durable end is on its way.
            self._received = [*self._received, *self._feed.take(timeout)]
        return self._can_apply()

    def _can_apply(self) -> bool:
        heartbeat = self._feed.heartbeat
        return bool(self._received) and (heartbeat is None or self._received[0].next <= heartbeat.durable)


# --- acknowledgements ------------------------------------------------------------------------------------------


@final
@dataclass(slots=True, eq=False)
class AckSender:
    """Sends a replica's acknowledgements; for the thread that follows and commits.

    Satisfies :class:`~strandline.log.slots.heartbeat.Beating`: the replica's slot is on its primary, and acknowledging
    advances it.
    """

    _caller: Callable[[], Caller]
    _progress: Callable[[int | None], ReplicaProgress]
    """Builds the acknowledgement of a durable end, or of the copy's, before it is sent."""
    _on_watermark: Callable[[int], object]
    """Called with the watermark of each answer."""
    _poll_seconds: float
    _clock: Clock
    _upstream: Upstream | None = None
    _answered: float = 0.0
    """When the primary last answered."""
    _acknowledged: int = -1
    """The offset that was acknowledged last."""
    _unsent: StrandlineError | None = None
    """Why the last acknowledgement could not be sent."""

    def begin(self, upstream: Upstream) -> None:
        """Acknowledge to this primary from here on; sends the current end first, and waits for the answer."""
        self._upstream, self._unsent = upstream, None
        self.touch()

    def stop(self) -> None:
        """Send no more acknowledgements."""
        self._upstream = None

    def durable(self, upto: int) -> None:
        """Acknowledge a new durable end at once: an append may wait for it.

        Requests no answer, which would double the cost on both sides. A rejection arrives with the next answer, at most
        one heartbeat interval later. Raises nothing: the next call does.
        """
        upstream = self._upstream
        if upstream is None or self._clock.monotonic() - self._answered >= self._poll_seconds:
            return
        try:
            progress = self._progress(upto)
            _check(upstream.acknowledge_nowait(self._caller(), progress))
            self._acknowledged = progress.durable
        except StrandlineError as error:
            self._unsent = error

    def advance(self, to: Cursor) -> None:
        """Acknowledge what is durable, unless :meth:`durable` did; raises if an acknowledgement was rejected."""
        if self._unsent is not None or self._acknowledged != to.next:
            self._acknowledge(to.next)

    def touch(self) -> None:
        """Acknowledge the end of the copy, and wait for the answer; raises as :meth:`advance`."""
        self._acknowledge(None)

    def _acknowledge(self, upto: int | None) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            raise unsent
        if self._upstream is None:
            return
        progress = self._progress(upto)
        answer = self._upstream.acknowledge(self._caller(), progress)
        self._answered, self._acknowledged = self._clock.monotonic(), progress.durable
        self._on_watermark(answer.heartbeat.committed)
        _check(answer.refused)


def _check(refused: str | None) -> None:
    """``SlotInvalid`` if the acknowledgement was rejected."""
    if refused is not None:
        raise SlotInvalid(refused)
