"""Spark's own Delta connector reads our tables, and compacts them between our commits. It exists for Spark 4.2 only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.servers import HOME

JARS = HOME / "delta" / "jars"
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not pyspark.__version__.startswith("4.2"), reason="the connector is for Spark 4.2"),
]

MODES = ("latest", "append", "history")
DRIVER = """
import json, sys
from pathlib import Path
import pyarrow as pa
import strandline as sl
from deltalake import DeltaTable
from strandline.spark import follow, local_session
from strandline.tables.work import assigned, written
from tests.spark.helpers import append, delete, new_log, put

folder, jars, *modes = sys.argv[1:]
spark = local_session(
    "connector",
    short_lived=True,
    **{
        "spark.jars": jars,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    },
)
codec = sl.values.Json(pa.schema({"id": pa.int64(), "city": pa.string()}))
TIMES = ("_timestamp", "_valid_from", "_valid_to")
MORE = ("_commit_version", "_commit_timestamp")

def changes(first):
    for number in range(first, first + 200):
        key, value = b"k%d" % (number % 60), json.dumps({"id": number, "city": f"c{number % 5}"}).encode()
        yield delete(key) if number % 11 == 10 else put(key, value)

def plain(row):
    return str(sorted((name, value) for name, value in row.items() if name not in (*TIMES, *MORE)))

def ours(table):
    return sorted(plain(row) for row in DeltaTable(table).to_pyarrow_table().to_pylist())

def theirs(frame):
    return frame.toArrow().to_pylist()

def run(mode):
    log, table = new_log(Path(folder), mode), f"{folder}/table-{mode}"
    sink = sl.DeltaSink(table, mode=mode, value=codec)

    def grow(first):
        append(log, list(changes(first)))
        assert follow(spark, log, sink, trigger={"availableNow": True}, place="executors").await_termination(500)

    append(log, list(changes(0)))
    transaction = sink.begin(since=log.start(), upto=log.end(), tasks=4)  # several files, for OPTIMIZE
    transaction.commit([written(*one) for one in assigned(transaction.parts, log.plan(log.start()))])
    steps = []
    for first in (200, 400):
        files = len(DeltaTable(table).file_uris())
        spark.sql(f"OPTIMIZE delta.`{table}`")
        steps.append([files, len(DeltaTable(table).file_uris())])
        grow(first)
        assert sorted(map(plain, theirs(spark.read.format("delta").load(table)))) == ours(table), "rows differ"
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES (delta.enableChangeDataFeed = true)")
    before, version = ours(table), DeltaTable(table).version()
    grow(600)
    feed = spark.read.format("delta").option("readChangeFeed", True).option("startingVersion", version + 1).load(table)
    net = {text: before.count(text) for text in before}
    for row in theirs(feed):
        sign = 1 if row.pop("_change_type") in ("insert", "update_postimage") else -1
        net[plain(row)] = net.get(plain(row), 0) + sign
    assert min(net.values()) >= 0, "the change feed deletes rows that there were not"
    fed = sorted(text for text, count in net.items() for _ in range(count))
    assert fed == ours(table), "the change feed does not give the new rows"
    return {"steps": steps, "rows": len(fed), "verified": sl.tables.verify(sink, log).is_clean}

print(json.dumps([run(mode) for mode in modes]))
"""


def test_the_connector_reads_what_we_commit_before_and_after_its_own_compaction(tmp_path: Path):
    jars = sorted(JARS.glob("*.jar"))
    if not jars:
        pytest.skip("no server: Spark's Delta connector is not installed; run 'make services'")
    command = [sys.executable, "-c", DRIVER, str(tmp_path), ",".join(map(str, jars)), *MODES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    latest, appended, history = json.loads(done.stdout.splitlines()[-1])
    assert all(one["verified"] and one["rows"] for one in (latest, appended, history))
    for one in (latest, appended, history):
        assert any(after < before for before, after in one["steps"]), "nothing was compacted"
