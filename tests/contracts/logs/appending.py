"""Contract of appends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from strandline.errors import ExpectationFailed, InvalidInput, OutOfOrder, WriterExpired
from strandline.log.contract import Handle, Log
from strandline.model.cursor import Bounds, Cursor, Limit, Span
from strandline.model.head import Receipt
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, Op
from strandline.testing.stores import together
from tests.contracts.logs.batches import SOON, append, content, fetched, headers_named, records, writer_named


class AppendingContract:
    """Appends, once per number and conditionally, and their handles."""

    appends: ClassVar[int] = 60
    """Number of batches of each of several threads; fewer where each costs an fsync."""

    # --- appending ------------------------------------------------------------------------------------------

    def test_a_new_log_is_empty_and_begins_at_0(self, log: Log) -> None:
        assert log.bounds() == Bounds(0, 0)
        assert log.start() == log.end() == Cursor(log.log_id, 0)
        assert log.plan(log.start()) == []

    def test_it_satisfies_the_protocols(self, log: Log) -> None:
        assert isinstance(log, Log)
        handle = log.append(records(b"a"), writer=writer_named(1), number=0)
        assert isinstance(handle, Handle)
        assert all(isinstance(span, Span) for span in log.plan(log.start()))

    def test_offsets_are_dense_from_0_over_all_writers(self, log: Log) -> None:
        one, two = writer_named(1), writer_named(2)
        assert append(log, b"a", b"b", b"c", writer=one, number=0) == Receipt(0, 3)
        assert append(log, b"d", writer=two, number=0) == Receipt(3, 1)
        assert append(log, b"e", b"f", writer=one, number=1) == Receipt(4, 2)
        assert log.bounds() == Bounds(0, 6)
        assert (log.start(), log.end()) == (Cursor(log.log_id, 0), Cursor(log.log_id, 6))
        assert content(log) == list(enumerate([b"a", b"b", b"c", b"d", b"e", b"f"]))

    def test_records_are_read_back_as_they_were_written(self, log: Log) -> None:
        rows = {
            "timestamp": pa.array([5, -1, 1 << 50], pa.int64()).view(RECORD_SCHEMA.field("timestamp").type),
            "op": pa.array([Op.PUT, Op.DELETE, Op.PURGE], pa.int8()),
            "key": pa.array([b"k", b"", None], pa.binary()),
            "value": pa.array([b"\x00" * 1000, None, b""], pa.binary()),
            "headers": pa.array([[("a", b"1"), ("a", b"2")], [], None], RECORD_SCHEMA.field("headers").type),
        }
        batch = pa.table(rows, schema=RECORD_SCHEMA)
        log.append(batch, writer=writer_named(1), number=0).result(SOON)
        (found,) = log.plan(log.start())[0].fetch()
        assert found.schema == READ_SCHEMA
        assert found["offset"].to_pylist() == [0, 1, 2]
        assert pa.Table.from_batches([found]).drop(["offset"]).to_pylist() == batch.to_pylist()

    def test_columns_that_are_left_out_are_filled(self, log: Log) -> None:
        batch = pa.table({"value": pa.array([b"a", b"b"], pa.binary())})
        log.append(batch, writer=writer_named(1), number=0).result(SOON)
        found = fetched(log.plan(log.start()))
        assert found["op"].to_pylist() == [Op.PUT, Op.PUT]
        assert found["key"].to_pylist() == found["headers"].to_pylist() == [None, None]
        assert found["timestamp"].null_count == 0

    @pytest.mark.parametrize(
        "batch",
        [
            pytest.param(records(), id="no records"),
            pytest.param(pa.table({"value": pa.array([], pa.binary())}), id="no rows"),
            pytest.param(pa.table({"value": [b"a"], "colour": ["red"]}), id="unknown column"),
            pytest.param(pa.table({"value": [1.5]}), id="value of another type"),
            pytest.param(pa.table({"op": pa.array([3], pa.int8())}), id="unknown operation"),
            pytest.param(pa.table({"op": pa.array([None], pa.int8())}), id="no operation"),
            pytest.param([{"value": b"a"}], id="no table"),
            pytest.param(pa.table({"headers": headers_named(b"ok", b"\xff")}), id="name of a header that is no text"),
        ],
    )
    def test_an_impossible_batch_is_refused_and_changes_nothing(self, log: Log, batch: Any) -> None:
        with pytest.raises(InvalidInput):
            log.append(batch, writer=writer_named(1), number=0)
        assert log.bounds() == Bounds(0, 0)
        assert append(log, b"a", number=0) == Receipt(0, 1)

    def test_a_table_of_many_chunks_is_one_append(self, log: Log) -> None:
        batch = pa.Table.from_batches([records(b"a"), records(b"b", b"c"), records(), records(b"d")])
        receipt = log.append(batch, writer=writer_named(1), number=0).result(SOON)
        assert receipt == Receipt(0, 4)
        assert content(log) == list(enumerate([b"a", b"b", b"c", b"d"]))
        assert len(log.plan(log.start(), Limit(batches=1))) == 1
        assert content(log, limit=Limit(batches=1)) == content(log)

    def test_no_reader_ever_sees_a_part_of_a_batch(self, log: Log) -> None:
        seen: set[int] = set()
        begun, over = threading.Event(), threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.add(log.bounds().next)
                begun.set()

        def write() -> None:
            try:
                begun.wait(60)
                for number in range(self.appends):
                    append(log, *[b"x"] * 7, number=number)
            finally:
                over.set()

        together(look, write)
        assert {end % 7 for end in seen} == {0}

    # --- once per number ------------------------------------------------------------------------------------

    def test_a_repeated_append_is_a_no_op_with_the_same_answer(self, log: Log) -> None:
        first = append(log, b"a", b"b", number=0)
        assert append(log, b"a", b"b", number=0) == first == Receipt(0, 2)
        assert content(log) == [(0, b"a"), (1, b"b")]

    def test_a_repeated_append_is_recognised_though_others_wrote_since(self, log: Log) -> None:
        append(log, b"a", number=0)
        append(log, b"b", number=1)
        append(log, b"c", writer=writer_named(2), number=0)
        assert append(log, b"b", number=1) == Receipt(1, 1)
        assert append(log, b"a", number=0).first in (0, None)
        assert log.bounds() == Bounds(0, 3)

    def test_a_number_says_what_is_the_same_not_the_records(self, log: Log) -> None:
        append(log, b"a", number=0)
        assert append(log, b"x", b"y", b"z", number=0) == Receipt(0, 1)
        append(log, b"a", number=1)
        assert content(log) == [(0, b"a"), (1, b"a")]

    def test_a_number_that_was_left_out_is_out_of_order_and_changes_nothing(self, log: Log) -> None:
        append(log, b"a", number=0)
        for number in (2, 3, 1 << 40):
            with pytest.raises(OutOfOrder, match="append number 1"):
                append(log, b"b", number=number)
        assert log.bounds() == Bounds(0, 1)
        assert append(log, b"b", number=1) == Receipt(1, 1)

    def test_an_unknown_writer_above_its_first_number_has_expired(self, log: Log) -> None:
        with pytest.raises(WriterExpired):
            append(log, b"a", number=1)
        assert log.bounds() == Bounds(0, 0)
        assert append(log, b"a", number=0) == Receipt(0, 1)

    def test_numbers_begin_at_0(self, log: Log) -> None:
        with pytest.raises(InvalidInput):
            append(log, b"a", number=-1)
        assert log.bounds() == Bounds(0, 0)

    def test_writers_are_numbered_apart(self, log: Log) -> None:
        for number in range(3):
            for name in range(4):
                append(log, b"x", writer=writer_named(name), number=number)
        assert log.bounds() == Bounds(0, 12)

    # --- conditional appends --------------------------------------------------------------------------------

    def test_an_append_that_expects_the_end_goes_there(self, log: Log) -> None:
        assert append(log, b"a", b"b", number=0, expect=0) == Receipt(0, 2)
        assert append(log, b"c", number=1, expect=2) == Receipt(2, 1)

    @pytest.mark.parametrize("expect", [0, 1, 3, 1 << 40])
    def test_an_append_that_expects_another_end_changes_nothing(self, log: Log, expect: int) -> None:
        append(log, b"a", b"b", number=0)
        with pytest.raises(ExpectationFailed, match="ends at 2"):
            append(log, b"c", number=1, expect=expect)
        assert log.bounds() == Bounds(0, 2)
        assert append(log, b"d", number=1) == Receipt(2, 1)

    def test_a_conditional_append_that_is_repeated_is_still_a_no_op(self, log: Log) -> None:
        append(log, b"a", number=0, expect=0)
        append(log, b"b", writer=writer_named(2), number=0)
        assert append(log, b"a", number=0, expect=0) == Receipt(0, 1)
        assert log.bounds() == Bounds(0, 2)

    # --- handles --------------------------------------------------------------------------------------------

    def test_a_handle_s_result_means_that_the_records_can_be_read(self, log: Log) -> None:
        handle = log.append(records(b"a"), writer=writer_named(1), number=0)
        assert handle.result(SOON) == Receipt(0, 1)
        assert handle.done()
        assert handle.result() == handle.result(0) == Receipt(0, 1)
        assert content(log) == [(0, b"a")]

    def test_a_handle_can_be_awaited(self, log: Log) -> None:
        async def both() -> list[Receipt]:
            one = log.append(records(b"a"), writer=writer_named(1), number=0)
            two = log.append(records(b"b", b"c"), writer=writer_named(1), number=1)
            return [await one, await two, await two]

        assert asyncio.run(both()) == [Receipt(0, 1), Receipt(1, 2), Receipt(1, 2)]

    def test_appends_of_many_threads_are_dense_and_each_writer_s_in_order(self, log: Log) -> None:
        receipts: dict[bytes, Receipt] = {}

        def write(name: int) -> None:
            for number in range(self.appends):
                value = b"%d/%d" % (name, number)
                receipts[value] = append(log, value, value, writer=writer_named(name), number=number)

        together(*[lambda name=name: write(name) for name in range(4)])
        found = content(log)
        assert [offset for offset, _ in found] == list(range(8 * self.appends))
        for value, receipt in receipts.items():
            assert receipt.first is not None
            assert [row[1] for row in found[receipt.first : receipt.first + 2]] == [value, value]
        for name in range(4):
            mine = [value for _, value in found[::2] if value is not None and value.startswith(b"%d/" % name)]
            assert mine == [b"%d/%d" % (name, number) for number in range(self.appends)]
