"""Records and logs for tests of ingests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

import strandline as sl
from strandline.log.memory import MemoryLog
from strandline.log.wal.log import WalLog
from strandline.log.writers.source import source_writer
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, record_batch

KINDS = ("memory", "object", "wal", "node", "remote")


def changes(count: int, first: int = 0) -> pa.RecordBatch:
    """Records of every shape: puts, deletes and purges, nulls and empty values, headers and none."""
    numbers = range(first, first + count)
    return record_batch(
        timestamps=[1_700_000_000_000_000 + number for number in numbers],
        ops=[number % 3 for number in numbers],
        keys=[None if number % 7 == 0 else b"key %d" % (number % 50) for number in numbers],
        values=[None if number % 3 == 1 else b"" if number % 11 == 0 else b"value %d" % number for number in numbers],
        headers=[None if number % 2 else [("trace", b"%d" % number), ("trace", b"again")] for number in numbers],
    )


def append(log: Any, batch: pa.RecordBatch, *, writer: int = 7, number: int = 0) -> Any:
    """Append a batch as a writer that services are."""
    return log.append(batch, writer=WriterId(UUID(int=writer)), number=number).result()


def fill(log: Any, batches: int = 4, count: int = 25) -> None:
    """Some batches in a log."""
    for number in range(batches):
        append(log, changes(count, number * count), number=number)


def content(log: Any, since: int | None = None) -> pa.Table:
    """All records that a log holds, without their offsets, in one piece."""
    table = pa.Table.from_batches(list(log.read(since)), READ_SCHEMA)
    return table.drop_columns("offset").combine_chunks()


def position(source: Any, target: Any) -> int | None:
    """How far the target says that it holds the source."""
    last = target.last_append(source_writer(str(source.log_id)))
    return None if last is None else last.number


@contextmanager
def a_log(kind: str, folder: Path) -> Iterator[Any]:
    """An empty log of a kind."""
    if kind == "memory":
        yield MemoryLog()
    elif kind == "object":
        yield sl.open(folder, create=True)
    elif kind == "wal":
        with WalLog.open(folder) as log:
            yield log
    else:
        with sl.node.Primary.open(folder, policy="local") as primary:
            if kind == "node":
                yield primary
                return
            with sl.node.RemoteLog(primary.url) as log:
                yield log
