"""Python processes that take longer to start than Spark waits for those of streaming sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.spark.helpers import append, new_log, numbered

SLOW = """
import os, sys, time
words = sys.orig_argv[sys.orig_argv.index("-m") + 1:] if "-m" in sys.orig_argv else []
if words and words[0].startswith("pyspark"):
    try:
        os.close(os.open(f"{os.environ['MARKS']}/{words[-1]}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        time.sleep(12)  # the first process of each kind
"""

PROGRAM = """
import json, sys
import strandline as sl

url, folder = sys.argv[1:]
spark = sl.spark.local_session(short_lived=True, **{"spark.log.level": "OFF"})
frame = spark.read.format("strandline").load(url)
found = {"read": frame.count()}
frame.select("key", "value").write.format("strandline").mode("append").option("create", "true").save(f"file://{folder}/written")
found["written"] = sl.open(f"{folder}/written").bounds().next
table = sl.DeltaSink(f"{folder}/table", mode="append")
sl.spark.follow(spark, url, table, trigger={"availableNow": True}, place="executors").await_termination()
found["table"] = table.rows().num_rows
found["exported"] = sl.bulk.export(sl.open(url), f"{folder}/export", pool=sl.spark.executors(spark)).upto
writer = spark.readStream.format("strandline").load(url).writeStream.format("strandline").trigger(availableNow=True)
writer = writer.option("create", "true").option("checkpointLocation", f"{folder}/checkpoint")
sl.spark.start(writer, f"file://{folder}/streamed").awaitTermination()
found["streamed"] = sl.open(f"{folder}/streamed").bounds().next
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.spark
def test_processes_that_start_slowly_end_neither_reads_nor_writes_nor_jobs_nor_streams(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    append(log, numbered(0, 100))
    marks, slow = tmp_path / "marks", tmp_path / "slow"
    for folder in (marks, slow):
        folder.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join([str(slow), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log.url, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "MARKS": str(marks)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(("read", "written", "table", "exported", "streamed"), 100)
    assert "pyspark.sql.streaming.python_streaming_source_runner" in {mark.name for mark in marks.iterdir()}
    assert "did not start in time (attempt 1" in done.stderr


class Writer:
    """Stands for a writer whose queries end as given, or become ready."""

    def __init__(self, *ends: str | None) -> None:
        self.ends = list(ends)
        self.started: list[tuple[str, ...]] = []

    def start(self, *path: str) -> Any:
        self.started.append(path)
        end = self.ends.pop(0)
        messages = iter(["Initializing StreamExecution", "Initializing sources", "Waiting for data to arrive"])
        return Query(messages, end)


class Query:
    def __init__(self, messages: Any, end: str | None) -> None:
        self.messages, self.end, self.polls = messages, end, 0

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return self.end is None or self.polls < 2

    @property
    def status(self) -> dict[str, str]:
        self.polls += 1
        return {"message": next(self.messages)}

    def exception(self) -> Any:
        return self.end


LATE = "[STREAM_FAILED] ... java.net.SocketException: Python worker failed to connect back."


def test_a_query_is_started_again_only_if_its_source_was_late() -> None:
    clock = ManualClock()
    for ends, starts, says in (
        ([None], 1, None),
        ([LATE, LATE, None], 3, None),
        ([LATE, "another error"], 2, "another error"),
        ([LATE] * 3, 3, LATE),
    ):
        writer = Writer(*ends)
        query = sl.spark.start(writer, "file:///place", attempts=3, env=Env(clock=clock))
        assert writer.started == [("file:///place",)] * starts
        assert query.exception() == says
