"""Who is behind, by how much, and what pins the floor."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import strandline as sl
from strandline.cli.lag import bytes_from, floor_sentence, measure
from strandline.model.head import ChunkRef, Entry, Head
from strandline.model.slots import Invalidation, InvalidReason, SlotState
from tests.cli.conftest import Run, Start

WRITER = sl.WriterId(UUID(int=1))


def entry(first: int, count: int, size: int) -> Entry:
    return Entry(first, f"o{first}", first, count, size, 0, 0, 0, WRITER, first)


def head(*entries: Entry, chunks: tuple[ChunkRef, ...] = ()) -> Head:
    return Head(UUID(int=7), next_offset=entries[-1].next if entries else 0, tail=entries, levels=(chunks,))


def slot(name: str, position: int, *, invalid: bool = False) -> SlotState:
    gone = Invalidation(InvalidReason.HORIZON, 0) if invalid else None
    return SlotState(name, position, "me", 2, last_seen=4_000_000, invalid=gone)


def test_bytes_behind_count_whole_batches_and_chunks_and_the_part_of_one_that_is_begun() -> None:
    chunk = ChunkRef(0, 0, 1, first=0, next=100, size=1000, listed_first=0, listed_last=0)
    full = head(entry(100, 10, 50), entry(110, 10, 70), chunks=(chunk,))
    assert bytes_from(full, 0) == 1120
    assert bytes_from(full, 75) == 370
    assert bytes_from(full, 115) == 35
    assert bytes_from(full, 120) == 0


def test_the_slowest_valid_slot_pins_the_floor_and_an_invalid_one_does_not() -> None:
    states = [slot("fast", 90), slot("gone", 1, invalid=True), slot("slow", 20)]
    seen = measure("file:///log", head(entry(0, 100, 1000)), states, datetime.fromtimestamp(10, UTC))
    assert (seen.floor, seen.floor_without) == (20, 90)
    assert [found.pins_floor for found in seen.slots] == [False, False, True]
    assert [found.records_behind for found in seen.slots] == [10, 99, 80]
    assert [found.seconds_since_seen for found in seen.slots] == [6.0] * 3
    assert seen.slots[1].invalid == "horizon"
    assert floor_sentence(seen) == "The floor is 20, pinned by 'slow'; 70 records are kept for it alone."


def test_without_valid_slots_only_the_policy_decides() -> None:
    seen = measure("file:///log", head(entry(0, 100, 1000)), [slot("gone", 1, invalid=True)], datetime.now(UTC))
    assert seen.floor is None
    assert "only the retention policy" in floor_sentence(seen)


def test_a_slot_that_is_being_created_pins_too() -> None:
    full = replace(head(entry(0, 100, 1000)), slots={"new": 5, "old": None})
    seen = measure("file:///log", full, [slot("old", 50)], datetime.now(UTC))
    assert (seen.floor, seen.floor_without) == (5, 50)
    assert "pinned by a slot that is being created; 45 records" in floor_sentence(seen)


def test_lag_prints_each_slot_and_what_pins_the_floor(run: Run, log: str) -> None:
    opened = sl.open(log, create=True)
    with opened.producer() as producer:
        producer.produce([b"x"] * 1500)
    opened.create_slot("idle", 0)
    opened.create_slot("reports", 0)
    opened.claim_slot("reports", "a-holder").advance(opened.end())

    text = run("lag", log).stdout
    assert "offsets 0 to 1,500" in text
    assert "pinned by 'idle'; 1,500 records are kept for it alone." in text
    fields = json.loads(run("lag", log, "--json").stdout)
    assert fields["floor"] == 0
    by_name = {found["slot"]: found for found in fields["slots"]}
    assert by_name["idle"]["records_behind"] == 1500
    assert by_name["idle"]["pins_floor"] is True
    assert by_name["idle"]["holder"] is None
    assert by_name["reports"]["records_behind"] == by_name["reports"]["bytes_behind"] == 0
    assert (by_name["reports"]["holder"], by_name["reports"]["epoch"]) == ("a-holder", 1)


def test_a_log_without_slots_says_so(run: Run, log: str) -> None:
    sl.open(log, create=True)
    assert "no slots" in run("lag", log).stdout


def test_watching_looks_again_until_ctrl_c(start: Start, log: str) -> None:
    opened = sl.open(log, create=True)
    process = start("lag", log, "--watch", "0.1", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["next"] == 0
    with opened.producer() as producer:
        producer.produce([b"x"])
    assert any(json.loads(line)["next"] == 1 for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
