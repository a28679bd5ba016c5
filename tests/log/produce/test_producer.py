"""The producer: when batches close, in which order they are listed, and the results of their handles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import BufferFull, InvalidInput, ProducerClosed
from strandline.log.object import ObjectLog, Producer, open_log
from strandline.model.cursor import Bounds
from strandline.model.head import MetadataRange, Receipt
from strandline.model.records import MAX_RECORD_BYTES, Op
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import together
from tests.contracts.logs import content, fetched, records
from tests.log.produce.producing import NEVER, SOON, Gate, pass_time_until
from tests.matrix_cases import some


@pytest.fixture
def line() -> FaultyStore:
    return FaultyStore(PlainStore())


@pytest.fixture
def log(line: FaultyStore) -> ObjectLog:
    return open_log(line, create=True)


class TestWhenABatchCloses:
    def test_a_batch_closes_at_its_size(self, log: ObjectLog) -> None:
        with log.producer(batch_bytes=100_000, linger=NEVER, compression="none") as producer:
            handles = [producer.append(value=b"%4d" % number + bytes(996)) for number in range(1000)]
            assert handles[0].result(SOON) == Receipt(0, 1)
        sizes = [span.size for span in log.plan(log.start())]
        assert len(sizes) >= 5
        assert all(50_000 < size < 200_000 for size in sizes[:-1])

    @pytest.mark.parametrize("size", [3, 1000, 8_000, 50_000, 200_000])
    def test_a_batch_closes_at_its_size_however_large_its_records_are(self, log: ObjectLog, size: int) -> None:
        with log.producer(batch_bytes=100_000, linger=NEVER, compression="none") as producer:
            first = producer.append(value=bytes(size))
            for _ in range(max(1, 3_000_000 // (size + 30))):
                producer.append(value=bytes(size))
            assert first.result(SOON) == Receipt(0, 1)

    def test_at_the_age_of_its_first_record_even_under_constant_traffic(self, log: ObjectLog) -> None:
        with log.producer(linger=0.05) as producer:
            first = producer.append(value=b"first")
            others = 0
            while not first.done():
                producer.append(value=b"other")
                others += 1
                assert others < 10_000_000, "the first record still waits"
            assert first.result(0) == Receipt(0, 1)
            assert log.bounds().next < others + 1 + 10_000_000

    def test_a_batch_does_not_close_before_the_linger_time(self, line: FaultyStore) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(linger=5.0) as producer:
            handle = producer.append(value=b"a")
            assert clock.wait_until_blocked(1)
            clock.advance(4.9)
            assert clock.wait_until_blocked(1)
            assert not handle.done()
            assert line.named("put") == ()
            pass_time_until(handle.done, clock)
            assert handle.result(0) == Receipt(0, 1)

    def test_each_batch_has_an_age_of_its_own(self, line: FaultyStore) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(linger=5.0) as producer:
            for number in range(3):
                handle = producer.append(value=b"a")
                pass_time_until(handle.done, clock)
                assert handle.result(0) == Receipt(number, 1)
        assert len(log.plan(log.start())) == 3

    def test_a_batch_closes_when_the_producer_is_flushed(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            handles = [
                producer.append(value=b"a"),
                producer.append_batch(records(b"b", b"c")),
                producer.produce([b"d"]),
            ]
            producer.flush(SOON)
            assert [handle.done() for handle in handles] == [True, True, True]
            assert log.bounds() == Bounds(0, 4)
            producer.flush(SOON)  # nothing to do

    def test_when_the_producer_is_closed(self, log: ObjectLog) -> None:
        producer = log.producer(linger=NEVER)
        handle = producer.append(value=b"a")
        producer.close()
        assert handle.result(0) == Receipt(0, 1)
        assert content(log) == [(0, b"a")]
        producer.close()  # again is fine

    def test_not_by_a_table_that_would_be_split(self, log: ObjectLog) -> None:
        with log.producer(batch_bytes=1000, linger=NEVER) as producer:
            producer.append(value=b"small")
            large = producer.append_batch(records(*[b"%4d" % number * 20 for number in range(200)]))
            producer.append(value=b"small")
        assert large.result(0) == Receipt(1, 200)
        assert [(span.first, span.next) for span in log.plan(log.start())] == [(0, 1), (1, 201), (201, 202)]

    def test_before_it_holds_more_than_a_reader_would_take(
        self, log: ObjectLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The real limits are thirty times as large and in the same proportion. All this compresses well.
        monkeypatch.setattr("strandline.model.records.MAX_BATCH_BYTES", 10 << 20)
        monkeypatch.setattr("strandline.log.object.upload.ObjectShipper.most_bytes", 10 << 20)
        monkeypatch.setattr("strandline.formats.arrow.header.PADDED_LIMIT", (10 << 20) + (10 << 17))
        monkeypatch.setattr("strandline.formats.arrow.header._EARLIER_LIMIT", 0)
        with log.producer(linger=NEVER, batch_bytes=5 << 20) as producer:

            def work() -> None:
                for _ in range(6):
                    producer.append_batch(records(bytes(2 << 20)))
                    producer.append(key=bytes(5 << 19), value=bytes(5 << 19))
                    for _ in range(300):
                        producer.append(value=bytes(10_000))

            together(*[work] * 4)
            producer.flush(SOON)
            producer.append_batch(records(bytes((5 << 20) - 50_000)))
            producer.append(key=bytes(5 << 19), value=bytes(5 << 19), headers={"h": bytes(5 << 19)})
        assert log.bounds() == Bounds(0, 4 * 6 * 302 + 2)
        found = fetched(log.plan(log.start()), ["offset"])
        assert found["offset"].to_pylist() == list(range(4 * 6 * 302 + 2))


class TestOrder:
    def test_an_append_after_another_returned_comes_after_it_also_in_another_thread(self, log: ObjectLog) -> None:
        turn = threading.Lock()
        order: list[tuple[int, Callable[[], Receipt]]] = []

        with log.producer(batch_bytes=3000, linger=0.0) as producer:

            def work(name: int) -> None:
                for number in range(300):
                    with turn:
                        match (name + number) % 5:
                            case 0:
                                handle = producer.append_batch(records(b"t", b"t"))
                            case 1:
                                handle = producer.produce([b"p"] * 3)
                            case 2:
                                handle = producer.append(value=bytes(20_000))
                            case _:
                                handle = producer.append(value=b"r")
                        order.append((len(order), handle.result))

            together(*[lambda name=name: work(name) for name in range(4)])
        end = 0
        for _, result in order:
            receipt = result()
            assert receipt.first == end
            end += receipt.count
        assert log.bounds() == Bounds(0, end)

    def test_threads_that_do_not_wait_for_each_other_lose_nothing_and_keep_their_own_order(
        self, log: ObjectLog
    ) -> None:
        with log.producer(batch_bytes=20_000, linger=0.001) as producer:

            def work(name: int) -> None:
                for number in range(3000):
                    producer.append(key=b"%d" % name, value=b"%d" % number)

            together(*[lambda name=name: work(name) for name in range(4)])
        found = fetched(log.plan(log.start())).to_pydict()
        assert len(found["offset"]) == 12_000
        for name in range(4):
            mine = [value for key, value in zip(found["key"], found["value"], strict=True) if key == b"%d" % name]
            assert mine == [b"%d" % number for number in range(3000)]

    def test_two_producers_share_a_log(self, log: ObjectLog) -> None:
        def work(name: bytes) -> None:
            with log.producer(batch_bytes=500, linger=0.0, compression="none") as producer:
                for number in range(500):
                    producer.append(key=name, value=b"%d" % number)

        together(lambda: work(b"a"), lambda: work(b"b"))
        found = fetched(log.plan(log.start())).to_pydict()
        assert found["offset"] == list(range(1000))
        for name in (b"a", b"b"):
            mine = [int(v) for k, v in zip(found["key"], found["value"], strict=True) if k == name]
            assert mine == list(range(500))

    def test_a_producer_continues_after_the_last_number_of_its_writer(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as first:
            first.append(value=b"a")
            first.flush(SOON)
            first.append(value=b"b")
        with log.producer(writer=first.writer) as second:
            assert second.append(value=b"c").result(SOON) == Receipt(2, 1)
        assert [entry.number for entry in log.head().tail] == [0, 1, 2]


class TestHandles:
    def test_a_handle_is_done_only_when_its_record_is_listed(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line, "head")
        with log.producer(linger=0.0) as producer:
            handle = producer.append(value=b"a")
            assert gate.reached.wait(SOON)
            assert not handle.done()
            with pytest.raises(TimeoutError):
                handle.result(0.01)
            gate.open()
            assert handle.result(SOON) == Receipt(0, 1)
            assert handle.done()

    def test_the_result_of_a_record_does_not_have_to_be_flushed_for(self, log: ObjectLog) -> None:
        with log.producer(linger=0.01) as producer:
            assert producer.append(value=b"a").result(SOON) == Receipt(0, 1)

    def test_every_record_knows_its_own_offset(self, log: ObjectLog) -> None:
        with log.producer() as producer:
            handles = [producer.append(value=b"%d" % number) for number in range(40_000)]
        assert [handle.result(0).first for handle in handles] == list(range(40_000))
        assert {handle.result(0).count for handle in handles} == {1}

    def test_handles_can_be_awaited(self, log: ObjectLog) -> None:
        async def three() -> list[Receipt]:
            with log.producer(linger=0.0) as producer:
                return [
                    await producer.append(value=b"a"),
                    await producer.append_batch(records(b"b", b"c")),
                    await producer.produce([b"d"]),
                ]

        assert asyncio.run(three()) == [Receipt(0, 1), Receipt(1, 2), Receipt(3, 1)]

    @pytest.mark.parametrize("kind", ["record", "table"])
    def test_giving_up_waiting_does_not_give_up_the_record(self, log: ObjectLog, line: FaultyStore, kind: str) -> None:
        gate = Gate(line, "head")
        with log.producer(linger=0.0) as producer:
            handle = producer.append(value=b"a") if kind == "record" else producer.append_batch(records(b"a"))
            neighbour = producer.append(value=b"b")

            async def impatient() -> None:
                await asyncio.wait_for(_awaited(handle), 0.05)

            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                asyncio.run(impatient())
            gate.open()
            try:
                assert [handle.result(SOON), neighbour.result(SOON)] == [Receipt(0, 1), Receipt(1, 1)]
                assert producer.append(value=b"c").result(SOON) == Receipt(2, 1)
            except CancelledError:
                pytest.fail("the batch was cancelled by one of those who waited for it")


async def _awaited(handle: object) -> object:
    return await handle


class TestBackPressure:
    def test_an_appender_blocks_until_there_is_room(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line)
        producer = log.producer(batch_bytes=30_000, budget=50_000, linger=0.0, compression="none")
        appended = []

        def work() -> None:
            for _ in range(10):
                handle = producer.append(value=bytes(20_000))
                appended.append(handle)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(appended) <= 4
        assert 50_000 <= producer.buffered <= 100_000
        gate.open()
        thread.join(SOON)
        assert not thread.is_alive()
        producer.close()
        assert [handle.result(0).first for handle in appended] == list(range(10))
        assert producer.buffered == 0

    def test_an_append_that_may_not_block_raises_and_appends_nothing(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line)
        with log.producer(budget=50_000, linger=0.0, block=False, compression="none") as producer:
            for _ in range(3):
                producer.append(value=bytes(20_000))
            with pytest.raises(BufferFull, match="50,000"):
                producer.append(value=bytes(20_000))
            for call in (lambda: producer.append_batch(records(b"x")), lambda: producer.produce([b"x"])):
                with pytest.raises(BufferFull):
                    call()
            gate.open()
            producer.flush(SOON)
            assert producer.append(value=b"again").result(SOON) == Receipt(3, 1)
        assert log.bounds() == Bounds(0, 4)

    def test_small_records_count_too(self, log: ObjectLog, line: FaultyStore) -> None:
        gate = Gate(line)
        with log.producer(batch_bytes=50_000, budget=100_000, linger=0.0, block=False, compression="none") as producer:
            appended = 0
            try:
                while appended < 1000:
                    producer.append(value=bytes(1000))
                    appended += 1
            except BufferFull:
                gate.open()
            else:
                gate.open()
                pytest.fail("a budget of 100,000 bytes took 1,000,000")
        assert log.bounds() == Bounds(0, appended)

    def test_one_record_larger_than_the_budget_still_goes_through(self, log: ObjectLog) -> None:
        with log.producer(budget=1000, batch_bytes=500, linger=NEVER) as producer:
            handles = [producer.append(value=bytes(100_000)) for _ in range(5)]
        assert [handle.result(0).first for handle in handles] == list(range(5))


class TestWhatIsAppended:
    def test_a_produce_call_is_never_split_and_its_metadata_stays_with_it(self, line: FaultyStore) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(batch_bytes=2000, linger=NEVER, compression="none") as producer:
            one = producer.produce([b"a", b"b"], metadata=b"first")
            clock.advance(1.5)
            two = producer.produce([b"c"], metadata=b"second")
            three = producer.produce([b"x" * 100] * 50, metadata=b"third")
            four = producer.produce([b"d"])
        assert [handle.ingested - one.ingested for handle in (one, two, three, four)] == [0, *[1_500_000] * 3]
        assert [handle.result(0) for handle in (one, two, three, four)] == [
            Receipt(0, 2), Receipt(2, 1), Receipt(3, 50), Receipt(53, 1),
        ]  # fmt: skip
        began = one.ingested
        assert began == clock.now() - 1_500_000
        first, second, third = log.head().tail
        assert first.metadata == (MetadataRange(0, began, b"first"), MetadataRange(2, clock.now(), b"second"))
        assert second.metadata == (MetadataRange(0, clock.now(), b"third"),)
        assert third.metadata == (MetadataRange(0, clock.now(), b""),)
        assert (first.count, second.count, third.count) == (3, 50, 1)

    def test_an_empty_entry_is_fine(self, log: ObjectLog) -> None:
        with log.producer() as producer:
            handles = [producer.produce([b""]), producer.produce([b"", b"a", b""])]
        assert [handle.result(0) for handle in handles] == [Receipt(0, 1), Receipt(1, 3)]
        assert content(log) == [(0, b""), (1, b""), (2, b"a"), (3, b"")]

    def test_every_produce_call_is_one_metadata_range_also_without_metadata(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            handles = [producer.produce([b"e"] * (number + 1)) for number in range(3)]
        (entry,) = log.head().tail
        starts = [0, 1, 3]
        assert entry.metadata == tuple(
            MetadataRange(start, handle.ingested, b"") for start, handle in zip(starts, handles, strict=True)
        )

    def test_metadata_begins_after_what_was_appended_before_it(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            producer.append(value=b"a")
            producer.append_batch(records(b"b", b"c"))
            producer.produce([b"d"], metadata=b"m")
        (entry,) = log.head().tail
        assert [(item.start, item.payload) for item in entry.metadata] == [(3, b"m")]
        assert content(log)[3] == (3, b"d")

    def test_records_keep_their_time_operation_and_headers(self, line: FaultyStore) -> None:
        clock = ManualClock(auto=False)
        log = open_log(line, create=True, env=Env(clock=clock))
        with log.producer(linger=NEVER) as producer:
            now = clock.now()
            producer.append(key=b"a", value=b"1")
            producer.append(key=b"b", value=b"2", timestamp=-5, headers={"trace": b"x", "empty": b""})
            producer.append(key=b"c", op=Op.DELETE, headers={})
            producer.append(key=b"d", op=Op.PURGE, timestamp=1 << 52)
            producer.append()
        (entry,) = log.head().tail
        assert (entry.oldest, entry.newest) == (-5, 1 << 52)
        found = fetched(log.plan(log.start()))
        assert found["timestamp"].cast(pa.int64()).to_pylist() == [now, -5, now, 1 << 52, now]
        assert found["op"].to_pylist() == [Op.PUT, Op.PUT, Op.DELETE, Op.PURGE, Op.PUT]
        assert found["key"].to_pylist() == [b"a", b"b", b"c", b"d", None]
        assert found["headers"].to_pylist() == [None, [("trace", b"x"), ("empty", b"")], None, None, None]

    def test_headers_are_those_at_the_time_of_the_call(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            headers = {"n": b"1"}
            producer.append(value=b"a", headers=headers)
            headers["n"] = b"2"
            producer.append(value=b"b", headers=headers)
            headers["broken"] = None  # type: ignore[assignment]
        assert fetched(log.plan(log.start()))["headers"].to_pylist() == [[("n", b"1")], [("n", b"2")]]

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda producer: producer.append(key="text"), id="key is text"),
            pytest.param(lambda producer: producer.append(value="text"), id="value is text"),
            pytest.param(lambda producer: producer.append(value=bytearray(b"x")), id="value can change"),
            pytest.param(lambda producer: producer.append(op=3), id="unknown operation"),
            pytest.param(lambda producer: producer.append(op=-1), id="negative operation"),
            pytest.param(lambda producer: producer.append(op="put"), id="operation is text"),
            pytest.param(lambda producer: producer.append(timestamp="soon"), id="time is text"),
            pytest.param(lambda producer: producer.append(timestamp=1.5), id="time is a fraction"),
            pytest.param(lambda producer: producer.append(timestamp=1 << 63), id="time is too late"),
            pytest.param(lambda producer: producer.append(headers={"a": "text"}), id="header is text"),
            pytest.param(lambda producer: producer.append(headers={1: b"x"}), id="header's name is a number"),
            pytest.param(lambda producer: producer.append(headers={"\ud800": b"x"}), id="header's name is no UTF-8"),
            pytest.param(lambda producer: producer.append(headers=[("a", b"x")]), id="headers are a list"),
            pytest.param(lambda producer: producer.produce([]), id="no entries"),
            pytest.param(lambda producer: producer.produce(["text"]), id="entry is text"),
            pytest.param(lambda producer: producer.produce([None]), id="entry is nothing"),
            pytest.param(lambda producer: producer.produce([b"x"], metadata="text"), id="metadata is text"),
            pytest.param(lambda producer: producer.append_batch(records()), id="empty table"),
            pytest.param(lambda producer: producer.append_batch(pa.table({"x": [1]})), id="unknown column"),
            pytest.param(lambda producer: producer.append_batch(None), id="no table"),
        ],
    )
    def test_an_invalid_record_is_refused_at_once_and_harms_no_other(
        self, log: ObjectLog, call: Callable[[Producer], object]
    ) -> None:
        with log.producer(linger=NEVER) as producer:
            before = producer.append(value=b"before")
            with pytest.raises(InvalidInput):
                call(producer)
            after = producer.append(value=b"after")
            producer.flush(SOON)
            assert [before.result(0), after.result(0)] == [Receipt(0, 1), Receipt(1, 1)]
        assert content(log) == [(0, b"before"), (1, b"after")]

    @pytest.mark.parametrize("part", some(["key", "value"], 1))
    def test_a_record_over_the_limit_is_refused_and_affects_no_other_record(self, log: ObjectLog, part: str) -> None:
        huge = bytes(MAX_RECORD_BYTES + 1)
        with log.producer(linger=NEVER) as producer:
            before = producer.append(value=b"before")
            with pytest.raises(InvalidInput, match="limit"):
                producer.append(**{part: huge})
            with pytest.raises(InvalidInput, match="limit"):
                producer.append_batch(pa.table({part: pa.array([huge], pa.binary())}))
            producer.flush(SOON)
            assert before.result(0) == Receipt(0, 1)
        assert content(log) == [(0, b"before")]

    @pytest.mark.matrix
    def test_a_record_of_100_mebibytes_is_fine(self, log: ObjectLog) -> None:
        large = bytes(range(256)) * (100 << 12)
        with log.producer() as producer:
            handles = [producer.append(key=b"k", value=value) for value in (b"a", large, b"z")]
            assert [handle.result(SOON).first for handle in handles] == [0, 1, 2]
        found = fetched(log.plan(log.start()))["value"]
        assert found[1].as_buffer().equals(pa.py_buffer(large))
        assert (found[0].as_py(), found[2].as_py()) == (b"a", b"z")

    def test_a_table_is_listed_whole_or_not_at_all(self, log: ObjectLog) -> None:
        table = pa.Table.from_batches([records(b"a", b"b"), records(b"c"), records(*[b"d"] * 100_000)])
        with log.producer(linger=NEVER, batch_bytes=1000) as producer:
            producer.append_batch(table)
        (entry,) = log.head().tail
        assert entry.count == 100_003
        assert fetched(log.plan(log.start()))["value"].to_pylist() == table["value"].to_pylist()

    @pytest.mark.parametrize("options", [{"batch_bytes": 0}, {"budget": 0}, {"uploads": 0}, {"linger": -1}])
    def test_impossible_options_are_refused(self, log: ObjectLog, options: dict[str, int]) -> None:
        with pytest.raises(InvalidInput):
            log.producer(**options)

    @pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
    def test_every_compression_can_be_read(self, log: ObjectLog, compression: str) -> None:
        with log.producer(compression=compression) as producer:
            producer.append(value=b"abc" * 1000)
        assert content(log) == [(0, b"abc" * 1000)]

    def test_an_unknown_compression_is_refused(self, log: ObjectLog) -> None:
        with pytest.raises(InvalidInput, match="brotli"):
            log.producer(compression="brotli")


class TestClosed:
    @pytest.mark.parametrize(
        "call",
        [
            lambda producer: producer.append(value=b"late"),
            lambda producer: producer.append(value=bytes(100_000)),
            lambda producer: producer.append_batch(records(b"late")),
            lambda producer: producer.produce([b"late"]),
        ],
        ids=["append", "append of a large one", "append_batch", "produce"],
    )
    def test_appending_after_closing_is_refused_and_changes_nothing(
        self, log: ObjectLog, call: Callable[[Producer], object]
    ) -> None:
        producer = log.producer()
        producer.append(value=b"a")
        producer.close()
        with pytest.raises(ProducerClosed):
            call(producer)
        producer.flush(SOON)
        assert content(log) == [(0, b"a")]

    def test_an_append_during_closing_is_listed_or_raises(self, tmp_path: Path) -> None:
        for _ in range(50):
            log = open_log(PlainStore(), create=True)
            producer = log.producer(linger=NEVER)
            handles = []

            def append_until_refused(producer: Producer = producer, handles: list[object] = handles) -> None:
                while True:
                    try:
                        handle = producer.append(value=b"x")
                    except ProducerClosed:
                        return
                    handles.append(handle)

            together(append_until_refused, producer.close)
            assert [handle.result(SOON).first for handle in handles] == list(range(len(handles)))
            assert log.bounds() == Bounds(0, len(handles))


class TestMetadata:
    def test_a_batch_is_closed_before_its_metadata_makes_the_head_large(self, log: ObjectLog) -> None:
        with log.producer(linger=NEVER) as producer:
            for number in range(100):
                producer.produce([b"%d" % number], metadata=bytes(1000))
        entries = log.head().tail
        assert 5 <= len(entries) <= 10
        assert sum(len(entry.metadata) for entry in entries) == 100

    def test_metadata_that_is_too_large_is_refused(self, log: ObjectLog) -> None:
        with log.producer() as producer, pytest.raises(InvalidInput, match="stored in the head"):
            producer.produce([b"a"], metadata=bytes(20_000))
