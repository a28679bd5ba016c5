"""The way of a log's records into a table: the follower plans spans and commits, workers fetch and write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from strandline.errors import JobFailed, NotFound
from strandline.followers import events
from strandline.followers.committer import SinkCommitter
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.model.cursor import Cursor, Limit, Span
from strandline.storage.env import Env
from strandline.tables.apply import TableSink, apply_with
from strandline.tables.work import RangeTooLarge, Workers
from strandline.tables.written import Written

if TYPE_CHECKING:
    from strandline.tables.files.part import TablePart

_LOGGER: Final = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Pieces:
    """Divides the ranges of one follower. Each commit has its cursor, so that none is applied twice."""

    log: Log
    _count: int = 1
    """Into how many commits a range is divided."""

    def store(
        self,
        items: Sequence[T],
        since: Cursor,
        upto: Cursor,
        *,
        after: Callable[[Cursor, T], Cursor],
        commit: Callable[[Sequence[T], Cursor, Cursor], None],
        within: Callable[[Sequence[T]], Sequence[T]] = lambda items: items,
    ) -> None:
        """Commit a range of batches, in order: as many at once as ``within`` says, and as fit into memory.

        ``after`` gives the cursor after a batch. One batch is not divided: its ``MemoryError`` is raised.
        """
        rest, fewer = items, len(items)
        while rest:
            some = within(rest[: max(1, min(fewer, len(items) // self._count))])
            rest = rest[len(some) :]
            end = after(since, some[-1]) if rest else upto
            try:
                commit(some, since, end)
            except RangeTooLarge:
                rest, fewer = [*some, *rest], len(some) - 1  # what it takes is known now
            except MemoryError as error:
                if len(some) == 1:
                    error.add_note(
                        f"Offsets {since.next} to {end.next - 1} of {self.log!r} are one batch, which is not divided: "
                        "give the follower, or Spark's workers, more memory."
                    )
                    raise
                self._count *= 2
                _LOGGER.warning(
                    "Offsets %d to %d did not fit into memory, and are tried again in smaller pieces.",
                    since.next, end.next - 1,
                )  # fmt: skip
                rest = [*some, *rest]
            except JobFailed:
                # A worker that took too much memory may have been killed: the next try takes less at once.
                self._count = min(2 * self._count, len(items))
                raise
            else:
                since, fewer = end, len(items)
        self._count = max(1, self._count // 2)


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range that was stored in a table, and the reports of the workers."""

    since: Cursor
    upto: Cursor
    written: Sequence[Written]
    seconds: float
    upkeep_failures: int = 0
    """Rounds of the table's upkeep that have failed so far."""


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
        seconds = self.env.clock.monotonic() - began
        self.observer.stored(StoredRange(since, upto, done, seconds, upkeep_failures(self.table)))
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


def upkeep_failures(table: object) -> int:
    """How many rounds of a table's upkeep have failed since its sink was made."""
    done = getattr(table, "upkeep", None)  # tables of a database have none
    return 0 if done is None else int(done.failures)


def job_description(log: object, table: object, since: int, upto: int) -> str:
    """One job of a follower: the names of log and table, and the range. Never an address or an option.

    >>> from types import SimpleNamespace as Named
    >>> job_description(
    ...     Named(url="s3://bucket/orders"), Named(url="s3://bucket/tables/orders", mode="latest"), 0, 1_900_000
    ... )
    'orders → latest, offsets 0–1,900,000'
    >>> job_description(Named(url="wal:///disk/orders/"), Named(table="shop.versions", mode="history"), 5, 9)
    'orders → shop.versions (history), offsets 5–9'
    """  # noqa: RUF002 - a range
    return f"{pipeline_name(log, table)}, offsets {since:,}–{upto:,}"  # noqa: RUF001 - a range


def pipeline_name(log: object, table: object) -> str:
    """The names of log and table: the last part of each address, and the kind of table."""
    source, target = _name(log), _name(table)
    kind = str(getattr(table, "mode", "") or type(table).__name__)
    place = kind if target in ("", source) else f"{target} ({kind})"
    return f"{source or 'log'} → {place}"


def _name(thing: object) -> str:
    address = getattr(thing, "url", None) or getattr(thing, "table", None)
    return address.rstrip("/").rpartition("/")[2] if isinstance(address, str) else ""
