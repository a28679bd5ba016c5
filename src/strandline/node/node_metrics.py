"""Metrics of a running node, asked for when they are scraped: its condition, offsets, disk and lease."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from prometheus_client import Gauge

from strandline.errors import StrandlineError
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

if TYPE_CHECKING:
    from strandline.node.running import RunningNode


@final
class NodeMetrics:
    """Gauges of one node, labelled with its name, until :meth:`end`."""

    def __init__(self, running: RunningNode, lease: Lease | None) -> None:
        self._name = running.name
        report_build()
        for condition in map(str, Condition):
            CONDITION.labels(self._name, condition).set_function(_or_unknown(_is_in(running, condition)))
        folder = running.node.node_folder
        measured: dict[Gauge, Callable[[], float | None]] = {
            TERM: lambda: folder.state.seen,
            DURABLE_OFFSET: lambda: None if (position := running.node.position) is None else position.next,
            COMMITTED_OFFSET: lambda: running.node.status().committed,
            DISK_FREE: lambda: free_bytes(folder.folder),
            LEASE_AGE: lambda: None if lease is None else lease.age(),
        }
        for gauge, ask in measured.items():
            gauge.labels(self._name).set_function(_or_unknown(ask))

    def end(self) -> None:
        """Remove them. Idempotent."""
        with contextlib.suppress(KeyError):
            for condition in map(str, Condition):
                CONDITION.remove(self._name, condition)
            for gauge in (TERM, DURABLE_OFFSET, COMMITTED_OFFSET, DISK_FREE, LEASE_AGE):
                gauge.remove(self._name)


def _is_in(running: RunningNode, condition: str) -> Callable[[], float]:
    return lambda: float(running.condition == condition)


def _or_unknown(ask: Callable[[], float | None]) -> Callable[[], float]:
    """The number, or NaN: a scrape never fails because one number is not known."""

    def measured() -> float:
        with contextlib.suppress(StrandlineError):
            found = ask()
            return math.nan if found is None else float(found)
        return math.nan

    return measured
