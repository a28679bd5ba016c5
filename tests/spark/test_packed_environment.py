"""A cluster whose machines lack the package: it travels as a packed virtual environment."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from tests.spark.cluster import HOME, Cluster
from tests.spark.helpers import append, new_log, numbered

pytestmark = [pytest.mark.slow, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
COUNT = 400

PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
import strandline as sl

url, folder = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
found = {"driver": sl.__file__}
frame = spark.read.format("strandline").option("partitions", "4").load(url)

def places(batches):
    import pyarrow as pa
    import strandline
    for _ in batches:
        yield pa.record_batch({"place": [strandline.__file__]})

found["executors"] = sorted({row.place for row in frame.mapInArrow(places, "place string").collect()})
found["read"] = frame.count()
query = spark.readStream.format("strandline").load(url).writeStream.format("strandline")
query = query.option("create", "true").option("checkpointLocation", f"{folder}/checkpoint")
query.trigger(availableNow=True).start(f"file://{folder}/copy").awaitTermination()
found["copied"] = sl.open(f"file://{folder}/copy").bounds().next
table = sl.DeltaSink(f"{folder}/table", mode="append")
sl.spark.follow(spark, url, table, trigger={"availableNow": True}, place="executors").await_termination()
found["table"] = table.rows().num_rows
found["exported"] = sl.bulk.export(sl.open(url), f"{folder}/export", pool=sl.spark.executors(spark)).upto
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the package from its wheel, and with the dependencies of this one."""
    folder = tmp_path_factory.mktemp("packed")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", str(folder), str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (file,) = folder.glob("strandline-*.whl")
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages]
    subprocess.run([*install, str(file)], check=True)
    # A path file of a path file is not read: the editable install of this environment is not seen.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), has_package=False) as found:
        yield found


def packed(environment: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        file.add(environment, ".")
    return archive


def submitted(cluster: Cluster, environment: Path, archive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``spark-submit`` as docs/spark-clusters.md has it, in a folder with the unpacked environment."""
    name = f"driver-{archive.stem}"
    here = cluster.environment(name)
    folder = Path(here["HOME"])
    (folder / "env").symlink_to(environment)
    (folder / "program.py").write_text(PROGRAM)
    python = {"PYSPARK_PYTHON": "./env/bin/python", "PYSPARK_DRIVER_PYTHON": "./env/bin/python"}
    conf = [word for pair in cluster.settings().items() for word in ("--conf", "=".join(pair))]
    command = [str(HOME / "bin" / "spark-submit"), "--archives", f"{archive}#env", *conf, "program.py", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**here, **python}, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.fixture
def log(tmp_path: Path) -> Any:
    log = new_log(tmp_path)
    for first in range(0, COUNT, 100):
        append(log, numbered(first, 100))
    return log


def test_a_packed_environment_brings_the_package_to_executors(
    cluster: Cluster, environment: Path, tmp_path: Path, log: sl.log.ObjectLog
) -> None:
    archive = packed(environment, tmp_path / "same.tar.gz")
    done = submitted(cluster, environment, archive, log.url, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "/env/" in found.pop("driver")
    places = found.pop("executors")
    assert places
    assert all("/work/app-" in place and "/env/" in place for place in places), places
    assert found == {"read": COUNT, "copied": COUNT, "table": COUNT, "exported": COUNT}


def test_executors_with_another_version_refuse_a_read_in_one_sentence(
    cluster: Cluster, environment: Path, tmp_path: Path, log: sl.log.ObjectLog
) -> None:
    (facts,) = environment.rglob("strandline-*.dist-info/METADATA")
    text = facts.read_text()
    facts.write_text(text.replace(f"Version: {sl.__version__}\n", "Version: 0.0.1\n"))
    try:
        archive = packed(environment, tmp_path / "other.tar.gz")
    finally:
        facts.write_text(text)
    done = submitted(cluster, environment, archive, log.url, str(tmp_path))
    assert done.returncode != 0
    said = f"The driver has version {sl.__version__} of strandline and an executor has 0.0.1: install the same on both."
    assert f"strandline.errors.UnsupportedVersion: {said}" in done.stdout + done.stderr
