"""The data source with decoded values: as Spark's processes call it, and in a session."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampNTZType

import strandline as sl
from strandline.errors import BadRecord, InvalidInput, SchemaRefused, Unsupported
from strandline.spark.datasource.source import StrandlineDataSource

SCHEMA = pa.schema(
    {
        "id": pa.int32(),
        "big": pa.uint64(),
        "local": pa.timestamp("ms"),
        "tags": pa.list_(pa.string()),
        "parts": pa.map_(pa.string(), pa.struct({"n": pa.int64()})),
    }
)
ROW = {"id": 1, "big": 1 << 63, "tags": ["a", None], "parts": {"p": {"n": 5}}}


def typed_log(tmp_path: Path, codec: Any = None) -> Any:
    return sl.open(f"{tmp_path}/log", create=True, value=codec or sl.values.Json(SCHEMA))


def append(log: Any, *values: Any) -> None:
    with log.producer() as producer:
        for value in values:
            producer.append(key=b"k", value=value, headers={"h": b"x"})


def source(log: Any, **options: str) -> StrandlineDataSource:
    return StrandlineDataSource({"path": log.url, "decode": "true", **options})


def rows(log: Any, *names: str, **options: str) -> list[dict[str, Any]]:
    """As an executor would: the reader and each partition come out of a pickle."""
    found = source(log, **options)
    schema = StructType([field for field in found.schema() if not names or field.name in names])
    reader = found.reader(schema)
    parts = reader.partitions()
    copy = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in parts for batch in copy.read(pickle.loads(pickle.dumps(part)))]
    return [row for batch in batches for row in batch.to_pylist()]


def test_the_fields_of_values_are_columns_beside_those_of_the_record(tmp_path: Path) -> None:
    log = typed_log(tmp_path)
    append(log, ROW, None)
    first, second = rows(log)
    assert {name: first[name] for name in ("id", "big", "tags", "parts", "_key", "_offset", "_op", "_headers")} == {
        "id": 1, "big": 1 << 63, "tags": ["a", None], "parts": [("p", {"n": 5})], "_key": b"k", "_offset": 0, "_op": 0,
        "_headers": [("h", b"x")],
    }  # fmt: skip
    assert (second["id"], second["tags"], second["_offset"]) == (None, None, 1)
    types = {field.name: field.dataType for field in source(log).schema()}
    assert isinstance(types["local"], TimestampNTZType)
    assert "_error" not in types
    assert types["big"].simpleString() == "decimal(20,0)"


def test_a_narrower_schema_reads_and_decodes_no_more_than_it_needs(tmp_path: Path) -> None:
    log = typed_log(tmp_path)
    append(log, {"id": 1}, b"bad")
    assert rows(log, "_offset", "_key") == [{"_key": b"k", "_offset": 0}, {"_key": b"k", "_offset": 1}]
    with pytest.raises(BadRecord, match="offset 1 cannot be decoded"):
        rows(log, "id")
    assert rows(log, "id", "_error", badRows="null")[0] == {"id": 1, "_error": None}
    with pytest.raises(InvalidInput, match="no column 'value'"):
        source(log).reader(StructType([StructField("value", LongType())]))
    with pytest.raises(InvalidInput, match="'id' of a log is INT, not BIGINT"):
        source(log).reader(StructType([StructField("id", LongType())]))


def test_bad_rows_are_nulls_with_the_reason_and_the_bytes(tmp_path: Path) -> None:
    log = typed_log(tmp_path)
    append(log, {"id": 1}, b"no JSON", None, b'{"id":"x"}')
    found = rows(log, "id", "_offset", "_error", "_value", badRows="null")
    assert [(row["id"], row["_value"]) for row in found] == [
        (1, None),
        (None, b"no JSON"),
        (None, None),
        (None, b'{"id":"x"}'),
    ]
    assert [row["_error"] is None for row in found] == [True, False, True, False]
    assert "$.id" in found[3]["_error"]


def test_change_events_decide_the_operation(tmp_path: Path) -> None:
    log = typed_log(tmp_path, sl.values.Debezium(sl.values.Json(pa.schema({"id": pa.int64()}))))
    append(log, b'{"op":"c","after":{"id":1}}', b'{"op":"d","before":{"id":1}}')
    assert rows(log, "id", "_op") == [{"id": 1, "_op": 0}, {"id": 1, "_op": 1}]
    assert rows(log, "_op") == [{"_op": 0}, {"_op": 1}]


def test_a_new_version_is_read_by_the_next_query(tmp_path: Path) -> None:
    log = typed_log(tmp_path, sl.values.Json(pa.schema({"id": pa.int32()})))
    append(log, {"id": 1})
    log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()})))
    append(log, {"id": 1 << 40, "note": "n"})
    assert rows(log, "id", "note") == [{"id": 1, "note": None}, {"id": 1 << 40, "note": "n"}]


def test_a_log_without_a_codec_and_wrong_options_are_named(tmp_path: Path) -> None:
    plain = sl.open(f"{tmp_path}/plain", create=True)
    with pytest.raises(InvalidInput, match="names no format"):
        source(plain).schema()
    with pytest.raises(Unsupported, match="records no value format"):
        StrandlineDataSource({"path": "grpc://127.0.0.1:1", "decode": "true"}).schema()
    with pytest.raises(Unsupported, match="records no value format"):
        StrandlineDataSource({"path": f"{tmp_path}/queue", "decode": "true", "logFormat": "queue-v1"}).schema()
    for options, reason in (
        ({"decode": "yes"}, "decode is 'true' or 'false'"),
        ({"badRows": "null"}, "badRows is for decoded values"),
        ({"decode": "true", "badRows": "skip"}, "badRows is 'fail' or 'null'"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            StrandlineDataSource({"path": plain.url, **options}).schema()
    timed = sl.open(f"{tmp_path}/timed", create=True, value=sl.values.Json(pa.schema({"at": pa.time64("us")})))
    with pytest.raises(SchemaRefused, match="'at'"):
        source(timed).schema()


def test_a_session_reads_decoded_values_in_batch_and_in_streams(spark: SparkSession, tmp_path: Path) -> None:
    log = typed_log(tmp_path)
    append(log, ROW, b"bad", {"id": 3})
    frame = spark.read.format("strandline").option("decode", "true").option("badRows", "null").load(log.url)
    assert [row.id for row in frame.orderBy("_offset").collect()] == [1, None, 3]
    assert frame.where("_error is not null").select("_offset", "_value").collect() == [(1, bytearray(b"bad"))]
    assert frame.selectExpr("tags[0]", "parts['p'].n", "big").where("big is not null").collect()[0][:2] == ("a", 5)
    narrow = spark.read.format("strandline").option("decode", "true").schema("_offset LONG").load(log.url)
    assert narrow.count() == 3
    stream = spark.readStream.format("strandline").option("decode", "true").option("badRows", "null").load(log.url)
    query = (
        stream.select("id", "_offset").writeStream.format("memory").queryName("decoded").trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert sorted(tuple(row) for row in spark.table("decoded").collect() if row.id) == [(1, 0), (3, 2)]
    failing = spark.read.format("strandline").option("decode", "true").load(log.url)
    with pytest.raises(Exception, match="offset 1 cannot be decoded"):
        failing.select("id").collect()


@pytest.mark.matrix
def test_executors_write_the_columns_that_the_log_names_also_after_a_new_version(
    spark: SparkSession, tmp_path: Path
) -> None:
    log = typed_log(tmp_path, sl.values.Json(pa.schema({"id": pa.int32()})))
    sink = sl.DeltaSink(f"{tmp_path}/table", mode="append", value="log")
    for codec, row in (
        (None, {"id": 1}),
        (sl.values.Json(pa.schema({"id": pa.int64(), "n": pa.string()})), {"id": 2, "n": "x"}),
    ):
        if codec is not None:
            log.evolve_value(codec)
        append(log, row)
        with sl.spark.follow(spark, log.url, sink, trigger={"availableNow": True}, place="executors") as pipeline:
            assert pipeline.await_termination(120)
    assert sink.rows().sort_by("_offset").select(["id", "n"]).to_pylist() == [{"id": 1, "n": None}, {"id": 2, "n": "x"}]
    with pytest.raises(InvalidInput, match="A sink decodes by itself"):
        sl.spark.follow(spark, log.url, sink, options={"decode": "true"})


def test_a_frame_keeps_the_columns_with_which_it_was_loaded_when_the_log_names_wider_ones(tmp_path: Path) -> None:
    log = typed_log(tmp_path, sl.values.Json(pa.schema({"id": pa.int32(), "n": pa.int64()})))
    append(log, {"id": 1, "n": 2})
    loaded = source(log)
    planned = loaded.schema()
    log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64(), "n": pa.int64(), "note": pa.string()})))
    append(log, {"id": 3, "note": "new"})
    reader = loaded.reader(planned)
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [(row["id"], row["n"], "note" in row) for row in found] == [(1, 2, False), (3, None, False)]
    append(log, {"id": 1 << 40})
    late = loaded.reader(planned)
    with pytest.raises(BadRecord, match="offset 2"):
        [batch for part in late.partitions() for batch in late.read(part)]
    with pytest.raises(InvalidInput, match="'id' of a log is BIGINT, not STRING"):
        loaded.reader(StructType([StructField("id", StringType())]))
