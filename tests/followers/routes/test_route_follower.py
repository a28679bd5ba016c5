"""Following a route: one read for all tables, a cursor for each, and no table that stops another."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import BadRecord, CursorExpired, Diverged, Fenced, InvalidInput, TransientStorageError
from strandline.followers.events import Batching
from strandline.followers.routes.follower import RouteFollower
from strandline.followers.routes.member import RoutedTable
from strandline.followers.routes.names import NamesKeeper
from strandline.followers.routes.progress import RouteOptions
from strandline.model.addresses import check_plain_name
from strandline.storage.env import SYSTEM
from strandline.tables.routes.route import UNROUTED, as_route
from tests.spark.helpers import move_floor

VALUES = sl.values.Json(pa.schema({"x": pa.int64()}))


def event(table: str | None, number: int) -> bytes:
    return json.dumps({"source": {"table": table}, "x": number}).encode()


def grow(log, *tables: str | None) -> None:
    """One batch with a record for each of these tables; ``x`` is the offset."""
    first = log.end().next
    with log.producer() as producer:
        for number, table in enumerate(tables, first):
            producer.append(key=b"%d" % (number % 5), value=event(table, number))


@pytest.fixture
def log(tmp_path):
    return sl.open(str(tmp_path / "log"), create=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tables"


def table(folder: Path, name: str, mode: str = "append", **options) -> sl.DeltaSink:
    sink = sl.DeltaSink(str(folder / name), mode=mode, value=VALUES, **options)
    return sink.taking(sl.tables.where(field="source.table", equals=name))


def tables(folder: Path, names: str = "abc") -> list[sl.DeltaSink]:
    return [table(folder, name) for name in names]


def rule(folder: Path, **options) -> sl.tables.Route:
    def sink(name: str) -> sl.DeltaSink:
        return sl.DeltaSink(str(folder / name), mode="append", value=VALUES)

    return sl.tables.by(field="source.table", sink=sink, **options)


def held(folder: Path, name: str) -> list[int]:
    return sorted(DeltaTable(str(folder / name)).to_pyarrow_table()["x"].to_pylist())


def offsets(log, name: str | None) -> list[int]:
    """The offsets of the records of a table, by the log."""
    rows = [row for batch in log.read() for row in batch.to_pylist()]
    return [row["offset"] for row in rows if json.loads(row["value"])["source"]["table"] == name]


def follower(log, route, *, upto=None, on_step=lambda _: None, slot=None, pace=1.0, **options) -> RouteFollower:
    last = log.end().next if upto == "end" else upto
    chosen = RouteOptions(slot=slot, holder="test", batching=Batching(window=pace, **options), upto=last)
    return RouteFollower(log, as_route(route), chosen, SYSTEM, on_step=on_step)


def position(log, slot: str) -> int:
    return next(one.position for one in log.slots.list() if one.name == slot)


# --- a list of tables ------------------------------------------------------------------------------------------------


def test_each_table_of_a_list_holds_its_records_and_the_slot_follows(log, folder):
    grow(log, "a", "b", "a", "c")
    sl.follow(log, tables(folder), "s", upto="end")
    grow(log, "c", "c", "b")
    end = sl.follow(log, tables(folder), "s", upto="end")
    assert {name: held(folder, name) for name in "abc"} == {name: offsets(log, name) for name in "abc"}
    assert [sink.cursor(log.log_id).next for sink in tables(folder)] == [7, 7, 7]
    assert (end.next, position(log, "s")) == (7, 7)


def test_the_log_is_read_once_for_all_tables(log, folder, monkeypatch):
    for _ in range(5):
        grow(log, "a", "b", "c")
    reads = []
    fetch = type(log.plan(log.cursor_at(0))[0]).fetch
    monkeypatch.setattr(
        type(log.plan(log.cursor_at(0))[0]), "fetch", lambda span, *more: reads.append(span.first) or fetch(span, *more)
    )
    sl.follow(log, tables(folder), upto="end")
    assert sorted(reads) == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("mode", ["latest", "marked", "append", "history"])
def test_every_kind_of_table_equals_what_the_log_says(log, folder, mode):
    for _ in range(6):
        grow(log, *"aababbcab")
    sl.follow(log, [table(folder, name, mode) for name in "abc"], upto=20)
    sl.follow(log, [table(folder, name, mode) for name in "abc"], upto="end")
    assert all(sl.tables.verify(table(folder, name, mode), log).is_clean for name in "abc")


def test_tables_of_a_database_and_stores_are_tables_of_a_route_too(log, folder, tmp_path):
    def sinks():
        sql = sl.SqliteSink(str(tmp_path / "db"), table="b", value=VALUES, mode="append")
        return [table(folder, "a"), sql.taking(sl.tables.where(field="source.table", equals="b"))]

    store = sl.followers.MemoryStore()
    grow(log, *"abab")
    sl.follow(log, [*sinks(), store], upto="end")
    grow(log, *"bbab")
    sl.follow(log, [*sinks(), store], upto="end")
    assert held(folder, "a") == offsets(log, "a")
    assert sinks()[1].size().rows == len(offsets(log, "b"))
    assert store.cursor(log.log_id).next == 8
    assert json.loads(store.get(b"2"))["x"] == 7


@pytest.mark.matrix
def test_tables_of_postgres_and_many_of_one_sqlite_file_are_tables_of_a_route(log, tmp_path, postgres):
    """Tables of one SQLite file are committed one after the other: each waits for the transaction of the one before."""
    dsn = f"host={postgres.host} port={postgres.port} user={postgres.user} dbname=postgres"

    def sink(name: str) -> sl.SqliteSink | sl.PostgresSink:
        made = (
            sl.PostgresSink(dsn, table=f"routed_{name}", value=VALUES, mode="append")
            if name < "c"
            else sl.SqliteSink(str(tmp_path / "db"), table=name, value=VALUES, mode="append")
        )
        return made.taking(sl.tables.where(field="source.table", equals=name))

    names = "abcdefghijkl"
    for _ in range(3):
        grow(log, *names, *names)
        sl.follow(log, [sink(name) for name in names], upto="end")
    for name in names:
        assert sink(name).size().rows == 6
        assert sl.tables.verify(sink(name), log).is_clean
        assert sink(name).cursor(log.log_id) == log.end()


def test_a_record_that_no_table_takes_is_refused_before_anything_of_its_range_is_applied(log, folder):
    grow(log, *"ab")
    sl.follow(log, tables(folder, "ab"), "s", upto="end")
    grow(log, *"abq", None)
    with pytest.raises(BadRecord, match=r"2 records are for no table of the route .first: offset 4, key b'4'"):
        sl.follow(log, tables(folder, "ab"), "s", upto="end")
    assert (held(folder, "a"), held(folder, "b"), position(log, "s")) == ([0], [1], 2)


def test_unrouted_records_are_skipped_or_kept_and_counted(log, folder):
    grow(log, *"abq", None)
    run = follower(log, sl.tables.route(tables(folder, "ab"), unrouted="skip"), upto="end")
    run.run(None)
    assert run.progress().unrouted == 2
    rest = sl.DeltaSink(str(folder / "rest"), mode="append", value=VALUES)
    run = follower(log, sl.tables.route(tables(folder, "ab"), unrouted=rest), upto="end")
    run.run(None)
    assert held(folder, "rest") == [2, 3]
    assert rest.cursor(log.log_id).next == 4


def test_a_table_that_is_added_reads_from_the_beginning_and_the_slot_waits_for_it(log, folder):
    grow(log, *"abcc")
    sl.follow(log, sl.tables.route(tables(folder, "ab"), unrouted="skip"), "s", upto="end")
    grow(log, *"abc")
    sl.follow(log, tables(folder, "abc"), "s", upto="end")
    assert held(folder, "c") == [2, 3, 6]
    assert position(log, "s") == 7


def test_a_table_that_is_dropped_stops_pinning(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder, "abc"), "s", upto="end")
    shutil.rmtree(folder / "c")
    grow(log, *"ab")
    sl.follow(log, tables(folder, "ab"), "s", upto="end")
    assert position(log, "s") == 5


# --- tables that fail, are slow, or were changed ---------------------------------------------------------------------


def failing(sink, monkeypatch, error: Exception, times: int = 10**6):
    """The next commits of a sink fail."""
    begin, left = sink.begin, [error] * times

    def begun(**range_):
        if left:
            raise left.pop()
        return begin(**range_)

    monkeypatch.setattr(sink, "begin", begun)
    return sink


def test_a_table_that_fails_falls_behind_alone_and_its_error_is_raised_at_the_end(log, folder, monkeypatch):
    grow(log, *"abc")
    sl.follow(log, tables(folder), "s", upto="end")
    grow(log, *"abcabc")
    sinks = tables(folder)
    failing(sinks[1], monkeypatch, Diverged("The table was changed."))
    with pytest.raises(Diverged) as raised:
        sl.follow(log, sinks, "s", upto="end")
    assert raised.value.__notes__ == ["The table b of the route is at offset 3: The table was changed."]
    assert (held(folder, "a"), held(folder, "b"), held(folder, "c")) == ([0, 3, 6], [1], [2, 5, 8])
    assert position(log, "s") == 3  # of the slowest
    sl.follow(log, tables(folder), "s", upto="end")
    assert (held(folder, "b"), position(log, "s")) == ([1, 4, 7], 9)


def test_a_table_that_fails_for_a_while_catches_up_by_itself(log, folder, monkeypatch):
    grow(log, *"abc")
    sinks = tables(folder)
    failing(sinks[1], monkeypatch, TransientStorageError("The store is away."), times=2)
    run = follower(log, sinks, upto="end")
    run.run(None)
    assert held(folder, "b") == [1]
    assert {one.state for one in run.progress().tables} == {"following"}


def test_a_restored_table_stops_no_other_and_goes_on_when_it_is_repaired(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    DeltaTable(str(folder / "b")).restore(1)
    grow(log, *"abc")
    with pytest.raises(Diverged, match="RESTORE"):
        sl.follow(log, tables(folder), upto="end")
    assert (held(folder, "a"), held(folder, "c")) == ([0, 3, 6], [2, 5, 8])
    sl.follow(log, tables(folder), upto="end", repair=True)
    assert held(folder, "b") == [1, 4, 7]


def test_a_table_is_tried_again_while_the_others_are_followed_and_comes_back_after_its_repair(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    DeltaTable(str(folder / "b")).delete()
    grow(log, *"abc")
    run = follower(log, tables(folder), pace=0.01)
    with followed(run) as thread:
        wait_for(lambda: held(folder, "c") == [2, 5] and "failing" in states(run), thread)
        sl.tables.rebuild(table(folder, "b"), log, upto=3)
        wait_for(lambda: held(folder, "b") == [1, 4] and states(run) == {"following"}, thread)


def states(run: RouteFollower) -> set[str]:
    return {one.state for one in run.progress().tables}


def wait_for(condition, thread: threading.Thread) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert thread.is_alive(), "the follower ended"
        assert time.monotonic() < deadline, "it takes too long"
        threading.Event().wait(0.02)


def test_a_slow_table_is_left_behind_and_comes_back(log, folder, monkeypatch):
    monkeypatch.setattr("strandline.followers.routes.lane.SLOW_SECONDS", 0.05)
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    grow(log, *"abc")
    sinks, may_go = tables(folder), threading.Event()
    begin = sinks[1].begin
    monkeypatch.setattr(sinks[1], "begin", lambda **range_: (may_go.wait(60), begin(**range_))[1])
    run, stop = follower(log, sinks, pace=0.01), threading.Event()
    thread = threading.Thread(target=run.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: held(folder, "a") == [0, 3], thread)
        grow(log, *"abc")
        wait_for(lambda: held(folder, "a") == [0, 3, 6] and held(folder, "c") == [2, 5, 8], thread)
        assert held(folder, "b") == [1]
        may_go.set()
        wait_for(lambda: held(folder, "b") == [1, 4, 7] and states(run) == {"following"}, thread)
    finally:
        may_go.set()
        stop.set()
        thread.join()


def test_many_slow_tables_keep_no_other_from_its_commits(log, folder, monkeypatch):
    monkeypatch.setattr("strandline.followers.routes.lane.SLOW_SECONDS", 0.05)
    may_go = threading.Event()

    class Slow(Odd):
        def apply(self, records, *, since, upto):
            may_go.wait(60)
            super().apply(records, since=since, upto=upto)

    sinks = {name: Slow() if name < "t" else Odd() for name in "abcdefghijklmnopqrstuv"}
    route = sl.tables.by(field="source.table", sink=sinks.__getitem__, names=str(folder))
    grow(log, *sinks)
    run = follower(log, route, slot="s", pace=0.01)
    with followed(run) as thread:
        try:
            wait_for(lambda: [sinks[name].offsets for name in "tuv"] == [[19], [20], [21]], thread)
            grow(log, "t")
            wait_for(lambda: sinks["t"].offsets == [19, 22], thread)
            assert sinks["a"].offsets == []
        finally:
            may_go.set()
        wait_for(lambda: all(sink.offsets for sink in sinks.values()), thread)
        wait_for(lambda: states(run) == {"following"}, thread)


def test_of_two_followers_with_slots_of_their_own_one_ends(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), "x", upto="end")
    grow(log, *"abc")
    first = follower(log, tables(folder), slot="x", pace=0.01)
    ends: list[Exception | None] = []
    thread = threading.Thread(target=lambda: ends.append(error_of(lambda: first.run(None))))
    thread.start()
    wait_for(lambda: held(folder, "b") == [1, 4], thread)
    for _ in range(2):
        grow(log, *"abc")
        sl.follow(log, tables(folder), "y", upto="end")
    thread.join(60)
    assert isinstance(ends[0], Fenced)
    assert states(first) == {"stopped"}
    assert held(folder, "b") == [1, 4, 7, 10]


def error_of(call) -> Exception | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def test_a_table_that_another_follower_takes_over_stops_alone(log, folder):
    grow(log, *"abc")
    steps = []

    def step(name):
        steps.append(name)
        if steps.count("committed") == 1 and name == "committed":
            grow(log, *"abc")
            sl.follow(log, table(folder, "b"), upto="end")
            grow(log, *"abc")

    run = follower(log, tables(folder), upto=9, on_step=step, batches=1, bytes=1)
    with pytest.raises(Fenced):
        run.run(None)
    assert (held(folder, "a"), held(folder, "b"), held(folder, "c")) == ([0, 3, 6], [1, 4], [2, 5, 8])
    assert {one.name: one.state for one in run.progress().tables}["b"] == "stopped"


def test_a_second_follower_of_the_route_fences_the_first(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), "s", upto="end")
    first = follower(log, tables(folder), slot="s", upto=6)
    first.open()
    second = RouteFollower(log, as_route(tables(folder)), RouteOptions(slot="s", holder="second"), SYSTEM)
    second.open()
    grow(log, *"abc")
    with pytest.raises(Fenced, match="held by 'second'"):
        first.run(None)
    assert held(folder, "a") == [0]


def test_a_table_that_the_former_follower_committed_to_last_is_taken_over(log, folder, monkeypatch):
    grow(log, *"abc")
    sl.follow(log, tables(folder), "s", upto="end")
    grow(log, *"abc")
    second = RouteFollower(log, as_route(tables(folder)), RouteOptions(slot="s", holder="second"), SYSTEM)
    sinks = tables(folder)
    begin = sinks[1].begin  # called once the first has seen that it holds the slot
    monkeypatch.setattr(sinks[1], "begin", lambda **range_: (second.open(), begin(**range_))[1])
    with pytest.raises(Fenced, match="held by 'second'"):
        sl.follow(log, sinks, "s", upto="end")
    assert held(folder, "b") == [1, 4]
    grow(log, *"abc")
    with followed(second) as thread:
        wait_for(lambda: [held(folder, name)[2:] for name in "abc"] == [[6], [7], [8]], thread)
        wait_for(lambda: states(second) == {"following"} and position(log, "s") == 9, thread)


def test_failures_of_the_slot_are_survived(log, folder, monkeypatch):
    grow(log, *"abc")
    run = follower(log, tables(folder), slot="s", upto="end")
    run.open()
    advance, left = run._slot.advance, [TransientStorageError("The store is away.")] * 2
    monkeypatch.setattr(run._slot, "advance", lambda to: advance(to) if not left else raised(left.pop()))
    run.run(None)
    assert (left, position(log, "s")) == ([], 3)


def test_a_log_that_cannot_be_read_when_a_table_comes_back_delays_that_table_only(log, folder, monkeypatch):
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    grow(log, *"abc")
    sinks, left = tables(folder), [TransientStorageError("The store is away.")]
    failing(sinks[1], monkeypatch, TransientStorageError("The table is away."), times=1)
    run = follower(log, sinks, upto="end")
    rejoin = run._rejoin
    monkeypatch.setattr(run, "_rejoin", lambda lane: raised(left.pop()) if left else rejoin(lane))
    run.run(None)
    assert (left, held(folder, "b"), states(run)) == ([], [1, 4], {"following"})


def raised(error: Exception) -> None:
    raise error


@contextlib.contextmanager
def followed(run: RouteFollower):
    """The follower in a thread of its own, until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=run.run, args=(stop,))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def test_a_table_that_is_removed_while_it_is_followed_is_not_made_again_in_the_middle(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), "s", upto="end")
    grow(log, *"abc")
    run = RouteFollower(
        log, as_route(tables(folder)), RouteOptions("now", slot="s", holder="x", batching=Batching(window=0.01)), SYSTEM
    )
    with followed(run) as thread:
        wait_for(lambda: held(folder, "b") == [1, 4], thread)
        shutil.move(folder / "b", folder / "aside")
        grow(log, *"abc")
        wait_for(lambda: [one.failures for one in run._members.values()] >= [0, 2, 0], thread)
        assert not (folder / "b").exists()
        assert "was removed while it was followed" in run.progress().tables[1].error
        shutil.move(folder / "aside", folder / "b")
        wait_for(lambda: held(folder, "b") == [1, 4, 7] and states(run) == {"following"}, thread)


class Odd:
    """A sink of somebody else, whose errors are not ours."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.stored, self.offsets = error, None, []

    def cursor(self, log_id):
        return self.stored

    def apply(self, records, *, since, upto):
        if self.error is not None:
            raise self.error
        self.offsets += records["offset"].to_pylist()
        self.stored = upto


def test_any_error_of_a_sink_stops_that_one_alone(log, folder):
    grow(log, *"ab")
    sinks = {"a": Odd(), "b": Odd(RuntimeError("broken"))}
    route = sl.tables.by(field="source.table", sink=sinks.__getitem__, names=str(folder))
    with pytest.raises(RuntimeError, match="broken") as raised:
        sl.follow(log, route, "s", upto="end")
    assert raised.value.__notes__ == ["The table b of the route is at offset 0: broken"]
    assert (sinks["a"].offsets, sinks["b"].offsets, position(log, "s")) == ([0], [], 0)
    sinks["b"].error = None
    sl.follow(log, route, "s", upto="end")
    assert (sinks["a"].offsets, sinks["b"].offsets, position(log, "s")) == ([0], [1], 2)


def test_few_records_that_wait_do_not_keep_their_whole_range_in_memory():
    range_ = pa.table({"offset": pa.array(range(10_000), pa.int64()), "value": pa.array([b"x" * 100] * 10_000)})
    member = RoutedTable("a", lambda: None, SYSTEM)
    before = pa.total_allocated_bytes()
    for _ in range(10):
        member.take(range_.take(pa.array(range(10_000))).slice(5, 3))
    assert pa.total_allocated_bytes() - before < 100_000
    assert member.waiting(sl.Cursor(uuid4(), 0)).rows == 30


def test_if_no_table_can_be_opened_the_error_is_raised_at_once(log, folder):
    grow(log, *"abc")
    sl.follow(log, tables(folder), upto="end")
    for name in "abc":
        DeltaTable(str(folder / name)).delete()
    with pytest.raises(Diverged):
        sl.follow(log, tables(folder))


def test_a_new_table_whose_beginning_was_trimmed_fails_alone(log, folder):
    grow(log, *"abc")
    sl.follow(log, sl.tables.route(tables(folder, "ab"), unrouted="skip"), upto="end")
    grow(log, *"abc")
    move_floor(log, 3)
    with pytest.raises(CursorExpired, match="beginning"):
        sl.follow(log, tables(folder), upto="end")
    assert held(folder, "a") == [0, 3]


# --- a rule ----------------------------------------------------------------------------------------------------------


def test_a_rule_makes_a_table_when_its_name_appears(log, folder):
    grow(log, *"aab")
    sl.follow(log, rule(folder), "s", upto="end")
    assert sorted(one.name for one in folder.iterdir()) == ["_strandline_route", "a", "b"]
    grow(log, *"bca")
    sl.follow(log, rule(folder), "s", upto="end")
    assert {name: held(folder, name) for name in "abc"} == {name: offsets(log, name) for name in "abc"}
    assert position(log, "s") == 6
    assert sl.tables.verify(sl.tables.existing(str(folder / "c"), value=VALUES), log).is_clean


def test_a_table_without_records_for_long_goes_on_although_the_log_was_trimmed(log, folder):
    grow(log, *"ab")
    sl.follow(log, rule(folder), "s", upto="end")
    grow(log, *"aaaa")
    sl.follow(log, rule(folder), "s", upto="end")
    move_floor(log, 6)
    grow(log, *"ab")
    sl.follow(log, rule(folder), "s", upto="end")
    assert held(folder, "b") == [1, 7]


def test_names_that_are_no_table_names_are_unrouted(log, folder):
    grow(log, "a", "../b", "", None, "a/b", ".hidden", "left")
    rest = sl.DeltaSink(str(folder / "rest"), mode="append", value=VALUES)
    sl.follow(log, rule(folder, unrouted=rest, without=["left"]), upto="end")
    assert held(folder, "rest") == [1, 2, 3, 4, 5, 6]
    assert sorted(one.name for one in folder.iterdir()) == ["_strandline_route", "a", "rest"]


def test_a_name_for_which_the_rule_has_no_sink_stops_no_other_table(log, folder):
    sinks = {name: sl.DeltaSink(str(folder / name), mode="append", value=VALUES) for name in "ac"}
    grow(log, *"abcab")
    with pytest.raises(InvalidInput, match="The rule has no sink for the name 'b'"):
        sl.follow(log, sl.tables.by(field="source.table", sink=sinks.__getitem__, names=str(folder)), "s", upto="end")
    assert (held(folder, "a"), held(folder, "c"), position(log, "s")) == ([0, 3], [2], 0)
    sl.follow(log, rule(folder, names=str(folder)), "s", upto="end")
    assert (held(folder, "b"), position(log, "s")) == ([1, 4], 5)


def test_a_rule_makes_a_bounded_number_of_tables(log, folder, monkeypatch):
    monkeypatch.setattr("strandline.followers.routes.follower.MOST_TABLES", 2)
    grow(log, *"abcd")

    def route():
        return rule(folder, unrouted=sl.DeltaSink(str(folder / "rest"), mode="append", value=VALUES))

    follower(log, route(), upto="end").run(None)
    grow(log, *"bcd")
    run = follower(log, route(), upto="end")
    run.run(None)
    assert (held(folder, "a"), held(folder, "b"), held(folder, "rest")) == ([0], [1, 4], [2, 3, 5, 6])
    assert sorted(one.name for one in folder.iterdir()) == ["_strandline_route", "a", "b", "rest"]
    assert run.progress().unrouted == 2


def test_names_beyond_the_most_that_there_may_be_are_refused_in_the_range_that_brings_them(log, folder, monkeypatch):
    monkeypatch.setattr("strandline.followers.routes.follower.MOST_TABLES", 2)
    grow(log, *"abcd")
    with pytest.raises(BadRecord, match="2 records are for no table"):
        sl.follow(log, rule(folder), upto="end")


def test_names_that_another_follower_stores_meanwhile_are_followed_too(log, folder):
    grow(log, "a")
    sl.follow(log, rule(folder), "s", upto="end")
    grow(log, "b")
    grow(log, "c")
    run = follower(log, rule(folder), slot="s", upto="end", batches=1)
    run.open()
    other = NamesKeeper(str(folder / "_strandline_route"), SYSTEM)
    other.opened(log.cursor_at(0), "field source.table")
    other.add(["c"], log.cursor_at(1))
    run.run(None)
    assert (held(folder, "b"), held(folder, "c"), position(log, "s")) == ([1], [2], 3)


def only(folder: Path, names: str) -> sl.tables.Route:
    """A rule that has sinks for some names only."""
    sinks = {name: sl.DeltaSink(str(folder / name), mode="append", value=VALUES) for name in names}
    return sl.tables.by(field="source.table", sink=sinks.__getitem__, names=str(folder))


def test_the_slot_is_kept_from_the_first_commit_on(log, folder):
    grow(log, *"ab")
    kept = [(0, "test", None)]
    with followed(follower(log, only(folder, "a"), slot="s", pace=0.01)) as thread:
        wait_for((folder / "a" / "_delta_log" / f"{1:020}.json").exists, thread)
        wait_for(lambda: [(one.position, one.holder, one.expires) for one in log.slots.list()] == kept, thread)


def test_a_rule_that_dies_at_its_first_commit_keeps_its_slot(log, folder):
    grow(log, *"ab")

    def step(name: str) -> None:
        if name == "committed":
            raise Killed

    with pytest.raises(Killed):
        follower(log, rule(folder), slot="s", upto="end", on_step=step).run(None)
    assert [(one.position, one.holder, one.expires) for one in log.slots.list()] == [(0, "test", None)]


@pytest.mark.parametrize("start", ["now", 4])
def test_a_route_whose_names_are_lost_does_not_start_in_the_middle(log, folder, start):
    grow(log, *"abc")
    sl.follow(log, rule(folder), "s", upto="end")
    grow(log, *"abc")
    (folder / "_strandline_route" / "names.json").unlink()
    with pytest.raises(Diverged, match=r"nothing at .*names\.json.*would skip its records"):
        sl.follow(log, rule(folder), "s", start=start, upto="end")
    assert position(log, "s") == 3
    sl.follow(log, rule(folder), "s", upto="end")
    assert ({name: held(folder, name) for name in "abc"}, position(log, "s")) == (
        {"a": [0, 3], "b": [1, 4], "c": [2, 5]},
        6,
    )


def test_a_new_rule_that_is_refused_leaves_neither_names_nor_a_slot(log, folder):
    grow(log, *"ab", None)
    with pytest.raises(BadRecord):
        sl.follow(log, rule(folder), "s", start=2, upto="end")
    assert (list(folder.rglob("*.json")), log.slots.list()) == ([], [])
    sl.follow(log, rule(folder, unrouted="skip"), "s", upto="end")
    assert (held(folder, "a"), held(folder, "b")) == ([0], [1])


def test_a_rule_that_is_older_than_the_log_begins_again_at_what_is_retained(log, folder):
    grow(log, *"ab")
    sl.follow(log, rule(folder), upto="end")
    grow(log, *"ab")
    move_floor(log, 4)
    grow(log, *"ab")
    with pytest.raises(CursorExpired):
        sl.follow(log, rule(folder), upto="end")
    for name in "ab":
        sl.tables.rebuild(sl.tables.existing(str(folder / name), value=VALUES), log, start="retained")
    sl.follow(log, rule(folder), start="retained", upto="end")
    assert (held(folder, "a"), held(folder, "b")) == ([4], [5])


@pytest.mark.matrix
def test_a_table_whose_name_is_lost_and_whose_records_may_be_trimmed_fails_alone_at_its_next_one(log, folder):
    """Nobody knows any more whether it had records among those that are gone: it is never continued behind them."""
    grow(log, *"ab")
    sl.follow(log, rule(folder), upto="end")
    grow(log, *"aa")
    move_floor(log, 4)
    grow(log, "a")
    (folder / "_strandline_route" / "names.json").unlink()
    sl.tables.rebuild(sl.tables.existing(str(folder / "a"), value=VALUES), log, start="retained")
    sl.follow(log, rule(folder), start="retained", upto="end")
    grow(log, *"ab")
    with pytest.raises(CursorExpired) as raised:
        sl.follow(log, rule(folder), start="retained", upto="end")
    assert any("b" in note for note in raised.value.__notes__)
    assert (held(folder, "a"), held(folder, "b")) == ([4, 5], [1])
    sl.tables.rebuild(sl.tables.existing(str(folder / "b"), value=VALUES), log, start="retained")
    sl.follow(log, rule(folder), start="retained", upto="end")
    assert held(folder, "b") == [6]


def test_names_are_remembered_in_the_store_of_the_tables_by_the_same_options(log, s3_url, s3_server):
    def sink(name: str) -> sl.DeltaSink:
        return sl.DeltaSink(f"{s3_url}/{name}", mode="append", value=VALUES, options=s3_server.options)

    grow(log, *"ab")
    sl.follow(log, sl.tables.by(field="source.table", sink=sink), upto="end")
    grow(log, "c")
    given = {"names": f"{s3_url}/_strandline_route", "options": s3_server.options}
    sl.follow(log, sl.tables.by(field="source.table", sink=sink, **given), upto="end")
    found = sl.tables.cut([f"{s3_url}/{name}" for name in "abc"], options=s3_server.options)
    assert (found.next, len(found.versions)) == (3, 3)


def test_a_store_of_two_names_is_refused(log, folder):
    store = sl.followers.MemoryStore()
    grow(log, *"ab")
    with pytest.raises(InvalidInput, match="the names 'a' and 'b' the same table"):
        sl.follow(log, sl.tables.by(field="source.table", sink=lambda _: store, names=str(folder)), upto="end")


def test_a_name_whose_table_is_that_of_unrouted_records_stops_no_other(log, folder):
    grow(log, "a", "rest", None, "a")

    def route(**options):
        return rule(folder, unrouted=sl.DeltaSink(str(folder / "rest"), mode="append", value=VALUES), **options)

    with pytest.raises(InvalidInput, match=r"the names '.unrouted.' and 'rest' the same table .* without a table"):
        sl.follow(log, route(), "s", upto="end")
    assert (held(folder, "a"), held(folder, "rest"), position(log, "s")) == ([0, 3], [2], 0)
    sl.follow(log, route(without=["rest"]), "s", upto="end")
    assert position(log, "s") == 4


def test_the_table_of_a_name_that_was_removed_is_built_again_from_where_it_began(log, folder):
    grow(log, *"aab")
    sl.follow(log, rule(folder), upto="end")
    grow(log, *"bba")
    shutil.rmtree(folder / "b")
    sl.follow(log, rule(folder), upto="end")
    assert held(folder, "b") == [2, 3, 4]


def test_two_followers_of_a_rule_give_a_new_name_one_table(log, folder):
    grow(log, "a")
    sl.follow(log, rule(folder), upto="end")
    grow(log, *"bb")
    one, other = follower(log, rule(folder), upto="end"), follower(log, rule(folder), upto="end")
    one.open()
    other.open()
    one.run(None)
    with contextlib.suppress(Fenced):
        other.run(None)
    sl.follow(log, rule(folder), upto="end")
    assert held(folder, "b") == [1, 2]


def test_a_rule_by_something_else_does_not_begin_where_the_former_one_was(log, folder):
    grow(log, *"ab")

    def by(**what):
        return sl.tables.by(sink=rule(folder).rule.make, unrouted="skip", **what)

    sl.follow(log, by(header="table"), upto="end")
    with pytest.raises(Diverged, match=r"by header table, not of .* by field source\.table"):
        sl.follow(log, by(field="source.table"), upto="end")
    shutil.rmtree(folder)
    sl.follow(log, by(field="source.table"), upto="end")
    assert (held(folder, "a"), held(folder, "b")) == ([0], [1])


def test_a_rule_of_another_log_is_refused(log, folder, tmp_path):
    grow(log, "a")
    sl.follow(log, rule(folder), upto="end")
    other = sl.open(str(tmp_path / "other"), create=True)
    grow(other, "a")
    with pytest.raises(Diverged, match="tables of its own"):
        sl.follow(other, rule(folder), upto="end")


# --- crashes ---------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a follower at once."""


@pytest.mark.parametrize("kill_at", range(1, 12))
def test_a_follower_that_dies_at_any_step_leaves_tables_that_the_next_one_completes(log, folder, kill_at):
    steps = []

    def step(_):
        steps.append(1)
        if len(steps) == kill_at:
            raise Killed

    rest = str(folder / "rest")

    def route():
        return rule(folder, unrouted=sl.DeltaSink(rest, mode="append", value=VALUES))

    for names in ("aab", "bc", "cad"):
        grow(log, *names, None)
        with contextlib.suppress(Killed):
            follower(log, route(), upto="end", on_step=step, slot="s", batches=1).run(None)
    sl.follow(log, route(), "s", upto="end")
    assert {name: held(folder, name) for name in "abcd"} == {name: offsets(log, name) for name in "abcd"}
    assert held(folder, "rest") == offsets(log, None)
    assert position(log, "s") == log.end().next


def test_an_empty_log_makes_the_tables_and_pins_nothing_that_is_not_needed(log, folder):
    sl.follow(log, tables(folder), "s", upto="end")
    grow(log, *"abc")
    sl.follow(log, tables(folder), "s", upto="end")
    assert held(folder, "b") == [1]
    assert position(log, "s") == 3


def test_progress_says_who_is_where(log, folder, monkeypatch):
    grow(log, *"aab", None)
    sinks = tables(folder, "ab")
    failing(sinks[1], monkeypatch, Diverged("The table was changed."))
    run = follower(log, sl.tables.route(sinks, unrouted="skip"), upto="end")
    with pytest.raises(Diverged):
        run.run(None)
    a, b = run.progress().tables
    assert (a.name, a.state, a.next, a.records, a.commits) == ("a", "following", 4, 2, 1)
    assert (b.name, b.state, b.next, b.records, b.error) == ("b", "failing", 0, 0, "The table was changed.")
    assert run.progress().line() == ("2 records in 1 commits to 2 tables (1 failing: b at 0), read up to 4, 1 unrouted")


def test_the_name_for_unrouted_records_is_no_plain_name():
    with pytest.raises(InvalidInput):
        check_plain_name(UNROUTED, "table")
