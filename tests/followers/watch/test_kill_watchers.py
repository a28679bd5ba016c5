"""``kill -9`` of a real watcher or follower at random moments: after each restart its fold equals the source."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import strandline as sl
from strandline.kv.log import LogKeyValue
from strandline.kv.nats.bucket import NatsKeyValue
from strandline.model.records import Op, record_batch
from tests.followers.watch.watchers import digest

KILLS = [4, pytest.param(8, marks=pytest.mark.matrix), pytest.param(50, marks=pytest.mark.slow)]
PATIENCE = 120.0
LOOK_EVERY = 0.002


class Nursery:
    """Starts watchers, one at a time, and kills them. A context manager that ends all of them."""

    def __init__(self, folder: Path, job: dict[str, object]) -> None:
        self.notes = folder / "notes.txt"
        self.notes.touch()
        self._job = {**job, "notes": str(self.notes), "store": str(folder / "store")}
        self._errors = open(folder / "errors.txt", "w+")  # noqa: SIM115 - closed with the rest
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.followers.watch.watchers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._watcher: int | None = None
        self._read = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._errors.close()

    def start(self) -> None:
        self._process.stdin.write(json.dumps(self._job) + "\n")
        self._process.stdin.flush()
        self._watcher = int(self._process.stdout.readline())

    def kill(self) -> None:
        if self._watcher is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._watcher, signal.SIGKILL)
            while self._is_alive():  # its lock on the store goes with it
                time.sleep(LOOK_EVERY)
            self._watcher = None

    def _is_alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._watcher, 0)
            return True
        return False

    def wait_for(self, cursor: int) -> str:
        """The digest that the watcher noted when it came so far."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended = not self._is_alive()  # before the look: what it noted last counts
            lines = [
                line for line in self.notes.read_text().splitlines(keepends=True)[self._read :] if line[-1] == "\n"
            ]
            for line in reversed(lines):
                at, state = line.split()
                if int(at) == cursor:
                    self._read += len(lines)
                    return state
            if ended:
                break
            time.sleep(LOOK_EVERY)
        self._errors.seek(0)
        raise AssertionError(f"the watcher did not come to {cursor}: {self._errors.read()[-2000:]}")


def change(kv, dice: random.Random) -> None:
    key = f"{dice.choice(['a', 'a.b', 'c'])}.{dice.randrange(12)}"
    if dice.random() < 0.25:
        kv.delete(key)
    else:
        kv.put(key, b"%d" % dice.randrange(1_000_000))


def end_of(kv) -> int:
    """The end of the stream of changes, found by writing one more that is in every scope."""
    return kv.put("a.end", b"") + 1


def survive(folder: Path, kv, job: dict[str, object], *, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    prefixes = tuple(prefix.encode() for prefix in job["scope"] or [""])
    with Nursery(folder, job) as nursery:
        for _ in range(kills):
            nursery.start()
            deadline = time.monotonic() + dice.choice([0.0, 0.005, 0.02, 0.05])
            while time.monotonic() < deadline:
                change(kv, dice)
            nursery.kill()
            change(kv, dice)
            end = end_of(kv)
            nursery.start()
            truth = [(entry.key, entry.value) for entry in kv.scan() if entry.key.startswith(prefixes)]
            assert nursery.wait_for(end) == digest(truth)
            if dice.random() < 0.5:
                nursery.kill()  # idle, or in the middle of what it does when it is idle
            else:
                change(kv, dice)
                nursery.kill()


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    "scope", [pytest.param([""], marks=pytest.mark.slow), ["a.", "c.1"]], ids=["everything", "prefixes"]
)
def test_killed_watchers_of_a_log_lose_no_change(tmp_path, scope, kills):
    log = sl.open(str(tmp_path / "log"), create=True)
    job = {"kind": "log", "address": log.url, "scope": scope}
    survive(tmp_path, LogKeyValue(log), job, kills=kills, seed=1)


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scope", [pytest.param(["a.", "c.1"], marks=pytest.mark.matrix), []], ids=["watched", "followed"]
)
def test_over_the_write_ahead_log_of_another_process(tmp_path, scope, kills):
    with sl.compat.WriteAheadLog.open(tmp_path / "wal") as wal:
        job = {"kind": "wal", "address": str(tmp_path / "wal"), "scope": scope}
        survive(tmp_path, LogKeyValue(wal.log), job, kills=kills, seed=3)


class OnPrimary(LogKeyValue):
    """Keyed values in the log of a node, which are written by its own append."""

    def __init__(self, primary: sl.node.Primary) -> None:
        super().__init__(primary.reading())
        self._primary = primary

    def put(self, key: str, value: bytes) -> int:
        return self._write(key, value)

    def delete(self, key: str) -> int:
        return self._write(key, None)

    def _write(self, key: str, value: bytes | None) -> int:
        op = Op.DELETE if value is None else Op.PUT
        batch = record_batch(timestamps=[0], ops=[op], keys=[key.encode()], values=[value])
        return self._primary.append(batch).ensure().first


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scope", [["a.", "c.1"], pytest.param([], marks=pytest.mark.matrix)], ids=["watched", "followed"]
)
def test_over_a_replica_that_is_killed_with_it(tmp_path, scope, kills):
    with sl.node.Primary.open(tmp_path / "primary", poll_seconds=0.1) as primary:
        job = {"kind": "replica", "address": primary.url, "scope": scope}
        survive(tmp_path, OnPrimary(primary), job, kills=kills, seed=4)


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scope", [pytest.param(["a.", "c.1"], marks=pytest.mark.matrix), []], ids=["watched", "followed"]
)
def test_over_a_node_that_is_read_by_its_address(tmp_path, scope, kills):
    with sl.node.Primary.open(tmp_path / "primary", poll_seconds=0.1) as primary:
        job = {"kind": "node", "address": primary.url, "scope": scope}
        survive(tmp_path, OnPrimary(primary), job, kills=kills, seed=5)


@pytest.mark.matrix
@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("history", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_watchers_of_a_nats_bucket_lose_no_change(tmp_path, nats_url, history, kills):
    name = f"kill-{tmp_path.name}-{history}".replace("_", "-").replace("[", "-").replace("]", "-")
    with NatsKeyValue.connect(nats_url, name, create=True, history=history) as kv:
        job = {"kind": "nats", "address": f"{nats_url}/{name}", "scope": [""] if history == 1 else ["a."]}
        survive(tmp_path, kv, job, kills=kills, seed=2)
