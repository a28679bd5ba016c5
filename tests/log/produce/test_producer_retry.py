"""A producer that failed: which batches it keeps, how they are retried or discarded, and that none is lost."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest

from strandline.errors import (
    Diverged,
    OutcomeUnknown,
    OutOfOrder,
    ProducerClosed,
    ProducerFailed,
    StorageError,
    TransientStorageError,
    WriterExpired,
)
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.log.produce.rows import Row
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt, WriterId
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Faults, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.logs import content, records, writer_named
from tests.contracts.slots import append
from tests.log.produce.producing import NEVER, REFUSED, SOON, Gate, fail_while, failure_of
from tests.matrix_cases import some


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


def values(log: ObjectLog) -> list[bytes]:
    return [bytes(value or b"") for _, value in content(log)]


def numbers(log: ObjectLog, producer: Producer) -> list[int]:
    return [entry.number for entry in log.head().tail if entry.writer == producer.writer]


def look_just_before_the_failure(producer: Producer) -> None:
    """Let the next append find that nothing is halted, and the failure come before its record is queued."""
    state, queue_row = producer._state, producer._state.queue_row
    state.halted = False

    def queue_late(row: Row) -> None:
        state.halted = True
        queue_row(row)

    state.queue_row = queue_late


class TestRetry:
    def test_everything_appended_before_the_failure_is_sent_again_in_order_and_the_producer_continues(
        self, log: ObjectLog, line: FaultyStore
    ) -> None:
        with log.producer(linger=NEVER, batch_bytes=1) as producer:
            producer.append(value=b"0" * 20_000).result(SOON)
            failing, gate = threading.Event(), Gate(line)
            failing.set()
            fail_while(line, failing.is_set)
            handles = [
                producer.append(value=b"1" * 20_000),
                producer.append_batch(records(b"2", b"3")),
                producer.append(value=b"queued"),
            ]
            gate.open()
            told = [type(failure_of(handle)) for handle in handles]
            assert told == [StorageError, ProducerFailed, ProducerFailed]
            failing.clear()
            assert producer.retry(SOON) == [Receipt(1, 1), Receipt(2, 2), Receipt(4, 1)]
            assert producer.append(value=b"5" * 20_000).result(SOON) == Receipt(5, 1)
            assert [type(failure_of(handle)) for handle in handles] == told, "a handle that failed stays so"
        assert [value[:6] for value in values(log)] == [b"000000", b"111111", b"2", b"3", b"queued", b"555555"]
        assert numbers(log, producer) == list(range(5))

    def test_what_was_still_queued_or_open_is_kept_too(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line)
        line.fail_next("put_if", path_prefix="head", error=REFUSED)
        with log.producer(linger=NEVER) as producer:
            first = producer.append(value=b"a")
            sealed = threading.Thread(target=lambda: failure_of(first), daemon=True)
            sealed.start()
            with producer._state.lock:
                producer._state.drain()
                producer._state.seal()
            gate.wait_for(1)
            open_table = producer.append_batch(records(b"b", b"c"))
            queued = producer.append(value=b"d")
            gate.open()
            assert failure_of(first) is REFUSED
            assert isinstance(failure_of(open_table), ProducerFailed)
            assert isinstance(failure_of(queued), ProducerFailed)
            assert producer.retry(SOON) == [Receipt(0, 1), Receipt(1, 3)]
        assert values(log) == [b"a", b"b", b"c", b"d"]

    def test_a_batch_that_had_landed_after_all_is_recognised_and_not_doubled(self, line: FaultyStore) -> None:
        log = open_log(line, create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
        producer = log.producer(linger=NEVER)
        line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", "after") else None)
        line.lose_answers(1, path_prefix="head")
        handle = producer.append(value=b"a")
        with pytest.raises(OutcomeUnknown):
            producer.flush(SOON)
        assert isinstance(failure_of(handle), OutcomeUnknown)
        line.unhook()
        line.heal()
        assert log.bounds() == Bounds(0, 1)
        assert producer.retry(SOON) == [Receipt(0, 1)]
        assert producer.append(value=b"b")
        producer.close()
        assert values(log) == [b"a", b"b"]

    def test_it_is_recognised_also_when_its_entry_has_left_the_head(self, line: FaultyStore) -> None:
        log = open_log(line, create=True, env=Env(clock=ManualClock(), chance=SeededChance(1)))
        producer = log.producer(linger=NEVER)
        line.hook(lambda call: line.turn_down() if (call.name, call.stage) == ("put_if", "after") else None)
        line.lose_answers(1, path_prefix="head")
        producer.append(value=b"a")
        with pytest.raises(OutcomeUnknown):
            producer.flush(SOON)
        line.unhook()
        line.heal()
        for number in range(200):
            append(log, b"x", number=number)
        assert all(entry.writer != producer.writer for entry in log.head().tail)
        assert producer.retry(SOON) == [Receipt(0, 1)]
        producer.close()
        assert log.bounds() == Bounds(0, 201)

    def test_an_uploaded_batch_is_not_uploaded_again(self, log: ObjectLog, line: FaultyStore) -> None:
        line.fail_next("put_if", path_prefix="head", error=REFUSED)
        with log.producer(linger=NEVER) as producer:
            producer.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                producer.flush(SOON)
            before = len(line.named("put"))
            assert producer.retry(SOON) == [Receipt(0, 1)]
            assert len(line.named("put")) == before

    def test_if_it_fails_again_everything_is_kept_as_before(self, log: ObjectLog, line: FaultyStore) -> None:
        with log.producer(linger=NEVER, batch_bytes=1) as producer:
            line.fail_next("put", times=7, error=REFUSED)
            with pytest.raises(StorageError, match="403"):
                producer.append(value=b"a" * 20_000).result(SOON)
            for _ in range(6):
                with pytest.raises(StorageError, match="403"):
                    producer.retry(SOON)
                with pytest.raises(ProducerFailed):
                    producer.append(value=b"refused")
            assert producer.retry(SOON) == [Receipt(0, 1)]
            assert producer.append(value=b"b" * 20_000).result(SOON) == Receipt(1, 1)
            assert producer.buffered == 0
        assert numbers(log, producer) == [0, 1]

    def test_without_a_failure_there_is_nothing_to_retry(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            assert producer.retry(SOON) == []
            handle = producer.append(value=b"a")
            assert producer.retry(SOON) == []
            assert not handle.done()

    def test_a_retry_that_takes_too_long_is_still_under_way(self, log: ObjectLog, line: FaultyStore) -> None:
        with log.producer(linger=NEVER) as producer:
            line.fail_next("put", error=REFUSED)
            producer.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                producer.flush(SOON)
            gate = Gate(line)
            with pytest.raises(TimeoutError):
                producer.retry(0.01)
            gate.open()
            producer.flush(SOON)
        assert values(log) == [b"a"]

    def test_a_call_that_was_refused_is_not_in_it(self, log: ObjectLog, line: FaultyStore) -> None:
        with log.producer(linger=NEVER) as producer:
            line.fail_next("put", error=REFUSED)
            producer.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                producer.flush(SOON)
            for call in (
                lambda: producer.append(value=b"refused"),
                lambda: producer.append(value=bytes(20_000)),
                lambda: producer.append_batch(records(b"refused")),
                lambda: producer.produce([b"refused"]),
            ):
                with pytest.raises(ProducerFailed):
                    call()
            assert not producer._state.rows, "those who are refused must not use up memory"
            producer.retry(SOON)
            producer.append(value=b"b")
        assert values(log) == [b"a", b"b"]

    def test_one_that_was_refused_at_the_last_moment_is_not_in_it_either_and_keeps_no_thread_busy(
        self, line: FaultyStore
    ) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(linger=NEVER) as producer:
            line.fail_next("put", error=REFUSED)
            producer.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                producer.flush(SOON)
            look_just_before_the_failure(producer)
            with pytest.raises(ProducerFailed):
                producer.append(value=b"refused")
            looks: list[None] = []
            look, producer._state.until_due = producer._state.until_due, lambda: looks.append(None) or look()
            producer._state.wake.set()
            for _ in range(100):
                threading.Event().wait(0.001)
            assert len(looks) < 5
            producer.retry(SOON)
            after = producer.append(value=b"b")
            producer.flush(SOON)
            assert after.result(0) == Receipt(1, 1)
        assert values(log) == [b"a", b"b"]

    def test_a_record_that_was_queued_during_the_failure_and_found_the_producer_continuing_is_listed_in_time(
        self, line: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(linger=5.0) as producer:
            line.fail_next("put", error=REFUSED)
            producer.append(value=b"a")
            with pytest.raises(StorageError, match="403"):
                producer.flush(SOON)
            state, take_back = producer._state, producer._state.take_back

            def others_are_faster(row: Row) -> None:
                while state.wake.is_set():
                    threading.Event().wait(0.001)
                assert clock.wait_until_blocked(1)
                assert producer.retry(SOON) == [Receipt(0, 1)]
                take_back(row)

            look_just_before_the_failure(producer)
            monkeypatch.setattr(state, "take_back", others_are_faster)
            handle = producer.append(value=b"b")
            clock.advance(5.0)
            assert handle.result(SOON) == Receipt(1, 1)

    def test_without_a_thread_to_upload_with_it_fails_and_can_be_retried(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_more(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with log.producer(linger=NEVER) as producer:
            producer.append(value=b"a")
            monkeypatch.setattr(threading.Thread, "start", no_more)
            with pytest.raises(RuntimeError, match="new thread"):
                producer.flush(SOON)
            monkeypatch.undo()
            assert producer.retry(SOON) == [Receipt(0, 1)]
        assert values(log) == [b"a"]

    def test_memory_stays_bounded_by_the_budget_while_it_is_kept(self, log: ObjectLog, line: FaultyStore) -> None:
        with log.producer(linger=NEVER, budget=50_000, batch_bytes=1, uploads=1, compression="none") as producer:
            line.fail_next("put", error=REFUSED)
            handles = []
            with suppress(ProducerFailed):
                while len(handles) < 100:
                    handles += [producer.append(value=bytes(20_000))]
            assert len(handles) < 10
            kept = producer.buffered
            assert 20_000 * len(handles) <= kept <= 80_000
            receipts = producer.retry(SOON)
            assert sum(receipt.count for receipt in receipts) == len(handles) == log.bounds().next
            assert producer.buffered == 0


class TestWhatIsSaid:
    def test_the_exceptions_name_the_failed_writer_and_number(self, log: ObjectLog, line: FaultyStore) -> None:
        producer = log.producer(linger=NEVER)
        for value in (b"a", b"b"):
            producer.append(value=value)
            producer.flush(SOON)
        error = StorageError("403 Forbidden")
        line.fail_next("put", error=error)
        handle = producer.append(value=b"c")
        with pytest.raises(StorageError, match="403"):
            producer.flush(SOON)
        assert failure_of(handle) is error
        assert f"Batch 2 of writer {producer.writer}" in error.__notes__[0]
        with pytest.raises(ProducerFailed, match=rf"Batch 2 of writer {producer.writer} .*retry\(\)") as caught:
            producer.append(value=b"d")
        assert (caught.value.writer, caught.value.number, caught.value.__cause__) == (producer.writer, 2, error)
        with pytest.raises(ProducerFailed):
            producer.close()


class TestGivingUp:
    def test_closing_raises_what_failed_and_frees_the_memory(self, log: ObjectLog, line: FaultyStore) -> None:
        producer = log.producer(linger=NEVER)
        line.fail_next("put", error=REFUSED)
        producer.append(value=bytes(100_000))
        with pytest.raises(StorageError, match="403"):
            producer.flush(SOON)
        assert producer.buffered > 0
        with pytest.raises(ProducerFailed, match="403"):
            producer.close()
        assert producer.buffered == 0
        assert not producer._state.outcomes()
        producer.close()
        with pytest.raises(ProducerClosed):
            producer.retry(SOON)
        assert log.bounds() == Bounds(0, 0)

    def test_a_failure_found_by_closing_is_raised_and_ends_it(self, log: ObjectLog, line: FaultyStore) -> None:
        producer = log.producer(linger=NEVER)
        line.fail_next("put", error=REFUSED)
        handle = producer.append(value=b"a")
        with pytest.raises(StorageError, match="403"):
            producer.close()
        assert failure_of(handle) is REFUSED
        assert not any(thread.is_alive() for thread in producer._committer._threads)

    def test_a_new_producer_takes_a_new_writer_id(self, log: ObjectLog, line: FaultyStore) -> None:
        line.fail_next("put", error=REFUSED)
        failed = log.producer(linger=NEVER)
        failed.append(value=b"a")
        with pytest.raises(StorageError, match="403"):
            failed.close()
        with log.producer() as successor:
            assert successor.writer != failed.writer
            assert successor.append(value=b"a").result(SOON) == Receipt(0, 1)


class TestWhereRetryingCannotHelp:
    def test_a_writer_that_was_forgotten_stays_so(self) -> None:
        log = open_log(PlainStore(), create=True)
        producer = log.producer(linger=NEVER)
        for name in range(MAX_WRITERS + 1):
            append(log, b"x", writer=writer_named(name), number=0)
        producer.append(value=b"late")
        for call in (producer.flush, producer.retry, producer.retry):
            with pytest.raises(WriterExpired):
                call(SOON)
        with pytest.raises(ProducerFailed):
            producer.close()
        assert log.bounds() == Bounds(0, MAX_WRITERS + 1)

    def test_a_log_that_was_replaced_stays_so(self) -> None:
        place = PlainStore()
        producer = open_log(place, create=True, env=Env(chance=SeededChance(1))).producer(linger=NEVER)
        producer.append(value=b"for the old log")
        for path in ("head", "log.json"):
            place.delete(path)
        other = open_log(place, create=True, env=Env(chance=SeededChance(2)))
        for call in (producer.flush, producer.retry):
            with pytest.raises(Diverged, match="replaced"):
                call(SOON)
        with pytest.raises(ProducerFailed):
            producer.close()
        assert other.bounds() == Bounds(0, 0)

    def test_records_that_could_not_be_put_in_a_batch_end_it(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(_: object) -> None:
            raise MemoryError

        producer = log.producer(linger=NEVER)
        before = producer.append_batch(records(b"before"))
        lost = producer.append(value=b"lost")
        monkeypatch.setattr("strandline.log.produce.state.page_of", no_memory)
        with pytest.raises(MemoryError):
            producer.flush(SOON)
        monkeypatch.undo()
        assert isinstance(failure_of(lost), MemoryError)
        assert isinstance(failure_of(before), ProducerFailed)
        for call in (producer.retry, producer.flush):
            with pytest.raises(ProducerFailed, match="open a new producer"):
                call(SOON)
        with pytest.raises(ProducerFailed):
            producer.close()
        assert log.bounds() == Bounds(0, 0)
        assert producer.buffered == 0

    def test_the_same_while_it_is_closed_leaves_no_thread_waiting(
        self, log: ObjectLog, line: FaultyStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(_: object) -> None:
            raise MemoryError

        producer, gate = log.producer(linger=NEVER, batch_bytes=1), Gate(line)
        under_way = producer.append_batch(records(bytes(1000)))
        lost = producer.append(value=b"lost")
        monkeypatch.setattr("strandline.log.produce.state.page_of", no_memory)
        closing = threading.Thread(target=lambda: failure_of(_Closing(producer)), daemon=True)
        closing.start()
        assert isinstance(failure_of(under_way), ProducerFailed)
        assert isinstance(failure_of(lost), MemoryError)
        gate.open()
        closing.join(SOON)
        assert not closing.is_alive()


class _Closing:
    """A producer's closing, looked at as a handle."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def result(self, timeout: float) -> None:
        self._producer.close()


class TestOneWriterIdForTwo:
    def test_a_number_that_another_producer_took_is_no_acknowledgement(self, log: ObjectLog) -> None:
        one = log.producer(linger=NEVER)
        two = log.producer(writer=one.writer, linger=NEVER)
        mine = one.append(value=b"one")
        one.flush(SOON)
        theirs = two.append(value=b"two")
        with pytest.raises(OutOfOrder, match="another producer"):
            two.flush(SOON)
        assert mine.result(0) == Receipt(0, 1)
        assert isinstance(failure_of(theirs), OutOfOrder)
        with pytest.raises(OutOfOrder, match="another producer"):
            two.retry(SOON)
        with pytest.raises(ProducerFailed):
            two.close()
        one.close()
        assert values(log) == [b"one"]

    def test_nothing_after_it_is_listed_either(self, log: ObjectLog, line: FaultyStore) -> None:
        one = log.producer(linger=NEVER, batch_bytes=1)
        two = log.producer(writer=one.writer, linger=NEVER, batch_bytes=1)
        one.append(value=b"1" * 20_000)
        one.close()
        gate = Gate(line)
        handles = [two.append(value=b"2" * 20_000) for _ in range(3)]
        gate.wait_for(3)
        gate.open()
        for handle in handles:
            assert isinstance(failure_of(handle), (OutOfOrder, ProducerFailed))
        with pytest.raises(ProducerFailed):
            two.close()
        assert log.bounds() == Bounds(0, 1)

    def test_it_is_noticed_also_when_the_other_one_s_entry_has_left_the_head(self, log: ObjectLog) -> None:
        one = log.producer(linger=NEVER)
        two = log.producer(writer=one.writer, linger=NEVER)
        one.append(value=b"one")
        one.close()
        for number in range(200):
            append(log, b"x", number=number)
        assert all(entry.writer != one.writer for entry in log.head().tail)
        two.append(value=b"two")
        with pytest.raises(OutOfOrder, match="another producer"):
            two.close()
        assert log.bounds() == Bounds(0, 201)

    def test_an_append_by_hand_is_still_a_repetition(self, log: ObjectLog) -> None:
        writer = WriterId(SeededChance(5).uuid())
        for _ in range(3):
            assert append(log, b"a", writer=writer, number=0) == Receipt(0, 1)
        assert values(log) == [b"a"]

    @pytest.mark.parametrize("seed", some(range(10), 3))
    def test_two_that_share_an_id_never_both_acknowledge_a_record_that_is_not_there(self, seed: int) -> None:
        place = PlainStore()
        log = open_log(place, create=True, env=Env(chance=SeededChance(seed)))
        writer = WriterId(SeededChance(seed + 50).uuid())
        acknowledged: list[bytes] = []

        def work(name: bytes) -> None:
            producer = open_log(place).producer(writer=writer, linger=0.0, batch_bytes=1)
            for number in range(20):
                value = b"%s%d" % (name, number)
                try:
                    producer.append(value=value).result(SOON)
                except (OutOfOrder, ProducerFailed):
                    break
                acknowledged.append(value)
            try:
                producer.close()
            except (OutOfOrder, ProducerFailed):
                return

        together(lambda: work(b"a"), lambda: work(b"b"))
        assert sorted(acknowledged) == sorted(values(log))


class TestSeededHistories:
    """Faults without patience, so that producers fail often; who retries until it succeeds has everything, once."""

    FAULTS = Faults(before=0.08, after=0.15, late=0.08, throttled=0.05)
    FAILURES = (TransientStorageError, OutcomeUnknown, StorageError, ProducerFailed)

    @pytest.mark.parametrize("seed", some(range(60), 4))
    def test_one_appender_that_retries_loses_nothing_and_doubles_nothing(self, seed: int) -> None:
        chance, place, clock = random.Random(seed), PlainStore(), ManualClock()
        open_log(place, create=True)
        line = FaultyStore(place, seed=seed, clock=clock)
        log = open_log(line, env=Env(clock=clock, chance=SeededChance(seed)))
        producer = log.producer(linger=NEVER, batch_bytes=chance.choice([1, 30_000]), uploads=chance.randint(1, 3))
        line.faults = self.FAULTS
        returned: list[tuple[bytes, object]] = []
        failures = 0
        for number in range(40):
            value = b"%d" % number * (20_000 if chance.random() < 0.3 else 1)
            try:
                returned.append((value, producer.append(value=value)))
                if chance.random() < 0.3:
                    producer.flush(SOON)
            except self.FAILURES:
                failures += 1
                failures += self._retry_until_it_works(producer)
        self._flush_until_it_works(producer)
        producer.close()
        line.land_late()
        assert values(open_log(place)) == [value for value, _ in returned], f"seed {seed}"
        for offset, (_, handle) in enumerate(returned):
            try:
                assert handle.result(0).first in (offset, None)
            except self.FAILURES:
                failures += 1
        assert failures, "nothing happened"

    def _flush_until_it_works(self, producer: Producer) -> None:
        for _ in range(500):
            try:
                producer.flush(SOON)
            except self.FAILURES:
                self._retry_until_it_works(producer)
            else:
                return
        raise AssertionError("it never worked")

    def _retry_until_it_works(self, producer: Producer) -> int:
        for tries in range(500):
            try:
                producer.retry(SOON)
            except self.FAILURES:
                continue
            return tries
        raise AssertionError("it never worked")

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_the_same_for_many_more_histories(self) -> None:
        for seed in range(60, 2000):
            self.test_one_appender_that_retries_loses_nothing_and_doubles_nothing(seed)
        for seed in range(10, 100):
            self.test_threads_that_append_while_another_retries_lose_nothing_and_double_nothing(seed)

    @pytest.mark.parametrize("seed", some(range(10), 1))
    def test_threads_that_append_while_another_retries_lose_nothing_and_double_nothing(self, seed: int) -> None:
        place = PlainStore()
        open_log(place, create=True)
        line = FaultyStore(place, seed=seed)
        log = open_log(line, env=Env(clock=ManualClock(), chance=SeededChance(seed)))
        producer = log.producer(linger=0.0, batch_bytes=500)
        line.faults = self.FAULTS
        returned: dict[int, list[bytes]] = {0: [], 1: []}

        def work(name: int) -> None:
            for number in range(400):
                value = b"%d %d" % (name, number)
                try:
                    if number % 7:
                        producer.append(value=value)
                    else:
                        producer.append_batch(records(value))
                except ProducerFailed:
                    self._retry_until_it_works(producer)
                else:
                    returned[name].append(value)

        together(lambda: work(0), lambda: work(1))
        line.heal()
        self._flush_until_it_works(producer)
        producer.close()
        line.land_late()
        found = values(open_log(place))
        for name, mine in returned.items():
            assert [value for value in found if value.startswith(b"%d " % name)] == mine
        assert len(found) == sum(map(len, returned.values()))

    def test_a_death_of_the_listing_leaves_a_prefix(self, log: ObjectLog, line: FaultyStore) -> None:
        died: list[Call] = []

        def die_at_the_third(call: Call) -> None:
            if call.path == "head" and call.name == "put_if" and call.stage == "after":
                died.append(call)
                if len(died) >= 3:
                    raise REFUSED

        line.hook(die_at_the_third)
        producer = log.producer(linger=NEVER, batch_bytes=1)
        for number in range(2):
            assert producer.append(value=b"%d" % number * 20_000).result(SOON) == Receipt(number, 1)
        assert failure_of(producer.append(value=b"2" * 20_000)) is REFUSED
        line.unhook()
        assert producer.retry(SOON) == [Receipt(2, 1)]
        producer.close()
        assert [value[:1] for value in values(log)] == [b"0", b"1", b"2"]
