"""A producer's life: in asyncio, dropped without closing, and at the end of the program."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from strandline.errors import BufferFull, ProducerClosed, StorageError
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.log.produce.handles import Page
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import content, records
from tests.interrupts import interrupted_by_a_signal
from tests.log.produce.producing import NEVER, REFUSED, SOON, Gate, failure_of
from tests.matrix_cases import some


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


def in_a_circle(producer: Producer) -> Producer:
    """The same producer, which only the collector will find to be dropped: not at once, by the last name's going."""
    producer.circle = producer  # type: ignore[attr-defined]
    return producer


def threads_of(producer: Producer) -> list[threading.Thread]:
    return [*producer._committer._threads, *producer._state.uploads.threads]


def assert_ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        threading.Thread.join(thread, SOON)  # its work is over a moment before it has ended
        assert not thread.is_alive()


class TestInterruptedClosing:
    def test_ends_at_once_and_closing_again_waits_until_everything_is_listed(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        with log.producer() as first:
            first.append(value=b"all that this imports is there now")
        gate = Gate(line)
        producer = log.producer(linger=NEVER)
        handle = producer.append(value=b"a")
        for _ in range(2):
            with interrupted_by_a_signal():
                producer.close()
        assert not handle.done()
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        producer.close()
        assert handle.result(0) == Receipt(1, 1)
        producer.close()
        assert_ended(threads_of(producer))

    def test_before_the_last_batch_is_closed_loses_nothing(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        producer = log.producer(linger=NEVER)
        handle = producer.append(value=b"a")
        monkeypatch.setattr(producer._state, "end_intake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.close()
        monkeypatch.undo()
        producer.close()
        assert handle.result(0) == Receipt(0, 1)

    def test_raises_what_failed_when_it_is_closed_again_and_then_no_more(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        with log.producer() as first:
            first.append(value=b"all that this imports is there now")
        gate = Gate(line)
        producer = log.producer(linger=NEVER)
        handle = producer.append(value=b"a")
        with interrupted_by_a_signal():
            producer.close()
        line.fail_next("put", "put_if", path_prefix="batches/", after=True, times=9, error=REFUSED)
        gate.open()
        with pytest.raises(StorageError):
            producer.close()
        with pytest.raises(StorageError):
            handle.result(SOON)
        producer.close()


def test_the_handle_of_a_table_keeps_nothing_of_later_ones(log: ObjectLog) -> None:
    def pages() -> int:
        gc.collect()
        return sum(isinstance(one, Page) for one in gc.get_objects())

    with log.producer(linger=NEVER) as producer:
        handles = [producer.append_batch(records(b"first"))]
        before = pages()
        for _ in range(100):
            producer.append_batch(records(b"later"))
        producer.flush(SOON)
        assert pages() - before < 10
        assert handles[0].result(0) == Receipt(0, 1)


class TestAsyncio:
    def test_async_with_flushes_and_closes(self, log: ObjectLog) -> None:
        async def appended() -> tuple[Producer, object]:
            async with log.producer(linger=NEVER) as producer:
                return producer, producer.append(value=b"a")

        producer, handle = asyncio.run(appended())
        assert handle.result(0) == Receipt(0, 1)
        with pytest.raises(ProducerClosed):
            producer.append(value=b"b")
        assert_ended(threads_of(producer))

    def test_closing_does_not_block_the_event_loop(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line)

        async def open_the_gate_once_it_closes() -> None:
            while not gate.reached.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0)
            gate.open()  # never, if the loop stood still

        async def work() -> object:
            async with log.producer(linger=NEVER) as producer:
                handle = producer.append(value=b"a")
                opener = asyncio.create_task(open_the_gate_once_it_closes())
            await opener
            return handle

        assert asyncio.run(work()).result(0) == Receipt(0, 1)

    def test_closing_raises_what_failed(self, log: ObjectLog, line: FaultyStore) -> None:
        async def work() -> None:
            async with log.producer(linger=NEVER) as producer:
                line.fail_next("put", error=REFUSED)
                producer.append(value=b"a")

        with pytest.raises(StorageError, match="403"):
            asyncio.run(work())

    def test_a_full_buffer_is_waited_for_without_blocking_the_loop(self, log: ObjectLog, line: FaultyStore) -> None:
        async def work() -> int:
            refused = 0
            async with log.producer(block=False, budget=50_000, linger=NEVER, compression="none") as producer:
                for number in range(20):
                    while True:
                        try:
                            producer.append(value=b"%d" % number * 10_000)
                        except BufferFull:
                            refused += 1
                            await producer.flush_async()
                        else:
                            break
            return refused

        assert asyncio.run(work()) > 0
        assert [value[:1] for _, value in content(log)][:10] == [b"%d" % number for number in range(10)]
        assert log.bounds() == Bounds(0, 20)


@pytest.mark.filterwarnings("default::ResourceWarning")
class TestDropped:
    def test_it_warns_fails_its_handles_and_ends_its_threads(self, log: ObjectLog) -> None:
        producer = in_a_circle(log.producer(linger=NEVER))
        threads, writer = threads_of(producer), producer.writer
        handles = [producer.append(value=b"a"), producer.append_batch(records(b"b")), producer.produce([b"c"])]
        del producer
        with pytest.warns(ResourceWarning, match=f"{writer} was never closed"):
            gc.collect()
        for handle in handles:
            with pytest.raises(ProducerClosed, match="dropped without closing"):
                handle.result(SOON)
        assert_ended(threads)
        assert log.bounds() == Bounds(0, 0)

    def test_without_the_collector_too(self, log: ObjectLog) -> None:
        producer = log.producer(linger=NEVER)
        handle, threads = producer.append(value=b"a"), threads_of(producer)
        gc.disable()
        try:
            with pytest.warns(ResourceWarning):
                del producer
        finally:
            gc.enable()
        assert isinstance(failure_of(handle), ProducerClosed)
        assert_ended(threads)

    def test_batches_that_were_listed_before_stay_acknowledged(self, log: ObjectLog) -> None:
        producer = in_a_circle(log.producer(linger=NEVER))
        listed = producer.append(value=b"a")
        producer.flush(SOON)
        late = producer.append(value=b"b")
        del producer
        with pytest.warns(ResourceWarning):
            gc.collect()
        assert isinstance(failure_of(late), ProducerClosed)
        assert listed.result(0) == Receipt(0, 1)
        assert content(log) == [(0, b"a")]

    def test_what_is_being_uploaded_is_not_listed_and_what_is_being_listed_says_what_became_of_it(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        producer = in_a_circle(log.producer(linger=NEVER, batch_bytes=1, uploads=2))
        listing = Gate(line, "head")
        first = producer.append(value=b"1" * 20_000)
        listing.wait_for(1)
        uploads = Gate(line)
        others = [producer.append(value=bytes(20_000)) for _ in range(4)]
        uploads.wait_for(2)
        threads = threads_of(producer)
        del producer
        with pytest.warns(ResourceWarning):
            gc.collect()
        listing.open()
        assert first.result(SOON) == Receipt(0, 1)
        for handle in others:
            assert isinstance(failure_of(handle), ProducerClosed)
        uploads.open()
        assert_ended(threads)
        assert log.bounds() == Bounds(0, 1)
        assert len([row for row in line.log if row.path.startswith("batches/")]) == 3  # nothing more was begun

    def test_a_failed_one_releases_what_it_held(self, log: ObjectLog, line: FaultyStore) -> None:
        producer = in_a_circle(log.producer(linger=NEVER))
        error = StorageError("403 Forbidden")
        line.fail_next("put", error=error)
        handle = producer.append_batch(records(b"a"))
        with producer._state.lock:
            producer._state.seal()
        assert failure_of(handle) is error
        state, threads = producer._state, threads_of(producer)
        del producer
        with pytest.warns(ResourceWarning):
            gc.collect()
        assert_ended(threads)
        assert failure_of(handle) is error
        assert not state.outcomes()

    def test_the_collector_may_find_it_within_the_producer_s_own_lock(self, log: ObjectLog) -> None:
        producer = in_a_circle(log.producer(linger=NEVER))
        handle = producer.append(value=b"a")
        state, threads = producer._state, threads_of(producer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with state.lock, state.ready._cond:
                del producer
                gc.collect()
        assert isinstance(failure_of(handle), ProducerClosed)
        assert_ended(threads)

    def test_a_closed_producer_does_not_warn(self, log: ObjectLog, line: FaultyStore) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            producer = log.producer()
            producer.close()
            failed = log.producer(linger=NEVER)
            line.fail_next("put", error=REFUSED)
            failed.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                failed.close()
            del producer, failed
            gc.collect()


class TestSignals:
    def test_a_handler_of_a_signal_may_append_also_within_a_call_of_its_thread_that_has_the_lock(
        self, log: ObjectLog
    ) -> None:
        handles = []

        def interrupted() -> None:
            with producer._state.lock:  # between any two steps of any call
                handles.extend(producer.append(value=b"%d" % number) for number in range(500))

        producer = log.producer(linger=NEVER)
        caller = threading.Thread(target=interrupted, daemon=True)
        caller.start()
        caller.join(SOON / 4)
        assert not caller.is_alive()
        producer.close()
        assert [handle.result(0).first for handle in handles] == list(range(500))

    def test_an_interrupted_start_of_a_thread_keeps_no_closing_waiting(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start

        def start_and_interrupt(thread: threading.Thread) -> None:
            start(thread)
            if thread.name == "strandline-upload":
                raise KeyboardInterrupt

        producer = log.producer(linger=NEVER, batch_bytes=1)
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.append_batch(records(b"a"))
        monkeypatch.undo()
        later = producer.append_batch(records(b"b"))
        threads = threads_of(producer)
        closing = threading.Thread(target=producer.close, daemon=True)
        closing.start()
        closing.join(SOON / 4)
        assert not closing.is_alive()
        assert later.result(0) == Receipt(1, 1)
        assert_ended(threads)

    def test_a_handler_of_a_signal_may_append_also_while_another_append_is_interrupted(self, log: ObjectLog) -> None:
        handles: dict[bytes, object] = {}
        signals = itertools.count()

        def append_more(*_: object) -> None:
            value = b"from the handler %d" % next(signals)
            handles[value] = producer.append(value=value)

        before = signal.signal(signal.SIGALRM, append_more)
        with log.producer(batch_bytes=1 << 20, linger=0.01) as producer:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            try:
                for number in range(60_000):
                    value = b"%d" % number
                    handle = producer.append(value=value)
                    if number % 100 == 0:
                        handles[value] = handle
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        found = [value for _, value in content(log)]
        assert len(handles) > 610, "no signal came"
        assert [value for value in found if value.isdigit()] == [b"%d" % number for number in range(60_000)]
        assert len(found) == 60_000 + len(handles) - 600
        for value, handle in handles.items():
            assert found[handle.result(0).first] == value


PROGRAM = """
import sys, threading
from strandline.log.object import open_log
from strandline.testing.faulty import FaultyStore
from strandline.storage.objects.local import LocalStore

line = FaultyStore(LocalStore(sys.argv[1]))
log = open_log(line, create=True)
stuck = threading.Event()
if "stuck" in sys.argv[2]:
    def hang(call):
        if call.path.startswith("batches/"):
            stuck.set()
            threading.Event().wait()
    line.hook(hang)
producer = log.producer(linger=3600.0, batch_bytes=1)
handles = [producer.append(value=bytes(20_000)) for _ in range(20)]
if stuck.is_set() or "stuck" in sys.argv[2]:
    stuck.wait()
elif sys.argv[2] == "idle":
    producer.flush()
print("the end", flush=True)
"""


@pytest.mark.parametrize("state", some(["stuck in an upload", "idle", "busy"], 1))
def test_a_program_that_ends_without_closing_is_warned_and_does_not_hang(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM, str(tmp_path), state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "the end\n"
    assert "ResourceWarning: The producer with writer id" in done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.matrix
def test_handles_of_a_program_that_ends_fail_for_waiting_threads(tmp_path: Path) -> None:
    program = """
import atexit, sys
from strandline.log.object import open_log
from strandline.errors import ProducerClosed

def wait_for_it():
    try:
        handle.result(120)
    except ProducerClosed as error:
        print(error)

atexit.register(wait_for_it)  # before the producer's own: so it runs after it
producer = open_log(sys.argv[1], create=True).producer(linger=3600.0)
handle = producer.append(value=b"a")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "dropped without closing" in done.stdout
