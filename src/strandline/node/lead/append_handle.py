"""Handle of an append on a primary: resolves when the commit policy is satisfied."""

from __future__ import annotations

from typing import final

from strandline.log.wal.log import WalLog
from strandline.log.wal.write.groups import WalHandle
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Cursor
from strandline.node.lead.commits import Commits
from strandline.node.lead.leadership import Leadership
from strandline.node.lead.policies import CommitPolicy, Local
from strandline.node.messages import Commit, NotRequired, Outcome, Reached, TimedOut
from strandline.storage.clock import Clock
from strandline.storage.metrics import COMMITS

_COUNTS = {kind: COMMITS.labels(kind.__name__) for kind in (Reached, TimedOut, NotRequired)}
_DOUBT = "the records are durable here and nobody knows whether they survive; append them again by writer and number"


@final
@checked
class CommitHandle:
    """The result of an append. Leadership is checked once the records are durable here and the policy is satisfied."""

    __slots__ = ("_clock", "_commits", "_handle", "_is_alone", "_leadership", "_log", "_policy", "_term_start")

    def __init__(
        self,
        handle: WalHandle,
        policy: CommitPolicy,
        commits: Commits,
        leadership: Leadership,
        log: WalLog,
        clock: Clock,
        *,
        term_start: int,
        is_alone: bool = False,
    ) -> None:
        """For a queued append; all records from ``term_start`` on are of the current term.

        ``is_alone``: durable on the primary satisfies the policy, without any acknowledgement.
        """
        self._handle = handle
        self._policy = policy
        self._commits = commits
        self._leadership = leadership
        self._log = log
        self._clock = clock
        self._term_start = term_start
        self._is_alone = is_alone

    def done(self) -> bool:
        """Whether :meth:`result` would not block."""
        if not self._handle.done():
            return False
        is_decided = isinstance(self._policy, Local) or not self._leadership.is_held
        return is_decided or self._commits.reached(self._policy) >= self._upto()

    def result(self, timeout: Timeout) -> Commit:
        """Block until the records are durable here, and until the policy is satisfied or the timeout is over."""
        outcome: Outcome = NotRequired()
        if not isinstance(self._policy, Local):
            deadline = self._clock.monotonic() + timeout
            if self._handle.first is None or not self._handle.is_driven or self._is_alone:
                self._handle.result()
            # Replicas only get what is durable here, so their acknowledgements are enough to wait for. A thread that
            # woke up in between would only slow down those that send.
            outcome = self._wait(deadline, timeout)
        receipt = self._handle.result()
        self._leadership.check(_DOUBT)
        _COUNTS[type(outcome)].inc()
        return Commit(receipt, outcome, self._bookmark())

    def _upto(self) -> int:
        first = self._handle.first
        # A repeated append whose offset is unknown is below the end.
        return self._log.bounds().next if first is None else first + self._handle.count

    def _bookmark(self) -> Cursor:
        upto = self._upto()
        # Only a repeated append can be of an earlier term; finding that out may cost a read.
        term = self._leadership.term if upto > self._term_start else self._log.term_at(upto - 1) or 0
        return Cursor(self._log.log_id, upto, term)

    def _wait(self, deadline: float, timeout: float) -> Outcome:
        waiter = self._commits.add(self._policy, self._upto())
        try:
            waiter.wait(deadline - self._clock.monotonic())
        finally:
            self._commits.remove(waiter)
        reached = waiter.reached
        return Reached(reached) if waiter.done else TimedOut(reached, str(self._policy), timeout)
