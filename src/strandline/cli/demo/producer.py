"""One producer process of the demo: ``python -m strandline.cli.demo.producer LOG SHAPE INDEX RATE``.

It appends at a steady rate, up to the limit that its parent sets: each line on standard input is a count of changes.
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
from strandline.cli.demo.folder import exit_with_parent
from strandline.cli.demo.generator import Change, Shape, changes

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


def table(part: list[Change]) -> pa.Table:
    """Changes as an Arrow table."""
    return pa.table(
        {
            "op": pa.array([sl.Op.DELETE if value is None else sl.Op.PUT for _, value in part], pa.int8()),
            "key": pa.array([key for key, _ in part], pa.binary()),
            "value": pa.array([value for _, value in part], pa.binary()),
        }
    )


def main(url: str, shape: Shape, index: int, rate: float) -> None:
    """Append all changes of one producer."""
    limit = RateLimit(rate)
    exit_with_parent(limit.allow)
    stream = changes(shape, index)
    at_once = max(1, int(rate * _TICK))
    done = 0
    with sl.open(url).producer(linger=0.2) as producer:
        while part := list(islice(stream, at_once)):
            limit.wait(done, len(part))
            producer.append_batch(table(part))
            done += len(part)


if __name__ == "__main__":
    main(sys.argv[1], Shape(**json.loads(sys.argv[2])), int(sys.argv[3]), float(sys.argv[4]))
