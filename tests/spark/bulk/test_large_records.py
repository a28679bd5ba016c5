"""A record of 200 MB, and 100,000 batches of one record: read, written, exported and tiered by Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.formats.object.head import encode_chunk
from strandline.log.object import ObjectLog
from strandline.log.object.head.edits import apply_spills, list_batches, plan_spills
from strandline.log.object.head.index import chunk_path
from strandline.log.object.upload import ObjectDraft
from strandline.model.head import WriterId
from strandline.model.records import Op, record_batch
from strandline.model.stamp import OpId
from tests.spark.helpers import NOW, append, new_log, put

pytestmark = [pytest.mark.slow, pytest.mark.spark]
SIZE = 200_000_000
COUNT = 100_000


@pytest.fixture(scope="module")
def value() -> bytes:
    return hashlib.shake_256(b"large").digest(SIZE)


@pytest.fixture
def log(tmp_path: Path, value: bytes) -> ObjectLog:
    log = new_log(tmp_path)
    append(log, [put(b"before", b"small")])
    append(log, [put(b"large", value)])
    append(log, [put(b"after", b"small")])
    return log


def digests(table: pa.Table) -> list[tuple[int, str]]:
    values = (each.as_buffer() for each in table.column("value"))
    return [(value.size, hashlib.sha1(value).hexdigest()) for value in values]


def expected(value: bytes) -> list[tuple[int, str]]:
    return [(len(each), hashlib.sha1(each).hexdigest()) for each in (b"small", value, b"small")]


def test_a_record_of_200_megabytes_is_read_and_written(
    spark: SparkSession, log: ObjectLog, value: bytes, tmp_path: Path
) -> None:
    frame = spark.read.format("strandline").load(log.url)
    rows = frame.selectExpr("offset", "length(value) AS size", "sha1(value) AS digest").orderBy("offset").collect()
    assert [(row["size"], row.digest) for row in rows] == expected(value)
    target = new_log(tmp_path, "target")
    frame.select("key", "value").coalesce(1).write.format("strandline").mode("append").save(target.url)
    assert digests(pa.Table.from_batches(target.read())) == expected(value)


def test_a_record_of_200_megabytes_is_exported_tiered_and_verified(
    spark: SparkSession, log: ObjectLog, value: bytes, tmp_path: Path
) -> None:
    pool = sl.spark.executors(spark)
    sl.bulk.export(log, tmp_path / "export", pool=pool)
    files = sorted((tmp_path / "export").glob("part-*"))
    assert digests(pa.concat_tables([pq.read_table(file) for file in files])) == expected(value)
    sl.tier.attach(log)
    with sl.tier.tiering(log, pool=pool) as tierer:
        assert tierer.run_once(everything=True).copied[-1].end == 2
    log.trim(grace=0)
    with sl.open(log.url) as both:
        assert digests(pa.Table.from_batches(both.read())) == expected(value)
    assert sl.bulk.verify(log, pool=pool).examined["records"] >= 3
    rows = spark.read.format("strandline").load(log.url).selectExpr("length(value) AS size").collect()
    assert sorted(row["size"] for row in rows) == [5, 5, SIZE]


def test_a_hundred_thousand_batches_of_one_record_are_read(spark: SparkSession, tmp_path: Path) -> None:
    log = filled(tmp_path / "log", COUNT)
    assert log.bounds().next == COUNT
    frame = spark.read.format("strandline").option("partitions", "4").load(log.url)
    row = frame.selectExpr("count(*)", "sum(offset)", "count(DISTINCT offset)", "count_if(length(value) = 100)").first()
    assert tuple(row) == (COUNT, COUNT * (COUNT - 1) // 2, COUNT, COUNT)


def filled(folder: Path, count: int) -> ObjectLog:
    """A log of ``count`` real batches of one record each, listed as ``count`` appends would have."""
    log = new_log(folder.parent, folder.name)
    writer = WriterId(uuid4())
    head = log.head()
    draft = ObjectDraft()
    draft.add([record_batch(timestamps=[NOW], ops=[Op.PUT], keys=[b"key"], values=[b"v" * 100])])
    for number in range(count):
        sealed = draft.sealed(writer, number)
        location = f"batches/{0:016d}/{number:032x}.batch"
        listing = replace(sealed.listing, location=location)
        store(folder / location, sealed.parts)
        spills = plan_spills(head)
        for spill in spills:
            store(folder / chunk_path(spill.reference, spill.level), [encode_chunk(spill.items, spill.level)])
        head = apply_spills(list_batches(head, [listing], NOW + number), spills)
    final = head
    log._lister.cell.update(OpId(uuid4()), lambda _: final)
    return sl.open(log.url)


def store(path: Path, parts: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(parts)
