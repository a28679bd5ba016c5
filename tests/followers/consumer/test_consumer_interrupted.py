"""An interrupted or cancelled consumer repeats a batch that did not reach its caller, and never acknowledges it."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import OutOfOrderAck
from strandline.followers.consumer import consumer as module
from strandline.followers.consumer import progress, reader
from strandline.followers.consumer.reader import BatchReader
from tests.interrupts import interruptions


@pytest.fixture(params=["own", "v1"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    log = sl.open(str(tmp_path / "log"), create=True) if request.param == "own" else open_queue(str(tmp_path / "queue"))
    with log.producer() as producer:
        for entry in (b"a", b"b", b"c"):
            producer.produce([entry])
            producer.flush()
    return log


class Interrupting:
    """Raises ``KeyboardInterrupt`` at the n-th beginning or end of a call inside the consumer.

    Signals come between calls, too, but never between the end of a ``with`` block and what that calls.
    """

    def __init__(self, moments: int) -> None:
        self.left = moments

    def __call__(self, frame: FrameType, event: str, _: object) -> Interrupting | None:
        code = frame.f_code
        if (
            code.co_filename not in (module.__file__, progress.__file__, reader.__file__)
            or code.co_name == "next_batch"
        ):
            return None
        if event in ("call", "return"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(consumer: sl.Consumer, moments: int) -> Any:
    """What a call of ``next_batch`` returns if it is interrupted there; ``KeyboardInterrupt`` if it was."""
    before = sys.gettrace()
    sys.settrace(Interrupting(moments))
    try:
        return consumer.next_batch()
    except KeyboardInterrupt:
        return KeyboardInterrupt
    finally:
        sys.settrace(before)


def test_a_batch_whose_call_was_interrupted_anywhere_comes_again_and_is_not_acknowledged(log: Any) -> None:
    with sl.Consumer(log, trim_every=None) as consumer:
        first = consumer.next_to_read
        moments = interruptions = 0
        while True:
            moments += 1
            batch = interrupted(consumer, moments)
            if batch is not KeyboardInterrupt:
                break
            interruptions += 1
            assert consumer.next_to_read == first
            with pytest.raises(OutOfOrderAck):
                consumer.ack_through(first)
        assert interruptions > 10
        assert (batch.sequence, batch.values) == (first, [b"a"])
        consumer.ack(batch.sequence)
        assert [batch.values for batch in consumer.batches()] == [[b"b"], [b"c"]]


def test_a_cancelled_call_leaves_its_batch_for_the_next_one(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    fetch = BatchReader.fetch

    def slow(self: BatchReader, descriptor: Any) -> Any:
        begun.set()
        assert goes_on.wait(120)
        return fetch(self, descriptor)

    async def run() -> list[list[bytes]]:
        async with sl.Consumer(log, trim_every=None) as consumer:
            first = consumer.next_to_read
            call = asyncio.create_task(consumer.next_batch_async())
            await asyncio.to_thread(begun.wait, 60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            goes_on.set()
            with pytest.raises(OutOfOrderAck):
                consumer.ack_through(first)
            given = []
            async for batch in consumer:
                given.append(batch.values)
                consumer.ack(batch.sequence)
            return given

    monkeypatch.setattr(BatchReader, "fetch", slow)
    assert asyncio.run(run()) == [[b"a"], [b"b"], [b"c"]]
    with sl.Consumer(log) as again:
        assert again.next_batch() is None


def test_a_batch_that_asyncio_dropped_is_not_acknowledged_by_the_next_and_comes_again(log: Any) -> None:
    async def run() -> None:
        async with sl.Consumer(log) as consumer:
            await asyncio.to_thread(consumer.next_batch)  # as if it had been cancelled late
            second = await consumer.next_batch_async()
            assert second is not None
            with pytest.raises(OutOfOrderAck):
                consumer.ack(second.sequence)

    asyncio.run(run())
    with sl.Consumer(log) as again:
        assert [batch.values for batch in again] == [[b"a"], [b"b"], [b"c"]]


def test_a_function_in_asyncios_executor_may_take_and_acknowledge_by_itself(log: Any) -> None:
    def work(consumer: sl.Consumer) -> list[list[bytes]]:
        given = []
        while (batch := consumer.next_batch()) is not None:
            given.append(batch.values)
            consumer.ack(batch.sequence)
        return given

    async def run() -> list[list[bytes]]:
        async with sl.Consumer(log) as consumer:
            return await asyncio.to_thread(work, consumer)

    assert asyncio.run(run()) == [[b"a"], [b"b"], [b"c"]]


def test_an_executor_of_the_callers_own_may_take(log: Any) -> None:
    with sl.Consumer(log) as consumer, ThreadPoolExecutor(1) as pool:
        assert pool.submit(consumer.next_batch).result(120).values == [b"a"]


def test_tasks_that_take_at_the_same_time_share_the_batches(log: Any) -> None:
    async def run() -> list[list[bytes]]:
        async with sl.Consumer(log) as consumer:
            taken = await asyncio.gather(*(consumer.next_batch_async() for _ in range(5)))
            return sorted(batch.values for batch in taken if batch is not None)

    assert asyncio.run(run()) == [[b"a"], [b"b"], [b"c"]]


def test_how_many_batches_wait_is_known_right_after_opening(log: Any) -> None:
    with sl.Consumer(log) as consumer:
        assert len(consumer) == 3


CALLS = {
    "batches": lambda consumer, given: given.extend(consumer.batches(parallel=1)),
    "ack": lambda consumer, _: [consumer.ack(sequence) for sequence in (1, 2)],
    "ack_through": lambda consumer, _: consumer.ack_through(2),
    "flush": lambda consumer, _: consumer.flush(),
}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some places are in __del__
@pytest.mark.parametrize("call", CALLS)
def test_a_consumer_continues_after_a_signal_at_any_place_of_a_call(call: str) -> None:
    log = sl.open(f"memory://interrupted-{call}", create=True)
    with log.producer() as producer:
        for entry in (b"a", b"b", b"c", b"d"):
            producer.produce([entry])
            producer.flush()

    def begun() -> tuple[sl.Consumer, list[Any]]:
        log.slots.reset("default", 0)
        consumer = sl.Consumer(log, trim_every=None, ack_every=2)
        given = [consumer.next_batch() for _ in range(1 if call == "batches" else 3)]
        consumer.ack(0)
        return consumer, given

    sl.Consumer(log, trim_every=None).close()
    now = [begun()]
    places = 0
    consuming = ("strandline.log.queue.", "strandline.followers.consumer.")
    for place in interruptions(lambda: CALLS[call](*now[0]), within=consuming):
        consumer, given = now[0]
        given += [batch for batch in consumer.batches(parallel=1) if batch not in given]
        assert [batch.values for batch in given] == [[b"a"], [b"b"], [b"c"], [b"d"]], f"interrupted at {place}"
        consumer.ack_through(3)
        consumer.close()
        assert log.slots.get("default").position == 4
        now[0] = begun()
        places += 1
    assert places > 10
