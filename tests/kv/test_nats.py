"""Rules of NATS buckets: identities, clamped starts, each way to lose changes, and the connection to the server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from uuid import uuid4

import pytest

from strandline.errors import (
    CursorExpired,
    DiskFull,
    Gap,
    InvalidInput,
    MissingExtra,
    NotFound,
    TransientStorageError,
    UsedAcrossFork,
)
from strandline.kv.contract import Listed
from strandline.kv.nats import feed as nats_feed
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.kv.nats.feed import MessageFeed
from strandline.kv.nats.watch import removal, scope_filters
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Prefix
from strandline.model.records import Op
from tests.contracts.key_values import Collected, churn, current, fill, fold
from tests.cuttable_nats import NatsLine
from tests.matrix_cases import some
from tests.servers import NatsServer

NODES = Prefix("node.")


def fresh() -> str:
    return f"nats-{uuid4().hex}"


@contextmanager
def opened(url: str, **options: object) -> Iterator[NatsKeyValue]:
    with NatsKeyValue.connect(url, fresh(), create=True, **options) as kv:
        yield kv
        if not kv._connection.closed and not kv._connection.lost_for():
            kv._connection.run(kv._connection.api(f"STREAM.DELETE.{kv._stream}"), "Removing")


@pytest.fixture
def kv(nats_url: str) -> Iterator[NatsKeyValue]:
    with opened(nats_url, prefetch=8) as kv:
        yield kv


def purge(kv: NatsKeyValue, what: dict[str, object]) -> None:
    kv._connection.ask(f"STREAM.PURGE.{kv._stream}", "Purging", what)


def cursor_of(kv: NatsKeyValue, scope: Prefix = EVERYTHING) -> Cursor:
    with kv.watch(scope) as subscription:
        return Collected(subscription).until_listed().at()


def until(condition) -> None:
    """Wait until a condition holds that the server brings about by itself."""
    pause = threading.Event()
    for _ in range(600):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not happen")


# --- identity and clamped starts ---------------------------------------------------------------------------------


def test_a_bucket_has_one_identity_on_every_connection_and_another_when_it_is_created_again(kv, nats_url):
    before = kv.stream
    with NatsKeyValue.connect(nats_url, kv._bucket) as other:
        assert other.stream == before
    kv._connection.ask(f"STREAM.DELETE.{kv._stream}", "Removing")
    with NatsKeyValue.connect(nats_url, kv._bucket, create=True) as anew:
        assert anew.stream != before


@pytest.mark.parametrize("scope", some([EVERYTHING, NODES, Prefix("no")], 1), ids=repr)
@pytest.mark.parametrize("how", ["purged", "purged whole", "superseded", "too many", "too old"])
def test_a_start_that_the_server_would_clamp_is_expired(nats_url, how, scope):
    with opened(nats_url, history=1) as kv:
        if how == "too many":
            limit(kv, max_msgs=5)
        if how == "too old":
            limit(kv, max_age=300_000_000, duplicate_window=100_000_000)
        fill(kv)
        cursor = cursor_of(kv, scope)
        early = cursor.at(cursor.next - 3)
        kv.put("other", b"later")
        match how:
            case "purged":
                purge(kv, {"seq": cursor.next + 1})
            case "purged whole":
                purge(kv, {})
            case "superseded":
                fill(kv, b"2")
            case "too many":
                fill(kv, b"2", [b"x.%d" % number for number in range(9)])
            case "too old":
                until(lambda: kv._state().first > cursor.next)
        for late in (cursor, early):
            with pytest.raises(CursorExpired):
                kv.watch_from(scope, late)
        with kv.watch_from(scope, cursor.at(kv._state().last + 1)) as subscription:
            kv.put("node.1", b"new")
            Collected(subscription).until_key(b"node.1", b"new")


def limit(kv: NatsKeyValue, **limits: object) -> None:
    """Let the server drop the oldest changes, as a bucket with other settings may."""
    config = kv._connection.ask(f"STREAM.INFO.{kv._stream}", "Looking")["config"]
    changed = config | {"discard": "old"} | limits
    kv._connection.ask(f"STREAM.UPDATE.{kv._stream}", "Limiting", changed)


def test_a_front_that_passes_the_cursor_while_the_watch_is_opened_is_expired(kv):
    fill(kv)
    cursor = cursor_of(kv)
    fill(kv, b"2")
    state = kv._state
    asked = 0

    def overtaken():
        nonlocal asked
        asked += 1
        found = state()
        if asked == 1:  # the first look found all in order; now retention strikes
            purge(kv, {"seq": cursor.next + 3})
        return found

    kv._state = overtaken
    with pytest.raises(CursorExpired):
        kv.watch_from(EVERYTHING, cursor)
    assert asked == 2
    until(lambda: consumers(kv) == 0)


def consumers(kv: NatsKeyValue) -> int:
    return kv._connection.ask(f"STREAM.INFO.{kv._stream}", "Looking")["state"]["consumer_count"]


def test_a_closed_watch_leaves_nothing_on_the_server(kv):
    fill(kv)
    with kv.watch() as one, kv.watch(NODES), kv.watch_from(EVERYTHING, cursor_of(kv)):
        assert consumers(kv) == 3
        Collected(one).until_listed()
    kv.keys()
    assert consumers(kv) == 0


# --- each way to lose changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", some([EVERYTHING, NODES, Prefix("no")], 1), ids=repr)
@pytest.mark.parametrize("limits", [{"max_msgs": 20}, {"max_bytes": 2000}, {"max_age": 300_000_000}], ids=str)
def test_a_limit_that_overruns_a_watch_is_a_gap(kv, limits, scope):
    limit(kv, **limits, duplicate_window=100_000_000)
    fill(kv)
    with kv.watch(scope) as subscription:
        taken = Collected(subscription).until_listed()
        made = churn(kv, 40)
        until(lambda: kv._state().first > made[100].version)
        kv.put("node.1", b"past the gap")
        with pytest.raises(Gap, match="were dropped before this watch received them"):
            taken.until(lambda: False)
    given = taken.since_listed()
    assert given == [change for change in made if change.key in scope][: len(given)]


def test_a_gap_is_reported_although_no_change_follows(kv):
    with kv.watch(NODES) as subscription:
        taken = Collected(subscription).until_listed()
        # What was dropped cannot be asked whether it was in scope.
        fill(kv, keys=[b"other.%d" % number for number in range(10)])
        purge(kv, {})
        with pytest.raises(Gap):
            taken.until(lambda: False)


def test_a_dropped_newest_change_is_a_gap(kv):
    fill(kv, keys=[b"k.%d" % number for number in range(8)])
    with kv.watch() as subscription:
        taken = Collected(subscription).until_listed()
        made = churn(kv, 4)
        purge(kv, {"filter": f"{kv._subjects}{made[-1].key.decode()}"})
        with pytest.raises(Gap):
            taken.until(lambda: False)
    assert taken.since_listed() == made[:-1]


def test_a_watch_that_has_caught_up_continues_when_delivered_changes_are_dropped(kv):
    fill(kv)
    with kv.watch(NODES) as nodes, kv.watch() as everything:
        watches = [Collected(nodes).until_listed(), Collected(everything).until_listed()]
        for number in range(3):
            last = churn(kv, 3, name=str(number))[-1].version
            for taken in watches:
                taken.until(lambda taken=taken, last=last: taken.at().next > last)
            purge(kv, {"seq": last + 1})
        kv.put("node.1", b"last")
        for taken in watches:
            taken.until_key(b"node.1", b"last")


def test_a_value_that_was_superseded_before_its_delivery_is_no_gap(nats_url):
    with opened(nats_url, history=1, prefetch=1) as kv:
        kv.put("rarely.changed", b"1")
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            for number in range(50):
                kv.put("node.1", b"%d" % number)
            taken.until_key(b"node.1", b"49")
        assert len(taken.since_listed()) < 50


@pytest.mark.matrix
def test_watchers_get_expired_keys_which_are_not_listed_as_deleted(nats_url):
    with opened(nats_url, ttl=1.0) as kv:
        kv.put("node.1", b"1")
        kv.put("node.2", b"1")
        with kv.watch() as subscription:
            taken = Collected(subscription).until_listed()
            kv.delete("node.2")
            taken.until(lambda: {row.key for row in taken.rows if row.value is None} == {b"node.1", b"node.2"})
        assert fold(taken.rows) == {}
        listing = kv.listing()
        assert listing.live == frozenset()
        assert b"node.1" not in listing.deleted


def test_markers_of_clients_and_of_the_server_are_understood():
    assert removal({"KV-Operation": "DEL"}) is Op.DELETE
    assert removal({"KV-Operation": "PURGE", "Nats-Rollup": "sub"}) is Op.PURGE
    assert removal({"Nats-Marker-Reason": "MaxAge"}) is Op.PURGE
    assert removal({"Nats-Marker-Reason": "Remove"}) is Op.DELETE
    assert removal({"Nats-Marker-Reason": "of a later server"}) is Op.DELETE
    assert removal({"KV-Operation": "PUT"}) is removal({"Trace": "1"}) is None


# --- the initial values -------------------------------------------------------------------------------------------


def test_a_value_that_is_superseded_while_it_is_listed_is_given_before_the_listing_ends(nats_url):
    with opened(nats_url, history=1, prefetch=2) as kv:
        keys = [b"k.%02d" % number for number in range(10)]
        fill(kv, keys=keys)
        with kv.watch() as subscription:
            taken = Collected(subscription)
            taken.take(1)
            kv.put(keys[5], b"2")
            taken.until_listed(1)
        # Else a resync would remove a key that was there all the time.
        assert fold(taken.rows) == current(kv)


@pytest.mark.parametrize("scope", [EVERYTHING, Prefix("k."), Prefix("k")], ids=repr)
def test_the_listing_ends_although_its_last_value_was_dropped(nats_url, scope):
    with opened(nats_url, prefetch=2) as kv:
        keys = [b"k.%02d" % number for number in range(10)]
        fill(kv, keys=keys)
        with kv.watch(scope) as subscription:
            taken = Collected(subscription)
            taken.take(1)
            purge(kv, {"filter": f"{kv._subjects}{keys[-1].decode()}"})
            taken.until_listed(1)
        assert sorted(fold(taken.rows)) == keys[:-1]


def test_a_listing_ends_under_a_flood_of_writes(kv):
    fill(kv)
    stop = threading.Event()

    def flood():
        number = 0
        while not stop.is_set():
            kv.put(f"flood.{number % 50}", b"1")
            number += 1

    writer = threading.Thread(target=flood)
    writer.start()
    try:
        for scope in (EVERYTHING, NODES, Prefix("no")):
            with kv.watch(scope) as subscription:
                Collected(subscription).until_listed(4)
            assert {b"node.1", b"node.10"} <= set(kv.keys("no"))
    finally:
        stop.set()
        writer.join()


def test_prefixes_become_filters_only_where_nats_can_express_them():
    assert scope_filters(EVERYTHING, "$KV.b.") == ["$KV.b.>"]
    assert scope_filters(Prefix("a.b.", "c."), "$KV.b.") == ["$KV.b.a.b.>", "$KV.b.c.>"]
    for unaligned in ("a", "a.b", "*.", "a.>.", "..", "\xfc."):
        assert scope_filters(Prefix("c.", unaligned), "$KV.b.") == ["$KV.b.>"]
    assert scope_filters(Prefix(*(f"p{number}." for number in range(40))), "$KV.b.") == ["$KV.b.>"]


def test_many_prefixes_are_one_watch(kv):
    fill(kv, keys=[b"p%d.x" % number for number in range(60)])
    with kv.watch(Prefix(*(f"p{number}." for number in range(40)))) as subscription:
        taken = Collected(subscription).until_listed()
    assert sorted(fold(taken.rows)) == sorted(b"p%d.x" % number for number in range(40))


def test_large_values_do_not_fill_the_memory_and_all_come(nats_url):
    with opened(nats_url, history=1) as kv:
        value = b"x" * 900_000
        fill(kv, value, [b"big.%d" % number for number in range(40)])
        with kv.watch() as subscription:
            waiting = subscription._feed._waiting
            until(lambda: waiting and not waiting[-1].reply)  # the server says that it holds back the rest
            assert 0 < sum(len(message.data) for message in waiting) <= 16 << 20
            taken = Collected(subscription).until_listed()
        assert len(taken.rows) == 40


# --- the line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def line(nats_server: NatsServer) -> Iterator[NatsLine]:
    with NatsLine(nats_server.port) as line:
        yield line


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(nats_feed, "_HEARTBEAT", 0.2)


@pytest.fixture
def far(kv, line) -> Iterator[NatsKeyValue]:
    """The same bucket through a connection that the test may break."""
    with NatsKeyValue.connect(line.url, kv._bucket, timeout=2.0, prefetch=64) as far:
        yield far


def numbered(reply: str) -> int:
    """A message's number in its consumer, 0 for others."""
    return int(reply.split(".")[6]) if reply.startswith("$JS.ACK.") else 0


@pytest.mark.parametrize("scope", [EVERYTHING, NODES], ids=repr)
def test_a_change_that_was_lost_on_the_way_ends_the_watch_before_the_next(kv, far, line, scope):
    with far.watch(scope) as subscription:
        taken = Collected(subscription).until_listed()
        line.robs = lambda reply: numbered(reply) == 4
        made = [change for change in churn(kv, 10) if change.key in scope]
        with pytest.raises(TransientStorageError, match="lost on the way"):
            taken.until(lambda: False)
        assert taken.rows == made[: len(taken.rows)]
        assert len(taken.rows) <= 3
        with pytest.raises(TransientStorageError, match="lost on the way"):
            taken.take()
    line.robs = lambda _: False
    with far.watch_from(scope, taken.at()) as subscription:
        assert Collected(subscription).until_key(made[-1].key, made[-1].value).rows == made[len(taken.rows) :]


def test_the_loss_of_the_last_change_on_the_wire_is_detected(kv, far, line, impatient):
    with far.watch() as subscription:
        taken = Collected(subscription).until_listed()
        line.robs = lambda reply: numbered(reply) == 2
        kv.put("node.1", b"1")
        kv.put("node.1", b"2")
        with pytest.raises(TransientStorageError, match="lost on the way"):
            taken.until(lambda: False)
        assert [row.value for row in taken.rows] == [b"1"]


@pytest.mark.matrix
def test_a_loss_of_the_connection_that_loses_no_change_goes_unnoticed(kv, far, line):
    fill(kv)
    with far.watch(NODES) as subscription:
        taken = Collected(subscription).until_listed()
        for number in range(3):
            line.cut()
            until(lambda number=number: far._connection.generation > number)
            far.get("node.1")  # so that the server has heard that the watch listens again
            kv.put("node.1", b"after cut %d" % number)
            taken.until_key(b"node.1", b"after cut %d" % number)
        assert far.get("node.1") == b"after cut 2"


@pytest.mark.matrix
def test_a_line_that_stays_cut_ends_the_watch_with_an_error_that_may_pass(kv, far, line):
    with far.watch() as subscription:
        taken = Collected(subscription).until_listed()
        line.close()
        with pytest.raises(TransientStorageError, match="no connection to NATS"):
            taken.until(lambda: False)
    for call in (lambda: far.put("a", b"1"), lambda: far.get("a"), far.keys, far.watch):
        with pytest.raises(TransientStorageError):
            call()


@pytest.mark.matrix
def test_a_server_that_falls_silent_ends_the_watch_with_an_error_that_may_pass(kv, far, line, impatient):
    with far.watch() as subscription:
        taken = Collected(subscription).until_listed()
        line.stopped = True
        with pytest.raises(TransientStorageError):
            taken.until(lambda: False)
        line.stopped = False


@pytest.mark.matrix
def test_a_pull_that_was_lost_is_repeated(kv, far, impatient):
    fill(kv)
    sent = []
    far._connection.post = lambda *pull: sent.append(pull)
    with far.watch() as subscription:
        del far._connection.post
        taken = Collected(subscription).until_listed()
        assert len(sent) == 1
        assert fold(taken.rows) == current(kv)


def test_a_watch_whose_consumer_is_gone_ends_with_an_error_that_may_pass(kv):
    with kv.watch() as subscription:
        taken = Collected(subscription).until_listed()
        kv._connection.ask(f"CONSUMER.DELETE.{kv._stream}.{subscription._feed._name}", "Removing")
        with pytest.raises(TransientStorageError, match="resume from the applied cursor"):
            taken.until(lambda: False)


@pytest.mark.parametrize("anew", [False, True])
def test_a_bucket_that_is_removed_under_a_watch_ends_it(kv, nats_url, anew):
    fill(kv)
    with kv.watch(NODES) as subscription:
        taken = Collected(subscription).until_listed()
        kv._connection.ask(f"STREAM.DELETE.{kv._stream}", "Removing")
        if anew:
            NatsKeyValue.connect(nats_url, kv._bucket, create=True).close()
        with pytest.raises(NotFound):
            taken.until(lambda: False)


def test_a_number_is_found_in_either_form_of_a_reply(kv):
    feed = MessageFeed(kv._connection, kv._stream, [">"], {"deliver_policy": "new"}, window=8)
    plain = "$JS.ACK.KV_b.w.1.70.1.1700000000.0"
    domain = "$JS.ACK.hub.ACCT.KV_b.w.1.71.2.1700000000.0.token"
    for reply in (plain, domain):
        feed._waiting.append(SimpleNamespace(reply=reply, subject="$KV.b.a", headers=None, data=b""))
    assert [message.sequence for message in feed.next(5)] == [70, 71]
    feed.close()


# --- the server dies ----------------------------------------------------------------------------------------------


def test_after_a_crash_of_the_server_a_watch_resumes_with_exactly_what_it_missed():
    with NatsServer() as server, opened(server.url, timeout=2.0) as kv:
        fill(kv)
        with kv.watch(NODES) as subscription:
            taken = Collected(subscription).until_listed()
            identity, before = kv.stream, current(kv)
            server.kill()
            for _ in range(2):
                with pytest.raises(TransientStorageError):
                    kv.put("node.1", b"into the void")
            server.revive()
            until(lambda: not kv._connection.lost_for())
            with pytest.raises(TransientStorageError):  # a watch lives in the server's memory
                taken.until(lambda: False)
        assert kv.stream == identity
        assert current(kv) == before, "what was given up landed after all"
        kv.put("node.1", b"2")
        kv.delete("node.10")
        with kv.watch_from(NODES, taken.at()) as subscription:
            missed = Collected(subscription).until_key(b"node.10", None)
        assert [(row.key, row.value) for row in missed.rows] == [(b"node.1", b"2"), (b"node.10", None)]


def test_a_server_that_is_not_there_is_an_error_that_may_pass():
    with NatsServer() as server:
        url = server.url
    with pytest.raises(TransientStorageError, match="Connecting to nats://"):
        NatsKeyValue.connect(url, "bucket", timeout=0.3)


# --- buckets and connections --------------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there_is_not_found(nats_url, kv):
    with pytest.raises(NotFound, match="create=True"):
        NatsKeyValue.connect(nats_url, fresh())
    kv._connection.ask(f"STREAM.DELETE.{kv._stream}", "Removing")
    for call in (
        lambda: kv.put("a", b"1"),
        lambda: kv.get("a"),
        kv.keys,
        kv.watch,
        lambda: kv.stream,
    ):
        with pytest.raises(NotFound):
            call()


def test_an_existing_bucket_is_left_unchanged(nats_url, kv):
    fill(kv)
    with NatsKeyValue.connect(nats_url, kv._bucket, create=True, history=3, max_bytes=10_000) as other:
        assert current(other) == current(kv)
        assert other.stream == kv.stream


def test_a_full_bucket_refuses_changes_and_loses_nothing(nats_url):
    with opened(nats_url, max_bytes=2000) as kv:
        with pytest.raises(DiskFull, match="maximum bytes exceeded"):
            churn(kv, 50)
        kept = current(kv)
        assert kept
        with pytest.raises(DiskFull):
            kv.put("node.1", b"x" * 500)
        assert current(kv) == kept


def test_a_value_that_is_too_large_is_invalid(kv):
    with pytest.raises(InvalidInput, match="larger than the server allows"):
        kv.put("node.1", b"x" * (2 << 20))
    assert kv.keys() == []


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.b", {}), ("", {}), ("a b", {}), ("ok", {"history": 0}), ("ok", {"history": 65}), ("ok", {"prefetch": 0})],
)
def test_impossible_arguments_are_refused_before_any_request(name, options):
    with pytest.raises(InvalidInput):
        NatsKeyValue.connect("nats://127.0.0.1:1", name, **options)


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(MissingExtra, match=r"strandline\[nats\]"):
        NatsKeyValue.connect("nats://127.0.0.1:1", "bucket")


def test_a_closed_bucket_raises_and_its_waiting_watch_ends(nats_url):
    kv = NatsKeyValue.connect(nats_url, fresh(), create=True)
    subscription = kv.watch()
    assert isinstance(subscription.take(1, 5.0), Listed)
    closing = threading.Timer(0.1, kv.close)
    closing.start()
    with pytest.raises(InvalidInput, match="closed"):
        Collected(subscription).until(lambda: False)
    subscription.close()
    closing.join()
    kv.close()
    with pytest.raises(InvalidInput, match="closed"):
        kv.put("a", b"1")
    assert not [thread for thread in threading.enumerate() if thread is kv._connection._thread]


def test_a_forked_child_is_advised_to_connect_again(kv):
    with kv.watch() as subscription:
        Collected(subscription).until_listed()
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: kv.put("a", b"1"), kv.keys, kv.watch):
                try:
                    call()
                except UsedAcrossFork:
                    told += 1
            subscription.close()
            kv.close()
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    kv.put("a", b"1")
    assert kv.get("a") == b"1"
