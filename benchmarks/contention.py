"""Three producers on one log, over a real S3 server with 20 ms added to each request; and what pipelining gives.

Both sides of the ratio write batches of the same size, 64 KiB of Arrow each: one side as producers do it by default,
several uploads at a time and one conditional write for all that are ready; the other uploads one batch, lists it, and
only then begins with the next. Sides take turns, each on a new log, and every producer is a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prometheus_client import REGISTRY

import strandline as sl
from benchmarks.harness import Result
from strandline.model.records import record_batch
from tests.proxy import latency_proxy
from tests.servers import BUCKET, NoServer, S3Server, fresh_prefix

LATENCY = 0.02
BATCH = 64 << 10
RECORD = 100
SECONDS = 3.0
ROUNDS = 3
PRODUCERS = 3
WINDOW = 64
"""Batches of a producer that the load lets be under way at once; with more, appends wait longer for those before."""

PACE = 100
"""Single records a second and producer, where time is measured and not speed."""

GOAL = ">= 5"


@dataclass(frozen=True, slots=True)
class Load:
    """What one producer is to do: for so many seconds, at full speed or paced, overlapped or not."""

    url: str
    options: dict[str, str]
    kind: str
    seconds: float = SECONDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all producers of a side did together: appends that were durable in time, and how long each took."""

    appends: int
    seconds: float
    delays: list[float]
    writes: int
    conflicts: int

    @property
    def rate(self) -> float:
        return self.appends / self.seconds

    @property
    def conflicts_per_listing(self) -> float:
        return self.conflicts / max(1, self.writes)

    def delay(self, share: float) -> float:
        """Milliseconds within which this share of the appends was durable."""
        ranked = sorted(self.delays)
        return 1e3 * ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)]


# --- one producer, in a process of its own -----------------------------------------------------------------------


def _table() -> Any:
    """Records of a 12-byte key and an 88-byte value that no compression makes smaller; with the rest of Arrow, 121."""
    rows = BATCH // (RECORD + 21)
    return record_batch(
        timestamps=range(rows),
        ops=bytes(rows),
        keys=[b"%012d" % row for row in range(rows)],
        values=[os.urandom(RECORD - 12) for _ in range(rows)],
    )


class Watch:
    """Waits for handles in a thread of its own, in the order in which they resolve: that of the calls."""

    def __init__(self, until: float) -> None:
        self.room = threading.Semaphore(WINDOW)
        self.delays: list[float] = []
        self.in_time = 0
        self._until = until
        self._handles: SimpleQueue[tuple[float, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def add(self, began: float, handle: Any) -> None:
        self._handles.put((began, handle))

    def _run(self) -> None:
        while (item := self._handles.get()) is not None:
            began, handle = item
            handle.result()
            ended = time.perf_counter()
            self.room.release()
            self.delays.append(ended - began)  # also of those that came too late to count as throughput
            self.in_time += ended <= self._until

    def done(self) -> dict[str, Any]:
        self._handles.put(None)
        self._thread.join()
        return {"delays": self.delays, "appends": self.in_time}


def _overlapped(log: sl.log.ObjectLog, until: float) -> dict[str, Any]:
    table, watch = _table(), Watch(until)
    with log.producer(batch_bytes=table.nbytes) as producer:
        while time.perf_counter() < until:
            watch.room.acquire()
            began = time.perf_counter()
            watch.add(began, producer.append_batch(table))
    return watch.done()


def _one_by_one(log: sl.log.ObjectLog, until: float) -> dict[str, Any]:
    table, watch = _table(), Watch(until)
    with log.producer(batch_bytes=table.nbytes, uploads=1) as producer:
        while (began := time.perf_counter()) < until:
            handle = producer.append_batch(table)
            watch.add(began, handle)
            handle.result()
    return watch.done()


def _paced(log: sl.log.ObjectLog, until: float) -> dict[str, Any]:
    """Single records at a steady pace, with a producer that was told nothing."""
    watch, due = Watch(until), time.perf_counter()
    with log.producer() as producer:
        while due < until:
            time.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            watch.add(began, producer.append(value=b"v" * RECORD))
            due += 1 / PACE
    return watch.done()


KINDS = {"overlapped": _overlapped, "one by one": _one_by_one, "paced": _paced}


def _child(load: Load) -> None:
    log = sl.open(load.url, options=load.options)
    with log.producer() as warm:
        warm.append(value=b"warm").result()
    before = _counted()
    print("ready", flush=True)
    sys.stdin.readline()
    done = KINDS[load.kind](log, time.perf_counter() + load.seconds)
    counts = {name: count - before[name] for name, count in _counted().items()}
    print(json.dumps({**done, **counts}))


def _counted() -> dict[str, int]:
    role, names = {"role": "producer"}, ("writes", "conflicts")
    return {name: int(REGISTRY.get_sample_value(f"strandline_head_{name}_total", role) or 0) for name in names}


# --- all together ------------------------------------------------------------------------------------------------


def _side(server: S3Server, endpoint: str, kind: str, producers: int, length: float = SECONDS) -> Outcome:
    """Run so many producers at once on a new log."""
    url, options = server.url(BUCKET, fresh_prefix()), server.options_through(endpoint)
    sl.open(url, create=True, options=server.options)
    load = json.dumps(asdict(Load(url, options, kind, length)))
    command = [sys.executable, "-m", "benchmarks.contention", load]
    root = Path(__file__).resolve().parent.parent
    children = [
        subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(producers)
    ]
    try:
        for child in children:
            if child.stdout is None or child.stdout.readline() != "ready\n":
                raise RuntimeError("a producer did not start")
        for child in children:
            if child.stdin is not None:
                child.stdin.write("go\n")
                child.stdin.flush()
        done = [json.loads(child.communicate()[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return Outcome(
        appends=sum(one["appends"] for one in done),
        seconds=length,
        delays=[delay for one in done for delay in one["delays"]],
        writes=sum(one["writes"] for one in done),
        conflicts=sum(one["conflicts"] for one in done),
    )


def run() -> list[Result]:
    server = S3Server()
    try:
        server.start()
    except NoServer as missing:
        print(f"The benchmark of contending producers is left out: {missing}.")
        return []
    with server, latency_proxy("127.0.0.1", server.port, LATENCY) as endpoint:
        server.create_bucket(BUCKET)
        sides = [(kind, count) for count in (PRODUCERS, 1) for kind in ("overlapped", "one by one")]
        rounds: dict[tuple[str, int], list[Outcome]] = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for kind, count in sides:
                rounds[kind, count].append(_side(server, endpoint, kind, count))
        paced = _side(server, endpoint, "paced", PRODUCERS, 2 * SECONDS)
    return _results({side: _middle(found) for side, found in rounds.items()}, paced)


def _middle(found: list[Outcome]) -> Outcome:
    """The round whose throughput is the median."""
    return sorted(found, key=lambda outcome: outcome.rate)[len(found) // 2]


def _results(middle: dict[tuple[str, int], Outcome], paced: Outcome) -> list[Result]:
    table, results = _table(), []
    added = f"{LATENCY * 1e3:.0f} ms added to each request"
    for count, name in ((PRODUCERS, "3_producers"), (1, "1_producer")):
        ours, theirs = middle["overlapped", count], middle["one by one", count]
        size = f"batches of {BATCH >> 10} KiB, {WINDOW} under way at most; {added}"
        slow = f"uploading and listing one after another: {theirs.rate * table.num_rows:,.0f} records/s"
        listed = f"{len(ours.delays) / max(1, ours.writes):.1f} batches in each of {ours.writes} listings"
        full = f"at full speed, {WINDOW} batches under way"
        results += [
            Result(f"contention_{name}", ours.rate * table.num_rows, "records/s", "", size),
            Result(f"contention_{name}_bytes", ours.rate * table.nbytes / 1e6, "MB/s", "", size),
            Result(f"contention_{name}_conflicts", ours.conflicts_per_listing, "per listing", "", listed),
            Result(f"contention_{name}_p50", ours.delay(0.5), "ms", "", full),
            Result(f"contention_{name}_p99", ours.delay(0.99), "ms", "", full),
            Result(f"pipelining_{name}", ours.rate / theirs.rate, "ratio", GOAL, slow),
        ]
    steady = f"{PACE} single records/s each, default settings: 100 ms of them is the linger; {added}"
    return [
        *results,
        Result("contention_3_producers_paced_p50", paced.delay(0.5), "ms", "", steady),
        Result("contention_3_producers_paced_p99", paced.delay(0.99), "ms", "", steady),
        Result("contention_3_producers_paced_conflicts", paced.conflicts_per_listing, "per listing", "", steady),
    ]


if __name__ == "__main__":
    _child(Load(**json.loads(sys.argv[1])))
