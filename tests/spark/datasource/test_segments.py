"""Spark's own Parquet reader reads segments."""

import random
from pathlib import Path
from uuid import UUID

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from strandline.formats.segment.writer import SegmentWriter
from strandline.model.records import READ_SCHEMA, record_batch, with_offsets


def write(path: Path, start: int, count: int, term: int = 0) -> list[dict[str, object]]:
    dice = random.Random(start)
    batch = record_batch(
        timestamps=[1_700_000_000_000_000 + n for n in range(count)],
        ops=[n % 3 for n in range(count)],
        keys=[None if n % 5 == 4 else b"k%d" % (n % 7) for n in range(count)],
        values=[None if n % 3 else dice.randbytes(50) for n in range(count)],
        headers=[[None, [], [("a", b"1"), ("b", None)]][n % 3] for n in range(count)],
    )
    batches = with_offsets([batch], start)
    writer = SegmentWriter(start, expected=1 << 20)
    writer.add(batches, term=term, listed=5)
    encoded = writer.finish(log_id=UUID(int=1), partition=0, segment=UUID(int=start))
    path.write_bytes(b"".join(encoded.parts))
    return batches[0].to_pylist()


@pytest.mark.matrix
def test_spark_reads_segments_as_any_parquet_file(spark: SparkSession, tmp_path: Path) -> None:
    expected = write(tmp_path / "a.parquet", 0, 3000) + write(tmp_path / "b.parquet", 3000, 500)
    frame = spark.read.parquet(str(tmp_path))
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    assert kinds == {
        "offset": "bigint",
        "timestamp": "timestamp",
        "op": "tinyint",
        "key": "binary",
        "value": "binary",
        "headers": "map<string,binary>",
        "listed": "timestamp",
    }
    rows = frame.select(*READ_SCHEMA.names).orderBy("offset").toArrow().to_pylist()
    for row, wanted in zip(rows, expected, strict=True):
        assert (row["offset"], row["op"], row["key"], row["value"]) == (
            wanted["offset"],
            wanted["op"],
            wanted["key"],
            wanted["value"],
        )
        assert row["timestamp"] == wanted["timestamp"]
        assert row["headers"] == wanted["headers"]


@pytest.mark.matrix
def test_spark_finds_offsets_times_and_keys_by_their_statistics(spark: SparkSession, tmp_path: Path) -> None:
    expected = write(tmp_path / "a.parquet", 0, 20_000)
    frame = spark.read.parquet(str(tmp_path))
    some = frame.where((F.col("offset") >= 12_000) & (F.col("offset") < 12_100))
    assert sorted(row.offset for row in some.collect()) == list(range(12_000, 12_100))
    keyed = sum(1 for row in expected if row["key"] == b"k3")
    assert frame.where(F.col("key") == F.lit(b"k3")).count() == keyed
    newest = max(row["timestamp"] for row in expected)
    assert frame.where(F.col("timestamp") == F.lit(newest)).count() == 1
