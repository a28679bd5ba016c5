"""What every log must do: inherit the class, give it a log, and run it with ``pytest``."""
# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, ClassVar
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.log.contract import Handle, Log, Receipt
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span
from strandline.model.errors import (
    CursorExpired,
    Diverged,
    ExpectationFailed,
    InvalidInput,
    OutOfOrder,
    WriterExpired,
)
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, Op, record_batch
from strandline.testing.slots import SlotContract, append
from strandline.testing.stores import together

_SOON = 30.0
"""Real seconds that nothing here should come near."""


def records(*values: bytes | None) -> pa.RecordBatch:
    """A batch of puts with these values and nothing else that matters."""
    count = len(values)
    return record_batch(timestamps=range(count), ops=[Op.PUT] * count, keys=[None] * count, values=values)


def writer_named(number: int) -> WriterId:
    """A writer's identity, the same for the same number."""
    return WriterId(UUID(int=number))


def fetched(spans: Sequence[Span], columns: Sequence[str] | None = None) -> pa.Table:
    """Everything in these spans, as one table."""
    batches = [batch for span in spans for batch in span.fetch(columns)]
    schema = READ_SCHEMA if columns is None else pa.schema([READ_SCHEMA.field(name) for name in columns])
    return pa.Table.from_batches(batches, schema)


def content(log: Log, since: Cursor | None = None, limit: Limit = NO_LIMIT) -> list[tuple[int, bytes | None]]:
    """Offset and value of everything that a plan gives."""
    table = fetched(log.plan(log.start() if since is None else since, limit))
    return list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


class LogContract(SlotContract):
    """Every sentence of :class:`~strandline.log.contract.Log`, as a test.

    A subclass named ``Test...`` defines the fixture ``log``, an empty log for each test, and the two methods of
    :class:`~strandline.testing.slots.LogOwner`, which do what the contract leaves to the log's owner.
    """

    picklable: ClassVar[bool] = True
    """Whether spans can be read in another process; if not, sending one there says why."""

    appends: ClassVar[int] = 60
    """How many batches each of several threads appends; fewer where each costs a disk's fsync."""

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
        log.append(batch, writer=writer_named(1), number=0).result(_SOON)
        (found,) = log.plan(log.start())[0].fetch()
        assert found.schema == READ_SCHEMA
        assert found["offset"].to_pylist() == [0, 1, 2]
        assert pa.Table.from_batches([found]).drop(["offset"]).to_pylist() == batch.to_pylist()

    def test_columns_that_are_left_out_are_filled(self, log: Log) -> None:
        batch = pa.table({"value": pa.array([b"a", b"b"], pa.binary())})
        log.append(batch, writer=writer_named(1), number=0).result(_SOON)
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
        ],
    )
    def test_an_impossible_batch_is_refused_and_changes_nothing(self, log: Log, batch: Any) -> None:
        with pytest.raises(InvalidInput):
            log.append(batch, writer=writer_named(1), number=0)
        assert log.bounds() == Bounds(0, 0)
        assert append(log, b"a", number=0) == Receipt(0, 1)

    def test_a_table_of_many_chunks_is_one_append(self, log: Log) -> None:
        batch = pa.Table.from_batches([records(b"a"), records(b"b", b"c"), records(), records(b"d")])
        receipt = log.append(batch, writer=writer_named(1), number=0).result(_SOON)
        assert receipt == Receipt(0, 4)
        assert content(log) == list(enumerate([b"a", b"b", b"c", b"d"]))
        assert len(log.plan(log.start(), Limit(batches=1))) == 1
        assert content(log, limit=Limit(batches=1)) == content(log)

    def test_nobody_ever_sees_a_part_of_a_batch(self, log: Log) -> None:
        seen: set[int] = set()
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.add(log.bounds().next)

        def write() -> None:
            try:
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
        assert handle.result(_SOON) == Receipt(0, 1)
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

    # --- planning -------------------------------------------------------------------------------------------

    @pytest.fixture
    def filled(self, log: Log) -> Log:
        """The log with ten records in batches of 3, 1, 4 and 2; the third one is much larger in bytes."""
        append(log, b"0", b"1", b"2", number=0)
        append(log, b"3", number=1)
        append(log, *(bytes([value]) * 5000 + bytes(range(256)) * value for value in b"4567"), number=2)
        append(log, b"8", b"9", number=3)
        return log

    def ranges(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """What each span covers."""
        return [(span.first, span.next) for span in spans]

    def test_a_plan_covers_everything_after_the_cursor_without_a_hole(self, filled: Log) -> None:
        assert self.ranges(filled.plan(filled.start())) == [(0, 3), (3, 4), (4, 8), (8, 10)]
        for since in range(10):
            spans = filled.plan(filled.start().at(since))
            assert [offset for span in spans for offset in range(span.first, span.next)] == list(range(since, 10))
            assert fetched(spans)["offset"].to_pylist() == list(range(since, 10))

    def test_a_span_says_how_many_bytes_are_read_for_it(self, filled: Log) -> None:
        sizes = [span.size for span in filled.plan(filled.start())]
        assert all(size > 0 for size in sizes)
        assert max(sizes) == sizes[2]

    def test_nothing_is_planned_only_at_the_end(self, filled: Log) -> None:
        assert filled.plan(filled.end()) == []
        assert all(filled.plan(filled.start().at(since)) for since in range(10))
        append(filled, b"10", number=4)
        assert self.ranges(filled.plan(filled.start().at(10))) == [(10, 11)]

    def test_a_cursor_within_a_batch_begins_there(self, filled: Log) -> None:
        assert self.ranges(filled.plan(filled.start().at(5), Limit(batches=1))) == [(5, 8)]
        assert fetched(filled.plan(filled.start().at(5), Limit(batches=1)))["offset"].to_pylist() == [5, 6, 7]

    def test_an_end_offset_clips_exactly(self, filled: Log) -> None:
        for since in range(10):
            for upto in range(since + 1, 12):
                spans = filled.plan(filled.start().at(since), Limit(upto=upto))
                assert fetched(spans)["offset"].to_pylist() == list(range(since, min(upto, 10)))
        assert filled.plan(filled.start().at(4), Limit(upto=4)) == []
        assert filled.plan(filled.start().at(4), Limit(upto=2)) == []

    @pytest.mark.parametrize(
        ("limit", "covered"),
        [
            (Limit(records=1), 3),  # a batch is never split by a size
            (Limit(records=3), 3),
            (Limit(records=4), 4),
            (Limit(records=7), 4),
            (Limit(records=8), 8),
            (Limit(batches=1), 3),
            (Limit(batches=3), 8),
            (Limit(bytes=1), 3),
            (Limit(records=8, batches=2), 4),
            (Limit(records=100, batches=100, bytes=1 << 40), 10),
        ],
    )
    def test_a_limit_ends_a_plan_at_a_batch_but_never_before_the_first(
        self, filled: Log, limit: Limit, covered: int
    ) -> None:
        spans = filled.plan(filled.start(), limit)
        assert [offset for span in spans for offset in range(span.first, span.next)] == list(range(covered))

    def test_a_limit_in_bytes_counts_what_is_stored(self, filled: Log) -> None:
        sizes = [span.size for span in filled.plan(filled.start())]
        for batches in range(1, 5):
            exactly = sum(sizes[:batches])
            assert len(filled.plan(filled.start(), Limit(bytes=exactly))) == batches
            assert len(filled.plan(filled.start(), Limit(bytes=exactly - 1))) == max(1, batches - 1)

    @pytest.mark.parametrize("limit", [Limit(records=1), Limit(records=5), Limit(bytes=100), Limit(batches=2)])
    def test_plan_after_plan_covers_everything_once(self, filled: Log, limit: Limit) -> None:
        cursor, covered = filled.start(), []
        while spans := filled.plan(cursor, limit):
            covered += fetched(spans)["offset"].to_pylist()
            cursor = cursor.at(spans[-1].next)
        assert covered == list(range(10))

    @pytest.mark.parametrize("options", [{"records": 0}, {"bytes": 0}, {"batches": 0}, {"records": -1}])
    def test_a_limit_that_allows_nothing_is_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(InvalidInput):
            Limit(**options)

    # --- cursors that cannot be served ----------------------------------------------------------------------

    def test_a_newcomer_begins_where_it_asks_to(self, filled: Log) -> None:
        first, middle, end = 2, 5, filled.bounds().next
        self.retain_from(filled, first)
        assert filled.position_of("beginning") == first
        assert filled.position_of("now") == end
        assert filled.position_of(middle) == middle
        assert filled.position_of(filled.start().at(middle)) == middle
        assert filled.position_of(datetime(1980, 1, 1, tzinfo=UTC)) == first
        assert filled.position_of(datetime(2999, 1, 1, tzinfo=UTC)) == end

    @pytest.mark.parametrize("start", ["middle", None, 1.5, -1, True, datetime(2026, 1, 1)])  # noqa: DTZ001
    def test_a_newcomer_cannot_begin_at_what_is_no_place(self, filled: Log, start: Any) -> None:
        with pytest.raises(InvalidInput):
            filled.position_of(start)

    def test_a_newcomer_cannot_begin_at_another_log_s_cursor(self, filled: Log) -> None:
        with pytest.raises(Diverged):
            filled.position_of(Cursor(UUID(int=4711), 1))

    def test_a_cursor_of_another_log_has_diverged(self, filled: Log) -> None:
        with pytest.raises(Diverged, match=str(filled.log_id)):
            filled.plan(Cursor(UUID(int=4711), 0))

    def test_a_cursor_past_the_end_has_diverged(self, filled: Log) -> None:
        with pytest.raises(Diverged, match="10"):
            filled.plan(filled.start().at(11))

    def test_a_cursor_below_what_is_retained_has_expired(self, filled: Log) -> None:
        before = filled.start()
        self.retain_from(filled, 4)
        assert filled.bounds() == Bounds(4, 10)
        assert filled.start() == before.at(4)
        for expired in (0, 3):
            with pytest.raises(CursorExpired, match="bootstrap"):
                filled.plan(before.at(expired))
        assert self.ranges(filled.plan(filled.start())) == [(4, 8), (8, 10)]

    def test_a_log_that_retains_nothing_goes_on_where_it_was(self, filled: Log) -> None:
        self.retain_from(filled, 10)
        assert filled.bounds() == Bounds(10, 10)
        assert filled.plan(filled.start()) == []
        assert append(filled, b"10", number=4) == Receipt(10, 1)
        assert append(filled, b"10", number=4) == Receipt(10, 1)
        assert self.ranges(filled.plan(filled.start())) == [(10, 11)]

    # --- waiting --------------------------------------------------------------------------------------------

    def test_waiting_for_what_is_there_already_is_true_at_once(self, filled: Log) -> None:
        assert filled.wait(filled.start(), 0.0)
        assert filled.wait(filled.start().at(9), _SOON)

    def test_waiting_for_what_does_not_come_is_false(self, filled: Log) -> None:
        assert not filled.wait(filled.end(), 0.0)
        assert not filled.wait(filled.end(), 0.01)

    def test_waiting_ends_when_another_thread_appends(self, log: Log) -> None:
        begun = threading.Event()

        def wait() -> bool:
            begun.set()
            return log.wait(log.start(), _SOON)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            assert begun.wait(_SOON)
            append(log, b"a", number=0)
            assert waiting.result(_SOON)

    # --- fetching -------------------------------------------------------------------------------------------

    def test_fetching_twice_gives_equal_batches(self, filled: Log) -> None:
        for span in filled.plan(filled.start().at(1)):
            assert span.fetch() == span.fetch()
            assert all(batch.schema == READ_SCHEMA for batch in span.fetch())

    def test_a_span_stays_the_same_though_the_log_goes_on(self, filled: Log) -> None:
        spans = filled.plan(filled.start().at(5))
        before = fetched(spans)
        append(filled, b"10", number=4)
        assert fetched(spans) == before

    def test_spans_can_be_fetched_in_threads(self, filled: Log) -> None:
        spans = [*filled.plan(filled.start())] * 8
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda span: span.fetch(), spans))
        assert results == [span.fetch() for span in spans]

    def test_a_pickled_span_fetches_the_same(self, filled: Log) -> None:
        spans = filled.plan(filled.start().at(5), Limit(upto=9))
        if not self.picklable:
            with pytest.raises(InvalidInput, match="memory"):
                pickle.dumps(spans)
            return
        copies = pickle.loads(pickle.dumps(spans))  # noqa: S301 - its own bytes
        assert self.ranges(copies) == self.ranges(spans)
        assert fetched(copies) == fetched(spans)

    @pytest.mark.parametrize("columns", [["value"], ["offset"], ["value", "offset"], ["headers", "op", "key"]])
    def test_columns_are_given_in_the_order_asked(self, filled: Log, columns: list[str]) -> None:
        everything = fetched(filled.plan(filled.start().at(2)))
        (*found,) = filled.plan(filled.start().at(2))
        assert found[0].fetch(columns)[0].schema.names == columns
        assert fetched(found, columns) == everything.select(columns)

    def test_an_unknown_column_is_refused(self, filled: Log) -> None:
        with pytest.raises(InvalidInput, match="colour"):
            filled.plan(filled.start())[0].fetch(["value", "colour"])

    def test_reading_changes_nothing_and_claims_nothing(self, filled: Log) -> None:
        filled.create_slot("reader", 4)
        before = (filled.bounds(), filled.slots(), filled.floor())
        fetched(filled.plan(filled.start()))
        filled.wait(filled.start(), 0.0)
        assert (filled.bounds(), filled.slots(), filled.floor()) == before
