"""Commits of a primary: the appends that wait for a commit policy."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import final

from strandline.node.lead.policies import CommitPolicy

_TICKETS = itertools.count()


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
        return self._reached(self._queue_of(policy))

    def _reached(self, queue: _PolicyQueue) -> int:
        found = self._watermark(queue.policy)
        with self._lock:
            return queue.raise_to(found)

    def raise_to(self, policy: CommitPolicy | None, upto: int) -> int:
        """Raise a watermark to what is known to be committed; returns it."""
        with self._lock:
            return self._queue_of(policy).raise_to(upto)

    def add(self, policy: CommitPolicy | None, upto: int) -> CommitWaiter:
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
