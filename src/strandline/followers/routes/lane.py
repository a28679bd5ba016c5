"""A lane: tables of a route that read together from one position, once for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pyarrow as pa

from strandline.errors import JobFailed
from strandline.followers.events import Batching
from strandline.followers.record_route import fetched
from strandline.followers.routes.jobs import RouteJobs
from strandline.followers.routes.member import RoutedTable
from strandline.followers.routes.pacing import SLOW_SECONDS, due
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.records import READ_SCHEMA
from strandline.storage.env import Env
from strandline.tables.routes.route import UNROUTED, Splits
from strandline.tables.routes.work import described
from strandline.tables.work import RangeTooLarge, Workers

_LOGGER: Final = logging.getLogger(__name__)
COMMITS: Final = 8
"""Tables that are committed to side by side, besides the slow ones that have left."""
PACE: Final = 1.0
"""Seconds between two commits of a table with records, if the batching has no window."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What all lanes of a route share."""

    log: Log
    splits: Splits
    workers: Workers
    batching: Batching
    env: Env
    commits: Executor
    """Commits run there: it has a thread for each, since slow ones keep theirs."""
    check_holder: Callable[[], object]
    """``Fenced`` if another follower of the route has taken over its slot."""
    on_step: Callable[[str], object]
    jobs: RouteJobs | None = None
    """Writes large ranges elsewhere; None: all is written here."""


class Found:
    """Is told what a lane finds among the records. This one does nothing: the foremost lane has told it before."""

    def names(self, names: Iterable[str], since: Cursor) -> None:
        """Tables that have records from a cursor on; those that are new to a rule are added to the lane."""

    def rest(self, records: int, example: str) -> None:
        """Records that no table takes. An error that it raises ends the route: nothing of the range is committed."""


@dataclass(slots=True, eq=False)
class Lane:
    """Reads once for all its tables; each has its own commits. A table that fails, or is slow, leaves it."""

    reading: Reading
    members: dict[str, RoutedTable]
    position: Cursor
    """Records below were given to the tables."""
    left: list[RoutedTable] = field(default_factory=list)
    """Tables that left, until the route takes them back."""
    _aligned_at: float = 0.0
    _divided: int = 1
    """Into how many pieces a range is divided, since the last one did not fit."""

    def __post_init__(self) -> None:
        self._aligned_at = self.reading.env.clock.monotonic()

    def step(self, upto: int | None, found: Found) -> bool:
        """Read the next range and commit what is due; False if there was nothing to read.

        If ``found`` refuses what is among the records, nothing of the range is committed.
        """
        reading = self.reading
        batching = reading.batching
        most = max(1, batching.bytes // self._divided)
        limit = Limit(batching.records, most, batching.batches, upto)
        planned = reading.log.plan(self.position, limit)
        if not planned:
            return False
        if reading.jobs is not None and reading.jobs.can_take(self.members):
            spans = reading.workers.sizes.within(planned, most)
            if not reading.workers.works_here(spans):
                self._run_job(reading.jobs, spans, most, found)
                return True
        chunk = fetched(reading.log, self.position, planned, limit, reading.workers.sizes)
        batches = [batch for _, part in chunk for batch in part]
        records, end = pa.Table.from_batches(batches, READ_SCHEMA), chunk[-1][0]
        splitter = reading.splits.now
        divided = splitter.divide(records)
        found.names(divided.taken, self.position)
        if reading.splits.now is not splitter:  # a rule has all its tables now
            divided = reading.splits.now.divide(records)
        taken = dict(divided.taken)
        if not divided.is_taken.all():
            taken[UNROUTED] = rest = records.filter(pa.array(~divided.is_taken))
            found.rest(rest.num_rows, described(rest))
        for name, own in taken.items():
            if name in self.members:
                self.members[name].take(own)
        self.position = end
        reading.on_step("planned")
        self.commit_due(ends=upto is not None and end.next >= upto)
        return True

    def commit_due(self, *, ends: bool = False) -> bool:
        """Commit what is due, several tables side by side; whether there was something. ``ends``: all of it is."""
        reading, now = self.reading, self.reading.env.clock.monotonic()
        tables = [member.waiting(self.position) for member in self.members.values()]
        pace = PACE if reading.batching.window is None else reading.batching.window
        found = due(tables, now, pace=pace, most=reading.batching.bytes, aligned_at=self._aligned_at, ends=ends)
        if found.is_aligned:
            self._aligned_at = now
        if not found.names:
            return False
        reading.check_holder()
        self._store({name: partial(self.members[name].store, self.position) for name in found.names})
        return True

    def _store(self, commits: Mapping[str, Callable[[], object]]) -> None:
        """Run commits side by side. A table whose commit fails, or takes longer than all others, leaves the lane."""
        ready, running = list(commits.items()), dict[Future[Any], RoutedTable]()
        while ready or running:
            while ready and len(running) < COMMITS:
                name, commit = ready.pop()
                member = self.members[name]
                member.commit = self.reading.commits.submit(commit)
                running[member.commit] = member
            done = wait(running, SLOW_SECONDS, FIRST_COMPLETED).done
            for future in done or list(running):
                member = running.pop(future)
                if not future.done():
                    member.state = "catching up"
                    self._leave(member)
                    continue
                member.commit = None
                error = future.exception()
                if isinstance(error, Exception):  # of the library of a table, or of a sink that somebody else wrote
                    member.failed(error)
                    self._leave(member)
                elif error is not None:
                    raise error
        self.reading.on_step("committed")

    def _leave(self, member: RoutedTable) -> None:
        self.left.append(self.members.pop(member.name))

    def _run_job(self, jobs: RouteJobs, spans: Sequence[Span], most: int, found: Found) -> None:
        """Write a large range elsewhere, and commit each table's files."""
        self.commit_due(ends=True)
        upto = cursor_after(self.position, spans[-1])
        self.reading.on_step("planned")
        splitter = self.reading.splits.now
        try:
            job = jobs.run(self.members, spans, self.position, upto, most if len(spans) > 1 else None)
        except RangeTooLarge as error:
            read = [span for span in spans if error.first <= span.first < error.next]
            self.reading.workers.sizes.learn(read, error.next - error.first, error.decoded)
            return
        except JobFailed:
            self._divided = min(2 * self._divided, len(spans))  # a worker without memory may have been killed
            raise
        except MemoryError:
            self._divided *= 2
            if len(spans) == 1:
                raise
            _LOGGER.warning("Offsets %d to %d are tried again in smaller pieces.", self.position.next, upto.next - 1)
            return
        self._divided = max(1, self._divided // 2)
        known = len(self.members)
        found.names(job.names, self.position)
        if len(self.members) > known or self.reading.splits.now is not splitter:
            job.abandon()  # it is run again, with the new tables
            return
        if job.rest:
            found.rest(job.rest, job.example)
        self.reading.on_step("written")
        for member, reason in job.failed:
            member.failed(reason)
            self._leave(member)
        self.reading.check_holder()
        self.position = upto
        self._store({name: commit for name, commit in job.commits.items() if name in self.members})
