"""Memory: what a producer takes beside the bytes it buffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import strandline as sl
from benchmarks.harness import Result, scratch

_BUFFERED = 192 << 20


def _peak() -> int:
    """Peak resident bytes of this program. Not ``ru_maxrss``, which also remembers the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
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


def run() -> list[Result]:
    with scratch() as folder:
        command = [sys.executable, "-m", "benchmarks.memory", folder]
        ratio = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    beside = f"{_BUFFERED >> 20} MiB buffered by single appends, then written"
    return [Result("producer_memory", ratio, "of buffered", "<= 3", beside)]


if __name__ == "__main__":
    _child(sys.argv[1])
