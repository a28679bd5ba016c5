"""The sink is tested by the suite that every sink has to pass, by crashes, and by a store that fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from order_search import OrderSearch

import strandline as sl
from strandline import testing


class TestOrderSearch(testing.SinkContract):
    """Every sentence of the contract of sinks, as a test."""

    null = b""

    @pytest.fixture
    def sink(self, tmp_path: Path) -> OrderSearch:
        return OrderSearch(tmp_path / "orders.db")

    def content(self, sink: OrderSearch) -> Mapping[bytes | None, bytes | None]:
        return {key: value.encode() for key, value in sink.rows()}


def append_orders(log: sl.log.ObjectLog) -> dict[bytes, str]:
    """Six batches of changes; returns what the index should hold in the end."""
    truth: dict[bytes, str] = {}
    for batch in range(6):
        with log.producer() as producer:
            for number in range(batch, batch + 4):
                key = b"order-%d" % number
                truth[key] = f"{'red' if number % 2 else 'blue'} boat {batch}"
                producer.append(key=key, value=truth[key].encode())
            producer.append(key=b"order-%d" % batch, op=sl.Op.DELETE)
            del truth[b"order-%d" % batch]
    return truth


def test_orders_are_found_by_their_words(strandline_log: sl.log.ObjectLog, tmp_path: Path) -> None:
    append_orders(strandline_log)
    index = OrderSearch(tmp_path / "orders.db")
    sl.follow(strandline_log, index, upto="end")
    assert index.find("red boat") == [b"order-7"]


STEPS = [(OrderSearch, "store_rows"), (OrderSearch, "store_cursor")]


def test_a_crash_at_any_step_leaves_each_order_right(strandline_log: sl.log.ObjectLog, tmp_path: Path) -> None:
    truth = append_orders(strandline_log)
    path = tmp_path / "orders.db"
    crashes = testing.follow_through_crashes(strandline_log, lambda: OrderSearch(path), steps=STEPS)
    assert crashes == 6 * 4
    assert dict(OrderSearch(path).rows()) == truth


class CursorFirst(OrderSearch):
    """A broken twin: two transactions instead of one. The tests are worth something if they catch it."""

    def store_rows(self, records: object) -> None:
        self.later = records

    def store_cursor(self, cursor: sl.Cursor) -> None:
        super().store_cursor(cursor)
        self.db.commit()
        super().store_rows(self.later)


def test_the_test_of_crashes_catches_a_sink_that_moves_its_cursor_first(
    strandline_log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    truth = append_orders(strandline_log)
    path = tmp_path / "orders.db"
    steps = [(OrderSearch, "store_rows")]  # in the twin, that is after the cursor
    testing.follow_through_crashes(strandline_log, lambda: CursorFirst(path), steps=steps)
    assert dict(OrderSearch(path).rows()) != truth


def test_a_store_that_fails_now_and_then_changes_nothing(
    strandline_log: sl.log.ObjectLog, faulty_store: testing.FaultyStore, tmp_path: Path
) -> None:
    truth = append_orders(strandline_log)
    faulty_store.faults = testing.Faults(before=0.1, after=0.1)
    path = tmp_path / "orders.db"
    for _ in range(100):
        try:
            sl.follow(strandline_log, OrderSearch(path), slot="search", upto="end")
            break
        except sl.errors.TransientStorageError:
            continue  # a service would be started again
    assert dict(OrderSearch(path).rows()) == truth
    assert any(operation.outcome == "after" for operation in faulty_store.log)
    faulty_store.heal()
    assert strandline_log.slots.get("search").position == strandline_log.end().next
