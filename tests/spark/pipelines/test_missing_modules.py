"""Executors whose Python lacks a module: the error says which, where, and what to do, and blames no transform."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

import strandline as sl
from strandline.errors import InvalidInput, MissingExtra
from strandline.spark.missing_modules import describing_task, lacking, located, missing_module
from tests.spark.cluster import Cluster
from tests.spark.helpers import append, new_log, numbered

PAGE = "docs/spark-clusters.md"
HERE = f"{sys.executable} (Python {platform.python_version()}) on {platform.node()}"

DRIVER = """
import json, sys
import strandline as sl
from pyspark.sql import SparkSession

given = json.load(sys.stdin)
builder = SparkSession.builder
for name, value in given["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
found = []
def said(work):
    try:
        work()
    except sl.errors.StrandlineError as error:
        found.append([type(error).__name__, str(error)])

def follow():
    sink = sl.DeltaSink(given["table"], mode="append")
    sl.spark.follow(spark, given["log"], sink, trigger={"availableNow": True}, place="executors").await_termination()

said(follow)
said(lambda: sl.bulk.verify(sl.open(given["log"]), pool=sl.spark.executors(spark)))
spark.stop()
print(json.dumps(found))
"""


def only_in_this_process(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that the driver has, and that no other process can import."""
    module = ModuleType(name)
    exec("def work(*rows):\n    return 1\n", module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_module_that_executors_lack_is_named_with_their_python(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = only_in_this_process("only_the_driver_has_it", monkeypatch)
    with pytest.raises(MissingExtra) as caught:
        list(sl.spark.executors(spark).run([module.work], "a job"))
    said = str(caught.value)
    assert "executors lacks the module 'only_the_driver_has_it'" in said
    assert HERE in said
    assert PAGE in said
    assert not caught.value.retryable


def test_a_missing_extra_of_an_executor_says_where_it_is_missing() -> None:
    assert str(located(MissingExtra("Delta tables need the extra 'delta'."))).endswith(
        f"{HERE}; see 'Where Spark runs' ({PAGE})."
    )
    other = InvalidInput("x")
    assert located(other) is other


def test_the_sentence_names_the_pythons_that_lack_the_module_and_not_the_others() -> None:
    answers = [json.dumps([number > 3, f"/usr/bin/python on host-{number}"]).encode() for number in range(5)]
    said = str(lacking("pyarrow.flight", answers))
    assert "host-0, /usr/bin/python on host-1, /usr/bin/python on host-2 and 1 more" in said
    assert "host-4" not in said
    assert "committed. Install it there" in str(lacking("pyarrow", []))
    assert json.loads(describing_task()(b"no_such_module")) == [False, HERE]
    assert json.loads(describing_task()(b"strandline.spark")) == [True, HERE]
    assert missing_module(RuntimeError("ValueError: No module named 'x'")) is None


@pytest.mark.slow
@pytest.mark.spark
def test_a_cluster_without_the_package_blames_no_transform(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 20))
    (tmp_path / "driver.py").write_text(DRIVER)
    with Cluster(tmp_path / "cluster", has_package=False) as cluster:
        given = {"settings": cluster.settings(), "log": log.url, "table": f"{tmp_path}/table"}
        found = json.loads(cluster.run([str(tmp_path / "driver.py")], given).splitlines()[-1])
    assert len(found) == 2
    for kind, said in found:
        assert kind == "MissingExtra"
        assert "executors lacks the module 'strandline'" in said
        assert "/python3 (Python 3." in said
        assert PAGE in said
