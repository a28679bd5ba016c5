"""``sl.spark.follow``: a table in step with its log, one writer of a position, and errors that say what they are."""

from __future__ import annotations

import resource
import shutil
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import (
    CorruptData,
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    NullKey,
    StrandlineError,
)
from strandline.model.cursor import Cursor
from strandline.model.records import Op
from strandline.spark import Following, follow
from tests.spark.datasource.test_batch import damaged
from tests.spark.helpers import (
    RowsSink,
    append,
    appended_rows,
    batch_files,
    contents,
    delete,
    expected_rows,
    latest_rows,
    move_floor,
    new_log,
    numbered,
    put,
    truth,
)

NOW = {"availableNow": True}


def run(spark, log, sink, **options) -> Following:
    """One run over all that is there now, to its end."""

    following = follow(spark, log, sink, trigger=NOW, **{"place": "executors", **options})
    assert following.await_termination(600), "it goes on and on"
    return following


@pytest.fixture
def log(tmp_path):
    return new_log(tmp_path)


@pytest.fixture
def table(tmp_path) -> Path:
    return tmp_path / "table"


# --- what the table holds --------------------------------------------------------------------------------------------


def test_a_follower_that_goes_on_ends_where_the_log_was_sealed(spark, log, table):
    append(log, numbered(0, 10))
    trigger = {"processingTime": "100 milliseconds"}
    with follow(spark, log, sl.DeltaSink(str(table)), slot="s", trigger=trigger, place="executors") as following:
        append(log, numbered(10, 10))
        end = log.seal()
        assert following.await_termination(600), "it goes on and on"
    assert following.cursor() == end
    assert log.slots.get("s").position == 20
    assert latest_rows(table) == truth(numbered(0, 20))


def test_a_table_of_the_latest_values_equals_a_dictionary(spark, log, table):
    changes = [*numbered(0, 60), put(b"empty", None), put(b"gone", b"1"), delete(b"gone"), delete(b"never")]
    append(log, changes[:25])
    append(log, changes[25:])
    run(spark, log, sl.DeltaSink(str(table)), slot="s")
    assert latest_rows(table) == truth(changes)
    more = [put(b"gone", b"back"), (b"k1", None, Op.PURGE), *numbered(62, 30)]
    append(log, more)
    following = run(spark, log, sl.DeltaSink(str(table)), slot="s")
    assert latest_rows(table) == truth([*changes, *more])
    assert following.cursor() == log.end()
    assert following.exception() is None
    assert not following.active


def test_a_table_of_all_changes_holds_each_exactly_once(spark, log, table):
    changes = [*numbered(0, 40), (None, b"without key"), (None, None)]
    append(log, changes[:17])
    append(log, changes[17:])
    run(spark, log, sl.DeltaSink(str(table), mode="append"), options={"maxBatchesPerTrigger": "1"})
    run(spark, log, sl.DeltaSink(str(table), mode="append"))
    assert appended_rows(table) == expected_rows(changes)


def test_headers_and_times_reach_the_table(spark, log, table):
    append(log, [put(b"k", b"v")], headers=[[("a", b"1"), ("b", None)]])
    run(spark, log, sl.DeltaSink(str(table)))
    (row,) = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    assert row["headers"] == [("a", b"1"), ("b", None)]
    (record,) = next(log.read()).to_pylist()
    assert row["timestamp"] == record["timestamp"]


def test_a_record_without_key_is_refused_with_its_offset_and_nothing_moves(spark, log, table):
    append(log, numbered(0, 10))
    sink = sl.DeltaSink(str(table))
    run(spark, log, sink, slot="s")
    append(log, [put(b"a", b"1"), (None, b"first"), (None, b"second")])
    following = follow(spark, log, sink, slot="s", trigger=NOW)
    with pytest.raises(NullKey, match="offset 11 has no key"):
        following.await_termination(600)
    assert isinstance(following.exception(), NullKey)
    assert sink.cursor(log.log_id).next == log.slots.get("s").position == 10
    assert latest_rows(table) == truth(numbered(0, 10))


def test_an_empty_log_gives_an_empty_table_with_a_cursor(spark, log, table):
    following = run(spark, log, sl.DeltaSink(str(table)), slot="s")
    assert following.cursor() == Cursor(log.log_id, 0)
    assert latest_rows(table) == {}


def test_a_newcomer_may_begin_with_what_comes_from_now_on(spark, log, table):
    append(log, numbered(0, 10))
    sink = sl.DeltaSink(str(table), mode="append")
    run(spark, log, sink, start="now", slot="s")
    append(log, numbered(10, 5))
    run(spark, log, sink, start="now", slot="s")
    assert [row[0] for row in appended_rows(table)] == [10, 11, 12, 13, 14]


def test_a_log_is_followed_while_it_grows(spark, log, table):
    append(log, numbered(0, 5))
    sink = sl.DeltaSink(str(table))
    reached = threading.Event()

    def watch(step: str) -> None:
        if step == "advanced" and log.slots.get("s").position == 15:
            reached.set()

    with follow(spark, log.url, sink, slot="s", trigger={"processingTime": "100 milliseconds"}, on_step=watch) as f:
        append(log, numbered(5, 10))
        assert reached.wait(600)
        assert f.active
    assert not f.active
    assert f.exception() is None
    assert latest_rows(table) == truth(numbered(0, 15))
    assert f.await_termination(1)


# --- slots -------------------------------------------------------------------------------------------------------


def test_the_slot_pins_first_and_is_advanced_to_what_the_sink_has_stored(spark, log, table):
    append(log, numbered(0, 10))
    positions = {}
    sink = sl.DeltaSink(str(table))
    run(spark, log, sink, slot="s", on_step=lambda step: positions.update({step: log.slots.get("s").position}))
    assert positions == {"planned": 0, "written": 0, "committed": 0, "advanced": 10}
    assert log.slots.floor() == 10


def test_each_run_is_a_new_holder(spark, log, table):
    append(log, numbered(0, 3))
    holders = set()
    for epoch in (1, 2):
        run(spark, log, sl.DeltaSink(str(table)), slot="s")
        assert log.slots.get("s").epoch == epoch
        holders.add(log.slots.get("s").holder)
    assert len(holders) == 2


def test_following_without_a_slot_touches_nothing_of_the_log(spark, log, table, tmp_path):
    append(log, numbered(0, 10))
    log.slots.create("someone-else", 3)
    before = contents(tmp_path / "log")
    run(spark, log, sl.DeltaSink(str(table)))
    assert contents(tmp_path / "log") == before


# --- one writer of a position ----------------------------------------------------------------------------------------


def test_a_driver_that_wakes_up_after_a_newer_one_is_fenced_and_changes_nothing(spark, log, table):
    append(log, numbered(0, 10))
    sink = sl.DeltaSink(str(table))
    versions = []

    def sleep_through_a_newer_driver(step: str) -> None:
        if step == "written" and not versions:
            run(spark, log, sl.DeltaSink(str(table)), slot="s")
            versions.append(DeltaTable(str(table)).version())

    stale = follow(spark, log, sink, slot="s", trigger=NOW, on_step=sleep_through_a_newer_driver)
    with pytest.raises(Fenced, match="held by"):
        stale.await_termination(600)
    assert isinstance(stale.exception(), Fenced)
    assert DeltaTable(str(table)).version() == versions[0]
    assert latest_rows(table) == truth(numbered(0, 10))
    assert log.slots.get("s").position == 10


@pytest.mark.matrix
def test_of_two_drivers_that_commit_at_once_the_table_refuses_one(spark, log, table):
    append(log, numbered(0, 10))

    class Slow(sl.DeltaSink):
        """Another driver does the same work between this one's look at the table and its commit."""

        raced = False

        def begin(self, *, since, upto, tasks):
            transaction = super().begin(since=since, upto=upto, tasks=tasks)
            if not self.raced:
                self.raced = True
                run(spark, log, sl.DeltaSink(str(table), mode="append"))
            return transaction

    slow = follow(spark, log, Slow(str(table), mode="append"), trigger=NOW)
    with pytest.raises(Fenced):
        slow.await_termination(600)
    assert appended_rows(table) == expected_rows(numbered(0, 10))


# --- what cannot be followed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "kind"), [(damaged, CorruptData), pytest.param(Path.unlink, NotFound, marks=pytest.mark.slow)]
)
def test_a_harmed_batch_is_named_and_leaves_every_cursor_where_it_was(spark, log, table, harm, kind):
    append(log, numbered(0, 10))
    sink = sl.DeltaSink(str(table))
    run(spark, log, sink, slot="s")
    append(log, numbered(10, 10))
    victim = batch_files(log)[1]
    whole = victim.read_bytes()
    harm(victim)
    following = follow(spark, log, sink, slot="s", trigger=NOW)
    with pytest.raises(kind) as caught:
        following.await_termination(600)
    assert str(victim) in str(caught.value)
    assert sink.cursor(log.log_id).next == log.slots.get("s").position == 10
    victim.write_bytes(whole)
    run(spark, log, sink, slot="s")
    assert latest_rows(table) == truth(numbered(0, 20))


def test_a_sink_below_the_retained_offsets_has_to_bootstrap(spark, log, table):
    append(log, numbered(0, 10))
    sink = sl.DeltaSink(str(table))
    run(spark, log, sink)
    append(log, numbered(10, 10))
    move_floor(log, 15)
    with pytest.raises(CursorExpired):
        follow(spark, log, sink, trigger=NOW)


def test_a_table_of_another_log_is_refused(spark, log, table, tmp_path):
    append(log, numbered(0, 3))
    run(spark, log, sl.DeltaSink(str(table)))
    with pytest.raises(Diverged):
        follow(spark, new_log(tmp_path, "other"), sl.DeltaSink(str(table)), trigger=NOW)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"options": {"failOnDataLoss": "false"}}, "failOnDataLoss=false is refused"),
        ({"options": {"startingOffset": "5"}}, "its own cursor"),
        ({"options": {"maxBytesPerTriger": "5"}}, "did you mean"),
        ({"start": "somewhere"}, "start is 'beginning', 'retained', 'now'"),
    ],
)
def test_a_start_that_would_make_a_wrong_table_is_refused_at_once(spark, log, wrong, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        follow(spark, log, RowsSink(), trigger=NOW, **wrong)


def test_a_start_in_another_log_is_refused(spark, log):
    with pytest.raises(StrandlineError):
        follow(spark, log, RowsSink(), trigger=NOW, start=Cursor(uuid4(), 0))


def test_a_log_in_memory_is_refused(spark):
    with pytest.raises(InvalidInput):
        follow(spark, sl.open("memory://follow-me", create=True), RowsSink(), trigger=NOW)
    with pytest.raises(InvalidInput):
        follow(spark, sl.log.MemoryLog(), RowsSink(), trigger=NOW)


def test_the_users_settings_stay_what_they_are(spark, log):
    append(log, numbered(0, 10))
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    seen = []
    spark.conf.set(name, "11")
    try:
        run(spark, log, RowsSink(), on_step=lambda _: seen.append(spark.conf.get(name)))
        assert set(seen) == {"11"}
    finally:
        spark.conf.set(name, before)


# --- a table that others changed, and a follower that is refused ---------------------------------------------------


def test_a_restored_table_is_diverged_and_repaired_on_request(spark, log, table):
    append(log, numbered(0, 10))
    run(spark, log, sl.DeltaSink(str(table)), slot="s")
    append(log, numbered(10, 10))
    run(spark, log, sl.DeltaSink(str(table)), slot="s")
    DeltaTable(str(table)).restore(1)
    append(log, numbered(20, 10))
    with pytest.raises(Diverged, match="RESTORE to 1"):
        follow(spark, log, sl.DeltaSink(str(table)), slot="s", trigger=NOW)
    assert log.slots.get("s").position == 20
    run(spark, log, sl.DeltaSink(str(table)), slot="s", repair=True)
    assert latest_rows(table) == truth(numbered(0, 30))


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda table: DeltaTable(str(table)).restore(0)])
def test_a_table_that_is_removed_or_restored_while_it_is_followed_ends_the_query(spark, log, table, harm):
    append(log, numbered(0, 10))
    append(log, numbered(10, 10))
    done = []

    def meanwhile(step: str) -> None:
        if step == "advanced" and not done:
            done.append(step)
            harm(table)

    one = {"maxBatchesPerTrigger": "1"}
    following = follow(spark, log, sl.DeltaSink(str(table)), slot="s", trigger=NOW, options=one, on_step=meanwhile)
    with pytest.raises(Diverged):
        following.await_termination(600)
    assert log.slots.get("s").position == 10
    assert not table.exists() or latest_rows(table) == {}


def test_a_newcomer_that_is_refused_leaves_neither_a_table_nor_a_slot(spark, log, table):
    append(log, [put(b"a", b"1"), (None, b"without key")])
    following = follow(spark, log, sl.DeltaSink(str(table)), slot="s", trigger=NOW)
    with pytest.raises(NullKey):
        following.await_termination(600)
    assert log.slots.list() == []
    assert not table.exists()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"trigger": {"sometimes": True}}, "trigger is one of"),
        ({"trigger": {"availableNow": True, "once": True}}, "trigger is one of"),
        ({"trigger": {"availableNow": False}}, "trigger is one of"),
        ({"trigger": {"processingTime": -1}}, "trigger is one of"),
        ({"trigger": {"continuous": "1 second"}}, "trigger is one of"),
        ({"trigger": {"processingTime": "x\x1b[31m"}}, r"processingTime is .* not 'x\\x1b"),
        ({"trigger": {"processingTime": "-1 second"}}, "processingTime is "),
        ({"place": "cluster"}, "place is 'auto', 'driver' or 'executors'"),
        ({"options": {"partitions": "none"}}, "partitions is a whole number"),
        ({"options": {"maxBytesPerTrigger": "-1"}}, "maxBytesPerTrigger is a whole number"),
    ],
)
def test_a_wrong_option_leaves_neither_a_table_nor_a_slot(spark, log, table, wrong, sentence):
    append(log, numbered(0, 3))
    with pytest.raises(InvalidInput, match=sentence):
        follow(spark, log, sl.DeltaSink(str(table)), slot="s", **{"trigger": NOW, **wrong})
    assert log.slots.list() == []
    assert not table.exists()


def test_the_beginning_of_a_trimmed_log_is_expired_and_not_its_middle(spark, log, table):
    append(log, numbered(0, 10))
    append(log, numbered(10, 10))
    move_floor(log, 10)
    with pytest.raises(CursorExpired, match="from 'retained'"):
        follow(spark, log, sl.DeltaSink(str(table), mode="append"), slot="s", trigger=NOW)
    assert log.slots.list() == []
    run(spark, log, sl.DeltaSink(str(table), mode="append"), slot="s", start="retained")
    assert [row[0] for row in appended_rows(table)] == list(range(10, 20))


def _copied_in_little_memory(rows: pa.Table) -> pa.Table:
    """Copies the rows while the worker may take only 64 MiB more of its address space than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    try:
        copies = bytearray(64 * rows.nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(copies) == 64 * rows.nbytes
    return rows.select(["_offset", "value"])


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_range_for_which_a_worker_has_too_little_memory_is_tried_again_in_smaller_pieces(spark, log, table, caplog):
    for first in range(0, 32_000, 2000):
        append(log, [put(b"%d" % number, b"-" * 100) for number in range(first, first + 2000)])
    sink = sl.DeltaSink(table, mode="append", transform=_copied_in_little_memory)
    run(spark, log, sink)
    assert "did not fit into memory, and are tried again in smaller pieces" in caplog.text
    assert sorted(sink.rows().column("_offset").to_pylist()) == list(range(32_000))
    assert len(DeltaTable(table).history()) > 2, "several commits"
