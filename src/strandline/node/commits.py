"""Waiting for commit policies: each waiter is woken once, when the watermark of its policy has passed its records."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import final

from strandline.node.policies import CommitPolicy

_TICKETS = itertools.count()


@final
class Waiter:
    """One write that waits: done when everything below ``upto`` satisfies the policy."""

    __slots__ = ("_bell", "done", "policy", "upto")

    def __init__(self, policy: CommitPolicy, upto: int) -> None:
        """Wait for this policy to reach an offset."""
        self.policy = policy
        self.upto = upto
        self.done = False
        self._bell = threading.Lock()
        self._bell.acquire()

    def wake(self, *, done: bool) -> None:
        """Say that it is done, or that waiting is pointless."""
        self.done = self.done or done
        with contextlib.suppress(RuntimeError):  # somebody else has rung it
            self._bell.release()

    def wait(self, timeout: float) -> None:
        """Block until woken, or until the time is over."""
        if not self.done:
            self._bell.acquire(timeout=max(0.0, timeout))


@final
class Commits:
    """Watermarks by policy, which never go back, and who waits for them. Safe in threads."""

    def __init__(self, watermark: Callable[[CommitPolicy], int], end: Callable[[], int]) -> None:
        """``watermark`` computes a policy's from who is how far now; none is above ``end``."""
        self._watermark = watermark
        self._end = end
        self._reached: dict[CommitPolicy, int] = {}
        self._waiting: dict[CommitPolicy, list[tuple[int, int, Waiter]]] = {}
        self._lock = threading.Lock()

    def reached(self, policy: CommitPolicy) -> int:
        """The offset up to which the policy is satisfied, as far as is known; it never goes back."""
        found = self._watermark(policy)
        with self._lock:
            return self._raise(policy, found)

    def known(self, policy: CommitPolicy) -> int:
        """The same as of when it was last computed."""
        return self._reached.get(policy, 0)

    def raise_to(self, policy: CommitPolicy, upto: int) -> None:
        """Everything below was satisfied before: a primary takes over what was committed in earlier terms."""
        with self._lock:
            self._raise(policy, upto)

    def _raise(self, policy: CommitPolicy, found: int) -> int:
        upto = self._reached[policy] = max(self._reached.get(policy, 0), found)
        return upto

    def add(self, policy: CommitPolicy, upto: int) -> Waiter:
        """Wait for a policy to reach an offset; who was added has to be removed."""
        waiter = Waiter(policy, upto)
        with self._lock:
            heapq.heappush(self._waiting.setdefault(policy, []), (upto, next(_TICKETS), waiter))
        # After it is in the queue: who moves the watermark now wakes it, and who did before is seen here.
        if self._end() >= upto and self.reached(policy) >= upto:
            self.remove(waiter)
            waiter.wake(done=True)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Nobody waits any more; one that is not there is fine."""
        if waiter.done:
            return  # who woke it has taken it out of the queue
        with self._lock:
            queue = self._waiting.get(waiter.policy, [])
            kept = [row for row in queue if row[2] is not waiter]
            if len(kept) < len(queue):
                heapq.heapify(kept)
                self._waiting[waiter.policy] = kept

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return any(list(self._waiting.values()))  # others may add a policy

    def moved(self) -> None:
        """Somebody has got further: wake those whose policy is satisfied now."""
        for policy in [policy for policy, queue in list(self._waiting.items()) if queue]:
            found = self._watermark(policy)
            ready = []
            with self._lock:
                upto = self._raise(policy, found)
                queue = self._waiting[policy]
                while queue and queue[0][0] <= upto:
                    ready.append(heapq.heappop(queue)[2])
            for waiter in ready:
                waiter.wake(done=True)

    def give_up(self) -> None:
        """Wake everybody: this node is no primary any more, and each finds that out."""
        with self._lock:
            queues, self._waiting = self._waiting, {}
        for queue in queues.values():
            for _, _, waiter in queue:
                waiter.wake(done=False)
