"""Exports of a running watch: served between flushes; a failed export is raised by its requester only."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from strandline.errors import AlreadyExists, Gap, InvalidInput, WatchEnded
from strandline.followers.events import Batching
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.state import MemoryStore
from strandline.followers.watch.api import watch_applied
from strandline.followers.watch.exports import Exports
from strandline.kv.contract import KeyListing, Listed
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.testing.faulty import Crash
from tests.followers.scripted_watch import Flaky, Stage, at, held, numbered

LONG = Batching(records=100, window=1e9)


@pytest.fixture
def store(tmp_path):
    opened = AppendLogStore.open(str(tmp_path / "fold"), sync=False)
    yield opened
    opened.close()


@pytest.fixture
def exports():
    return Exports()


def imported(snapshot, tmp_path) -> tuple[Cursor | None, dict[bytes, bytes]]:
    made = AppendLogStore.import_from(snapshot.folder, str(tmp_path / f"made-{snapshot.cursor.next}"), sync=False)
    try:
        return made.position().cursor, held(made)
    finally:
        made.close()


class Asking:
    """An item of a script that requests an export when it is called."""

    def __init__(self, exports: Exports, folder) -> None:
        self.exports = exports
        self.folder = str(folder)
        self.answer: Future = Future()

    def __call__(self) -> None:
        self.answer = self.exports.request(self.folder)


def test_an_export_is_served_after_a_flush_and_its_cursor_is_exactly_what_its_data_holds(store, exports, tmp_path):
    asking = Asking(exports, tmp_path / "snapshot")
    stage = Stage(store=store, exports=exports, batching=LONG)

    def check():
        assert asking.answer.done()
        assert stage.keys == [[b"k0", b"k1"]]
        assert stage.reports == [2]

    stage.script = iter([numbered(0, 2), asking, check, numbered(2, 3)])
    assert stage.run() == at(5)
    snapshot = asking.answer.result(0)
    assert snapshot.cursor == at(2)
    assert imported(snapshot, tmp_path) == (at(2), {b"k0": b"0", b"k1": b"1"})


def test_exports_of_a_store_that_changes_all_the_time_are_each_of_one_moment(store, exports, tmp_path):
    stage = Stage(store=store, exports=exports, batching=Batching(records=10, window=1.0))
    asked = [Asking(exports, tmp_path / f"snapshot-{number}") for number in range(4)]
    chunks = (numbered(first, 7) for first in itertools.count(step=7))
    stage.script = itertools.chain.from_iterable((next(chunks), asking, next(chunks)) for asking in asked)
    stage.run()
    for asking in asked:
        snapshot = asking.answer.result(0)
        expected = {b"k%d" % version: b"%d" % version for version in range(snapshot.cursor.next)}
        assert imported(snapshot, tmp_path) == (snapshot.cursor, expected)


def test_an_occupied_destination_fails_the_request_only_and_the_watch_continues(store, exports, tmp_path):
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "here").write_bytes(b"already")
    refused, served = Asking(exports, tmp_path / "occupied"), Asking(exports, tmp_path / "free")
    stage = Stage(numbered(0, 1), refused, None, numbered(1, 1), served, None, numbered(2, 1))
    assert stage.run(store=store, exports=exports) == at(3)
    with pytest.raises(AlreadyExists):
        refused.answer.result(0)
    assert served.answer.result(0).cursor == at(2)


def test_any_failure_of_an_export_is_the_requesters(exports, tmp_path):
    asking = Asking(exports, tmp_path / "snapshot")
    stage = Stage(numbered(0, 1), asking, None, numbered(1, 1))
    assert stage.run(store=MemoryStore(), exports=exports) == at(2)  # it has no files to export
    with pytest.raises(InvalidInput, match="AppendLogStore"):
        asking.answer.result(0)


def test_without_a_store_an_export_is_an_error_to_the_requester(exports, tmp_path):
    asking = Asking(exports, tmp_path / "snapshot")
    stage = Stage(numbered(0, 1), asking, None, numbered(1, 1))
    assert stage.run(exports=exports) == at(2)
    with pytest.raises(InvalidInput, match="no store"):
        asking.answer.result(0)


def test_a_requester_that_left_is_ignored(store, exports, tmp_path):
    left, served = Asking(exports, tmp_path / "left"), Asking(exports, tmp_path / "served")

    def leave():
        left()
        assert left.answer.cancel()

    stage = Stage(numbered(0, 1), leave, None, served, None)
    assert stage.run(store=store, exports=exports) == at(1)
    assert not (tmp_path / "left").exists()
    assert served.answer.result(0).cursor == at(1)


def test_closed_exports_take_no_more_requests_serve_what_was_asked_and_the_watch_continues(store, exports, tmp_path):
    asking = Asking(exports, tmp_path / "snapshot")
    stage = Stage(store=store, exports=exports)

    def close():
        asking()
        exports.close()
        with pytest.raises(InvalidInput, match="closed"):
            exports.request(str(tmp_path / "late"))

    stage.script = iter([numbered(0, 1), close, None, numbered(1, 1)])
    assert stage.run() == at(2)
    assert asking.answer.result(0).cursor == at(1)


def test_exports_close_with_their_block():
    with Exports() as exports:
        pass
    with pytest.raises(InvalidInput, match="closed"):
        exports.request("anywhere")


@pytest.mark.parametrize("end", ["stop", "error", "death"])
def test_requests_that_are_pending_when_the_watch_ends_fail(store, exports, tmp_path, end):
    asking = Asking(exports, tmp_path / "snapshot")
    left = Asking(exports, tmp_path / "left")
    stage = Stage(store=store, exports=exports)

    def finish():
        asking()
        left()
        left.answer.cancel()
        if end == "stop":
            stage.stop.set()
            return None
        return Gap("lost") if end == "error" else Crash("dead")

    stage.script = iter([numbered(0, 1), finish])
    if end == "stop":
        assert stage.run() == at(1)
    else:
        with pytest.raises(Gap if end == "error" else Crash):
            stage.run()
    with pytest.raises(WatchEnded, match="request it again"):
        asking.answer.result(0)
    with pytest.raises(CancelledError):
        left.answer.result(0)
    assert not (tmp_path / "snapshot").exists()


def test_an_export_request_to_a_watch_that_cannot_begin_fails(exports, tmp_path):
    answer = exports.request(str(tmp_path / "snapshot"))
    with pytest.raises(InvalidInput, match="ahead"):
        Stage(store=MemoryStore(), exports=exports).run(resume=at(3))
    with pytest.raises(WatchEnded):
        answer.result(0)


def test_the_request_fails_even_if_the_stream_cannot_be_closed(exports, tmp_path):
    class Stuck(Stage):
        def close(self):
            raise RuntimeError("stuck")

    stage = Stuck(exports=exports)
    asking = Asking(exports, tmp_path / "snapshot")

    def finish():
        asking()
        stage.stop.set()

    stage.script = iter([finish])
    with pytest.raises(RuntimeError, match="stuck"):
        stage.run()
    with pytest.raises(WatchEnded):
        asking.answer.result(0)


def test_a_requester_does_not_wait_forever_for_a_watch_that_died_while_it_served(exports, tmp_path):
    class Deadly(Flaky):
        def export_to(self, folder):
            raise Crash("within the export")

    asking = Asking(exports, tmp_path / "snapshot")
    with pytest.raises(Crash):
        Stage(numbered(0, 1), asking, None).run(store=Deadly(MemoryStore()), exports=exports)
    with pytest.raises(WatchEnded):
        asking.answer.result(0)


def test_an_export_during_a_resync_waits_for_its_end(store, exports, tmp_path):
    store.apply(numbered(0, 3).table(), since=at(0), upto=at(3))
    asking = Asking(exports, tmp_path / "snapshot")

    class Reader:
        def listing(self, scope):
            return KeyListing(frozenset({b"k1"}))

    stage = Stage(expired=True, store=store, exports=exports, reader=Reader())

    def check():
        assert not asking.answer.done()

    stage.script = iter([asking, numbered(7, 1), check, Listed(at(9)), None])
    stage.run()
    snapshot = asking.answer.result(0)
    assert snapshot.cursor == at(9)
    assert imported(snapshot, tmp_path) == (at(9), {b"k7": b"7"})


def test_an_export_waits_for_a_store_that_fails_so_that_it_holds_all_that_was_applied(store, exports, tmp_path):
    asking = Asking(exports, tmp_path / "snapshot")
    stage = Stage(store=Flaky(store, "before", "before"), exports=exports)

    def check():
        assert not asking.answer.done()

    stage.script = iter([numbered(0, 2), asking, check, *[None] * 10])
    stage.run()
    assert asking.answer.result(0).cursor == at(2)
    assert stage.reports == [2]


def test_a_flood_of_updates_does_not_starve_an_export(store, exports, tmp_path):
    answers = []

    def apply(batch):
        if not answers:
            answers.append(exports.request(str(tmp_path / "snapshot")))
            answers[0].add_done_callback(lambda _: stage.stop.set())

    stage = Stage(store=store, exports=exports)
    stage.script = (numbered(first, 256) for first in itertools.count(step=256))
    assert stage.run(apply) == at(100)  # the export comes before the next is batched
    assert answers[0].result(0).cursor == at(100)


def test_a_flood_of_requests_does_not_starve_receiving(exports):
    asked = itertools.count()

    def ask(_=None):
        if next(asked) < 1000:
            exports.request("anywhere").add_done_callback(ask)

    ask()
    stage = Stage(*(numbered(version, 1) for version in range(5)), exports=exports)
    assert stage.run() == at(5)
    assert next(asked) < 20


def test_requests_come_from_other_threads_while_the_watch_waits_for_changes(store, exports, tmp_path):
    kv, stop, reported = MemoryKeyValue(), threading.Event(), threading.Event()
    kv.put("a", b"1")
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(
            watch_applied,
            kv,
            lambda _: None,
            store=store,
            exports=exports,
            stop=stop,
            on_applied=lambda _: reported.set(),
        )
        try:
            assert reported.wait(120)
            snapshot = exports.request(str(tmp_path / "snapshot")).result(120)
        finally:
            stop.set()
        assert watching.result(120) == snapshot.cursor == Cursor(kv.stream, 1)
    assert imported(snapshot, tmp_path)[1] == {b"a": b"1"}
