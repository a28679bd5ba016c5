"""The programs in ``examples`` run as they stand; those on Spark are in ``tests/spark/test_examples.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres import PostgresServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, *arguments: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.matrix
def test_a_route_cache_takes_only_what_it_missed_and_is_right_again(tmp_path: Path) -> None:
    day = ["  route.42 is 10.0.{}.42, route.7 is gone", "  route.7 is 10.9.9.7"]
    second = ["Day 2: 99 routes; 100 were there from the last run.", *(line.format(2) for line in day)]
    first = ["Day 1: 99 routes; {} were there from the last run.", *(line.format(1) for line in day)]
    for there in (0, 100):
        assert output("route_cache.py", tmp_path) == [*(line.format(there) for line in first), *second]


@pytest.mark.matrix
def test_a_job_queue_gives_what_a_dead_worker_had_to_the_next_one_and_fences_it(tmp_path: Path) -> None:
    batch = "{} worker: 10 jobs, 45 letters".format
    done = [*[batch("first")] * 3, *[batch("second")] * 4, "left: 0 batches", "first worker: fenced"]
    assert output("job_queue.py", tmp_path) == done
    assert output("job_queue.py", tmp_path) == done


@pytest.mark.matrix
def test_a_replicated_ledger_loses_its_primary_and_nothing_else(tmp_path: Path) -> None:
    assert output("replicated_ledger.py", tmp_path) == [
        "a leads: {'bank': -390, 'customer-0': 133, 'customer-1': 140, 'customer-2': 117}",
        "c leads in term 2: nothing is lost: True",
        "customer-1 has 145, and all accounts add up to 0",
    ]


@pytest.mark.matrix
def test_a_change_feed_into_postgres_gives_the_same_again(tmp_path: Path, postgres: PostgresServer) -> None:
    dsn = f"host={postgres.host} port={postgres.port} user={postgres.user} dbname=postgres"
    done = ["The table is at offset 502; clean: True.", "Oslo: 4 purchases, 40 in all", "Rome: 1 purchases, 10 in all"]
    assert output("feed_into_postgres.py", dsn, tmp_path) == done
    assert output("feed_into_postgres.py", dsn, tmp_path) == done


def test_the_list_of_examples_has_all_of_them() -> None:
    listed = set(re.findall(r"\]\(([a-z_./]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".md" and not path.name.startswith(("_", "."))}
    assert listed == there


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_a_program_says_at_its_beginning_how_it_is_run(name: str) -> None:
    assert f"``python examples/{name} " in (EXAMPLES / name).read_text().split('"""')[1]
