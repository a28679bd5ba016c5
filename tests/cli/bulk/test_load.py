"""Loading files from the shell; what becomes of their rows is tried in tests/bulk."""

from __future__ import annotations

import json
from pathlib import Path

import strandline as sl
from tests.cli.conftest import Run


def test_files_are_loaded_once_and_changed_ones_are_refused(run: Run, log: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
    command = ("load", str(tmp_path / "in"), log, "--job", "first", "--key", "id", "--create")
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "The log has job first: 2 records of 1 file, offsets 0 to 1" in done.stdout
    again = json.loads(run(*command, "--json").stdout)
    assert (again["records"], again["first"], again["next"]) == (2, 0, 2)
    assert [row["key"] for batch in sl.open(log).read() for row in batch.to_pylist()] == [b"1", b"2"]
    (tmp_path / "in" / "b.jsonl").write_text('{"id": 3}\n')
    refused = run(*command)
    assert refused.exit_code == 1
    assert "other files or fields" in refused.stderr
    assert run("load", log, "--job", "first").exit_code == 2
