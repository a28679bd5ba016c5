"""Slots of consumers survive a failover: replicas keep them, they pin there, and no fenced holder comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Fenced, NotFound, NotReady, SlotInvalid
from strandline.followers.committer import begin
from strandline.log.slots.rules import EPOCHS_PER_TERM, taken_over
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import COPIED_SUFFIX
from strandline.model.cursor import Cursor
from strandline.model.retention import TIER_SLOT, InvalidReason, SlotState
from strandline.node.node_folder import HIGHEST_TERM
from strandline.testing.sinks import MemorySink
from tests.contracts.logs import append
from tests.node.nodes_by_hand import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.until(lambda: cluster.nodes["a"].is_primary)
    cluster.settled("b", "c")
    yield cluster
    cluster.close()


def slots(cluster: Cluster, name: str = "a") -> Any:
    return cluster.nodes[name].primary.slots


def cursor(cluster: Cluster, name: str, offset: int) -> Cursor:
    return Cursor(cluster.nodes[name].log.log_id, offset)


def fill(cluster: Cluster, count: int = 5) -> None:
    for number in range(count):
        cluster.append(b"%d" % number)
    cluster.settled("b", "c")


def replicated(cluster: Cluster) -> None:
    """Let the replicas fetch the slots as they are now."""
    cluster.step(60)


def fail_over(cluster: Cluster, *, old: str = "a", new: str = "b") -> None:
    cluster.kill(old)
    cluster.clock.advance(60)
    cluster.nodes[new].promote()
    cluster.until(lambda: cluster.nodes[new].is_primary and cluster.nodes[new].knows_committed)


def test_the_next_primary_has_the_slots_with_their_positions(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 1)
    slots(cluster).claim("billing", "worker").advance(cursor(cluster, "a", 3))
    slots(cluster).create("idle", 2)
    cluster.nodes["a"].primary.log.slots.invalidate("idle.consumer", InvalidReason.HORIZON)
    replicated(cluster)
    fail_over(cluster)
    found = {state.name: state for state in slots(cluster, "b").list()}
    assert {name: state.position for name, state in found.items()} == {"billing": 3, "idle": 2}
    assert found["billing"].holder == "worker"
    assert found["idle"].invalid is not None
    assert not any(state.name.endswith(COPIED_SUFFIX) for state in cluster.nodes["b"].log.slots.list())


def test_the_last_holder_goes_on_and_one_that_it_fenced_does_not(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 0)
    fenced = slots(cluster).claim("billing", "former")
    holder = slots(cluster).claim("billing", "worker")
    replicated(cluster)
    fail_over(cluster)
    after = slots(cluster, "b")
    for former in (fenced, holder):
        with pytest.raises(Fenced):
            after.advance("billing", former.holder, former.epoch, cursor(cluster, "b", 2))
    with pytest.raises(Fenced):
        after.resume("billing", "former", fenced.epoch)
    epoch = after.resume("billing", "worker", holder.epoch).epoch
    assert epoch > holder.epoch
    after.advance("billing", "worker", epoch, cursor(cluster, "b", 2))
    assert after.get("billing").position == 2
    with pytest.raises(Fenced):
        after.resume("billing", "former", fenced.epoch)


def test_a_claim_that_no_replica_heard_of_wins_when_it_is_presented(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 0)
    first = slots(cluster).claim("billing", "first")
    replicated(cluster)
    second = slots(cluster).claim("billing", "second")
    fail_over(cluster)
    after = slots(cluster, "b")
    with pytest.raises(Fenced):
        after.advance("billing", "first", first.epoch, cursor(cluster, "b", 1))
    resumed = after.resume("billing", "first", first.epoch)
    later = after.resume("billing", "second", second.epoch)
    with pytest.raises(Fenced):
        resumed.advance(cursor(cluster, "b", 1))
    with pytest.raises(Fenced):
        after.resume("billing", "first", first.epoch)
    later.advance(cursor(cluster, "b", 1))


def test_who_claims_or_resets_it_at_the_new_primary_fences_all_of_the_old_one(cluster: Cluster) -> None:
    fill(cluster)
    for name in ("claimed", "reset", "dropped"):
        slots(cluster).create(name, 0)
    old = {name: slots(cluster).claim(name, "worker") for name in ("claimed", "reset", "dropped")}
    replicated(cluster)
    old |= {name: slots(cluster).claim(name, "later") for name in ("claimed", "reset")}  # no replica hears of it
    fail_over(cluster)
    after = slots(cluster, "b")
    after.claim("claimed", "another")
    after.reset("reset", 1)
    after.drop("dropped")
    for name in ("claimed", "reset"):
        for holder in ("worker", "later"):
            with pytest.raises(Fenced):
                after.resume(name, holder, old[name].epoch)
    with pytest.raises(NotFound):
        after.resume("dropped", "worker", old["dropped"].epoch)
    assert after.create("dropped", 0).epoch > old["dropped"].epoch


def test_epochs_never_go_back_over_any_number_of_failovers(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 0)
    highest = 0
    replicated(cluster)
    for turn, (old, new) in enumerate([("a", "b"), ("b", "c")]):
        for number in range(3):  # of which no replica hears
            epoch = slots(cluster, old).claim("billing", f"holder-{turn}-{number}").epoch
            assert epoch > highest
            highest = epoch
        cluster.kill(old)
        cluster.clock.advance(60)
        cluster.nodes[new].promote()
        assert slots(cluster, new).get("billing").epoch > highest
        cluster.start(old)
        cluster.settled(*(name for name in "abc" if name != new), leader=new)
        replicated(cluster)


def test_a_primary_that_is_restarted_and_not_replaced_keeps_its_claims(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 0)
    holder = slots(cluster).claim("billing", "worker")
    replicated(cluster)
    cluster.stop("a")
    cluster.start("a")
    cluster.until(lambda: cluster.nodes["a"].is_primary)
    slots(cluster).advance("billing", "worker", holder.epoch, cursor(cluster, "a", 1))  # nobody else has led


def test_a_replica_trims_nothing_that_a_slot_pins_and_keeps_the_slots_over_a_restart(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 0)
    claimed = slots(cluster).claim("billing", "worker")
    replicated(cluster)
    cluster.kill("c")
    claimed.advance(cursor(cluster, "a", 4))
    replicated(cluster)
    cluster.nodes["a"].primary.trim(4)
    cluster.until(lambda: cluster.nodes["b"].copy.log.bounds().first == 4)
    reader = WalReader(str(cluster.nodes["b"].node_folder.data(1)))
    assert [(slot.name, slot.position) for slot in reader.slots.list()] == [("billing.consumer.copied", 4)]
    cluster.start("c")
    assert cluster.nodes["c"].copy.log.trim(5) == 0, "it has not heard of more than offset 0 yet"
    cluster.settled("b", "c")
    cluster.until(lambda: cluster.nodes["c"].copy.log.bounds().first == 4)
    cluster.stop("b")
    cluster.start("b")
    assert cluster.nodes["b"].copy.log.trim(5) == 4


def test_what_the_tierer_has_copied_is_trimmed_on_a_replica_whatever_consumers_pin(cluster: Cluster) -> None:
    fill(cluster)
    slots(cluster).create("billing", 1)
    cluster.nodes["a"].log.slots.create(TIER_SLOT, 3)
    replicated(cluster)
    copy = cluster.nodes["b"].copy.log
    assert {state.name: state.position for state in copy.slots.list()} == {"billing.consumer.copied": 1, TIER_SLOT: 3}
    assert copy.trim(5) == 3
    cluster.nodes["a"].log.slots.drop(TIER_SLOT)
    replicated(cluster)
    assert [state.name for state in copy.slots.list()] == ["billing.consumer.copied"]


def test_a_primary_that_leads_no_more_does_not_tell_a_holder_that_another_one_has_its_slot(cluster: Cluster) -> None:
    slots(cluster).create("billing", 0)
    claimed = slots(cluster).claim("billing", "worker")
    cluster.nodes["a"].primary.step_down("its lease ran out")
    with pytest.raises(NotReady, match="not the primary any more"):
        claimed.touch()


def test_own_slots_are_raised_too_if_another_node_may_have_led_meanwhile(tmp_path: Path) -> None:
    with WalLog.open(str(tmp_path)) as log:
        for name in ("billing.consumer", "b"):
            log.slots.create(name, 0)
        claimed = log.slots.claim("billing.consumer", "worker")
        log.slots.take_over(3, is_new=False)
        claimed.touch()
        log.slots.take_over(5, is_new=True)
        with pytest.raises(Fenced):
            claimed.touch()
        assert {state.name: state.epoch for state in log.slots.list()} == {
            "b": 0,
            "billing.consumer": 5 * EPOCHS_PER_TERM,
        }
        epoch = log.slots.resume("billing.consumer", "worker", claimed.epoch).epoch
    with WalLog.open(str(tmp_path)) as log:
        log.slots.take_over(6, is_new=False)
        log.slots.touch("billing.consumer", epoch)


def test_a_slot_past_the_end_of_a_shorter_copy_is_put_at_its_end() -> None:
    state = SlotState("billing", 9, "worker", 3, 0)
    after = taken_over(state, 2, 7)
    assert (after.position, after.epoch, after.holder) == (7, 2 * EPOCHS_PER_TERM, "worker")
    assert taken_over(after, 1, 7).epoch == after.epoch + 1
    assert taken_over(state, HIGHEST_TERM, 7).epoch < 1 << 63


def test_a_follower_that_has_not_stored_anything_yet_goes_on_at_the_next_primary(tmp_path: Path) -> None:
    with sl.open(f"wal://{tmp_path}/log", create=True) as log:
        append(log, b"1", number=0)
        sink = MemorySink()
        committer = begin(log, sink, "billing", start="beginning", holder="worker")
        created = log.slots.get("billing")
        raised = replace(created, epoch=3 * EPOCHS_PER_TERM)
        log.slots._store(raised)
        committer.check_holder()
        log.slots._store(replace(raised, epoch=raised.epoch + 1))  # somebody has reset it since
        with pytest.raises(Fenced):
            committer.check_holder()


def test_a_follower_with_a_slot_goes_on_at_the_next_primary(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"lease": f"file://{tmp_path}/lease", "policy": "ack_n(1)", "poll_seconds": 0.05}
    with ExitStack() as opened:
        a = opened.enter_context(sl.node.Primary.open(tmp_path / "a", name="a", **shared))
        c = opened.enter_context(sl.node.Replica.open(tmp_path / "c", name="c", nodes={"a": a.url}, **shared))
        nodes = {"a": a.url, "c": c.url}
        b = opened.enter_context(sl.node.Replica.open(tmp_path / "b", name="b", nodes=nodes, **shared))
        log = opened.enter_context(sl.open(",".join(node.url for node in (a, b, c))))
        append(log, b"1", number=0)
        sink = MemorySink()
        assert sl.follow(log, sink, "billing", upto="end").next == 1
        slot = log.slots.claim("billing", "worker")
        for replica in (b, c):
            replica.reading(after=log.end(), timeout=30)
            table = replica.node.log.slots
            assert replica.wait_until(lambda table=table: [state.holder for state in table.list()] == ["worker"], 30)
        a.close()
        b.promote()
        append(log, b"2", number=1)
        slot.advance(log.end())
        assert slot.state().epoch == slot.epoch
        assert (log.slots.get("billing").position, log.slots.get("billing").holder) == (2, "worker")
        assert sl.follow(log, sink, "billing", upto="end").next == 2
        with pytest.raises(Fenced):
            slot.advance(log.end())


# --- a slot that the next primary cannot serve -----------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WalLog]:
    with WalLog.open(f"{tmp_path}/log", roll_bytes=1) as log:
        for number in range(4):
            log.append_value(b"%d" % number).result()
        yield log


def slot_at(log: WalLog, position: int) -> SlotState:
    """A slot of a consumer that has confirmed everything below a position."""
    log.slots.create("billing.consumer", 0)
    log.slots.claim("billing.consumer", "worker").advance(log.cursor_at(position))
    return log.slots.get("billing.consumer")


def joined(log: WalLog, *states: SlotState) -> SlotState:
    """The slot after this node was a replica, with copies of these, and leads in term 7."""
    log.slots.drop("billing.consumer")
    log.slots.copy_consumers(states)
    log.slots.take_over(7, is_new=True)
    return log.slots.get("billing.consumer")


def test_a_slot_that_only_the_former_primary_could_serve_is_invalid_and_says_so(
    log: WalLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.trim(3)
    log.slots.copy_consumers([SlotState("billing.consumer", 1, "worker", 5, 0, born=9)])
    log.slots.take_over(7, is_new=True)
    found = log.slots.get("billing.consumer")
    assert found.invalid is not None
    assert found.invalid.reason is InvalidReason.WAL_REMOVED
    assert "'billing.consumer'" in caplog.text
    assert "retains the log from 3 on" in caplog.text
    assert log.slots.floor() is None, "an invalid slot pins nothing"
    with pytest.raises(SlotInvalid, match="reset the slot"):
        log.slots.resume("billing.consumer", "worker", 5)
    assert log.slots.reset("billing.consumer", 3).pins


def test_an_outdated_copy_of_a_slot_is_put_where_its_consumer_was_when_the_log_was_trimmed(log: WalLog) -> None:
    before = slot_at(log, 3)
    log.trim(3)
    found = joined(log, replace(before, position=1, epoch=5))  # of a primary that never heard of the position 3
    assert (found.position, found.invalid) == (3, None)


def test_an_outdated_copy_stays_there_over_many_heartbeats_and_a_restart(log: WalLog) -> None:
    before = slot_at(log, 4)
    log.trim(3)
    outdated = replace(before, position=1, epoch=5)
    log.slots.drop("billing.consumer")
    log.slots.copy_consumers([outdated])
    log.close()
    with WalLog.open(log.folder) as again:
        again.slots.copy_consumers([replace(outdated, position=2)])
        again.slots.take_over(7, is_new=True)
        assert (again.slots.get("billing.consumer").position, again.slots.floor()) == (4, 4)


def test_a_slot_that_was_reset_meanwhile_is_not_put_ahead_of_its_consumer(log: WalLog) -> None:
    before = slot_at(log, 3)
    log.trim(3)
    assert joined(log, replace(before, position=1, epoch=5, born=before.born + 1)).invalid is not None


@pytest.mark.parametrize("is_same", [True, False])
def test_a_position_in_records_that_were_replaced_is_not_taken_for_confirmed(log: WalLog, is_same: bool) -> None:
    behind = log.cursor_at(4).fingerprint if is_same else 1
    confirmed = SlotState("billing.consumer", 4, "worker", 3, 0, born=9, fingerprint=behind)
    log.slots.copy_consumers([confirmed])
    log.trim(3)
    log.slots.copy_consumers([replace(confirmed, position=1, fingerprint=None)])
    log.slots.take_over(7, is_new=True)
    assert log.slots.get("billing.consumer").pins is is_same


def test_a_slot_in_the_cold_tier_stays_valid(log: WalLog) -> None:
    log.slots.create(TIER_SLOT, 3)
    log.trim(3)
    log.slots.copy_consumers(
        [SlotState("billing.consumer", 1, "worker", 5, 0, born=9), SlotState(TIER_SLOT, 3, None, 0, 0)]
    )
    log.slots.take_over(7, is_new=True)
    assert log.slots.get("billing.consumer").pins


def test_a_slot_that_was_moved_back_to_the_end_of_a_shorter_log_is_not_moved_ahead_again() -> None:
    assert taken_over(SlotState("billing", 9, "worker", 3, 0, born=5), 2, 7).born == 0
    assert taken_over(SlotState("billing", 7, "worker", 3, 0, born=5), 2, 7).born == 5


def test_a_primary_invalidates_a_slot_at_offsets_that_it_had_trimmed_before_the_slot_was_created(
    cluster: Cluster,
) -> None:
    fill(cluster)
    cluster.nodes["b"].copy.log.trim(4)
    slots(cluster).create("billing", 1)  # the primary retains it
    slots(cluster).create("ahead", 4)
    replicated(cluster)
    fail_over(cluster)
    assert {state.name: state.pins for state in slots(cluster, "b").list()} == {"billing": False, "ahead": True}
    with pytest.raises(SlotInvalid, match=r"Slot 'billing' was invalidated \(wal-removed\)"):
        slots(cluster, "b").claim("billing", "worker").touch()
