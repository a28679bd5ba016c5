"""Contract suite for producers: inherit the class, give it a log, and run it with ``pytest``."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from strandline.errors import BufferFull, ExpectationFailed, InvalidInput, OutOfOrder, ProducerClosed, Unsupported
from strandline.model.head import Receipt
from strandline.testing.stores import together
from tests.contracts.logs.batches import records

_SOON = 60.0
_NEVER = 3600.0


class ProducerContract:
    """Every sentence about a producer that is true of each kind of log, as a test.

    A subclass named ``Test...`` defines the fixture ``log``, an empty log.
    """

    has_metadata: ClassVar[bool] = False
    """Whether the log has a place for the metadata of ``produce`` calls."""
    only_values: ClassVar[bool] = False
    """Whether records are values only, and all those of a batch have its offset."""
    has_writers: ClassVar[bool] = True
    """Whether a producer may take the writer id of a former one."""

    def content(self, log: Any) -> list[bytes]:
        """The values of all records, in order."""
        return [value for batch in log.read() for value in batch.column("value").to_pylist()]

    def offsets(self, *firsts: int, of: list[Any]) -> None:
        """The handles' receipts begin at these offsets."""
        if not self.only_values:
            assert [handle.result(_SOON).first for handle in of] == list(firsts)
        assert all(handle.done() for handle in of)

    def test_records_tables_and_calls_are_listed_in_the_order_of_the_calls(self, log: Any) -> None:
        with log.producer(linger=_NEVER) as producer:
            handles = [
                producer.append(value=b"a"),
                producer.append_batch(records(b"b", b"c")),
                producer.produce([b"d", b"e"]),
                producer.append(value=b"f"),
            ]
            assert not any(handle.done() for handle in handles)
            producer.flush(_SOON)
            self.offsets(0, 1, 3, 5, of=handles)
            assert [handle.result(0).count for handle in handles] == [1, 2, 2, 1]
            producer.flush(_SOON)  # nothing to do
        assert self.content(log) == [b"a", b"b", b"c", b"d", b"e", b"f"]

    def test_a_batch_closes_at_its_size_at_its_age_and_with_the_producer(self, log: Any) -> None:
        with log.producer(batch_bytes=100_000, linger=_NEVER) as producer:
            first, *_ = [producer.append(value=b"%4d" % number + bytes(996)) for number in range(1000)]
            assert first.result(_SOON).count == 1
        assert len(self.content(log)) == 1000
        with log.producer(linger=0.001) as producer:
            assert producer.append(value=b"soon").result(_SOON).count == 1
        last = log.producer(linger=_NEVER)
        handle = last.append(value=b"last")
        last.close()
        last.close()  # again is fine
        assert handle.done()
        assert self.content(log)[-2:] == [b"soon", b"last"]

    def test_keys_operations_headers_and_times_of_records_are_kept(self, log: Any) -> None:
        if self.only_values:
            with log.producer() as producer, pytest.raises(InvalidInput, match="values and nothing else"):
                producer.append(key=b"k", value=b"v")
            return
        with log.producer() as producer:
            producer.append(key=b"k", value=b"v", timestamp=5, headers={"h": b"x"})
            producer.append(key=b"k", op=1)
            producer.append_batch(pa.table({"key": [b"t"], "value": [b"w"]}))
        rows = [row for batch in log.read() for row in batch.to_pylist(maps_as_pydicts="strict")]
        assert [(row["op"], row["key"], row["value"], row["headers"]) for row in rows] == [
            (0, b"k", b"v", {"h": b"x"}),
            (1, b"k", None, None),
            (0, b"t", b"w", None),
        ]
        assert rows[0]["timestamp"].timestamp() == pytest.approx(5e-6)

    def test_handles_can_be_awaited(self, log: Any) -> None:
        async def three() -> list[Receipt]:
            async with log.producer(linger=0.0) as producer:
                return [
                    await producer.append(value=b"a"),
                    await producer.append_batch(records(b"b", b"c")),
                    await producer.produce([b"d"]),
                ]

        assert [receipt.count for receipt in asyncio.run(three())] == [1, 2, 1]

    def test_threads_lose_nothing_and_keep_their_own_order(self, log: Any) -> None:
        with log.producer(batch_bytes=20_000, linger=0.001) as producer:

            def work(name: int) -> None:
                for number in range(500):
                    producer.append(value=b"%d %d" % (name, number))

            together(*[lambda name=name: work(name) for name in range(4)])
        found = self.content(log)
        assert len(found) == 2000
        for name in range(4):
            mine = [value for value in found if value.startswith(b"%d " % name)]
            assert mine == [b"%d %d" % (name, number) for number in range(500)]

    def test_two_producers_share_a_log(self, log: Any) -> None:
        def work(name: bytes) -> None:
            with log.producer(batch_bytes=2000, linger=0.0) as producer:
                for number in range(200):
                    producer.append(value=name + b"%d" % number)

        together(lambda: work(b"a"), lambda: work(b"b"))
        for name in (b"a", b"b"):
            mine = [value for value in self.content(log) if value.startswith(name)]
            assert mine == [name + b"%d" % number for number in range(200)]

    def test_metadata_of_a_call_is_kept_or_refused_with_the_reason(self, log: Any) -> None:
        with log.producer() as producer:
            if self.has_metadata:
                assert producer.produce([b"a"], metadata=b"m").result(_SOON).count == 1
            else:
                with pytest.raises(Unsupported, match="no place for the metadata"):
                    producer.produce([b"a"], metadata=b"m")
                with pytest.raises(Unsupported, match="no place for the metadata"):
                    producer.produce([b"a"] * 3, metadata=b"m", expect=0)
                assert producer.produce([b"a"]).result(_SOON).count == 1
        assert self.content(log) == [b"a"]

    def test_an_append_that_expects_another_end_is_refused_alone_and_the_producer_goes_on(self, log: Any) -> None:
        with log.producer(linger=0.0) as producer:
            producer.append_batch(records(b"a"), expect=0).result(_SOON)
            refused = producer.append_batch(records(b"b"), expect=0)
            with pytest.raises(ExpectationFailed):
                refused.result(_SOON)
            producer.append_batch(records(b"c"), expect=1).result(_SOON)
            producer.append(value=b"d")
        assert self.content(log) == [b"a", b"c", b"d"]

    def test_an_append_over_the_budget_waits_or_is_refused(self, log: Any) -> None:
        with log.producer(budget=50_000, linger=_NEVER, block=False) as producer:

            def pile_up() -> None:
                while True:
                    producer.append(value=bytes(20_000))

            with pytest.raises(BufferFull, match="50,000"):
                pile_up()
            producer.flush(_SOON)
            producer.append(value=b"again")
        before = len(self.content(log))
        with log.producer(budget=50_000, batch_bytes=30_000, linger=0.0) as producer:
            for _ in range(20):
                producer.append(value=bytes(20_000))
        assert len(self.content(log)) == before + 20

    def test_a_closed_producer_refuses_and_its_records_are_there(self, log: Any) -> None:
        producer = log.producer(linger=_NEVER)
        producer.append(value=b"a")
        producer.close()
        with pytest.raises(ProducerClosed):
            producer.append(value=b"b")
        with pytest.raises(ProducerClosed):
            producer.append_batch(records(b"b"))
        with pytest.raises(ProducerClosed):
            producer.produce([b"b"])
        assert self.content(log) == [b"a"]

    def test_a_producer_continues_after_the_last_number_of_its_writer(self, log: Any) -> None:
        if not self.has_writers:
            with pytest.raises(InvalidInput, match="leave the writer out"):
                log.producer(writer=log.producer().writer)
            return
        with log.producer(linger=_NEVER) as first:
            first.append(value=b"a")
            first.flush(_SOON)
            first.append(value=b"b")
        with log.producer(writer=first.writer) as second:
            second.append(value=b"c").result(_SOON)
        assert self.content(log) == [b"a", b"b", b"c"]

    def test_of_two_running_producers_with_one_writer_id_the_second_is_refused_and_appends_nothing(
        self, log: Any
    ) -> None:
        if not self.has_writers:
            return
        first = log.producer(linger=_NEVER)
        second = log.producer(writer=first.writer, linger=_NEVER)
        first.append(value=b"a")
        first.flush(_SOON)
        lost = second.append(value=b"b")
        with pytest.raises(OutOfOrder, match="another producer uses this writer id"):
            second.flush(_SOON)
        with pytest.raises(OutOfOrder):
            lost.result(0)
        with pytest.raises(OutOfOrder):
            second.retry(_SOON)  # not taken for its own, also at the second time
        with pytest.raises(Exception, match="writer"):
            second.close()
        first.append(value=b"c")
        first.close()
        assert self.content(log) == [b"a", b"c"]

    def test_an_idle_producer_leaves_no_thread_behind(self, log: Any) -> None:
        before = {thread.name for thread in threading.enumerate()}
        with log.producer() as producer:
            producer.append(value=b"a").result(_SOON)
        left = {thread.name for thread in threading.enumerate() if thread.is_alive()} - before
        assert not {name for name in left if name.startswith("strandline-") and "ing" in name}, left
