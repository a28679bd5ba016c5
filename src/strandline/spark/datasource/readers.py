"""Queries of a log: everything as of planning, or micro-batches between offsets that only grow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from strandline.errors import AlreadyExists, CursorExpired, Diverged, InvalidInput, NotFound, SlotInvalid
from strandline.log.contract import Log, Slot, require
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit
from strandline.model.retention import SlotState
from strandline.spark.datasource.opened import (
    OpenedLog,
    asked_columns,
    check_reaches,
    pin,
    report_skipped,
    trimmed_while_planned,
)
from strandline.spark.datasource.planning import cursor_at, decode_offset, encode_offset, narrower
from strandline.spark.failures import retried
from strandline.spark.options import ReadOptions
from strandline.spark.task_payload import SameVersion
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM

_LOGGER: Final = logging.getLogger(__name__)


class StreamSlot:
    """A slot that the process of one query's source holds, for as long as it lives.

    A thread touches it, so that it stays valid while the query is idle or a micro-batch takes long. It is never ahead
    of what Spark has committed, and usually one micro-batch behind that, because Spark reports a commit with the next
    micro-batch. If another query claims it, this one ends with ``Fenced``.
    """

    def __init__(self, name: str, *, resets: bool) -> None:
        """Nothing is claimed yet. ``resets``: an invalidated slot is made valid again."""
        self._name = name
        self._resets = resets
        self._held: SlotHeartbeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # tasks get a copy, and hold nothing

    def hold(self, log: Log, since: Cursor) -> None:
        """Claim the slot, once, and pin everything from a cursor on; ``SlotInvalid`` if that may be deleted."""
        if self._held is not None:
            return
        require(log, "read by a stream with a slot", slots=True)
        slot = self._claimed(log, since)
        self._held = SlotHeartbeat(slot, log, env=SYSTEM).start()

    def _claimed(self, log: Log, since: Cursor) -> Slot:
        state = self._state(log)
        if state is None:
            with contextlib.suppress(AlreadyExists):
                log.slots.create(self._name, since.next)
        elif state.invalid is not None and not self._resets:
            raise SlotInvalid(
                f"Slot {self._name!r} was invalidated ({state.invalid.reason}): records from {since.next} on may be "
                "deleted. If the log or its cold tier still has them, add the option resetSlot=true; if not, start "
                "with a new checkpoint, or with failOnDataLoss=false."
            )
        elif state.invalid is not None or state.position > since.next:
            _LOGGER.warning("Slot %r is moved from offset %d to %d.", self._name, state.position, since.next)
            log.slots.reset(self._name, since.next)
        return log.slots.claim(self._name, f"spark-{CHANCE.uuid()}")

    def _state(self, log: Log) -> SlotState | None:
        with contextlib.suppress(NotFound):
            return log.slots.get(self._name)
        return None

    def check(self) -> None:
        """``Fenced`` or ``SlotInvalid`` if the slot was lost."""
        if self._held is not None and self._held.is_over:
            self._held.touch()

    def advance(self, to: Cursor) -> None:
        """Move the slot behind what is committed."""
        if self._held is not None:
            self._held.advance(to)


class _Reader(SameVersion):
    """Reads the log of some options."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """The log is opened only to find how its values are decoded."""
        self._at = OpenedLog(options, *asked_columns(options, schema))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task, in an executor."""
        return self._at.fetch(partition)


class LogReader(_Reader, DataSourceReader):
    """One batch query: everything from the starting to the ending offset, as of planning."""

    def partitions(self) -> list[InputPartition]:  # Spark requires a list
        """The plan of the whole range, distributed over tasks."""
        try:
            return retried(self._plan)
        finally:
            self._at.close()

    def _plan(self) -> list[InputPartition]:
        at, options = self._at, self._at.options
        bounds = at.bounds(options.start)
        asked = cursor_at(options.start, at.log, bounds)
        upto = cursor_at(options.end, at.log, bounds).next
        since, skipped = at.admit(asked, bounds)
        if upto > bounds.next:
            raise InvalidInput(f"endingOffset is {upto}, but {options.url} ends at {bounds.next} now: ask for less.")
        if since.next >= upto:
            return []
        with contextlib.ExitStack() as undo, trimmed_while_planned(options.url):
            pin(at.log, since.next, options, undo)  # for the requested time: the end of the query is unknown
            spans = at.log.plan(since, Limit(upto=upto))
            check_reaches(spans, upto, options.url)
            undo.pop_all()
        report_skipped(options.url, asked, skipped)
        return at.pack(spans)


T = TypeVar("T")

_TRIES: Final = 20
"""How often the start of a query is located while the log is trimmed."""
_FIRST: Final = "since"
"""The key, in the end of a query's first batch, of the offset at which that batch starts."""


class LogStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query. Its offsets only grow; limits apply at the boundaries of batches, which are never split."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """No slot is claimed yet."""
        super().__init__(options, schema)
        self._slot = None if options.slot is None else StreamSlot(options.slot, resets=options.resets_slot)
        self._target: int | None = None
        self._seen: Cursor | None = None
        self._initial: Cursor | None = None
        self._has_planned = False
        """Whether it has planned a micro-batch: until then Spark's offsets are those of the stored checkpoint."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The start of a query without checkpoint: the same for every call, although the log grows between them."""
        if self._initial is None:
            self._initial = retried(lambda: self._repeated(self._locate_start))
        return encode_offset(self._initial)

    def _repeated(self, locate: Callable[[], T]) -> T:
        """Locate again if the log was trimmed meanwhile: nothing was read. A start at an offset or cursor stays."""
        for _ in range(_TRIES):
            with contextlib.suppress(CursorExpired):
                return locate()
            if self._is_start_fixed:
                break
        return locate()

    @property
    def _is_start_fixed(self) -> bool:
        return isinstance(self._at.options.start, int | Cursor)

    def _locate_start(self) -> Cursor:
        bounds = self._at.bounds(self._at.options.start)
        cursor = cursor_at(self._at.options.start, self._at.log, bounds)
        self._at.admit(cursor, bounds)  # refuses an unavailable offset before anything is read
        self._hold(cursor)
        return cursor if isinstance(self._at.options.start, Cursor) else self._at.log.cursor_at(cursor.next)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """One of the limits from the options; Spark passes it back, and the others are applied with it."""
        match self._at.options.limit:
            case Limit(bytes=int(size)):
                return ReadMaxBytes(size)
            case Limit(records=int(rows)):
                return ReadMaxRows(rows)
            case Limit(batches=int(files)):
                return ReadMaxFiles(files)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of this run: later records wait for the next one."""
        self._target = retried(self._at.log.end).next

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch: never below ``start``, and ``start`` itself if there is nothing new.

        Spark compares the text, and treats a changed one as new data. It does not store where the first batch starts,
        and asks again after a restart. So the end of the first batch says it.
        """
        since = decode_offset(start)
        if since == self._initial:
            first, end = retried(lambda: self._first_batch(since, limit))
            return {**encode_offset(end), _FIRST: encode_offset(first)}
        end = retried(lambda: self._reachable(since, limit))
        if not self._has_planned:
            # The query was started again, and its checkpoint is committed up to here. Spark has not reported that: a
            # run of availableNow ends before.
            self.commit(start)
        return dict(start) if end == since else encode_offset(end)

    def _first_batch(self, since: Cursor, limit: ReadLimit) -> tuple[Cursor, Cursor]:
        """Start and end of the first batch. Without a slot the log may have been trimmed since the start was found."""
        try:
            return since, self._reachable(since, limit)
        except CursorExpired:
            if self._slot is not None or self._is_start_fixed:
                raise

        def locate() -> tuple[Cursor, Cursor]:
            moved = self._locate_start()
            return moved, self._reachable(moved, limit)

        return self._repeated(locate)

    def _reachable(self, since: Cursor, limit: ReadLimit) -> Cursor:
        at = self._at
        bounds = at.bounds(since)
        self._seen = since.at(bounds.next)
        admitted, _ = at.admit(since, bounds)
        self._hold(admitted)
        end = min(self._ceiling(bounds), bounds.next)
        if isinstance(limit, ReadMinRows) and self._target is None and end - admitted.next < limit.min_rows:
            return since
        allowed = _limit_of(limit, at.options.limit)
        if allowed != NO_LIMIT and end > admitted.next:
            end = at.log.plan(admitted, narrower(allowed, Limit(upto=end)))[-1].next
        return since if end <= since.next else at.log.cursor_at(end)

    def _ceiling(self, bounds: Bounds) -> int:
        end = cursor_at(self._at.options.end, self._at.log, bounds).next
        return end if self._target is None else min(end, self._target)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """The log's end as last read, for the query's progress."""
        return None if self._seen is None else encode_offset(self._seen)

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """The plan of one micro-batch; the same range always gives the same records."""
        self._has_planned = True
        since, upto = decode_offset(end.get(_FIRST, start)), decode_offset(end)
        return retried(lambda: self._plan(since, upto))

    def _plan(self, since: Cursor, upto: Cursor) -> list[InputPartition]:
        at = self._at
        bounds = at.bounds(since)
        if upto.next < since.next or upto.log_id != since.log_id:
            raise InvalidInput(f"A batch cannot go from {since} back to {upto}: start with a new checkpoint.")
        if upto.next > bounds.next:
            raise Diverged(
                f"The checkpoint is at offset {upto.next}, past the end of {at.options.url} at {bounds.next}: the log "
                "was restored or replaced. Start with a new checkpoint."
            )
        admitted, skipped = at.admit(since, bounds)
        self._hold(admitted)
        report_skipped(at.options.url, since, min(skipped, upto.next - since.next))
        if admitted.next >= upto.next:
            return []
        spans = at.log.plan(admitted, Limit(upto=upto.next))
        check_reaches(spans, upto.next, at.options.url)
        return at.pack(spans)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Move the query's slot, if it has one: Spark has written and committed everything up to there."""
        if self._slot is not None:
            slot, cursor = self._slot, decode_offset(end)
            retried(lambda: slot.advance(cursor))

    def _hold(self, since: Cursor) -> None:
        if self._slot is not None:
            self._slot.hold(self._at.log, since)
            self._slot.check()


def _limit_of(limit: ReadLimit, options: Limit) -> Limit:
    match limit:
        case ReadAllAvailable():  # Spark: "regardless of the given source options"
            return NO_LIMIT
        case ReadMaxRows(rows):
            return narrower(options, Limit(records=rows))
        case ReadMaxBytes(size):
            return narrower(options, Limit(bytes=size))
        case ReadMaxFiles(files):
            return narrower(options, Limit(batches=files))
    return options
