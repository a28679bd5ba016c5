"""The programs in ``examples`` run, and run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(name: str, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.matrix
def test_orders_on_spark_gives_the_same_again(tmp_path: Path) -> None:
    first = output("orders_on_spark.py", tmp_path)
    assert first[:2] == ["The log ends at offset 1,001.", "The table has 999 orders; right: True."]
    assert first[2] == "c0: 143 orders, 7,071.00 in all"
    assert len(first) == 9
    assert output("orders_on_spark.py", tmp_path) == first
