"""The readers as Spark's own processes call them, but without Spark."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructField, StructType

from strandline.errors import CursorExpired, Diverged, InvalidInput, TransientStorageError
from strandline.log.object import ObjectLog, open_log
from strandline.model.cursor import Cursor
from strandline.spark import failures
from strandline.spark.datasource import readers
from strandline.spark.datasource.opened import _SKIPPED
from strandline.spark.datasource.planning import decode_offset, encode_offset
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.storage.objects.local import LocalStore
from strandline.storage.retry import Backoff
from strandline.testing.faulty import FaultyStore
from tests.spark.helpers import append, contents, move_floor, new_log, numbered


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """Five batches of ten records."""
    log = new_log(tmp_path)
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    return log


def reader(log: ObjectLog, schema: StructType = SPARK_SCHEMA, **options: str):
    return StrandlineDataSource({"path": log.url, **options}).reader(schema)


def stream(log: ObjectLog, **options: str):
    return StrandlineDataSource({"path": log.url, **options}).streamReader(SPARK_SCHEMA)


def at(log: ObjectLog, offset: int) -> dict:
    return encode_offset(log.cursor_at(offset))


def offsets(reader, partitions: list[InputPartition]) -> list[int]:
    """As an executor would: the reader and each partition come out of a pickle."""
    copy = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in partitions for batch in copy.read(pickle.loads(pickle.dumps(part)))]
    return [number for batch in batches for number in batch.column("offset").to_pylist()]


@pytest.mark.parametrize("slot", [{}, {"slot": "query"}], ids=["no slot", "slot"])
def test_a_stream_at_the_earliest_record_follows_a_trim_before_its_first_batch(log, monkeypatch, slot):
    """Nothing was read yet: the query begins with what is retained."""
    trims = iter((10, 20))
    located = readers.cursor_at

    def trimmed(position, log_read, bounds):
        found = located(position, log_read, bounds)
        if position == "retained":
            for floor in trims:
                move_floor(log, floor)
                break
        return found

    monkeypatch.setattr(readers, "cursor_at", trimmed)
    query = stream(log, **slot)
    start = query.initialOffset()
    assert query.initialOffset() == start
    if not slot:
        move_floor(log, 30)
    end = query.latestOffset(start, ReadAllAvailable())
    first = 30 if not slot else 20
    assert offsets(query, query.partitions(start, end)) == list(range(first, 50))
    assert not slot or log.slots.get("query").position == first


def test_a_stream_at_a_given_offset_does_not_move(log):
    move_floor(log, 20)
    with pytest.raises(CursorExpired):
        stream(log, startingOffset="10").initialOffset()
    query = stream(log, startingOffset="20")
    start = query.initialOffset()
    move_floor(log, 30)
    with pytest.raises(CursorExpired):
        query.latestOffset(start, ReadAllAvailable())


# --- batch -------------------------------------------------------------------------------------------------------


def test_a_batch_read_holds_everything_in_order(log):
    read = reader(log)
    assert offsets(read, read.partitions()) == list(range(50))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"startingOffset": "13", "endingOffset": "37"}, range(13, 37)),
        ({"startingOffset": "20"}, range(20, 50)),
        ({"endingOffset": "0"}, range(0)),
        ({"startingOffset": "latest"}, range(0)),
        ({"startingOffset": "30", "endingOffset": "7"}, range(0)),
    ],
)
def test_bounds_clip_exactly(log, bounds, expected):
    read = reader(log, **bounds)
    assert offsets(read, read.partitions()) == list(expected)


def test_a_cursor_is_a_bound_too(log):
    read = reader(log, startingOffset=str(Cursor(log.log_id, 48)))
    assert offsets(read, read.partitions()) == [48, 49]


def test_a_cursor_of_another_log_is_diverged(log):
    with pytest.raises(Diverged):
        reader(log, startingOffset=str(Cursor(uuid4(), 3))).partitions()


def test_an_end_that_does_not_exist_yet_is_refused_and_not_cut(log):
    with pytest.raises(InvalidInput, match="ends at 50"):
        reader(log, endingOffset="51").partitions()


def test_a_batch_read_of_what_is_no_longer_retained_fails_or_skips_as_asked(log):
    move_floor(log, 25)
    with pytest.raises(CursorExpired):
        reader(log, startingOffset="3").partitions()
    read = reader(log, startingOffset="3", failOnDataLoss="false")
    before = _SKIPPED._value.get()
    assert offsets(read, read.partitions()) == list(range(25, 50))
    assert _SKIPPED._value.get() - before == 22


def test_only_the_asked_columns_leave_the_executor(log):
    read = reader(log, StructType([SPARK_SCHEMA["value"], SPARK_SCHEMA["offset"]]))
    batches = [batch for part in read.partitions() for batch in read.read(part)]
    assert {tuple(batch.schema.names) for batch in batches} == {("value", "offset")}


def test_small_batches_reach_spark_as_one(log):
    read = reader(log)
    assert [batch.num_rows for part in read.partitions() for batch in read.read(part)] == [50]


def test_sparks_stand_in_for_no_partitions_reads_nothing(log):
    assert list(reader(log).read(InputPartition(None))) == []


def test_reading_claims_nothing_and_writes_nothing(log, tmp_path):
    log.slots.create("billing", 0)
    before = contents(tmp_path)
    read, streamed = reader(log), stream(log)
    offsets(read, read.partitions())
    start = streamed.initialOffset()
    end = streamed.latestOffset(start, ReadAllAvailable())
    offsets(streamed, streamed.partitions(start, end))
    streamed.commit(end)
    streamed.stop()
    assert contents(tmp_path) == before


def test_a_log_is_found_again_whatever_its_folder_is_called(tmp_path):
    log = new_log(tmp_path, "100%25 of what?/#1 ü")
    append(log, numbered(0, 3))
    read = reader(log)
    assert offsets(read, read.partitions()) == [0, 1, 2]


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "first"), [("earliest", 0), ("latest", 50), ("17", 17)])
def test_a_stream_without_checkpoint_begins_at_its_starting_offset(log, option, first):
    assert stream(log, startingOffset=option).initialOffset() == at(log, first)


def test_a_stream_begins_with_everything_by_default(log):
    assert stream(log).initialOffset() == at(log, 0)


def test_a_beginning_past_the_end_is_refused(log):
    with pytest.raises(Diverged):
        stream(log, startingOffset="51").initialOffset()


def test_a_stream_from_the_end_starts_once_although_the_log_grows_between_the_calls(log):
    read = stream(log, startingOffset="latest")
    start = read.initialOffset()
    append(log, numbered(50, 10))
    end = read.latestOffset(start, ReadAllAvailable())
    append(log, numbered(60, 10))
    assert offsets(read, read.partitions(read.initialOffset(), end)) == list(range(50, 60))


@pytest.mark.parametrize("produced", [0, 10])
def test_a_first_batch_that_was_not_committed_is_the_same_after_a_restart(log, produced):
    read = stream(log, startingOffset="latest")
    start = read.initialOffset()
    if produced:
        append(log, numbered(50, produced))
    end = json.loads(json.dumps(read.latestOffset(start, ReadAllAvailable())))
    append(log, numbered(60, 10))
    again = stream(log, startingOffset="latest")  # Spark stored the end only, and asks for the start
    assert offsets(again, again.partitions(again.initialOffset(), end)) == list(range(50, 50 + produced))
    assert decode_offset(again.latestOffset(end, ReadAllAvailable())) == log.end()


def test_an_idle_stream_repeats_the_text_of_its_offset(log):
    read = stream(log, startingOffset="latest")
    first = read.latestOffset(read.initialOffset(), ReadAllAvailable())
    assert json.dumps(read.latestOffset(first, ReadAllAvailable())) == json.dumps(first)
    assert json.dumps(stream(log).latestOffset(first, ReadAllAvailable())) == json.dumps(first)


@pytest.mark.parametrize(
    ("limit", "end"),
    [
        (ReadAllAvailable(), 50),
        (ReadMaxRows(1), 10),  # a batch is never split
        (ReadMaxRows(29), 20),
        (ReadMaxRows(30), 30),
        (ReadMaxFiles(2), 20),
        (ReadMaxBytes(1), 10),
        (ReadMinRows(50), 50),
        (ReadMinRows(51), 0),
    ],
)
def test_sparks_limits_hold_at_the_boundaries_of_batches(log, limit, end):
    assert stream(log).latestOffset(at(log, 0), limit) == at(log, end)


def test_limits_from_options_hold_together(log):
    read = stream(log, maxRecordsPerTrigger="40", maxBatchesPerTrigger="3", maxBytesPerTrigger="1000000")
    limit = read.getDefaultReadLimit()
    assert limit == ReadMaxBytes(1_000_000)
    assert read.latestOffset(at(log, 0), limit) == at(log, 30)
    assert read.latestOffset(at(log, 0), ReadAllAvailable()) == at(log, 50)


def test_without_limits_spark_reads_all_that_is_available(log):
    assert stream(log).getDefaultReadLimit() == ReadAllAvailable()


def test_available_now_ends_where_the_log_ended_when_it_began(log):
    read = stream(log, maxBatchesPerTrigger="4")
    read.prepareForTriggerAvailableNow()
    append(log, numbered(50, 10))
    position = read.initialOffset()
    seen = []
    while (end := read.latestOffset(position, read.getDefaultReadLimit())) != position:
        seen.append(end["next"])
        position = end
    assert seen == [40, 50]


def test_a_stream_stops_at_its_ending_offset(log):
    read = stream(log, endingOffset="33")
    assert read.latestOffset(at(log, 0), ReadAllAvailable()) == at(log, 33)
    assert read.latestOffset(at(log, 33), ReadAllAvailable()) == at(log, 33)


def test_offsets_never_go_back(log):
    read = stream(log, endingOffset="33")
    assert read.latestOffset(at(log, 40), ReadAllAvailable()) == at(log, 40)
    with pytest.raises(InvalidInput, match="back"):
        read.partitions(at(log, 40), at(log, 30))


def test_a_log_that_became_shorter_is_diverged(log):
    with pytest.raises(Diverged):
        stream(log).latestOffset(at(log, 51), ReadAllAvailable())
    with pytest.raises(Diverged, match="restored or replaced"):
        stream(log).partitions(at(log, 40), at(log, 60))


def test_a_checkpoint_of_another_log_is_diverged(log, tmp_path):
    other = new_log(tmp_path, "other")
    with pytest.raises(Diverged):
        stream(log).latestOffset(at(other, 0), ReadAllAvailable())
    with pytest.raises(Diverged):
        stream(log).partitions(at(other, 0), at(other, 10))


def test_the_same_range_is_planned_alike_after_more_was_appended(log):
    read = stream(log)
    first = offsets(read, read.partitions(at(log, 13), at(log, 37)))
    append(log, numbered(50, 10))
    again = stream(log)
    assert offsets(again, again.partitions(at(log, 13), at(log, 37))) == first == list(range(13, 37))


def test_the_latest_offset_is_reported_for_the_querys_progress(log):
    read = stream(log, maxBatchesPerTrigger="1")
    assert read.reportLatestOffset() is None
    read.latestOffset(at(log, 0), read.getDefaultReadLimit())
    assert decode_offset(read.reportLatestOffset()) == log.end()


def test_an_expired_position_ends_a_stream_unless_losses_are_accepted(log):
    move_floor(log, 25)
    for call in (
        lambda read: read.latestOffset(at(log, 3), ReadAllAvailable()),
        lambda read: read.partitions(at(log, 3), at(log, 50)),
    ):
        with pytest.raises(CursorExpired, match="failOnDataLoss=false"):
            call(stream(log))
    read = stream(log, failOnDataLoss="false", maxBatchesPerTrigger="1")
    before = _SKIPPED._value.get()
    end = read.latestOffset(at(log, 3), read.getDefaultReadLimit())
    assert end == at(log, 30)
    assert offsets(read, read.partitions(at(log, 3), end)) == list(range(25, 30))
    assert _SKIPPED._value.get() - before == 22


def test_a_planned_batch_that_expired_meanwhile_is_skipped_whole_and_counted_once(log):
    move_floor(log, 40)
    read = stream(log, failOnDataLoss="false")
    before = _SKIPPED._value.get()
    assert read.partitions(at(log, 10), at(log, 20)) == []
    assert _SKIPPED._value.get() - before == 10


def test_everything_expired_and_nothing_new_moves_the_stream_up(log):
    move_floor(log, 50)
    read = stream(log, failOnDataLoss="false", maxBatchesPerTrigger="1")
    assert read.latestOffset(at(log, 3), read.getDefaultReadLimit()) == at(log, 50)
    assert read.partitions(at(log, 3), at(log, 50)) == []


def test_a_store_that_fails_for_a_while_does_not_end_the_query(log, monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE", Backoff(attempts=4, base=0.001))
    store = FaultyStore(LocalStore(log.url.removeprefix("file://")))
    read = stream(log)
    read._at._log = open_log(store)
    store.fail_next("get", times=3)
    assert read.latestOffset(at(log, 0), ReadAllAvailable()) == at(log, 50)
    store.fail_next("get", times=3)
    assert read.partitions(at(log, 0), at(log, 50))
    store.fail_next("get", times=4)
    with pytest.raises(TransientStorageError):
        read.latestOffset(at(log, 0), ReadAllAvailable())


def test_a_reader_opens_nothing_before_it_has_to():
    missing = StrandlineDataSource({"path": "file:///nowhere/at/all"})
    pickle.dumps(missing.reader(SPARK_SCHEMA))
    pickle.dumps(missing.streamReader(SPARK_SCHEMA))


def test_the_batches_have_exactly_the_nullability_that_was_asked(log):
    nullable = StructType([StructField(field.name, field.dataType) for field in SPARK_SCHEMA])
    read = reader(log, nullable)
    (batch,) = [batch for part in read.partitions() for batch in read.read(part)]
    assert batch.schema.field("offset").nullable
    assert batch.schema.field("headers").type == pa.map_(pa.string(), pa.binary())


def test_a_trim_between_the_end_and_the_plan_of_a_batch_says_what_is_lost_and_what_to_do(log):
    query = stream(log)
    start = query.initialOffset()
    end = query.latestOffset(start, ReadAllAvailable())
    move_floor(log, 20)
    said = "Offsets 0 to 19 are needed .* new checkpoint .* failOnDataLoss=false.* slot would have pinned them"
    with pytest.raises(CursorExpired, match=said):
        query.partitions(start, end)
    accepting = stream(log, failOnDataLoss="false")
    assert offsets(accepting, accepting.partitions(start, end)) == list(range(20, 50))
