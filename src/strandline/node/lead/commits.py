"""Commit waiters: each is woken once, when the watermark of its policy has passed its records."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import final

from strandline.node.lead.policies import CommitPolicy

_TICKETS = itertools.count()


class _PolicyQueue:
    """The waiters of one policy, and its watermark."""

    __slots__ = ("policy", "reached", "waiters")

    def __init__(self, policy: CommitPolicy) -> None:
        self.policy = policy
        self.reached = 0
        self.waiters: list[tuple[int, int, CommitWaiter]] = []

    def raise_to(self, found: int) -> int:
        self.reached = max(self.reached, found)
        return self.reached


@final
class CommitWaiter:
    """A waiting append: done when the watermark of its policy has reached the offset behind it."""

    __slots__ = ("_woken", "done", "queue")

    def __init__(self, queue: _PolicyQueue) -> None:
        """Wait in this queue."""
        self.queue = queue
        self.done = False
        self._woken: SimpleQueue[None] = SimpleQueue()

    @property
    def reached(self) -> int:
        """The watermark of its policy when it was last computed."""
        return self.queue.reached

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
    """The watermark of each policy, which never goes back, and its waiters. Safe in threads."""

    def __init__(self, watermark: Callable[[CommitPolicy], int], end: Callable[[], int]) -> None:
        """``watermark`` computes that of a policy from the current durable offsets; none is above ``end()``."""
        self._watermark = watermark
        self._end = end
        self._queues: dict[CommitPolicy, _PolicyQueue] = {}
        self._lock = threading.Lock()
        self._ended = False

    def _queue_of(self, policy: CommitPolicy) -> _PolicyQueue:
        queue = self._queues.get(policy)
        return self._queues.setdefault(policy, _PolicyQueue(policy)) if queue is None else queue

    def reached(self, policy: CommitPolicy) -> int:
        """The watermark of a policy; it never goes back."""
        return self._reached(self._queue_of(policy))

    def _reached(self, queue: _PolicyQueue) -> int:
        found = self._watermark(queue.policy)
        with self._lock:
            return queue.raise_to(found)

    def raise_to(self, policy: CommitPolicy, upto: int) -> None:
        """Raise a watermark to what was committed in earlier terms."""
        with self._lock:
            self._queue_of(policy).raise_to(upto)

    def add(self, policy: CommitPolicy, upto: int) -> CommitWaiter:
        """Add a waiter for a policy and an offset; the caller has to remove it."""
        queue = self._queue_of(policy)
        waiter = CommitWaiter(queue)
        with self._lock:
            heapq.heappush(queue.waiters, (upto, next(_TICKETS), waiter))
        # Checked after it is queued: a watermark that moves now wakes it, and one that moved before is seen here.
        if self._end() >= upto and self._reached(queue) >= upto:
            self.remove(waiter)
            waiter.wake(done=True)
        elif self._ended:
            self.remove(waiter)
            waiter.wake(done=False)
        return waiter

    def remove(self, waiter: CommitWaiter) -> None:
        """Remove a waiter. Idempotent."""
        if waiter.done:
            return  # waking it removed it from the queue
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
        """Wake all waiters, and let none wait from now on: the leadership has ended."""
        with self._lock:
            self._ended = True
            waiting = [row[2] for queue in self._queues.values() for row in queue.waiters]
            for queue in self._queues.values():
                queue.waiters.clear()
        for waiter in waiting:
            waiter.wake(done=False)
