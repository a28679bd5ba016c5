"""Replication over loopback: catching up, following live, memory, and the time that a commit takes.

Replicas are processes of their own (``python -m benchmarks.replication replica …``); the primary is this one, or one of
its own where its memory is what is measured. Ratios are of sides that ran in turns.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.flight as fl

from benchmarks.harness import Result, scratch, seconds
from benchmarks.replication_rivals import postgres_catch_up
from strandline.model.records import RECORD_SCHEMA, Op, record_batch
from strandline.node.config import NodeConfig
from strandline.node.lead.policies import AckN
from strandline.node.lead.primary import PrimaryRole
from strandline.node.running import RunningNode
from tests.servers import NoServer

_ROUNDS = 3
_RECORD = 1 << 10
_PER_BATCH = 1 << 10
_CATCH_UP = 384
"""Batches of a mebibyte."""
_LIVE_SECONDS = 4.0
_COMMITS = 1_500
_MANY, _VALUE = 10_000_000, 100


def _batch(records: int, size: int) -> pa.RecordBatch:
    values = [b"%08d" % number + b"v" * (size - 8) for number in range(records)]
    keys = [b"%08d" % (number % 1000) for number in range(records)]
    return record_batch(timestamps=[1] * records, ops=[Op.PUT] * records, keys=keys, values=values)


# --- children --------------------------------------------------------------------------------------------------


class Child:
    """A process that does as it is told, line by line."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.replication", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.hear("ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, word: str) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise AssertionError
        stdin.write(f"{word}\n")
        stdin.flush()

    def hear(self, word: str) -> str:
        stdout = self._process.stdout
        if stdout is None:
            raise AssertionError
        line = stdout.readline().strip()
        if not line.startswith(word):
            raise RuntimeError(f"a child said {line!r} instead of {word!r}")
        return line.removeprefix(word).strip()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.say("end")
        self._process.wait(30)


@contextlib.contextmanager
def _children(*all_words: Sequence[str]) -> Iterator[list[Child]]:
    children = [Child(*words) for words in all_words]
    try:
        yield children
    finally:
        for child in children:
            child.end()


def _replica(folder: str, url: str, name: str) -> None:
    """Follows whenever it is told to, and stops whenever it is told to."""
    print("ready", flush=True)
    running: RunningNode | None = None
    for line in sys.stdin:
        word = line.strip()
        if word == "follow":
            running = RunningNode(NodeConfig(folder=folder, name=name, upstream=url))
            print("follows", flush=True)
        elif running is not None:
            running.close()
            running = None
            print("stopped", flush=True)
        if word == "end":
            return


def _bare_client(url: str) -> None:
    """Takes a bare stream whenever it is told to, and throws it away."""
    client = fl.connect(url)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            return
        reader = client.do_get(fl.Ticket(b"all"))
        taken = 0
        for chunk in reader:
            taken += chunk.data.num_rows
        print(f"took {taken}", flush=True)


def _primary(folder: str) -> None:
    """A primary that appends for a while whenever it is told to, and tells how much memory that took."""
    with RunningNode(NodeConfig(folder=folder, name="a", create=True, lead=True)) as running:
        primary = running.node.primary
        print(f"ready {running.url}", flush=True)
        batch = _batch(_PER_BATCH, _RECORD)
        for line in sys.stdin:
            if line.strip() == "end":
                return
            peak = 0
            process = psutil.Process()
            for number in range(_CATCH_UP * 2):
                primary.append(batch)
                if number % 8 == 0:
                    peak = max(peak, process.memory_info().rss)
            end = primary.log.bounds().next
            while any((each.durable or 0) < end for each in primary.registry.replicas.values()):
                peak = max(peak, process.memory_info().rss)
                time.sleep(0.02)
            print(f"took {peak}", flush=True)


class _Bare(fl.FlightServerBase):  # type: ignore[misc]
    """The same batches, from memory, with nothing around them; and a call that does nothing."""

    def __init__(self, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batches = batches

    def do_get(self, context: Any, ticket: Any) -> Any:
        return fl.GeneratorStream(RECORD_SCHEMA, self._batches())

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        return [b""]


# --- what is measured --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _led(folder: str) -> Iterator[tuple[PrimaryRole, str]]:
    with RunningNode(NodeConfig(folder=f"{folder}/a", name="a", create=True, lead=True)) as running:
        yield running.node.primary, running.url


def _has_all(primary: PrimaryRole, name: str) -> bool:
    known = primary.registry.replicas.get(name)
    return known is not None and known.durable == primary.log.bounds().next


def _until(condition: Callable[[], bool], timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("a replica did not come along")
        time.sleep(0.001)


def _catching_up(folder: str) -> list[Result]:
    batch = _batch(_PER_BATCH, _RECORD)
    size = batch.nbytes * _CATCH_UP
    ratios, rates, bare_rates = [], [], []
    with (
        _led(folder) as (primary, url),
        _Bare(lambda: (batch for _ in range(_CATCH_UP))) as bare,
        _children(("replica", f"{folder}/b", url, "b"), ("bare", f"grpc://127.0.0.1:{bare.port}")) as (replica, client),
    ):
        replica.say("follow")
        replica.hear("follows")
        _until(lambda: _has_all(primary, "b"))

        def stream() -> None:
            client.say("go")
            client.hear("took")

        def catch_up() -> None:
            replica.say("follow")
            replica.hear("follows")
            _until(lambda: _has_all(primary, "b"))

        stream()
        for _ in range(_ROUNDS):
            replica.say("stop")
            replica.hear("stopped")
            for _ in range(_CATCH_UP):
                primary.submit(batch)
            primary.append(batch)
            bare_seconds, ours = seconds(stream), seconds(catch_up)
            ratios.append(bare_seconds / ours)
            rates.append(size / ours / 1e6)
            bare_rates.append(size / bare_seconds / 1e6)
            primary.trim(primary.log.bounds().next)
    beside = (
        f"{median(rates):,.0f} MB/s, bare stream {median(bare_rates):,.0f} MB/s, {_CATCH_UP} MiB, {_spread(ratios)}"
    )
    return [Result("replica_catch_up", median(ratios), "of bare Flight", ">= 0.25", beside)]


def _following(folder: str) -> list[Result]:
    """Appends of 100 KiB from four threads; how long until the replica has them, too."""
    batch = _batch(100, _RECORD)
    ratios, rates = [], []
    with _led(folder) as (primary, url), _children(("replica", f"{folder}/b", url, "b")) as (replica,):
        replica.say("follow")
        replica.hear("follows")
        _until(lambda: _has_all(primary, "b"))
        for _ in range(_ROUNDS):
            began, until = time.perf_counter(), time.perf_counter() + _LIVE_SECONDS
            first = primary.log.bounds().next

            def work(until: float = until) -> None:
                while time.perf_counter() < until:
                    primary.append(batch)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            appended = time.perf_counter() - began
            _until(lambda: _has_all(primary, "b"))
            followed = time.perf_counter() - began
            ratios.append(appended / followed)
            rates.append((primary.log.bounds().next - first) / appended)
            primary.trim(primary.log.bounds().next)
    beside = f"{median(rates):,.0f} records/s of 1 KiB appended durably, {_spread(ratios)}"
    return [Result("replica_live", median(ratios), "of appends", ">= 0.7", beside)]


def _committing(folder: str) -> list[Result]:
    """Appends that wait for one replica; beside local ones, to a log that nobody follows, and bare round trips.

    The goal is for rows of a hundred of each, every side at its own pace. Beside that, one of each in turns: whatever
    begins after a pause of a millisecond or two is slow on some machines, and an append that waits for another process
    is full of such pauses; there all sides pay for them.
    """
    batch = _batch(1, 200)
    with (
        _led(folder) as (primary, url),
        _led(f"{folder}/alone") as (alone, _),
        _Bare(lambda: iter(())) as bare,
        _children(("replica", f"{folder}/b", url, "b")) as (replica,),
    ):
        client = fl.connect(f"grpc://127.0.0.1:{bare.port}")
        replica.say("follow")
        replica.hear("follows")
        _until(lambda: _has_all(primary, "b"))
        sides: dict[str, Callable[[], object]] = {
            "local": lambda: alone.append(batch),
            "ack_n(1)": lambda: primary.append(batch, policy=AckN(1)).ensure(),
            "round trip": lambda: list(client.do_action(fl.Action("nothing", b""))),
        }
        results = []
        for name, row, goal in (("replica_commit_in_turns", 1, ""), ("replica_commit", 100, "<= 1")):
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(_COMMITS // row):
                for side, action in sides.items():
                    times[side] += [seconds(action) for _ in range(row)]
            middle = {side: median(all_times) for side, all_times in times.items()}
            allowed = 4 * middle["local"] + middle["round trip"]
            beside = ", ".join(f"{side} {value * 1e6:,.0f} µs" for side, value in middle.items())
            results.append(Result(name, middle["ack_n(1)"] / allowed, "of 4 local + trip", goal, beside))
    return results


def _memory(folder: str) -> list[Result]:
    peaks = []
    for count in (1, 3):
        place = f"{folder}/of-{count}"
        command = [sys.executable, "-m", "benchmarks.replication", "primary", f"{place}/a"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            if process.stdin is None or process.stdout is None:
                raise AssertionError
            url = process.stdout.readline().split()[1]
            with _children(*(("replica", f"{place}/r{number}", url, f"r{number}") for number in range(count))) as all_:
                for child in all_:
                    child.say("follow")
                    child.hear("follows")
                process.stdin.write("go\n")
                process.stdin.flush()
                peaks.append(int(process.stdout.readline().split()[1]))
            process.stdin.write("end\n")
            process.stdin.flush()
    beside = f"{peaks[0] >> 20} MiB with one, {peaks[1] >> 20} MiB with three, {2 * _CATCH_UP} MiB appended"
    return [Result("replica_memory", peaks[1] / peaks[0], "three of one", "<= 1.3", beside)]


def _many(folder: str) -> list[Result]:
    """Ten million small records."""
    batch = _batch(10_000, _VALUE)
    with _led(folder) as (primary, url), _children(("replica", f"{folder}/b", url, "b")) as (replica,):
        replica.say("follow")
        replica.hear("follows")
        _until(lambda: _has_all(primary, "b"))
        replica.say("stop")
        replica.hear("stopped")
        for _ in range(_MANY // 10_000):
            primary.append(batch)

        def catch_up() -> None:
            replica.say("follow")
            replica.hear("follows")
            _until(lambda: _has_all(primary, "b"))

        took = seconds(catch_up)
    size = batch.nbytes * (_MANY // 10_000)
    beside = f"{_MANY:,} records of {_VALUE} bytes in {took:.1f} s, {_MANY / took:,.0f} records/s"
    results = [Result("replica_catch_up_10m", size / took / 1e6, "MB/s", "", beside)]
    try:
        theirs = postgres_catch_up(folder, rows=_MANY, size=_VALUE, per_transaction=_MANY // 100)
    except NoServer as missing:
        print(f"PostgreSQL is left out: {missing}", file=sys.stderr)
    else:
        beside = f"PostgreSQL's logical replication took {theirs:.1f} s, {_MANY / theirs:,.0f} rows/s"
        results.append(Result("replica_beside_postgres", theirs / took, "times as fast", "", beside))
    return results


def _spread(ratios: Sequence[float]) -> str:
    return f"rounds {min(ratios):.2f} to {max(ratios):.2f}"


def run() -> list[Result]:
    results = []
    for part in (_catching_up, _following, _committing, _memory, _many):
        with scratch() as folder:
            results += part(folder)
    return results


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role in ("replica", "bare", "primary"):
        {"replica": _replica, "bare": _bare_client, "primary": _primary}[role](*words)
    else:
        from benchmarks.harness import show

        Path(words[0]).mkdir(parents=True, exist_ok=True)
        show(globals()[f"_{role}"](words[0]))
