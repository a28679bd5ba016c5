"""Metrics of a running node, asked for when they are scraped: its condition, offsets, disk and lease."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial

from prometheus_client import Gauge

from strandline.errors import StrandlineError
from strandline.node.node import Node
from strandline.node.replicate.replica import Condition
from strandline.storage.disk import free_bytes
from strandline.storage.lease import Lease
from strandline.storage.metrics import (
    COMMITTED_OFFSET,
    CONDITION,
    DISK_FREE,
    DURABLE_OFFSET,
    LEASE_AGE,
    TERM,
    report_build,
)


def show_metrics(node: Node, lease: Lease | None) -> contextlib.ExitStack:
    """Let scrapes show the gauges of a node, labelled with its name, until the stack is closed."""
    report_build()
    name, folder = node.name, node.node_folder
    measured: dict[tuple[Gauge, *tuple[str, ...]], Callable[[], float | None]] = {
        (TERM,): lambda: folder.state.seen,
        (DURABLE_OFFSET,): lambda: None if (position := node.position) is None else position.next,
        (COMMITTED_OFFSET,): lambda: node.status().committed,
        (DISK_FREE,): lambda: free_bytes(folder.folder),
        (LEASE_AGE,): lambda: None if lease is None else lease.age(),
    }
    for condition in map(str, Condition):
        measured[CONDITION, condition] = partial(lambda condition: node.condition == condition, condition)
    shown = contextlib.ExitStack()
    for (gauge, *labels), ask in measured.items():
        gauge.labels(name, *labels).set_function(_or_unknown(ask))
        shown.callback(_remove, gauge, name, *labels)
    return shown


def _remove(gauge: Gauge, *labels: str) -> None:
    with contextlib.suppress(KeyError):  # another node of this name in this process was closed
        gauge.remove(*labels)


def _or_unknown(ask: Callable[[], float | None]) -> Callable[[], float]:
    """The number, or NaN: a scrape never fails because one number is not known."""

    def measured() -> float:
        with contextlib.suppress(StrandlineError):
            found = ask()
            return math.nan if found is None else float(found)
        return math.nan

    return measured
