"""Replica acknowledgements: sends the durable offset to the primary, and raises when it is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from strandline.errors import SlotInvalid, StrandlineError
from strandline.model.cursor import Cursor
from strandline.node.messages import Caller, ReplicaProgress, Upstream
from strandline.storage.clock import Clock


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
