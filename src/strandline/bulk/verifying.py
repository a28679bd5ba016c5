"""Verification of a whole log: its structure, every record in both tiers, and what follows it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from strandline.bulk.span_checks import CheckTask, Problem, objects_within
from strandline.bulk.store_check import compared_store
from strandline.errors import CorruptData, CursorExpired, Diverged, NotALog, NotFound, NotReady
from strandline.log.addressed import log_at
from strandline.log.contract import READING, Log, LogReading, require
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.log import ObjectLog
from strandline.log.object.maintain.verify import check_object_log
from strandline.log.read.planning import pack
from strandline.log.read.span_tasks import MOVES, spans_between
from strandline.log.topic.logs import LogTopic
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.recover.verify import data_bytes
from strandline.log.wal.recover.verify import verify as verify_wal
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Bounds, Cursor, Limit, Span, Start
from strandline.model.retention import SlotState
from strandline.model.segments import TopicPartition
from strandline.model.sink import Store
from strandline.storage.task_pool import TaskPool, ThreadPool
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.operations import verify as verify_table
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.read.tiered_log import TieredLog, hot_tier
from strandline.tier.verify import HotLog, check_tier

_PLANNED: Final = 4096
"""Most batches of one plan."""
_STRETCH: Final = 1 << 16
"""Most batches whose spans are held at once."""


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
) -> Verification:
    """Check a log's structure and read every record; reports everything that is wrong. Changes nothing.

    Each offset must be given once and in order from ``since`` up to ``upto`` or the end, each batch with its checksums.
    Records that are in both tiers are compared, and every byte of a segment is read. Each of ``tables`` and ``stores``
    is compared with the log at its own cursor, a store in this process. The structure is checked as a whole: the
    listing, slots and unneeded objects of an object log; files, frames, indexes and slots of a write-ahead log, whose
    every byte is read; events and objects of a cold tier. ``pool`` runs the tasks: threads of this process, or
    ``sl.spark.executors(spark)``. ``quick`` reads no records: each object must be there, with its size.
    ``on_progress`` gets the records verified so far and all, or first the bytes of a write-ahead log.

    The log may be used meanwhile: records that move to the cold tier are located again, and trimmed ones are a note.
    """
    with log_at(log) as source:
        require(source, "verified", *READING)
        found = Verification(getattr(source, "url", repr(source)), log_id=getattr(source, "log_id", None))
        job = _Job(source, pool or ThreadPool(), on_progress, quick, found)
        if job.check_structure():
            job.check_cold_tier()
            job.check_records(since, upto)
            job.check_tables(tables)
            job.check_stores(stores)
        return found


@dataclass(slots=True)
class _Job:
    """One verification."""

    log: Any
    pool: TaskPool
    on_progress: Callable[[int, int], None]
    quick: bool
    found: Verification
    cold_start: int | None = None
    """The first offset of all segments, also of those below a hole."""
    done: int = 0
    total: int = 0

    @property
    def hot(self) -> Any:
        return hot_tier(self.log)

    @property
    def is_wal(self) -> bool:
        """Whether the check of the structure has read the hot tier's records already."""
        return isinstance(self.hot, WalReading) and not self.quick

    def check_structure(self) -> bool:
        """Check the hot tier's own files or objects, and its slots; False if nothing else can be read."""
        hot = self.hot
        self.found.examined.update(batches=0, records=0, bytes=0, compared=0, slots=0)
        if isinstance(hot, ObjectLog):
            listing = check_object_log(hot)
            # Batches are read below, and one that moved since is no damage.
            self.found.take(one for one in listing.findings if self.quick or one.kind is not FindingKind.BATCH)
            self.found.examined.update({name: listing.examined[name] for name in ("slots", "chunks", "trims")})
            return all(finding.kind is not FindingKind.HEAD for finding in self.found.damage)
        if self.is_wal:
            total = data_bytes(hot.folder, disk=hot.env.disk)
            read = 0

            def progressed(more: int) -> None:
                nonlocal read
                read += more
                self.on_progress(read, total)

            files = verify_wal(hot.folder, env=hot.env, on_progress=progressed)
            self.found.take(files.findings)
            self.found.examined.update(files.examined)
            self.found.bounds = files.bounds
            return True
        bounds, slots = hot.bounds(), _slots_of(self.log)
        self.found.examined["slots"] = len(slots)
        first = 0 if isinstance(self.log, TieredLog) else bounds.first
        for state in slots:
            if state.pins and not first <= state.position <= bounds.next:
                what = f"Slot {state.name!r} is at {state.position}, outside of offsets {first} to {bounds.next}."
                self._damaged(FindingKind.SLOT, what, state.name)
        return True

    def check_cold_tier(self) -> None:
        """Check the events and the segments of a cold tier; if it is damaged as a whole, only the hot one is read."""
        hot = self.hot
        if not isinstance(self.log, TieredLog) or not isinstance(hot, HotLog):
            return
        try:
            cold, reader = self.log.unchecked_cold_tier()
            damage = list(_damage_of_events(reader.registry, self.log.log_id))
        except (CorruptData, NotFound, NotALog) as error:
            self._without_cold_tier([Finding(Severity.DAMAGE, FindingKind.SEGMENT, self.found.subject, str(error))])
            return
        if damage:
            self._without_cold_tier(damage)
            return
        try:
            seen = check_tier(hot, cold, reader, quick=self.quick)
        except (Diverged, CorruptData, NotFound) as error:
            kind = FindingKind.HISTORY if isinstance(error, Diverged) else FindingKind.SEGMENT
            if all(one.message != str(error) for one in self.found.findings):  # a damaged slot was found above
                self._damaged(kind, str(error))
        else:
            self.found.take(seen.findings)
            self.found.examined.update(seen.examined)
            self.cold_start = seen.bounds.first

    def _without_cold_tier(self, damage: Sequence[Finding]) -> None:
        """Report damaged events, and verify only the hot tier."""
        what = (
            f"The segments of {self.found.subject} were not verified: their events are damaged. Verify again when they "
            "are restored."
        )
        self.found.take([*damage, Finding(Severity.NOTE, FindingKind.SEGMENT, self.found.subject, what)])
        self.log = self.hot

    def check_records(self, since: Start, upto: int | None) -> None:
        """Read the range. Records with a problem are located and read again, because they may have moved."""
        if self.is_wal and not isinstance(self.log, TieredLog):
            return  # they were read with their files
        self.found.bounds = self._range(since, upto)
        first, end = self.found.bounds.first, self.found.bounds.next
        if self.is_wal:
            copies, hot = self._copies(first, end), self.hot.bounds()
            end = max(copies[-1].next if copies else hot.first, first)  # the rest was read with its files
            self.found.examined["records"] = hot.next - max(hot.first, end)
        self.total = end - first
        planned = self._planned(first, end)
        while spans := list(islice(planned, _STRETCH)):
            self.found.examined.update(batches=len(spans), bytes=sum(span.size for span in spans))
            if self.quick:
                self.found.examined["records"] += sum(span.next - span.first for span in spans)
                continue
            tasks = [self._task(group) for group in _contiguous(spans, self.pool.count)]
            for left in reversed(range(MOVES)):
                tasks = list(self._run_tasks(tasks, is_last=not left))
                if not tasks:
                    break

    def _range(self, since: Start, upto: int | None) -> Bounds:
        """The offsets to verify: those of the log itself, if its cold tier cannot be read, which is damage."""
        try:
            first = self.log.position_of(since)
            if since == "retained" and self.cold_start is not None:
                first = min(first, self.cold_start)
            return Bounds(first, self.log.bounds().next if upto is None else upto)
        except (CorruptData, NotFound, Diverged) as error:
            if not isinstance(self.log, TieredLog):
                raise
            if self.found.is_clean:
                self._damaged(FindingKind.SEGMENT, str(error))
            self.log = self.hot
        return Bounds(self.log.position_of(since), self.log.bounds().next if upto is None else upto)

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
            if all(one.message != str(error) for one in self.found.findings):
                self._damaged(kind, str(error), offsets=(first, end))
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
            self._report(problem)
            return
        now = CheckTask(first, end, spans, tuple(self._copies(first, end)))
        if is_last or (objects_within(task.spans, first, end), objects_within(task.copies, first, end)) == (
            objects_within(now.spans, first, end),
            objects_within(now.copies, first, end),
        ):
            self._report(self._read_here(now, problem))
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
        self.found.take([Finding(Severity.NOTE, FindingKind.TRIM, self.found.subject, what, offsets=(first, end))])

    def _report(self, problem: Problem) -> None:
        if all((one.where, one.kind) != (problem.where, problem.kind) for one in self.found.damage):  # by its structure
            self._damaged(problem.kind, problem.message, problem.where, (problem.first, problem.next))

    def _damaged(
        self, kind: FindingKind, what: str, where: str | None = None, offsets: tuple[int, int] | None = None
    ) -> None:
        place = self.found.subject if where is None else where
        self.found.take([Finding(Severity.DAMAGE, kind, place, what, offsets=offsets)])

    def _planned(self, first: int, end: int) -> Iterator[Span]:
        """The spans of a range; what cannot be planned is damage, and the spans behind it follow."""
        at = first
        while at < end:
            spans = self._plan(at, end)
            for span in spans:
                if span.first != at:
                    what = f"{self.found.subject} continues with offset {span.first}, where {at} was expected."
                    offsets = min(at, span.first), max(at, span.first)
                    self._damaged(FindingKind.HOLE, what, offsets=offsets)
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
        # The first one that can be planned is above low, and at most high.
        high = low + 1 + bisect(range(low + 1, high), False, key=lambda middle: bool(self._plan(middle, end)))
        try:
            self.log.plan(Cursor(self.log.log_id, at), Limit(batches=1, upto=high))
            why = f"{self.found.subject} does not give them."
        except (CorruptData, NotFound, CursorExpired) as error:
            why = str(error)
        if all((one.kind, one.offsets) != (FindingKind.HOLE, (at, high)) for one in self.found.damage):
            self._damaged(FindingKind.HOLE, f"Offsets {at} to {high - 1} are missing: {why}", offsets=(at, high))
        return high

    # --- tables and stores --------------------------------------------------------------------------------------

    def check_tables(self, tables: Sequence[MaintainedTable]) -> None:
        for table in tables:
            try:
                check = verify_table(table, self.log, pool=self.pool)
            except CursorExpired as error:
                what = f"{table.where} cannot be compared, since the log no longer has its records: {error}"
                self.found.take([Finding(Severity.NOTE, FindingKind.TABLE, table.where, what)])
                continue
            except (Diverged, CorruptData) as error:
                self._damaged(FindingKind.TABLE, str(error), table.where)
                continue
            self.found.examined["rows"] += check.rows
            if not check.is_clean:
                what = (
                    f"{table.where} differs from the log at offset {check.cursor.next}: {check.missing:,} rows are "
                    f"missing, {check.extra:,} are too many. {'; '.join(check.first[:3])}. Build the table again "
                    "('strandline table rebuild')."
                )
                self._damaged(FindingKind.TABLE, what, table.where, (table.start(), check.cursor.next))

    def check_stores(self, stores: Sequence[Store]) -> None:
        for store in stores:
            try:
                found = compared_store(self.log, store)
            except CursorExpired as error:
                what = f"{store!r} cannot be compared, since the log no longer has its first records: {error}"
                self.found.take([Finding(Severity.NOTE, FindingKind.STORE, repr(store), what)])
                continue
            self.found.examined["keys"] += found.keys
            if found.differences:
                what = (
                    f"{store!r} differs from the log at offset {found.next} in {found.differences:,} keys: "
                    f"{'; '.join(found.first)}. Bootstrap the store again."
                )
                self._damaged(FindingKind.STORE, what, repr(store), (0, found.next))


def _damage_of_events(manager: MetadataManager, log_id: Any) -> Iterator[Finding]:
    """Damage of the log of a cold tier's events. A topic on Kafka is not checked."""
    topic, number = manager.events, manager.metadata_partition(TopicPartition("", log_id, 0))
    log = topic.logs[number] if isinstance(topic, LogTopic) else None
    if isinstance(log, ObjectLog):
        for found in verify(log).damage:
            yield replace(found, where=f"{log.url}/{found.where.removeprefix(log.url).lstrip('/')}")


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


def _slots_of(log: Any) -> Sequence[SlotState]:
    try:
        slots: Sequence[SlotState] = log.slots.list() if isinstance(log, Log) else []
    except NotReady:  # a replica: only the primary has the slots of consumers
        slots = []
    return slots
