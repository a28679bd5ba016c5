"""The write-ahead log: group commit beside one sync per record, bulk appends beside raw writes, length, and rivals."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median

import pyarrow as pa

from benchmarks.harness import Result, in_turns, scratch, seconds
from benchmarks.wal_rivals import (
    CLIENTS,
    PAYLOAD,
    Appends,
    NoServer,
    percentile,
    postgres,
    postgres_appends,
    sqlite_appends,
    sqlite_grouped,
    timed,
)
from strandline.compat.spool.lsn_log import LsnHandle, WriteAheadLog
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.wal.frame import FrameInfo, encode_frame
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.records import conform
from strandline.storage.disk import DISK, Disk
from strandline.storage.env import Env
from tests.disk_doubles import SlowSyncDisk

_ROUNDS = 5
_SECONDS = 1.0
_FIXED = 0.001
_OUTSTANDING = 16
_SINGLES = 2_000
_BULK = 256 << 20
_RECORD = 1 << 10
_LONG, _SHORT, _FRAME = 10_000_000, 100_000, 1_000
_VALUE = b"v" * 100
_PRUNED = 4_000


# --- group commit ----------------------------------------------------------------------------------------------


@contextmanager
def _opened(folder: str, disk: Disk = DISK) -> Iterator[WriteAheadLog]:
    """A new log in a folder of its own."""
    with WriteAheadLog.open(f"{folder}/wal-{time.monotonic_ns()}", env=Env(disk=disk)) as wal:
        yield wal


def _blocking(folder: str, disk: Disk = DISK, threads: int = CLIENTS) -> Appends:
    """Threads that wait for each of their appends."""
    with _opened(folder, disk) as wal:
        return timed("threads", [lambda: wal.append(PAYLOAD)] * threads, seconds=_SECONDS)


def _handles(folder: str, disk: Disk = DISK) -> Appends:
    """Threads that keep several handles outstanding."""
    with _opened(folder, disk) as wal:

        def appender() -> Callable[[], object]:
            waiting: deque[LsnHandle] = deque(wal.submit(PAYLOAD) for _ in range(_OUTSTANDING))

            def append() -> None:
                waiting.append(wal.submit(PAYLOAD))
                waiting.popleft().result()

            return append

        return timed("handles", [appender() for _ in range(CLIENTS)], seconds=_SECONDS)


def _awaiting(folder: str, disk: Disk = DISK) -> Appends:
    """Tasks of one event loop that await each of their appends."""
    with _opened(folder, disk) as wal:
        return _by_tasks(lambda: wal.submit(PAYLOAD))


def _by_tasks(append: Callable[[], Awaitable[object]]) -> Appends:
    async def work() -> tuple[int, float]:
        began = time.perf_counter()
        end = began + _SECONDS

        async def task() -> int:
            count = 0
            while time.perf_counter() < end:
                await append()
                count += 1
            return count

        counts = await asyncio.gather(*[task() for _ in range(CLIENTS)])
        return sum(counts), time.perf_counter() - began

    count, took = asyncio.run(work())
    return Appends("asyncio", count, took, 0.0, 0.0)


@contextmanager
def _own_sync(folder: str, disk: Disk) -> Iterator[Callable[[], None]]:
    """One write and one sync per record, one record at a time: what an append costs that shares nothing."""
    file, lock = disk.open_append(f"{folder}/own-{time.monotonic_ns()}"), threading.Lock()

    def append() -> None:
        with lock:
            file.write([PAYLOAD])
            file.sync()

    try:
        yield append
    finally:
        file.close()


def _own_alone(folder: str, disk: Disk) -> Appends:
    with _own_sync(folder, disk) as append:
        return timed("alone", [append], seconds=_SECONDS)


def _own_threads(folder: str, disk: Disk) -> Appends:
    """The same threads, each record with a sync of its own."""
    with _own_sync(folder, disk) as append:
        return timed("threads", [append] * CLIENTS, seconds=_SECONDS)


def _own_tasks(folder: str, disk: Disk) -> Appends:
    """The same tasks, each record with a sync of its own: in another thread, or it would stop the loop."""
    with _own_sync(folder, disk) as append:
        return _by_tasks(lambda: asyncio.get_running_loop().run_in_executor(None, append))


_WAYS = (
    ("64 threads", _blocking, _own_threads, ">= 4", ">= 15"),
    (f"64 threads, {_OUTSTANDING} handles each", _handles, _own_threads, ">= 15", ""),
    ("64 tasks", _awaiting, _own_tasks, ">= 10", ""),
)


def groups() -> list[Result]:
    """64 appenders of 200 bytes, beside the same ones with a sync of their own for each record.

    On the real disk and with syncs of a fixed length. What a single thread gets that does nothing but write and sync
    is told, too.
    """
    results = []
    with scratch() as folder:
        for name, way, own, goal, fixed_goal in _WAYS:
            for where, disk, wanted in (
                ("real disk", DISK, goal),
                ("1 ms syncs", SlowSyncDisk(DISK, _FIXED), fixed_goal),
            ):
                sides: tuple[list[float], list[float], list[float]] = ([], [], [])
                for _ in range(_ROUNDS):  # side by side: a machine has slow spells
                    for found, side in zip(sides, (way, own, _own_alone), strict=True):
                        found.append(side(folder, disk).rate)
                ours, theirs, alone = sides
                ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
                bare = median(mine / other for mine, other in zip(ours, alone, strict=True))
                beside = (
                    f"{median(ours):,.0f} records/s, rounds {min(ratios):.1f} to {max(ratios):.1f}; "
                    f"{bare:.1f} times one thread alone with {median(alone):,.0f}"
                )
                what = f"wal: {name}, {where}, to a sync per record"
                results.append(Result(what, median(ratios), "times", wanted, beside))
    return results


def single() -> list[Result]:
    """One durable append after another, beside a bare write and fdatasync of the same payload."""
    with scratch() as folder, _opened(folder) as wal:
        bare = os.open(f"{folder}/bare", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            ours, theirs = [], []
            for _ in range(_SINGLES):
                ours.append(seconds(lambda: wal.append(PAYLOAD)))
                theirs.append(seconds(lambda: (os.write(bare, PAYLOAD), os.fdatasync(bare))))
        finally:
            os.close(bare)
    results = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        mine, raw = percentile(ours, share) * 1e6, percentile(theirs, share) * 1e6
        results.append(
            Result(f"wal: one durable append, {name}", mine, "µs", "", f"bare write + fdatasync {raw:.0f} µs")
        )
    return results


# --- bulk ------------------------------------------------------------------------------------------------------


def _batch(size: int) -> pa.RecordBatch:
    count = size // _RECORD
    values = pa.array([os.urandom(_RECORD)] * count, pa.binary())
    return conform(pa.table({"value": values}), now=0)[0]


def _bulk_ours(folder: str, batch: pa.RecordBatch, count: int) -> None:
    with _opened(folder) as wal:
        waiting: deque[LsnHandle] = deque()
        for _ in range(count):
            waiting.append(wal.submit_batch(batch))
            if len(waiting) > 3:
                waiting.popleft().result()
        for handle in waiting:
            handle.result()


def _bulk_raw(folder: str, parts: list[bytes], count: int) -> None:
    file = DISK.open_append(f"{folder}/raw-{time.monotonic_ns()}")
    for _ in range(count):
        file.write(parts)
        file.sync()
    file.close()


def _bulk(size: int) -> Result:
    batch, count = _batch(size), _BULK // size
    info = FrameInfo(0, 1, batch.num_rows, 0, 0)
    parts = [bytes(part) for part in encode_frame(info, [encode_page(batch, Compression.NONE)])]
    with scratch() as folder:
        sides = [lambda: _bulk_ours(folder, batch, count), lambda: _bulk_raw(folder, parts, count)]
        ours, raw = in_turns(sides, _ROUNDS)
    ratio = median(theirs / mine for mine, theirs in zip(ours, raw, strict=True))
    beside = f"{_BULK / median(ours) / 1e6:,.0f} MB/s, raw {_BULK / median(raw) / 1e6:,.0f} MB/s"
    return Result(f"wal: bulk append in batches of {size >> 20} MiB, of raw", ratio, "", ">= 0.75", beside)


def bulk() -> list[Result]:
    """Records of 1 KiB in Arrow batches, beside writing and syncing the same bytes raw; and reading them back."""
    results = [_bulk(1 << 20), _bulk(8 << 20)]
    with scratch() as folder:
        batch = _batch(1 << 20)
        with WriteAheadLog.open(f"{folder}/log") as wal:
            for _ in range(_BULK >> 20):
                wal.submit_batch(batch)
        reader = WalReader(f"{folder}/log")
        rates = [_BULK / seconds(lambda: _drain(reader)) / 1e9 for _ in range(_ROUNDS)]
    results.append(Result("wal: reading back from the page cache", median(rates), "GB/s", ">= 1"))
    return results


def _drain(reader: WalReader) -> None:
    for _ in reader.read():
        pass


# --- length ----------------------------------------------------------------------------------------------------


def _fill(folder: str, records: int) -> None:
    batch = conform(pa.table({"value": pa.array([_VALUE] * _FRAME, pa.binary())}), now=0)[0]
    with WriteAheadLog.open(folder) as wal:
        waiting: deque[LsnHandle] = deque()
        for _ in range(records // _FRAME):
            waiting.append(wal.submit_batch(batch))
            if len(waiting) > 32:
                waiting.popleft().result()


def _costs(folder: str, records: int) -> dict[str, float]:
    """Seconds that things take on a log of this length, in the order of their names."""
    began = time.perf_counter()
    log = WalLog.open(folder)
    opened = time.perf_counter() - began
    with WriteAheadLog(log) as wal:
        read = seconds(lambda: wal.read_since(wal.current - 100))
        tail = WalReader(folder)
        elsewhere = seconds(lambda: list(tail.read(tail.start().at(records - 100))))
        trimmed = seconds(lambda: wal.prune_through(wal.oldest + _PRUNED))
    return {
        "opening": opened,
        "read_since(end - 100)": read,
        "the same, elsewhere": elsewhere,
        "prune_through": trimmed,
    }


def _dropping(folder: str) -> Result:
    """What it costs to trim a quarter of the long log, whole files of it."""
    with WriteAheadLog.open(folder) as wal:
        before = len(os.listdir(folder))
        took = seconds(lambda: wal.prune_through(wal.oldest + _LONG // 4))
        files = (before - len(os.listdir(folder))) // 2
    return Result("wal: trimming a quarter of the long log", took * 1e3, "ms", "", f"{files} files of 64 MiB dropped")


def length() -> list[Result]:
    """What opening, reading the end and trimming a little cost in a long log and in a short one."""
    with scratch() as folder:
        sizes = {"long": _LONG, "short": _SHORT}
        for name, records in sizes.items():
            _fill(f"{folder}/{name}", records)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in sizes}
        for _ in range(_ROUNDS):
            for name, records in sizes.items():
                for what, took in _costs(f"{folder}/{name}", records).items():
                    found[name].setdefault(what, []).append(took)
        results = [_dropping(f"{folder}/long")]
    for what, took in found["long"].items():
        mine, short = median(took), median(found["short"][what])
        beside = f"{mine * 1e3:.1f} ms of {_LONG:,}, {short * 1e3:.1f} ms of {_SHORT:,} records"
        # At most 1.5 times, or at most 20 ms.
        results.append(
            Result(f"wal: {what}, long to short", min(mine / short, 1.5 * mine / 0.020), "", "<= 1.5", beside)
        )
    return results


# --- rivals ----------------------------------------------------------------------------------------------------


def rivals() -> list[Result]:
    """The same durable appends by SQLite and PostgreSQL, one client and 64, beside ours."""
    with scratch() as folder:
        ways: dict[str, Callable[[], Appends]] = {
            "ours, 1 thread": lambda: _blocking(folder, threads=1),
            "ours, 64 threads": lambda: _blocking(folder),
            f"ours, 64 threads, {_OUTSTANDING} handles each": lambda: _handles(folder),
            "SQLite, 1 thread": lambda: sqlite_appends(folder, seconds=_SECONDS),
            "SQLite, 64 threads": lambda: sqlite_appends(folder, threads=CLIENTS, seconds=_SECONDS),
            "SQLite, 64 threads, grouped by hand": lambda: sqlite_grouped(folder, seconds=_SECONDS),
        }
        try:
            with postgres(folder) as server:
                ways["PostgreSQL, 1 client"] = lambda: postgres_appends(server, seconds=_SECONDS)
                ways["PostgreSQL, 64 clients"] = lambda: postgres_appends(server, clients=CLIENTS, seconds=_SECONDS)
                return _beside(ways)
        except NoServer as error:
            print(f"… without PostgreSQL: {error}")
            return _beside(ways)


def _beside(ways: dict[str, Callable[[], Appends]]) -> list[Result]:
    found: dict[str, list[Appends]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            found[name].append(way())
    results = []
    for name, runs in found.items():
        p50, p99 = median(run.p50 for run in runs) * 1e3, median(run.p99 for run in runs) * 1e3
        beside = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        results.append(
            Result(f"wal: durable appends, {name}", median(run.rate for run in runs), "records/s", "", beside)
        )
    return results


def run() -> list[Result]:
    """All of it."""
    return [*groups(), *single(), *bulk(), *length(), *rivals()]
