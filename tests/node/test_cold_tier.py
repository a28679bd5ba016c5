"""A replicated log with a cold tier: the primary tiers it, all nodes read it, failover loses and doubles nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, Fenced, InvalidInput, NotReady, TransientStorageError
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import WriterId
from strandline.model.retention import TIER_SLOT
from strandline.node import Primary, RemoteLog, Replica, TierSettings
from strandline.storage.objects.local import LocalStore
from strandline.tier.copy.ledger import Ledger

WAIT = 60.0
NOWHERE = "grpc://127.0.0.1:9"
BY_HAND = TierSettings(pause=3600.0, target=2000)
"""Rounds of tiering are made by the tests."""


def values(log: Any) -> list[bytes]:
    if isinstance(log, Replica):
        log = log.reading(timeout=WAIT)  # it may have to learn the watermark first
    return [value for batch in log.read() for value in batch.column("value").to_pylist()]


def numbered(first: int, end: int, who: str = "of a") -> list[bytes]:
    return [b"%s %d" % (who.encode(), number) for number in range(first, end)]


class Cluster:
    """Nodes of one log, in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cold = (folder / "cold").as_uri()

    def primary(self, name: str = "a", **settings: Any) -> Primary:
        return Primary.open(
            self.folder / name,
            name=name,
            **{"cold": self.cold, "tiering": BY_HAND, "retention": "consumed", **settings},
        )

    def replica(self, upstream: str = NOWHERE, name: str = "b", **settings: Any) -> Replica:
        return Replica.open(
            self.folder / name, upstream, name=name, **{"tiering": BY_HAND, "retention": "consumed", **settings}
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def tier(node: Primary) -> Any:
    """Copy everything, and trim the hot tier behind it."""
    done = node.node.tier(everything=True)
    assert done is not None
    node.node.primary.tick()
    return done


def until(node: Primary | Replica, condition: Callable[[], bool], what: str) -> None:
    assert node.wait_until(condition, WAIT), what


def caught_up(primary: Primary, replica: Replica) -> None:
    end = primary.bounds().next
    until(replica, lambda: replica.position is not None and replica.position.next == end, "it has everything")
    until(replica, lambda: replica.committed == end and primary.commit_watermark(1) == end, "and knows that")


def hot_first(node: Primary | Replica) -> int:
    copy = node.node.copy
    assert copy is not None
    return copy.log.bounds().first


def test_the_primary_tiers_its_log_and_reads_both_tiers_as_one(cluster: Cluster) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        assert tier(primary).copied
        primary.append_values(numbered(5, 8))
        assert hot_first(primary) == 5, "the hot tier was trimmed behind the copy"
        assert primary.bounds() == Bounds(0, 8)
        assert values(primary) == numbered(0, 8)


@pytest.mark.matrix
def test_a_replica_and_a_client_read_segments_too(cluster: Cluster) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        tier(primary)
        primary.append_values(numbered(5, 8))
        with cluster.replica(primary.url) as replica:
            caught_up(primary, replica)
            assert hot_first(replica) == 5, "a newcomer bootstraps the hot rest only"
            assert values(replica) == numbered(0, 8)
            for node in (primary, replica):
                with sl.open(node.url) as remote:
                    assert remote.bounds() == Bounds(0, 8)
                    assert values(remote) == numbered(0, 8)
                    spans = remote.plan(remote.start())
                    assert [batch.num_rows for span in spans for batch in span.fetch(["value"])] == [5, 3]


def failed_over(cluster: Cluster, former: Primary, replica: Replica) -> Primary:
    """``replica`` leads, and the former primary is gone."""
    caught_up(former, replica)
    former.close()
    return replica.promote(force=True)


def test_after_a_failover_the_new_primary_goes_on_tiering(cluster: Cluster) -> None:
    former = cluster.primary()
    former.append_values(numbered(0, 5))
    tier(former)
    with cluster.replica(former.url) as replica:
        former.append_values(numbered(5, 8))
        promoted = failed_over(cluster, former, replica)
        assert values(promoted) == numbered(0, 8)
        promoted.append_values(numbered(8, 12))
        copied = tier(promoted).copied
        assert [(segment.start, segment.end) for segment in copied] == [(5, 11)]
        assert hot_first(promoted) == 12
        assert values(promoted) == numbered(0, 12), "all of it from segments"


@pytest.mark.matrix
def test_nothing_is_trimmed_on_a_new_primary_before_its_tierer_has_looked(cluster: Cluster) -> None:
    former = cluster.primary()
    former.append_values(numbered(0, 5))
    with cluster.replica(former.url) as replica:
        promoted = failed_over(cluster, former, replica)
        promoted.append_values(numbered(5, 8))
        assert promoted.trim(8) == 0, "nothing is in segments yet"
        assert values(promoted) == numbered(0, 8)


@pytest.mark.matrix
def test_a_tail_that_was_copied_and_lost_with_its_primary_is_replaced_in_the_cold_tier(cluster: Cluster) -> None:
    former = cluster.primary()
    former.append_values(numbered(0, 5))
    with cluster.replica(former.url) as replica:
        caught_up(former, replica)
    former.append_values(numbered(5, 9))
    tier(former)
    former.close()
    with cluster.replica() as replica:
        promoted = replica.promote(force=True)
        assert values(promoted) == numbered(0, 5)
        with pytest.raises(NotReady, match="ends at 5, but its cold tier has offset 5 in term 1"):
            promoted.node.tier(everything=True)
        promoted.append_values(numbered(5, 7, "of b"))
        tier(promoted)
        assert values(promoted) == numbered(0, 5) + numbered(5, 7, "of b")
        with cluster.replica(promoted.url, name="a") as returned:
            # Its tail was committed: it is not replaced by a snapshot of the other history before somebody says so.
            assert returned.wait_until(lambda: returned.condition == "diverged", 60.0)
            assert returned.trouble is not None
            assert "everything below 9 was committed: nothing was discarded" in returned.trouble
            assert returned.position is not None
            assert returned.position.next == 9
            returned.rebootstrap()
            caught_up(promoted, returned)
            assert values(returned) == values(promoted)
        with cluster.replica(promoted.url, name="c") as newcomer:
            caught_up(promoted, newcomer)
            assert values(newcomer) == values(promoted)


@pytest.mark.matrix
def test_a_former_primary_that_does_not_know_of_the_next_one_writes_no_segments(cluster: Cluster) -> None:
    with cluster.primary() as former:
        former.append_values(numbered(0, 5))
        with cluster.replica(former.url) as replica:
            caught_up(former, replica)
        tier(former)
        former.append_values(numbered(5, 7, "never committed elsewhere"))
        with cluster.replica() as replica:  # cannot reach the former one: both lead
            promoted = replica.promote(force=True)
            promoted.append_values(numbered(5, 9, "of b"))
            tier(promoted)
            with pytest.raises(Fenced, match=r"b has written the cold tier in term \d+: this node writes no segments"):
                former.node.tier(everything=True)
            assert values(promoted) == numbered(0, 5) + numbered(5, 9, "of b")


def test_a_consumer_s_slot_may_be_in_the_cold_tier_and_pins_its_segments(cluster: Cluster) -> None:
    settings = TierSettings(pause=3600.0, target=2000, retention="consumed")
    with cluster.primary(tiering=settings) as primary:
        primary.append_values(numbered(0, 5))
        tier(primary)
        primary.append_values(numbered(5, 8))
        tier(primary)
        assert hot_first(primary) == 8
        with sl.open(primary.url) as remote:
            remote.slots.create("orders", 5)
        assert [(segment.start, segment.end) for segment in tier(primary).expired] == [(0, 4)]
        assert primary.bounds() == Bounds(5, 8)
        assert values(primary) == numbered(5, 8)
        with pytest.raises(CursorExpired, match="begins at 5"):
            primary.slots.create("late", 3)
        with pytest.raises(CursorExpired):
            primary.plan(Cursor(primary.log_id, 0))


@pytest.mark.matrix
def test_without_consumers_nothing_counts_as_consumed_whatever_replicas_need(cluster: Cluster) -> None:
    settings = TierSettings(pause=3600.0, target=2000, retention="consumed")
    with cluster.primary(tiering=settings) as primary:
        primary.append_values(numbered(0, 5))
        with cluster.replica(primary.url) as replica:
            caught_up(primary, replica)
            assert not tier(primary).expired
            assert not tier(primary).expired


@pytest.mark.matrix
def test_a_replica_that_is_behind_pins_the_hot_tier_though_it_is_copied(cluster: Cluster) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        with cluster.replica(primary.url) as replica:
            caught_up(primary, replica)
        primary.append_values(numbered(5, 8))
        tier(primary)
        assert hot_first(primary) == 5
        with cluster.replica(primary.url) as replica:
            caught_up(primary, replica)
            assert replica.node.node_folder.state.generation == 1, "it has not bootstrapped again"
            until(primary, lambda: [tier(primary)] != [] and hot_first(primary) == 8, "and is trimmed then")


@pytest.mark.matrix
def test_the_kept_slot_of_a_replica_pins_the_hot_tier_after_a_restart_too(cluster: Cluster) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        with cluster.replica(primary.url) as replica:
            caught_up(primary, replica)
        primary.unregister_replica("b", keep_slot=True)
    with cluster.primary() as primary:
        primary.append_values(numbered(5, 8))
        tier(primary)
        assert hot_first(primary) == 5, "a replica cannot copy segments"


def test_only_committed_records_are_tiered(cluster: Cluster) -> None:
    with cluster.primary(policy="ack_n(1)") as primary:
        primary.register_replica("b")
        with cluster.replica(primary.url) as replica:
            primary.append_values(numbered(0, 5)).ensure()
            caught_up(primary, replica)
        primary.append_values(numbered(5, 8), timeout=0.0)
        assert [(segment.start, segment.end) for segment in tier(primary).copied] == [(0, 4)]


def test_a_log_keeps_its_cold_tier(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        tier(primary)
    with pytest.raises(
        InvalidInput, match=r"has its cold tier in file://.*/cold, and keeps it: leave out file:///other"
    ):
        cluster.primary(cold="file:///other")
    with cluster.primary(cold=None) as primary:
        assert values(primary) == numbered(0, 5), "the address is remembered"
        assert any(slot.name == TIER_SLOT for slot in primary.node.primary.log.slots.list())


@pytest.mark.matrix
def test_a_node_tiers_by_itself_and_says_why_it_cannot(cluster: Cluster) -> None:
    settings = TierSettings(pause=0.05, target=1, linger=0.0)
    with cluster.primary(tiering=settings) as primary:
        primary.append_values(numbered(0, 5))
        until(primary, lambda: hot_first(primary) == 5, "copied and trimmed")
        assert values(primary) == numbered(0, 5)
        assert primary.status().tiering is None
    Path(cluster.folder / "cold" / str(primary_log(cluster)) / "tierer.json").write_bytes(b"{}")
    with cluster.primary(tiering=settings) as primary:
        until(primary, lambda: "tierer.json is damaged" in str(primary.status().tiering), "it says why")
        primary.append_values(numbered(5, 6)).ensure()


def primary_log(cluster: Cluster) -> str:
    return next(path.parent.name for path in (cluster.folder / "cold").glob("*/tierer.json"))


@pytest.mark.matrix
def test_a_primary_that_leads_again_trims_nothing_before_its_tierer_has_compared_both(cluster: Cluster) -> None:
    """Another one led meanwhile, and replaced segments: the place of the tierer says nothing any more."""
    nodes = {"a": NOWHERE, "b": NOWHERE}
    with cluster.primary(retention="forever") as first:
        first.append_values(numbered(0, 5))
        with cluster.replica(first.url, nodes=nodes) as replica:
            caught_up(first, replica)
        first.append_values(numbered(5, 9))
        tier(first)
    with cluster.replica(nodes=nodes) as replica:
        second = replica.promote(force=True)
        second.append_values(numbered(5, 7, "of b"))
        tier(second)
        term = second.topology().term
    with cluster.replica(name="a", nodes=nodes) as replica:
        again = replica.promote(force=True)
        while again.topology().term <= term:
            again.close()
            again = cluster.replica(name="a", nodes=nodes).promote(force=True)
        with again:
            assert again.trim(9) == 0
            again.append_values(numbered(9, 10))
            tier(again)
            assert again.trim(10) == 5, "what b still needs"
            assert values(again) == numbered(0, 10)


@pytest.mark.matrix
@pytest.mark.parametrize("tiers_first", [True, False], ids=["which has tiered", "which has only a slot there"])
def test_a_former_primary_expires_nothing_that_a_consumer_of_the_next_one_needs(
    cluster: Cluster, tiers_first: bool
) -> None:
    """Both lead, without a lease: the former one knows only its own slots."""
    settings = TierSettings(pause=3600.0, target=2000, retention="consumed")
    with cluster.primary(tiering=settings) as former:
        former.append_values(numbered(0, 5))
        with cluster.replica(former.url) as replica:
            caught_up(former, replica)
            tier(former)
            until(replica, lambda: replica.node.node_folder.state.cold != "", "it knows of the cold tier")
        former.slots.create("own", 5)
        with cluster.replica(tiering=settings) as replica:
            promoted = replica.promote(force=True)
            promoted.append_values(numbered(5, 7, "of b"))
            if tiers_first:
                tier(promoted)
            else:
                promoted.node.log.slots.reset(TIER_SLOT, 5)  # as if it had been trimmed
                promoted.node.log.trim(5, beyond_slots=True)
            promoted.slots.create("late", 0)
            with pytest.raises(Fenced, match="b has written the cold tier"):
                former.node.tier(everything=True)
            assert promoted.bounds().first == 0
            assert values(promoted) == numbered(0, 5) + numbered(5, 7, "of b")


@pytest.mark.matrix
def test_a_primary_that_is_replaced_while_it_expires_removes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TierSettings(pause=3600.0, target=2000, retention="consumed")
    with cluster.primary(tiering=settings) as former:
        former.append_values(numbered(0, 5))
        with cluster.replica(former.url) as replica:
            caught_up(former, replica)
            tier(former)
            until(replica, lambda: replica.node.node_folder.state.cold != "", "it knows of the cold tier")
        former.slots.create("own", 5)
        with cluster.replica(tiering=settings) as replica:
            promoted = replica.promote(force=True)
            promoted.node.log.slots.reset(TIER_SLOT, 5)
            promoted.node.log.trim(5, beyond_slots=True)
            cold = former.node._cold
            assert cold is not None
            announce = cold.cell.announce

            def announced(start: int) -> int:
                promoted.slots.create("late", 0)  # the former one has read its own slots, and not this one
                return announce(start)

            monkeypatch.setattr(cold.cell, "announce", announced)
            with pytest.raises(Fenced, match="b has written the cold tier"):
                former.node.tier(everything=True)
            assert values(promoted) == numbered(0, 5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "step"),
    [
        pytest.param(Ledger, "retire", id="before it notes the deletion", marks=pytest.mark.matrix),
        pytest.param(Ledger, "remove_all", id="before it deletes"),
    ],
)
def test_a_primary_that_is_paused_while_it_cuts_deletes_no_segment_that_a_later_one_relies_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: Any, step: str
) -> None:
    """Policy ``local``, no lease: c had everything, a has less of it and cuts, b has everything and leads meanwhile."""
    first = cluster.primary("c")
    for name, begin in (("a", 0), ("b", 5)):
        first.append_values(numbered(begin, begin + 5))
        with cluster.replica(first.url, name) as replica:
            caught_up(first, replica)
    first.unregister_replica("a")
    tier(first)
    first.close()
    goes_on, later = getattr(where, step), []

    def paused(*arguments: Any, **options: Any) -> Any:
        if "retired" in arguments and not later:
            later.append(cluster.replica(name="b").promote(force=True))
            while later[0].node.primary.term <= short.node.primary.term:
                later.pop().close()
                later.append(cluster.replica(name="b").promote(force=True))
            later[0].append_values(numbered(10, 12))
            for member in later[0].topology().members:
                later[0].unregister_replica(member.name)
            tier(later[0])
            assert hot_first(later[0]) == 12, "it needs the segments"
        return goes_on(*arguments, **options)

    with cluster.replica(name="a").promote(force=True) as short:
        short.append_values(numbered(5, 6, "of x"))
        monkeypatch.setattr(where, step, paused)
        with pytest.raises((Fenced, Diverged)):
            tier(short)
        with later[0] as promoted:
            assert values(promoted) == numbered(0, 12)
            tier(promoted)
            assert values(promoted) == numbered(0, 12)


@pytest.mark.matrix
def test_a_primary_that_is_replaced_while_it_cuts_leaves_no_hole_before_the_end_of_the_cold_tier(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy ``local``, no lease: a has less than the cold tier, and cuts; b has everything, and leads then."""
    small = TierSettings(pause=3600.0, target=1)
    first = cluster.primary("c", tiering=small, retention="forever")
    for number, name in enumerate(("a", "b")):
        for begin in range(3 * number, 3 * number + 3):
            first.append_values(numbered(begin, begin + 1))
        with cluster.replica(first.url, name, retention="forever") as replica:
            caught_up(first, replica)
    tier(first)
    first.close()
    remove = Ledger.remove_all

    def removes_one(ledger: Ledger, segments: Any, what: str) -> Any:
        done = remove(ledger, segments, what)
        if what == "retired":
            raise TransientStorageError("The store is gone.")
        return done

    with cluster.replica(name="a", tiering=small, retention="forever").promote(force=True) as short:
        short.append_values(numbered(3, 4, "of a"))
        monkeypatch.setattr(Ledger, "remove_all", removes_one)
        with pytest.raises(TransientStorageError, match="The store is gone"):
            tier(short)
        term = short.topology().term
    monkeypatch.undo()
    with cluster.replica(name="b", tiering=small, retention="forever") as replica:
        later = replica.promote(force=True)
        while later.topology().term <= term:
            later.close()
            later = cluster.replica(name="b", tiering=small, retention="forever").promote(force=True)
    with later:
        later.append_values(numbered(6, 7))
        for member in later.topology().members:
            later.unregister_replica(member.name)
        tier(later)
        assert later.trim(7) == 7, "all of it is in segments"
        assert values(later) == numbered(0, 7)


@pytest.mark.matrix
def test_a_replica_that_bootstraps_while_segments_expire_shows_what_is_retained(cluster: Cluster) -> None:
    settings = TierSettings(pause=3600.0, target=1, retention="bytes:8KiB")
    with cluster.primary(tiering=settings) as primary:
        for number in range(10):
            primary.append_values(numbered(number * 5, number * 5 + 5))
            tier(primary)
        with cluster.replica(primary.url) as replica:
            number = 50
            while replica.position is None or replica.condition != "following":
                primary.append_values(numbered(number, number + 1))
                tier(primary)
                number += 1
            caught_up(primary, replica)
            first = primary.bounds().first
            assert 0 < first < number
            assert values(primary) == numbered(first, number)
            # It trims its own copy a little later than the primary.
            assert values(replica)[first - number :] == numbered(first, number)


@pytest.mark.matrix
def test_a_slot_keeps_what_the_former_primary_had_expired_and_the_new_one_still_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sl.node.replicate.replica, "_CHECKPOINT_SECONDS", 3600.0)  # the replica trims nothing
    settings = TierSettings(pause=3600.0, target=1, retention="bytes:5KiB")  # one segment
    former = cluster.primary(tiering=settings)
    for first in range(0, 10, 2):
        former.append_values(numbered(first, first + 2))
    with cluster.replica(former.url, tiering=settings) as replica:
        caught_up(former, replica)
        tier(former)
        tier(former)
        assert (former.bounds().first, hot_first(former), hot_first(replica)) == (8, 10, 0)
        promoted = failed_over(cluster, former, replica)
        promoted.slots.create("late", 0)
        promoted.append_values(numbered(10, 12))
        tier(promoted)
        assert values(promoted) == numbered(0, 12), "a valid slot pins all of it"
        promoted.slots.claim("late", "one").advance(promoted.cursor_at(9))
        tier(promoted)
        assert hot_first(promoted) == 12
        assert values(promoted) == numbered(8, 12)


@pytest.mark.matrix
def test_a_slot_keeps_what_a_former_primary_is_about_to_delete(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sl.node.replicate.replica, "_CHECKPOINT_SECONDS", 3600.0)
    settings = TierSettings(pause=3600.0, target=1)
    promoted: list[Primary] = []
    remove_all = Ledger.remove_all

    def late(ledger: Ledger, segments: Any, what: str) -> Any:
        if what == "expired" and segments and not promoted:
            promoted.append(replica.promote(force=True))
            promoted[0].slots.create("late", 0)
            tier(promoted[0])
        return remove_all(ledger, segments, what)

    monkeypatch.setattr(Ledger, "remove_all", late)
    expiring = TierSettings(pause=3600.0, target=1, retention="bytes:5KiB")
    with cluster.primary(tiering=expiring) as former, cluster.replica(former.url, tiering=settings) as replica:
        for first in range(0, 10, 2):
            former.append_values(numbered(first, first + 2))
        caught_up(former, replica)
        tier(former)
        if not promoted:  # nothing was trimmed yet
            tier(former)
        assert values(promoted[0]) == numbered(0, 10)


def test_a_newcomer_follows_a_log_whose_hot_tier_is_empty_and_leads_it_then(cluster: Cluster) -> None:
    former = cluster.primary()
    former.append_values(numbered(0, 5))
    tier(former)
    assert hot_first(former) == 5
    with cluster.replica(former.url) as replica:
        caught_up(former, replica)
        assert values(replica) == numbered(0, 5)
        promoted = failed_over(cluster, former, replica)
        promoted.append_values(numbered(5, 7))
        tier(promoted)
        assert values(promoted) == numbered(0, 7)


def test_a_write_ahead_log_with_a_cold_tier_becomes_a_replicated_one_with_the_same(cluster: Cluster) -> None:
    with sl.open(f"wal://{cluster.folder}/wal", create=True) as log:
        log.append(pa.table({"value": numbered(0, 5)}), writer=WriterId(UUID(int=1)), number=0).result(WAIT)
        sl.tier.attach(log, cluster.cold)
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
        assert log.trim("consumed") == 5
    with pytest.raises(InvalidInput, match="let the node have the same"):
        cluster.primary(take_over=cluster.folder / "wal", cold=None)
    with cluster.primary(take_over=cluster.folder / "wal") as primary:
        tier(primary)  # attaches it
        assert values(primary) == numbered(0, 5)
        primary.append_values(numbered(5, 8))
        assert [(segment.start, segment.end) for segment in tier(primary).copied] == [(5, 7)]
        assert hot_first(primary) == 8
        assert values(primary) == numbered(0, 8)


@pytest.mark.matrix
def test_a_node_that_is_closed_while_it_tiers_ends_in_order_and_goes_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TierSettings(pause=0.001, target=1, linger=0.0)
    for number in range(6):
        with cluster.primary(tiering=settings) as primary:
            primary.append_values(numbered(number * 20, number * 20 + 20))
    assert "tiers no more" not in caplog.text
    with cluster.primary(tiering=settings) as primary:
        until(primary, lambda: hot_first(primary) == 120, "copied and trimmed")
        assert values(primary) == numbered(0, 120)


def test_the_hot_tier_is_read_from_nodes_while_the_store_of_the_cold_one_is_gone(cluster: Cluster) -> None:
    with cluster.primary() as primary:
        primary.append_values(numbered(0, 5))
        tier(primary)
    (cluster.folder / "cold").rename(cluster.folder / "elsewhere")
    (cluster.folder / "cold").touch()
    with cluster.primary() as primary:
        primary.append_values(numbered(5, 8))
        several = f"{primary.url},{NOWHERE}"
        for log in (primary, RemoteLog(primary.url), RemoteLog(several, failover_timeout=0.1)):
            assert log.end().next == log.position_of("now") == 8
            for since in (5, Cursor(log.log_id, 5)):
                assert [value for batch in log.read(since) for value in batch["value"].to_pylist()] == numbered(5, 8)
            with pytest.raises(NotReady):
                log.bounds()
            assert log.wait(Cursor(log.log_id, 7), WAIT)
            log.slots.create(f"late-{id(log)}", 5)


@pytest.mark.matrix
def test_a_node_closes_in_time_while_the_store_of_its_cold_tier_does_not_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()

    def unanswered(*_: Any, **__: Any) -> Any:
        asked.set()
        over.wait(WAIT)
        raise TransientStorageError("no answer")

    primary = cluster.primary()
    primary.append_values(numbered(0, 5))
    tier(primary)
    monkeypatch.setattr(LocalStore, "get", unanswered)
    assert asked.wait(WAIT)
    closing = threading.Thread(target=primary.close)
    closing.start()
    closing.join(WAIT / 4)
    has_closed = not closing.is_alive()
    over.set()
    closing.join()
    assert has_closed
