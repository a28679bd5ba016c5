"""Replica acknowledgements: sends the durable offset to the primary, and raises when it is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from strandline.errors import SlotInvalid, StrandlineError
from strandline.model.cursor import Cursor
from strandline.node.lead.replica_registry import ReplicaProgress
from strandline.node.messages import Caller, Upstream
from strandline.storage.clock import Clock


@final
class AckSender:
    """Sends a replica's acknowledgements; for the thread that follows and commits.

    Satisfies :class:`~strandline.log.heartbeat.Beating`: the replica's slot is on its primary, and acknowledging
    advances it.
    """

    def __init__(
        self,
        caller: Callable[[], Caller],
        progress: Callable[[int], ReplicaProgress],
        *,
        end: Callable[[], int],
        heard: Callable[[int], object],
        poll_seconds: float,
        clock: Clock,
    ) -> None:
        """``progress`` builds the acknowledgement of a durable end, before it is sent; ``heard`` takes the watermark of
        each answer.
        """
        self._caller = caller
        self._progress = progress
        self._end = end
        self._heard = heard
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._upstream: Upstream | None = None
        self._answered = 0.0
        """When the primary last answered."""
        self._acknowledged = -1
        """The offset that was acknowledged last."""
        self._unsent: StrandlineError | None = None
        """Why the last acknowledgement could not be sent."""

    def begin(self, upstream: Upstream) -> None:
        """Acknowledge to this primary from here on; sends the current end first, and waits for the answer."""
        self._upstream, self._unsent = upstream, None
        self.touch()

    def stop(self) -> None:
        """Send no more acknowledgements."""
        self._upstream = None

    def durable(self, upto: int) -> None:
        """Acknowledge what has just become durable, before anything else is done with it: an append may wait for it.

        Asks for no answer, which would double the cost on both sides. A rejection arrives with the next answer, one
        heartbeat interval later at most. Raises nothing: the next call does.
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
        """Acknowledge what is durable, unless :meth:`durable` did; raises if that was rejected, or may be."""
        if self._unsent is not None or self._acknowledged != to.next:
            self._acknowledge(to.next)

    def touch(self) -> None:
        """Acknowledge the end of the copy, and wait for the answer; raises as :meth:`advance`."""
        self._acknowledge(self._end())

    def _acknowledge(self, upto: int) -> None:
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            raise unsent
        if self._upstream is None:
            return
        progress = self._progress(upto)
        answer = self._upstream.acknowledge(self._caller(), progress)
        self._answered, self._acknowledged = self._clock.monotonic(), progress.durable
        self._heard(answer.heartbeat.committed)
        _check(answer.refused)


def _check(refused: str | None) -> None:
    """``SlotInvalid`` if the acknowledgement was rejected."""
    if refused is not None:
        raise SlotInvalid(refused)
