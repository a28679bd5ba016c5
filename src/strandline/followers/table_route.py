"""The way of a log's records into a table: the follower plans spans and commits, workers fetch and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strandline.errors import NotFound
from strandline.followers import events
from strandline.followers.committer import SinkCommitter
from strandline.followers.job_descriptions import job_description
from strandline.followers.pieces import Pieces
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.model.cursor import Cursor, Limit, Span
from strandline.storage.env import Env
from strandline.tables.apply import TableSink, apply_with
from strandline.tables.work import RangeTooLarge, Workers
from strandline.tables.written import Written

if TYPE_CHECKING:
    from strandline.tables.files.part import TablePart


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range that was stored in a table, and the reports of the workers."""

    since: Cursor
    upto: Cursor
    written: Sequence[Written]
    seconds: float


class Observer:
    """Is called for each step of a follower (``planned``, ``written``, ``committed``, ``advanced``) and each commit.

    This one does nothing.
    """

    def step(self, name: str) -> None:
        """A step has ended. An error that it raises ends the follower."""

    def stored(self, found: StoredRange) -> None:
        """A range was committed."""


@dataclass(frozen=True, slots=True)
class TableRoute:
    """Plans spans of a log; workers fetch them and write a table's files, one commit stores them."""

    log: Log
    committer: SinkCommitter
    table: TableSink
    pieces: Pieces
    workers: Workers
    env: Env
    observer: Observer
    most: int | None = None
    """Bytes in memory that the records of a commit may take; a batch is not divided."""

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
        """Commit a range; in several commits, one after the other, if it takes more memory than was estimated."""
        spans = [span for chunk in chunks for span in chunk]
        self.pieces.store(spans, since, upto, after=cursor_after, commit=self._commit, within=self._within)

    def _within(self, spans: Sequence[Span]) -> Sequence[Span]:
        return self.workers.sizes.within(spans, self.most)

    def _commit(self, spans: Sequence[Span], since: Cursor, upto: Cursor) -> None:
        self.observer.step("planned")
        began = self.env.clock.monotonic()
        done: list[Written] = []
        self.committer.check_holder()  # also before the columns of a table are changed
        try:
            self.committer.store(lambda: done.extend(self._applied(spans, since, upto)))
        except RangeTooLarge as error:
            read = [span for span in spans if error.first <= span.first < error.next]
            self.workers.sizes.learn(read, error.next - error.first, error.decoded)
            raise
        self.workers.sizes.learn(spans, sum(one.records for one in done), sum(one.decoded for one in done))
        self.observer.stored(StoredRange(since, upto, done, self.env.clock.monotonic() - began))
        self.observer.step("committed")

    def _applied(self, spans: Sequence[Span], since: Cursor, upto: Cursor) -> Sequence[Written]:
        most = self.most if len(spans) > 1 else None
        title = job_description(self.log, self.table, since.next, upto.next)

        def work(parts: Sequence[TablePart]) -> Sequence[Written]:
            found = self.workers.run(parts, spans, title, most)
            self.observer.step("written")
            self.committer.check_holder()  # a replaced follower does not commit
            return found

        while True:
            try:
                return apply_with(self.table, work, since=since, upto=upto, tasks=self.workers.tasks(spans))
            except NotFound:
                # CursorExpired if it was trimmed; if it moved to the cold tier, it is read there.
                again = self.log.plan(since, Limit(upto=upto.next))
                if not again or again[-1].next != upto.next or list(again) == list(spans):
                    raise
                spans = again
