"""``watch_applied`` after a cursor expired: vanished keys are deleted, present ones listed again, over crashes."""

from __future__ import annotations

import itertools
import logging
from functools import partial

import pytest

from strandline.errors import CursorExpired, NotReady, StorageError
from strandline.followers.events import Batching
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import watch_applied
from strandline.kv.contract import KeyListing, Listed
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Prefix, Updates
from strandline.model.sink import StorePosition
from strandline.testing.faulty import Crash
from tests.followers.scripted_watch import (
    STREAM,
    Flaky,
    Mortal,
    Stage,
    at,
    burning,
    current,
    delete,
    follow,
    given,
    held,
    numbered,
    put,
)
from tests.matrix_cases import some

SCOPES = [EVERYTHING, Prefix("a."), Prefix("a.", "b.", "a.1")]


class Listings:
    """A reader that lists the key-value store, and changes that right after the listing."""

    def __init__(self, kv, *afterwards):
        self.kv = kv
        self.afterwards = list(afterwards)
        self.asked = []

    def listing(self, scope):
        self.asked.append(scope)
        found = self.kv.listing(scope)
        if self.afterwards:
            self.afterwards.pop(0)()
        return found


class Fixed:
    """A reader with a fixed listing."""

    def __init__(self, *live, deleted=None):
        self.listed = KeyListing(frozenset(live), deleted)

    def listing(self, scope):
        return self.listed


def fold(*keys: bytes, upto: int = 5) -> MemoryStore:
    """A store at a cursor, with these keys."""
    store = MemoryStore()
    store.apply(given(*(put(0, key, b"old") for key in keys)).table(), since=at(0), upto=at(upto))
    return store


def behind(kv: MemoryKeyValue, scope: Prefix = EVERYTHING, store=None):
    """A store whose cursor has expired: the key-value store no longer retains the changes after it."""
    store = MemoryStore() if store is None else store
    for key in ("a.1", "a.2", "a.3", "b.1", "b.2", "c.1"):
        kv.put(key, b"old")
    follow(kv, store, scope=scope)
    for key in ("a.1", "b.1", "c.1"):
        kv.delete(key)
    kv.put("a.2", b"new")
    kv.put("a.9", b"new")
    kv.put("c.9", b"new")
    kv.trim(kv._next)
    return store


def within(pairs, scope):
    return {key: value for key, value in pairs.items() if key in scope}


# --- what it does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_an_expired_resume_resyncs_the_store_in_each_scope_and_spares_other_keys(scope):
    kv = MemoryKeyValue()
    store = behind(kv)  # it holds everything, whatever is watched from now on
    before = held(store)
    cursor = follow(kv, store, scope=scope)
    assert store.position() == StorePosition(cursor) == StorePosition(Cursor(kv.stream, kv._next))
    assert within(held(store), scope) == within(current(kv), scope)
    outside = {key: value for key, value in before.items() if key not in scope}
    assert {key: value for key, value in held(store).items() if key not in scope} == outside


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_the_listing_is_asked_for_exactly_the_scope(scope):
    kv = MemoryKeyValue()
    store = behind(kv)
    reader = Listings(kv)
    follow(kv, store, reader=reader, scope=scope)
    assert reader.asked == [scope]


def test_a_key_value_store_that_was_created_again_replaces_what_was():
    store = behind(MemoryKeyValue())
    anew = MemoryKeyValue()
    anew.put("a.1", b"other")
    cursor = follow(anew, store)
    assert held(store) == {b"a.1": b"other"}
    assert store.position() == StorePosition(cursor) == StorePosition(Cursor(anew.stream, 1))


def test_a_key_value_store_that_is_created_again_between_the_flag_and_the_full_watch_replaces_what_was():
    first, second = MemoryKeyValue(), MemoryKeyValue()
    store = behind(first)
    second.put("a.2", b"other")
    second.end()
    kvs = [first]

    class Renewed:
        """A key-value store that is created again under the same name right after its listing."""

        @property
        def stream(self):
            return kvs[-1].stream

        def watch_from(self, scope, cursor):
            return kvs[-1].watch_from(scope, cursor)

    reader = Listings(first, lambda: kvs.append(second))
    cursor = watch_applied(Renewed(), lambda _: None, store=store, reader=reader)
    assert store.position() == StorePosition(cursor) == StorePosition(Cursor(second.stream, 1))
    assert held(store) == {b"a.2": b"other"}


def test_a_cursor_past_the_end_is_repaired_too():
    store = fold(b"gone", upto=100)
    stage = Stage(numbered(3, 1), Listed(at(9)), expired=True, store=store, reader=Fixed(b"k3"))
    assert stage.run() == at(9)
    assert held(store) == {b"k3": b"3"}
    assert stage.reports == [9]


def test_the_order_is_listing_removals_full_watch_what_is_current_and_the_sweep():
    store = fold(b"gone", b"stays", b"unlisted")
    stage = Stage(given(put(7, b"stays")), Listed(at(9)), expired=True, reader=Fixed(b"stays", b"unlisted"))
    flaky = Flaky(store, stage=stage)
    stage.run(store=flaky)
    assert stage.opened == [at(5), None]
    assert stage.keys == [[b"gone"], [b"stays"], [b"unlisted"]]
    assert stage.log == [
        "open", "store well",  # expired, and flagged
        "apply", "store well",  # removed
        "open",
        "apply", "store well",  # listed again
        "apply", "store well",  # swept
        "store well", "report",
    ]  # fmt: skip
    assert flaky.writes == [f"{name} well" for name in ("begin_resync", "resync", "resync", "resync", "end_resync")]
    assert held(store) == {b"stays": b"v"}


def test_a_removal_precedes_the_relisted_put_of_the_same_key():
    kv, batches = MemoryKeyValue(), []
    store = behind(kv)
    reader = Listings(kv, lambda: kv.put("a.1", b"back"))  # deleted when listed, there when watched
    kv.end()
    watch_applied(kv, batches.extend, store=store, reader=reader)
    assert [update.value for update in batches if update.key == b"a.1"] == [None, b"back"]
    assert store.get(b"a.1") == b"back"
    assert held(store) == current(kv)


def test_a_key_deleted_between_listing_and_watch_is_swept():
    kv, batches = MemoryKeyValue(), []
    store = behind(kv)
    reader = Listings(kv, lambda: kv.delete("a.3"))  # there when listed, and no more when watched
    kv.end()
    watch_applied(kv, batches.extend, store=store, reader=reader)
    assert [update.value for update in batches if update.key == b"a.3"] == [None]
    assert held(store) == current(kv)


def test_a_key_deleted_and_created_again_between_listing_and_watch_survives():
    kv = MemoryKeyValue()
    store = behind(kv)

    def again():
        kv.delete("a.3")
        kv.put("a.3", b"back")

    follow(kv, store, reader=Listings(kv, again))
    assert store.get(b"a.3") == b"back"
    assert held(store) == current(kv)


def test_a_key_that_changes_during_the_sweep_is_right_in_the_end():
    kv = MemoryKeyValue()
    store = behind(kv)

    def apply(batch):
        if any(update.key == b"a.3" for update in batch if update.value == b"old"):  # it was listed again
            kv.delete("a.3")
            kv.put("c.1", b"back")

    kv.end()
    watch_applied(kv, apply, store=store, reader=kv)
    assert held(store) == current(kv)
    assert b"a.3" not in held(store)


def test_removals_do_not_move_the_cursor_and_on_applied_gets_only_the_end():
    store = fold(b"gone", b"unlisted")
    stage = Stage(numbered(7, 3), Listed(at(20)), expired=True, store=store, reader=Fixed(b"unlisted"))
    positions = []

    def apply(batch):
        stage.apply(batch)
        positions.append(store.position())

    stage.run(apply)
    assert positions == [StorePosition(at(5), STREAM)] * 3
    assert stage.reports == [20]


def test_removals_come_in_batches_that_are_not_too_large_and_are_marked_as_of_unknown_version():
    store = fold(*(b"g%03d" % number for number in range(250)))
    stage = Stage(Listed(at(9)), expired=True, store=store, reader=Fixed())
    stage.run()
    assert [len(batch) for batch in stage.batches] == [100, 100, 50]
    assert stage.batches[0][0] == delete(None, b"g000")
    assert held(store) == {}


def test_removals_go_through_parse_and_one_that_it_rejects_is_still_taken_out_of_the_store():
    store = fold(b"gone", b"rejected")
    stage = Stage(Listed(at(9)), expired=True, store=store, reader=Fixed())
    stage.run(parse=lambda update: None if update.key == b"rejected" else update)
    assert stage.keys == [[b"gone"]]
    assert held(store) == {}


def test_apply_raising_at_a_removal_leaves_the_cursor_and_the_flag():
    store = fold(b"gone")
    stage = Stage(Listed(at(9)), expired=True, store=store, reader=Fixed())

    def refuse(_):
        raise RuntimeError("cannot")

    with pytest.raises(RuntimeError, match="cannot"):
        stage.run(refuse)
    assert store.position() == StorePosition(at(5), STREAM)
    assert held(store) == {b"gone": b"old"}


def test_a_listing_that_is_large_is_flushed_in_batches_and_none_of_its_keys_is_swept():
    store = fold(*(b"k%d" % version for version in range(300)))
    listed = [f"k{version}".encode() for version in range(0, 300, 2)]
    stage = Stage(expired=True, store=store, reader=Fixed(*listed))
    stage.script = iter([*(given(put(1000 + at_, key)) for at_, key in enumerate(listed)), Listed(at(2000))])
    stage.run()
    assert sorted(held(store)) == sorted(listed)
    assert set(held(store).values()) == {b"v"}


def test_a_resync_flushes_what_was_listed_before_it_sweeps():
    store = fold(b"k7")
    stage = Stage(numbered(7, 1), Listed(at(9)), expired=True, store=store, reader=Fixed(b"k7"))
    stage.run(batching=Batching(records=100, window=1e9))
    assert stage.keys == [[b"k7"]]  # and it was not taken for one that was not listed
    assert held(store) == {b"k7": b"7"}


def test_after_a_resync_the_watch_continues():
    store = fold(b"gone")
    stage = Stage(numbered(7, 1), Listed(at(9)), numbered(9, 2), 1.0, expired=True, store=store, reader=Fixed(b"k7"))
    assert stage.run() == at(11)
    assert stage.reports == [9, 11]
    assert held(store) == {b"k7": b"7", b"k9": b"9", b"k10": b"10"}


# --- a full watch onto a store that is not empty ---------------------------------------------------------------


def test_a_full_watch_onto_a_store_that_is_not_empty_resyncs_the_same_way():
    kv = MemoryKeyValue()
    store = behind(kv)
    cursor = follow(kv, store, resume=None)
    assert store.position() == StorePosition(cursor)
    assert held(store) == current(kv)


def test_a_full_watch_onto_a_store_with_keys_and_a_valid_cursor_resyncs_too():
    store = fold(b"gone", b"stays")
    stage = Stage(given(put(7, b"stays")), Listed(at(9)), store=store, reader=Fixed(b"stays"))
    assert stage.run(resume=None) == at(9)
    assert stage.opened == [None]
    assert held(store) == {b"stays": b"v"}


def test_a_full_watch_onto_an_empty_store_removes_and_flags_nothing():
    store = Flaky(MemoryStore())
    stage = Stage(numbered(7, 1), Listed(at(9)), store=store, reader=Fixed())
    assert stage.run() == at(9)
    assert store.writes == ["apply well"]


# --- what ends it ----------------------------------------------------------------------------------------------


def test_a_listing_that_fails_ends_the_watch_and_leaves_the_store_as_it_was():
    class Broken:
        def listing(self, scope):
            raise StorageError("The listing broke off.")

    store = fold(b"gone")
    stage = Stage(Listed(at(9)), expired=True, store=store, reader=Broken())
    with pytest.raises(StorageError, match="broke off"):
        stage.run()
    assert stage.opened == [at(5)]
    assert stage.batches == []
    assert store.position() == StorePosition(at(5))
    assert held(store) == {b"gone": b"old"}


@pytest.mark.parametrize("scan", [0, 1])
def test_a_scan_of_the_store_that_fails_ends_the_watch(scan):
    store = fold(b"gone")
    scans = itertools.count()

    class Unreadable(Flaky):
        def range(self, prefix=b""):
            if next(scans) == scan:
                raise StorageError("The scan broke off.")
            return self.inner.range(prefix)

    stage = Stage(Listed(at(9)), expired=True, store=Unreadable(store), reader=Fixed())
    with pytest.raises(StorageError, match="broke off"):
        stage.run()
    assert store.position() == StorePosition(
        at(5), STREAM if scan else None
    )  # nothing was touched before the first one
    assert stage.reports == []


def test_a_stop_within_a_resync_returns_the_cursor_from_before_and_the_next_watch_does_it_again():
    kv = MemoryKeyValue()
    store = behind(kv)
    before = store.position().cursor
    stage = Stage(numbered(7, 1), expired=True, store=store, reader=Fixed())
    assert stage.run() == before  # stopped within the listing
    assert store.position() == StorePosition(before, STREAM)
    assert stage.reports == []
    with pytest.raises(NotReady):
        watch_applied(kv, lambda _: None, store=store)
    follow(kv, store)
    assert held(store) == current(kv)
    assert store.position().resync is None


def test_a_resync_under_way_is_begun_again_even_if_the_cursor_would_do():
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a", b"1")
    follow(kv, store)
    store.begin_resync(kv.stream)
    store.resync(given(put(0, b"ghost")).table())
    follow(kv, store)
    assert held(store) == {b"a": b"1"}


@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_store_that_fails_at_each_write_of_a_resync_is_tried_again_and_ends_right(fault):
    for failing in range(6):
        kv = MemoryKeyValue()
        inner = behind(kv)
        store = Flaky(inner, *["well"] * failing, fault)
        kv.delete("a.3")
        kv.trim(kv._next)
        cursor = follow(kv, store, reader=Listings(kv, partial(kv.delete, "b.2")))
        assert inner.position() == StorePosition(cursor), failing
        assert held(inner) == current(kv)


def test_a_store_that_fails_for_good_within_a_resync_ends_the_watch():
    stage = Stage(Listed(at(9)), expired=True, store=Flaky(fold(b"gone"), *["before"] * 16), reader=Fixed())
    with pytest.raises(StorageError, match="16 times"):
        stage.run()
    assert stage.opened == [at(5)]


# --- a watcher that finds out late -------------------------------------------------------------------------------


class Late:
    """A user's watcher that says only in ``take`` that a cursor has expired, after ``before`` updates of its own."""

    def __init__(self, kv, *before, times=1):
        self.kv = kv
        self.before = list(before)
        self.times = times
        self.closed = 0

    @property
    def stream(self):
        return self.kv.stream

    def watch_from(self, scope, cursor):
        if cursor is None and self.times < 2:
            return self.kv.watch_from(scope, None)
        self.times -= cursor is None
        return LateSubscription(self)


class LateSubscription:
    def __init__(self, watcher):
        self.watcher = watcher

    def take(self, most, timeout):
        if self.watcher.before:
            return self.watcher.before.pop(0)
        raise CursorExpired("Its changes are no longer retained.")

    def close(self):
        self.watcher.closed += 1


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_a_cursor_that_expires_while_changes_are_taken_resyncs_the_store(scope):
    kv = MemoryKeyValue()
    store = behind(kv, scope)
    watcher, reader = Late(kv), Listings(kv)
    kv.end()
    cursor = watch_applied(watcher, [].extend, scope=scope, reader=reader, store=store)
    assert held(store) == within(current(kv), scope)
    assert store.position() == StorePosition(cursor) == StorePosition(Cursor(kv.stream, kv._next))
    assert (reader.asked, watcher.closed) == ([scope], 1)


@pytest.mark.parametrize("faults", [(), ("before", "before"), ("after",)], ids=["well", "fails", "lost answer"])
def test_what_was_taken_before_the_cursor_expired_is_applied_and_stored_before_the_resync(faults):
    kv, seen = MemoryKeyValue(), []
    store = behind(kv)
    since = store.position().cursor
    early = Updates.of([put(since.next, b"a.7", b"x")], since)
    flaky = Flaky(store, *faults)
    kv.end()
    watch_applied(Late(kv, early), seen.extend, reader=kv, store=flaky)
    assert [write.split()[0] for write in flaky.writes][len(faults) :][:2] == ["apply", "begin_resync"]
    assert (seen[0].key, seen[0].value) == (b"a.7", b"x")
    assert any(update.key == b"a.7" and update.value is None for update in seen), "it vanished, and was removed"
    assert held(store) == current(kv)


def test_a_full_watch_that_expires_before_it_has_listed_everything_ends_with_that_error():
    kv = MemoryKeyValue()
    store = behind(kv)
    with pytest.raises(CursorExpired):
        watch_applied(Late(kv, times=2), [].extend, reader=kv, store=store)
    assert store.position().resync == kv.stream


def test_without_a_reader_a_cursor_that_expires_late_means_a_full_watch_and_one_warning(caplog):
    kv, seen = MemoryKeyValue(), []
    store = behind(kv)
    kv.end()
    cursor = watch_applied(Late(kv), seen.extend, store=store)
    assert {update.key: update.value for update in seen} == current(kv)
    assert store.position() == StorePosition(cursor)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


# --- without a reader, or without a store ----------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["reader", "store", "both"])
def test_without_reader_or_store_it_is_a_full_watch_with_exactly_one_warning(missing, caplog):
    kv, batches = MemoryKeyValue(), []
    store = behind(kv)
    resume = store.position().cursor
    kv.end()
    cursor = watch_applied(
        kv,
        batches.extend,
        resume=resume,
        store=store if missing == "reader" else None,
        reader=kv if missing == "store" else None,
    )
    assert {update.key: update.value for update in batches} == current(kv)
    assert cursor == Cursor(kv.stream, kv._next)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "not removed" in warnings[0].getMessage()
    if missing == "reader":
        assert store.position() == StorePosition(cursor)
        assert held(store) == {**held(store), **current(kv)}
        assert store.get(b"a.1") == b"old"  # nothing tells that it is gone


def test_a_full_watch_onto_a_store_without_a_reader_warns_once(caplog):
    kv = MemoryKeyValue()
    store = behind(kv)
    follow(kv, store, reader=None, resume=None)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert held(store) == {**held(store), **current(kv)}


def test_without_a_reader_a_key_value_store_that_was_created_again_is_taken_from_its_beginning(caplog):
    store = behind(MemoryKeyValue())
    before = held(store)
    anew = MemoryKeyValue()
    anew.put("a.1", b"other")
    cursor = follow(anew, store, reader=None)
    assert store.position() == StorePosition(cursor) == StorePosition(Cursor(anew.stream, 1))
    assert held(store) == {**before, b"a.1": b"other"}
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("resume", ["stored", None])
def test_without_a_reader_a_store_past_the_end_misses_nothing_of_what_comes(resume):
    store = fold(b"ghost", upto=100)
    stage = Stage(numbered(3, 1), Listed(at(9)), numbered(9, 2), numbered(99, 3), expired=True, store=store)
    assert stage.run(resume=resume) == at(102)
    assert stage.opened[-1] is None
    assert sorted(held(store)) == sorted([b"ghost", b"k3", b"k9", b"k10", b"k99", b"k100", b"k101"])


def test_without_a_reader_nothing_is_reported_until_something_came():
    store = fold(b"ghost")
    stage = Stage(None, expired=True, store=store)
    assert stage.run() == store.position().cursor == at(0)
    assert stage.reports == []


@pytest.mark.parametrize("fault", ["before", "after"])
def test_without_a_reader_a_store_that_fails_to_begin_again_is_tried_again(fault):
    for failing in range(3):
        inner = fold(b"ghost", upto=100)
        stage = Stage(numbered(3, 1), 1.0, *[None] * 5, expired=True)
        assert stage.run(store=Flaky(inner, *["well"] * failing, fault)) == at(4)
        assert inner.position() == StorePosition(at(4))
        assert held(inner) == {b"ghost": b"old", b"k3": b"3"}


def test_with_reader_and_store_nothing_is_warned_of(caplog):
    kv = MemoryKeyValue()
    follow(kv, behind(kv))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- evicted or deleted ----------------------------------------------------------------------------------------


def evicting() -> tuple[MemoryKeyValue, MemoryStore]:
    kv, store = MemoryKeyValue(), MemoryStore()
    for key in ("deleted", "evicted", "stays"):
        kv.put(key, b"1")
    follow(kv, store)
    kv.delete("deleted")
    kv.evict("evicted")
    return kv, store


def test_evicted_keys_are_dropped_by_default():
    kv, store = evicting()
    follow(kv, store)
    assert held(store) == {b"stays": b"1"}


def test_evicted_keys_can_be_kept_and_deleted_ones_still_go():
    kv, store = evicting()
    follow(kv, store, evicted="keep")
    assert held(store) == {b"evicted": b"1", b"stays": b"1"}
    assert store.position() == StorePosition(Cursor(kv.stream, kv._next))


def test_a_key_deleted_between_listing_and_watch_is_swept_though_evicted_ones_are_kept():
    kv, store = evicting()
    follow(kv, store, reader=Listings(kv, lambda: kv.delete("stays")), evicted="keep")
    assert held(store) == {b"evicted": b"1"}


def test_a_key_evicted_between_listing_and_watch_is_kept():
    kv, store = evicting()
    follow(kv, store, reader=Listings(kv, lambda: kv.evict("stays")), evicted="keep")
    assert held(store) == {b"evicted": b"1", b"stays": b"1"}


def test_where_a_backend_does_not_distinguish_evictions_vanished_keys_are_removed():
    store = fold(b"gone")
    stage = Stage(Listed(at(9)), expired=True, store=store, reader=Fixed(deleted=None))
    stage.run(evicted="keep")
    assert held(store) == {}


# --- dying at every step ---------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "append-log"])
def opened(request, tmp_path):
    """Opens the same store again, as after a crash: its memory represents a disk."""
    memory, number, stores = MemoryStore(), 0, []

    def fresh():
        nonlocal memory, number
        memory, number = MemoryStore(), number + 1
        return again()

    def again():
        if request.param == "memory":
            return memory
        while stores:
            stores.pop().close()
        stores.append(AppendLogStore.open(str(tmp_path / str(number)), sync=False))
        return stores[-1]

    yield fresh, again
    for store in stores:
        store.close()


@pytest.mark.parametrize("scope", some(SCOPES[:2], 1), ids=str)
def test_after_a_crash_at_any_step_of_a_resync_the_next_watch_ends_right(opened, scope):
    fresh, again = opened
    deaths = 0
    for step in itertools.count():
        kv = MemoryKeyValue()
        store = behind(kv, store=fresh())
        spared = {key: value for key, value in held(store).items() if key not in scope}
        reader = Listings(kv, lambda kv=kv: (kv.delete("a.3"), kv.put("a.1", b"back")))
        fuse = burning(step)
        told = []
        options = {"scope": scope, "batching": Batching(records=2, window=0.01), "on_applied": told.append}
        kv.end()
        try:
            watch_applied(
                Mortal(kv, fuse, "watch_from"),
                Mortal(lambda _: None, fuse, "__call__").__getattr__("__call__"),
                reader=Mortal(reader, fuse, "listing"),
                store=Mortal(store, fuse, "apply", "begin_resync", "resync", "end_resync", "range"),
                **options,
            )
            done = True
        except Crash:
            done = False
            deaths += 1
        store = again()
        position = store.position()
        if position.resync is None and position.cursor == Cursor(kv.stream, kv._next):
            assert within(held(store), scope) == within(current(kv), scope)
        for cursor in told:
            assert position == StorePosition(cursor)
        kv.put("a.8", b"later")
        kv.delete("a.2")
        if step % 2:
            kv.trim(kv._next)
        follow(kv, store, **options)
        assert within(held(store), scope) == within(current(kv), scope)
        assert {key: value for key, value in held(store).items() if key not in scope} == spared
        assert store.position() == StorePosition(Cursor(kv.stream, kv._next))
        if done:
            break
    assert deaths > 20
