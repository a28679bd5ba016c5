"""Reading a node over Flight, beside reading the folder of its log: following, and spans side by side.

The node is a process of its own (``python -m benchmarks.remote node FOLDER``). Sides take turns, on the same records:
one reads the files of the write-ahead log, the other asks the node for them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from statistics import median
from typing import Any
from uuid import UUID

import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, in_turns, scratch, show
from strandline.log.read.planning import joined, pack
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor, Span
from strandline.model.records import Op, record_batch
from strandline.node.config import NodeConfig
from strandline.node.running import RunningNode

_ROUNDS = 5
_RECORD, _PER_BATCH, _BATCHES = 1 << 10, 1 << 10, 384
_SIDE_BY_SIDE, _TASKS = 4, 16


def _batch() -> pa.RecordBatch:
    values = [b"%08d" % number + b"v" * (_RECORD - 8) for number in range(_PER_BATCH)]
    keys = [b"%08d" % (number % 1000) for number in range(_PER_BATCH)]
    return record_batch(timestamps=[1] * _PER_BATCH, ops=[Op.PUT] * _PER_BATCH, keys=keys, values=values)


def _node(folder: str) -> None:
    """A primary with a log to read, until its input ends."""
    with RunningNode(NodeConfig(folder=folder, name="a", create=True, lead=True)) as running:
        primary, batch = running.node.primary, _batch()
        for _ in range(_BATCHES - 1):
            primary.submit(batch)
        primary.append(batch)
        print(f"{running.url} {running.node.node_folder.data(1)}", flush=True)
        sys.stdin.read()


@contextmanager
def _serving(folder: str) -> Iterator[tuple[str, str]]:
    """The address of a node with records, and the folder of its log."""
    command = [sys.executable, "-m", "benchmarks.remote", "node", f"{folder}/a"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError
        url, data = process.stdout.readline().split()
        yield url, data
        process.stdin.close()


class _Counting:
    """A sink that keeps nothing but its cursor."""

    def __init__(self) -> None:
        self.at: Cursor | None = None
        self.count = 0

    def cursor(self, log_id: UUID) -> Cursor | None:
        del log_id
        return self.at

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        del since
        self.count += records.num_rows
        self.at = upto


def _follow(log: Any) -> None:
    sink = _Counting()
    sl.follow(log, sink, upto="end")
    if sink.count != _BATCHES * _PER_BATCH:
        raise AssertionError(f"{sink.count} records were followed")


def _read(log: Any) -> None:
    count = sum(batch.num_rows for batch in log.read())
    if count != _BATCHES * _PER_BATCH:
        raise AssertionError(f"{count} records were read")


def _fetch(span: Span) -> int:
    return sum(batch.num_rows for batch in span.fetch())


def _rate(times: Sequence[float]) -> str:
    return f"{_batch().nbytes * _BATCHES / 1e6 / median(times):,.0f} MB/s"


def _following(folder: str) -> list[Result]:
    with _serving(folder) as (url, data), sl.open(url) as node:
        files = WalReader(data)
        results = []
        for name, action, goal in (("remote_follow", _follow, ">= 0.4"), ("remote_read", _read, "")):
            action(node)
            local, remote = in_turns([lambda a=action: a(files), lambda a=action: a(node)], _ROUNDS)  # type: ignore[misc]
            ratios = [mine / theirs for mine, theirs in zip(local, remote, strict=True)]
            beside = f"{_rate(remote)}, the folder {_rate(local)}, {_spread(ratios)}"
            results.append(Result(name, median(ratios), "of the folder", goal, beside))
    return results


def _side_by_side(folder: str) -> list[Result]:
    with _serving(folder) as (url, _), sl.open(url) as node:
        spans = [span for task in pack(node.plan(node.start()), _TASKS) for span in joined(task)]
        results = []
        threads = ThreadPoolExecutor(_SIDE_BY_SIDE)
        processes = ProcessPoolExecutor(_SIDE_BY_SIDE, mp_context=get_context("spawn"))
        one = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        with threads, processes, one:
            for pool in (processes, one):  # they connect, and import
                list(pool.map(_fetch, spans, chunksize=1))
            sides = {
                "remote_spans_threads": (
                    lambda: [_fetch(span) for span in spans],
                    lambda: list(threads.map(_fetch, spans)),
                ),
                "remote_spans_processes": (
                    lambda: list(one.map(_fetch, spans)),
                    lambda: list(processes.map(_fetch, spans)),
                ),
            }
            for name, (alone, together) in sides.items():
                by_one, by_four = in_turns([alone, together], _ROUNDS)
                ratios = [single / many for single, many in zip(by_one, by_four, strict=True)]
                beside = f"{_rate(by_four)}, one {_rate(by_one)}, {_spread(ratios)}"
                results.append(Result(name, median(ratios), "of one", ">= 1.3", beside))
    return results


def _spread(ratios: Sequence[float]) -> str:
    return f"rounds {min(ratios):.2f} to {max(ratios):.2f}"


def run() -> list[Result]:
    results = []
    for part in (_following, _side_by_side):
        with scratch() as folder:
            results += part(folder)
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        _node(sys.argv[2])
    else:
        show(run())
