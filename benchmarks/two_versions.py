"""The same work with two versions of the package: ``python -m benchmarks.two_versions OLD/src NEW/src [WORK ...]``.

Each work runs in a process of its own, old and new in turns, and reports the processor time of that process and of all
its children (Spark's JVM and its workers included). Printed are the medians and their ratio, with the range of the
ratios of neighbouring rounds. Only calls that both versions have are used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 5


def _batch(rows: int, first: int = 0) -> Any:
    from strandline.model.records import Op, record_batch

    keys = [b"%08d" % (number * 435_761 % 100_000) for number in range(first, first + rows)]
    values = [b'{"id": %d, "state": "shipped", "total": 12.5, "city": "Oslo"}' % n for n in range(first, first + rows)]
    return record_batch(timestamps=[1] * rows, ops=[Op.PUT] * rows, keys=keys, values=values)


def _filled(url: str, batches: int, rows: int) -> Any:
    import strandline as sl

    log = sl.open(url, create=True)
    batch = _batch(rows)
    with log.producer() as producer:
        for _ in range(batches):
            producer.append_batch(batch)
            producer.flush()
    return log


def append_single(_folder: str) -> Callable[[], object]:
    """Append 300,000 records to a log in memory, one per call."""
    import strandline as sl

    log = sl.open("memory://single", create=True)

    def work() -> None:
        with log.producer() as producer:
            for number in range(300_000):
                producer.append(key=b"%d" % number, value=b"a value of some thirty bytes, so")

    return work


def append_batch(folder: str) -> Callable[[], object]:
    """Append 1,500 batches of 10,000 records to a folder's object log."""
    import strandline as sl

    log = sl.open(f"file://{folder}/log", create=True)
    batch = _batch(10_000)

    def work() -> None:
        with log.producer() as producer:
            for _ in range(1_500):
                producer.append_batch(batch)

    return work


def append_durable(folder: str) -> Callable[[], object]:
    """Append 3,000 records to a write-ahead log, each durable before the next."""
    import strandline as sl

    log = sl.open(f"wal://{folder}/wal", create=True)

    def work() -> None:
        with log.producer() as producer:
            for number in range(3_000):
                producer.append(key=b"%d" % number, value=b"v" * 100)
                producer.flush()

    return work


def produce(_folder: str) -> Callable[[], object]:
    """Call ``produce`` 40,000 times with 100 values each, into a log in memory."""
    import strandline as sl

    log = sl.open("memory://produce", create=True)
    values = [b"a value of some thirty bytes, so"] * 100

    def work() -> None:
        with log.producer() as producer:
            for _ in range(40_000):
                producer.produce(values)

    return work


def read(folder: str) -> Callable[[], object]:
    """Read two million records of a folder's object log."""
    log = _filled(f"file://{folder}/log", 200, 10_000)
    return lambda: [sum(batch.num_rows for batch in log.read()) for _ in range(10)]


def follow_store(folder: str) -> Callable[[], object]:
    """Follow a million records into an append-only store."""
    import strandline as sl

    log = _filled(f"file://{folder}/log", 100, 10_000)
    stores = sl.followers if hasattr(sl.followers, "AppendLogStore") else sl
    return lambda: sl.follow(log, stores.AppendLogStore.open(f"{folder}/state"), upto="end")


def follow_delta(folder: str) -> Callable[[], object]:
    """Follow a million records into a Delta table of the newest values."""
    import strandline as sl

    log = _filled(f"file://{folder}/log", 100, 10_000)
    return lambda: sl.follow(log, sl.DeltaSink(f"{folder}/table", mode="latest"), upto="end")


def consume(folder: str) -> Callable[[], object]:
    """Take 3,000 batches of 100 records with a queue's consumer, each acknowledged."""
    import strandline as sl

    log = _filled(f"file://{folder}/log", 3_000, 100)
    consumer = sl.Consumer(log, slot="bench")

    def work() -> None:
        left = 300_000
        while left:
            batch = consumer.next_batch()
            left -= 100
            consumer.ack(batch.sequence)
        consumer.close()

    return work


def spark_follow(folder: str) -> Callable[[], object]:
    """Follow two million records into a Delta table with Spark, once it is warm."""
    import strandline as sl

    log = _filled(f"file://{folder}/log", 40, 50_000)
    spark = sl.spark.local_session("bench")

    def run(name: str) -> None:
        table = sl.DeltaSink(f"{folder}/{name}", mode="latest")
        pipeline = sl.spark.follow(spark, log, table, slot=name, trigger={"availableNow": True})
        pipeline.await_termination()

    run("warm")
    return lambda: run("table")


def spark_read(folder: str) -> Callable[[], object]:
    """Count and fold two million records in a Spark query."""
    import strandline as sl

    _filled(f"file://{folder}/log", 40, 50_000)
    spark = sl.spark.local_session("bench")

    def query() -> object:
        found = spark.read.format("strandline").load(f"file://{folder}/log")
        return found.selectExpr("sum(length(value))", "count(distinct key)").collect()

    query()
    return lambda: [query() for _ in range(3)]


def replicate(folder: str) -> Callable[[], object]:
    """Bring a replica up to 128 MiB that its primary has, over loopback."""
    from strandline.node.config import NodeConfig
    from strandline.node.running import RunningNode

    primary = RunningNode(
        NodeConfig(folder=f"{folder}/primary", name="one", create=True, lead=True, listen=("127.0.0.1", 0))
    )
    import strandline as sl

    log = sl.open(primary.url)
    batch = _batch(10_000)
    with log.producer() as producer:
        for _ in range(160):
            producer.append_batch(batch)
    end = log.end().next

    def work() -> None:
        replica = RunningNode(NodeConfig(folder=f"{folder}/replica", name="two", upstream=primary.url))
        while (at := replica.status().position) is None or at.next < end:
            time.sleep(0.02)
        replica.close()

    return work


def append_at_node(folder: str) -> Callable[[], object]:
    """Append 1,500 records at a node over Flight, each durable before the next."""
    from strandline.node.config import NodeConfig
    from strandline.node.running import RunningNode

    primary = RunningNode(
        NodeConfig(folder=f"{folder}/primary", name="one", create=True, lead=True, listen=("127.0.0.1", 0))
    )
    import strandline as sl

    log = sl.open(primary.url)

    def work() -> None:
        with log.producer() as producer:
            for number in range(1_500):
                producer.append(key=b"%d" % number, value=b"v" * 100)
                producer.flush()

    return work


WORK: dict[str, Callable[[str], Callable[[], object]]] = {
    work.__name__: work
    for work in (
        append_single,
        append_batch,
        append_durable,
        produce,
        read,
        follow_store,
        follow_delta,
        consume,
        spark_read,
        spark_follow,
        replicate,
        append_at_node,
    )
}


def _alone(name: str) -> None:
    """Do one work in this process and print its processor and wall seconds."""
    from benchmarks.harness import scratch
    from benchmarks.spark_tables import processor_seconds

    with scratch() as folder:
        work = WORK[name](folder)
        spent, began = processor_seconds(), time.perf_counter()
        work()
        took = time.perf_counter() - began
        print(json.dumps([processor_seconds() - spent, took]), flush=True)
        os._exit(0) if name.startswith(("replicate", "append_at")) else None


def _once(tree: str, name: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.two_versions", "--alone", name]
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).resolve().parent.parent}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        spent, took = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise SystemExit(f"{name} with {tree} failed:\n{done.stderr[-3000:]}") from None
    return float(spent), float(took)


def main() -> int:
    """Compare, and print a line per work."""
    if sys.argv[1:2] == ["--alone"]:
        _alone(sys.argv[2])
        return 0
    old, new, *names = sys.argv[1:]
    for name in names or WORK:
        rounds = [(_once(old, name), _once(new, name)) for _ in range(ROUNDS)]
        ratios = sorted(after[0] / before[0] for before, after in rounds)
        walls = median(after[1] for _, after in rounds) / median(before[1] for before, _ in rounds)
        spent = [median(pair[side][0] for pair in rounds) for side in (0, 1)]
        print(
            f"{name:<16} {spent[0]:7.2f} s → {spent[1]:7.2f} s of processors: {spent[1] / spent[0]:.3f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}); wall {walls:.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
