"""Pipelines into other tables than Delta: executors write Iceberg's files, the driver applies to SQL databases."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.spark import follow
from tests.spark.helpers import append, new_log, put

NOW = {"availableNow": True}
ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()}))

pytestmark = pytest.mark.matrix


@pytest.fixture
def log(tmp_path):
    log = new_log(tmp_path)
    for first in range(0, 300, 100):
        values = [b"bad" if n == 117 else json.dumps({"id": n}).encode() for n in range(first, first + 100)]
        append(log, [put(b"k%d" % (number % 40), value) for number, value in enumerate(values, first)])
    return log


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_executors_write_the_iceberg_table_that_one_process_would(spark, log, tmp_path, mode):
    catalog = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")

    def sink(name):
        return sl.IcebergSink(catalog, f"shop.{name}", mode=mode, value=ORDER, dead_letters=f"shop.{name}_letters")

    def rows(name):
        found = catalog.load_table(f"shop.{name}").scan().to_arrow()
        named = [column for column in found.column_names if column != "of_table"]  # letters name their own table
        return sorted(map(str, found.select(named).to_pylist()))

    with closing(catalog):
        sl.follow(log, sink("here"), upto="end")
        following = follow(spark, log, sink("there"), slot="s", trigger=NOW, place="executors")
        assert following.await_termination(600)
        assert rows("there") == rows("here")
        assert rows("there_letters") == rows("here_letters")
        assert following.progress().jobs == 1
        assert following.progress().cursor == log.end()


def test_the_driver_applies_to_a_sql_table(spark, log, tmp_path):
    path = str(tmp_path / "shop.db")
    sink = sl.SqliteSink(path, table="orders", value=ORDER, dead_letters=True)
    following = follow(spark, log, sink, slot="s", trigger=NOW)
    assert following.await_termination(600)
    assert following.progress().cursor == log.end()
    assert log.slots.get("s").position == 300
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*), sum(id) FROM orders").fetchone() == (40, sum(range(260, 300)))
        assert database.execute('SELECT "offset" FROM orders_dead_letters').fetchall() == [(117,)]
