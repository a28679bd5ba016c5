"""A driver that writes into a log is killed when records are listed, and so are its tasks: each row is there once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strandline.bulk.verifying import verify as verify_log
from tests.spark.helpers import all_records, append, new_log, numbered

KILLS = 3


@pytest.mark.slow
def test_a_stream_writes_each_row_once_though_its_driver_and_tasks_are_killed(tmp_path: Path) -> None:
    source, target = new_log(tmp_path, "source"), new_log(tmp_path, "target")
    for first in range(0, 400, 20):
        append(source, numbered(first, 20))
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    arguments = [source.url, target.url, str(tmp_path / "checkpoint"), str(deaths)]
    command = [sys.executable, "-m", "tests.spark.datasource.stream_writer", *arguments]
    for _ in range(KILLS):
        before = target.bounds().next
        driver = subprocess.Popen(command, start_new_session=True)
        try:
            while target.bounds().next == before and driver.poll() is None:
                time.sleep(0.002)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # records are listed; Spark may not have noted it
            driver.wait()
    subprocess.run(command, check=True)
    columns = ["key", "value"]
    assert all_records(target).select(columns).equals(all_records(source).select(columns))
    assert len(list(deaths.iterdir())) >= KILLS  # tasks died, too
    assert verify_log(target).findings == []
