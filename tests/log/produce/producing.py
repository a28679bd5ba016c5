"""Shared parts of the producer's tests: a gate for calls to the store, and failed handles."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from strandline.errors import StorageError
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, FaultyStore

SOON = 120.0
NEVER = 3600.0
REFUSED = StorageError("403 Forbidden")


class Gate:
    """Blocks calls until it is opened, and counts them."""

    def __init__(self, line: FaultyStore, prefix: str = "batches/", *, stage: str = "before") -> None:
        self._open = threading.Event()
        self._prefix, self._stage = prefix, stage
        self._changed = threading.Condition()
        self._come = 0
        self.reached = threading.Event()
        line.hook(self._hold)

    def _hold(self, call: Call) -> None:
        if call.name in ("put", "put_if") and call.path.startswith(self._prefix) and call.stage == self._stage:
            with self._changed:
                self._come += 1
                self._changed.notify_all()
            self.reached.set()
            assert self._open.wait(SOON)

    def wait_for(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._come >= calls, SOON), f"only {self._come} came"

    def open(self) -> None:
        self._open.set()


def fail_while(line: FaultyStore, failing: Callable[[], bool], prefix: str = "batches/") -> None:
    """Refuse writes below a prefix while ``failing`` returns True."""

    def refuse(call: Call) -> None:
        if call.path.startswith(prefix) and call.name in ("put", "put_if") and call.stage == "before" and failing():
            raise REFUSED

    line.hook(refuse)


def pass_time_until(done: Callable[[], bool], clock: ManualClock) -> None:
    for _ in range(10_000):
        if done():
            return
        clock.advance(0.1)
        threading.Event().wait(0.001)  # let the threads look
    raise AssertionError("it never came")


def failure_of(handle: object) -> BaseException:
    with pytest.raises(Exception) as caught:
        handle.result(SOON)
    return caught.value
