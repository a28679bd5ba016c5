"""Times of loaded files that are finer than a microsecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.errors import InvalidInput
from tests.ingestion.sources import content

FINE = pa.array([1_700_000_000_000_001_999, -1], pa.timestamp("ns", "UTC"))
WHOLE = pa.array([1_700_000_000_000_001_000, -1000], pa.timestamp("ns", "UTC"))
CUT = [1_700_000_000_000_001, -1]
COLUMNS: dict[str, dict[str, Any]] = {
    "named": {"key": "id", "timestamp": "at", "value": "text"},
    "records": {},
}


def written(folder: Path, shape: str, times: pa.Array) -> Path:
    names = ["id", "at", "text"] if shape == "named" else ["key", "timestamp", "value"]
    pq.write_table(pa.table([["a", "b"], times, ["x", "y"]], names=names), folder / "rows.parquet")
    return folder / "rows.parquet"


def times_of(log: Any) -> list[int]:
    found: list[int] = content(log).column("timestamp").cast(pa.int64()).to_pylist()
    return found


@pytest.mark.parametrize("shape", COLUMNS)
def test_a_finer_time_is_refused_with_the_time_and_the_way_out(tmp_path: Path, shape: str) -> None:
    log = sl.open(tmp_path / "log", create=True)
    with pytest.raises(InvalidInput, match=r"2023-11-14 22:13:20\.000001999Z.*--truncate-times"):
        sl.bulk.load(written(tmp_path, shape, FINE), log, job="a", **COLUMNS[shape])
    assert log.bounds().next == 0


@pytest.mark.parametrize("shape", COLUMNS)
def test_a_finer_time_is_cut_downwards_if_that_is_asked_for(tmp_path: Path, shape: str) -> None:
    log = sl.open(tmp_path / "log", create=True)
    sl.bulk.load(written(tmp_path, shape, FINE), log, job="a", truncate_times=True, **COLUMNS[shape])
    assert times_of(log) == CUT


@pytest.mark.parametrize("shape", COLUMNS)
def test_nanoseconds_that_are_whole_microseconds_are_loaded_as_they_are(tmp_path: Path, shape: str) -> None:
    log = sl.open(tmp_path / "log", create=True)
    sl.bulk.load(written(tmp_path, shape, WHOLE), log, job="a", **COLUMNS[shape])
    assert times_of(log) == CUT


@pytest.mark.parametrize("command", ["load", "produce"])
def test_text_with_a_finer_time_is_refused_or_cut(tmp_path: Path, command: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "at": "2026-11-01T12:00:00.123456789Z"}\n')
    sl.open(tmp_path / "log", create=True)
    file, log = str(tmp_path / "rows.jsonl"), str(tmp_path / "log")
    call = ["load", file, log, "--job", "a", "--timestamp", "at"]
    if command == "produce":
        call = ["produce", log, file, "--timestamp", "at"]
    refused = CliRunner().invoke(app, call)
    assert refused.exit_code == 1
    assert "12:00:00.123456789Z" in refused.output
    done = CliRunner().invoke(app, [*call, "--truncate-times"])
    assert done.exit_code == 0, done.output
    assert [time % 1_000_000 for time in times_of(sl.open(tmp_path / "log"))] == [123_456]


def test_a_job_that_cuts_times_is_another_than_one_that_does_not(tmp_path: Path) -> None:
    log = sl.open(tmp_path / "log", create=True)
    file = written(tmp_path, "named", WHOLE)
    sl.bulk.load(file, log, job="a", **COLUMNS["named"])
    with pytest.raises(sl.errors.Diverged):
        sl.bulk.load(file, log, job="a", truncate_times=True, **COLUMNS["named"])
