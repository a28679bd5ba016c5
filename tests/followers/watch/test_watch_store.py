"""``watch_applied`` with a store that fails: nothing is lost, doubled or out of order, and no cursor runs ahead."""

from __future__ import annotations

import itertools

import pytest

from strandline.errors import Gap, NullKey, StorageError, TransientStorageError
from strandline.followers.events import Batching
from strandline.followers.stores.state import MemoryStore
from strandline.kv.contract import Ended
from strandline.model.keyed import Updates
from strandline.model.records import Op
from strandline.model.sink import StorePosition
from tests.followers.scripted_watch import Flaky, Stage, at, given, held, numbered, put


def test_a_transient_store_failure_leaves_no_hole_under_an_advancing_cursor():
    store = Flaky(MemoryStore(), "before", "well", "before", "before", "after", "well", "before")
    stage = Stage(batching=Batching(records=2, window=1.0), store=store)
    stage.script = itertools.chain.from_iterable((numbered(version, 2), 0.03) for version in range(0, 40, 2))

    def whole(cursor):
        stage.report(cursor)
        assert store.position().cursor == cursor
        assert held(store) == {b"k%d" % version: b"%d" % version for version in range(cursor.next)}

    assert stage.run(on_applied=whole) == at(40)
    assert stage.reports == sorted(set(stage.reports))
    assert stage.reports[-1] == 40


def test_apply_is_not_called_again_for_a_batch_that_the_store_did_not_take():
    store = Flaky(MemoryStore(), "before", "before", "before")
    stage = Stage(numbered(0, 2), 1.0, *[None] * 10, store=store)
    assert stage.run() == at(2)
    assert stage.keys == [[b"k0", b"k1"]]
    assert store.writes == ["apply before"] * 3 + ["apply well"]
    assert stage.reports == [2]


def test_a_failing_store_keeps_its_batch_in_front_of_the_next():
    inner = MemoryStore()
    store = Flaky(inner, "before")
    stage = Stage(store=store, batching=Batching(records=1, window=1.0))
    stage.script = iter([given(put(0, b"a", b"old")), given(put(1, b"a", b"new")), 0.1])
    assert stage.run() == at(2)
    assert stage.log == ["open", "apply", "apply", "report"]  # both applied, and reported when both were stored
    assert held(inner) == {b"a": b"new"}


def test_the_store_is_tried_again_even_if_nothing_new_arrives_and_ever_later():
    stage = Stage(on_applied=lambda _: stage.stop.set())
    stage.script = itertools.chain([numbered(0, 1), 1.0], itertools.repeat(None))
    store = Flaky(MemoryStore(), *["before"] * 6, stage=stage)
    assert stage.run(store=store) == at(1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(store.times)]
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64], abs=0.005)


def test_sixteen_failures_in_a_row_end_the_watch_with_an_error_that_says_why():
    store = Flaky(MemoryStore(), *["before"] * 16)
    stage = Stage(store=store)
    stage.script = itertools.chain([numbered(0, 1), 1.0], itertools.repeat(None))
    with pytest.raises(StorageError, match=r"failed 16 times in a row.*failed before it wrote.*resume") as caught:
        stage.run()
    assert isinstance(caught.value.__cause__, TransientStorageError)
    assert len(store.writes) == 16
    assert len(stage.batches) == 1
    assert stage.reports == []
    assert stage.closed == 1


def test_fifteen_failures_in_a_row_do_not_end_it():
    store = Flaky(MemoryStore(), *["before"] * 15, "well", *["before"] * 15)
    stage = Stage(store=store)
    stage.script = itertools.chain(
        [numbered(0, 1), 1.0], itertools.repeat(None, 1000), [numbered(1, 1), 1.0], itertools.repeat(None, 1000)
    )
    assert stage.run() == at(2)
    assert stage.reports == [1, 2]
    assert len(store.writes) == 32


def test_sixteen_failures_end_it_also_while_updates_keep_coming():
    store = Flaky(MemoryStore(), *["before"] * 100)
    stage = Stage(store=store, batching=Batching(records=1, window=1.0))
    stage.script = itertools.chain.from_iterable((numbered(version, 1), 0.01) for version in itertools.count())
    with pytest.raises(StorageError, match="16 times"):
        stage.run()
    assert len(stage.batches) <= 16  # it does not run ahead of its store without an end
    assert stage.reports == []


def test_a_store_that_took_a_batch_and_lost_the_answer_does_not_take_it_twice():
    inner = MemoryStore()
    store = Flaky(inner, "after", "well", "after", "after")
    stage = Stage(store=store, batching=Batching(records=1, window=1.0))
    rows = [put(0, b"a", b"1"), put(1, b"a", b"2"), put(2, b"b", b"1"), put(3, b"a", b"3")]
    stage.script = itertools.chain.from_iterable((given(row), 0.1) for row in rows)
    taken = []
    take = inner._write

    def spy(records, after):
        taken.extend(records.column("offset").to_pylist())
        take(records, after)

    inner._write = spy
    assert stage.run() == at(4)
    assert taken == [0, 1, 2, 3]
    assert held(inner) == {b"a": b"3", b"b": b"1"}


def test_an_answer_lost_before_more_came_does_not_bring_an_older_value_of_unknown_version_back():
    inner = MemoryStore()
    stage = Stage(store=Flaky(inner, "after"), batching=Batching(records=2, window=1.0))
    stage.script = iter([given(put(None, b"a", b"old"), put(5, b"a", b"new")), given(put(6, b"b"), put(7, b"c")), 0.1])
    assert stage.run() == at(8)
    assert held(inner) == {b"a": b"new", b"b": b"v", b"c": b"v"}


def test_at_stop_a_failing_store_means_that_its_own_cursor_is_returned():
    store = Flaky(MemoryStore(), "well", *["before"] * 9)
    stage = Stage(numbered(0, 1), 1.0, numbered(1, 1), store=store)
    assert stage.run() == at(1)
    assert stage.reports == [1]
    assert len(store.writes) == 2


def test_at_stop_a_store_that_took_it_and_lost_the_answer_says_so_itself():
    store = Flaky(MemoryStore(), "well", "after")
    stage = Stage(numbered(0, 1), 1.0, numbered(1, 1), store=store)
    assert stage.run() == at(2)
    assert stage.reports == [1]  # never more than what is known to be taken


def test_at_the_end_of_the_stream_a_store_that_fails_for_a_while_gets_everything():
    store = Flaky(MemoryStore(), *["before"] * 15)
    stage = Stage(numbered(0, 3), Ended(), store=store)
    assert stage.run() == at(3)
    assert store.position().cursor == at(3)
    assert stage.reports == [3]


def test_at_the_end_of_the_stream_a_store_that_fails_for_good_is_an_error():
    stage = Stage(numbered(0, 3), Ended(), store=Flaky(MemoryStore(), *["before"] * 16))
    with pytest.raises(StorageError, match="16 times"):
        stage.run()


def test_a_store_that_refuses_is_not_asked_again():
    store = Flaky(MemoryStore())
    bare = Updates([Op.PUT], [None], [b"1"], [0], at(1))
    with pytest.raises(NullKey):
        Stage(bare, store=store).run()
    assert len(store.writes) == 1


def test_a_store_that_forgot_what_it_had_taken_ends_the_watch_and_gets_no_hole():
    store = MemoryStore()
    store.apply(numbered(0, 2).table(), since=at(0), upto=at(2))
    stage = Stage(store=store)

    def forget():
        store._position = StorePosition(at(1))

    stage.script = iter([numbered(2, 1), 1.0, forget, numbered(3, 1), 1.0])
    with pytest.raises(Gap):
        stage.run()
    assert store.position() == StorePosition(at(1))
    assert stage.reports == [3]


def test_a_store_whose_failure_is_no_error_of_ours_is_tried_again_too():
    store = MemoryStore()
    failures = iter([OSError("no such device"), None])
    write = store._write

    def fail_once(records, after):
        if error := next(failures):
            raise error
        write(records, after)

    store._write = fail_once
    stage = Stage(numbered(0, 1), 1.0, *[None] * 5, store=store)
    assert stage.run() == at(1)
    assert held(store) == {b"k0": b"0"}
