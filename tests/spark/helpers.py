"""Logs, truths and damage for the Spark tests."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import strandline as sl
from strandline.log.object import ObjectLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, Op, record_batch
from strandline.model.sink import remaining
from strandline.model.stamp import OpId
from strandline.spark import local_session

R = TypeVar("R")
Change = tuple[bytes | None, bytes | None] | tuple[bytes | None, bytes | None, Op]
NOW = 1_750_000_000_000_000
_STARTS = 5
_WORKERS = Path(__file__).with_name("workers")
_PATIENCE = 600
"""Seconds for what takes one on a quiet machine. It guards against hanging, and says nothing about speed."""


@functools.cache
def fork_server() -> tuple[str, subprocess.Popen[str]]:
    """A server that forks the processes of streaming sources, and its address. It ends with this process."""
    address = f"{tempfile.mkdtemp(prefix='strandline-fork-server-')}/socket"
    atexit.register(shutil.rmtree, os.path.dirname(address), ignore_errors=True)
    command = [sys.executable, str(_WORKERS / "source_forkserver.py"), address]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # as Spark has it
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return address, server


@contextmanager
def quick_processes() -> Iterator[None]:
    """The environment of sessions whose Python processes start quickly."""
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(_WORKERS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        patch.setenv("PYTHONPATH", path)
        patch.setenv("STRANDLINE_TESTS_FORK_SERVER", fork_server()[0])
        yield


def quick_session(name: str, *, cores: int = 2, memory: str = "2g") -> SparkSession:
    """A session for tests, whose Python processes start quickly."""
    quick = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    conf = {
        "spark.sql.streaming.checkpointFileManagerClass": quick,
        "spark.python.authenticate.socketTimeout": f"{_PATIENCE}s",
    }
    with quick_processes():
        return local_session(name, cores=cores, memory=memory, short_lived=True, **{"spark.log.level": "OFF", **conf})


def put(key: bytes | None, value: bytes | None) -> Change:
    return key, value, Op.PUT


def delete(key: bytes | None) -> Change:
    return key, None, Op.DELETE


def new_log(folder: Path, name: str = "log") -> ObjectLog:
    return sl.open(f"{folder}/{name}", create=True)


def append(log: ObjectLog, changes: Sequence[Change], headers: Sequence[object] | None = None) -> None:
    """The changes as exactly one batch of the log."""
    batch = record_batch(
        timestamps=[NOW + index for index in range(len(changes))],
        ops=[change[2] if len(change) > 2 else Op.PUT for change in changes],
        keys=[change[0] for change in changes],
        values=[change[1] for change in changes],
        headers=headers,
    )
    log.append(batch, writer=WriterId(uuid4()), number=0).result(timeout=120)


def numbered(first: int, count: int, keys: int = 7) -> list[Change]:
    """Puts over a few keys, with a delete here and there; each value tells its place."""
    return [
        delete(b"k%d" % (n % keys)) if n % 11 == 10 else put(b"k%d" % (n % keys), b"v%d" % n)
        for n in range(first, first + count)
    ]


def all_records(log: ObjectLog) -> pa.Table:
    return pa.Table.from_batches(log.read(), READ_SCHEMA)


def truth(changes: Iterable[Change]) -> dict[bytes, tuple[int, bytes | None]]:
    """What a table of the latest values must hold, by the plainest means: key to offset and value."""
    state: dict[bytes, tuple[int, bytes | None]] = {}
    for offset, (key, value, *rest) in enumerate(changes):
        if rest and rest[0] is not Op.PUT:
            state.pop(key, None)
        else:
            state[key] = (offset, value)
    return state


def latest_rows(table: str | Path) -> dict[bytes, tuple[int, bytes | None]]:
    rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    found = {row["key"]: (row["offset"], row["value"]) for row in rows}
    assert len(found) == len(rows), "a key has two rows"
    return found


def appended_rows(table: str | Path) -> list[tuple[int, int, bytes | None, bytes | None]]:
    rows = DeltaTable(str(table)).to_pyarrow_table().sort_by("offset").to_pylist()
    return [(row["offset"], row["op"], row["key"], row["value"]) for row in rows]


def expected_rows(changes: Iterable[Change]) -> list[tuple[int, int, bytes | None, bytes | None]]:
    return [(n, int(rest[0]) if rest else 0, key, value) for n, (key, value, *rest) in enumerate(changes)]


def move_floor(log: ObjectLog, floor: int) -> None:
    """Retain nothing below an offset, as trimming would."""
    log._lister.cell.update(OpId(uuid4()), lambda head: replace(head, floor=floor))


def batch_files(log: ObjectLog) -> list[Path]:
    """The objects of the log's batches, in the order of the log."""
    root = Path(log.url.removeprefix("file://"))
    return [root / entry.location for entry in log.head().tail]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".~"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


class RowsSink:
    """A sink in this process's memory, by the book."""

    mode = "append"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.at: Cursor | None = None

    def cursor(self, log_id: UUID) -> Cursor | None:
        return self.at

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        todo = remaining(records, since=since, upto=upto, at=self.at)
        if todo is not None:
            self.rows += todo.to_pylist()
            self.at = upto

    def found(self) -> list[tuple[int, bytes | None]]:
        return [(row["offset"], row["value"]) for row in self.rows]


def until_its_source_starts(run: Callable[[], R]) -> R:
    """What a run of a query returns or raises, tried again if Spark gave up on the Python process of its source.

    Spark gives that process ten seconds to start, which a busy machine may exceed; no micro-batch has begun then.
    """
    for _ in range(_STARTS - 1):
        try:
            return run()
        except Exception as error:
            if "Python worker failed to connect back" not in str(error):
                raise
    return run()
