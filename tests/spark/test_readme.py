"""The README's example with a table, run as it stands, on a folder instead of a bucket."""

from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.followers import run as running
from tests.docs.test_readme import example

pytestmark = pytest.mark.spark


def test_following_works_as_the_readme_shows_it(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = sl.open(str(tmp_path / "orders"), create=True)
    with log.producer() as producer:
        producer.append(key=b"a", value=b"1")
    code = example("Follow into a table").replace("s3://bucket", str(tmp_path))
    # The example follows for ever, which a test cannot: the only changes are the trigger, and where it ends.
    code = code.replace('{"processingTime": "10 seconds"}', '{"availableNow": True}')
    assert "availableNow" in code
    monkeypatch.setattr("strandline.followers.run.follow", partial(running.follow, upto="end"))
    exec(compile(code, "README", "exec"), {"spark": spark})
    assert DeltaTable(str(tmp_path / "tables/orders")).to_pyarrow_table()["value"].to_pylist() == [b"1"]
    assert log.slots.get("billing").position == 1
