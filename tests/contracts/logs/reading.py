"""Contract of plans, fetches and waits."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from uuid import UUID

import pytest

from strandline.errors import CursorExpired, Diverged, InvalidInput, NotReady
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.model.cursor import Bounds, Cursor, Limit, Span, Start
from strandline.model.head import Receipt
from strandline.model.records import READ_SCHEMA
from tests.contracts.logs.batches import SOON, append, fetched
from tests.contracts.slots import LogOwner


class LogReadContract(LogOwner):
    """Planning, fetching, waiting, and cursors that cannot be served."""

    picklable: ClassVar[bool] = True
    """Whether spans can be read in another process; if not, pickling one raises why."""

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
        """The offsets of each span."""
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

    # --- read -----------------------------------------------------------------------------------------------

    def test_reading_begins_at_an_offset_a_cursor_a_time_or_a_word(self, filled: Log) -> None:
        def offsets(*since: Start) -> list[int]:
            return [offset for batch in filled.read(*since) for offset in batch["offset"].to_pylist()]

        self.retain_from(filled, 3)
        end = filled.bounds().next
        assert offsets() == offsets("retained") == list(range(3, end))
        assert offsets(5) == offsets(filled.cursor_at(5)) == list(range(5, end))
        assert offsets(datetime(1980, 1, 1, tzinfo=UTC)) == list(range(3, end))
        assert offsets("now") == offsets(end) == offsets(datetime(2999, 1, 1, tzinfo=UTC)) == []

    def test_reading_from_what_is_gone_or_not_there_yet_is_refused(self, filled: Log) -> None:
        self.retain_from(filled, 3)
        for gone in (2, "beginning"):
            with pytest.raises(CursorExpired):
                list(filled.read(gone))
        with pytest.raises(Diverged):
            list(filled.read(filled.bounds().next + 1))
        with pytest.raises(InvalidInput, match=r"not (at )?'yesterday'"):
            list(filled.read("yesterday"))  # type: ignore[arg-type]  # no such word
        with pytest.raises(NotReady):
            list(filled.read(upto=filled.bounds().next + 1))

    # --- cursors that cannot be served ----------------------------------------------------------------------

    def test_a_newcomer_begins_where_it_asks_to(self, filled: Log) -> None:
        first, middle, end = 2, 5, filled.bounds().next
        self.retain_from(filled, first)
        assert filled.position_of("retained") == first
        assert filled.position_of("beginning") == 0
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

    def test_the_cursor_behind_each_record_is_served(self, filled: Log) -> None:
        for offset in range(11):
            cursor = filled.cursor_at(offset)
            assert (cursor.log_id, cursor.next) == (filled.log_id, offset)
            assert fetched(filled.plan(cursor))["offset"].to_pylist() == list(range(offset, 10))

    def test_a_plan_s_spans_and_the_log_agree_on_the_cursor_behind_them(self, filled: Log) -> None:
        for span in filled.plan(filled.start()):
            planned, known = cursor_after(filled.start(), span), filled.cursor_at(span.next)
            assert planned.next == known.next
            assert None in (planned.fingerprint, known.fingerprint) or planned.fingerprint == known.fingerprint

    def test_a_cursor_behind_another_batch_than_the_one_that_is_there_has_diverged(self, filled: Log) -> None:
        for offset in range(1, 11):
            cursor = filled.cursor_at(offset)
            assert cursor.fingerprint is not None
            with pytest.raises(Diverged, match="restored from a copy"):
                filled.plan(replace(cursor, fingerprint=cursor.fingerprint ^ 1))

    def test_where_the_batch_before_a_cursor_is_gone_its_fingerprint_is_not_asked_for(self, filled: Log) -> None:
        cursor = filled.cursor_at(4)
        self.retain_from(filled, 4)
        assert self.ranges(filled.plan(replace(cursor, fingerprint=1))) == [(4, 8), (8, 10)]

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
        assert filled.wait(filled.start().at(9), SOON)

    def test_waiting_for_what_does_not_come_is_false(self, filled: Log) -> None:
        assert not filled.wait(filled.end(), 0.0)
        assert not filled.wait(filled.end(), 0.01)

    def test_waiting_ends_when_another_thread_appends(self, log: Log) -> None:
        begun = threading.Event()

        def wait() -> bool:
            begun.set()
            return log.wait(log.start(), SOON)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            assert begun.wait(SOON)
            append(log, b"a", number=0)
            assert waiting.result(SOON)

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
        copies = pickle.loads(pickle.dumps(spans))
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
        filled.slots.create("reader", 4)
        before = (filled.bounds(), filled.slots.list(), filled.slots.floor())
        fetched(filled.plan(filled.start()))
        filled.wait(filled.start(), 0.0)
        assert (filled.bounds(), filled.slots.list(), filled.slots.floor()) == before
