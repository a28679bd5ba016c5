"""Spark reads every kind of log by its address, in batch and in streams: rows of the table of pairs."""

from __future__ import annotations

from typing import Any

from deltalake import DeltaTable

import strandline as sl
from strandline.errors import NotReady, Unsupported
from tests.pairs.log_kinds import RECORDS, Opened, expected
from tests.pairs.table import No, pair

WAL = No(
    Unsupported,
    "opened for reading",
    "A write-ahead log is changed, and its slots are, by the one process that writes it. Others read it.",
)
REPLICA = No(NotReady, "no primary: ask a", "Slots of consumers are kept by the primary.")
QUEUE = No(
    sl.errors.InvalidInput,
    "is not one: use a log .* Copy a queue of version 1 into a log first",
    "A queue of version 1 has one slot, its own consumer's, which is moved by that alone.",
)


def options(opened: Opened, **more: Any) -> dict[str, Any]:
    return more if opened.format is None else {**more, "logFormat": opened.format}


@pair("Spark query", default=("wal", "node"))
def test_a_query_gets_every_record_once_and_a_range_exactly(opened: Opened, spark: Any) -> None:
    frame = spark.read.format("strandline").options(**options(opened, partitions=4)).load(opened.url)
    rows = frame.select("offset", "value").toArrow().sort_by("offset").to_pydict()
    assert sorted(rows["value"]) == sorted(expected())
    if opened.format is None:
        assert rows["offset"] == list(range(RECORDS))
        some = spark.read.format("strandline").options(startingOffset="3", endingOffset="8").load(opened.url)
        assert sorted(row.offset for row in some.select("offset").collect()) == list(range(3, 8))


@pair("Spark stream", default=("node",))
def test_a_stream_goes_on_from_its_checkpoint(opened: Opened, spark: Any) -> None:
    table, checkpoint = str(opened.folder / "table"), str(opened.folder / "checkpoint")
    for turn in range(2):
        if turn:
            opened.append(RECORDS, RECORDS + 1)
        source = spark.readStream.format("strandline").options(**options(opened)).load(opened.url)
        query = source.select("value").writeStream.format("parquet").option("path", table)
        query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination(120)
        found = sorted(bytes(row.value) for row in spark.read.parquet(table).collect())
        assert found == sorted([*expected(), b"%d" % RECORDS, b"%d" % (RECORDS + 1)][: RECORDS + 2 * turn])


@pair("`sl.spark.follow` with a slot", default=("wal", "node"), wal_reader=WAL, replica=REPLICA, queue_v1=QUEUE)
def test_a_table_follows_with_a_slot_that_pins_what_it_needs(opened: Opened, spark: Any) -> None:
    sink = sl.DeltaSink(opened.folder / "table", mode="append")
    for turn in range(2):
        if turn:
            opened.append(RECORDS)
        following = sl.spark.follow(spark, opened.log, sink, slot="billing", trigger={"availableNow": True})
        assert following.await_termination(120)
        assert opened.log.slots.get("billing").position == RECORDS + turn
        rows = DeltaTable(str(opened.folder / "table")).to_pyarrow_table(columns=["offset"])
        assert sorted(rows["offset"].to_pylist()) == list(range(RECORDS + turn))
