"""Who is behind, by how much, and what pins the floor."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from uuid import UUID

import pytest

import strandline as sl
from strandline.cli.logs.lag import floor_sentence, note_on
from strandline.log.object.head.head_log import HeadListing
from strandline.log.object.head.index import StoredChunks
from strandline.model.cursor import SECOND
from strandline.model.head import Entry, Head, Pin
from strandline.model.retention import Consumed, Forever, Invalidation, InvalidReason, Retention, SlotState
from strandline.serve.log_state import LogState, measured
from strandline.testing.plain import PlainStore
from tests.cli.conftest import Run, Start

WRITER = sl.log.WriterId(UUID(int=1))


def entry(first: int, count: int, size: int, *, listed: int = 0) -> Entry:
    return Entry(first, f"o{first}", first, count, size, 0, 0, listed, WRITER, first)


def head(*entries: Entry) -> Head:
    return Head(UUID(int=7), next_offset=entries[-1].next if entries else 0, tail=entries)


def slot(name: str, position: int, *, invalid: bool = False) -> SlotState:
    gone = Invalidation(InvalidReason.HORIZON, 0) if invalid else None
    return SlotState(name, position, "me", 2, last_seen=4_000_000, invalid=gone)


def seen_at(seconds: int, full: Head, states: list[SlotState], retention: Retention = Consumed()) -> LogState:  # noqa: B008
    listing = HeadListing(full, StoredChunks(PlainStore()), seconds * SECOND)
    return measured(sl.open("memory://lag", create=True), listing, states, full.slots, retention)


def test_lag_is_shown_in_records_bytes_and_seconds() -> None:
    full = head(entry(0, 100, 1000, listed=1_000_000), entry(100, 50, 700, listed=7_000_000))
    seen = seen_at(10, full, [slot("in-the-first", 40), slot("in-the-second", 100), slot("up-to-date", 150)])
    assert [found.lag.records_behind for found in seen.slots] == [110, 50, 0]
    assert [found.lag.bytes_behind for found in seen.slots] == [1700, 700, 0]
    assert [found.lag.seconds_behind for found in seen.slots] == [9.0, 3.0, 0.0]


def test_a_clock_that_is_behind_the_log_gives_no_negative_lag() -> None:
    seen = seen_at(10, head(entry(0, 100, 1000, listed=90_000_000)), [slot("a", 0)])
    assert seen.slots[0].lag.seconds_behind == 0.0


def test_the_slowest_valid_slot_pins_the_floor_and_an_invalid_one_does_not() -> None:
    full = head(entry(0, 20, 200), entry(20, 70, 700), entry(90, 10, 100))
    states = [slot("fast", 90), slot("gone", 1, invalid=True), slot("slow", 20)]
    seen = seen_at(10, full, states)
    assert (seen.floor, seen.floor_without) == (20, 90)
    assert [found.lag.pins_floor for found in seen.slots] == [False, False, True]
    assert [found.lag.records_behind for found in seen.slots] == [10, 99, 80]
    assert [found.lag.seconds_since_seen for found in seen.slots] == [6.0] * 3
    assert note_on(seen.slots[1])[0] == "invalid: horizon"
    told = "The floor is 20, pinned by 'slow'; 70 records would be deleted by the next trim without it."
    assert floor_sentence(seen) == told


def test_a_log_that_keeps_everything_says_that_slots_cost_nothing() -> None:
    seen = seen_at(10, head(entry(0, 100, 1000)), [slot("slow", 20)], Forever())
    assert floor_sentence(seen) == "The floor is 20, pinned by 'slow'; the log keeps everything anyway."


def test_without_valid_slots_only_the_policy_decides() -> None:
    seen = seen_at(10, head(entry(0, 100, 1000)), [slot("gone", 1, invalid=True)])
    assert seen.floor is None
    assert "only the retention policy" in floor_sentence(seen)


def test_a_slot_that_is_being_created_pins_too() -> None:
    full = replace(head(entry(0, 100, 1000)), slots={"new": Pin(5, 1), "old": None})
    seen = seen_at(10, full, [slot("old", 50)])
    assert (seen.floor, seen.floor_without) == (5, 50)
    assert "pinned by a slot that is being created" in floor_sentence(seen)


def test_lag_prints_each_slot_and_what_pins_the_floor(run: Run, log: str) -> None:
    opened = sl.open(log, create=True, retention="consumed")
    with opened.producer() as producer:
        producer.produce([b"x"] * 1500)
    opened.slots.create("idle", 0)
    opened.slots.create("reports", 0)
    opened.slots.claim("reports", "a-holder").advance(opened.end())

    text = run("lag", log).stdout
    assert "offsets 0 to 1,500" in text
    assert "pinned by 'idle'; 1,500 records would be deleted by the next trim without it." in text
    fields = json.loads(run("lag", log, "--json").stdout)
    assert fields["floor"] == 0
    by_name = {found["slot"]: found for found in fields["slots"]}
    assert by_name["idle"]["records_behind"] == 1500
    assert by_name["idle"]["pins_floor"] is True
    assert by_name["idle"]["holder"] is None
    assert by_name["idle"]["seconds_behind"] > 0
    assert by_name["reports"]["records_behind"] == by_name["reports"]["bytes_behind"] == 0
    assert (by_name["reports"]["holder"], by_name["reports"]["epoch"]) == ("a-holder", 1)


def test_a_log_without_slots_says_so(run: Run, log: str) -> None:
    sl.open(log, create=True)
    assert "no slots" in run("lag", log).stdout


@pytest.mark.matrix
def test_watching_looks_again_until_ctrl_c(start: Start, log: str) -> None:
    opened = sl.open(log, create=True)
    process = start("lag", log, "--watch", "0.1", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["next"] == 0
    with opened.producer() as producer:
        producer.produce([b"x"])
    assert any(json.loads(line)["next"] == 1 for line in process.stdout)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 0


@pytest.mark.matrix
def test_watching_without_a_terminal_prints_one_line_a_round(start: Start, log: str) -> None:
    opened = sl.open(log, create=True)
    opened.slots.create("billing", 0)
    process = start("lag", "--watch", log)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(line.endswith("offsets 0 to 0; billing up to date\n") for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")


def fill_queue(url: str, batches: int) -> sl.compat.QueueLog:
    queue = sl.open(url, format="queue-v1")
    with queue.producer() as producer:
        for number in range(batches):
            producer.produce([b"%d" % number])
            producer.flush()
    return queue


def test_a_shared_queue_is_as_far_behind_as_it_lists(run: Run, log: str) -> None:
    fill_queue(log, 3)
    fields = json.loads(run("lag", log, "--format", "queue-v1", "--json").stdout)
    assert (fields["first"], fields["next"], fields["batches_behind"]) == (0, 3, 3)
    assert fields["bytes_behind"] > 0
    assert fields["seconds_behind"] >= 0
    with sl.Consumer(log, format="queue-v1") as consumer:
        while (batch := consumer.next_batch()) is not None:
            consumer.ack(batch.sequence)
    text = run("lag", log, "--format", "queue-v1").stdout
    assert "the consumer (epoch 1) is up to date" in text


def test_a_mistyped_manifest_is_not_taken_for_an_empty_queue(run: Run, log: str) -> None:
    fill_queue(log, 1)
    done = run("lag", log, "--format", "queue-v1:ingest/manifesto,ingest")
    assert done.exit_code == 1
    assert "There is no queue manifest at" in done.stderr
    assert len(done.stderr.splitlines()) == 1
