"""Two minutes of kills over five pipelines and a writer on a cluster; longer ones by hand: see ``storm.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.chaos import oracle, storm

pytestmark = [pytest.mark.slow, pytest.mark.spark]


def test_five_pipelines_and_a_writer_are_exact_through_a_storm_of_kills(tmp_path: Path) -> None:
    report = storm.run(tmp_path, 120.0, seed=12)
    print(report.text())
    assert set(report.kills) == {"driver", "executor", "python", "master"}
    assert report.changes > 10_000
    assert report.jobs > 3
    assert sum(report.commits.values()) > 2 * len(report.commits)  # it was not all done when the storm was over
    assert {name: found for name, found in report.wrong.items() if found} == {}


def test_the_oracle_sees_a_lost_row_a_doubled_one_and_a_wrong_one() -> None:
    changes = [(b"t1/a", 3), (b"t1/b", 6), (b"t1/a", None), (b"t2/a", 9)]
    truth = oracle.expected(changes)
    assert truth["latest"] == {(b"t1/b", 1, 6): 1, (b"t2/a", 3, 9): 1}
    assert truth["history"][b"t1/a", 3, 0, 2] == 1
    doubled = truth["append"] + oracle.Rows({(0, 0, b"t1/a", 3): 1})
    lost = truth["append"] - oracle.Rows({(0, 0, b"t1/a", 3): 1})
    assert oracle.differences(doubled, truth["append"]) == ["too many (0, 0, b't1/a', 3)"]
    assert oracle.differences(lost, truth["append"]) == ["missing (0, 0, b't1/a', 3)"]
