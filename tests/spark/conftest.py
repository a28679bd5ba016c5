from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from strandline.spark import local_session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests: starting one takes longer than most of them."""
    quick = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    conf = {"spark.sql.streaming.checkpointFileManagerClass": quick}
    session = local_session("strandline-tests", short_lived=True, log_level="OFF", **conf)
    yield session
    session.stop()
