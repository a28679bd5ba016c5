"""Two processes that create and follow one table at the same moment, again and again."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import Fenced
from strandline.followers.run import Batching
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.storage.clock import CHANCE
from strandline.testing.sinks import changes, folded

ROWS = [(b"k%d" % (n % 3), b"v%d" % n) for n in range(12)]
FRESH = multiprocessing.get_context("spawn")


def racer(folder: str, tables: str, options: dict[str, str] | None, rounds: int, start, outcomes) -> None:
    for number in range(rounds):
        log = sl.open(f"{folder}/log-{number}")
        sink = sl.DeltaSink(f"{tables}/table-{number}", mode="append" if number % 2 else "latest", options=options)
        slot = "s" if number % 4 > 1 else None
        start.wait(120)
        try:
            sl.follow(log, sink, slot, upto="end", batching=Batching(records=4))
        except Fenced:
            outcomes.put((number, "Fenced"))
        except Exception as error:  # noqa: BLE001 - the parent judges it
            outcomes.put((number, repr(error)))
        else:
            outcomes.put((number, "ok"))


def logs(folder: Path, rounds: int) -> None:
    for number in range(rounds):
        log = sl.open(f"{folder}/log-{number}", create=True)
        for part in range(3):
            batch = changes(0, *ROWS[4 * part : 4 * part + 4]).drop_columns("offset")
            log.append(batch, writer=WriterId(CHANCE.uuid()), number=0).result()


@pytest.mark.matrix
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_of_two_processes_that_create_and_follow_one_table_one_gets_to_the_end(tmp_path, rounds, place, request):
    tables, options = str(tmp_path), None
    if place == "bucket":
        tables, options = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_server").options
    logs(tmp_path, rounds)
    start, outcomes = FRESH.Barrier(2), FRESH.Queue()
    racers = [
        FRESH.Process(target=racer, args=(str(tmp_path), tables, options, rounds, start, outcomes)) for _ in range(2)
    ]
    for process in racers:
        process.start()
    found: dict[int, list[str]] = {}
    for _ in range(2 * rounds):
        number, outcome = outcomes.get(timeout=60)
        found.setdefault(number, []).append(outcome)
    for process in racers:
        process.join(120)
    for number, both in found.items():
        assert set(both) <= {"ok", "Fenced"}, f"round {number}: {both}"
        assert "ok" in both, f"round {number}: both were stopped"
        table = DeltaTable(f"{tables}/table-{number}", storage_options=options)
        rows = pa.table(table.to_pyarrow_table()).sort_by("offset").to_pylist()
        if number % 2:
            assert [row["offset"] for row in rows] == list(range(12)), f"round {number}"
        else:
            assert sorted((row["key"], row["value"]) for row in rows) == sorted(folded(ROWS).items())


@pytest.mark.parametrize("mode", ["append", "latest"])
def test_creating_a_table_that_another_follower_fills_at_once_duplicates_no_row(tmp_path, monkeypatch, mode):
    place, create, beginning = str(tmp_path / "table"), DeltaTable.create, Cursor(UUID(int=7), 0)

    def crowded(*arguments, **options):
        made = create(*arguments, **options)
        monkeypatch.setattr(DeltaTable, "create", create)
        sl.DeltaSink(place, mode=mode).apply(changes(0, *ROWS), since=beginning, upto=beginning.at(12))
        made.update_incremental()  # a handle is as new as the table is when it is made
        return made

    monkeypatch.setattr(DeltaTable, "create", crowded)
    with pytest.raises(Fenced, match="Another follower changed"):
        sl.DeltaSink(place, mode=mode).apply(changes(0, *ROWS), since=beginning, upto=beginning.at(12))
    assert DeltaTable(place).count() == (12 if mode == "append" else 3)
    assert sl.DeltaSink(place, mode=mode).cursor(beginning.log_id) == beginning.at(12)
