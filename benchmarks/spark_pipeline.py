"""A pipeline over time: two cores against one, the 200th trigger against the 10th, an idle pipeline, driver memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import psutil

import strandline as sl
from benchmarks.harness import Result, scratch, seconds
from benchmarks.spark_tables import MILLION, extend, filled

NOW: Final = {"availableNow": True}
WHOLE: Final = {"maxBytesPerTrigger": str(1 << 40)}
ROUNDS: Final = 5
TRIGGERS: Final = 200
PER_TRIGGER: Final = 2_000
KEYS: Final = 50_000
IDLE_SECONDS: Final = 20.0
TENS: Final = 12


def run() -> list[Result]:
    """Measure; about five minutes."""
    with scratch() as folder:
        return [*scaling(folder), *measured_over_time(folder)]


# --- two cores against one ---------------------------------------------------------------------------------------


def scaling(folder: str) -> list[Result]:
    """Wall time of the same work in local[1] and local[2]; each in a process of its own, in turns."""
    log = filled(folder, "scaling", 2 * MILLION, MILLION)
    times: dict[int, dict[str, list[float]]] = {1: {}, 2: {}}
    for turn in range(2):
        for cores, found in times.items():
            command = [
                sys.executable,
                "-m",
                "benchmarks.spark_pipeline",
                str(cores),
                log.url,
                f"{folder}/{cores}-{turn}",
            ]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            for name, values in json.loads(answer.splitlines()[-1]).items():
                found.setdefault(name, []).extend(values)
    results = []
    for name, one in times[1].items():
        two = times[2][name]
        beside = f"{median(one):.2f} s and {median(two):.2f} s"
        results.append(
            Result(f"{name}: local[1] / local[2], wall", median(one) / median(two), "times", ">= 1.6", beside)
        )
    return results


def wall_times(cores: int, url: str, folder: str) -> dict[str, list[float]]:
    """Seconds of each kind of table on so many cores."""
    spark = sl.spark.local_session("bench-scaling", cores=cores, memory="3g")
    kinds: dict[str, dict[str, Any]] = {"append": {"mode": "append"}, "latest": {"mode": "latest"}}
    found: dict[str, list[float]] = {}
    for turn in range(-1, 3):  # the first one starts the workers
        for name, options in kinds.items():
            sink = sl.DeltaSink(f"{folder}-{name}-{turn}", **options)
            following = sl.spark.follow(spark, url, sink, trigger=NOW, place="executors", options=WHOLE)
            took = seconds(following.await_termination)
            if turn >= 0:
                found.setdefault(name, []).append(took)
    return found


# --- triggers, idling and memory ---------------------------------------------------------------------------------


def measured_over_time(folder: str) -> list[Result]:
    spark = sl.spark.local_session("bench-pipeline", cores=2, memory="3g")
    return [*growth(spark, folder), *idle(spark, folder), *prompt(spark, folder), *memory(spark, folder)]


def growth(spark: Any, folder: str) -> list[Result]:
    """The 190th to 200th trigger against the 10th to 20th, in a table that does not grow."""
    log = filled(folder, "growth", KEYS, KEYS)
    sink = sl.DeltaSink(f"{folder}/growth-table")
    times: list[float] = []
    following = sl.spark.follow(spark, log, sink, trigger={"processingTime": "0 seconds"}, place="driver")
    with following:
        for _ in range(TRIGGERS):
            extend(log, PER_TRIGGER, KEYS)
            _until(lambda: following.progress().lag == 0 and following.progress().commits > len(times))
            times.append(following.progress().seconds)
    early, late = median(times[10:30]), median(times[-20:])
    beside = f"{1000 * early:.0f} ms and {1000 * late:.0f} ms"
    return [Result("the 200th trigger / the 20th, equal table", late / early, "times", "<= 1.2", beside)]


def idle(spark: Any, folder: str) -> list[Result]:
    """Processor time of this process per second, while a pipeline has nothing to do."""
    log = filled(folder, "idle", 1000, 1000)
    with sl.spark.follow(spark, log, sl.DeltaSink(f"{folder}/idle-table"), slot="idle") as following:
        _until(lambda: following.progress().lag == 0 and following.progress().commits > 0)
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        spent = time.process_time() - before
    cursor = log.end()
    cost = [seconds(lambda: log.plan(cursor)) for _ in range(200)]
    return [
        Result("idle pipeline, driver's processor time per second", 1000 * spent / IDLE_SECONDS, "ms"),
        Result("an empty trigger (plan)", 1000 * median(cost), "ms", "<= 1"),
    ]


def prompt(spark: Any, folder: str) -> list[Result]:
    """Wall time from the append of ten records into an idle pipeline to their commit, which takes no job of Spark."""
    results = []
    for kind in ("append", "latest"):
        log = filled(folder, f"prompt-{kind}", 1000, 1000)
        times = []
        with sl.spark.follow(spark, log, sl.DeltaSink(f"{folder}/prompt-{kind}-table", mode=kind)) as following:
            _until(lambda: following.progress().lag == 0 and following.progress().commits > 0)
            for _ in range(TENS):
                time.sleep(2)
                began = time.perf_counter()
                extend(log, 10, 1000)
                _until(lambda: following.progress().lag == 0)
                times.append(1000 * (time.perf_counter() - began))
            assert following.progress().jobs == 0
        beside = f"{min(times):.0f} to {max(times):.0f} ms"
        results.append(Result(f"ten records into an idle pipeline, {kind}", median(times), "ms", "<= 300", beside))
    return results


def memory(spark: Any, folder: str) -> list[Result]:
    """Growth of the driver's Python process when five times as many records pass, and keys are kept."""
    me = psutil.Process()
    results = []
    for kind in ("append", "latest"):
        log = filled(folder, f"memory-{kind}", MILLION, 5 * MILLION)
        sink = sl.DeltaSink(f"{folder}/memory-{kind}-table", mode=kind)
        sl.spark.follow(spark, log, sink, trigger=NOW, place="executors").await_termination()
        before = me.memory_info().rss
        extend(log, 4 * MILLION, 5 * MILLION)
        filling = me.memory_info().rss  # the producer is in this process, too
        sl.spark.follow(spark, log, sink, trigger=NOW, place="executors").await_termination()
        grown = me.memory_info().rss - max(before, filling)
        beside = f"{before >> 20} MiB after a million"
        results.append(
            Result(f"driver memory for four million more, {kind}", grown / (1 << 20), "MiB", "<= 64", beside)
        )
    return results


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the pipeline did not get there")
        time.sleep(0.002)


if __name__ == "__main__":
    print(json.dumps(wall_times(int(sys.argv[1]), sys.argv[2], sys.argv[3])))
