"""Verification of a whole log in parallel: every record read, both tiers compared, tables compared with the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from strandline.bulk.audit import AuditRow, LogAudit
from strandline.bulk.span_checks import COLD, HOT, CheckTask, Problem, objects_within
from strandline.bulk.store_check import compared_store
from strandline.errors import CorruptData, CursorExpired, Diverged, NotFound, NotReady
from strandline.log.addressed import log_at
from strandline.log.contract import READING, Log, LogReading, require
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.log import ObjectLog
from strandline.log.object.maintain.verify import ObjectLogVerifier
from strandline.log.read.planning import pack
from strandline.log.read.span_tasks import MOVES, spans_between
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds, Cursor, Limit, Span, Start
from strandline.model.retention import SlotState
from strandline.model.sink import Store
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.operations import TableCheck
from strandline.tables.maintain.operations import verify as verify_table
from strandline.tier.read.tiered_log import TieredLog, hot_tier
from strandline.tier.verify import (
    EVENTS_LOST,
    HotLog,
    check_events,
    check_known,
    look_at,
    unreadable_events,
    unverified,
)

_PLANNED: Final = 4096
"""Most batches of one plan."""


@checked
def verify(
    log: LogReading | Address,
    *,
    pool: TaskPool | None = None,
    tables: Sequence[MaintainedTable] = (),
    stores: Sequence[Store] = (),
    since: Start = "retained",
    upto: int | None = None,
    quick: bool = False,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> LogAudit:
    """Read every record from ``since`` up to ``upto`` or the end, and report everything that is wrong. Changes nothing.

    Each offset must be given once and in order, and each batch with its checksum. Records that are in both tiers are
    compared. Each of ``tables`` and ``stores`` is compared with the log at its own cursor, a store in this process. An
    object log's listing, slots and unneeded objects are checked, too, and the events of a cold tier.
    ``pool`` runs the tasks: threads of this process, or ``sl.spark.executors(spark)``.
    ``quick`` reads no records: only the listing is checked. ``on_progress`` gets the records verified so far, and all.

    The log may be used meanwhile: records that move to the cold tier are located again, and trimmed ones are a note.
    """
    with log_at(log) as source:
        require(source, "verified", *READING)
        job = _Job(source, pool or ThreadPool(), on_progress)
        if not job.check_listing():
            return LogAudit(0, 0, job.found, ())
        job.check_events()
        bounds = job.verified_range(since, upto)
        job.check_slots(job.log.bounds())
        job.check_segments(quick=quick)
        job.check(bounds, quick=quick)
        checks = tuple(job.checked_tables(tables))
        job.check_stores(stores)
        return LogAudit(bounds.first, bounds.next, job.found, tuple(job.rows(bounds)), checks)


@dataclass(slots=True)
class _Job:
    """One verification."""

    log: Any
    pool: TaskPool
    on_progress: Callable[[int, int], None]
    found: Verification = field(init=False)
    table_rows: list[AuditRow] = field(default_factory=list)
    damage: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {HOT: [], COLD: []})
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.found = Verification(getattr(self.log, "url", repr(self.log)))

    @property
    def hot(self) -> Any:
        return hot_tier(self.log)

    def check_listing(self) -> bool:
        """Check the listing of an object log; False if it cannot be read at all."""
        if isinstance(self.hot, ObjectLog):
            listing = ObjectLogVerifier(self.hot, quick=True).run()
            self.found.examined["slots"] = listing.examined["slots"]
            # Batches are read below, and one that moved since is no damage.
            self.found.take(one for one in listing.findings if one.kind is not FindingKind.BATCH)
            return all(finding.kind is not FindingKind.HEAD for finding in self.found.damage)
        return True

    def check_events(self) -> None:
        """Check the log of a cold tier's events; if it is damaged, the log is verified without its cold tier."""
        if not isinstance(self.log, TieredLog):
            return
        before = self.found.count(Severity.DAMAGE)
        try:
            self.found.take(check_events(self.log.unchecked_events(), self.log.log_id))
            if self.found.count(Severity.DAMAGE) > before:
                self.found.take([unverified(self.found.subject)])
        except EVENTS_LOST as error:
            self.found.take(unreadable_events(self.found.subject, error))
        if self.found.count(Severity.DAMAGE) > before:
            self.log = self.hot

    def verified_range(self, since: Start, upto: int | None) -> Bounds:
        """The offsets to verify: those of the log itself, if its cold tier cannot be read, which is damage."""
        try:
            return Bounds(self.log.position_of(since), self.log.bounds().next if upto is None else upto)
        except (CorruptData, NotFound) as error:
            if not isinstance(self.log, TieredLog):
                raise
            hot = self.hot.bounds()
            self._damaged(Problem(COLD, FindingKind.SEGMENT, 0, hot.first, str(error)))
            self.log = self.hot
        return Bounds(self.log.position_of(since), hot.next if upto is None else upto)

    def check_slots(self, bounds: Bounds) -> None:
        """Check the slots of a log whose listing does not hold them."""
        if isinstance(self.hot, ObjectLog):
            return
        slots = _slots_of(self.log)
        self.found.examined["slots"] = len(slots)
        for state in slots:
            if state.pins and not bounds.first <= state.position <= self.log.bounds().next:
                what = (
                    f"Slot {state.name!r} is at {state.position}, outside of offsets {bounds.first} to {bounds.next}."
                )
                self.found.take([Finding(Severity.DAMAGE, FindingKind.SLOT, state.name, what)])

    def check_segments(self, *, quick: bool) -> None:
        """Check the events of a cold tier; holes are found by reading, if that follows."""
        hot = self.hot
        if not isinstance(self.log, TieredLog) or not isinstance(hot, HotLog):
            return
        try:
            seen = look_at(hot, *self.log.segment_events())
        except (Diverged, CorruptData, NotFound) as error:
            kind = FindingKind.HISTORY if isinstance(error, Diverged) else FindingKind.SEGMENT
            if all(one.message != str(error) for one in self.found.findings):  # a damaged slot was found above
                self.found.take([Finding(Severity.DAMAGE, kind, self.found.subject, str(error))])
            return
        self.found.take(one for one in check_known(seen) if quick or one.kind is not FindingKind.HOLE)

    # --- records ------------------------------------------------------------------------------------------------

    def check(self, bounds: Bounds, *, quick: bool) -> None:
        """Read the range. Records with a problem are located and read again, because they may have moved."""
        spans = list(self._planned(bounds.first, bounds.next))
        self.total = sum(span.next - span.first for span in spans)
        self.found.examined.update(batches=len(spans), bytes=sum(span.size for span in spans), records=0, compared=0)
        if quick:
            self.found.examined["records"] = self.total
            return
        tasks = [self._task(group) for group in _contiguous(spans, self.pool.count)]
        for left in reversed(range(MOVES)):
            tasks = list(self._run_tasks(tasks, is_last=not left))
            if not tasks:
                break

    def _task(self, spans: Sequence[Span]) -> CheckTask:
        first, end = spans[0].first, spans[-1].next
        return CheckTask(first, end, tuple(spans), tuple(self._copies(first, end)))

    def _copies(self, first: int, end: int) -> Sequence[Span]:
        """The other copies of the records in this range; damage of their segments is a finding."""
        if not isinstance(self.log, TieredLog):
            return ()
        try:
            return self.log.copies(first, end)
        except (CorruptData, NotFound, Diverged) as error:
            kind = FindingKind.HISTORY if isinstance(error, Diverged) else FindingKind.SEGMENT
            self._damaged(Problem(COLD, kind, first, end, str(error)))
            return ()

    def _run_tasks(self, tasks: Sequence[CheckTask], *, is_last: bool) -> Iterator[CheckTask]:
        """Run the tasks; yields a task for each problem whose records have moved."""
        for number, report in self.pool.run(tasks, f"verify {self.found.subject}"):
            task = tasks[number]
            self.found.examined["records"] += report.records
            self.found.examined["compared"] += report.compared
            self.done += task.next - task.first
            self.on_progress(self.done, self.total)
            for problem in report.problems:
                yield from self._located(task, problem, is_last=is_last)

    def _located(self, task: CheckTask, problem: Problem, *, is_last: bool) -> Iterator[CheckTask]:
        """Yield a task if the records have moved since; otherwise report the problem as damage."""
        first, end = problem.first, problem.next
        try:
            spans = spans_between(self.log, first, end)
        except CursorExpired:
            self._trimmed(first, end)
            return
        except (NotReady, CorruptData, NotFound):
            self._damaged(problem)
            return
        now = CheckTask(first, end, spans, tuple(self._copies(first, end)))
        if is_last or (objects_within(task.spans, first, end), objects_within(task.copies, first, end)) == (
            objects_within(now.spans, first, end),
            objects_within(now.copies, first, end),
        ):
            self._damaged(self._read_here(now, problem))
        else:
            self.done -= end - first
            if problem.is_read:  # and is counted again
                self.found.examined["records"] -= end - first
                self.found.examined["compared"] -= end - first if problem.kind is FindingKind.DIFFERENCE else 0
            yield now

    def _read_here(self, task: CheckTask, problem: Problem) -> Problem:
        """The problem of a worker, and whether this process has it, too.

        ``NotFound`` if this process finds what a worker did not: workers on other machines lack a local folder.
        """
        if isinstance(self.pool, ThreadPool) or task().problems:
            return problem
        if problem.is_missing:
            raise NotFound(
                f"A worker could not read {self.found.subject}, and this process can: keep the log where all workers "
                f"reach it, in a bucket or a shared folder, or verify it without them. ({problem.message})"
            )
        here = "This process reads them: the worker has a damaged copy or memory, or they were restored meanwhile."
        return replace(problem, message=f"{problem.message} {here}")

    def _trimmed(self, first: int, end: int) -> None:
        what = f"Offsets {first} to {end - 1} were trimmed."
        self.found.take([Finding(Severity.NOTE, FindingKind.TRIM, self.found.subject, what)])

    def _damaged(self, problem: Problem) -> None:
        self.damage[problem.tier].append((problem.first, problem.next))
        self.found.take([Finding(Severity.DAMAGE, problem.kind, self.found.subject, problem.message)])

    def _planned(self, first: int, end: int) -> Iterator[Span]:
        """The spans of a range; what cannot be planned is damage, and the spans behind it follow."""
        at = first
        while at < end:
            spans = self._plan(at, end)
            for span in spans:
                if span.first != at:
                    what = f"{self.found.subject} continues with offset {span.first}, where {at} was expected."
                    self._damaged(Problem(HOT, FindingKind.HOLE, min(at, span.first), max(at, span.first), what))
                at = span.next
                yield span
            if not spans:
                at = self._skipped(at, end)

    def _plan(self, at: int, end: int) -> Sequence[Span]:
        """The next spans; none if they cannot be planned."""
        limit = _PLANNED
        while limit:
            try:
                return self.log.plan(Cursor(self.log.log_id, at), Limit(batches=limit, upto=end))  # type: ignore[no-any-return]
            except (CorruptData, NotFound, CursorExpired):
                limit //= 8  # the readable ones before it
        return ()

    def _skipped(self, at: int, end: int) -> int:
        """The next offset that can be planned; those before it were trimmed, or are lost."""
        start: int = self.log.bounds().first
        if start > at:
            self._trimmed(at, min(start, end))
            return min(start, end)
        low, step = at, 1
        while (high := min(low + step, end)) < end and not self._plan(high, end):
            low, step = high, 2 * step
        while high - low > 1:  # the first one that can be planned is above low
            middle = (low + high) // 2
            low, high = (low, middle) if self._plan(middle, end) else (middle, high)
        try:
            self.log.plan(Cursor(self.log.log_id, at), Limit(batches=1, upto=high))
            why = "the log does not give them."
        except (CorruptData, NotFound, CursorExpired) as error:
            why = str(error)
        hot = self.hot.bounds()
        tier = HOT if hot.first <= at else COLD
        self._damaged(Problem(tier, FindingKind.HOLE, at, high, f"Offsets {at} to {high - 1} are missing: {why}"))
        return high

    # --- tables and rows ----------------------------------------------------------------------------------------

    def checked_tables(self, tables: Sequence[MaintainedTable]) -> Iterator[tuple[str, TableCheck]]:
        """Compare each table with the log at its cursor."""
        for table in tables:
            try:
                check = verify_table(table, self.log, pool=self.pool)
            except CursorExpired as error:
                what = f"{table.where} cannot be compared, since the log no longer has its records: {error}"
                self.found.take([Finding(Severity.NOTE, FindingKind.TABLE, table.where, what)])
                continue
            except (Diverged, CorruptData) as error:
                self.found.take([Finding(Severity.DAMAGE, FindingKind.TABLE, table.where, str(error))])
                self.table_rows.append(AuditRow(table.where, 0, 0, ((0, 0),)))
                continue
            held = (table.start(), check.cursor.next)
            self.table_rows.append(AuditRow(table.where, *held, () if check.is_clean else (held,)))
            self.found.examined["rows"] += check.rows
            if not check.is_clean:
                what = (
                    f"{table.where} differs from the log at offset {check.cursor.next}: {check.missing:,} rows are "
                    f"missing, {check.extra:,} are too many. {'; '.join(check.first[:3])}. Build the table again "
                    "('strandline table rebuild')."
                )
                self.found.take([Finding(Severity.DAMAGE, FindingKind.TABLE, table.where, what)])
            yield table.where, check

    def check_stores(self, stores: Sequence[Store]) -> None:
        """Compare each store with the log at its cursor."""
        for store in stores:
            try:
                found = compared_store(self.log, store)
            except CursorExpired as error:
                what = f"{store!r} cannot be compared, since the log no longer has its first records: {error}"
                self.found.take([Finding(Severity.NOTE, FindingKind.STORE, repr(store), what)])
                continue
            wrong = found.differences
            held = (0, found.next)
            self.table_rows.append(AuditRow(repr(store), *held, (held,) if wrong else ()))
            self.found.examined["keys"] += found.keys
            if wrong:
                what = (
                    f"{store!r} differs from the log at offset {found.next} in {wrong:,} keys: "
                    f"{'; '.join(found.first)}. Bootstrap the store again."
                )
                self.found.take([Finding(Severity.DAMAGE, FindingKind.STORE, repr(store), what)])

    def rows(self, bounds: Bounds) -> Iterator[AuditRow]:
        """A row for each tier and each table."""
        hot = self.hot.bounds()
        held = (max(bounds.first, hot.first), max(bounds.next, hot.first))
        yield AuditRow(HOT, *held, _joined(self.damage[HOT]))
        if isinstance(self.log, TieredLog):
            copies = self._copies(hot.first, bounds.next)
            reached = copies[-1].next if copies else hot.first
            yield AuditRow(COLD, bounds.first, max(bounds.first, reached), _joined(self.damage[COLD]))
        yield from self.table_rows


def _contiguous(spans: Sequence[Span], cores: int) -> Iterator[list[Span]]:
    """Groups of spans for tasks, each without a gap inside."""
    for group in pack(spans, cores):
        piece: list[Span] = []
        for span in group:
            if piece and piece[-1].next != span.first:
                yield piece
                piece = []
            piece.append(span)
        yield piece


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in order, those that touch as one.

    >>> _joined([(5, 7), (0, 2), (2, 3)])
    ((0, 3), (5, 7))
    """
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return tuple(found)


def _slots_of(log: Any) -> Sequence[SlotState]:
    try:
        slots: Sequence[SlotState] = log.slots.list() if isinstance(log, Log) else []
    except NotReady:  # a replica: only the primary has the slots of consumers
        slots = []
    return slots
