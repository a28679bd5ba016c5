"""The programs in ``examples`` run, and run again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

import strandline as sl
from tests.spark.helpers import quick_processes

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, place: Path | str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(place)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.matrix
def test_orders_on_spark_gives_the_same_again(tmp_path: Path) -> None:
    first = output("orders_on_spark.py", tmp_path)
    assert first[:2] == ["The log ends at offset 1,001.", "The table has 999 orders; clean: True."]
    assert first[2] == "c0: 143 orders, 7,071.00 in all"
    assert len(first) == 9
    assert output("orders_on_spark.py", tmp_path) == first


@pytest.mark.matrix
def test_sums_of_micro_batches_are_exact_with_the_offset_and_doubled_without(tmp_path: Path) -> None:
    first, second = {"Oslo": 2000, "Rome": 2500}, {"Oslo": 4000, "Rome": 5000}
    assert output("foreach_batch_on_spark.py", tmp_path) == [
        f"1,000 orders: {first}; without the offset: {first}",
        f"1,000 more: {second}; without the offset: {second}",
        f"the checkpoint is lost: {second}; without the offset: {{'Oslo': 8000, 'Rome': 10000}}",
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_windows_drop_a_late_record_or_count_it_and_a_query_over_the_log_counts_all(tmp_path: Path, runs: int) -> None:
    windows = "'10:10': 1, '10:20': 1, '10:30': 1"
    told = [
        f"as they came:    {{'10:00': 2, {windows}}}",
        f"checkpoint lost: {{'10:00': 3, {windows}}}",
        f"over the log:    {{'10:00': 3, {windows}, '10:40': 1}}",
    ]
    for _ in range(runs):
        assert output("windows_on_spark.py", tmp_path) == told


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_join_writes_pairs_again_without_its_checkpoint_and_the_table_of_the_pairs_is_exact(tmp_path: Path) -> None:
    assert output("join_on_spark.py", tmp_path) == [
        "91 pairs in the log",
        "187 pairs in the log, after the checkpoint was lost",
        "96 orders in the table of the pairs; clean: True",
        "96 orders in a join of the tables",
    ]


def run_pipeline(folder: Path) -> None:
    """``spark-pipelines run`` in a folder, with a catalog that stays there."""
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines"), "run"]
    settings = {
        "spark.sql.catalogImplementation": "hive",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with quick_processes():
        here = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(
            [*command, *conf], cwd=folder, env={**os.environ, **here}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_declarative_pipeline_adds_what_is_new_in_each_run(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "declarative_pipeline", tmp_path, dirs_exist_ok=True)
    spec = tmp_path / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/declarative_pipeline", str(tmp_path)))
    for upto in (1000, 2000):
        output("declarative_pipeline/append_orders.py", f"file://{tmp_path}/orders")
        run_pipeline(tmp_path)
        rows = pq.read_table(tmp_path / "spark-warehouse" / "orders").column("id").to_pylist()
        assert sorted(rows) == list(range(upto))
        with sl.open(f"file://{tmp_path}/large_orders") as large:
            values = [json.loads(value) for batch in large.read() for value in batch.column("value").to_pylist()]
        assert [value["id"] for value in values] == [number for number in range(upto) if number % 100 > 90]
