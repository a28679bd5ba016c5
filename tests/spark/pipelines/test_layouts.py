"""Executors write tables with a layout: each part its partitions, and one commit for all of them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.spark import follow
from strandline.tables import Layout
from tests.spark.helpers import append, new_log, put
from tests.tables.layouts.formats import PLACES, counts, stored

ORDER = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()}))
ONCE = {"availableNow": True}


def extend(log: Any, first: int, end: int) -> None:
    rows = (json.dumps({"id": n * 37 % 997, "city": f"c{n % 4}" if n % 5 else None}) for n in range(first, end))
    append(log, [put(b"k%d" % (n % 60), value.encode()) for n, value in enumerate(rows, first)])


@pytest.fixture(params=sorted(PLACES))
def place(request, tmp_path):
    found = PLACES[request.param](tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("mode", ["append", "history"])
def test_executors_divide_rows_by_partitions(spark, place, tmp_path, mode):
    log = new_log(tmp_path, "log")
    time = "_valid_from" if mode == "history" else "_timestamp"
    sink = place.sink(mode=mode, value=ORDER, layout=Layout(["city", f"day({time})"], "id"))
    for first in (0, 400):
        extend(log, first, first + 400)
        assert follow(spark, log, sink, trigger=ONCE, place="executors").await_termination(500)
    assert {values[0] for values in counts(place)} == {None, "c0", "c1", "c2", "c3"}
    assert sum(counts(place).values()) == 800
    for path in place.files():
        ids = stored(path)["id"].to_pylist()
        assert ids == sorted(ids)
    check = sl.tables.verify(sink, log, pool=sl.spark.executors(spark))
    assert (check.rows, check.is_clean) == (800, True), check.first


def test_rows_of_a_transform_of_spark_are_partitioned_by_its_columns(spark, place, tmp_path):
    log = new_log(tmp_path, "log")
    extend(log, 0, 200)
    sink = place.sink(mode="append", value=ORDER, layout=Layout("kind"))
    transform = "SELECT id, id % 3 AS kind, _offset, _timestamp FROM changes"
    assert follow(spark, log, sink, transform=transform, trigger=ONCE).await_termination(500)
    assert {*counts(place)} == {(0,), (1,), (2,)}
    assert sorted(place.rows()["_offset"].to_pylist()) == list(range(200))
