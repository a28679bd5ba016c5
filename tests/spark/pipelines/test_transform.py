"""Transforms that Spark runs between decoding and writing, and rows that are shuffled between workers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as sql

import strandline as sl
from strandline.errors import BadRecord, CorruptData, InvalidInput, SchemaRefused, TransformFailed
from strandline.spark import follow
from strandline.spark.pipelines import pipeline
from strandline.spark.pipelines.shuffle import ShuffleJob
from strandline.spark.pipelines.workers import SparkWorkers
from strandline.storage.retry import Backoff
from strandline.tables.files import layout
from tests.spark.helpers import append, delete, new_log, put
from tests.spark.pipelines.test_tables import table_of

NOW = {"availableNow": True}
ORDER = pa.schema({"id": pa.int64(), "city": pa.string(), "paid": pa.timestamp("us", "UTC")})
CODEC = sl.values.Json(ORDER)
META = ["_key", "_offset", "_timestamp", "_op"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def order(number: int) -> bytes:
    paid = f"2026-01-{number % 28 + 1:02d}T12:00:00Z"
    return json.dumps({"id": number, "city": f"city-{number % 5}", "paid": paid}).encode()


def change(number: int):
    if number % 11 == 10:
        return delete(b"k%d" % (number % 40))
    return put(b"k%d" % (number % 40), b"bad" if number == 117 else order(number))


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """A fault of ours is not tried again for a quarter of an hour."""
    monkeypatch.setattr(pipeline, "PATIENCE", Backoff(attempts=2, base=0.01, ceiling=0.01))


@pytest.mark.matrix
def test_a_udf_that_raises_is_tried_three_times_and_ends_the_pipeline_with_its_traceback(
    spark, log, tmp_path, monkeypatch
):
    monkeypatch.setattr(pipeline, "PATIENCE", Backoff(attempts=40, base=0.01, ceiling=0.01))

    @sql.udf("string")
    def hopeless(city):
        raise LookupError(f"no such {city and 'city'}")

    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", value=CODEC, dead_letters=str(tmp_path / "dead"))
    following = follow(
        spark, log, sink, slot="s", transform=lambda rows: rows.withColumn("x", hopeless("city")), trigger=NOW
    )
    with pytest.raises(TransformFailed, match=r"failed 3 times in a row.*LookupError: no such") as failed:
        following.await_termination(600)
    assert any("in hopeless" in note for note in failed.value.__notes__)
    assert following.progress().jobs == 3
    assert log.slots.list() == []


def test_a_udf_that_cannot_be_pickled_is_one_sentence(spark, log, tmp_path):
    held = threading.Lock()
    locked = sql.udf(lambda city: held and city, "string")
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", value=CODEC)
    with pytest.raises(InvalidInput, match=r"cannot be sent to Spark's executors .*lock.* inside of the function"):
        follow(spark, log, sink, transform=lambda rows: rows.withColumn("x", locked("city")), trigger=NOW)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT parse_json('1') AS v, _key FROM changes",
        "SELECT array(named_struct('v', parse_json('1'))) AS v, _key FROM changes",
    ],
)
def test_a_variant_is_refused_at_the_start(spark, log, tmp_path, query):
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", value=CODEC)
    with pytest.raises(InvalidInput, match="'v' as VARIANT, which tables do not store"):
        follow(spark, log, sink, transform=query, trigger=NOW)


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path)
    for first in range(0, 300, 50):
        append(log, [change(number) for number in range(first, first + 50)])
    return log


def rows_of(place: Path) -> list[dict[str, object]]:
    return sorted(table_of(place).to_pylist(), key=str)


def sink_at(place: Path, mode: str, **more) -> sl.DeltaSink:
    return sl.DeltaSink(str(place), mode=mode, value=CODEC, dead_letters=f"{place}-letters", **more)


def run(spark, log, sink, **more):
    following = follow(spark, log, sink, trigger=NOW, **more)
    assert following.await_termination(600)
    assert following.progress().cursor == log.end()
    return following


def in_arrow(changes: pa.Table) -> pa.Table:
    """What the DataFrame below does, by the sink's own transform."""
    import pyarrow.compute as pc

    kept = changes.filter(pc.not_equal(pc.fill_null(changes["city"], ""), "city-3"))
    return kept.set_column(1, "city", pc.utf8_upper(kept["city"]))


def in_spark(frame):
    kept = frame.where(sql.coalesce("city", sql.lit("")) != "city-3")
    return kept.withColumn("city", sql.upper("city"))


AS_QUERY = """
    SELECT id, upper(city) AS city, paid, _key, _offset, _timestamp, _op -- {a comment}
    FROM changes AS c
    WHERE coalesce(city, '') <> 'city-3';
"""


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("latest", in_spark),
        ("append", AS_QUERY),
        pytest.param("history", AS_QUERY, marks=pytest.mark.matrix),
        pytest.param("append", in_spark, marks=pytest.mark.matrix),
    ],
)
def test_a_transform_of_spark_gives_the_table_that_the_same_one_in_arrow_does(spark, log, tmp_path, mode, given):
    sl.follow(log, sink_at(tmp_path / "here", mode, transform=in_arrow), upto="end")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        following = run(spark, log, sink_at(tmp_path / "there", mode), transform=given, slot="s")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")
    assert rows_of(tmp_path / "there-letters") == rows_of(tmp_path / "here-letters")
    assert following.progress().bad_records == 1
    append(log, [change(number) for number in range(300, 350)])
    sl.follow(log, sink_at(tmp_path / "here", mode, transform=in_arrow), upto="end")
    run(spark, log, sink_at(tmp_path / "there", mode), transform=given, slot="s")
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "given",
    [
        lambda frame: frame.limit(0),
        lambda frame: frame.limit(3),
        lambda frame: frame.where("1 = 0"),
        lambda frame: (frame.limit(1).count(), frame.limit(3))[1],
    ],
)
def test_a_transform_that_does_not_read_everything_loses_no_dead_letter(spark, log, tmp_path, given):
    following = run(spark, log, sink_at(tmp_path / "table", "append"), transform=given)
    assert following.progress().bad_records == 1
    assert [row["offset"] for row in rows_of(tmp_path / "table-letters")] == [117]


@pytest.mark.matrix
def test_rows_may_be_multiplied_and_joined_and_keys_derived(spark, log, tmp_path):
    def by_city(frame):
        twice = frame.where("_op = 0").crossJoin(spark.range(2).toDF("copy"))
        return twice.selectExpr("city || '-' || id % 2 AS place", "id AS last", "_offset", "_timestamp", "0 AS _op")

    def by_half(frame):
        return frame.where("_op = 0").selectExpr("city", "id AS last", "_offset", "_timestamp", "_op")

    run(spark, log, sink_at(tmp_path / "cities", "latest", key="city"), transform=by_half)
    found = {row["city"]: row["last"] for row in rows_of(tmp_path / "cities")}
    puts = [n for n in range(300) if n % 11 != 10 and n != 117]
    assert found == {f"city-{city}": max(n for n in puts if n % 5 == city) for city in range(5)}
    run(spark, log, sink_at(tmp_path / "all", "append"), transform=by_city)
    assert len(rows_of(tmp_path / "all")) == 2 * len(puts)
    following = follow(spark, log, sink_at(tmp_path / "bad", "latest", key="place"), trigger=NOW, transform=by_city)
    with pytest.raises(InvalidInput, match="several rows of one key for the record at offset"):
        following.await_termination(600)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("SELECT id, _key, _timestamp, _op FROM changes", "'_offset' is missing"),
        ("SELECT nothing FROM changes", "cannot be applied"),
        ("DROP TABLE changes", "cannot be applied"),
        (lambda frame: frame.selectExpr("*", "id AS city"), "'city' twice"),
        (lambda frame: frame.selectExpr("*", "id AS CITY"), "'CITY' twice"),
        (lambda frame: frame.select(), "no columns"),
        ("SELECT * EXCEPT (_timestamp), CAST(_timestamp AS timestamp_ntz) AS _timestamp FROM changes", "a time zone"),
        (lambda frame: frame.collect(), "a batch DataFrame"),
        (17, "a function or a query"),
    ],
)
def test_a_transform_that_cannot_be_is_refused_before_anything_is_made(spark, log, tmp_path, given, message):
    with pytest.raises(InvalidInput, match=message):
        follow(spark, log, sink_at(tmp_path / "table", "latest"), slot="s", trigger=NOW, transform=given)
    assert not (tmp_path / "table").exists()
    assert log.slots.list() == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("SELECT * EXCEPT (_offset), _offset + 1000 AS _offset FROM changes", "rows keep _offset and _op"),
        ("SELECT * EXCEPT (_op), 7 AS _op FROM changes", "rows keep _offset and _op"),
        ("SELECT * EXCEPT (_key), CAST(NULL AS binary) AS _key FROM changes", "whose _key is null"),
    ],
)
def test_rows_of_a_keyed_table_keep_what_places_them(spark, log, tmp_path, given, message):
    following = follow(spark, log, sink_at(tmp_path / "table", "latest"), trigger=NOW, transform=given)
    with pytest.raises(InvalidInput, match=message):
        following.await_termination(600)


@pytest.mark.matrix
def test_a_transform_is_given_what_the_log_says_its_values_are(spark, tmp_path):
    log = sl.open(f"{tmp_path}/typed", create=True, value=CODEC)
    append(log, [put(b"a", order(1)), put(b"b", order(2))])
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", value="log")
    run(spark, log, sink, transform="SELECT id * 2 AS twice, city FROM changes")
    expected = [{"twice": 2, "city": "city-1"}, {"twice": 4, "city": "city-2"}]
    assert rows_of(tmp_path / "table") == expected
    append(log, [put(b"c", order(3))])
    again = sl.DeltaSink(
        str(tmp_path / "table"), mode="append", value="log"
    )  # none of its columns shows that it is typed
    run(spark, log, again, transform="SELECT id * 2 AS twice, city FROM changes")
    assert rows_of(tmp_path / "table") == [*expected, {"twice": 6, "city": "city-3"}]


@pytest.mark.matrix
def test_a_new_version_of_the_logs_codec_ends_a_transforming_pipeline_before_it_applies_more(spark, tmp_path):
    narrow = sl.values.Json(pa.schema({"id": pa.int32()}))
    log = sl.open(f"{tmp_path}/typed", create=True, value=narrow)
    append(log, [put(b"a", b'{"id": 1}')])
    table = tmp_path / "table"

    def sink() -> sl.DeltaSink:
        return sl.DeltaSink(str(table), mode="append", value="log", dead_letters=f"{table}-letters")

    query = "SELECT id FROM changes"
    with follow(spark, log, sink(), transform=query, trigger={"processingTime": "0 seconds"}) as following:
        wait_until(lambda: following.progress().records == 1 or not following.active)
        log.evolve_value(sl.values.Json(pa.schema({"id": pa.int64()})))
        append(log, [put(b"b", b'{"id": 5000000000}')])
        with pytest.raises(SchemaRefused, match="start the pipeline again"):
            following.await_termination(600)
    assert rows_of(table) == [{"id": 1}]
    run(spark, log, sink(), transform=query)
    assert rows_of(table) == [{"id": 1}, {"id": 5000000000}]
    assert not Path(f"{table}-letters").exists()


def test_sinks_that_spark_cannot_transform_for_are_refused(spark, log, tmp_path):
    query = "SELECT * FROM changes"
    with pytest.raises(InvalidInput, match="Delta and Iceberg"):
        follow(spark, log, sl.SqliteSink(str(tmp_path / "a.db"), table="t"), trigger=NOW, transform=query)
    with pytest.raises(InvalidInput, match="place='driver'"):
        follow(spark, log, sink_at(tmp_path / "t", "append"), trigger=NOW, transform=query, place="driver")
    with pytest.raises(InvalidInput, match="not both"):
        follow(spark, log, sink_at(tmp_path / "t", "append", transform=in_arrow), trigger=NOW, transform=query)


@pytest.mark.matrix
def test_a_bad_record_before_a_transform_ends_the_pipeline_with_its_offset(spark, log, tmp_path):
    sink = sl.DeltaSink(str(tmp_path / "table"), value=CODEC)
    following = follow(spark, log, sink, slot="s", trigger=NOW, transform=in_spark)
    with pytest.raises(BadRecord, match="offset 117"):
        following.await_termination(600)
    assert log.slots.list() == []
    assert not (tmp_path / "table").exists()


def shuffled(spark, log, sink, since=None) -> list[object]:
    workers = SparkWorkers(spark, "executors")
    transaction = sink.begin(since=since or log.start(), upto=log.end(), tasks=16)
    assert len(transaction.parts) == 16
    written = workers.run(transaction.parts, log.plan(since or log.start()), "a test")
    transaction.commit(written)
    return list(written)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["latest", pytest.param("history", marks=pytest.mark.matrix)])
def test_the_rows_of_many_keyed_parts_are_shuffled(spark, log, tmp_path, mode, monkeypatch):
    monkeypatch.setattr(layout, "FEW_SHARES", 16)
    sl.follow(log, sink_at(tmp_path / "here", mode), upto="end")
    sink = sink_at(tmp_path / "there", mode)
    written = shuffled(spark, log, sink)
    assert {one.role for one in written} == {"reader", "writer"}
    assert sum(one.records for one in written) == 300
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")
    assert rows_of(tmp_path / "there-letters") == rows_of(tmp_path / "here-letters")
    # A compacted table is divided again: parts without a change write their rows of the old file, too.
    DeltaTable(str(tmp_path / "there")).optimize.compact()
    since = log.end()
    append(log, [put(b"k1", order(1))])
    shuffled(spark, log, sink, since)
    sl.follow(log, sink_at(tmp_path / "here", mode), upto="end")
    assert rows_of(tmp_path / "there") == rows_of(tmp_path / "here")


@pytest.mark.matrix
def test_a_reader_that_is_given_less_than_its_spans_ends_the_job(spark, log, tmp_path, monkeypatch):
    """The executors run what the driver pickles: a log whose object is another batch."""
    spans = list(log.plan(log.start()))
    workers = SparkWorkers(spark, "executors")
    sink = sink_at(tmp_path / "table", "append")
    transaction = sink.begin(since=log.start(), upto=log.end(), tasks=1)
    job = ShuffleJob(spark, transaction.parts, [[spans[0], *spans[2:]]], lambda: None)
    with pytest.raises(CorruptData, match="250 records"), workers._pool.shown("a test"):
        job.missing_reports([0]).collect()


STEPS = ["planned", "written", "committed", "advanced"]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_pipeline_killed_at_any_step_goes_on_with_a_newer_version_of_the_logs_codec(spark, tmp_path, mode):
    """Each run dies at another step, and before the next one the log's schema has one more field."""
    fields = {"id": pa.int64()}
    log = sl.open(f"{tmp_path}/typed", create=True, value=sl.values.Json(pa.schema(fields)))
    expected = []

    def sink() -> sl.DeltaSink:
        return sl.DeltaSink(str(tmp_path / "table"), mode=mode, value="log")

    def twice(frame):
        return frame.withColumn("twice", frame.id * 2)

    for number, step in enumerate(STEPS):
        fields[f"f{number}"] = pa.string()
        log.evolve_value(sl.values.Json(pa.schema(fields)))
        value = {"id": number, f"f{number}": step}
        append(log, [put(b"k%d" % number, json.dumps(value).encode())])
        expected.append(value | {"twice": 2 * number})

        def die(at: str, step: str = step) -> None:
            if at == step:
                raise KeyError(step)

        with pytest.raises(KeyError):
            follow(spark, log, sink(), slot="s", trigger=NOW, transform=twice, on_step=die).await_termination(600)
        stored = sink()
        stored.meet(log)
        cursor = stored.cursor(log.log_id)
        for slot in log.slots.list():  # it is given up again if nothing was stored
            assert slot.position <= (0 if cursor is None else cursor.next)
    run(spark, log, sink(), slot="s", transform=twice)
    found = sorted(table_of(tmp_path / "table").to_pylist(), key=lambda row: row["id"])
    named = [*fields, "twice"]
    assert [{name: row[name] for name in named} for row in found] == [
        {name: row.get(name) for name in named} for row in expected
    ]
