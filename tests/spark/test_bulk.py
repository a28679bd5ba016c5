"""Bulk jobs on Spark's executors give what threads of one process give."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import CursorExpired, UnsupportedVersion
from strandline.spark.executors import SparkHands
from tests.bulk.test_export import exported
from tests.spark.helpers import append, new_log, numbered


@pytest.fixture
def log(tmp_path: Path) -> sl.log.ObjectLog:
    log = new_log(tmp_path)
    for first in range(0, 100, 10):
        append(log, numbered(first, 10))
    return log


def test_an_export_by_executors_has_the_same_records(
    spark: SparkSession, log: sl.log.ObjectLog, tmp_path: Path
) -> None:
    there = sl.bulk.export(log, tmp_path / "there", hands=sl.spark.hands(spark), part_bytes=1)
    here = sl.bulk.export(log, tmp_path / "here", part_bytes=1)
    assert there == here
    assert exported(tmp_path / "there").equals(exported(tmp_path / "here"))


def _raises() -> None:
    raise CursorExpired("gone on purpose")


def test_an_error_of_a_task_is_raised_as_it_is(spark: SparkSession) -> None:
    with pytest.raises(CursorExpired, match="gone on purpose"):
        list(SparkHands(spark).run([_raises], "a job"))
    assert list(SparkHands(spark).run([], "nothing")) == []


def test_another_version_of_the_package_on_executors_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strandline.spark.executors.version", lambda _: "0.0.1")
    with pytest.raises(UnsupportedVersion, match=r"The driver has version 0\.0\.1 of strandline and an executor has"):
        list(SparkHands(spark).run([dict], "a job"))
