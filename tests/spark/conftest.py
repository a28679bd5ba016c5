from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.spark.helpers import quick_session

collect_ignore = ["workers"]
"""What Spark's Python processes import, and nobody else."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests: starting one takes longer than most of them."""
    session = quick_session("strandline-tests")
    yield session
    session.stop()
