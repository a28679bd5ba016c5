"""The way of a log's records into a table: the follower plans spans and commits, workers fetch and write."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from strandline.errors import JobFailed, NotFound
from strandline.followers import events
from strandline.followers.committer import SinkCommitter
from strandline.followers.job_descriptions import job_description
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.sink import Part, TableSink, Written
from strandline.storage.clock import Clock
from strandline.tables.apply import apply_with
from strandline.tables.work import Workers

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range that was stored in a table, and the reports of the workers."""

    since: Cursor
    upto: Cursor
    written: Sequence[Written]
    seconds: float


class Observer(Protocol):
    """Is called for each step of a follower (``planned``, ``written``, ``committed``, ``advanced``) and each commit."""

    def step(self, name: str) -> None:
        """A step has ended. An error that it raises ends the follower."""

    def stored(self, found: StoredRange) -> None:
        """A range was committed."""


class NoObserver:
    """Observes nothing."""

    def step(self, name: str) -> None:
        """Ignored."""

    def stored(self, found: StoredRange) -> None:
        """Ignored."""


@dataclass(slots=True)
class _Pieces:
    """Into how many commits a range is divided."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class TableRoute:
    """Plans spans of a log; workers fetch them and write a table's files, one commit stores them."""

    log: Log
    committer: SinkCommitter
    table: TableSink
    workers: Workers
    clock: Clock
    observer: Observer

    _pieces: _Pieces = field(default_factory=_Pieces)

    def receive(self, since: Cursor, limit: Limit) -> events.Received | None:
        """The next spans: ``limit.bytes`` bounds what their records take in memory, as far as that is known."""
        planned = self.log.plan(since, limit)
        if not planned:
            return None
        spans = self.workers.sizes.within(planned, limit.bytes)
        upto = cursor_after(since, spans[-1])
        size = self.workers.sizes.total(spans)
        begins = since.at(spans[0].first)
        return events.Received(spans, upto.next - since.next, upto, since=begins, size=size, batches=len(spans))

    def store(self, chunks: Sequence[events.SourceDelivery], since: Cursor, upto: Cursor) -> None:
        """Commit a range; in several commits, one after the other, if workers had too little memory for one."""
        spans = rest = [span for chunk in chunks for span in chunk]
        while rest:
            count = max(1, len(spans) // self._pieces.count)
            some, rest = rest[:count], rest[count:]
            end = cursor_after(since, some[-1]) if rest else upto
            try:
                self._commit(some, since, end)
            except MemoryError as error:
                if len(some) == 1:
                    error.add_note(
                        f"Offsets {since.next} to {end.next - 1} of {self.log!r} are one batch, which is not divided: "
                        "give the follower, or Spark's workers, more memory."
                    )
                    raise
                self._pieces.count *= 2
                _LOGGER.warning(
                    "Offsets %d to %d did not fit into memory, and are tried again in smaller pieces.",
                    since.next, end.next - 1,
                )  # fmt: skip
                rest = some + rest
            except JobFailed:
                # A worker that took too much memory may have been killed: the next try takes less at once.
                self._pieces.count = min(2 * self._pieces.count, len(spans))
                raise
            else:
                since = end
        self._pieces.count = max(1, self._pieces.count // 2)

    def _commit(self, spans: Sequence[Span], since: Cursor, upto: Cursor) -> None:
        self.observer.step("planned")
        began = self.clock.monotonic()
        done: list[Written] = []
        self.committer.check_holder()  # also before the columns of a table are changed
        self.committer.store(lambda: done.extend(self._applied(spans, since, upto)))
        self.workers.sizes.learn(spans, sum(one.records for one in done), sum(one.decoded for one in done))
        self.observer.stored(StoredRange(since, upto, done, self.clock.monotonic() - began))
        self.observer.step("committed")

    def _applied(self, spans: Sequence[Span], since: Cursor, upto: Cursor) -> Sequence[Written]:
        while True:
            try:
                return apply_with(
                    self.table,
                    lambda parts: self._worked(parts, spans, since, upto),  # noqa: B023 - called before the next round
                    since=since,
                    upto=upto,
                    tasks=self.workers.tasks(spans),
                )
            except NotFound:
                # CursorExpired if it was trimmed; if it moved to the cold tier, it is read there.
                again = self.log.plan(since, Limit(upto=upto.next))
                if not again or again[-1].next != upto.next or list(again) == list(spans):
                    raise
                spans = again

    def _worked(self, parts: Sequence[Part], spans: Sequence[Span], since: Cursor, upto: Cursor) -> Sequence[Written]:
        found = self.workers.run(parts, spans, job_description(self.log, self.table, since.next, upto.next))
        self.observer.step("written")
        self.committer.check_holder()  # a replaced follower does not commit
        return found
