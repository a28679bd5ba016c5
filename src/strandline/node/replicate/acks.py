"""What a replica tells its primary: how far it is, as soon as that is durable, and how it hears whether it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from strandline.errors import SlotInvalid, StrandlineError
from strandline.model.cursor import Cursor
from strandline.node.lead.replica_registry import Progress
from strandline.node.messages import Caller, Upstream
from strandline.storage.clock import Clock


@final
class Telling:
    """A replica's acknowledgements, for the thread that follows and commits.

    Satisfies :class:`~strandline.followers.run.Position`: the replica's slot is its primary's, and advancing it is
    acknowledging.
    """

    def __init__(
        self,
        caller: Callable[[], Caller],
        progress: Callable[[int], Progress],
        *,
        end: Callable[[], int],
        heard: Callable[[int], object],
        poll_seconds: float,
        clock: Clock,
    ) -> None:
        """``progress`` says what a durable ``end`` comes to, and is asked before it is told; ``heard`` is told what is
        committed.
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
        self._told = -1
        """What it was told last."""
        self._untold: StrandlineError | None = None
        """Why it could not be told."""

    def begin(self, upstream: Upstream) -> None:
        """Tell this primary from here on; first, and with an answer, how far the copy is now."""
        self._upstream, self._untold = upstream, None
        self.touch()

    def stop(self) -> None:
        """Tell nobody any more."""
        self._upstream = None

    def durable(self, upto: int) -> None:
        """Tell what has just become durable, before anything else is done with it: somebody waits.

        It asks for no answer, since that costs both as much again. What became of it is known when the next one is
        answered, which is a poll interval later at the latest. Raises nothing: the next call does.
        """
        upstream = self._upstream
        if upstream is None or self._clock.monotonic() - self._answered >= self._poll_seconds:
            return
        try:
            progress = self._progress(upto)
            _count(upstream.tell(self._caller(), progress))
            self._told = progress.durable
        except StrandlineError as error:
            self._untold = error

    def advance(self, to: Cursor) -> None:
        """Tell what is durable, unless it was told at once; raises if that did not count, or nobody knows."""
        if self._untold is not None or self._told != to.next:
            self._acknowledge(to.next)

    def touch(self) -> None:
        """Tell how far the copy is, and wait for the answer; raises as well."""
        self._acknowledge(self._end())

    def _acknowledge(self, upto: int) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        if self._upstream is None:
            return
        progress = self._progress(upto)
        answer = self._upstream.acknowledge(self._caller(), progress)
        self._answered, self._told = self._clock.monotonic(), progress.durable
        self._heard(answer.beat.committed)
        _count(answer.refused)


def _count(refused: str | None) -> None:
    """Raise why an acknowledgement did not count, if it did not."""
    if refused is not None:
        raise SlotInvalid(refused)
