"""Waiting for commit policies: each waiter is woken once, when the watermark of its policy has passed its records."""

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


class _Line:
    """Those who wait for one policy, and how far it has got. Everybody has the line at hand, and seldom looks it up."""

    __slots__ = ("policy", "queue", "reached")

    def __init__(self, policy: CommitPolicy) -> None:
        self.policy = policy
        self.reached = 0
        self.queue: list[tuple[int, int, Waiter]] = []

    def raise_to(self, found: int) -> int:
        self.reached = max(self.reached, found)
        return self.reached


@final
class Waiter:
    """One write that waits: done when its line's policy has reached the offset behind it."""

    __slots__ = ("_bell", "done", "line")

    def __init__(self, line: _Line) -> None:
        """Wait in this line."""
        self.line = line
        self.done = False
        self._bell: SimpleQueue[None] = SimpleQueue()
        """What more than one may ring."""

    @property
    def reached(self) -> int:
        """How far its policy had got when that was last computed."""
        return self.line.reached

    def wake(self, *, done: bool) -> None:
        """Say that it is done, or that waiting is pointless."""
        self.done = self.done or done
        self._bell.put(None)

    def wait(self, timeout: float) -> None:
        """Block until woken, or until the time is over."""
        if not self.done:
            with contextlib.suppress(Empty):
                self._bell.get(timeout=max(0.0, timeout))


@final
class Commits:
    """Watermarks by policy, which never go back, and who waits for them. Safe in threads."""

    def __init__(self, watermark: Callable[[CommitPolicy], int], end: Callable[[], int]) -> None:
        """``watermark`` computes a policy's from who is how far now; none is above ``end``."""
        self._watermark = watermark
        self._end = end
        self._lines: dict[CommitPolicy, _Line] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def _line(self, policy: CommitPolicy) -> _Line:
        line = self._lines.get(policy)
        return self._lines.setdefault(policy, _Line(policy)) if line is None else line

    def reached(self, policy: CommitPolicy) -> int:
        """The offset up to which the policy is satisfied, as far as is known; it never goes back."""
        return self._reached(self._line(policy))

    def _reached(self, line: _Line) -> int:
        found = self._watermark(line.policy)
        with self._lock:
            return line.raise_to(found)

    def raise_to(self, policy: CommitPolicy, upto: int) -> None:
        """Everything below was satisfied before: a primary takes over what was committed in earlier terms."""
        with self._lock:
            self._line(policy).raise_to(upto)

    def add(self, policy: CommitPolicy, upto: int) -> Waiter:
        """Wait for a policy to reach an offset; who was added has to be removed."""
        line = self._line(policy)
        waiter = Waiter(line)
        with self._lock:
            heapq.heappush(line.queue, (upto, next(_TICKETS), waiter))
        # After it is in the queue: who moves the watermark now wakes it, and who did before is seen here.
        if self._end() >= upto and self._reached(line) >= upto:
            self.remove(waiter)
            waiter.wake(done=True)
        elif self._is_over:
            self.remove(waiter)
            waiter.wake(done=False)
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Nobody waits any more; one that is not there is fine."""
        if waiter.done:
            return  # who woke it has taken it out of the queue
        with self._lock:
            queue = waiter.line.queue
            queue[:] = [row for row in queue if row[2] is not waiter]
            heapq.heapify(queue)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return any(line.queue for line in list(self._lines.values()))

    def moved(self) -> None:
        """Somebody has got further: wake those whose policy is satisfied now."""
        for line in list(self._lines.values()):
            if not line.queue:
                continue
            found = self._watermark(line.policy)
            ready = []
            with self._lock:
                upto = line.raise_to(found)
                while line.queue and line.queue[0][0] <= upto:
                    ready.append(heapq.heappop(line.queue)[2])
            for waiter in ready:
                waiter.wake(done=True)

    def give_up(self) -> None:
        """Wake everybody, and keep nobody waiting from now on: this node is no primary any more, as each finds out."""
        with self._lock:
            self._is_over = True
            waiting = [row[2] for line in self._lines.values() for row in line.queue]
            for line in self._lines.values():
                line.queue.clear()
        for waiter in waiting:
            waiter.wake(done=False)
