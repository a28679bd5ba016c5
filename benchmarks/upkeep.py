"""A table that is followed each second for a day, with upkeep and without: files, entries, and milliseconds a commit.

``python -m benchmarks.upkeep delta 86400`` makes a day's commits at speed, and prints a row for each half hour of them;
``--without`` does the same without upkeep. Time is scaled: "an hour" of retention is the time that 3,600 commits take,
measured at the beginning, and what upkeep counts in minutes is scaled alike. Log and follower are left out: each commit
is one ``apply`` of ten records.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, no_headers
from strandline.storage.clock import CHANCE
from strandline.tables.iceberg import history as iceberg_history
from strandline.tables.iceberg import sink as iceberg_sink

HOUR: Final = 3600
ROWS: Final = 10
KEYS: Final = 1000
_WARM: Final = 100


def opened(kind: str, mode: Any, folder: str, hours: float | None) -> Any:
    """The sink of a table in a folder; ``hours`` of retention, or no upkeep."""
    layout = None if hours is None else sl.tables.Layout(upkeep=sl.tables.Upkeep(hours=hours))
    if kind == "delta":
        return sl.DeltaSink(f"{folder}/table", mode=mode, layout=layout)
    from pyiceberg.catalog.sql import SqlCatalog

    os.makedirs(f"{folder}/warehouse", exist_ok=True)
    catalog = SqlCatalog("bench", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    return sl.IcebergSink(catalog, "bench.orders", mode=mode, layout=layout)


def scaled(pace: float) -> float:
    """The hours that stand for one if a commit takes ``pace`` seconds instead of one; minutes are set alike."""
    iceberg_sink._DENSE = dt.timedelta(minutes=2) * pace  # noqa: SLF001 - scaled time
    iceberg_history.MINUTE = iceberg_sink.MINUTE = max(1, round(60_000 * pace))
    return pace


def second(number: int) -> pa.Table:
    """The records of one second."""
    first = number * ROWS
    columns = {
        "offset": range(first, first + ROWS),
        "timestamp": pa.array([time.time_ns() // 1000] * ROWS, READ_SCHEMA.field("timestamp").type),
        "op": pa.repeat(pa.scalar(0, pa.int8()), ROWS),
        "key": [b"%06d" % ((first + one) * 7919 % KEYS) for one in range(ROWS)],
        "value": [b'{"id":%d,"state":"shipped"}' % (first + one) for one in range(ROWS)],
        "headers": no_headers(ROWS),
    }
    return pa.table(columns, schema=READ_SCHEMA)


def commits(sink: Any, cursor: Cursor, count: int) -> Iterator[Cursor]:
    """Commit so many seconds, from a cursor on."""
    for number in range(cursor.next // ROWS, cursor.next // ROWS + count):
        upto = cursor.at((number + 1) * ROWS)
        sink.apply(second(number), since=cursor, upto=upto)
        cursor = upto
        yield cursor


def counted(folder: str) -> tuple[int, int]:
    """Data files, and all other files of the table, on disk."""
    found = [
        file
        for file in Path(folder).rglob("*")
        if file.is_file() and file.name[0] != "." and "catalog" not in file.name
    ]
    data = [file for file in found if file.suffix == ".parquet" and file.parent.name not in ("_delta_log", "metadata")]
    return len(data), len(found) - len(data)


class Timed:
    """The time that the upkeep of a sink takes."""

    def __init__(self, sink: Any) -> None:
        self.seconds = 0.0
        self._do = sink._upkeep.after_commit  # noqa: SLF001 - timed
        sink._upkeep.after_commit = self._timed  # noqa: SLF001 - timed

    def _timed(self, *given: Any, **named: Any) -> None:
        began = time.perf_counter()
        self._do(*given, **named)
        self.seconds += time.perf_counter() - began


def day(
    kind: str,
    mode: Any,
    count: int,
    folder: str,
    *,
    kept: bool,
    every: int = HOUR // 2,
    say: Callable[[str], None] = print,
) -> list[tuple[int, float, float, int, int, int]]:
    """Commit so many seconds; for each part the commits, ms a commit, share of upkeep, files, data files, others."""
    rows: list[tuple[int, float, float, int, int, int]] = []
    log = CHANCE.uuid()
    began = time.perf_counter()
    cursor = list(commits(opened(kind, mode, f"{folder}/warm", 1.0), Cursor(log, 0), _WARM))[-1] if kept else None
    hours = scaled((time.perf_counter() - began) / _WARM) if kept else None
    sink = opened(kind, mode, folder, hours)
    timed, cursor = Timed(sink), Cursor(log, 0)
    say(f"{kind}, {mode}, {'upkeep, an hour is %.0f s' % (3600 * (hours or 0)) if kept else 'no upkeep'}")
    while cursor.next < count * ROWS:
        began, kept_before, before = time.perf_counter(), timed.seconds, time.process_time()
        some = min(every, count - cursor.next // ROWS)
        cursor = list(commits(sink, cursor, some))[-1]
        wall = time.perf_counter() - began
        data, others = counted(f"{folder}/table" if kind == "delta" else f"{folder}/warehouse/bench/orders")
        row = (
            cursor.next // ROWS,
            wall / some * 1000,
            (timed.seconds - kept_before) / wall,
            sink.size().files,
            data,
            others,
        )
        rows.append(row)
        spent = (time.process_time() - before) / some * 1000
        words = f"{row[0]:>7,} commits: {row[1]:6.1f} ms ({spent:.1f} of processor), upkeep {row[2]:4.0%}; "
        words += f"{row[3]:>5} files in the version, {data:>6} data files and {others:>6} others on disk"
        say(f"{words}; {sink.upkeep.failures} failures")
    return rows


def run() -> list[Result]:
    """The first fifty minutes of a Delta table of all changes, so that it takes a minute or two."""
    with scratch() as kept, scratch() as bare:
        count = 3000
        ours = day("delta", "append", count, kept, kept=True, every=count // 10, say=lambda _: None)
        theirs = day("delta", "append", count // 3, bare, kept=False, every=count // 10, say=lambda _: None)
    last, first = ours[-1], ours[0]
    beside = f"{theirs[-1][1]:.0f} ms and {theirs[-1][3]:,} files after {theirs[-1][0]:,} commits without"
    return [
        Result(
            "upkeep of a Delta table: the last commits beside the first", last[1] / first[1], "of them", "<= 2", beside
        ),
        Result("upkeep of a Delta table: files in a version", last[3], "files", "<= 96"),
        Result(
            "upkeep of a Delta table: share of its follower's time",
            sum(one[2] for one in ours) / len(ours),
            "",
            "<= 0.5",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["delta", "iceberg"])
    parser.add_argument("count", type=int, nargs="?", default=24 * HOUR)
    parser.add_argument("--mode", default="append")
    parser.add_argument("--every", type=int, default=HOUR // 2, help="commits of a row")
    parser.add_argument("--without", action="store_true")
    given = parser.parse_args()
    with scratch() as folder:
        kept, every = not given.without, given.every
        day(given.kind, given.mode, given.count, folder, kept=kept, every=every, say=partial(print, flush=True))


if __name__ == "__main__":
    main()
