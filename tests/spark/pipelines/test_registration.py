"""Names of Delta tables in Spark's session catalog: by its own Delta connector, which exists for Spark 4.2 only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

import strandline as sl
from strandline.errors import InvalidInput, NotFound, Unsupported
from tests.servers import HOME

JARS = HOME / "delta" / "jars"
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

DRIVER = """
import json, shutil, sys, threading
import pyarrow as pa
import strandline as sl
from deltalake import write_deltalake
from strandline.errors import StrandlineError
from strandline.spark import local_session, register
from strandline.values import Json

folder, jars = sys.argv[1:]
spark = local_session(
    "names",
    short_lived=True,
    **{
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.databricks.delta.snapshotPartitions": "1",
    },
)
told = {}

def tried(call):
    try:
        return call()
    except StrandlineError as error:
        return f"{type(error).__name__}: {error}"

def log_of(name, *values):
    log = sl.open(f"{folder}/log-{name}", create=True)
    with log.producer() as producer:
        for n, value in enumerate(values):
            producer.append(key=b"%d" % n, value=value)
    return log

def sink(place, *fields):
    return sl.DeltaSink(place, value=Json(pa.schema([(name, pa.int64()) for name in fields])))

def rows(name, column):
    return sorted(one[column] for one in spark.table(name).collect())

log = log_of("a", b'{"x": 1, "y": 7}', b'{"x": 2, "y": 8}')
odd, other = f"{folder}/it's 100% ours", f"{folder}/other"
orders = sink(odd, "x")
sl.follow(log, orders, upto="end")
sl.follow(log, sink(other, "x"), upto="end")

told["no schema"] = tried(lambda: register(spark, orders, "shop.orders"))
spark.sql("CREATE SCHEMA shop")
told["new"] = register(spark, orders, "shop.orders")
told["again"] = [register(spark, odd, "shop.orders"), register(spark, orders, "spark_catalog.shop.orders")]
told["rows"] = rows("shop.orders", "x")
told["another name"] = register(spark, orders, "shop.orders_too")

with log.producer() as producer:
    producer.append(key=b"9", value=b'{"x": 3, "y": 9}')
sl.follow(log, sink(odd, "x", "y"), upto="end")
later = spark.sql("SELECT y FROM shop.orders WHERE y IS NOT NULL").collect()
told["later rows and columns"] = [rows("shop.orders", "x"), [one.y for one in later]]

told["another table"] = tried(lambda: register(spark, other, "shop.orders"))
spark.sql("CREATE VIEW shop.seen AS SELECT 1 AS x")
told["a view"] = tried(lambda: register(spark, orders, "shop.seen"))
spark.sql("CREATE TABLE shop.files (x INT) USING parquet")
told["a table of files"] = tried(lambda: register(spark, orders, "shop.files"))

copy = f"{folder}/copy"
shutil.copytree(odd, copy)
told["a copy with the same id"] = tried(lambda: register(spark, copy, "shop.orders"))
told["rows after the refusals"] = rows("shop.orders", "x")

races, failed = [], []
def race():
    try:
        races.append(register(spark, other, "shop.raced"))
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=race) for _ in range(4)]
[one.start() for one in threads], [one.join() for one in threads]
told["race"] = [sorted(races), failed]

moved = f"{folder}/moved"
shutil.move(odd, moved)
told["moved"] = tried(lambda: register(spark, moved, "shop.orders"))
told["gone"] = tried(lambda: register(spark, odd, "shop.orders"))
spark.sql("DROP TABLE shop.orders")
told["after the drop"] = [register(spark, moved, "shop.orders"), rows("shop.orders", "x")]

shutil.rmtree(moved)
sl.follow(log_of("b", b'{"z": 5}'), sink(moved, "z"), upto="end")
told["made anew"] = [register(spark, moved, "shop.orders"), rows("shop.orders", "z")]
spark.sql("DROP TABLE shop.orders")
told["kept files"] = sl.tables.describe(sl.tables.existing(moved)).rows
print(json.dumps(told))
"""


@pytest.mark.skipif(not pyspark.__version__.startswith("4.2"), reason="the connector is for Spark 4.2")
def test_a_name_resolves_to_exactly_its_table_and_to_no_other(tmp_path: Path):
    jars = sorted(JARS.glob("*.jar"))
    if not jars:
        pytest.skip("no server: Spark's Delta connector is not installed; run 'make services'")
    command = [sys.executable, "-c", DRIVER, str(tmp_path), ",".join(map(str, jars))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["no schema"].startswith("NotFound: There is no schema")
    assert told["new"] is True
    assert told["again"] == [False, False]
    assert told["rows"] == [1, 2]
    assert told["another name"] is True
    assert told["later rows and columns"] == [[1, 2, 3], [9]]
    assert told["another table"].startswith("AlreadyExists: The name shop.orders stands for the delta table at file:")
    assert told["a view"].startswith("AlreadyExists: The name shop.seen stands for a view")
    assert told["a table of files"].startswith("AlreadyExists: The name shop.files stands for the parquet table")
    assert told["a copy with the same id"].startswith("AlreadyExists: The name shop.orders stands for")
    assert told["rows after the refusals"] == [1, 2, 3]
    assert told["race"] == [[False, False, False, True], []]
    assert told["moved"].startswith("AlreadyExists: The name shop.orders stands for")
    assert told["gone"].startswith("NotFound")
    assert told["after the drop"] == [True, [1, 2, 3]]
    assert told["made anew"] == [False, [5]]
    assert told["kept files"] == 1


def test_what_is_no_delta_table_or_no_name_is_refused(tmp_path: Path):
    with pytest.raises(Unsupported, match="would not see later commits"):
        sl.spark.register(None, f"sqlite:{tmp_path}/a.db#orders", "shop.orders")
    for name in ("orders", "a.b.c.d", "shop.", "shop.or\nders"):
        with pytest.raises(InvalidInput, match="names no table of a catalog"):
            sl.spark.register(None, str(tmp_path), name)
    with pytest.raises(NotFound):
        sl.spark.register(None, f"{tmp_path}/none", "shop.orders")


@pytest.mark.skipif(pyspark.__version__.startswith("4.2"), reason="there is a connector for this Spark")
def test_a_session_without_the_connector_is_told_so(spark, tmp_path: Path):
    from strandline.log.memory import MemoryLog

    log = MemoryLog()
    with log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    sl.follow(log, sl.DeltaSink(tmp_path / "table"), upto="end")
    with pytest.raises(Unsupported, match="no Delta connector"):
        sl.spark.register(spark, tmp_path / "table", "shop.orders")
