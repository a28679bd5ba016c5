"""An append under way on a primary: durable there first, then wherever its policy wants it."""

from __future__ import annotations

from typing import final

from strandline.log.wal.log import WalLog
from strandline.log.wal.write.groups import WalHandle
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Cursor
from strandline.node.lead.commits import Commits
from strandline.node.lead.leadership import Gate
from strandline.node.lead.policies import CommitPolicy, Local
from strandline.node.messages import Commit, NotRequired, Outcome, Reached, TimedOut
from strandline.storage.clock import Clock
from strandline.storage.metrics import COMMITS

_COUNTS = {kind: COMMITS.labels(kind.__name__) for kind in (Reached, TimedOut, NotRequired)}
_DOUBT = "the records are durable here and nobody knows whether they survive; append them again by writer and number"


@final
@checked
class CommitHandle:
    """Says what became of an append. The gate is asked when it is durable, here and where the policy wants it."""

    __slots__ = ("_clock", "_commits", "_gate", "_handle", "_is_alone", "_log", "_policy", "_term_start")

    def __init__(
        self,
        handle: WalHandle,
        policy: CommitPolicy,
        commits: Commits,
        gate: Gate,
        log: WalLog,
        clock: Clock,
        *,
        term_start: int,
        is_alone: bool = False,
    ) -> None:
        """An append that was queued; from ``term_start`` on everything is of the gate's term.

        ``is_alone`` says that the policy is satisfied by what is durable here: no replica will speak of it.
        """
        self._handle = handle
        self._policy = policy
        self._commits = commits
        self._gate = gate
        self._log = log
        self._clock = clock
        self._term_start = term_start
        self._is_alone = is_alone

    def done(self) -> bool:
        """Whether asking for the result would not block."""
        if not self._handle.done():
            return False
        is_decided = isinstance(self._policy, Local) or not self._gate.is_open
        return is_decided or self._commits.reached(self._policy) >= self._upto()

    def result(self, timeout: Timeout) -> Commit:
        """Block until it is durable here, and until the policy is satisfied or the time is over."""
        outcome: Outcome = NotRequired()
        if not isinstance(self._policy, Local):
            deadline = self._clock.monotonic() + timeout
            if self._handle.first is None or not self._handle.is_driven or self._is_alone:
                self._handle.result()
            # Replicas are sent what is durable here, so that their word is enough to wait for: who woke up in between
            # would only be in the way of those who send it.
            outcome = self._wait(deadline, timeout)
        receipt = self._handle.result()
        self._gate.check(_DOUBT)
        _COUNTS[type(outcome)].inc()
        return Commit(receipt, outcome, self._bookmark())

    def _upto(self) -> int:
        first = self._handle.first
        # A repeated append whose place is not known is somewhere below the end.
        return self._log.bounds().next if first is None else first + self._handle.count

    def _bookmark(self) -> Cursor:
        upto = self._upto()
        # Only a repeated append can be of an earlier term: looking that up may cost a read.
        term = self._gate.term if upto > self._term_start else self._log.term_at(upto - 1) or 0
        return Cursor(self._log.log_id, upto, term)

    def _wait(self, deadline: float, timeout: float) -> Outcome:
        waiter = self._commits.add(self._policy, self._upto())
        try:
            waiter.wait(deadline - self._clock.monotonic())
        finally:
            self._commits.remove(waiter)
        reached = waiter.reached
        return Reached(reached) if waiter.done else TimedOut(reached, str(self._policy), timeout)
