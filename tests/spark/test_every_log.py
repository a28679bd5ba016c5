"""Spark reads every kind of log by its address, in batch and in streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import Unsupported
from strandline.testing.logs import writer_named

BATCHES, ROWS = 40, 25


class Place(NamedTuple):
    url: str
    log: Any
    """What takes appends."""
    seen: Callable[[sl.Cursor], object] = lambda _: None
    """Waits until readers at the address see everything below a cursor."""


def write_ahead_log(folder: Path, opened: ExitStack) -> Place:
    url = f"wal://{folder}/log"
    return Place(url, opened.enter_context(sl.open(url, create=True)))


def node(folder: Path, opened: ExitStack) -> Place:
    primary = opened.enter_context(sl.node.Primary.open(folder / "a", name="a", policy="local"))
    return Place(primary.url, primary)


def replica(folder: Path, opened: ExitStack) -> Place:
    primary = opened.enter_context(sl.node.Primary.open(folder / "a", name="a", policy="local"))
    copy = opened.enter_context(sl.node.Replica.open(folder / "b", primary.url, name="b"))
    return Place(copy.url, primary, lambda upto: copy.reading(after=upto, timeout=60))


KINDS: list[Any] = [write_ahead_log, node, pytest.param(replica, marks=pytest.mark.matrix)]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        yield request.param(tmp_path, opened)


def fill(place: Place, since: int = 0) -> None:
    for number in range(since, since + BATCHES):
        values = [b"%d" % (number * ROWS + row) for row in range(ROWS)]
        place.log.append(pa.table({"value": values}), writer=writer_named(1), number=number).result(60)
    place.seen(place.log.end())


def test_a_query_gets_every_record_once_and_a_range_exactly(spark, place):
    url = place.url
    fill(place)
    frame = spark.read.format("strandline").option("partitions", 4).load(url)
    rows = frame.select("offset", "value").toArrow().sort_by("offset").to_pydict()
    assert rows["offset"] == list(range(BATCHES * ROWS))
    assert rows["value"] == [b"%d" % offset for offset in rows["offset"]]
    some = spark.read.format("strandline").options(startingOffset="30", endingOffset="101").load(url)
    assert sorted(row.offset for row in some.select("offset").collect()) == list(range(30, 101))


def test_a_stream_goes_on_from_its_checkpoint(spark, place, tmp_path):
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")
    for turn in range(2):
        fill(place, turn * BATCHES)
        source = spark.readStream.format("strandline").option("maxRecordsPerTrigger", 400).load(place.url)
        query = source.select("offset", "value").writeStream.format("parquet").option("path", table)
        query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination(120)
        found = sorted(row.offset for row in spark.read.parquet(table).select("offset").collect())
        assert found == list(range((turn + 1) * BATCHES * ROWS))


@pytest.mark.parametrize("kind", [write_ahead_log, node])
def test_a_table_follows_with_a_slot_that_pins_what_it_needs(spark, tmp_path, kind):
    with ExitStack() as opened:
        place = kind(tmp_path, opened)
        sink = sl.DeltaSink(tmp_path / "table", mode="append")
        for turn in range(2):
            fill(place, turn * BATCHES)
            following = sl.spark.follow(spark, place.log, sink, slot="billing", trigger={"availableNow": True})
            assert following.await_termination(120)
            end = (turn + 1) * BATCHES * ROWS
            assert place.log.slots.get("billing").position == end
            rows = DeltaTable(str(tmp_path / "table")).to_pyarrow_table(columns=["offset"])
            assert sorted(rows["offset"].to_pylist()) == list(range(end))


def test_a_slot_of_a_write_ahead_log_needs_the_process_that_writes_it(spark, tmp_path):
    with ExitStack() as opened:
        place = write_ahead_log(tmp_path, opened)
        fill(place)
        sink = sl.DeltaSink(tmp_path / "table", mode="append")
        with pytest.raises(Unsupported, match="opened for reading"):
            sl.spark.follow(spark, place.url, sink, slot="billing", trigger={"availableNow": True})
        assert not (tmp_path / "table").exists()
