"""Locks between processes: nobody holds one by accident."""

import contextlib
import os
import signal
import threading

import pytest

from strandline.storage.disk import DISK
from tests.interrupts import interruptions


@contextlib.contextmanager
def a_child_that_lives():
    """A forked child that sleeps until the block ends."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def is_free(path):
    with DISK.try_locked(path) as held:
        return held


@pytest.mark.parametrize("lock", [DISK.locked, DISK.try_locked])
def test_a_child_forked_while_another_thread_holds_a_lock_does_not_keep_it(tmp_path, lock):
    path = str(tmp_path / "lock")
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock(path):
            held.set()
            assert done.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(120)
    with a_child_that_lives():
        assert not is_free(path), "the fork has freed the parent's lock"
        done.set()
        holder.join()
        assert is_free(path)


def test_a_child_outlives_its_killed_parent_without_the_parents_lock(tmp_path):
    path = str(tmp_path / "lock")
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        with DISK.try_locked(path):
            child = os.fork()
            if not child:
                signal.pause()
                os._exit(0)
            os.write(writing, b"%d" % child)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(reading, 100))
    try:
        while not is_free(path):  # until the child has come to close its copy
            os.sched_yield()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one place is in __del__ itself
@pytest.mark.parametrize("lock", [DISK.locked, DISK.try_locked])
def test_an_interrupted_acquire_or_release_does_not_keep_the_lock(tmp_path, lock):
    path = str(tmp_path / "lock")

    def work():
        with lock(path):
            pass

    places = 0
    for place in interruptions(work):
        assert is_free(path), f"interrupted at place {place}"
        places += 1
    assert places >= 8


def test_a_file_that_is_dropped_without_being_closed_is_closed(tmp_path):
    file = DISK.open_append(str(tmp_path / "file"))
    file.write([b"0123456789"])
    file.rewrite(4, [b"x"])  # through a second descriptor
    before = len(os.listdir("/dev/fd"))
    del file
    assert len(os.listdir("/dev/fd")) == before - 2
