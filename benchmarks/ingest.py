"""Ingest of an object log into a write-ahead log, beside a plain copy of the same bytes."""

from __future__ import annotations

import os
import time
from statistics import median
from uuid import UUID

import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, in_turns, scratch
from strandline.log.object.log import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Limit
from strandline.model.head import WriterId
from strandline.storage.disk import DISK

_ROUNDS = 5
_TOTAL = 256 << 20
_RECORD = 1 << 10
_SYNC = 32 << 20
"""The plain copy syncs as often as the ingest does."""


def _fill(folder: str, size: int, compression: str) -> ObjectLog:
    log: ObjectLog = sl.open(folder, create=True)
    count = size // _RECORD
    for number in range(_TOTAL // size):
        values = pa.array([os.urandom(_RECORD) for _ in range(count)], pa.binary())
        keys = pa.array([b"key %d" % (row % 1000) for row in range(count)], pa.binary())
        batch = pa.table({"key": keys, "value": values})
        log.append(batch, writer=WriterId(UUID(int=7)), number=number, compression=compression).result()
    return log


def _copy(log: ObjectLog, folder: str) -> None:
    """Read every batch object, and write its bytes to one file that is synced."""
    file = DISK.open_append(f"{folder}/raw-{time.monotonic_ns()}")
    unsynced = 0
    for span in log.plan(log.start(), Limit()):
        data = log.store.get(span.entry.location).data
        file.write([data])
        unsynced += len(data)
        if unsynced >= _SYNC:
            file.sync()
            unsynced = 0
    file.sync()
    file.close()


def _ingest(log: ObjectLog, folder: str) -> None:
    with WalLog.open(f"{folder}/wal-{time.monotonic_ns()}") as target:
        done = sl.ingest(log, target)
    if done.records != log.bounds().count:
        raise AssertionError(f"{done.records} of {log.bounds().count} records were ingested")


def _beside(size: int, compression: str, goal: str) -> Result:
    with scratch() as folder:
        log = _fill(f"{folder}/source", size, compression)
        ours, plain = in_turns([lambda: _ingest(log, folder), lambda: _copy(log, folder)], _ROUNDS)
    ratio = median(theirs / mine for mine, theirs in zip(ours, plain, strict=True))
    beside = f"{_TOTAL / median(ours) / 1e6:,.0f} MB/s, plain copy {_TOTAL / median(plain) / 1e6:,.0f} MB/s"
    name = f"ingest: object log ({compression}, batches of {size >> 10:,} KiB) into a WAL, of a plain copy"
    return Result(name, ratio, "", goal, beside)


def run() -> list[Result]:
    """Records of 1 KiB, from a local object log into a new write-ahead log, durably."""
    return [_beside(8 << 20, "none", ">= 0.5"), _beside(1 << 20, "none", ">= 0.5"), _beside(8 << 20, "lz4", "")]
