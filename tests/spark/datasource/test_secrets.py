"""Secrets among the options: what Spark writes down of them, which is its plans, event logs and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import InvalidInput
from strandline.model.records import READ_SCHEMA
from strandline.spark.options import parse_options
from strandline.spark.storage_options import storage_options, with_redacted_names
from strandline.spark.write_options import parse_write_options
from tests.spark.helpers import append, new_log, numbered

SECRETS = {
    "storage.secret.account_key": "zQ-account-Qz",
    "storage.secret.azure_storage_access_key": "zQ-storage-Qz",
    "storage.secret.sas_key": "zQ-shared-Qz",
    "storage.secret.service_account_key": "zQ-service-Qz",
    "storage.secret_access_key": "zQ-bucket-Qz",
    "storage.aws_session_token": "zQ-session-Qz",
    "storage.proxy_url": "http://me:zQ-proxy-Qz@proxy:3128",
}
"""Values that match none of Spark's patterns: it also redacts values that do."""
MARK = "zQ-"
WAIT = 600


@contextmanager
def event_log(spark: SparkSession, folder: Path) -> Iterator[Callable[[], str]]:
    """A real event log of a session that runs already; the call ends it, and reads it."""
    folder.mkdir()
    jvm: Any = spark._jvm
    context = spark.sparkContext._jsc.sc()
    conf = context.conf().clone().set("spark.eventLog.compress", "false").set("spark.eventLog.overwrite", "true")
    none = jvm.scala.Option.apply(None)
    name = "org.apache.spark.scheduler.EventLoggingListener"
    listener = getattr(jvm, name)("secrets", none, jvm.java.net.URI(folder.as_uri()), conf)
    listener.start()
    context.addSparkListener(listener)
    ended: list[str] = []

    def text() -> str:
        if not ended:
            context.listenerBus().waitUntilEmpty()
            context.removeSparkListener(listener)
            listener.stop()
            ended.append("".join(file.read_text() for file in folder.rglob("*") if file.is_file()))
        return ended[0]

    try:
        yield text
    finally:
        text()


def failed(action: Callable[[], object]) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def run(query: Any) -> None:
    assert query.awaitTermination(WAIT)


def test_an_event_log_has_none_of_the_secrets_of_a_view(spark: SparkSession, tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 3))
    with event_log(spark, tmp_path / "events") as recorded:
        loaded = spark.read.format("strandline").options(**SECRETS).load(log.url)
        loaded.createOrReplaceTempView("secretive")
        plan = loaded._jdf.queryExecution().toString()
    assert "storage.secret.account_key=*********(redacted)" in recorded(), "the event log has no plan with options"
    assert MARK not in recorded()
    assert MARK not in plan


@pytest.mark.slow
def test_an_event_log_has_none_of_the_secrets_of_queries_streams_writes_views_and_failures(
    spark: SparkSession, tmp_path: Path
) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 20))
    url, copy = log.url, new_log(tmp_path, "copy").url
    errors = []
    with event_log(spark, tmp_path / "events") as recorded:
        loaded = spark.read.format("strandline").options(**SECRETS).load(url)
        assert loaded.count() == 20
        loaded.createOrReplaceTempView("secretive")
        assert spark.sql("SELECT * FROM secretive WHERE offset < 5").count() == 5
        options = ", ".join(f"'{name}' '{value}'" for name, value in SECRETS.items())
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW declared USING strandline OPTIONS (path '{url}', {options})")
        assert spark.sql("SELECT count(*) FROM declared").first()[0] == 20
        rows = spark.range(3).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS value")
        rows.write.format("strandline").mode("append").options(**SECRETS).save(copy)
        stream = spark.readStream.format("strandline").options(**SECRETS).load(url).select("value").writeStream
        written = stream.format("strandline").options(**SECRETS).option("checkpointLocation", f"{tmp_path}/checkpoint")
        run(written.trigger(availableNow=True).start(copy))
        errors.append(failed(loaded.selectExpr("assert_true(offset < 2)").collect))
        for wrong in ({"startingOffset": "99"}, {"nonsense": "1"}):
            read = spark.read.format("strandline").options(**SECRETS, **wrong)
            errors.append(failed(lambda read=read: read.load(url).collect()))
        broken = rows.selectExpr("CAST(raise_error('no') AS BINARY) AS value").write.format("strandline")
        errors.append(failed(lambda: broken.mode("append").options(**SECRETS).save(copy)))
        plan = loaded._jdf.queryExecution().toString()
    text = recorded()
    assert "storage.secret.account_key=*********(redacted)" in text, "the event log has no plan with options"
    assert MARK not in text
    assert MARK not in plan
    assert MARK not in "\n".join(errors)
    stored = [file.read_bytes() for file in (tmp_path / "checkpoint").rglob("*") if file.is_file()]
    assert stored
    assert not any(MARK.encode() in data for data in stored)


@pytest.mark.parametrize("name", ["account_key", "AZURE_STORAGE_ACCESS_KEY", "sas_key", "service_account_key"])
def test_a_secret_that_spark_would_show_is_refused_and_the_new_name_is_said(name: str) -> None:
    for parse in (parse_options, lambda given: parse_write_options(given, "job")):
        with pytest.raises(InvalidInput, match=rf"name it 'storage\.secret\.{name.lower()}'") as caught:
            parse({"path": "az://container/log", f"storage.{name}": "zQ-key-Qz"})
        assert MARK not in str(caught.value)


def test_an_address_with_a_password_is_refused_in_every_option_that_spark_shows() -> None:
    for name in ("path", "storage.endpoint", "outbox"):
        given = {"path": "s3://bucket/log", name: "https://me:zQ-word-Qz@host/x"}
        with pytest.raises(InvalidInput) as caught:
            parse_write_options(given, "job")
        assert MARK not in str(caught.value)


def test_a_secret_is_refused_before_spark_describes_a_plan_of_it(spark: SparkSession, tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 3))
    shown = {"storage.account_key": "zQ-account-Qz"}
    rows = spark.range(3).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS value")
    with event_log(spark, tmp_path / "events") as recorded:
        read = spark.read.format("strandline").options(**shown)
        said = failed(lambda: read.load(log.url).createOrReplaceTempView("shown"))
        said += failed(lambda: rows.write.format("strandline").mode("append").options(**shown).save(log.url))
    assert said.count("storage.secret.account_key") >= 2
    assert MARK not in said
    assert MARK not in recorded()
    assert log.bounds().next == 3


def test_calls_of_the_package_rename_secrets_by_themselves(spark: SparkSession, tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 3))
    found = sl.spark.read(spark, log.url, options={"storage.account_key": "zQ-account-Qz"})
    assert found.columns == list(READ_SCHEMA.names)
    assert MARK not in found._jdf.queryExecution().toString()


def test_renamed_options_reach_the_store_under_their_own_names() -> None:
    given = {"storage.region": "eu", "storage.account_key": "a", "storage.secret_access_key": "b"}
    renamed = with_redacted_names(given)
    assert list(renamed) == ["storage.region", "storage.secret.account_key", "storage.secret_access_key"]
    assert storage_options(renamed) == {"region": "eu", "account_key": "a", "secret_access_key": "b"}


def test_options_show_no_secret() -> None:
    given = {"path": "az://container/log", **SECRETS}
    assert MARK not in repr(parse_options(given)) + repr(parse_write_options(given, "stream"))
