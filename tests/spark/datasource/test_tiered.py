"""Logs in two tiers: the data source, ``sl.spark.read`` and ``sl.spark.follow`` know no seam, whatever moves across."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame

import strandline as sl
from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound
from strandline.log.object import ObjectLog
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op
from strandline.model.retention import Consumed
from strandline.spark import failures
from strandline.spark.datasource import reading
from strandline.spark.datasource.planning import scans, spark_path
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.storage.retry import Backoff
from strandline.tier.copy.segment_files import ColdSpan, forget_tails
from strandline.tier.read.cold_reader import ColdPiece
from strandline.tier.read.tiered_log import TieredLog
from tests.matrix_cases import partly, some
from tests.servers import S3Server
from tests.spark.datasource.test_batch import load, reason
from tests.spark.helpers import (
    RowsSink,
    append,
    appended_rows,
    expected_rows,
    move_floor,
    numbered,
    put,
)
from tests.spark.pipelines.test_follow import NOW

COLD, BOTH, END = 60, 80, 110
"""Below the first only the cold tier has the records, below the second both; the last is the end of the log."""
MANY_CHANGES = numbered(0, END)


def fill(log: ObjectLog, upto: int, size: int = 10) -> None:
    for first in range(log.end().next, upto, size):
        append(log, numbered(first, size))


def copy(log: ObjectLog, *, target: int = 1_500, **settings: object) -> list[tuple[int, int]]:
    """Copy everything to the cold tier; the offsets of the segments that were made."""
    with sl.tier.tiering(log, target=target, linger=0, grace=0, **settings) as tierer:
        return [(segment.start, segment.end + 1) for segment in tierer.run_once(everything=True).copied]


def forget(log: ObjectLog) -> None:
    """Delete from the hot tier what no slot needs, the tierer's above all."""
    log.trim(grace=0)


def expire(log: ObjectLog) -> None:
    """Let the cold tier forget what no consumer needs and the hot one has forgotten, too."""
    copy(log, retention=Consumed())


def new_tiered(folder: Path) -> ObjectLog:
    log = sl.open(f"{folder}/log", create=True, retention="consumed")
    assert isinstance(log, ObjectLog)
    sl.tier.attach(log)
    return log


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """The hot half of a log in two tiers, which overlap: several segments, and batches behind them."""
    log = new_tiered(tmp_path)
    fill(log, COLD)
    assert len(copy(log)) > 2
    forget(log)
    fill(log, BOTH)
    copy(log)
    fill(log, END)
    assert log.bounds() == sl.log.Bounds(COLD, END)
    return log


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "PATIENCE", Backoff(attempts=2, base=0.0))


def everything(log: ObjectLog | str) -> pa.Table:
    """What the log holds, by its own word."""
    with sl.open(log if isinstance(log, str) else log.url) as both:
        assert isinstance(both, TieredLog)
        return pa.Table.from_batches(both.read(), READ_SCHEMA)


def rows(frame: DataFrame) -> list[dict[str, object]]:
    return frame.toArrow().sort_by("offset").to_pylist()


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


def source(log: ObjectLog, **options: str) -> StrandlineDataSource:
    return StrandlineDataSource({"path": log.url, **options})


def offsets_of(reader, partitions: Iterable[object]) -> list[int]:
    """What executors would find: each has nothing but copies."""
    copied = pickle.loads(pickle.dumps(reader))
    found = [batch for part in partitions for batch in copied.read(pickle.loads(pickle.dumps(part)))]
    return [number for batch in found for number in batch.column("offset").to_pylist()]


def segment_files(log: ObjectLog) -> list[Path]:
    return sorted(Path(unquote(log.url.removeprefix("file://"))).glob("cold/*/0/*.parquet"))


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Streams of earlier tests have no end: their threads end when the stream is collected."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def following_threads() -> list[str]:
    """Threads that follow segment events, of this test."""
    threads = [thread.name for thread in threading.enumerate() if thread not in OTHERS]
    return [name for name in threads if name.startswith("strandline-metadata")]


# --- the data source ---------------------------------------------------------------------------------------------


def test_a_batch_query_reads_both_tiers_and_each_record_once(spark, log):
    assert rows(load(spark, log)) == everything(log).to_pylist()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "places",
    partly(
        [0, COLD - 1, COLD, COLD + 1, BOTH, END],
        [0, 7, 10, COLD - 1, COLD, COLD + 1, BOTH - 1, BOTH, BOTH + 1, END],
    ),
)
def test_every_range_of_offsets_is_read_as_it_was_written(log, places):
    for first, end in itertools.combinations_with_replacement(places, 2):
        reader = source(log, startingOffset=str(first), endingOffset=str(end)).reader(SPARK_SCHEMA)
        assert offsets_of(reader, reader.partitions()) == list(range(first, end))


def test_the_earliest_offset_is_the_first_of_either_tier(log):
    assert source(log).streamReader(SPARK_SCHEMA).initialOffset()["next"] == 0
    reader = source(log, endingOffset="earliest").reader(SPARK_SCHEMA)
    assert reader.partitions() == []


def test_offsets_that_neither_tier_retains_are_refused_and_may_be_skipped(spark, log):
    log.slots.create("s", COLD + 5)
    expire(log)
    assert everything(log).column("offset")[0].as_py() == COLD
    error = reason(lambda: load(spark, log, startingOffset="3").collect())
    assert isinstance(error, CursorExpired)
    assert f"Offsets 3 to {COLD - 1} are needed" in str(error)
    with pytest.raises(CursorExpired, match=f"Offsets 3 to {COLD - 1} are needed"):
        sl.spark.read(spark, log, since=3)
    lossy = {"failOnDataLoss": "false"}
    assert offsets(load(spark, log, startingOffset="3", **lossy)) == list(range(COLD, END))
    assert offsets(sl.spark.read(spark, log, since=3, options=lossy)) == list(range(COLD, END))


def test_many_small_row_groups_are_the_work_of_few_tasks(tmp_path):
    log = new_tiered(tmp_path)
    dice = random.Random(1)
    for _ in range(4):
        append(log, [put(b"k", dice.randbytes(1000)) for _ in range(1000)])
    copy(log, target=1 << 20)
    forget(log)
    reader = source(log, partitions="2").reader(SPARK_SCHEMA)
    partitions = reader.partitions()
    spans = [span for part in partitions for span in part.spans]
    assert all(isinstance(span, ColdSpan) for span in spans)
    assert len(spans) > 50
    assert len(partitions) == 2
    assert offsets_of(reader, partitions) == list(range(4000))


def test_records_that_move_to_the_cold_tier_after_planning_are_read_there(log):
    reader = source(log, startingOffset="70").reader(SPARK_SCHEMA)
    partitions = reader.partitions()
    assert not any(isinstance(span, ColdSpan) for part in partitions for span in part.spans)
    copy(log)
    forget(log)
    assert log.bounds().first == END
    assert offsets_of(reader, partitions) == list(range(70, END))
    assert following_threads() == []


def test_a_segment_that_expires_after_planning_is_an_error_and_not_fewer_records(log):
    log.slots.create("s", COLD)
    reader = source(log).reader(SPARK_SCHEMA)
    partitions = reader.partitions()
    expire(log)
    with pytest.raises(CursorExpired, match=rf"Offsets 0 to \d+ of .* were trimmed .*begins at {COLD}"):
        offsets_of(reader, partitions)


def test_a_lost_segment_is_named(log, impatient):
    reader = source(log).reader(SPARK_SCHEMA)
    partitions = reader.partitions()
    lost = segment_files(log)[1]
    lost.unlink()
    forget_tails()
    with pytest.raises(NotFound, match=lost.name):
        offsets_of(reader, partitions)


def test_planning_leaves_nothing_running_and_the_hot_tier_needs_nobody_else(log, impatient):
    reader = source(log).reader(SPARK_SCHEMA)
    reader.partitions()
    assert following_threads() == []
    stream = source(log).streamReader(SPARK_SCHEMA)
    start, upto = stream.initialOffset(), stream.reportLatestOffset
    assert following_threads()
    end = stream.latestOffset({**start, "next": COLD}, stream.getDefaultReadLimit())
    assert following_threads() == []
    assert upto()["next"] == END
    shutil.rmtree(Path(log.url.removeprefix("file://")) / "cold" / "events")
    fresh = source(log, startingOffset=str(COLD))
    reader, stream = fresh.reader(SPARK_SCHEMA), fresh.streamReader(SPARK_SCHEMA)
    assert offsets_of(reader, reader.partitions()) == list(range(COLD, END))
    assert offsets_of(stream, stream.partitions(stream.initialOffset(), end)) == list(range(COLD, END))
    assert following_threads() == []


def test_a_hold_keeps_what_only_segments_have(log):
    held = source(log, startingOffset="25", hold="1h").reader(SPARK_SCHEMA)
    partitions = held.partitions()
    (hold,) = [state for state in log.slots.list() if state.expires is not None]
    assert hold.position == 25
    expire(log)
    assert everything(log).column("offset")[0].as_py() <= 25
    assert offsets_of(held, partitions) == list(range(25, END))


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", some([{"maxBatchesPerTrigger": "1"}, {"maxRecordsPerTrigger": "17"}, {}], 1))
def test_a_stream_goes_from_the_cold_tier_to_the_hot_one_in_steps(log, limit):
    stream = source(log, **limit).streamReader(SPARK_SCHEMA)
    stream.prepareForTriggerAvailableNow()
    at, found, steps = stream.initialOffset(), [], 0
    while (upto := stream.latestOffset(at, stream.getDefaultReadLimit())) != at:
        found += offsets_of(stream, stream.partitions(at, upto))
        # What has been planned once is the same again, wherever it is by then.
        if steps == 1:
            copy(log)
            forget(log)
        assert offsets_of(stream, stream.partitions(at, upto)) == list(range(at["next"], upto["next"]))
        at, steps = upto, steps + 1
    assert found == list(range(END))
    assert steps > 3 if limit else steps == 1


def test_a_stream_that_was_open_before_the_log_had_a_cold_tier_finds_it(tmp_path):
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    fill(log, 30)
    stream = source(log).streamReader(SPARK_SCHEMA)
    start = stream.initialOffset()
    sl.tier.attach(log)
    copy(log)
    forget(log)
    upto = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert offsets_of(stream, stream.partitions(start, upto)) == list(range(30))


class Killed(Exception):
    """Stands for a driver that died."""


@pytest.mark.matrix
def test_a_table_is_built_from_the_beginning_exactly_once_though_drivers_die_and_records_move(spark, log, tmp_path):
    table, both = tmp_path / "table", sl.open(log.url)
    sink = sl.DeltaSink(str(table), mode="append")
    options = {"slot": "s", "trigger": NOW, "options": {"maxBatchesPerTrigger": "2"}}
    seen: list[str] = []

    def on_step(step: str) -> None:
        seen.append(step)
        if seen.count("planned") == 2 and step == "planned":
            expire(log)  # nothing that the slot needs
            forget(log)
        if seen.count("committed") == 2 and step == "committed":
            raise Killed

    with pytest.raises(Killed):
        sl.spark.follow(spark, both, sink, on_step=on_step, **options).await_termination(600)
    done = sink.cursor(log.log_id).next
    assert 0 < log.slots.get("s").position < done < COLD, "it died in the cold tier, between table and slot"
    expire(log)
    assert done >= everything(log).column("offset")[0].as_py() > 0, "only what was consumed has expired"
    # The checkpoint of that run was a temporary one, and is gone.
    options["options"] = {"maxBatchesPerTrigger": "4"}
    sl.spark.follow(spark, both, sink, **options).await_termination(600)
    assert appended_rows(table) == expected_rows(MANY_CHANGES)
    assert log.slots.get("s").position == END
    both.close()


def test_a_slot_may_begin_where_only_segments_are_and_pins_them(spark, log):
    sink = RowsSink()
    short = {"endingOffset": "30"}
    sl.spark.follow(spark, log, sink, slot="s", start=20, trigger=NOW, options=short).await_termination(600)
    assert [row["offset"] for row in sink.rows] == list(range(20, 30))
    assert log.slots.get("s").position == 30
    expire(log)
    assert 0 < everything(log).column("offset")[0].as_py() <= 30


# --- read --------------------------------------------------------------------------------------------------------


def test_a_read_equals_the_log_record_for_record(spark, tmp_path):
    log = new_tiered(tmp_path)
    changes = [put(b"k", b"v"), (None, None), (b"", b"", Op.DELETE), (b"\xff\x00", b"x" * 300, Op.PURGE)]
    headers = [[("a", b"1"), ("b", None), ("a", b"2")], None, [], [("ü", b"")]]
    append(log, changes, headers)
    append(log, changes, headers)
    copy(log)
    forget(log)
    append(log, changes, headers)
    frame = sl.spark.read(spark, log)
    assert [(field.name, field.dataType) for field in frame.schema] == [
        (field.name, field.dataType) for field in SPARK_SCHEMA
    ]
    assert all(field.nullable for field in frame.schema)
    assert rows(frame) == everything(log).to_pylist()
    assert frame.schema == sl.spark.read(spark, log, since=8).schema == sl.spark.read(spark, log, upto=8).schema


@pytest.mark.matrix
def test_a_read_takes_segments_as_far_as_they_go_and_the_rest_from_the_hot_tier(spark, log):
    frame = sl.spark.read(spark, log)
    assert rows(frame) == everything(log).to_pylist()
    files = {Path(name).name for name in frame.inputFiles()}
    assert files == {path.name for path in segment_files(log)}
    plan = str(frame._jdf.queryExecution().executedPlan())
    assert plan.count("FileScan parquet") == plan.count("BatchScan strandline") == 1


@pytest.mark.matrix
def test_a_read_of_every_range_has_exactly_its_records(spark, log):
    places = [(0, END), (7, 7), (3, 13), (COLD - 1, COLD + 1), (BOTH - 1, BOTH + 1), (65, 75), (BOTH, END), (END, END)]
    for first, end in places:
        frame = sl.spark.read(spark, log.url, since=first, upto=end, columns=["value", "offset"])
        assert frame.columns == ["value", "offset"]
        found = sorted((row.offset, row.value) for row in frame.collect())
        assert found == [(n, MANY_CHANGES[n][1]) for n in range(first, end)]


@pytest.mark.matrix
def test_a_read_narrows_to_columns_and_begins_at_cursors_and_times(spark, log):
    both = sl.open(log.url)
    assert sl.spark.read(spark, both, columns=["op"]).groupBy("op").count().count() == 2
    assert sl.spark.read(spark, both, since=Cursor(log.log_id, 30), upto=40, columns=["key"]).count() == 10
    assert sl.spark.read(spark, both, since="now").collect() == []
    assert offsets(sl.spark.read(spark, both, since="beginning", upto=3)) == [0, 1, 2]
    assert following_threads(), "a log that was given stays open"
    both.close()
    with pytest.raises(Diverged):
        sl.spark.read(spark, log, since=Cursor(UUID(int=7), 30))
    with pytest.raises(InvalidInput, match="ends at"):
        sl.spark.read(spark, log, upto=END + 1)
    with pytest.raises(InvalidInput, match="colour"):
        sl.spark.read(spark, log, columns=["colour"])
    with pytest.raises(InvalidInput, match="since="):
        sl.spark.read(spark, log, options={"startingOffset": "3"})
    assert following_threads() == []


def test_a_log_without_a_cold_tier_is_read_as_well(spark, tmp_path):
    log = sl.open(f"{tmp_path}/plain", create=True)
    assert sl.spark.read(spark, log).collect() == []
    append(log, numbered(0, 5))
    assert offsets(sl.spark.read(spark, log, since=2)) == [2, 3, 4]
    move_floor(log, 5)
    with pytest.raises(CursorExpired):
        sl.spark.read(spark, log, since=2)


@pytest.mark.matrix
def test_the_same_read_finds_the_same_records_whatever_moves_and_comes_meanwhile(spark, log):
    expected = everything(log).to_pylist()
    frame = sl.spark.read(spark, log)
    copy(log)
    forget(log)
    fill(log, END + 20)
    assert log.bounds().first == END
    assert rows(frame) == expected
    fill(log, END + 40)
    copy(log)
    forget(log)
    assert rows(frame) == expected


@pytest.mark.matrix
def test_records_that_move_while_a_read_is_planned_are_read_once(spark, log, monkeypatch, impatient):
    pieces = TieredLog.pieces

    def moving(self: TieredLog, first: int, end: int) -> list[ColdPiece]:
        found = pieces(self, first, end)
        monkeypatch.setattr(TieredLog, "pieces", pieces)
        copy(log)  # the hot tier has lost by now what this list does not have yet
        forget(log)
        return found

    monkeypatch.setattr(TieredLog, "pieces", moving)
    assert offsets(sl.spark.read(spark, log)) == list(range(END))


@pytest.mark.matrix
def test_a_hundredth_of_the_offsets_costs_few_row_groups(spark, tmp_path):
    log = new_tiered(tmp_path)
    dice = random.Random(3)
    for _ in range(8):
        append(log, [put(b"k%d" % n, dice.randbytes(200)) for n in range(2500)])
    copy(log, target=64 << 20)
    forget(log)
    (segment,) = segment_files(log)
    groups = pq.ParquetFile(segment).metadata
    largest = max(groups.row_group(number).num_rows for number in range(groups.num_row_groups))
    assert rows_scanned(sl.spark.read(spark, log, columns=["value"])) == 20_000
    some = sl.spark.read(spark, log, since=12_345, upto=12_545, columns=["value"])
    assert rows_scanned(some) <= 2 * largest < 20_000 / 10
    whole = sl.spark.read(spark, log)
    assert rows_scanned(whole.where("offset >= 12345 AND offset < 12545")) <= 2 * largest, "a query's own filter, too"


def rows_scanned(frame: DataFrame) -> int:
    """How many rows Spark's Parquet reader decoded for a query: those of the row groups that it did not skip."""
    plan = frame._jdf.queryExecution().executedPlan()
    plan.executeCollect()
    return int(plan.collectLeaves().head().metrics().get("numOutputRows").get().value())


# --- segments that go away ---------------------------------------------------------------------------------------


def expiring(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let something happen between the look at the segments and Spark's own."""
    by_parquet = reading._Tables._by_parquet

    def then(self, *arguments):
        monkeypatch.setattr(reading._Tables, "_by_parquet", by_parquet)
        action()
        return by_parquet(self, *arguments)

    monkeypatch.setattr(reading._Tables, "_by_parquet", then)


@pytest.mark.matrix
def test_a_segment_that_expires_while_a_read_is_planned_is_reported_clearly(spark, log, monkeypatch):
    log.slots.create("s", COLD)
    expiring(monkeypatch, lambda: expire(log))
    with pytest.raises(CursorExpired, match=f"Offsets 5 to {COLD - 1} are needed but no longer retained"):
        sl.spark.read(spark, log, since=5)


@pytest.mark.matrix
def test_a_segment_that_expires_before_its_lookup_is_reported_when_the_read_is_planned(
    spark, log, monkeypatch, impatient
):
    log.slots.create("s", COLD)
    pieces = TieredLog.pieces

    def late(self: TieredLog, first: int, end: int) -> list[ColdPiece]:
        monkeypatch.setattr(TieredLog, "pieces", pieces)
        expire(log)
        return pieces(self, first, end)

    monkeypatch.setattr(TieredLog, "pieces", late)
    with pytest.raises(CursorExpired, match=f"Offsets 5 to {COLD - 1} are needed but no longer retained"):
        sl.spark.read(spark, log, since=5)


@pytest.mark.matrix
def test_a_read_from_the_beginning_begins_behind_what_expired_while_it_was_planned(spark, log, monkeypatch):
    log.slots.create("s", COLD)
    expiring(monkeypatch, lambda: expire(log))
    assert offsets(sl.spark.read(spark, log)) == list(range(COLD, END))


@pytest.mark.matrix
def test_a_segment_that_is_lost_is_named_and_not_taken_for_expired(spark, log):
    lost = segment_files(log)[1]
    lost.unlink()
    with pytest.raises(NotFound, match=lost.name):
        sl.spark.read(spark, log)


@pytest.mark.matrix
def test_a_segment_that_expires_before_a_read_runs_is_an_error_whatever_the_session_ignores(spark, log):
    log.slots.create("s", COLD)
    frame = sl.spark.read(spark, log)
    expire(log)
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        with pytest.raises(Exception, match="FILE_NOT_EXIST") as caught:
            frame.collect()
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
    assert ".parquet" in str(caught.value)


@pytest.mark.matrix
def test_a_held_read_pins_its_segments_and_a_failed_one_releases_them(spark, log, monkeypatch):
    frame = sl.spark.read(spark, log, since=25, options={"hold": "1h"})
    (hold,) = [state for state in log.slots.list() if state.expires is not None]
    assert hold.position == 25
    expire(log)
    assert offsets(frame) == list(range(25, END))
    segment_files(log)[-1].unlink()
    with pytest.raises(NotFound):
        sl.spark.read(spark, log, since=25, options={"hold": "1h"})
    assert [state.name for state in log.slots.list() if state.expires is not None] == [hold.name]


# --- places ------------------------------------------------------------------------------------------------------


def test_a_folder_may_be_called_anything(spark, tmp_path):
    log = new_tiered(tmp_path / "a b%20[x]{y,z}*?#=1")
    fill(log, 30)
    copy(log)
    forget(log)
    frame = sl.spark.read(spark, log)
    assert offsets(frame) == list(range(30))
    assert frame.columns == READ_SCHEMA.names
    assert len(frame.inputFiles()) == len(segment_files(log)) > 0


@pytest.mark.matrix
def test_segments_in_a_store_that_sparks_readers_do_not_reach_are_read_by_the_data_source(
    spark, tmp_path, s3_server: S3Server, s3_place, caplog
):
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    store = s3_place().url
    storage = {f"storage.{name}": value for name, value in s3_server.options.items()}
    sl.tier.attach(log, store, f"file://{tmp_path}/events", options=s3_server.options)
    fill(log, 50)
    copy(log, options=s3_server.options)
    forget(log)
    fill(log, 70)
    with caplog.at_level(logging.WARNING):
        frame = sl.spark.read(spark, log.url, options=storage)
    assert f"segments in {store} are read by the data source" in caplog.text
    assert offsets(frame) == list(range(70))


@pytest.mark.parametrize(
    ("store", "path"),
    [
        ("file:///data/cold", "file:///data/cold/x.parquet"),
        ("file:///data/a%25b c", "file:///data/a%b c/x.parquet"),
        ("file:///data/[1]", "file:///data/\\[1\\]/x.parquet"),
        ("s3://bucket", "s3a://bucket/x.parquet"),
        ("s3a://bucket/cold/", "s3a://bucket/cold/x.parquet"),
        ("s3://bucket/a%20b", None),
        ("gs://bucket/cold", None),
        ("memory://cold", None),
    ],
)
def test_objects_are_called_as_spark_calls_them(store, path):
    assert spark_path(store, "x.parquet") == path


# --- which segments ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_pieces_of_segments_have_every_offset_of_a_range_once(tmp_path):
    log = new_tiered(tmp_path)
    for first, count in itertools.pairwise([0, 1, 2, 5, 6, 9, 10]):
        append(log, numbered(first, count - first))
    made = copy(log, target=1)
    assert len(made) == 6, "three of them have one record"
    append(log, numbered(10, 5))
    with sl.open(log.url) as both:
        for first, end in itertools.combinations(range(13), 2):
            pieces = both.pieces(first, end)
            found = [offset for piece in pieces for offset in range(piece.first, piece.next)]
            assert found == list(range(first, min(end, 10)))
            for piece in pieces:
                start = int(Path(piece.path).name[:20])
                assert piece.cut_before == (start < piece.first)
                assert piece.cut_behind == (dict(made)[start] > piece.next)


# --- overlapping segments ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=8), st.data())
def test_scans_read_every_offset_once_however_segments_overlap(shapes, data):
    """Each segment goes on where the one before ends, and some begin earlier: they were written in another term."""
    segments, at = [], 0
    for length, earlier in shapes:
        segments.append((max(0, at - earlier), at, at + length))
        at += length
    first = data.draw(st.integers(0, at - 1))
    end = data.draw(st.integers(first + 1, at))
    pieces, held = [], {}
    for number, (start, since, upto) in enumerate(segments):
        begin, stop = max(since, first), min(upto, end)
        if begin < stop:
            pieces.append(ColdPiece("file:///s", str(number), begin, stop, start < begin, upto > stop))
            held[str(number)] = range(start, upto)
    found = [
        offset
        for scan in scans(pieces)
        for path in scan.paths
        for offset in held[path]
        if (scan.first is None or offset >= scan.first) and (scan.next is None or offset < scan.next)
    ]
    assert sorted(found) == list(range(first, end))


def test_segments_that_do_not_overlap_are_one_scan():
    pieces = [ColdPiece("file:///s", str(n), 10 * n, 10 * n + 10, cut_before=False, cut_behind=False) for n in range(9)]
    assert len(scans(pieces)) == 1
    assert scans([]) == []
