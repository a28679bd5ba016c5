"""One producer process of the demo: ``python -m strandline.cli.demo.producer HOME SHAPE INDEX RATE``.

It goes at a steady pace, and no further than its parent allows: lines on standard input say how many of its changes
it may have appended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

import strandline as sl
from strandline.cli.demo.generator import Change, Shape, changes
from strandline.cli.demo.places import Places, on_a_leash

_TICK: Final = 0.1


class Pace:
    """Lets changes through at a rate, up to what is allowed. After a halt it does not hurry to catch up."""

    def __init__(self, rate: float) -> None:
        """So many changes a second; at first none are allowed."""
        self._rate = rate
        self._allowed = 0
        self._changed = threading.Condition()
        self._next = time.monotonic()

    def allow(self, line: str) -> None:
        """A line from the parent: how many changes in all."""
        with self._changed:
            self._allowed = int(line)
            self._changed.notify_all()

    def wait(self, done: int, more: int) -> None:
        """Block until so many more may be appended."""
        with self._changed:
            self._changed.wait_for(lambda: self._allowed >= done + more)
        now = time.monotonic()
        self._next = max(self._next, now - _TICK)
        time.sleep(max(0.0, self._next - now))
        self._next += more / self._rate


def table(part: list[Change]) -> pa.Table:
    """Changes as a batch to append."""
    return pa.table(
        {
            "op": pa.array([sl.Op.DELETE if value is None else sl.Op.PUT for _, value in part], pa.int8()),
            "key": pa.array([key for key, _ in part], pa.binary()),
            "value": pa.array([value for _, value in part], pa.binary()),
        }
    )


def main(home: str, shape: Shape, index: int, rate: float) -> None:
    """Append all changes of one producer."""
    pace = Pace(rate)
    on_a_leash(pace.allow)
    stream = changes(shape, index)
    at_once = max(1, int(rate * _TICK))
    done = 0
    with sl.open(Places(Path(home)).log).producer(linger=0.2) as producer:
        while part := list(islice(stream, at_once)):
            pace.wait(done, len(part))
            producer.append_batch(table(part))
            done += len(part)


if __name__ == "__main__":
    main(sys.argv[1], Shape(**json.loads(sys.argv[2])), int(sys.argv[3]), float(sys.argv[4]))
