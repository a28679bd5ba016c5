"""Progress of a pipeline: counts, rate and lag, for operators, Prometheus and notebooks."""

from __future__ import annotations

import html
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from strandline.followers.engine import Engine
from strandline.followers.table_route import Observer, StoredRange
from strandline.log.lag import LogLag
from strandline.model.cursor import Cursor
from strandline.spark.trigger import Trigger
from strandline.storage import metrics
from strandline.storage.env import Env

OnStep: TypeAlias = Callable[[str], None]
"""Called in the driver after each step of a trigger: ``planned``, ``written``, ``committed``, ``advanced``."""

BUSY_SHARE: Final = 0.5
"""Share of time that a pipeline spends on commits, unless it lags: a table that is expensive to rewrite is committed to
less often."""
_WINDOW: Final = 60.0
"""Seconds over which the rate is measured."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """Progress of a pipeline since it was started. None means unknown: an unknown value is never shown as 0."""

    cursor: Cursor | None = None
    """The sink's stored cursor."""
    commits: int = 0
    records: int = 0
    files: int = 0
    """Data files written."""
    bytes: int = 0
    """Their bytes."""
    bad_records: int = 0
    """Records that went to the dead-letter table."""
    jobs: int = 0
    """Commits whose files were written by executors."""
    seconds: float = 0.0
    """Duration of the last commit, from its plan to its end."""
    lag: int | None = None
    """Records of the log that the sink does not have yet."""
    lag_bytes: int | None = None
    """Their stored bytes; None for a node's log, and for what only the cold tier has."""
    lag_seconds: float | None = None
    """Age of the oldest of them, by the time at which it was listed."""
    rate: float | None = None
    """Records per second, over the last minute; None before the first commit."""
    last_commit: datetime | None = None
    """When the last commit ended, by the driver's clock."""
    upkeep_failures: int = 0
    """Rounds of the table's upkeep that failed, and are tried again; the pipeline goes on."""

    def line(self) -> str:
        """One line for operators.

        >>> PipelineProgress(None, 2, 1500, 2, 10, 1, 0, 0.5, 300, 4096, 1.5, 750.0).line()
        '1,500 records in 2 commits, 750 records/s, 300 records (4.1 kB, 1.5 s) behind, 1 bad'
        """
        words = [f"{self.records:,} records in {self.commits:,} commits"]
        if self.rate is not None:
            words.append(f"{self.rate:,.0f} records/s")
        words.append(_behind(self))
        return ", ".join([*words, *([f"{self.bad_records:,} bad"] if self.bad_records else [])])

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        rows = [(one.name.replace("_", " "), getattr(self, one.name)) for one in fields(self)]
        cells = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(_shown(value))}</td></tr>" for name, value in rows]
        return f"<table>{''.join(cells)}</table>"


def _behind(found: PipelineProgress) -> str:
    if found.lag is None:
        return "lag unknown"
    known = [
        *([] if found.lag_bytes is None else [_bytes(found.lag_bytes)]),
        *([] if found.lag_seconds is None else [f"{found.lag_seconds:,.1f} s"]),
    ]
    return f"{found.lag:,} records ({', '.join(known)}) behind" if known else f"{found.lag:,} records behind"


def _bytes(size: float) -> str:
    thousand = 1000
    for unit in ("B", "kB", "MB", "GB"):
        if size < thousand:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= thousand
    return f"{size:,.1f} TB"


def _shown(value: object) -> str:
    match value:
        case None:
            return "unknown"
        case Cursor():
            return f"{value.next:,}"
        case datetime():
            return f"{value:%Y-%m-%d %H:%M:%S} UTC"
        case float():
            return f"{value:,.1f}"
        case int():
            return f"{value:,}"
    return str(value)


@dataclass(slots=True, eq=False)
class ProgressCounter(Observer):
    """Counts what a pipeline has committed, paces it, and reports to Prometheus."""

    engine: Engine
    timing: Trigger
    on_step: OnStep
    env: Env
    labels: tuple[str, str] = ("", "")
    """Log and table, in Prometheus."""
    done: PipelineProgress = field(default_factory=PipelineProgress)
    """What was committed: only the pipeline's thread changes it, and any thread the lag."""
    lag: LogLag | None = None
    _recent: deque[tuple[float, float, int]] = field(default_factory=deque)

    def step(self, name: str) -> None:
        """A step of a trigger has ended."""
        self.on_step(name)

    def stored(self, found: StoredRange) -> None:
        """A range was committed."""
        bad, records = sum(one.bad_records for one in found.written), found.upto.next - found.since.next
        now = self.env.clock.monotonic()
        was = self.done
        self.done = replace(
            was,
            commits=was.commits + 1,
            records=was.records + records,
            files=was.files + sum(len(one.added) for one in found.written),
            bytes=was.bytes + sum(file.size for one in found.written for file in one.added),
            bad_records=was.bad_records + bad,
            seconds=found.seconds,
            last_commit=_EPOCH + timedelta(microseconds=self.env.clock.now()),
            upkeep_failures=found.upkeep_failures,
        )
        self._recent.append((now - found.seconds, now, records))
        while self._recent and self._recent[0][1] < now - _WINDOW:
            self._recent.popleft()
        failures = found.upkeep_failures - was.upkeep_failures
        metrics.count_commit(
            self.labels, records=records, bad_records=bad, seconds=found.seconds, upkeep_failures=failures
        )
        if not self.timing.is_bounded:
            window = max(self.timing.pace, found.seconds * (1 / BUSY_SHARE - 1))
            self.engine.batching = replace(self.engine.batching, window=window)

    def rate(self) -> float | None:
        """Records per second, over the commits of the last minute; 0 if there were none."""
        if not self.done.commits:
            return None
        now = self.env.clock.monotonic()
        recent = [one for one in list(self._recent) if one[1] >= now - _WINDOW]
        if not recent:
            return 0.0
        return sum(records for *_, records in recent) / max(1e-6, now - recent[0][0])

    def measured(self, lag: LogLag) -> None:
        """The lag was looked up."""
        self.lag = lag
        for gauge, value in (
            (metrics.PIPELINE_LAG_RECORDS, lag.records),
            (metrics.PIPELINE_LAG_BYTES, lag.bytes),
            (metrics.PIPELINE_LAG_SECONDS, lag.seconds),
        ):
            gauge.labels(*self.labels).set(math.nan if value is None else value)

    def progress(self, cursor: Cursor | None, jobs: int) -> PipelineProgress:
        """The progress as a value."""
        found, lag = replace(self.done, cursor=cursor, jobs=jobs, rate=self.rate()), self.lag
        return found if lag is None else replace(found, lag=lag.records, lag_bytes=lag.bytes, lag_seconds=lag.seconds)
