"""A seeded storm over a standalone cluster: drivers, executors, Python workers and the master are killed.

``python -m tests.spark.chaos.storm SECONDS SEED`` prints what was killed, and how the tables differ from the oracle.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow as pa

import strandline as sl
from strandline.model.records import READ_SCHEMA
from tests.spark.chaos import oracle
from tests.spark.cluster import Cluster

BAG = ("python",) * 4 + ("executor",) * 3 + ("driver", "master")
CALM_SECONDS = 20.0
"""After the start of a driver nothing is killed, so that it comes to commit something."""
TABLES = 12
KEYS = 40
PER_BATCH = 100
FINISH_SECONDS = 900.0
START_SECONDS = 120.0


def schedule(seed: int) -> Iterator[tuple[float, str]]:
    """What is killed next, and after how many seconds: each kind as often as the bag has it, in a random order."""
    chance = random.Random(seed)
    while True:
        bag = list(BAG)
        chance.shuffle(bag)
        for kind in bag:
            yield chance.uniform(2.0, 10.0), kind


@dataclass(slots=True)
class Report:
    """What happened, and what is wrong."""

    kills: Counter[str] = field(default_factory=Counter)
    drivers: int = 0
    ended: list[str] = field(default_factory=list)
    """Drivers that ended by themselves before they were told to."""
    changes: int = 0
    jobs: int = 0
    commits: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """The report for people."""
        differences = sum(map(len, self.wrong.values()))
        lines = [
            f"kills: {', '.join(f'{count} of {kind}' for kind, count in sorted(self.kills.items()))}",
            f"drivers: {self.drivers}, of which {len(self.ended)} ended by themselves",
            f"changes: {self.changes:,}; written jobs: {self.jobs:,}",
            f"commits: {sum(self.commits.values()):,} {self.commits}",
            f"rows compared: {sum(self.rows.values()):,} {self.rows}",
            f"differences: {differences}",
            *(f"  {name}: {found[:5]}" for name, found in self.wrong.items() if found),
            *self.ended,
        ]
        return "\n".join(lines)


class Storm:
    """The cluster, its driver, the producer of changes, and the kills."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.log = sl.open(f"file://{folder}/log", create=True)
        self.changes: list[oracle.Change] = []
        self.report = Report()
        self._driver: subprocess.Popen[bytes] | None = None
        self._driver_at: float = 0.0
        self._up_at: float | None = None
        self._starts_before = 0
        self._output = folder / "driver.txt"

    def produce(self, stop: threading.Event) -> None:
        """Append random changes; this is the only writer, so that a change's place is its offset."""
        with self.log.producer() as producer:
            while not stop.wait(0.25):
                for _ in range(PER_BATCH):
                    key = f"t{self.chance.randrange(TABLES)}/{self.chance.randrange(KEYS)}".encode()
                    number = None if self.chance.random() < 0.1 else len(self.changes)
                    value = None if number is None else json.dumps({"n": number}).encode()
                    producer.append(key=key, value=value, op=sl.Op.DELETE if value is None else sl.Op.PUT)
                    self.changes.append((key, number))
                producer.flush()

    def start_driver(self, cluster: Cluster) -> None:
        """Start the driver in a process group of its own."""
        speculation = {"spark.speculation": "true", "spark.speculation.interval": "50ms"}
        eager = {"spark.speculation.multiplier": "1.2", "spark.speculation.quantile": "0.3"}
        lost = {"spark.task.maxFailures": "8", "spark.excludeOnFailure.enabled": "false"}
        settings = {**cluster.settings(), **speculation, **eager, **lost}
        target = f"file://{self.folder}/target"
        given = {"folder": str(self.folder), "log": self.log.url, "target": target, "settings": settings}
        environment = cluster.environment(f"driver-{self.report.drivers}")
        environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
        self._driver_at, self._up_at, self._starts_before = time.monotonic(), None, self._starts()
        with self._output.open("ab") as out:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.chaos.driver"],
                stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, cwd=environment["HOME"],
                start_new_session=True,
            )  # fmt: skip
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps(given).encode())
        self._driver.stdin.close()
        self.report.drivers += 1

    def is_calm(self) -> bool:
        """Whether the driver is still starting, or has only just started."""
        age = time.monotonic() - self._driver_at
        if self._up_at is None and self._starts() > self._starts_before:
            self._up_at = time.monotonic()
        if self._up_at is None:
            return age < START_SECONDS
        return time.monotonic() - self._up_at < CALM_SECONDS

    def _starts(self) -> int:
        return self._output.read_text(errors="replace").count("started\n") if self._output.exists() else 0

    def keep_driver(self, cluster: Cluster) -> None:
        """Start the driver again if it has ended by itself."""
        if self._driver is not None and self._driver.poll() is not None:
            lines = self._output.read_text(errors="replace").splitlines()
            self.report.ended.append(f"status {self._driver.returncode}: {' | '.join(lines[-3:])[:600]}")
            self.start_driver(cluster)

    def end_driver(self) -> None:
        """Kill the driver, with its JVM."""
        if self._driver is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait()

    def kill(self, kind: str, cluster: Cluster) -> bool:
        """Kill one process of a kind; False if there is none now."""
        if kind == "driver":
            self.end_driver()
            self.start_driver(cluster)
            return True
        if kind == "master":
            cluster.restart_master()
            return True
        executors = [one for one in cluster.family() if "CoarseGrainedExecutorBackend" in _command(one)]
        if kind == "executor":
            return _kill(self.chance, executors)
        found: list[psutil.Process] = []
        for one in executors:
            with contextlib.suppress(psutil.Error):
                found += [child for child in one.children(recursive=True) if "python" in child.name()]
        return _kill(self.chance, found)

    def finish(self, cluster: Cluster) -> None:
        """Let the driver reach the end of the log."""
        (self.folder / "finish.new").write_text(str(len(self.changes)))
        (self.folder / "finish.new").replace(self.folder / "finish")
        limit = time.monotonic() + FINISH_SECONDS
        while self._driver is not None and self._driver.poll() != 0:
            self.keep_driver(cluster)
            assert time.monotonic() < limit, self._output.read_text(errors="replace")[-3000:]
            time.sleep(0.2)

    def compare(self) -> None:
        """Compare all tables with the oracle."""
        assert self.log.end().next == len(self.changes)
        for name, truth in oracle.expected(self.changes).items():
            found, commits = oracle.held(self.folder, name)
            self.report.rows[name], self.report.commits[name] = sum(found.values()), commits
            self.report.wrong[name] = oracle.differences(found, truth)
        noted = self.folder / "jobs"
        self.report.jobs = int(noted.read_text()) if noted.exists() else 0
        if self.report.jobs:
            with sl.open(f"file://{self.folder}/target") as target:
                table = pa.Table.from_batches(target.read(), READ_SCHEMA)
            self.report.rows["jobs"] = table.num_rows
            self.report.wrong["jobs"] = oracle.jobs_differ(table, self.report.jobs)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _kill(chance: random.Random, processes: list[psutil.Process]) -> bool:
    if not processes:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        chance.choice(processes).kill()
        return True
    return False


def run(folder: Path, seconds: float, seed: int) -> Report:
    """The whole storm; the report has what was wrong."""
    storm, stop = Storm(folder, seed), threading.Event()
    with Cluster(folder / "cluster") as cluster:
        producer = threading.Thread(target=storm.produce, args=(stop,))
        storm.start_driver(cluster)
        producer.start()
        began = time.monotonic()
        try:
            for gap, kind in schedule(seed):
                until = time.monotonic() + gap
                while time.monotonic() < until or storm.is_calm():
                    storm.keep_driver(cluster)
                    time.sleep(0.1)
                if time.monotonic() - began >= seconds:
                    break
                for _ in range(50):  # a driver that has just started has no executors yet
                    if storm.kill(kind, cluster):
                        storm.report.kills[kind] += 1
                        break
                    time.sleep(0.2)
            stop.set()
            producer.join()
            storm.report.changes = len(storm.changes)
            storm.finish(cluster)
        finally:
            stop.set()
            producer.join()
            storm.end_driver()
    storm.compare()
    storm.log.close()
    return storm.report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="strandline-storm-") as place:
        print(run(Path(place), float(sys.argv[1]), int(sys.argv[2])).text(), flush=True)
