"""``watch_applied``: batches, cursors, parsing, where it resumes and how it ends."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strandline.errors import Gap, InvalidInput, NotReady, StorageError
from strandline.followers.events import Batching
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import watch_applied
from strandline.followers.watch.run import WATCHING
from strandline.kv.contract import Ended, Listed
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import Prefix, Update, Updates
from strandline.model.records import Op
from strandline.testing.faulty import Crash
from tests.followers.scripted_watch import Flaky, Stage, at, current, follow, given, held, numbered, put

LONG = Batching(records=100, window=1e9)
"""Batches that only something else than their window flushes."""


# --- when it flushes -------------------------------------------------------------------------------------------


def test_a_watch_batches_for_ten_milliseconds_a_hundred_updates_and_queues_256():
    assert (WATCHING.window, WATCHING.records, WATCHING.queue) == (0.01, 100, 256)


def test_a_watch_with_a_batch_size_keeps_its_window_of_ten_milliseconds():
    stage = Stage(batching=Batching(records=4))

    def check():
        assert stage.keys == [[b"k0"]]

    stage.script = iter([numbered(0, 1), 0.01, check, 60])
    assert stage.run() == at(1)


def test_the_window_since_the_first_update_flushes():
    stage = Stage(numbered(0, 1), 0.5, numbered(1, 1), 0.4, lambda: check([]), 0.1, lambda: check([[b"k0", b"k1"]]))

    def check(keys):
        assert stage.keys == keys

    assert stage.run() == at(2)
    assert stage.keys == [[b"k0", b"k1"]]
    assert stage.reports == [2]


def test_each_batch_has_a_window_of_its_own():
    stage = Stage(numbered(0, 1), 1.0, 0.9, numbered(1, 1), 0.9, lambda: check(1), 0.1, lambda: check(2))

    def check(batches):
        assert len(stage.batches) == batches

    stage.run()
    assert stage.keys == [[b"k0"], [b"k1"]]


def test_a_full_batch_flushes_and_the_rest_of_what_came_goes_into_the_next():
    stage = Stage(batching=LONG)

    def check():
        assert [len(batch) for batch in stage.batches] == [100, 100]
        assert stage.reports == [100, 200]

    stage.script = iter([numbered(0, 250), check])
    assert stage.run() == at(250)
    assert [len(batch) for batch in stage.batches] == [100, 100, 50]
    assert stage.reports == [100, 200, 250]


def test_no_more_is_asked_for_than_the_queue_holds():
    stage = Stage(numbered(0, 7), batching=Batching(records=3, window=1.0, queue=7))
    stage.run()
    assert {most for most, _ in stage.limits} == {7}


def test_a_stop_flushes():
    stage = Stage(numbered(0, 3), batching=LONG)  # the script stops the watch at its end
    assert stage.run() == at(3)
    assert stage.keys == [[b"k0", b"k1", b"k2"]]
    assert stage.reports == [3]


def test_the_end_of_the_stream_flushes():
    stage = Stage(numbered(0, 3), Ended(), batching=LONG)
    assert stage.run() == at(3)
    assert stage.keys == [[b"k0", b"k1", b"k2"]]
    assert not stage.stop.is_set()


def test_a_stop_abandons_what_was_only_received():
    stage = Stage(numbered(0, 250), batching=LONG)

    def apply(batch):
        stage.apply(batch)
        stage.stop.set()

    assert stage.run(apply) == at(100)
    assert [len(batch) for batch in stage.batches] == [100]
    assert stage.reports == [100]


def test_a_stop_that_was_set_before_it_began_opens_nothing():
    stage = Stage(numbered(0, 3))
    stage.stop.set()
    assert stage.run(resume=at(7)) == at(7)
    assert stage.opened == []


def test_changes_out_of_scope_move_the_cursor_and_are_not_applied():
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a.1", b"1")
    reports = []
    watched = Prefix("a.")
    follow(kv, store, scope=watched)
    for number in range(5):
        kv.put("b.1", b"%d" % number)
    cursor = follow(kv, store, scope=watched, on_applied=reports.append)
    assert cursor == Cursor(kv.stream, 6)
    assert reports == [cursor]
    assert held(store) == {b"a.1": b"1"}


# --- order, and the cursor that is visible when ----------------------------------------------------------------


def test_apply_then_store_then_the_cursor_then_on_applied():
    store = Flaky(MemoryStore())
    stage = Stage(numbered(0, 2), numbered(2, 2), store=store, batching=Batching(records=2, window=1.0))
    store.stage = stage
    stage.run()
    assert stage.log == ["open", *["apply", "store well", "report"] * 2]


def test_the_cursor_visible_during_apply_is_that_of_the_batch_before():
    store = MemoryStore()
    stage = Stage(numbered(0, 1), numbered(1, 1), numbered(2, 1), store=store, batching=Batching(records=1))
    seen = []

    def apply(batch):
        stage.apply(batch)
        seen.append((store.position().cursor, held(store), list(stage.reports)))

    stage.run(apply)
    assert seen == [
        (None, {}, []),
        (at(1), {b"k0": b"0"}, [1]),
        (at(2), {b"k0": b"0", b"k1": b"1"}, [1, 2]),
    ]


def test_when_on_applied_gets_a_cursor_the_store_has_it_already():
    store = MemoryStore()
    stage = Stage(numbered(0, 250), store=store)
    seen = []
    stage.run(on_applied=lambda cursor: seen.append((cursor, store.position().cursor, len(held(store)))))
    assert seen == [(at(count), at(count), count) for count in (100, 200, 250)]


def test_raw_updates_and_cursor_reach_the_store_whatever_parse_made_of_them():
    store = MemoryStore()
    stage = Stage(numbered(0, 3), store=store, parse=lambda update: update.key.decode())
    stage.run()
    assert stage.batches == [["k0", "k1", "k2"]]
    assert held(store) == {b"k0": b"0", b"k1": b"1", b"k2": b"2"}


def test_deletes_and_purges_are_applied_and_taken_out_of_the_store():
    kv, store, batches = MemoryKeyValue(), MemoryStore(), []
    for key in ("a", "b", "c"):
        kv.put(key, b"1")
    follow(kv, store)
    kv.delete("a")
    kv.purge("b")
    kv.end()
    watch_applied(kv, batches.extend, store=store)
    assert batches == [Update(Op.DELETE, b"a", None, 3), Update(Op.PURGE, b"b", None, 4)]
    assert held(store) == {b"c": b"1"}


def test_without_parse_a_batch_is_the_updates_themselves():
    stage = Stage(given(put(0, b"a", b"1"), put(1, b"b", b"")))
    stage.run()
    assert stage.batches == [[put(0, b"a", b"1"), put(1, b"b", b"")]]


# --- parse -----------------------------------------------------------------------------------------------------


def reject_odd(update):
    return None if int(update.value) % 2 else update


def test_rejected_updates_count_for_the_cursor():
    stage = Stage(numbered(0, 4), parse=reject_odd)
    assert stage.run() == at(4)
    assert stage.keys == [[b"k0", b"k2"]]
    assert stage.reports == [4]


def test_a_batch_of_only_rejected_updates_applies_nothing_and_still_advances_within_the_window():
    store = MemoryStore()
    stage = Stage(parse=lambda _: None, store=store)

    def check():
        assert stage.reports == [2]
        assert store.position().cursor == at(2)

    stage.script = iter([numbered(0, 2), 1.0, check])
    assert stage.run() == at(2)
    assert stage.batches == []
    assert stage.reports == [2]


def test_a_batch_is_full_of_raw_updates_even_if_most_of_them_are_rejected():
    stage = Stage(parse=reject_odd, batching=LONG)

    def check():
        assert [len(batch) for batch in stage.batches] == [50, 50]

    stage.script = iter([numbered(0, 200), check])
    stage.run()
    assert stage.reports == [100, 200]


def test_values_that_are_false_but_not_none_are_applied():
    stage = Stage(numbered(0, 2), parse=lambda _: 0)
    stage.run()
    assert stage.batches == [[0, 0]]


def test_parse_raising_ends_the_watch_and_the_cursor_stays():
    store = MemoryStore()
    stage = Stage(
        numbered(0, 1), 1.0, numbered(1, 3), 1.0, parse=lambda update: 1 // (2 - int(update.value)), store=store
    )
    with pytest.raises(ZeroDivisionError):
        stage.run()
    assert stage.reports == [1]
    assert store.position().cursor == at(1)
    assert stage.batches == [[0]]
    assert stage.closed == 1


def test_a_dead_letter_hook_takes_what_parse_raised_and_the_update_counts_as_rejected():
    letters = []
    stage = Stage(
        numbered(0, 4),
        parse=lambda update: 10 // (2 - int(update.value)),
        dead_letter=lambda update, error: letters.append((update.key, type(error))),
    )
    assert stage.run() == at(4)
    assert stage.batches == [[5, 10, -10]]
    assert letters == [(b"k2", ZeroDivisionError)]


def test_a_dead_letter_hook_that_raises_ends_the_watch():
    def refuse(update, error):
        raise OSError("no room for letters")

    stage = Stage(numbered(0, 1), parse=lambda _: 1 // 0, dead_letter=refuse)
    with pytest.raises(OSError, match="no room"):
        stage.run()
    assert stage.reports == []


def test_a_dead_letter_hook_may_be_a_coroutine_function():
    letters = []

    async def take(update, error):
        letters.append(update.key)

    stage = Stage(numbered(0, 1), parse=lambda _: 1 // 0, dead_letter=take)
    assert stage.run() == at(1)
    assert letters == [b"k0"]


def test_parse_sees_each_update_once_even_if_the_store_fails():
    seen = []
    stage = Stage(numbered(0, 3), 1.0, *[None] * 5, store=Flaky(MemoryStore(), "before", "before"))
    stage.run(parse=lambda update: seen.append(update.key) or update)
    assert seen == [b"k0", b"k1", b"k2"]


# --- apply raises ----------------------------------------------------------------------------------------------


def test_apply_raising_ends_the_watch_and_the_cursor_stays():
    store = MemoryStore()
    stage = Stage(numbered(0, 1), 1.0, numbered(1, 1), 1.0, numbered(2, 1), store=store)

    def apply(batch):
        if batch[0].key == b"k1":
            raise RuntimeError("cannot")
        stage.apply(batch)

    with pytest.raises(RuntimeError, match="cannot"):
        stage.run(apply)
    assert store.position().cursor == at(1)
    assert held(store) == {b"k0": b"0"}
    assert stage.reports == [1]
    assert stage.closed == 1


def test_after_apply_raised_a_new_watch_gets_the_same_batch_again():
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a", b"1")
    with pytest.raises(RuntimeError), ThreadPoolExecutor(1) as pool:
        pool.submit(watch_applied, kv, raising(RuntimeError("cannot")), store=store).result(120)
    assert store.position().cursor is None
    batches = []
    kv.end()
    watch_applied(kv, batches.extend, store=store)
    assert [update.key for update in batches] == [b"a"]


def raising(error):
    def apply(_):
        raise error

    return apply


def test_on_applied_raising_ends_the_watch_with_the_cursor_where_the_store_has_it():
    store = MemoryStore()
    stage = Stage(numbered(0, 1), store=store, on_applied=raising(RuntimeError("deaf")))
    with pytest.raises(RuntimeError, match="deaf"):
        stage.run()
    assert store.position().cursor == at(1)


# --- where it resumes ------------------------------------------------------------------------------------------


def test_a_watch_resumes_at_the_stores_cursor_by_default():
    store = MemoryStore()
    store.apply(numbered(0, 5).table(), since=at(0), upto=at(5))
    stage = Stage(store=store)
    assert stage.run() == at(5)
    assert stage.opened == [at(5)]


def test_only_what_was_missed_is_delivered():
    kv, store, batches = MemoryKeyValue(), MemoryStore(), []
    for number in range(1000):
        kv.put(b"k%d" % number, b"1")
    follow(kv, store)
    kv.put("k5", b"2")
    kv.end()
    watch_applied(kv, batches.extend, store=store)
    assert batches == [put(1000, b"k5", b"2")]


def test_a_newcomer_without_a_cursor_asks_for_everything():
    for options in ({}, {"store": MemoryStore()}, {"resume": None}):
        stage = Stage(**options)
        assert stage.run() is None
        assert stage.opened == [None]


def test_a_resume_ahead_of_the_store_is_an_error_and_opens_nothing():
    store = MemoryStore()
    store.apply(numbered(0, 5).table(), since=at(0), upto=at(5))
    stage = Stage(store=store)
    with pytest.raises(InvalidInput, match="ahead of the store"):
        stage.run(resume=at(6))
    with pytest.raises(InvalidInput, match="ahead of the store"):
        Stage(store=MemoryStore()).run(resume=at(0))
    assert stage.opened == []


def test_a_resume_of_another_stream_than_the_stores_is_an_error():
    store = MemoryStore()
    store.apply(numbered(0, 5).table(), since=at(0), upto=at(5))
    with pytest.raises(InvalidInput, match="ahead of the store"):
        Stage(store=store).run(resume=Cursor(MemoryKeyValue().stream, 1))


def test_a_resume_below_the_store_applies_again_and_changes_nothing_in_the_store():
    kv, store, batches = MemoryKeyValue(), MemoryStore(), []
    for number in range(5):
        kv.put("a", b"%d" % number)
    follow(kv, store)
    kv.put("b", b"1")
    kv.end()
    cursor = watch_applied(
        kv, batches.extend, store=store, resume=Cursor(kv.stream, 3)
    )  # fmt: skip
    assert [update.version for update in batches] == [3, 4, 5]
    assert cursor == store.position().cursor == Cursor(kv.stream, 6)
    assert held(store) == {b"a": b"4", b"b": b"1"}


def test_a_store_in_the_middle_of_a_resync_needs_a_reader():
    store = MemoryStore()
    store.begin_resync(at(0).log_id)
    stage = Stage(store=store)
    with pytest.raises(NotReady, match="reader"):
        stage.run()
    assert stage.opened == []


# --- nothing, unknown versions, and the ends -------------------------------------------------------------------


@pytest.mark.parametrize("end", ["stop", "stream"])
def test_if_nothing_was_received_the_resume_cursor_is_returned_and_on_applied_stays_silent(end):
    stage = Stage(None, None, *([Ended()] if end == "stream" else []))
    assert stage.run(resume=at(7)) == at(7)
    assert stage.reports == []
    assert stage.batches == []


def test_a_full_watch_that_found_nothing_returns_no_cursor_and_reports_nothing():
    stage = Stage(Listed(at(9)), 5.0)
    assert stage.run(resume=None) is None
    assert stage.reports == []


def test_the_end_of_the_current_values_moves_the_cursor_to_where_the_stream_continues():
    stage = Stage(numbered(3, 1), Listed(at(9)))
    assert stage.run(resume=None) == at(9)
    assert stage.reports == [9]


def test_unknown_versions_are_applied_and_never_move_a_cursor():
    store = MemoryStore()
    store.apply(numbered(0, 5).table(), since=at(0), upto=at(5))
    stage = Stage(given(put(None, b"x"), since=5), 1.0, given(put(None, b"y"), since=5), store=store)
    assert stage.run() == at(5)
    assert stage.keys == [[b"x"], [b"y"]]
    assert stage.reports == []
    assert store.position().cursor == at(5)


def test_a_stream_that_gives_updates_without_a_cursor_is_refused():
    with pytest.raises(InvalidInput, match="cursor"):
        Stage(Updates.removals([b"a"])).run()


@pytest.mark.parametrize("error", [Gap("lost"), StorageError("cut off"), RuntimeError("a bug"), Crash("dead")])
@pytest.mark.parametrize("stopping", [False, True])
def test_the_watchs_own_error_is_never_taken_for_a_normal_end(error, stopping):
    stage = Stage()

    def fail():
        if stopping:
            stage.stop.set()
        return error

    stage.script = iter([numbered(0, 1), fail])
    with pytest.raises(type(error)):
        stage.run()
    assert stage.closed == 1


@pytest.mark.parametrize("make_store", [lambda: None, MemoryStore])
@pytest.mark.parametrize("error", [Gap("lost"), StorageError("cut off"), RuntimeError("a bug")])
def test_an_error_of_the_stream_ends_the_watch_after_the_batch_that_was_open(error, make_store):
    store = make_store()
    stage = Stage(numbered(0, 2), numbered(2, 1), error, numbered(3, 1), batching=LONG, store=store)
    with pytest.raises(type(error), match=str(error)):
        stage.run()
    assert stage.keys == [[b"k0", b"k1", b"k2"]]
    assert stage.reports == [3]
    assert stage.log == ["open", "apply", "report"]
    assert store is None or store.position().cursor == at(3)


def test_updates_without_a_cursor_are_refused_after_the_batch_that_was_open():
    stage = Stage(numbered(0, 2), Updates.removals([b"a"]), batching=LONG)
    with pytest.raises(InvalidInput, match="cursor"):
        stage.run()
    assert (stage.keys, stage.reports) == ([[b"k0", b"k1"]], [2])


def test_a_store_that_fails_when_the_stream_has_failed_is_tried_once_and_the_streams_error_is_raised():
    store = Flaky(MemoryStore(), *["before"] * 99)
    stage = Stage(numbered(0, 2), Gap("lost"), batching=LONG, store=store)
    with pytest.raises(Gap, match="lost"):
        stage.run()
    assert store.writes == ["apply before"]
    assert (stage.keys, stage.reports, store.position().cursor) == ([[b"k0", b"k1"]], [], None)


def test_an_apply_that_raises_after_an_error_of_the_stream_leaves_the_cursor():
    store = MemoryStore()
    stage = Stage(numbered(0, 2), StorageError("cut off"), batching=LONG, store=store)
    with pytest.raises(RuntimeError, match="cannot"):
        stage.run(raising(RuntimeError("cannot")))
    assert (stage.reports, store.position().cursor) == ([], None)


def test_a_crash_of_the_stream_applies_nothing_more():
    stage = Stage(numbered(0, 2), Crash("dead"), batching=LONG)
    with pytest.raises(Crash):
        stage.run()
    assert stage.keys == []


def test_nothing_past_a_gap_is_applied():
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a", b"1")
    batches = []

    def apply(batch):
        batches.extend(batch)
        if len(batches) == 1:
            kv.put("a", b"2")
            kv.put("a", b"3")
            kv.trim(3)
            kv.put("a", b"4")

    with pytest.raises(Gap):
        watch_applied(kv, apply, store=store)
    assert [update.value for update in batches] == [b"1"]
    assert store.position().cursor == Cursor(kv.stream, 1)


def test_an_error_at_the_stop_of_apply_is_raised_and_not_swallowed():
    stage = Stage(numbered(0, 1))  # flushed by the stop
    with pytest.raises(RuntimeError, match="cannot"):
        stage.run(raising(RuntimeError("cannot")))


# --- a flood starves nobody ------------------------------------------------------------------------------------


def endless(stage, step=0.0):
    """A source that always has more changes; each take advances the clock a little."""
    for first in itertools.count(step=256):
        stage.clock.advance(step)
        yield numbered(first, 256)


def test_a_flood_does_not_starve_a_stop():
    stage = Stage()
    stage.script = endless(stage)

    def apply(batch):
        stage.apply(batch)
        if len(stage.batches) == 10:
            stage.stop.set()

    assert stage.run(apply) == at(1000)
    assert len(stage.batches) == 10


def test_a_flood_does_not_starve_the_window():
    stage = Stage(batching=Batching(records=10**9, window=1.0))
    stage.script = endless(stage, 0.25)

    def apply(batch):
        stage.apply(batch)
        if len(stage.batches) == 3:
            stage.stop.set()

    stage.run(apply)
    assert [len(batch) // 256 for batch in stage.batches] == [5, 5, 5]


def test_a_flood_does_not_starve_a_store_that_has_to_be_tried_again():
    store = Flaky(MemoryStore(), "before")
    stage = Stage(store=store, on_applied=lambda _: stage.stop.set())
    stage.script = endless(stage, 0.01)
    stage.run()
    assert store.writes[:2] == ["apply before", "apply well"]
    assert len(stage.batches) < 16


# --- real threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [Prefix(""), Prefix("a"), Prefix("a", "ab", "b", "a")], ids=str)
def test_a_store_follows_a_key_value_store_that_several_threads_change_and_every_update_comes_once(scope):
    kv, store, stop = MemoryKeyValue(), MemoryStore(), threading.Event()
    versions, reports = [], []
    caught_up = threading.Event()
    target = threading.Event()

    def on_applied(cursor):
        reports.append(cursor.next)
        if target.is_set() and cursor.next == kv._next:
            caught_up.set()

    def write(name):
        for number in range(300):
            key = f"{name}{number % 7}"
            if number % 5 == 4:
                kv.delete(key)
            else:
                kv.put(key, b"%d" % number)

    with ThreadPoolExecutor(4) as pool:
        watching = pool.submit(
            watch_applied,
            kv,
            lambda batch: versions.extend(update.version for update in batch),
            scope=scope,
            store=store,
            reader=kv,
            on_applied=on_applied,
            stop=stop,
        )
        try:
            for writer in [pool.submit(write, name) for name in ("a", "ab", "c")]:
                writer.result(120)
            target.set()
            kv.put("a-last", b"1")
            assert caught_up.wait(120)
        finally:
            stop.set()
        assert watching.result(120) == Cursor(kv.stream, 901)
    assert versions == sorted(set(versions))
    assert reports == sorted(set(reports))
    assert held(store) == {key: value for key, value in current(kv).items() if key in scope}


def test_scopes_that_overlap_deliver_once():
    kv, batches = MemoryKeyValue(), []
    for key in ("a", "ab", "abc", "b"):
        kv.put(key, b"1")
    kv.end()
    watch_applied(kv, batches.extend, scope=Prefix("a", "ab", "abc"))
    assert [update.key for update in batches] == [b"a", b"ab", b"abc"]


def test_a_request_to_stop_takes_effect_while_no_change_arrives():
    stop, opened = threading.Event(), threading.Event()

    class Quiet(MemoryKeyValue):
        def watch_from(self, scope, cursor):
            opened.set()
            return super().watch_from(scope, cursor)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch_applied, Quiet(), lambda _: None, stop=stop)
        assert opened.wait(120)
        stop.set()
        assert watching.result(120) is None


def test_no_wait_for_changes_is_so_long_that_a_request_would_be_missed():
    stage = Stage(None, None, numbered(0, 1), None, batching=LONG)
    stage.run()
    assert max(seconds for _, seconds in stage.limits) == 0.05


def test_a_normal_watch_warns_of_nothing(caplog):
    kv, store = MemoryKeyValue(), MemoryStore()
    kv.put("a", b"1")
    with caplog.at_level(logging.INFO):
        follow(kv, store)
        follow(kv, store)
    assert caplog.records == []
