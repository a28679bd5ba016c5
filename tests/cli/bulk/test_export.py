"""Exports from the shell, of any log."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

import strandline as sl
from strandline.log.wal.log import WalLog
from tests.cli.conftest import Run
from tests.ingestion.sources import content, fill


def test_a_range_is_exported_and_said(run: Run, log: str, tmp_path: Path) -> None:
    source = sl.open(log, create=True)
    fill(source)
    done = run("export", log, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("100 records exported in ")
    assert done.stdout.endswith(f"listed in {tmp_path}/out/manifest.json.\n")
    (part,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["parts"]
    found = pq.read_table(tmp_path / "out" / part["path"])
    assert found.drop_columns("offset").equals(content(source))
    some = json.loads(run("export", log, tmp_path / "some", "--from", "10", "--until", "12", "--json").stdout)
    assert (some["first"], some["next"], some["records"], some["parts"]) == (10, 12, 2, 1)
    assert run("export", log, tmp_path / "none", "--from", "100").stdout.startswith("There was nothing to export")


def test_an_export_that_is_there_is_not_called_new_and_later_records_are_named(
    run: Run, log: str, tmp_path: Path
) -> None:
    source = sl.open(log, create=True)
    fill(source)
    assert json.loads(run("export", log, tmp_path / "out", "--json").stdout)["new"] is True
    again = run("export", log, tmp_path / "out").stdout
    assert again.startswith("100 records were exported before: offsets 0 to 99 ")
    assert again.endswith("Nothing was written.\n")
    with source.producer() as producer:
        producer.append(value=b"later")
    assert (
        "Nothing was written; the log ends at 101 now: name another folder"
        in run("export", log, tmp_path / "out").stdout
    )
    assert json.loads(run("export", log, tmp_path / "out", "--json").stdout)["new"] is False


def test_a_write_ahead_log_is_exported_as_json_lines(run: Run, tmp_path: Path) -> None:
    with WalLog.open(tmp_path / "wal") as wal:
        fill(wal)
    done = run("export", f"wal://{tmp_path}/wal", tmp_path / "out", "--format", "jsonl", "--json")
    assert json.loads(done.stdout)["records"] == 100


def test_another_range_at_the_same_place_is_an_error(run: Run, log: str, tmp_path: Path) -> None:
    fill(sl.open(log, create=True))
    run("export", log, tmp_path / "out")
    refused = run("export", log, tmp_path / "out", "--until", "5")
    assert refused.exit_code == 1
    assert "ask for the same range, or export into another folder" in " ".join(refused.stderr.split())
