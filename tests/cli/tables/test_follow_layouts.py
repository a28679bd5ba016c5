"""``strandline follow --partition-by --cluster-by``: a new table is laid out so, and keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

import strandline as sl
from tests.cli.conftest import Run

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "city": {"type": "string"}}}
LAYOUT = ("--partition-by", "city", "--partition-by", "day(_timestamp)", "--cluster-by", "id")


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    place = tmp_path / "order.json"
    place.write_text(json.dumps(SCHEMA))
    return place


def produced(run: Run, log: str, *cities: str) -> None:
    lines = "".join(json.dumps({"key": "k", "value": {"id": n, "city": city}}) + "\n" for n, city in enumerate(cities))
    assert run("produce", log, "--create", "--format", "json", given=lines).exit_code == 0


def test_a_table_is_made_with_a_layout_and_keeps_it(run: Run, log: str, schema: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    follow = ("follow", log, table, "--schema", schema, "--mode", "append", "--until", "end")
    produced(run, log, "Oslo", "Rome", "Oslo")
    assert run(*follow, *LAYOUT).exit_code == 0
    produced(run, log, "Turin")
    assert run(*follow).exit_code == 0
    assert run(*follow, "--cluster-by", "_key").exit_code == 0
    assert DeltaTable(table).metadata().partition_columns == ["city", "_timestamp_day"]
    assert sorted(DeltaTable(table).to_pyarrow_table()["city"].to_pylist()) == ["Oslo", "Oslo", "Rome", "Turin"]
    assert run("table", "verify", table, log, "--schema", schema).exit_code == 0
    assert run("table", "optimize", table).exit_code == 0
    done = run(*follow, "--partition-by", "id")
    assert (done.exit_code, "was made with the partitions ['city'" in done.stderr) == (1, True)


def test_each_table_of_many_has_the_layout(run: Run, log: str, schema: Path, tmp_path: Path) -> None:
    produced(run, log, "Oslo", "Rome", "Oslo")
    place = f"{tmp_path}/tables/{{name}}"
    by = ("--by", "city", "--partition-by", "day(_timestamp)", "--mode", "append", "--schema", schema)
    done = run("follow", log, place, *by, "--until", "end")
    assert done.exit_code == 0, done.output
    for name in ("Oslo", "Rome"):
        assert DeltaTable(f"{tmp_path}/tables/{name}").metadata().partition_columns == ["_timestamp_day"]


def test_a_table_in_a_database_takes_no_layout(run: Run, log: str, tmp_path: Path) -> None:
    produced(run, log, "Oslo")
    done = run("follow", log, f"sqlite:{tmp_path}/shop.db#orders", "--mode", "append", *LAYOUT, "--until", "end")
    assert (done.exit_code, "lays its tables out itself" in done.stderr) == (1, True)
    assert sl.open(log).bounds().next == 1
