"""Memory: a producer beside the bytes that it buffers, followers and their workers beside the bytes of a commit."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, scratch

_BUFFERED = 192 << 20
_LINES = 1 << 20
_NOW = {"availableNow": True}


def _peak(process: int | str = "self") -> int:
    """Peak resident bytes of a program. Not ``ru_maxrss``, which also remembers the process that started it."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this system does not tell a program's peak memory")


def _child(folder: str) -> None:
    """Buffer single records, then flush them; prints the growth of peak memory for each buffered byte."""
    log = sl.open(folder, create=True)
    with log.producer(compression="none") as warm:
        warm.append(key=b"k", value=b"v").result()
    before = _peak()
    with log.producer(compression="none", batch_bytes=_BUFFERED, budget=2 * _BUFFERED, linger=3600.0) as producer:
        records = _BUFFERED // 121 - 1
        for number in range(records):
            producer.append(key=b"%08d" % number, value=b"%092d" % number)
        buffered = producer.buffered
    print((_peak() - before) / buffered)


def _follow(folder: str, mode: str) -> None:
    """Follow repetitive lines into a Delta table; prints the growth of peak memory in bytes, and the commits."""
    log = sl.open(f"{folder}/log")
    sink = sl.DeltaSink(f"{folder}/{mode}", mode=mode)
    sl.follow(log, sink, upto=1)  # everything is imported, and has its caches
    before = _peak()
    sl.follow(log, sl.DeltaSink(f"{folder}/{mode}", mode=mode), upto="end")
    print(_peak() - before)


def _workers(folder: str, mode: str) -> None:
    """The same on Spark's workers; prints the growth of the peak of the largest worker."""
    spark = sl.spark.local_session("bench-memory", cores=2, memory="2g")
    log = sl.open(f"{folder}/log")
    warm = sl.open(f"{folder}/warm-{mode}", create=True)
    with warm.producer() as producer:
        producer.append_batch(log.plan(log.start())[0].fetch()[0].select(["key", "value"]))
    peaks = []
    for name, url in (("warm", warm.url), ("table", log.url)):
        sink = sl.DeltaSink(f"{folder}/workers-{mode}-{name}", mode=mode)
        bound = {"maxBytesPerTrigger": str(sl.followers.Batching().bytes)}
        sl.spark.follow(spark, url, sink, trigger=_NOW, place="executors", options=bound).await_termination()
        alive = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        peaks.append(max(_peak(one.pid) for one in alive if "pyspark.daemon" in one.cmdline()))
    print(peaks[1] - peaks[0])


def _fill(folder: str, distinct: int) -> tuple[int, int]:
    """A log of repetitive lines with so many keys; their bytes in memory, and stored."""
    log = sl.open(f"{folder}/log", create=True)
    rows = 1 << 13
    value = b"GET /index.html HTTP/1.1 200 " + b"-" * 548
    order = random.Random(1).sample(range(_LINES), _LINES)
    with log.producer(compression="zstd", batch_bytes=rows * 640) as producer:
        for first in range(0, _LINES, rows):
            keys = pa.array([b"%08d" % (number % distinct) for number in order[first : first + rows]], pa.binary())
            producer.append_batch(pa.table({"key": keys, "value": pa.array([value] * rows, pa.binary())}))
            producer.flush()
    spans = log.plan(log.start())
    return _LINES * (len(value) + 8), sum(span.size for span in spans)


def _of_child(*arguments: str) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run() -> list[Result]:
    with scratch() as folder:
        ratio = _of_child("produce", folder)
    beside = f"{_BUFFERED >> 20} MiB buffered by single appends, then written"
    results = [Result("producer_memory", ratio, "of buffered", "<= 3", beside)]
    setting = sl.followers.Batching().bytes
    for keys, kinds in (
        (4096, (("follow", "append"), ("follow", "latest"), ("workers", "append"), ("workers", "latest"))),
        (_LINES, (("follow", "latest"), ("workers", "latest"))),
    ):
        with scratch() as folder:
            decoded, stored = _fill(folder, keys)
            for who, mode in kinds:
                peak = _of_child(who, folder, mode)
                beside = (
                    f"{peak / (1 << 20):.0f} MiB at the peak, bytes={setting >> 20} MiB; repetitive lines, "
                    f"{decoded >> 20} MiB, stored in {stored / (1 << 20):.1f} MiB, {keys:,} keys"
                )
                name = f"{who}_memory_{mode}" + ("_million" if keys == _LINES else "")
                results.append(Result(name, peak / setting, "of bytes", "<= 6" if keys == _LINES else "<= 4", beside))
    return results


if __name__ == "__main__":
    {"produce": _child, "follow": _follow, "workers": _workers}[sys.argv[1]](*sys.argv[2:])
