"""A follower in a process of its own, which may be killed or stopped at a step.

Its one argument is JSON; see :class:`Orders`. It prints the outcome: ``ok OFFSET``, or the name of the error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import strandline as sl
from strandline.errors import StrandlineError
from strandline.followers.run import Batching
from strandline.tables.files import upkeep, upkeep_rounds


@dataclass(frozen=True, slots=True)
class Orders:
    """What a follower is to do."""

    format: str
    place: str
    log: str
    mode: str = "latest"
    slot: str | None = None
    until: int | str = "end"
    records: int = 4
    step: tuple[str, str] | None = None
    """Class and method at which it dies or stops, before it is done."""
    how: str = "kill"
    after: bool = False
    """Whether the step is done first."""
    file_limit: int | None = None
    waits: bool = False
    """Whether it says that it is ready, follows once it is given a line, and says at last when it did."""
    options: dict[str, str] = field(default_factory=dict)
    is_kept: bool = False
    """Whether the table has a layout, and upkeep at every fourth version that keeps nothing old."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def sink_of(orders: Orders) -> Any:
    mode: Any = orders.mode
    layout = None
    if orders.is_kept:
        for module in (upkeep, upkeep_rounds):
            module.FEW = module.TRIM_EVERY = 4  # type: ignore[attr-defined]
        days = "day(timestamp)" if mode == "append" else ()
        layout = sl.tables.Layout(days, "key", upkeep=sl.tables.Upkeep(hours=0))
    if orders.format == "delta":
        return sl.DeltaSink(orders.place, mode=mode, options=orders.options, layout=layout)
    if orders.format == "sqlite":
        return sl.SqliteSink(orders.place, table="orders", mode=mode)
    if orders.format == "postgres":
        return sl.PostgresSink(orders.place, table="orders", mode=mode)
    from pyiceberg.catalog.sql import SqlCatalog

    place = {"uri": f"sqlite:///{orders.place}/catalog.db", "warehouse": f"file://{orders.place}/warehouse"}
    return sl.IcebergSink(SqlCatalog("c", **place), "shop.orders", mode=mode, layout=layout)


def owner_of(name: str) -> Any:
    from strandline.followers.committer import SinkCommitter
    from strandline.tables.delta.commits import DeltaCommits
    from strandline.tables.delta.files import DeltaFiles
    from strandline.tables.delta.table import FollowedDelta
    from strandline.tables.files.part import TablePart
    from strandline.tables.files.sink import FileTableSink
    from strandline.tables.iceberg.table import FollowedIceberg
    from strandline.tables.sql.postgres_transaction import PostgresTransaction
    from strandline.tables.sql.sqlite_transaction import SqliteTransaction

    files = (FollowedDelta, DeltaCommits, DeltaFiles, FollowedIceberg, TablePart, FileTableSink)
    owners = (SinkCommitter, *files, PostgresTransaction, SqliteTransaction)
    return next(owner for owner in owners if owner.__name__ == name)


def prepare(orders: Orders) -> None:
    """Let the process die or stop at its step."""
    if orders.step is None:
        return
    owner, name = owner_of(orders.step[0]), orders.step[1]
    step = getattr(owner, name)

    def end() -> None:
        print("here", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP if orders.how == "stop" else signal.SIGKILL)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        setattr(owner, name, step)
        if not orders.after:
            end()
        found = step(*arguments, **options)
        if orders.after:
            end()
        return found

    setattr(owner, name, interrupted)


def main() -> None:
    given = json.loads(sys.argv[1])
    orders = Orders(**{**given, "step": given["step"] and tuple(given["step"])})
    log = sl.open(orders.log)
    prepare(orders)
    sink = sink_of(orders)
    if orders.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (orders.file_limit, orders.file_limit))
    if orders.waits:
        print("ready", flush=True)
        sys.stdin.readline()
    began = time.monotonic()
    try:
        until: Any = orders.until
        end = sl.follow(log, sink, orders.slot, upto=until, batching=Batching(records=orders.records))
    except StrandlineError as error:
        print(type(error).__name__, flush=True)
        print(error, file=sys.stderr)
    else:
        print("ok", end.next, flush=True)
    if orders.waits:
        print(began, time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
