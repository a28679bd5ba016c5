"""Pages whose programs need a Spark session, or a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.docs.pages import Page
from tests.docs.test_pages import DOCS, IN_A_SESSION, ON_A_CLUSTER, opened
from tests.spark.cluster import Cluster, free_port

pytestmark = pytest.mark.spark


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(IN_A_SESSION))
def test_a_page_works_in_a_session(name: str, spark: SparkSession, tmp_path: Path) -> None:
    opened(name, tmp_path, names={"spark": spark}).run()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_A_CLUSTER))
def test_a_page_works_on_a_cluster(name: str, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    shown = {
        "spark://spark-master:7077": cluster.master,
        "sc://spark-server:15002": cluster.connect(free_port(), free_port()),
    }
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    Page(DOCS / name, tmp_path / "reader", instead=shown, environment=environment).run()
