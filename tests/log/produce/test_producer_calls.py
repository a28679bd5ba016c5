"""Small ``produce`` calls are queued as they are and turned into Arrow together, each of them whole."""

from __future__ import annotations

import gc
import threading
from collections import UserList
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import BufferFull, InvalidInput
from strandline.log.object.log import open_log
from strandline.log.produce.rows import CALL, ENTRY, Room, cut_rows, page_of
from strandline.log.produce.shipper import MAX_METADATA, RANGE_BYTES
from strandline.model.head import Receipt
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock

SOON = 120.0
NEVER = 3600.0


def own(folder: Path) -> Any:
    return sl.open(str(folder / "log"), create=True)


def queue(folder: Path) -> Any:
    return open_queue(str(folder / "queue"))


@pytest.fixture(params=[own, queue])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    make: Callable[[Path], Any] = request.param
    return make(tmp_path)


def consumed(log: Any) -> list[tuple[list[bytes], list[tuple[int, bytes]]]]:
    """Of each batch: its entries, and where each call begins in it with what it attached."""
    with sl.Consumer(log) as consumer:
        batches = list(consumer.batches())
    return [(batch.values, [(item.start, item.payload) for item in batch.metadata]) for batch in batches]


def calls_of(batch: tuple[list[bytes], list[tuple[int, bytes]]]) -> list[tuple[list[bytes], bytes]]:
    """What was produced together, with what was attached to it."""
    entries, ranges = batch
    ends = [start for start, _ in ranges[1:]] + [len(entries)]
    return [(entries[start:end], payload) for (start, payload), end in zip(ranges, ends, strict=True)]


def test_each_call_has_the_range_of_its_own_entries(log: Any) -> None:
    calls = [
        ([b"%d.%d" % (number, place) for place in range(number % 4 + 1)], b"m%d" % number) for number in range(300)
    ]
    with log.producer(linger=NEVER) as producer:
        handles = [producer.produce(entries, metadata) for entries, metadata in calls]
    found = consumed(log)
    assert [call for batch in found for call in calls_of(batch)] == calls
    assert [handle.result(SOON).count for handle in handles] == [len(entries) for entries, _ in calls]


def test_handles_of_records_between_calls_have_the_right_offsets(tmp_path: Path) -> None:
    log = own(tmp_path)
    with log.producer(linger=NEVER) as producer:
        handles = []
        for number in range(200):
            handles.append(producer.append(key=b"k", value=b"single"))
            handles.append(producer.produce([b"call"] * (number % 5 + 1)))
    receipts = [handle.result(SOON) for handle in handles]
    at = 0
    for receipt in receipts:
        assert receipt.first == at
        at += receipt.count
    values = [value for batch in log.read() for value in batch.column("value").to_pylist()]
    for number, receipt in enumerate(receipts):
        wanted = b"call" if number % 2 else b"single"
        assert values[receipt.first : receipt.first + receipt.count] == [wanted] * receipt.count


def test_a_call_is_never_split_whatever_the_limits_and_other_producers(tmp_path: Path) -> None:
    log = own(tmp_path)
    handles: list[list[Any]] = [[] for _ in range(4)]
    with log.producer(batch_bytes=2000, linger=0.001) as producer:

        def work(name: int) -> None:
            for number in range(150):
                handles[name].append(producer.produce([b"%d/%d" % (name, number)] * 7, b"%d" % name))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = [call for batch in consumed(log) for call in calls_of(batch)]
    assert len(calls) == 600
    for entries, payload in calls:
        assert len(entries) == 7
        assert len(set(entries)) == 1
        assert entries[0].startswith(payload + b"/")
    values = [value for batch in log.read() for value in batch.column("value").to_pylist()]
    for name, of_one in enumerate(handles):
        firsts = [handle.result(SOON).first for handle in of_one]
        assert firsts == sorted(firsts)
        assert [values[first] for first in firsts] == [b"%d/%d" % (name, number) for number in range(150)]


def test_a_batch_is_closed_by_the_call_that_reaches_the_limit_of_metadata(log: Any) -> None:
    metadata = b"m" * 1000
    with log.producer(linger=NEVER) as producer:
        for _ in range(100):
            producer.produce([b"x"], metadata)
    sizes = [len(ranges) for _, ranges in consumed(log)]
    most = -(-MAX_METADATA // (len(metadata) + RANGE_BYTES))
    assert sizes == [most] * (100 // most) + [100 % most]


def test_pieces_end_with_the_call_that_fills_the_room_for_metadata() -> None:
    call = (5_000, CALL, b"m" * (100 - RANGE_BYTES), (b"a", b"b"), 2)
    row = (7_000, 0, b"k", b"v", None)
    pieces = cut_rows([row, call, row, call, call, row], Room(150, 1000), Room(100, 1000))
    assert [piece.widths for piece in pieces] == [[1, 2, 1, 2], [2], [1]]
    ranges = [[(item.start, item.ingested) for item in piece.ranges] for piece in pieces]
    assert ranges == [[(1, 5), (4, 5)], [(0, 5)], []]
    assert [piece.rows for piece in pieces] == [[row, call, row, call], [call], [row]]
    assert not any(piece.apart for piece in pieces)


def test_a_call_that_does_not_fit_begins_a_new_batch() -> None:
    small, large = (5_000, ENTRY, b"", b"a", 10), (5_000, CALL, b"", (b"a" * 90,), 95)
    most = Room(10_000, 100)
    pieces = cut_rows([small, small, large, small, large], most, most)
    assert [(len(piece.rows), piece.apart) for piece in pieces] == [(2, False), (1, True), (1, True), (1, True)]
    assert [(len(piece.rows), piece.apart) for piece in cut_rows([large], Room(10_000, 50), most)] == [(1, True)]
    assert [(len(piece.rows), piece.apart) for piece in cut_rows([large], most, most)] == [(1, False)]


def one_by_one(rows: list[Any], room: Room, most: Room) -> list[tuple[list[Any], list[tuple[int, int, bytes]], bool]]:
    """What :func:`cut_rows` is to do, row by row."""
    pieces: list[tuple[list[Any], list[tuple[int, int, bytes]], bool]] = []
    taken: list[Any] = []
    ranges: list[tuple[int, int, bytes]] = []
    at, metadata, space, apart, used = 0, room.metadata, room.space, False, room.space < most.space
    for row in rows:
        time, op, payload, entries, size = row
        if op and size > space and (taken or used):
            if taken:
                pieces.append((taken, ranges, apart))
            taken, ranges, at = [], [], 0
            metadata, space, apart, used = most.metadata, most.space, True, False
        if op:
            ranges.append((at, time // 1000, payload))
            metadata, space = metadata - len(payload) - RANGE_BYTES, space - size
        taken.append(row)
        at += len(entries) if op == CALL else 1
        if metadata <= 0:
            pieces.append((taken, ranges, apart))
            taken, ranges, at = [], [], 0
            metadata, space, apart, used = most.metadata, most.space, False, False
    return [*pieces, (taken, ranges, apart)] if taken else pieces


single = st.just((7_000, 0, b"k", b"v", None))
times, metadata, sizes = st.integers(0, 9_999), st.integers(0, 60).map(bytes), st.integers(22, 150)
content = st.sampled_from([b"", b"x", b"yz"])
call = st.tuples(times, st.just(CALL), metadata, st.lists(content, min_size=1, max_size=4).map(tuple), sizes)
entry = st.tuples(times, st.just(ENTRY), metadata, content, sizes)


@given(
    st.one_of(st.lists(entry), st.lists(st.one_of(call, entry)), st.lists(st.one_of(single, call, entry))),
    st.tuples(st.integers(1, 200), st.integers(1, 100)),
    st.integers(1, 200),
)
def test_rows_are_cut_by_columns_as_they_would_be_one_by_one(rows: list[Any], room: tuple[int, int], most: int) -> None:
    left, empty = Room(min(room[0], most), room[1]), Room(most, 100)
    pieces = cut_rows(rows, left, empty)
    found = [(piece.rows, [tuple(item) for item in piece.ranges], piece.apart) for piece in pieces]
    assert found == one_by_one(rows, left, empty)
    pages = [page_of(piece) for piece in pieces]
    records = [record for row in rows for record in records_of(row)]
    assert [pair for page in pages for pair in zip(*page.to_pydict().values(), strict=True)] == records
    assert [piece.widths for piece in pieces] == [[len(records_of(row)) for row in piece.rows] for piece in pieces]


def records_of(row: Any) -> list[Any]:
    """The records of a row, as a page gives them."""
    time, op, key, content, _ = row
    moment = datetime.fromtimestamp(0, tz=UTC) + timedelta(microseconds=time // 1000)
    if not op:
        return [(moment, 0, key, content, None)]
    return [(moment, 0, None, value, None) for value in ([content] if op == ENTRY else content)]


def test_times_of_calls_are_cut_to_the_tick_of_the_log() -> None:
    rows: list[Any] = [(nanoseconds, ENTRY, b"", b"a", 23) for nanoseconds in (1_999_999, 2_000_000, 1_234_567_891)]
    most = Room(10_000, 10_000)
    (fine,), (coarse,) = cut_rows(rows, most, most), cut_rows(rows, most, most, tick=1000)
    assert fine.ranges.times == (1_999, 2_000, 1_234_567)
    assert coarse.ranges.times == (1_000, 2_000, 1_234_000)


def test_the_listing_of_a_thousand_calls_has_no_object_that_the_garbage_collector_visits(log: Any) -> None:
    calls = 4000
    with log.producer(linger=NEVER) as producer:
        producer.produce([b"x"], b"meta")
        producer.flush(SOON)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(calls):
            producer.produce([b"x"], b"meta")
        producer.flush(SOON)
        gc.collect()
        assert len(gc.get_objects()) - before < calls // 10


def test_the_handle_and_the_metadata_agree_about_the_time(tmp_path: Path) -> None:
    clock = ManualClock()
    log = open_log(str(tmp_path / "log"), create=True, env=Env(clock=clock))
    with log.producer(linger=NEVER) as producer:
        first = producer.produce([b"a"], b"1")
        clock.advance(1.5)
        second = producer.produce([b"b" * 100_000], b"2")
        clock.advance(1.5)
        third = producer.produce([b"c", b"d"], b"3")
        producer.flush()
    assert [handle.result(SOON) for handle in (first, second, third)] == [Receipt(0, 1), Receipt(1, 1), Receipt(2, 2)]
    ranges = [item for entry in log.head().tail for item in entry.metadata]
    assert [item.ingested for item in ranges] == [first.ingested, second.ingested, third.ingested]


def test_the_handle_has_the_time_of_a_clock_before_1970_as_the_metadata_does(tmp_path: Path) -> None:
    clock = ManualClock(now=-1_234_567_891)
    log = open_log(str(tmp_path / "log"), create=True, env=Env(clock=clock))
    with log.producer(linger=NEVER) as producer:
        handle = producer.produce([b"a"], b"1")
        producer.flush()
    ((item,),) = [entry.metadata for entry in log.head().tail]
    assert item.ingested == handle.ingested == clock.now()


@pytest.mark.parametrize("kind", [list, tuple, UserList, lambda entries: [Marked(entries[0])]])
def test_one_entry_is_taken_from_any_sequence(log: Any, kind: Any) -> None:
    with log.producer(linger=NEVER) as producer:
        handle = producer.produce(kind([b"only"]), b"m")
        producer.flush(SOON)
        assert handle.result(SOON).count == 1
    assert consumed(log) == [([b"only"], [(0, b"m")])]


class Marked(bytes):
    """Bytes of a type of their own."""


@pytest.mark.parametrize("entries", [["a"], [None], [bytearray(b"a")], ("a",), [[b"a"]], [(b"a",)], [5]])
def test_one_entry_that_is_no_bytes_is_refused_and_appends_nothing(log: Any, entries: Any) -> None:
    with log.producer(linger=NEVER) as producer, pytest.raises(InvalidInput, match="Values are bytes"):
        producer.produce(entries)
    assert consumed(log) == []


def test_the_caller_may_change_the_list_that_it_has_passed(log: Any) -> None:
    with log.producer(linger=NEVER) as producer:
        entries = [b"a", b"b"]
        producer.produce(entries)
        entries[:] = [b"z"]
    assert [found for found, _ in consumed(log)] == [[b"a", b"b"]]


def test_a_call_with_text_or_nothing_in_it_is_refused_and_appends_nothing(log: Any) -> None:
    with log.producer(linger=NEVER) as producer:
        for entries in ([b"a", "b"], [b"a", None], b"abc", []):
            with pytest.raises(InvalidInput):
                producer.produce(entries)
        with pytest.raises(InvalidInput):
            producer.produce([b"a"], "text")
    assert consumed(log) == []


def test_calls_are_held_back_when_the_budget_is_used_up(tmp_path: Path) -> None:
    log = own(tmp_path)
    with log.producer(linger=NEVER, budget=50_000, block=False, compression="none") as producer:
        taken = 0
        with pytest.raises(BufferFull):  # noqa: PT012 - how many fit is not known before
            while taken < 10_000:
                producer.produce([b"x" * 1000])
                taken += 1
        producer.flush(SOON)
        handle = producer.produce([b"again"])
        producer.flush(SOON)
        assert handle.result(SOON) == Receipt(taken, 1)
