"""The demo's processes without Spark: ``python -m strandline.cli.demo.workers produce|consume ARGUMENTS``.

A producer appends at a steady rate, up to the limit that its parent sets: each line on standard input is a count of
changes. A consumer follows the log into a Delta table.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import islice
from typing import Final

import pyarrow as pa

import strandline as sl
from strandline.cli.demo.changes import Change, DemoWorkload, changes
from strandline.cli.demo.processes import exit_with_parent

_TICK: Final = 0.1


class RateLimit:
    """A rate limit below a total. After a pause it does not catch up."""

    def __init__(self, rate: float) -> None:
        """``rate`` changes a second; none until :meth:`allow`."""
        self._rate = rate
        self._allowed = 0
        self._changed = threading.Condition()
        self._next = time.monotonic()

    def allow(self, line: str) -> None:
        """Set the total, a line from the parent."""
        with self._changed:
            self._allowed = int(line)
            self._changed.notify_all()

    def wait(self, done: int, more: int) -> None:
        """Block until ``more`` changes may be appended after ``done``."""
        with self._changed:
            self._changed.wait_for(lambda: self._allowed >= done + more)
        now = time.monotonic()
        self._next = max(self._next, now - _TICK)
        time.sleep(max(0.0, self._next - now))
        self._next += more / self._rate


def table_of(part: list[Change]) -> pa.Table:
    """Changes as an Arrow table."""
    return pa.table(
        {
            "op": pa.array([sl.Op.DELETE if value is None else sl.Op.PUT for _, value in part], pa.int8()),
            "key": pa.array([key for key, _ in part], pa.binary()),
            "value": pa.array([value for _, value in part], pa.binary()),
        }
    )


def produce(url: str, workload: DemoWorkload, index: int, rate: float) -> None:
    """Append all changes of one producer."""
    limit = RateLimit(rate)
    exit_with_parent(limit.allow)
    stream = changes(workload, index)
    at_once = max(1, int(rate * _TICK))
    done = 0
    with sl.open(url).producer(linger=0.2) as producer:
        while part := list(islice(stream, at_once)):
            limit.wait(done, len(part))
            producer.append_batch(table_of(part))
            done += len(part)


def consume(url: str, table: str, mode: str, slot: str, upto: int) -> None:
    """Follow the log from its beginning into a Delta table, up to an offset."""
    exit_with_parent()
    sink = sl.DeltaSink(table, mode="append" if mode == "append" else "latest")
    sl.follow(sl.open(url), sink, slot=slot, start="beginning", upto=upto)


if __name__ == "__main__":
    role, url, *arguments = sys.argv[1:]
    if role == "produce":
        produce(url, DemoWorkload(**json.loads(arguments[0])), int(arguments[1]), float(arguments[2]))
    else:
        table, mode, slot, upto = arguments
        consume(url, table, mode, slot, int(upto))
