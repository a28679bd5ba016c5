"""The README's Spark example, run as it stands, on a folder instead of a bucket."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from tests.docs.test_readme import example

pytestmark = pytest.mark.spark


def test_following_with_spark_works_as_the_readme_shows_it(spark, tmp_path: Path) -> None:
    with sl.open(str(tmp_path / "orders"), create=True).producer() as producer:
        producer.append(key=b"a", value=b"1")
    code = example("Follow, with Spark").replace("s3://bucket", str(tmp_path))
    # The example follows for ever, which a test cannot: the only change is the trigger.
    code = code.replace('{"processingTime": "10 seconds"}', '{"availableNow": True}')
    assert "availableNow" in code
    exec(compile(code, "README", "exec"), {"spark": spark})
    assert DeltaTable(str(tmp_path / "tables/orders")).to_pyarrow_table()["value"].to_pylist() == [b"1"]
