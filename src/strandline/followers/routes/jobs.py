"""Large ranges of a route: workers write the files of all tables in one job, and each table commits its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from strandline.errors import Conflict, StrandlineError
from strandline.followers.routes.member import RoutedTable
from strandline.log.read.planning import divided
from strandline.model.cursor import Cursor, Span
from strandline.storage.env import Env
from strandline.tables.files.transaction import FileTransaction
from strandline.tables.routes.route import Splits
from strandline.tables.routes.work import RoutedReport, RoutedTask, divided_parts
from strandline.tables.work import Workers
from strandline.tables.written import Written

LARGE_SHARE: Final = 4
"""A table that took more than this part of the last range, divided by the workers, has its keys divided among them."""
_LOGGER: Final = logging.getLogger(__name__)


class RouteWorkers(Workers, Protocol):
    """Workers that write several tables in one job."""

    def run_routed(self, tasks: Sequence[RoutedTask], title: str) -> Sequence[RoutedReport]:
        """Run the tasks; their reports in their order."""


@dataclass(slots=True)
class RoutedRange:
    """A range whose files are written."""

    names: frozenset[str]
    rest: int
    example: str
    commits: Mapping[str, Callable[[], object]]
    failed: Sequence[tuple[RoutedTable, StrandlineError]]
    transactions: Mapping[str, FileTransaction]

    def abandon(self) -> None:
        """Give up the files."""
        _abandon(self.transactions.values(), Conflict("The range is written again."))


@dataclass(slots=True)
class RouteJobs:
    """Runs the jobs of a route."""

    workers: RouteWorkers
    splits: Splits
    env: Env
    title: str
    _shares: dict[str, float] = field(default_factory=dict)
    """The part of the last range's records that each table took."""

    def can_take(self, members: Mapping[str, RoutedTable]) -> bool:
        """Whether all tables are such as workers can write."""
        return all(member.committer is not None and member.committer.table is not None for member in members.values())

    def run(
        self, members: Mapping[str, RoutedTable], spans: Sequence[Span], since: Cursor, upto: Cursor, most: int | None
    ) -> RoutedRange:
        """Write the files of all tables. A table that cannot begin fails alone; a failed job is raised."""
        began = self.env.clock.monotonic()
        groups = [group for group in divided(spans, max(1, self.workers.tasks(spans))) if group]
        transactions: dict[str, FileTransaction] = {}
        failed: list[tuple[RoutedTable, StrandlineError]] = []
        for name, member in members.items():
            try:
                found = self._begun(member, since, upto, len(groups))
            except StrandlineError as error:
                failed.append((member, error))
            else:
                if found is not None:
                    transactions[name] = found
        parts = {name: one.parts for name, one in transactions.items()}
        tasks = divided_parts(parts, groups, self.splits.now, most)
        title = f"{self.title}, {len(parts)} tables, offsets {since.next:,}–{upto.next:,}"  # noqa: RUF001 - a range
        try:
            reports = self.workers.run_routed(tasks, title)
        except BaseException as error:
            _abandon(transactions.values(), error)
            raise
        refused = {name: reason for one in reports for name, reason in one.failed.items()}
        for name, reason in refused.items():
            failed.append((members[name], reason))
            _abandon([transactions.pop(name)], reason)
        written: dict[str, list[Written]] = {name: [] for name in transactions}
        for name, some in ((name, parts[name]) for name in transactions):
            for number in range(len(some)):
                written[name] += [one.written[name, number] for one in reports if (name, number) in one.written]
        self._learn(spans, reports)
        count = upto.next - since.next
        own = {name: _own(some, count) for name, some in written.items()}
        self._shares = {name: rows / max(1, count) for name, rows in own.items()}
        seconds = self.env.clock.monotonic() - began
        commits = {
            name: partial(_commit, members[name], transaction, written[name], upto, own[name], seconds)
            for name, transaction in transactions.items()
        }
        names = frozenset[str]().union(*[one.names for one in reports])
        example = next((one.example for one in reports if one.example), "")
        return RoutedRange(names, sum(one.rest for one in reports), example, commits, failed, transactions)

    def _learn(self, spans: Sequence[Span], reports: Sequence[RoutedReport]) -> None:
        """Learn what the records take in memory, from one part of each worker."""
        seen = [next(iter(one.written.values())) for one in reports if one.written]
        self.workers.sizes.learn(spans, sum(one.records for one in seen), sum(one.decoded for one in seen))

    def _begun(self, member: RoutedTable, since: Cursor, upto: Cursor, workers: int) -> FileTransaction | None:
        """The transaction of a table; of one that is large by its last range with several parts by keys."""
        table = member.started.table
        if table is None or member.cursor is None or member.cursor.next >= upto.next:
            return None
        is_large = self._shares.get(member.name, 0.0) * workers * LARGE_SHARE >= 1.0
        tasks = workers if is_large or not member.is_keyed else 1
        return table.begin(since=since, upto=upto, tasks=tasks)


def _abandon(transactions: Iterable[FileTransaction], reason: BaseException) -> None:
    for transaction in transactions:
        with contextlib.suppress(StrandlineError):
            transaction.abandon(reason)


def _own(written: Sequence[Written], records: int) -> int:
    """How many records of the range the table took."""
    return max(0, records - sum(one.others for one in written))


def _commit(
    member: RoutedTable,
    transaction: FileTransaction,
    written: Sequence[Written],
    upto: Cursor,
    records: int,
    seconds: float,
) -> None:
    member.started.store(lambda: transaction.commit(written))
    member.stored(upto, records, written, seconds)
