"""Conditional appends of a producer: listed only if the log ends where they expect it, and harmless if it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from strandline.errors import ExpectationFailed, OutcomeUnknown, ProducerFailed, StorageError
from strandline.log.contract import Handle
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.logs import content, records
from tests.contracts.slots import append
from tests.log.produce.producing import NEVER, REFUSED, SOON, Gate, failure_of

CALLS: dict[str, Callable[[Producer, bytes, int], Handle]] = {
    "append_batch": lambda producer, value, expect: producer.append_batch(records(value), expect=expect),
    "produce": lambda producer, value, expect: producer.produce([value], b"m", expect=expect),
}


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


def values(log: ObjectLog) -> list[bytes | None]:
    return [value for _, value in content(log)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestExpect:
    def test_it_is_listed_if_the_log_ends_there(
        self, log: ObjectLog, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            assert call(producer, b"a", 0).result(SOON) == Receipt(0, 1)
            assert call(producer, b"b", 1).result(SOON) == Receipt(1, 1)
        assert values(log) == [b"a", b"b"]

    def test_if_someone_else_was_first_only_its_own_handle_fails_and_the_log_is_unchanged(
        self, log: ObjectLog, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            append(log, b"other", number=0)
            before = log.head()
            assert isinstance(failure_of(call(producer, b"a", 0)), ExpectationFailed)
            assert log.head() == before
            producer.append(value=b"b")
            producer.flush(SOON)
            assert call(producer, b"c", 2).result(SOON) == Receipt(2, 1)
        assert values(log) == [b"other", b"b", b"c"]
        assert [entry.number for entry in log.head().tail] == [0, 0, 1]

    def test_it_is_a_batch_of_its_own_after_what_was_appended_before_it(
        self, log: ObjectLog, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            producer.append(value=b"a")
            producer.append_batch(records(b"b", b"c"))
            expecting = call(producer, b"d", 3)
            after = producer.append(value=b"e")
            assert expecting.result(SOON) == Receipt(3, 1)
            assert not after.done()
        assert [entry.count for entry in log.head().tail] == [3, 1, 1]
        assert values(log) == [b"a", b"b", b"c", b"d", b"e"]

    def test_a_later_append_takes_the_number_of_a_refused_one(
        self, log: ObjectLog, line: FaultyStore, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        with log.producer(linger=NEVER, batch_bytes=1) as producer:
            gate = Gate(line)
            before = producer.append(value=b"0" * 20_000)
            expecting = call(producer, b"x", 7)
            handles = [producer.append(value=b"%d" % number * 20_000) for number in range(1, 4)]
            again = call(producer, b"4", 4)
            gate.open()
            assert before.result(SOON) == Receipt(0, 1)
            assert isinstance(failure_of(expecting), ExpectationFailed)
            assert [handle.result(SOON).first for handle in handles] == [1, 2, 3]
            assert again.result(SOON) == Receipt(4, 1)
        assert [value[:1] for value in values(log)] == [b"0", b"1", b"2", b"3", b"4"]
        assert [entry.number for entry in log.head().tail] == list(range(5))

    def test_flushing_waits_for_it_and_leaves_it_to_its_handle_to_say_that_it_was_refused(
        self, log: ObjectLog, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        producer = log.producer(linger=NEVER)
        first, second = call(producer, b"a", 5), call(producer, b"b", 6)
        producer.flush(SOON)
        assert (first.done(), second.done()) == (True, True)
        third = call(producer, b"c", 7)
        producer.close()
        assert {type(failure_of(handle)) for handle in (first, second, third)} == {ExpectationFailed}
        assert producer.buffered == 0
        assert log.bounds() == Bounds(0, 0)

    def test_it_can_be_awaited(self, log: ObjectLog, call: Callable[[Producer, bytes, int], Handle]) -> None:
        async def try_both() -> Receipt:
            async with log.producer(linger=NEVER) as producer:
                with pytest.raises(ExpectationFailed):
                    await call(producer, b"a", 1)
                return await call(producer, b"b", 0)

        assert asyncio.run(try_both()) == Receipt(0, 1)

    def test_of_producers_that_expect_the_same_end_exactly_one_is_listed(
        self, line: FaultyStore, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        log = open_log(line, create=True)
        for round_ in range(20):
            won: list[bytes] = []

            def work(name: bytes, expect: int = round_, won: list[bytes] = won) -> None:
                with log.producer(linger=NEVER) as producer:
                    try:
                        call(producer, name, expect).result(SOON)
                    except ExpectationFailed:
                        return
                won.append(name)

            together(*[lambda name=name: work(name) for name in (b"a", b"b", b"c")])
            assert len(won) == 1
            assert values(log)[round_:] == won

    def test_an_append_whose_answer_was_lost_is_listed_once(
        self, line: FaultyStore, call: Callable[[Producer, bytes, int], Handle]
    ) -> None:
        log = open_log(line, create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
        with log.producer(linger=NEVER) as producer:
            line.lose_answers(1, path_prefix="head")
            assert call(producer, b"a", 0).result(SOON) == Receipt(0, 1)
        assert values(log) == [b"a"]


class TestFailing:
    def test_one_that_fails_for_another_reason_delays_what_follows_it_and_is_retried(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            line.fail_next("put_if", path_prefix="head", error=REFUSED)
            gate = Gate(line)
            expecting = producer.append_batch(records(b"a"), expect=0)
            behind = producer.append(value=b"b")
            gate.open()
            assert failure_of(expecting) is REFUSED
            assert isinstance(failure_of(behind), ProducerFailed)
            assert producer.retry(SOON) == [Receipt(0, 1), Receipt(1, 1)]
        assert values(log) == [b"a", b"b"]

    def test_one_that_had_landed_is_recognised_when_it_is_retried(self, line: FaultyStore) -> None:
        log = open_log(line, create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
        with log.producer(linger=NEVER) as producer:
            line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", "after") else None)
            line.lose_answers(1, path_prefix="head")
            expecting = producer.append_batch(records(b"a"), expect=0)
            assert isinstance(failure_of(expecting), OutcomeUnknown)
            line.unhook()
            line.heal()
            append(log, b"other", number=0)
            assert producer.retry(SOON) == [Receipt(0, 1)]
        assert values(log) == [b"a", b"other"]

    def test_if_another_writer_was_first_by_then_the_retry_raises_and_lists_what_follows(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            line.fail_next("put", error=REFUSED)
            gate = Gate(line)
            producer.append_batch(records(b"a"), expect=0)
            producer.append(value=b"b")
            gate.open()
            with pytest.raises((StorageError, ProducerFailed)):
                producer.flush(SOON)
            append(log, b"other", number=0)
            with pytest.raises(ExpectationFailed):
                producer.retry(SOON)
            assert producer.append_batch(records(b"c"), expect=2).result(SOON) == Receipt(2, 1)
        assert values(log) == [b"other", b"b", b"c"]
