"""Slots from the shell: listing, creating, resetting, dropping."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.cli.logs.lag import current_lag, note_on
from strandline.cli.logs.slots import sentences
from strandline.log.object import open_log
from strandline.model.cursor import Cursor
from strandline.model.head import Pin
from strandline.model.retention import Consumed, SlotLimits
from strandline.node.messages import NodeSlot
from strandline.testing.faulty import Call, Crash, FaultyStore
from tests.cli.conftest import Run
from tests.matrix_cases import some


def fill(
    url: str, batches: int = 10, retention: str = "consumed", limits: SlotLimits | None = None
) -> sl.log.ObjectLog:
    """A log with batches of one record."""
    log = sl.open(url, create=True, retention=retention, limits=limits)
    with log.producer() as producer:
        for number in range(batches):
            producer.append(value=b"%d" % number)
            producer.flush()
    return log


def listed(run: Run, url: str) -> dict[str, dict[str, Any]]:
    done = run("slots", url, "--json")
    assert done.exit_code == 0, done.output
    return {row["slot"]: row for row in json.loads(done.stdout)["slots"]}


# --- listing ---------------------------------------------------------------------------------------------------


def test_a_slot_is_listed_with_what_it_retains_and_what_is_left_before_it_is_invalidated(run: Run, log: str) -> None:
    opened = fill(log, limits=SlotLimits(lag_bytes=1 << 20, idle_seconds=3600))
    opened.slots.create("slow", 0)
    opened.slots.create("fast", 0)
    opened.slots.claim("slow", "worker-1").advance(Cursor(opened.log_id, 4))
    opened.slots.claim("fast", "worker-2").advance(Cursor(opened.log_id, 9))
    sizes = [span.size for span in opened.plan(opened.start())]
    slow, fast = listed(run, log)["slow"], listed(run, log)["fast"]
    assert (slow["position"], slow["holder"], slow["epoch"]) == (4, "worker-1", 1)
    assert slow["pins_floor"]
    assert slow["retained_bytes"] == sum(sizes[4:9])  # up to where the other slot stands
    assert slow["bytes_left"] == (1 << 20) - sum(sizes[4:])
    assert 3590 < slow["idle_left"] <= 3600
    assert (fast["retained_bytes"], fast["pins_floor"]) == (0, False)
    text = run("slots", log).stdout
    assert "pins the floor" in text
    assert "deletes batches that every valid slot has passed" in text
    assert "its holder may be silent for 1 h" in text


def test_the_only_slot_of_a_queue_retains_all_that_it_has_not_passed(run: Run, log: str) -> None:
    opened = fill(log)
    opened.slots.create("only", 3)
    assert listed(run, log)["only"]["retained_bytes"] == sum(span.size for span in opened.plan(opened.start())[3:])
    assert listed(run, log)["only"]["bytes_left"] is None


@pytest.mark.parametrize(("retention", "retained"), [("forever", 0), ("bytes:1", 8), ("age:1d", 0)])
def test_records_that_the_policy_retains_anyway_are_not_retained_by_a_slot(
    run: Run, log: str, retention: str, retained: int
) -> None:
    opened = fill(log, retention=retention)
    opened.slots.create("slow", 2)
    sizes = [span.size for span in opened.plan(opened.start())]
    assert listed(run, log)["slow"]["retained_bytes"] == sum(sizes[2 : 2 + retained])


def test_an_invalid_slot_is_listed_with_its_reason_and_what_to_do(run: Run, log: str) -> None:
    opened = fill(log, limits=SlotLimits(lag_bytes=1))
    opened.slots.create("billing", 0)
    assert "the next trim invalidates it" in run("slots", log).stdout
    opened.trim()
    row = listed(run, log)["billing"]
    assert (row["invalid"], row["bytes_left"]) == ("horizon", None)
    assert row["invalid_for"] >= 0
    text = run("slots", log).stdout
    assert "invalid: horizon" in text
    assert "strandline slots reset URL billing --at OFFSET" in text


def test_a_hold_is_listed_with_its_time(run: Run, log: str) -> None:
    with fill(log).hold(5, 600) as hold:
        row = listed(run, log)[hold.name]
        assert 590 < row["expires_in"] <= 600
        text = run("slots", log).stdout
        assert "held for 9 min" in text
        assert hold.name not in text  # it is long, and nobody types it


@pytest.mark.parametrize("action", ["create", "reset"])
def test_a_slot_that_someone_died_putting_somewhere_is_listed_with_its_pin(run: Run, log: str, action: str) -> None:
    opened = fill(log)
    if action == "reset":
        opened.slots.create("billing", 8)
    store = FaultyStore(opened.store)

    def die(call: Call) -> None:
        if call.name == "put_if" and call.path.startswith("slots/") and call.stage == "before":
            raise Crash

    store.hook(die)
    dying = open_log(store)
    with pytest.raises(Crash):
        (dying.slots.create if action == "create" else dying.slots.reset)("billing", 3)
    text = run("slots", log).stdout
    if action == "create":
        assert json.loads(run("slots", log, "--json").stdout)["creating"] == {"billing": 3}
        assert "is being created" in text
        assert run("slots", "drop", log, "billing", "--yes").exit_code == 0
    else:
        assert listed(run, log)["billing"]["pending"] == 3
        assert listed(run, log)["billing"]["pins_floor"] is True
        assert "is being moved to 3" in text


def test_a_log_without_slots_says_so(run: Run, log: str) -> None:
    fill(log, 0)
    assert "no slots" in run("slots", log).stdout
    assert "no slots" in run("slots", "list", log).stdout


def test_notes_and_sentences_distinguish_each_state() -> None:
    opened = sl.open("memory://notes", create=True)
    with opened.producer() as producer:
        producer.produce([b"x"] * 10)
    opened.slots.create("a", 5)
    seen = current_lag(opened)
    [(kind, lag)] = seen.slots

    def note(**changed: Any) -> str:
        return note_on(NodeSlot(kind, replace(lag, **changed)))[0]

    assert note() == "pins the floor"
    assert note(records_behind=0) == "up to date"
    assert note(seconds_left=-1.0) == "the next trim invalidates it"
    assert note(expires_in=-1.0) == "expired"
    moving = NodeSlot(kind, replace(lag, pending=3))
    seen = replace(seen, slots=(moving,), retention=Consumed(), pins={"new": Pin(4, 1)})
    assert [text.split(":")[0] for text in sentences(seen)] == [
        "This log deletes batches that every valid slot has passed; slots have no limits.",
        "Slot 'a' is being moved to 3, but that was not finished",
        "Slot 'new' is being created, or its creator died",
    ]


# --- changing --------------------------------------------------------------------------------------------------


def test_a_slot_is_created_at_either_end_at_an_offset_and_at_a_time(run: Run, log: str) -> None:
    opened = fill(log)
    moment = datetime.fromtimestamp(opened.head().tail[6].listed / 1e6, UTC)
    places = {"beginning": 0, "now": 10, "4": 4, moment.isoformat(): 6, (moment + timedelta(days=1)).isoformat(): 10}
    for number, (place, offset) in enumerate(places.items()):
        done = run("slots", "create", log, f"slot-{number}", "--at", place)
        assert done.exit_code == 0, done.output
        assert done.stdout == f"Slot 'slot-{number}' is created at offset {offset}.\n"
        assert opened.slots.get(f"slot-{number}").position == offset
    done = run("slots", "create", log, "json", "--at", 3, "--json")
    assert json.loads(done.stdout) == {"slot": "json", "position": 3, "epoch": 0}


def test_creating_a_slot_needs_its_position(run: Run, log: str) -> None:
    fill(log)
    assert run("slots", "create", log, "billing").exit_code == 2
    assert run("slots", "create", log, "billing", "--at", "somewhere").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "there", "--at", "now"], "There is a slot 'there' already"),
        (["create", "new", "--at", "11"], "past the end of the log"),
        (["create", "a/b", "--at", "now"], "cannot name a slot"),
        (["reset", "nobody", "--at", "now", "--yes"], "There is no slot 'nobody'"),
        (["reset", "there", "--at", "11", "--yes"], "past the end of the log"),
        (["drop", "nobody", "--yes"], "There is no slot 'nobody'"),
        (["drop", "there"], "repeat it with --yes"),
        (["reset", "there", "--at", "3"], "repeat it with --yes"),
    ],
)
def test_an_impossible_command_prints_one_sentence_and_changes_nothing(
    run: Run, log: str, arguments: list[str], said: str
) -> None:
    opened = fill(log)
    opened.slots.create("there", 5)
    before = opened.slots.list()
    command, name, *options = arguments
    done = run("slots", command, log, name, *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert opened.slots.list() == before


def test_a_reset_heals_an_invalid_slot_and_fences_its_holder(run: Run, log: str) -> None:
    opened = fill(log, limits=SlotLimits(lag_bytes=1))
    opened.slots.create("billing", 2)
    old = opened.slots.claim("billing", "old")
    opened.trim()
    done = run("slots", "reset", log, "billing", "--at", "now", "--yes")
    assert done.stdout == "Slot 'billing' is reset to offset 10.\n"
    state = opened.slots.get("billing")
    assert (state.position, state.invalid, state.holder) == (10, None, None)
    with pytest.raises(sl.errors.Fenced):
        old.advance(opened.end())


def test_a_dropped_slot_is_gone(run: Run, log: str) -> None:
    opened = fill(log)
    opened.slots.create("billing", 2)
    assert json.loads(run("slots", "drop", log, "billing", "-y", "--json").stdout) == {
        "slot": "billing",
        "dropped": True,
    }
    assert opened.slots.list() == []
    assert "it has none at all" in run("slots", "drop", log, "billing", "-y").stderr


@pytest.mark.matrix
@pytest.mark.parametrize(("typed", "left"), some([("y\n", []), ("n\n", ["billing"]), ("\n", ["billing"])], 1))
def test_on_a_terminal_a_drop_is_asked_about(
    on_terminal: Callable[..., tuple[int, str]], log: str, typed: str, left: list[str]
) -> None:
    opened = fill(log)
    opened.slots.create("billing", 2)
    opened.slots.claim("billing", "worker-1")
    status, shown = on_terminal("slots", "drop", log, "billing", typed=typed)
    assert "Drop slot 'billing' at offset 2, held by 'worker-1'? [y/N]" in shown
    assert ("Nothing was changed." in shown) is bool(left)
    assert status == (1 if left else 0)
    assert [state.name for state in opened.slots.list()] == left


def test_a_question_that_is_not_answered_changes_nothing(on_terminal: Callable[..., tuple[int, str]], log: str) -> None:
    opened = fill(log)
    opened.slots.create("billing", 2)
    status, shown = on_terminal("slots", "drop", log, "billing", typed="\x04")
    assert (status, shown.splitlines()[-1]) == (130, "Nothing was changed.")
    assert [state.name for state in opened.slots.list()] == ["billing"]


def test_help_shows_the_commands_and_that_an_address_alone_lists(run: Run) -> None:
    text = run("slots", "--help").stdout
    assert "strandline slots URL" in text
    for command in ("list", "create", "reset", "drop"):
        assert command in text


def test_sources_are_listed_and_forgotten(run: Run, log: str, tmp_path: Path) -> None:
    source = sl.open(f"file://{tmp_path}/source", create=True)
    with source.producer() as producer:
        producer.append(value=b"1")
    sl.ingest(source, f"file://{log}")
    listed = run("sources", "list", log)
    assert listed.exit_code == 0, listed.output
    assert "1 source; a log remembers 256" in listed.stdout
    (found,) = json.loads(run("sources", "list", log, "--json").stdout)["sources"]
    assert found["address"] in listed.stdout.replace("\n", "")
    assert found["address"].startswith("file://")
    assert run("sources", "forget", log, found["id"], "--yes").exit_code == 0
    assert json.loads(run("sources", "list", log, "--json").stdout)["sources"] == []
    assert run("sources", "forget", log, found["id"], "--yes").exit_code == 1
