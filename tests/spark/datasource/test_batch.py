"""``spark.read.format("strandline")``: the data source registers itself and gives back what was appended."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import CorruptData, InvalidInput, NotALog, NotFound, StrandlineError, UnsupportedVersion
from strandline.formats.object.identity import CONTENT_TYPE_VERSION
from strandline.model.records import Op
from strandline.spark.failures import unwrapped
from tests.spark.helpers import NOW, append, batch_files, new_log, numbered, put


def load(spark, log, schema: str | None = None, **options: str):
    read = spark.read.format("strandline").options(**options)
    return (read if schema is None else read.schema(schema)).load(log if isinstance(log, str) else log.url)


def reason(action) -> BaseException:
    with pytest.raises(Exception) as caught:
        action()
    return unwrapped(caught.value)


def test_every_column_and_every_null_comes_back(spark, tmp_path):
    log = new_log(tmp_path)
    append(
        log,
        [put(b"k", b"v"), (None, None), (b"", b"", Op.DELETE), (b"\xff\x00", b"x" * 300, Op.PURGE)],
        headers=[[("a", b"1"), ("b", None)], None, [], [("ü", b"")]],
    )
    frame = load(spark, log)
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("op", "tinyint"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "map<string,binary>"),
    ]
    rows = frame.toArrow().sort_by("offset").to_pylist()
    stamp = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=NOW)
    assert [(row["offset"], row["op"], row["key"], row["value"], row["headers"]) for row in rows] == [
        (0, 0, b"k", b"v", [("a", b"1"), ("b", None)]),
        (1, 0, None, None, None),
        (2, 1, b"", b"", []),
        (3, 2, b"\xff\x00", b"x" * 300, [("ü", b"")]),
    ]
    assert [row["timestamp"] for row in rows] == [stamp + timedelta(microseconds=n) for n in range(4)]


def test_an_empty_log_is_an_empty_table(spark, tmp_path):
    assert load(spark, new_log(tmp_path)).collect() == []


def test_one_record_is_one_row(spark, tmp_path):
    log = new_log(tmp_path)
    append(log, [put(b"k", b"v")])
    assert [(row.key, row.value) for row in load(spark, log).collect()] == [(b"k", b"v")]


@pytest.mark.matrix
def test_one_huge_record_among_small_ones_comes_through_whole(spark, tmp_path):
    log = new_log(tmp_path)
    size = 64 << 20
    append(log, [*numbered(0, 100), put(b"huge", b"x" * size), *numbered(101, 100)])
    frame = load(spark, log)
    found = frame.selectExpr("count(*) AS rows", "max(length(value)) AS longest", "sum(offset) AS sum").first()
    assert (found.rows, found.longest, found.sum) == (201, size, sum(range(201)))


def test_a_narrower_schema_reads_only_that(spark, tmp_path):
    log = new_log(tmp_path)
    append(log, numbered(0, 5))
    assert [tuple(row) for row in load(spark, log, "value BINARY, offset LONG").limit(2).collect()] == [
        (b"v0", 0),
        (b"v1", 1),
    ]


def test_options_bound_the_offsets_that_are_read(spark, tmp_path):
    log = new_log(tmp_path)
    for first in (0, 10, 20):
        append(log, numbered(first, 10))
    frame = load(spark, log, "offset LONG", startingOffset="7", endingOffset="23")
    assert [row.offset for row in frame.collect()] == list(range(7, 23))


def test_a_later_load_sees_what_was_appended_since(spark, tmp_path):
    log = new_log(tmp_path)
    append(log, numbered(0, 3))
    assert load(spark, log).count() == 3
    append(log, numbered(3, 3))
    assert load(spark, log).count() == 6


def test_many_batches_are_read_in_parallel_and_each_once(spark, tmp_path):
    log = new_log(tmp_path)
    filler = b"\x00" * 40_000
    with log.producer(batch_bytes=400_000, compression="none") as producer:
        for n in range(200):
            producer.append(key=b"%d" % n, value=filler)
    frame = load(spark, log, "offset LONG, key BINARY", partitions="4")
    assert frame.rdd.getNumPartitions() == 4
    assert sorted((row.offset, bytes(row.key)) for row in frame.collect()) == [(n, b"%d" % n) for n in range(200)]


# --- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schema", "sentence"),
    [("colour STRING", "no column 'colour'"), ("value STRING", "'value' of a log is BINARY, not STRING")],
)
def test_a_wrong_schema_is_refused_in_one_sentence(spark, tmp_path, schema, sentence):
    log = new_log(tmp_path)
    error = reason(lambda: load(spark, log, schema).collect())
    assert isinstance(error, InvalidInput)
    assert sentence in str(error)


@pytest.mark.matrix
def test_a_place_without_a_log_is_named(spark, tmp_path):
    error = reason(lambda: load(spark, f"file://{tmp_path}/nothing").collect())
    assert isinstance(error, NotALog)
    assert f"{tmp_path}/nothing" in str(error)


@pytest.mark.matrix
def test_a_log_of_a_newer_format_asks_for_an_upgrade(spark, tmp_path):
    log = new_log(tmp_path)
    identity = tmp_path / "log" / "log.json"
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "min_reader": CONTENT_TYPE_VERSION + 1}))
    error = reason(lambda: load(spark, log).collect())
    assert isinstance(error, UnsupportedVersion)
    assert "upgrade" in str(error)


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.matrix
@pytest.mark.parametrize(("harm", "kind"), [(damaged, CorruptData), (Path.unlink, NotFound)])
def test_a_harmed_batch_is_named_by_object(spark, tmp_path, harm, kind: type[StrandlineError]):
    log = new_log(tmp_path)
    append(log, numbered(0, 10))
    append(log, numbered(10, 10))
    victim = batch_files(log)[1]
    harm(victim)
    error = reason(lambda: load(spark, log).collect())
    assert isinstance(error, kind)
    assert str(victim) in str(error)
    assert load(spark, log, endingOffset="10").count() == 10


def test_the_front_leads_to_spark(spark):
    assert sl.spark.StrandlineDataSource.name() == "strandline"


@pytest.mark.matrix
@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_option_is_one_sentence_in_the_driver_before_any_job(spark, tmp_path, streaming):
    log = new_log(tmp_path)
    append(log, [put(b"a", b"1")])

    def run(name: str, value: str) -> None:
        source = (spark.readStream if streaming else spark.read).format("strandline").option(name, value)
        if not streaming:
            source.load(log.url).collect()
            return
        query = source.load(log.url).writeStream.format("noop").trigger(availableNow=True).start()
        query.awaitTermination(60)

    before = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
    for name, value in (("startingOffset", "-1"), ("maxRecordsPerTrigger", "\x1b[31m"), ("maxOffsetsPerTrigger", "5")):
        ours = reason(lambda name=name, value=value: run(name, value))
        assert isinstance(ours, InvalidInput)
        assert name.lower() in str(ours).lower()
        assert str(ours).isprintable()
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == before
