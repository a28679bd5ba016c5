"""The seal of a replicated log: it counts as one more record for commit policies, elections and replicas."""

from __future__ import annotations

import threading
from dataclasses import replace
from uuid import UUID

import pytest

import strandline as sl
from strandline.errors import CommitTimedOut, Diverged, Fenced, NotReady, Sealed
from strandline.followers.stores.state import MemoryStore
from strandline.formats.json.fields import Fields, write_fields
from strandline.formats.node.wire import Flag, Note, decode_note, encode_note
from strandline.log.wal.log import WalLog
from strandline.log.wal.snapshot import fill, verify
from strandline.model.cursor import Bounds
from strandline.model.head import WriterId
from strandline.model.node import NO_HEARTBEAT
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.messages import Caller, Reached, TimedOut
from strandline.node.replicate.divergence import drop_uncommitted_seal
from tests.node.nodes_by_hand import TERM, Cluster, records

WAIT = 60.0
WRITER = WriterId(UUID(int=1))


@pytest.fixture
def trio(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.start("a", create=True)
    cluster.start("b")
    cluster.start("c")
    cluster.settled("b", "c")
    yield cluster
    cluster.close()


def seal(cluster, on="a"):
    """Seal the log on a node, which commits it if enough replicas have the seal."""
    return cluster.nodes[on].primary.seal(timeout=0.0)


def sealed_and_committed(cluster, on="a"):
    """Seal the log, and step until that is committed; returns the cursor."""
    found = []

    def is_committed():
        try:
            found.append(seal(cluster, on))
        except CommitTimedOut:
            return False
        return True

    cluster.until(is_committed)
    return found[0]


def shown(cluster, name):
    """What readers of a node see; None while it does not say."""
    try:
        return cluster.nodes[name].reading().bounds()
    except NotReady:
        return None


def is_sealed(cluster, name):
    """Whether a node's copy was sealed, committed or not."""
    return cluster.nodes[name].copy.log.bounds().sealed


def promoted(cluster, name, *, force=False):
    """Promote a node once the lease of the former primary has run out."""
    cluster.clock.advance(TERM + 1)

    def leads():
        try:
            cluster.nodes[name].promote(force=force)
        except NotReady:
            return False
        return True

    cluster.until(leads)


def test_a_seal_counts_once_a_majority_has_it_and_then_all_nodes_show_it(trio):
    trio.until(trio.append(b"1", b"2").done)
    trio.cut |= {"a"}
    with pytest.raises(CommitTimedOut, match=r"sealed on the primary, but quorum\(a, ?b, ?c\) was not satisfied"):
        seal(trio)
    trio.step(20)
    assert shown(trio, "a") == Bounds(0, 2), "a seal that may be lost is not shown"
    with pytest.raises(NotReady, match="being sealed at offset 2"):  # a client takes ``Sealed`` for final
        trio.append(b"3")
    trio.cut.clear()
    trio.until(lambda: {shown(trio, name) for name in "abc"} == {Bounds(0, 2, sealed=True)})
    assert seal(trio).next == 2
    with pytest.raises(Sealed):
        trio.append(b"3")
    assert [trio.content(name) for name in "abc"] == [[(0, b"1"), (1, b"2")]] * 3


def test_a_committed_seal_outlives_its_primary_and_another_failover(trio):
    trio.until(trio.append(b"1").done)
    trio.step(5)
    trio.kill("c")
    sealed_and_committed(trio)
    trio.until(lambda: shown(trio, "b") == Bounds(0, 1, sealed=True))
    trio.kill("a")
    trio.start("c")
    trio.clock.advance(TERM + 1)
    with pytest.raises(NotReady, match=r"b has more records .*: promote b"):
        trio.nodes["c"].promote()
    promoted(trio, "b")
    trio.until(lambda: shown(trio, "b") == shown(trio, "c") == Bounds(0, 1, sealed=True))
    with pytest.raises(Sealed) as caught:
        trio.append(b"2", on="b")
    assert caught.value.end == 1
    assert seal(trio, on="b").next == 1
    trio.start("a")
    trio.kill("b")
    promoted(trio, "c")
    trio.until(lambda: shown(trio, "a") == shown(trio, "c") == Bounds(0, 1, sealed=True))


def test_a_seal_that_only_the_lost_primary_had_is_taken_back_when_it_returns(trio):
    trio.until(trio.append(b"1").done)
    trio.step(5)
    trio.cut |= {"a"}
    with pytest.raises(CommitTimedOut):
        seal(trio)
    trio.kill("a")
    promoted(trio, "b")
    handle = trio.append(b"2", on="b")
    trio.until(handle.done)
    trio.cut.clear()
    trio.start("a")
    assert is_sealed(trio, "a")
    trio.until(lambda: {shown(trio, name) for name in "abc"} == {Bounds(0, 2)})
    assert not is_sealed(trio, "a")
    assert trio.content("a") == [(0, b"1"), (1, b"2")]
    assert sealed_and_committed(trio, on="b").next == 2


def test_a_seal_that_was_not_committed_is_taken_back_even_where_nothing_else_differs(trio):
    trio.until(trio.append(b"1").done)
    trio.step(5)
    trio.cut |= {"a"}
    with pytest.raises(CommitTimedOut):
        seal(trio)
    trio.kill("a")
    promoted(trio, "b")
    trio.cut.clear()
    trio.start("a")
    trio.until(lambda: not is_sealed(trio, "a") and trio.nodes["a"].condition == "following")
    trio.until(trio.append(b"2", on="b").done)
    trio.until(lambda: trio.end("a") == 2)


def test_a_seal_that_was_not_committed_is_kept_by_the_next_primary_if_that_has_it(trio):
    """As a record of a former term would be: it is committed with the new term."""
    trio.until(trio.append(b"1").done)
    trio.step(5)
    with pytest.raises(CommitTimedOut):
        seal(trio)
    trio.until(lambda: is_sealed(trio, "b") or is_sealed(trio, "c"))
    has = "b" if is_sealed(trio, "b") else "c"
    trio.kill("a")
    promoted(trio, has)
    trio.until(lambda: shown(trio, has) == Bounds(0, 1, sealed=True))
    with pytest.raises(Sealed):
        trio.append(b"2", on=has)


def test_a_committed_seal_is_not_taken_back_for_a_primary_that_lost_it(trio):
    trio.until(trio.append(b"1").done)
    sealed_and_committed(trio)
    trio.until(lambda: shown(trio, "b") == Bounds(0, 1, sealed=True))
    topology = replace(trio.nodes["a"].primary.topology(Caller("b")), sealed=False, durable=1)
    with pytest.raises(Diverged, match="everything below 2 was committed"):
        drop_uncommitted_seal(trio.nodes["b"].copy, topology, 2, "b")
    assert is_sealed(trio, "b")
    trio.nodes["b"].copy.unseal()
    trio.kill("a")
    trio.clock.advance(TERM + 1)
    trio.step(200)
    with pytest.raises(NotReady, match=r"everything below 2 was committed|c has more records"):
        trio.nodes["b"].promote(force=True)


def test_a_bootstrap_does_not_replace_a_copy_with_a_committed_seal_for_a_primary_that_lost_it(trio):
    trio.until(trio.append(b"1").done)
    trio.step(10)
    trio.kill("b")
    sealed_and_committed(trio)
    trio.until(lambda: shown(trio, "c") == Bounds(0, 1, sealed=True))
    trio.kill("a")
    trio.stop("c")
    trio.start("b")
    promoted(trio, "b", force=True)
    trio.append(b"2", b"3", on="b")
    trio.nodes["b"].primary.log.trim(3, beyond_slots=True)
    trio.start("c")
    trio.until(lambda: trio.nodes["c"].condition in ("diverged", "following"))
    assert trio.nodes["c"].condition == "diverged"
    assert "everything below 2 was committed" in trio.nodes["c"].trouble
    assert shown(trio, "c") == Bounds(0, 1, sealed=True)


def test_a_batch_and_the_seal_behind_it_are_committed_together(trio):
    trio.cut |= {"a"}
    handle = trio.append(b"1", b"2", append=(WRITER, 0), seal=True)
    trio.step(5)
    assert not handle.done()
    assert isinstance(handle.result(0.0).outcome, TimedOut)
    trio.cut.clear()
    trio.until(handle.done)
    commit = handle.result(0.0)
    assert isinstance(commit.outcome, Reached)
    assert (commit.receipt.first, commit.bookmark.next) == (0, 2)
    assert shown(trio, "a") == Bounds(0, 2, sealed=True)


def test_repeating_the_append_that_sealed_waits_for_the_seal_too(trio):
    trio.cut |= {"a"}
    trio.append(b"1", append=(WRITER, 0), seal=True)
    again = trio.append(b"1", append=(WRITER, 0), seal=True)
    assert isinstance(again.result(0.0).outcome, TimedOut)
    trio.cut.clear()
    trio.until(again.done)
    assert again.result(0.0).repeated
    assert shown(trio, "a") == Bounds(0, 1, sealed=True)


@pytest.mark.parametrize("count", [0, 1])
def test_a_newcomer_bootstraps_a_sealed_log(tmp_path, count):
    cluster = Cluster(tmp_path, policy="ack_n(1)", leased=False, names="abc")
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.settled("b")
    for _ in range(count):
        cluster.until(cluster.append(b"1").done)
    sealed_and_committed(cluster)
    cluster.start("c")
    cluster.until(lambda: shown(cluster, "c") == Bounds(0, count, sealed=True))
    cluster.until(lambda: cluster.nodes["a"].primary.registry.replica("c").durable == count + 1)
    cluster.close()


def test_restarts_of_all_nodes_keep_the_seal(trio):
    trio.until(trio.append(b"1").done)
    sealed_and_committed(trio)
    for name in "abc":
        trio.kill(name)
    trio.clock.advance(TERM + 1)
    for name in "abc":
        trio.start(name)
    trio.until(lambda: {shown(trio, name) for name in "abc"} == {Bounds(0, 1, sealed=True)})


def test_a_replica_of_a_lower_term_does_not_seal(trio):
    """Once a node has promised a higher term, nothing of a lower one changes its copy."""
    trio.until(trio.append(b"1").done)
    trio.step(5)
    copy = trio.nodes["b"].copy
    heartbeat = trio.nodes["a"].primary.heartbeat()._replace(durable=2, sealed=True)
    trio.nodes["b"].report(Caller("c", 99))
    with pytest.raises(Fenced, match="has seen term 99"):
        copy.seal_with(heartbeat)
    assert not is_sealed(trio, "b")


def test_a_seal_says_so_on_the_wire_and_others_are_as_they_were():
    note = Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, NO_HEARTBEAT._replace(durable=7))
    sealed = note._replace(heartbeat=note.heartbeat._replace(sealed=True))
    assert decode_note(encode_note(sealed), "x") == sealed
    assert decode_note(encode_note(note), "x") == note
    assert encode_note(note)[1] == Flag.HEARTBEAT, "a node of an earlier version reads what is not sealed"
    assert encode_note(sealed)[1] == Flag.HEARTBEAT | Flag.SEALED


# --- real nodes --------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path):
    with (
        sl.node.Primary.open(tmp_path / "a", name="a", policy="ack_n(1)", content_type="text/plain") as primary,
        sl.node.Replica.open(tmp_path / "b", primary.url, name="b") as replica,
    ):
        assert replica.wait_until(lambda: replica.condition == "following", WAIT)
        yield primary, replica


def test_clients_of_either_node_see_the_seal_and_stop_waiting(nodes):
    primary, replica = nodes
    primary.append_values([b"1", b"2"]).ensure()
    with sl.open(primary.url) as first, sl.open(replica.url) as second, sl.open(f"{primary.url},{replica.url}") as both:
        logs = (first, second, both)
        assert not any(log.ended(2) for log in logs)
        over = []
        waiting = [
            threading.Thread(target=lambda log=log: over.append(log.wait(log.cursor_at(2), 3600.0))) for log in logs
        ]
        following = threading.Thread(
            target=lambda: over.append(sum(batch.num_rows for batch in first.read(follow=True)))
        )
        for thread in (*waiting, following):
            thread.start()
        end = both.seal()
        for thread in (*waiting, following):
            thread.join(WAIT)
            assert not thread.is_alive()
        assert sorted(over) == [False, False, False, 2]
        assert end.next == 2
        for log in logs:
            assert log.wait(log.cursor_at(2), 3600.0) is False
            assert log.ended(2)
            assert not log.ended(1)
            assert log.bounds() == Bounds(0, 2, sealed=True)
            assert log.content_type == "text/plain"
        with pytest.raises(Sealed) as caught:
            both.append(records(b"3"))
        assert caught.value.end == 2
        producer = both.producer()
        with pytest.raises(Sealed):
            producer.append(value=b"3").result(WAIT)
    assert primary.content_type == replica.content_type == "text/plain"


def test_a_follower_of_a_node_ends_at_the_seal(nodes):
    primary, _ = nodes
    primary.append(records(b"1", b"2"), seal=True).ensure()
    with sl.open(primary.url) as log:
        store = MemoryStore()
        cursor = sl.follow(log, store)
        assert cursor.next == 2


def test_a_lagging_node_does_not_take_a_seal_back(nodes):
    primary, replica = nodes
    primary.append_values([b"1"]).ensure()
    with sl.open(f"{primary.url},{replica.url}") as log:
        assert log.seal().next == 1
        answer = Fields.parse(write_fields({"log_id": log.log_id, "first": 0, "next": 1}), "an answer")
        log._nodes.ask_reader = lambda *_, **__: (answer, None)
        assert log.bounds() == Bounds(0, 1, sealed=True)


def test_a_node_takes_over_a_sealed_log_with_its_content_type(tmp_path):
    with WalLog.open(str(tmp_path / "log"), content_type="application/json") as log:
        log.append_batch(records(b"{}"), seal=True).result()
    with sl.node.Primary.open(tmp_path / "node", take_over=tmp_path / "log") as primary:
        assert primary.bounds() == Bounds(0, 1, sealed=True)
        assert primary.content_type == "application/json"
        with pytest.raises(Sealed):
            primary.append_values([b"{}"])
    with pytest.raises(sl.errors.InvalidInput, match="application/json"):
        sl.node.Primary.open(tmp_path / "node", content_type="text/plain")


def test_a_copy_of_a_log_that_is_being_sealed_is_whole(tmp_path):
    with WalLog.open(str(tmp_path / "log")) as log:
        log.append_batch(records(b"1"), seal=True).result()
        (tmp_path / "copy").mkdir()
        fill(log, str(tmp_path / "copy"))
    assert verify(str(tmp_path / "copy")).next == 1
    with WalLog.open(str(tmp_path / "copy")) as copy:
        assert copy.bounds() == Bounds(0, 1, sealed=True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"seconds": 601.0}, "waits for 601 s, and 600 are the most"),
        ({"seconds": 1e18}, "600 are the most"),
        ({"seconds": -1.0}, "seconds"),
        ({}, "seconds"),
        ({"seconds": 1.0, "at": 0}, "only .* are known"),
    ],
)
def test_a_seal_that_asks_for_what_no_append_may_changes_nothing(nodes, fields, why):
    """A caller must not hold a call of the node for years, and fields that it does not know may mean another seal."""
    primary, _ = nodes
    with sl.open(primary.url) as log:
        with pytest.raises(sl.errors.InvalidInput, match=why):
            log._nodes.all[0].ask("seal", **fields)
        assert log.bounds() == Bounds(0, 0)
        primary.append_values([b"1"]).ensure()


def test_only_callers_that_may_append_seal(tmp_path):
    tokens = Tokens.parse("eyes read token-of-the-reader\napp client token-of-the-app-1", "tokens")
    with (
        sl.node.Primary.open(tmp_path / "a", name="a", policy="local", server=ServerSecurity(tokens=tokens)) as primary,
        sl.open(primary.url, security=ClientSecurity(token="token-of-the-reader")) as eyes,
        sl.open(primary.url, security=ClientSecurity(token="token-of-the-app-1")) as app,
    ):
        for seconds in (1.0, 1e18):
            with pytest.raises(Fenced, match="may"):
                eyes._nodes.all[0].ask("seal", seconds=seconds)
        assert not primary.bounds().sealed
        assert app.seal() == app.seal()
