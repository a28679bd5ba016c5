"""The commit watermark of a primary: up to where its log satisfies the log's policy; and appends that wait for it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import final

from strandline.errors import NotReady
from strandline.log.wal.log import WalLog
from strandline.log.wal.write.groups import WalHandle
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Cursor
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.lead.membership import PrimaryMembership
from strandline.node.lead.policies import CommitPolicy, DurableOffsets, Local, is_met_alone, strengthened, watermark
from strandline.node.lead.replicas import ReplicaRegistry, Replicas
from strandline.node.messages import Commit, CommitOutcome, NotRequired, Reached, TimedOut
from strandline.storage.clock import Clock
from strandline.storage.metrics import COMMITS

_TICKETS = itertools.count()
_COUNTS = {kind: COMMITS.labels(kind.__name__) for kind in (Reached, TimedOut, NotRequired)}
_DOUBT = (
    "the records are durable here, but may be lost in a failover; append them again with the same writer and number"
)


@dataclass(slots=True, eq=False)
class _PolicyQueue:
    """The waiters of one policy, and its watermark."""

    policy: CommitPolicy | None
    reached: int = 0
    waiters: list[tuple[int, int, CommitWaiter]] = field(default_factory=list)

    def raise_to(self, found: int) -> int:
        self.reached = max(self.reached, found)
        return self.reached


@final
class CommitWaiter:
    """A waiting append: done when the watermark of its policy has reached the offset behind it."""

    __slots__ = ("_woken", "done", "queue")

    def __init__(self, queue: _PolicyQueue) -> None:
        self.queue = queue
        self.done = False
        self._woken: SimpleQueue[None] = SimpleQueue()

    def wake(self, *, done: bool) -> None:
        """Wake the thread: the policy is satisfied, or waiting is pointless."""
        self.done = self.done or done
        self._woken.put(None)

    def wait(self, timeout: float) -> None:
        """Block until woken, or until the timeout."""
        if not self.done:
            with contextlib.suppress(Empty):
                self._woken.get(timeout=max(0.0, timeout))


@final
class Commits:
    """The watermark of each policy, which never goes back, and its waiters. Safe in threads.

    None is the log's own policy, which may change.
    """

    def __init__(self, watermark: Callable[[CommitPolicy | None], int], end: Callable[[], int]) -> None:
        """``watermark`` computes that of a policy from the current durable offsets; none is above ``end()``."""
        self._watermark = watermark
        self._end = end
        self._queues: dict[CommitPolicy | None, _PolicyQueue] = {}
        self._lock = threading.Lock()
        self._ended = False

    def _queue_of(self, policy: CommitPolicy | None) -> _PolicyQueue:
        queue = self._queues.get(policy)
        return self._queues.setdefault(policy, _PolicyQueue(policy)) if queue is None else queue

    def reached(self, policy: CommitPolicy | None) -> int:
        """The watermark of a policy; it never goes back."""
        return self.raise_to(policy, self._watermark(policy))

    def raise_to(self, policy: CommitPolicy | None, upto: int) -> int:
        """Raise a watermark to what is known to be committed; returns it."""
        with self._lock:
            return self._queue_of(policy).raise_to(upto)

    def add(self, policy: CommitPolicy | None, upto: int) -> CommitWaiter:
        """Add a waiter for a policy and an offset; the caller has to remove it."""
        with self._lock:  # a queue that is added while others go over them would break that
            waiter = CommitWaiter(self._queue_of(policy))
            heapq.heappush(waiter.queue.waiters, (upto, next(_TICKETS), waiter))
        # Checked after it is queued: a watermark that moves now wakes it, and one that moved before is seen here.
        if self._end() >= upto and self.reached(policy) >= upto:
            self.remove(waiter)
            waiter.wake(done=True)
        elif self._ended:
            self.remove(waiter)
            waiter.wake(done=False)
        return waiter

    def wait(self, policy: CommitPolicy | None, upto: int, timeout: float) -> CommitWaiter:
        """Block until the watermark of a policy has reached an offset, or until the timeout."""
        waiter = self.add(policy, upto)
        try:
            waiter.wait(timeout)
        finally:
            self.remove(waiter)
        return waiter

    def remove(self, waiter: CommitWaiter) -> None:
        """Remove a waiter. Idempotent."""
        if waiter.done:
            return  # it was removed from the queue when it was woken
        with self._lock:
            queue = waiter.queue.waiters
            queue[:] = [row for row in queue if row[2] is not waiter]
            heapq.heapify(queue)

    @property
    def is_awaited(self) -> bool:
        """Whether any append waits."""
        return any(queue.waiters for queue in list(self._queues.values()))

    def moved(self) -> None:
        """A durable offset has advanced: wake the waiters whose policy is satisfied now."""
        for queue in list(self._queues.values()):
            if not queue.waiters:
                continue
            found = self._watermark(queue.policy)
            ready = []
            with self._lock:
                upto = queue.raise_to(found)
                while queue.waiters and queue.waiters[0][0] <= upto:
                    ready.append(heapq.heappop(queue.waiters)[2])
            for waiter in ready:
                waiter.wake(done=True)

    def give_up(self) -> None:
        """Wake all waiters, and accept no new ones: the leadership has ended."""
        with self._lock:
            self._ended = True
            waiting = [row[2] for queue in self._queues.values() for row in queue.waiters]
            for queue in self._queues.values():
                queue.waiters.clear()
        for waiter in waiting:
            waiter.wake(done=False)


@final
class CommitWatermark:
    """Everything below it satisfies the policy in force, and readers see it. It never goes back. Safe in threads.

    Durable offsets are read before the policy, in each calculation: a change of the policy waits for everything that
    was durable before the new one came into force, so that a calculation by the former one counts no more than that.
    """

    def __init__(
        self,
        log: WalLog,
        name: str,
        membership: PrimaryMembership,
        replicas: Replicas,
        *,
        known: int,
        settled: bool = False,
    ) -> None:
        """``name`` is the primary's; everything below ``known`` is committed already.

        ``settled``: nothing above that can have been acknowledged or shown.
        """
        self._log = log
        self._name = name
        self._membership = membership
        self._replicas = replicas
        self._term_start = log.bounds().extent
        self._last: tuple[ReplicaRegistry, DurableOffsets] = (replicas.now, DurableOffsets(name, -1))
        """The last durable offsets and the registry they were computed from: every append needs them several times."""
        self.commits = Commits(self._of, self.durable)
        """The appends that wait; None is the log's own policy."""
        self.commits.raise_to(None, min(known, self._term_start))
        self._is_known = self.is_alone or settled

    def durable(self) -> int:
        """The durable extent of the log."""
        return self._log.bounds().extent

    def offsets(self, durable: int | None = None) -> DurableOffsets:
        """The durable offsets of the primary, by default those of now, and its replicas."""
        registry, durable = self._replicas.now, self.durable() if durable is None else durable
        of, offsets = self._last
        if of is not registry or offsets.durable != durable:
            offsets = registry.durable_offsets(self._name, durable, term_start=self._term_start)
            self._last = (registry, offsets)
        return offsets

    def required(self, extra: CommitPolicy | None) -> CommitPolicy:
        """What an append waits for that asks for this beyond the log's own policy."""
        policy = self._membership.policy
        return policy if extra is None else strengthened(policy, extra)

    def is_met_alone(self, extra: CommitPolicy | None) -> bool:
        """Whether such an append waits for nothing but durability on the primary."""
        return is_met_alone(self.required(extra), self._name)

    @property
    def is_alone(self) -> bool:
        """Whether the log's own policy needs nothing else."""
        return self.is_met_alone(None)

    def bookmark(self, upto: int, term: int) -> Cursor:
        """The cursor behind a record or the seal; of an earlier term than the primary's it may cost a read."""
        upto = min(upto, self._log.bounds().next)
        return Cursor(self._log.log_id, upto, term if upto > self._term_start else self._log.term_at(upto - 1) or 0)

    def _of(self, extra: CommitPolicy | None) -> int:
        offsets = self.offsets()
        return watermark(self.required(extra), offsets)

    @property
    def now(self) -> int:
        """The watermark of the log's own policy."""
        return self.upto(self.durable())

    def upto(self, durable: int) -> int:
        """The watermark of the log's own policy, for a caller that knows the durable extent of the log."""
        if self.is_alone:
            return self.commits.raise_to(None, durable)
        offsets = self.offsets(durable)
        return self.commits.raise_to(None, watermark(self._membership.policy, offsets))

    @property
    def is_known(self) -> bool:
        """Whether the watermark covers everything that any primary of the log ever acknowledged or showed.

        The primary has everything that was committed before its term, but learns up to which offset only when its
        policy is satisfied for all of it.
        """
        self._is_known = self._is_known or self.now >= self._term_start
        return self._is_known

    def readable(self) -> ReadableLog:
        """The log up to the watermark; ``NotReady`` until that is known."""
        if not self.is_known:
            raise NotReady(
                f"{self._name} was restarted or promoted, and does not know yet whether everything below offset "
                f"{self._term_start} is committed: ask again when its replicas have acknowledged it under "
                f"{self._membership.policy}. If they are lost for good, change the policy ('strandline node policy "
                "--force')."
            )
        return ReadableLog(self._log, self.upto, self._wait_durable if self.is_alone else self._wait_committed)

    def wait_for_seal(self, timeout: float) -> bool:
        """Block until the log's seal is committed (True), or until the timeout or the end of the leadership (False)."""
        return self.commits.wait(None, self.durable(), timeout).done

    def check_seal(self) -> None:
        """``NotReady`` if the log was sealed here, and the seal may yet get lost in a failover."""
        bounds = self._log.bounds()
        if bounds.sealed and self.now < bounds.extent:
            raise NotReady(
                f"The log is being sealed at offset {bounds.next}, and the seal does not satisfy "
                f"{self._membership.policy} yet: nothing was written. Ask again: the log is sealed then, or goes on."
            )

    def _wait_durable(self, past: int, timeout: float) -> bool:
        return self._log.wait(Cursor(self._log.log_id, past), timeout)

    def _wait_committed(self, past: int, timeout: float) -> bool:
        return self.commits.wait(None, past + 1, timeout).done


@final
@checked
@dataclass(slots=True, eq=False)
class CommitHandle:
    """The result of an append. Leadership is checked once the records are durable here and the policy is satisfied."""

    _handle: WalHandle
    _asked: CommitPolicy | None
    """What the append asked for beyond the log's own policy, which may change meanwhile."""
    _watermark: CommitWatermark
    _leadership: Leadership
    _clock: Clock
    _seals: bool = False
    """Whether the append seals the log, so that the seal is waited for, too."""

    @property
    def repeated(self) -> bool:
        """Whether the log recognised the number of the append, which adds nothing then."""
        return self._handle.repeated

    @property
    def _policy(self) -> CommitPolicy:
        return self._watermark.required(self._asked)

    def done(self) -> bool:
        """Whether :meth:`result` would not block."""
        if not self._handle.done():
            return False
        is_decided = isinstance(self._policy, Local) or not self._leadership.is_held
        return is_decided or self._watermark.commits.reached(self._asked) >= self._upto()

    def result(self, timeout: Timeout) -> Commit:
        """Block until the records are durable here, and until the policy is satisfied or the timeout is over.

        ``Fenced`` if the node no longer led when the append was to be acknowledged: the records may be lost then.
        """
        outcome: CommitOutcome = NotRequired()
        deadline = self._clock.monotonic() + timeout
        is_alone = self._watermark.is_met_alone(self._asked)
        if is_alone or self._handle.first is None or not self._handle.is_driven:
            self._handle.result()
        # Asked again once it is durable here: a change of the policy waits for what was durable before, not for more.
        if not (is_alone and isinstance(self._policy, Local)):
            # Replicas receive only durable batches, so their acknowledgements are enough to wait for. A wake-up in
            # between would slow down the sending threads.
            waiter = self._watermark.commits.wait(self._asked, self._upto(), deadline - self._clock.monotonic())
            reached = waiter.queue.reached
            outcome = Reached(reached) if waiter.done else TimedOut(reached, str(self._policy), timeout)
        receipt = self._handle.result()
        self._leadership.check(_DOUBT)
        _COUNTS[type(outcome)].inc()
        bookmark = self._watermark.bookmark(self._upto(), self._leadership.term)
        return Commit(receipt, outcome, bookmark, self.repeated)

    def _upto(self) -> int:
        first = self._handle.first
        if first is None or (self._seals and self.repeated):  # below the end, and perhaps what sealed the log
            return self._watermark.durable()
        return first + self._handle.count + self._seals
