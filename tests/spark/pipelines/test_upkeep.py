"""Upkeep of a table that a pipeline follows: in the driver, between its commits."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.errors import StorageError
from strandline.spark import follow
from strandline.tables.files import sink as file_sink
from tests.spark.helpers import append, new_log, numbered
from tests.tables.upkeep.kept_table import KEPT

ONE_EACH = {"maxBatchesPerTrigger": "1"}
NOW = {"availableNow": True}


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path, "orders")
    for first in range(0, 70, 2):
        append(log, numbered(first, 2))
    return log


@pytest.mark.parametrize("place", ["driver", "executors"])
def test_a_pipeline_joins_small_files_of_its_table(spark, log, tmp_path, place):
    sink = sl.DeltaSink(str(tmp_path / "table"), mode="append", layout=KEPT)
    following = follow(spark, log, sink, trigger=NOW, options=ONE_EACH, place=place)
    assert following.await_termination(600)
    assert following.progress().commits == 35
    assert (sink.upkeep.joins, sink.upkeep.joined, sink.upkeep.failures) == (1, 32, 0)
    assert sink.size().files == 4
    assert sl.tables.verify(sink, log).is_clean


def test_a_failure_of_upkeep_is_shown_and_stops_no_pipeline(spark, log, tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("The disk is full.")

    monkeypatch.setattr(file_sink, "joined_files", full)
    table = str(tmp_path / "table")
    following = follow(
        spark, log, sl.DeltaSink(table, mode="append", layout=KEPT), trigger=NOW, options=ONE_EACH, place="driver"
    )
    assert following.await_termination(600)
    assert following.progress().upkeep_failures == 1
    labels = {"log": log.url, "table": table}
    assert REGISTRY.get_sample_value("strandline_pipeline_upkeep_failures_total", labels) == 1
