"""Joining a thread while signals arrive."""

from __future__ import annotations

import signal
import threading

import pytest

from strandline.storage.worker_thread import WorkerThread


def test_a_join_that_a_signal_interrupts_can_be_repeated_and_then_waits_for_the_work() -> None:
    may_end, done = threading.Event(), []

    def work() -> None:
        may_end.wait(60)
        done.append("work")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    thread = WorkerThread(work, name="test")
    thread.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            thread.join(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert thread.is_alive()
    threading.Timer(0.05, may_end.set).start()
    thread.join()
    assert done == ["work"]


def test_its_arguments_reach_the_work() -> None:
    seen = []
    thread = WorkerThread(seen.append, 7, name="test")
    thread.start()
    thread.join()
    assert seen == [7]


def test_a_join_gives_up_after_its_seconds() -> None:
    may_end = threading.Event()
    thread = WorkerThread(may_end.wait, 60, name="test")
    thread.start()
    thread.join(0.01)
    assert thread.is_alive()
    may_end.set()
    thread.join()
