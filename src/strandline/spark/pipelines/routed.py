"""A pipeline into many tables: executors write large ranges of all of them in one job, the driver small ones."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace

from strandline.errors import StrandlineError
from strandline.followers.routes.follower import RouteFollower
from strandline.followers.routes.jobs import RouteJobs
from strandline.followers.routes.progress import RouteOptions, RouteProgress
from strandline.log.contract import Log
from strandline.model.cursor import Cursor
from strandline.spark.pipelines.progress import OnStep
from strandline.spark.pipelines.single import lag_behind
from strandline.spark.pipelines.workers import SparkWorkers
from strandline.storage.env import SYSTEM
from strandline.tables.routes.route import Route


@dataclass(slots=True)
class RoutedPipeline:
    """Follows a log into the tables of a route."""

    follower: RouteFollower
    workers: SparkWorkers
    _lag: int | None = None

    @classmethod
    def opened(
        cls, log: Log, route: Route, options: RouteOptions, workers: SparkWorkers, on_step: OnStep, name: str
    ) -> RoutedPipeline:
        """Start the follower of each table, and claim the slot; errors are those of a start."""
        jobs = RouteJobs(workers, route.splits, SYSTEM, name)
        follower = RouteFollower(log, route, options, SYSTEM, workers=workers, jobs=jobs, on_step=on_step)
        follower.open()
        return cls(follower, workers)

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set, or up to the end."""
        try:
            self.follower.run(stop)
        finally:
            self._measure_lag()

    def cursor(self) -> Cursor | None:
        """The cursor of the slowest table."""
        return self.follower.cursor()

    def progress(self, *, has_ended: bool) -> RouteProgress:
        """The progress, with the lag of the slowest table now."""
        if not has_ended or self._lag is None:
            self._measure_lag()
        return replace(self.follower.progress(), lag=self._lag)

    def cancel(self) -> None:
        """Cancel a running job."""
        self.workers.cancel()

    def _measure_lag(self) -> None:
        with contextlib.suppress(StrandlineError):  # closed by now, or not to be reached: what it was before
            self._lag = lag_behind(self.follower.log, self.follower.cursor().next, SYSTEM.clock.now()).records
