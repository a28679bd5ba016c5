"""Two Spark drivers, each a process with a session of its own, that create and follow one table at the same moment."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import Fenced
from strandline.spark import follow
from tests.spark.helpers import append, appended_rows, expected_rows, latest_rows, new_log, numbered, truth

CHANGES = numbered(0, 30)


def fill(folder: Path, number: int) -> sl.log.ObjectLog:
    log = new_log(folder, f"log-{number}")
    for first in range(0, 30, 10):
        append(log, CHANGES[first : first + 10])
    return log


def assert_right(folder: Path, number: int, outcomes: list[str]) -> None:
    """One driver got to the end, the other did so too or was fenced, and the table holds each change once."""
    assert set(outcomes) <= {"ok", "Fenced"}, f"round {number}: {outcomes}"
    assert "ok" in outcomes, f"round {number}: both drivers were stopped"
    table, log = folder / f"table-{number}", sl.open(f"{folder}/log-{number}")
    if number % 2:
        assert appended_rows(table) == expected_rows(CHANGES), f"round {number}"
    else:
        assert latest_rows(table) == truth(CHANGES), f"round {number}"
    assert [slot.position for slot in log.slots.list()] == ([30] if number % 4 > 1 else [])


@pytest.mark.parametrize("number", [0, 3])
def test_of_two_drivers_in_one_session_that_create_one_table_one_gets_to_the_end(spark, tmp_path, number):
    log, outcomes, start = fill(tmp_path, number), [], threading.Barrier(2)

    def drive() -> None:
        sink = sl.DeltaSink(str(tmp_path / f"table-{number}"), mode="append" if number % 2 else "latest")
        start.wait(120)
        try:
            slot = "s" if number % 4 > 1 else None
            follow(spark, log.url, sink, slot=slot, trigger={"availableNow": True}).await_termination(600)
        except Fenced:
            outcomes.append("Fenced")
        except Exception as error:  # noqa: BLE001 - judged below
            outcomes.append(repr(error))
        else:
            outcomes.append("ok")

    drivers = [threading.Thread(target=drive) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(120)
    assert_right(tmp_path, number, outcomes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.spark
def test_a_hundred_races_of_two_driver_processes_for_one_table_each_leave_it_right(tmp_path):
    rounds = 100
    for number in range(rounds):
        fill(tmp_path, number)
    command = [sys.executable, "-m", "tests.spark.pipelines.racing_driver", str(tmp_path), str(rounds)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    try:
        for number in range(rounds):
            for racer in racers:
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            assert_right(tmp_path, number, [racer.stdout.readline().strip() for racer in racers])
        for racer in racers:
            assert racer.wait(120) == 0
    finally:
        for racer in racers:
            racer.kill()
            racer.wait(120)
