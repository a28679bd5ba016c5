"""``strandline follow --upkeep``: the command looks after its table between its commits."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable

import strandline as sl
from tests.cli.conftest import Run


def append(log: sl.Log, number: int) -> None:
    with log.producer() as producer:
        producer.append(key=b"%d" % number, value=b"")


def test_small_files_of_earlier_runs_are_joined(run: Run, tmp_path: Path) -> None:
    place, table = str(tmp_path / "log"), str(tmp_path / "table")
    log = sl.open(place, create=True)
    for number in range(31):
        append(log, number)
        sl.follow(log, sl.DeltaSink(table, mode="append"), upto="end")
    append(log, 31)
    assert len(DeltaTable(table).file_uris()) == 31
    done = run("follow", place, table, "--upkeep", "24", "--until", "end")
    assert done.exit_code == 0, done.output
    assert len(DeltaTable(table).file_uris()) == 1
    assert run("table", "verify", table, place).exit_code == 0


def test_a_table_in_a_database_has_no_upkeep(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", given="a\n")
    done = run("follow", log, f"sqlite:{tmp_path}/shop.db#orders", "--upkeep", "1", "--until", "end")
    assert done.exit_code != 0
    assert "which looks after its tables itself: leave out upkeep." in " ".join(done.stderr.split())
    assert not (tmp_path / "shop.db").exists()
