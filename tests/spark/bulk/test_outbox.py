"""Spark writes into nodes and write-ahead logs through an outbox: each row once, whatever fails in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import strandline as sl
from strandline.errors import InvalidInput, Unsupported
from strandline.log.object.head.edits import pin_slot
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.spark.datasource import writing
from strandline.spark.datasource.outbox import _bind, slot_name
from strandline.spark.datasource.source import StrandlineDataSource
from strandline.spark.datasource.writing import LogWriter
from strandline.spark.write_options import parse_write_options
from strandline.testing.faulty import Crash
from tests.spark.bulk.test_write import numbers, refused, text

TOKEN = "token-of-the-spark-driver"
SERVER = ServerSecurity(tokens=Tokens.parse(f"spark client {TOKEN}\n", "tokens"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path / "a", name="a", policy="local", server=SERVER) as primary:
        yield primary


@pytest.fixture
def outbox(tmp_path: Path) -> str:
    return f"file://{tmp_path}/outbox"


def save(frame: DataFrame, url: str, outbox: str, **options: str) -> None:
    writer = frame.write.format("strandline").mode("append").options(outbox=outbox, **options)
    (writer.option("tokenFile", token_file(outbox)) if url.startswith("grpc") else writer).save(url)


def token_file(outbox: str) -> str:
    path = Path(outbox.removeprefix("file://")).parent / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


def written(url: str) -> list[bytes]:
    security = ClientSecurity(token=TOKEN) if url.startswith("grpc") else None
    with sl.open(url, **({"security": security} if security else {"read_only": True})) as log:
        return [value for batch in log.read("beginning") for value in batch.column("value").to_pylist()]


@pytest.mark.matrix
def test_a_job_into_a_node_is_there_once_and_in_order(spark: SparkSession, node: sl.node.Primary, outbox: str) -> None:
    for _ in range(2):
        save(numbers(spark, 0, 300), node.url, outbox, job="first")
    save(numbers(spark, 300, 400, partitions=1), node.url, outbox, job="second")
    assert written(node.url) == text(0, 400)
    with sl.open(outbox) as box:
        assert box.slots.get(slot_name(node.log_id)).position == 400


def committed(url: str, outbox: str, values: list[bytes], column: str = "value", **options: str) -> None:
    """A batch job in this process, without a session."""
    schema = StructType([StructField(column, BinaryType())])
    writer = LogWriter({"path": url, "outbox": outbox, **options}, schema, overwrite=False)
    writer.commit([writer.write(iter([pa.record_batch({column: pa.array(values)})]))])


def test_what_a_lost_driver_left_in_the_outbox_is_moved_by_the_same_job(
    tmp_path: Path, outbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: object) -> None:
        raise Crash

    url = f"wal://{tmp_path}/log"
    committed(url, outbox, text(0, 100), job="first")
    with monkeypatch.context() as patched:
        patched.setattr(writing, "forward", dies)
        with pytest.raises(Crash):
            committed(url, outbox, text(100, 200), job="second")
    with sl.open(outbox) as box:
        assert box.bounds().next == 200, "listed, and not moved"
    assert written(url) == text(0, 100)
    committed(url, outbox, text(100, 200), job="second")
    assert written(url) == text(0, 200)


@pytest.mark.matrix
def test_a_node_that_is_down_refuses_a_job_before_anything_is_in_the_outbox(
    spark: SparkSession, tmp_path: Path, outbox: str
) -> None:
    with sl.node.Primary.open(tmp_path / "a", name="a", policy="local", server=SERVER) as primary:
        url = primary.url
        save(numbers(spark, 0, 100), url, outbox, job="first")
    refused(lambda: save(numbers(spark, 100, 200), url, outbox, job="second"))
    with sl.open(outbox) as box:
        assert box.bounds().next == 100


def test_an_outbox_has_one_target_and_gives_it_no_rows_for_another(tmp_path: Path, outbox: str) -> None:
    one, other = f"wal://{tmp_path}/one", f"wal://{tmp_path}/other"
    committed(one, outbox, text(0, 3))
    with pytest.raises(InvalidInput, match="belongs to another log"):
        committed(other, outbox, [b"of the other"])
    committed(one, outbox, text(3, 6))
    assert written(one) == text(0, 6)
    assert written(other) == []
    with sl.open(outbox) as box:
        assert [state.position for state in box.slots.list()] == [6]


def test_jobs_that_begin_at_once_on_a_new_outbox_agree_on_one_target(tmp_path: Path) -> None:
    """Whichever comes first: it stays bound, and every job of the other target is refused."""
    targets = [slot_name(UUID(int=number)) for number in (1, 2)]
    for turn in range(15):
        url = f"file://{tmp_path}/outbox-{turn}"
        sl.open(url, create=True, retention="consumed")
        together = Barrier(6)

        def begin(target: str, url: str = url, together: Barrier = together) -> str | None:
            log, options = sl.open(url), parse_write_options({"path": "wal:///log", "outbox": url}, "job")
            together.wait()
            try:
                _bind(log, target, options)
            except InvalidInput:
                return None
            return target

        with ThreadPoolExecutor(6) as pool:
            bound = list(pool.map(begin, targets * 3))
        assert len(set(bound) - {None}) == 1, bound
        (state,) = sl.open(url).slots.list()
        assert (state.name, bound.count(state.name)) == (next(filter(None, bound)), 3)


def test_a_target_whose_job_died_while_it_was_bound_keeps_the_outbox(tmp_path: Path, outbox: str) -> None:
    first, second = slot_name(UUID(int=1)), slot_name(UUID(int=2))
    log, options = sl.open(outbox, create=True), parse_write_options({"path": "wal:///log", "outbox": outbox}, "job")
    log._lister.cell.update(log.slots.op(), lambda head: pin_slot(head, first, 0))  # and not its cell
    with pytest.raises(InvalidInput, match="belongs to another log"):
        _bind(log, second, options)
    _bind(log, first, options)
    assert [state.name for state in log.slots.list()] == [first]


def test_a_typed_target_takes_the_fields_of_its_values(tmp_path: Path, outbox: str) -> None:
    url = f"wal://{tmp_path}/typed"
    sl.open(url, create=True, value=sl.values.Json(pa.schema([("id", pa.int64()), ("city", pa.string())]))).close()
    schema = StructType([StructField("id", LongType()), StructField("city", StringType())])
    writer = LogWriter({"path": url, "outbox": outbox}, schema, overwrite=False)
    writer.commit([writer.write(iter([pa.record_batch({"id": [1, 2], "city": ["Ulm", None]})]))])
    assert [json.loads(value) for value in written(url)] == [{"id": 1, "city": "Ulm"}, {"id": 2, "city": None}]


@pytest.mark.matrix
def test_a_stream_into_a_node_writes_each_row_once_over_restarts_and_a_lost_checkpoint(
    spark: SparkSession, node: sl.node.Primary, outbox: str, tmp_path: Path
) -> None:
    source = sl.open(f"file://{tmp_path}/source", create=True)

    def run(checkpoint: str, **options: str) -> None:
        given = {"checkpointLocation": f"{tmp_path}/{checkpoint}", "outbox": outbox, **options}
        stream = spark.readStream.format("strandline").load(source.url)
        query = (
            stream.select("key", "value")
            .writeStream.format("strandline")
            .options(tokenFile=token_file(outbox), **given)
            .trigger(availableNow=True)
            .start(node.url)
        )
        query.awaitTermination(600)

    for first in (0, 10):
        with source.producer() as producer:
            for value in text(first, first + 10):
                producer.append(value=value)
        run("one", writer="copy")
    assert written(node.url) == text(0, 20)
    run("lost", writer="copy", repeated="accept")
    assert written(node.url) == text(0, 20)


@pytest.mark.matrix
def test_a_write_ahead_log_is_written_by_the_driver(spark: SparkSession, tmp_path: Path, outbox: str) -> None:
    url = f"wal://{tmp_path}/log"
    save(numbers(spark, 0, 50), url, outbox)
    assert written(url) == text(0, 50)


@pytest.mark.matrix
def test_what_cannot_be_is_one_sentence(
    spark: SparkSession, node: sl.node.Primary, tmp_path: Path, outbox: str
) -> None:
    frame = numbers(spark, 0, 5)
    plain = frame.write.format("strandline").mode("append").option("tokenFile", token_file(outbox))
    assert isinstance(refused(lambda: plain.save(node.url)), Unsupported)
    expecting = plain.option("outbox", outbox).option("expectedOffset", "0")
    assert "expectedOffset is for object logs" in str(refused(lambda: expecting.save(node.url)))
    boxed = frame.write.format("strandline").mode("append").option("outbox", outbox).option("create", "true")
    error = refused(lambda: boxed.save(f"file://{tmp_path}/plain"))
    assert isinstance(error, InvalidInput)
    assert "outbox is for nodes" in str(error)


def test_executors_get_no_token(node: sl.node.Primary, outbox: str) -> None:
    source = StrandlineDataSource({"path": node.url, "outbox": outbox, "tokenFile": token_file(outbox)})
    schema = StructType([StructField("value", BinaryType())])
    for writer in (source.writer(schema, overwrite=False), source.streamWriter(schema, overwrite=False)):
        assert TOKEN.encode() not in cloudpickle.dumps(writer)
    telling = StrandlineDataSource({"path": node.url, "outbox": outbox, "token": TOKEN})
    with pytest.raises(InvalidInput, match="did you mean 'tokenFile'"):
        telling.writer(schema, overwrite=False)
