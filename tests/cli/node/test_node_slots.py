"""Slots of replicas on a primary: what each pins is visible to operators, from outside and as metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.cli.node.node_state import pins
from strandline.errors import CorruptData
from strandline.log.slots.slot_lag import SlotLag
from strandline.log.wal.snapshot import KIND
from strandline.model.retention import Consumed, Invalidation, InvalidReason, MaxAge, SlotLimits, SlotState
from strandline.node.flight.server import actions
from strandline.node.message_json import answer, read_node_slots, write_node_slots
from strandline.node.messages import Caller, NodeSlot, NodeSlots, ReplicaProgress, SlotKind
from strandline.serve.node_state import replica_slots
from tests.cli.conftest import Run

ROWS = 10


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[sl.node.Primary]:
    """A primary whose replica ``dead`` has acknowledged three of ten records, and whose consumer has passed all."""
    with sl.node.Primary.open(tmp_path / "a", name="a", retention="consumed", poll_seconds=0.05) as primary:
        primary.register_replica("dead")
        primary.append(pa.table({"value": [b"v"] * 3}))
        role = primary.node.primary
        role.acknowledge(Caller("dead", role.term), ReplicaProgress(3, 3, apply_errors=2))
        primary.append(pa.table({"value": [b"v"] * (ROWS - 3)}))
        with sl.node.RemoteLog(primary.url) as log:
            log.slots.create("billing", ROWS)
        yield primary


def metric(primary: sl.node.Primary, name: str, replica: str = "dead") -> float | None:
    labels = {"log": str(primary.log_id), "replica": replica}
    return REGISTRY.get_sample_value(f"strandline_replica_{name}", labels)


def test_a_primary_tells_what_each_slot_pins_and_which_retention_applies(primary: sl.node.Primary) -> None:
    with sl.node.RemoteLog(primary.url) as log:
        found = log.slot_lags()
    rows = {each.lag.state.name: each for each in found.slots}
    assert {name: each.kind for name, each in rows.items()} == {"dead": "replica", "billing": "consumer"}
    dead, billing = rows["dead"].lag, rows["billing"].lag
    assert (dead.state.position, dead.records_behind, dead.pins_floor) == (3, ROWS - 3, True)
    assert dead.bytes_behind == dead.retained > 0
    assert dead.seconds_behind > 0
    assert (billing.records_behind, billing.bytes_behind, billing.pins_floor) == (0, 0, False)
    assert (found.retention, found.limits, found.records_kept) == (Consumed(), SlotLimits(), ROWS - 3)
    assert primary.slot_lags().records_kept == ROWS - 3


def test_the_slot_of_a_dead_replica_is_on_every_screen(primary: sl.node.Primary, run: Run) -> None:
    seen = {words: run(*words.split(), primary.url) for words in ("lag", "slots list", "node status", "node topology")}
    assert [each.exit_code for each in seen.values()] == [0] * 4
    texts = {words: " ".join(each.stdout.split()) for words, each in seen.items()}
    floor = "The floor is 3, pinned by replica 'dead'; 7 records would be deleted by the next trim without it."
    assert floor in texts["lag"]
    assert "dead 3 (replica)" in texts["slots list"]
    assert "pins the floor" in texts["slots list"]
    assert "slots have no limits" in texts["slots list"]
    assert "its slot pins 7 records" in texts["node status"]
    member = primary.topology().members[0]
    silent = replace(primary.topology(), members=(replace(member, healthy=False),))
    with sl.node.RemoteLog(primary.url) as log:
        [remark] = pins(silent, replica_slots(log))
        assert "its slot pins 7 records" in remark
        assert "from offset 3 on" in remark
        [remark] = pins(replace(silent, members=()), replica_slots(log))
        assert remark.startswith("dead is not registered: its slot pins 7 records")
    dropped = run("slots", "drop", primary.url, "dead", "--yes")
    assert dropped.exit_code == 1
    assert "is dropped with 'strandline node unregister'" in " ".join(dropped.stderr.split())


def test_lag_of_a_node_has_bytes_seconds_and_retention(primary: sl.node.Primary, run: Run) -> None:
    found = json.loads(run("lag", primary.url, "--json").stdout)
    [dead] = [slot for slot in found["slots"] if slot["slot"] == "dead"]
    assert dead["kind"] == "replica"
    assert dead["bytes_behind"] > 0
    assert dead["seconds_behind"] > 0
    assert (found["retention"], found["floor"], found["floor_without"]) == ("consumed", 3, ROWS)


def test_the_topology_of_a_node_of_an_earlier_build_is_shown_without_slots_and_lag_says_what_it_lacks(
    primary: sl.node.Primary, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: action for name, action in actions.ACTIONS.items() if name != "slot-lags"}
    monkeypatch.setattr(actions, "ACTIONS", known)
    assert run("node", "topology", primary.url).exit_code == 0
    refused = run("lag", primary.url)
    assert (refused.exit_code, "slot-lags" in refused.stderr) == (1, True)


def test_metrics_show_lag_silence_and_errors_per_replica_until_it_is_unregistered(primary: sl.node.Primary) -> None:
    running = primary
    running.wait_until(lambda: metric(primary, "lag_records") == ROWS - 3, 60)
    assert metric(primary, "lag_records") == ROWS - 3
    assert metric(primary, "apply_errors") == 2
    assert metric(primary, "slot_pins") == 1
    for name in ("lag_bytes", "lag_seconds", "silent_seconds"):
        assert (metric(primary, name) or 0) > 0, name
    primary.unregister_replica("dead")
    names = ("lag_records", "lag_bytes", "lag_seconds", "silent_seconds", "slot_pins", "apply_errors")
    assert [metric(primary, name) for name in names] == [None] * 6


def test_the_metrics_of_a_bootstrap_end_with_it(primary: sl.node.Primary) -> None:
    running, role = primary, primary.node.primary
    role.begin_snapshot(Caller("dead", role.term), KIND)
    assert running.wait_until(lambda: metric(primary, "slot_pins", "dead.bootstrap") == 1, 60)
    role.end_snapshot(Caller("dead", role.term), sl.Cursor(primary.log_id, ROWS))
    assert running.wait_until(lambda: metric(primary, "slot_pins", "dead.bootstrap") is None, 60)
    assert metric(primary, "silent_seconds", "dead.bootstrap") is None


def test_a_node_that_no_longer_leads_has_no_metrics_of_replicas(primary: sl.node.Primary) -> None:
    running = primary
    assert running.wait_until(lambda: metric(primary, "lag_records") is not None, 60)
    primary.close()
    assert metric(primary, "lag_records") is None


FOUND = NodeSlots(
    (
        NodeSlot(
            SlotKind.REPLICA,
            SlotLag(
                SlotState("b", 3, "b", 2, 9, Invalidation(InvalidReason.HORIZON, 8), hot=True),
                *(7, 70, 1.5, 2.0),
                pins_floor=False,
                retained=0,
                bytes_left=None,
                seconds_left=-1.0,
                expires_in=None,
                pending=None,
            ),
        ),
    ),
    MaxAge(60),
    SlotLimits(1 << 30, 5),
    None,
)


def test_slots_of_a_primary_are_the_same_after_a_message() -> None:
    assert read_node_slots(answer(write_node_slots(FOUND), "the node")) == FOUND


@pytest.mark.parametrize(
    "damage", [(b'"replica"', b'"friend"'), (b'"records_behind":7', b'"records_behind":"7"'), (b"age:60", b"age:x")]
)
def test_a_wrong_answer_about_slots_is_corrupt_data(damage: Any) -> None:
    data = write_node_slots(FOUND)
    assert damage[0] in data.replace(b"age:1m", b"age:60")
    with pytest.raises(CorruptData):
        read_node_slots(answer(data.replace(b"age:1m", b"age:60").replace(*damage), "the node"))
