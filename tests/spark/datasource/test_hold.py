"""A batch read with ``hold``: retention does not pull away what was planned. Without it, such a read fails, whole."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import strandline as sl
from strandline.compat.v1.log import open_queue
from strandline.errors import CursorExpired, InvalidInput, NotFound, NotReady, TransientStorageError
from strandline.log.object import ObjectLog
from strandline.model.cursor import Bounds
from strandline.model.retention import SlotState
from strandline.spark import failures
from strandline.spark.datasource.planning import trimmed_meanwhile
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.spark.failures import unwrapped
from strandline.spark.options import parse_options
from strandline.storage.retry import Backoff
from tests.compat.v1.filled_queues import append as append_to_queue
from tests.spark.helpers import append, batch_files, numbered


@pytest.fixture
def log(tmp_path: Path) -> ObjectLog:
    """A queue of five batches of ten records, none of them consumed yet."""
    log = sl.open(f"{tmp_path}/log", create=True, retention="consumed")
    for first in range(0, 50, 10):
        append(log, numbered(first, 10))
    log.slots.create("worker", 0)
    return log


def consume(log: ObjectLog, upto: int) -> None:
    """Let the only consumer acknowledge up to an offset, and then delete whatever nobody holds."""
    log.slots.claim("worker", "me").advance(log.start().at(upto))
    log.trim(grace=0)


def reader(log: ObjectLog, **options: str):
    return StrandlineDataSource({"path": log.url, **options}).reader(SPARK_SCHEMA)


def offsets(reader, partitions) -> list[int]:
    copy = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in partitions for batch in copy.read(pickle.loads(pickle.dumps(part)))]
    return [number for batch in batches for number in batch.column("offset").to_pylist()]


def holds(log: ObjectLog) -> list[SlotState]:
    return [state for state in log.slots.list() if state.expires is not None]


# --- in Spark ----------------------------------------------------------------------------------------------------


def planned(spark, log: ObjectLog, **options: str):
    """The rows of a query that Spark has planned and not yet run."""
    rows = spark.read.format("strandline").options(**options).schema("offset LONG").load(log.url).rdd
    assert rows.getNumPartitions() > 0
    return rows


@pytest.mark.matrix
def test_records_held_by_a_planned_query_exist_when_it_runs(spark, log):
    rows = planned(spark, log, hold="1h")
    consume(log, 40)
    assert log.bounds().first == 0
    assert sorted(row.offset for row in rows.collect()) == list(range(50))


def test_without_a_hold_a_query_whose_data_was_trimmed_fails_clearly_and_returns_nothing(spark, log):
    rows = planned(spark, log)
    consume(log, 40)
    with pytest.raises(Exception) as caught:
        rows.collect()
    error = unwrapped(caught.value)
    assert isinstance(error, CursorExpired)
    assert "Offsets 0 to 39" in str(error)
    assert "begins at 40" in str(error)
    assert "'hold'" in str(error)


# --- what is held, and for how long ------------------------------------------------------------------------------


def test_a_hold_begins_at_the_first_offset_of_the_read_and_lasts_as_long_as_asked(log):
    before = log.env.clock.now()
    read = reader(log, startingOffset="23", endingOffset="37", hold="90s")
    partitions = read.partitions()
    (hold,) = holds(log)
    assert hold.position == 23
    assert 0 <= hold.expires - before - 90_000_000 < 60_000_000
    consume(log, 50)
    assert log.bounds().first == 20, "batches go as a whole"
    assert offsets(read, partitions) == list(range(23, 37))


def test_a_hold_ends_by_itself_and_is_not_renewed(log, monkeypatch):
    read = reader(log, hold="1")
    partitions = read.partitions()
    (hold,) = holds(log)
    lasts, seen = hold.expires - hold.last_seen, hold.expires
    monkeypatch.setattr(type(log.env.clock), "now", lambda _: seen)
    consume(log, 50)  # its time is counted from the first round that saw it
    assert offsets(read, partitions) == list(range(50))
    monkeypatch.setattr(type(log.env.clock), "now", lambda _: seen + lasts - 1)
    log.trim(grace=0)
    assert offsets(read, partitions) == list(range(50))
    monkeypatch.setattr(type(log.env.clock), "now", lambda _: seen + lasts)
    log.trim(grace=0)
    assert holds(log) == []
    with pytest.raises(CursorExpired, match="Offsets 0 to "):
        offsets(read, partitions)


def test_a_read_of_nothing_holds_nothing(log):
    assert reader(log, startingOffset="latest", hold="1h").partitions() == []
    assert holds(log) == []


def test_a_plan_that_fails_leaves_no_hold(log, monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE", Backoff(attempts=2, base=0.0))
    monkeypatch.setattr(ObjectLog, "plan", failing := Failing(TransientStorageError("out of order")))
    with pytest.raises(TransientStorageError):
        reader(log, hold="1h").partitions()
    assert failing.held == [1, 1], "each try had one, and gave it up"
    assert holds(log) == []


class Failing:
    """A plan that fails, and remembers how many holds there were."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.held: list[int] = []

    def __get__(self, log: ObjectLog, kind: type):
        def plan(*_: object) -> None:
            self.held.append(len(holds(log)))
            raise self.error

        return plan


def test_a_read_from_the_beginning_goes_on_where_the_log_begins_if_that_moves_while_it_is_planned(log, monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE", Backoff(attempts=2, base=0.0))
    hold, raced = ObjectLog.hold, []

    def hold_too_late(self, position: int, seconds: float):
        if not raced:
            raced.append(position)
            consume(log, 20)
        return hold(self, position, seconds)

    monkeypatch.setattr(ObjectLog, "hold", hold_too_late)
    read = reader(log, hold="1h")
    assert offsets(read, read.partitions()) == list(range(20, 50))
    assert raced == [0]


def test_an_offset_that_goes_while_the_read_is_planned_is_refused_and_not_skipped(log, monkeypatch):
    monkeypatch.setattr(failures, "PATIENCE", Backoff(attempts=2, base=0.0))
    bounds = ObjectLog.bounds
    monkeypatch.setattr(ObjectLog, "bounds", lambda _: Bounds(0, 50))  # as before the trim
    consume(log, 20)
    with pytest.raises(NotReady, match="while a read of it was being planned"):
        reader(log, startingOffset="3", hold="1h").partitions()
    monkeypatch.setattr(ObjectLog, "bounds", bounds)
    with pytest.raises(CursorExpired, match="Offsets 3 to 19"):
        reader(log, startingOffset="3", hold="1h").partitions()


# --- what is missing ---------------------------------------------------------------------------------------------


def test_a_lost_object_that_is_still_listed_is_not_called_trimmed(log):
    read = reader(log)
    partitions = read.partitions()
    batch_files(log)[2].unlink()
    with pytest.raises(NotFound, match="offsets 20 to 29"):
        offsets(read, partitions)


def test_only_what_begins_below_the_log_was_trimmed(log):
    spans = log.plan(log.start())
    assert trimmed_meanwhile(spans[2].first, Bounds(20, 50), log.url) is None
    assert isinstance(trimmed_meanwhile(spans[2].first, Bounds(30, 50), log.url), CursorExpired)


def test_a_batch_of_a_queue_that_was_acknowledged_and_deleted_meanwhile_is_named_too(tmp_path):
    queue = open_queue(str(tmp_path / "queue"))
    for number in range(3):
        append_to_queue(queue, b"x", number=number)
    read = StrandlineDataSource({"path": queue.url, "logFormat": "queue-v1"}).reader(SPARK_SCHEMA)
    partitions = read.partitions()
    gone = queue.manifest().entries[0].location
    queue.slots.claim("queue", "me").advance(queue.start().at(2))
    queue.store.delete(gone)
    with pytest.raises(CursorExpired, match="Offsets 0 to "):
        offsets(read, partitions)


# --- the option --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "seconds"), [("900", 900), (" 90s ", 90), ("15m", 900), ("1h", 3600), ("2d", 172800)])
def test_a_hold_is_seconds_or_a_time(text, seconds):
    assert parse_options({"path": "s3://b", "hold": text}).hold == seconds
    assert parse_options({"path": "s3://b"}).hold is None


@pytest.mark.parametrize("text", ["0", "0h", "-1", "soon", "", "1.5", "1y"])
def test_a_hold_that_is_no_time_is_refused_in_one_sentence(text):
    with pytest.raises(InvalidInput, match="hold is a time of at least a second, such as 900, '15m' or '1h', not"):
        parse_options({"path": "s3://b", "hold": text})


def test_queues_and_streams_take_no_hold(log):
    with pytest.raises(InvalidInput, match="hold is for object logs"):
        parse_options({"path": "s3://b", "hold": "1h", "logFormat": "queue-v1"})
    with pytest.raises(InvalidInput, match=r"hold is for batch reads.*slot"):
        StrandlineDataSource({"path": log.url, "hold": "1h"}).streamReader(SPARK_SCHEMA)
