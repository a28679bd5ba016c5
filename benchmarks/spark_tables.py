"""Tables that executors write: CPU-seconds per million records of 100 bytes, beside the floor in the same run.

The floor is what nobody can avoid: fetch, decode, and ``pq.write_table`` in one process. CPU-seconds are those of all
processes of the session (driver, JVM, Python workers), which are steadier than wall time. All sides take turns, in the
other order in each round, and the least of a side counts beside its goal.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, no_headers

ROUNDS: Final = 5
MILLION: Final = 1_000_000
PER_BATCH: Final = 50_000
_BY_FIELD: Final = "latest, JSON, key= a field"
ORDER: Final = pa.schema(
    {
        "id": pa.int64(),
        "customer": pa.int64(),
        "state": pa.string(),
        "city": pa.string(),
        "total": pa.float64(),
        "paid": pa.bool_(),
    }
)


def rows(first: int, count: int, keys: int) -> pa.Table:
    """Records of a 12-byte key and a JSON value of six fields, about 100 bytes."""
    numbers = pa.arange(first, first + count)
    mixed = pc.bit_wise_and(pc.multiply(numbers, 2_654_435_761), (1 << 40) - 1)
    text, many = numbers.cast(pa.string()), mixed.cast(pa.string())
    # A permutation of the keys, so that neighbours are in different files.
    spread = pc.multiply(numbers, 435_761)
    which = pc.subtract(spread, pc.multiply(pc.divide(spread, keys), keys)).cast(pa.string())
    value = pc.binary_join_element_wise(
        '{"id":', text, ',"customer":', many, ',"state":"shipped","city":"Oslo","total":', text, '.5,"paid":true}', ""
    )
    stamps = pc.add(numbers, 1_750_000_000_000_000).view(RECORD_SCHEMA.field("timestamp").type)
    ops = pa.repeat(pa.scalar(0, pa.int8()), count)
    key = pc.utf8_lpad(which, 12, "0").cast(pa.binary())
    return pa.table([stamps, ops, key, value.cast(pa.binary()), no_headers(count)], schema=RECORD_SCHEMA)


def filled(folder: str, name: str, records: int, keys: int) -> Any:
    log = sl.open(f"file://{folder}/{name}", create=True)
    extend(log, records, keys)
    return log


def extend(log: Any, records: int, keys: int) -> None:
    first = log.end().next
    with log.producer() as producer:
        for at in range(first, first + records, PER_BATCH):
            producer.append_batch(rows(at, min(PER_BATCH, first + records - at), keys))
            producer.flush()


_SEEN: dict[tuple[int, float], float] = {}
"""Seconds of each process, when it was last seen: idle workers of Spark end, and nobody adds up what they spent."""


def processor_seconds() -> float:
    """Of this process and all of its children, also the JVM's, and those that have ended since they were idle."""
    me = psutil.Process()
    for one in [me, *me.children(recursive=True)]:
        try:
            times = one.cpu_times()
            _SEEN[one.pid, one.create_time()] = times.user + times.system
        except psutil.Error:
            continue
    return sum(_SEEN.values())


def spent(action: Callable[[], object]) -> float:
    before = processor_seconds()
    action()
    return processor_seconds() - before


def floor(log: Any, folder: str) -> None:
    """Fetch, decode, and write one Parquet file."""
    table = pa.Table.from_batches(log.read(), READ_SCHEMA)
    pq.write_table(table, tempfile.mktemp(dir=folder), compression="zstd", compression_level=1, use_dictionary=False)


def run() -> list[Result]:
    """Measure; about six minutes."""
    spark = sl.spark.local_session("bench-tables", cores=2, memory="3g")
    numbers = itertools.count()
    results: list[Result] = []
    with scratch() as folder:

        def place() -> str:
            return f"{folder}/table-{next(numbers)}"

        def follow(log: Any, sink: Any, where: str = "executors") -> Any:
            following = sl.spark.follow(spark, log, sink, trigger={"availableNow": True}, place=where)
            following.await_termination()
            return following

        log = filled(folder, "log", MILLION, MILLION)
        json = sl.values.Json(ORDER)
        follow(log, sl.DeltaSink(place(), mode="append"))  # starts the workers
        sides: dict[str, tuple[Callable[[], object], str]] = {
            "floor": (lambda: floor(log, folder), ""),
            "append, raw": (lambda: follow(log, sl.DeltaSink(place(), mode="append")), "<= 1.2"),
            "append, JSON": (lambda: follow(log, sl.DeltaSink(place(), mode="append", value=json)), "<= 2.6"),
            "append, raw, in the driver": (lambda: follow(log, sl.DeltaSink(place(), mode="append"), "driver"), ""),
            "latest, from scratch": (lambda: follow(log, sl.DeltaSink(place())), "<= 2.6"),
            "history, from scratch": (lambda: follow(log, sl.DeltaSink(place(), mode="history")), ""),
            "latest, JSON": (lambda: follow(log, sl.DeltaSink(place(), value=json)), ""),
            _BY_FIELD: (lambda: follow(log, sl.DeltaSink(place(), value=json, key="id")), ""),
        }
        spend: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(ROUNDS):
            for name in [*sides][:: -1 if turn % 2 else 1]:
                spend[name].append(spent(sides[name][0]))
        for name, (_, goal) in sides.items():
            results.append(_result(name, spend[name], goal, least=True))
        beside = min(spend[_BY_FIELD]) / min(spend["latest, JSON"])
        results.append(Result(f"{_BY_FIELD}, beside that without (least)", beside, "times", "<= 1.15"))

        for kind, goal in (("latest", "<= 4.5"), ("history", "<= 6")):
            growing = filled(folder, f"growing-{kind}", MILLION, MILLION)
            sink = sl.DeltaSink(place(), mode=kind)
            follow(growing, sink)
            times = []
            for _ in range(ROUNDS):
                extend(growing, MILLION, MILLION)
                times.append(spent(partial(follow, growing, sink)))
            results.append(_result(f"{kind}, a million into a million keys", times, goal))
        results += large(folder, place, follow)
        results += few_into_many(folder, place, follow)
        results += tiny(spark, folder, place)
    return results


CHANGES: Final = 50_000


def few_into_many(folder: str, place: Callable[[], str], follow: Callable[[Any, Any], Any]) -> list[Result]:
    """A trigger of a few changes into a table of ten times as many keys, in turns with the smaller one."""
    tables = []
    for keys in (MILLION, 10 * MILLION):
        log, sink = filled(folder, f"few-{keys}", keys, keys), sl.DeltaSink(place())
        follow(log, sink)
        tables.append((keys, log, sink))
    times: dict[int, list[float]] = {keys: [] for keys, _, _ in tables}
    for turn in range(3):
        for keys, log, sink in tables[:: -1 if turn % 2 else 1]:
            extend(log, CHANGES, keys)
            times[keys].append(spent(partial(follow, log, sink)))
    small, great = (min(values) for values in times.values())
    beside = f"{small:.2f} and {great:.2f} CPU-s"
    return [Result("latest, 50,000 changes into ten million keys / into one", great / small, "times", "<= 2", beside)]


def large(folder: str, place: Callable[[], str], follow: Callable[[Any, Any], Any]) -> list[Result]:
    """Five million records from scratch, and few changes in a table of ten million keys; once each, per million."""
    log = filled(folder, "large", 5 * MILLION, 10 * MILLION)
    found = []
    for kind, goal in (("append", "<= 1"), ("latest", "<= 2.8")):
        spend = spent(partial(follow, log, sl.DeltaSink(place(), mode=kind))) / 5
        found.append(Result(f"{kind}, five million from scratch (CPU-s per million)", spend, "s", goal))
    extend(log, 5 * MILLION, 10 * MILLION)
    sink = sl.DeltaSink(place())
    follow(log, sink)
    extend(log, 100_000, 10 * MILLION)
    found.append(
        Result("latest, 100,000 changes into ten million keys (CPU-s)", spent(partial(follow, log, sink)), "s", "<= 13")
    )
    return found


def tiny(spark: Any, folder: str, place: Callable[[], str]) -> list[Result]:
    """A trigger of a hundred records, in milliseconds of wall time: from plan to commit."""
    found = []
    for where, goal in (("driver", "<= 25"), ("executors", "<= 150")):
        log = filled(folder, f"tiny-{where}", 100, 1000)
        sink = sl.DeltaSink(place(), mode="append")
        times = []
        for _ in range(3 * ROUNDS):
            extend(log, 100, 1000)
            following = sl.spark.follow(spark, log, sink, trigger={"availableNow": True}, place=where)
            following.await_termination()
            times.append(1000 * following.progress().seconds)
        ordered = sorted(times)
        found.append(
            Result(
                f"tiny trigger, {where}",
                median(times),
                "ms",
                goal,
                f"{ordered[0]:.0f}–{ordered[-1]:.0f}",  # noqa: RUF001
            )
        )
    return found


def _result(name: str, values: list[float], goal: str, *, least: bool = False) -> Result:
    """The median of some values, or the least of them."""
    ordered = sorted(values)
    beside = f"{ordered[0]:.2f}–{ordered[-1]:.2f}, median {median(values):.2f}"  # noqa: RUF001
    return Result(f"{name} (CPU-s per million)", ordered[0] if least else median(values), "s", goal, beside)
