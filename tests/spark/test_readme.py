"""The README's example with Spark, run as it stands."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from tests.docs.test_readme import run

pytestmark = pytest.mark.spark


def test_following_with_spark_works_as_the_readme_shows_it(
    spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("Append")
    run("Follow into a table", 1)
    assert DeltaTable("tables/orders-by-spark").to_pyarrow_table()["key"].to_pylist() == [b"order-1"]
    assert sl.open("./orders").slots.get("spark").position == 2
