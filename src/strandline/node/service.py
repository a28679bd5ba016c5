"""What a server calls: the node behind it, as soon as there is one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Generic, TypeVar, final

from strandline.errors import NotReady
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.node.forwarding import Relay
from strandline.node.lead.committed_log import Current
from strandline.node.messages import (
    Caller,
    Commit,
    Leading,
    Report,
    Status,
    Topology,
)
from strandline.node.node import Node

FAILED = "failed"
"""What a node says of itself whose control thread has ended with an error."""

T = TypeVar("T")


@final
class Jobs:
    """What others want to have done by the thread that is the node, between two of its steps. Safe in threads.

    Changing roles is that thread's alone: nobody else closes a feed under its hands, or waits for a lock that it
    hardly ever leaves.
    """

    def __init__(self) -> None:
        """Nothing is wanted yet."""
        self.bell = threading.Event()
        """Set when something is wanted: the thread need not sleep on."""
        self._queue: deque[_Job[object]] = deque()
        self._lock = threading.Lock()
        self._over: str | None = None

    def ask(self, do: Callable[[], T]) -> T:
        """Have it done, and give what came of it; ``NotReady`` if the thread has ended."""
        job = _Job(do)
        with self._lock:
            if self._over is not None:
                raise NotReady(self._over)
            self._queue.append(job)  # type: ignore[arg-type]  # what is in the queue is only ever run
        self.bell.set()
        return job.answer.result()

    def do(self) -> None:
        """Do all that is wanted now; by the thread."""
        self.bell.clear()
        while self._queue:
            self._queue.popleft().run()

    def close(self, why: str) -> None:
        """Nothing is done any more: all who wait are told."""
        with self._lock:
            self._over = why
            left, self._queue = self._queue, deque()
        for job in left:
            job.answer.set_exception(NotReady(why))


@final
class _Job(Generic[T]):
    def __init__(self, do: Callable[[], T]) -> None:
        self._do = do
        self.answer: Future[T] = Future()

    def run(self) -> None:
        try:
            self.answer.set_result(self._do())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            self.answer.set_exception(error)


@final
class Front(Relay):
    """A node for its server, which is there first: the node's lease has to say where it is reached.

    Satisfies :class:`~strandline.node.messages.Served`. Until it is given the node, everything is ``NotReady``.
    """

    def __init__(self, name: str, jobs: Jobs) -> None:
        """For the node of this name."""
        self.node: Node | None = None
        self.failure: BaseException | None = None
        self._name = name
        self._jobs = jobs

    def _there(self) -> Node:
        if self.node is None:
            raise NotReady(f"{self._name} is starting, or has stopped: ask again a little later.")
        return self.node

    def _leading(self) -> Leading:
        return self._there()

    def report(self, caller: Caller) -> Report:
        """As the node does; one that failed is not healthy, whatever else it has to say."""
        report = self._there().report(caller)
        return report if self.failure is None else replace(report, unhealthy=report.unhealthy or FAILED)

    def status(self) -> Status:
        """As the node does, unless it failed."""
        status = self._there().status()
        return status if self.failure is None else replace(status, condition=FAILED, trouble=repr(self.failure))

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None = None,
        policy: str | None = None,
        timeout: float = 5.0,
    ) -> Commit:
        """As the node does."""
        return self._there().append(records, append=append, policy=policy, timeout=timeout)

    def reading(self) -> Current:
        """As the node does."""
        return self._there().reading()

    def promote(self, *, force: bool = False) -> Topology:
        """As the node does, by its own thread."""
        node = self._there()
        return self._jobs.ask(lambda: node.promote(force=force))

    def rebootstrap(self) -> None:
        """As the node does, by its own thread."""
        self._jobs.ask(self._there().rebootstrap)

    def close(self) -> None:
        """Nothing: who runs the node closes it."""
