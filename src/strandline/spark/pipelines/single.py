"""A pipeline into one sink: its follower, and its progress."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from strandline.errors import StrandlineError
from strandline.followers.committer import SinkCommitter
from strandline.followers.run import Follower, PushedLog
from strandline.log.contract import LogReading
from strandline.log.lag import LogLag, lag_of
from strandline.model.cursor import Cursor
from strandline.spark.pipelines.progress import PipelineProgress, ProgressCounter
from strandline.spark.pipelines.workers import SparkWorkers
from strandline.tier.read.tiered_log import TieredLog


@dataclass(slots=True)
class SinglePipeline:
    """Follows a log into one sink."""

    follower: Follower
    committer: SinkCommitter
    workers: SparkWorkers
    counter: ProgressCounter

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set, or up to the end."""
        with self.committer.abandoned_on_error():
            self.follower.run(self.committer.start, stop)
            if stop.is_set():
                self.committer.abandon()  # if nothing was stored, leave nothing behind
            else:
                self.committer.settle()
            self._measure_lag()  # as long as the log is open

    def cursor(self) -> Cursor | None:
        """The sink's stored cursor."""
        return self.committer.cursor(self.follower.log.log_id)

    def progress(self, *, has_ended: bool) -> PipelineProgress:
        """The progress, with the lag now."""
        if not has_ended or self.counter.lag is None:
            self._measure_lag()
        return self.counter.progress(self.cursor(), self.workers.ran_jobs)

    def cancel(self) -> None:
        """Cancel a running job."""
        self.workers.cancel()

    def _measure_lag(self) -> None:
        log = self.follower.log
        if isinstance(log, PushedLog):
            return
        with contextlib.suppress(StrandlineError):  # closed by now, or not to be reached: what it was before
            cursor = self.cursor() or self.committer.start
            self.counter.measured(lag_behind(log, cursor.next, self.follower.env.clock.now()))


def lag_behind(log: LogReading, position: int, now: int) -> LogLag:
    """The lag of an offset behind the end of a log, whose hot tier alone has bytes and times."""
    return lag_of(log.hot if isinstance(log, TieredLog) else log, position, now)
