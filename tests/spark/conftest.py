from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from strandline.spark import local_session

WORKERS = Path(__file__).with_name("workers")
PATIENCE = 600
"""Seconds for what takes one on a quiet machine. It guards against hanging, and says nothing about speed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests: starting one takes longer than most of them."""
    quick = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    conf = {
        "spark.sql.streaming.checkpointFileManagerClass": quick,
        "spark.python.authenticate.socketTimeout": f"{PATIENCE}s",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(WORKERS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        session = local_session("strandline-tests", short_lived=True, log_level="OFF", **conf)
    yield session
    session.stop()
