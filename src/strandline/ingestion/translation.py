"""Cursor translation between a source and its ingested copy.

Every batch of the copy names the position in the source at which it begins, and the number of positions that it
advances. Positions only grow, so that a binary search finds the batch with an offset, whatever other writers have
appended in between.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Protocol, runtime_checkable

from strandline.errors import CursorExpired, Diverged, NotReady, Unsupported
from strandline.ingestion.history import check_history
from strandline.log.addressed import log_at
from strandline.log.contract import LogReading, require
from strandline.log.writers.source import advance_of, known_as, source_writer
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import StoredAppend, WriterId, WriterState


@runtime_checkable
class IngestedLog(LogReading, Protocol):
    """The part of a target that a translation needs."""

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append from a source; None if there was none."""

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset."""


class CopiedRange(NamedTuple):
    """Positions ``since`` up to ``upto`` of a source, which are offsets ``first`` up to ``next`` of its copy."""

    since: int
    upto: int
    first: int
    next: int

    def to_target(self, position: int) -> int:
        """The offset in the copy of a position in the source."""
        if position <= self.since or position == self.upto:
            return self.first if position <= self.since else self.next
        skipped = self._skipped()
        return max(self.first, self.first + position - self.since - skipped)

    def to_source(self, offset: int) -> int:
        """The position in the source of an offset in the copy."""
        if offset <= self.first:
            return self.since
        return self.upto if offset >= self.next else self.since + self._skipped() + offset - self.first

    def _skipped(self) -> int:
        """Positions without a record, all of them before the first record: they were trimmed, and skipped."""
        skipped = self.upto - self.since - (self.next - self.first)
        if skipped < 0:
            raise Unsupported(
                f"The batch at offset {self.first} of the copy holds {self.next - self.first} records of position "
                f"{self.since} of its source: a cursor within it has no counterpart. Translate one before or after it."
            )
        return skipped


@checked
def translate_cursor(cursor: Cursor, *, source: LogReading | Address, target: IngestedLog | Address) -> Cursor:
    """The cursor of a consumer of a source in its ingested copy, or the reverse: it continues exactly where it was.

    ``source`` and ``target`` are the logs, or their addresses.
    A cursor of the source becomes the cursor before the first of its records that the consumer has not applied. Records
    that other writers have appended to the target before that one are skipped, later ones are not. A cursor of the
    target becomes the cursor behind all records of the source that the consumer has applied.

    ``NotReady`` if the target does not hold the source so far, ``CursorExpired`` if it deleted the batch, ``Diverged``
    for a cursor of neither, or of another history, and if the source has another history than the target holds of it.

    >>> from uuid import UUID
    >>> from strandline.ingestion.api import ingest
    >>> from strandline.log.memory import MemoryLog
    >>> from strandline.model.records import record_batch
    >>> orders, copy = MemoryLog(), MemoryLog()
    >>> batch = record_batch(timestamps=[1, 2], ops=[0, 0], keys=[b"a", b"b"], values=[b"1", b"2"])
    >>> for log in (copy, orders):
    ...     _ = log.append(batch, writer=WriterId(UUID(int=7)), number=0).result()
    >>> _ = ingest(orders, copy)
    >>> there = translate_cursor(orders.cursor_at(1), source=orders, target=copy)
    >>> there.next, translate_cursor(there, source=orders, target=copy).next
    (3, 1)
    """
    with log_at(source) as original, log_at(target) as copy:
        require(original, "translated from", "plan", "cursor_at")
        require(copy, "translated to", "append_at", "last_append", "cursor_at", "bounds", "plan")
        ids = original.log_id, copy.log_id
        if cursor.log_id not in ids:
            raise Diverged(f"{cursor} is a cursor of neither log {ids[0]} nor log {ids[1]}: check the logs.")
        copied = CopiedRanges(original, copy)
        with contextlib.suppress(CursorExpired):  # what the source no longer retains cannot be compared
            check_history(original, copy, copied.last)
        is_of_source = cursor.log_id == original.log_id
        with contextlib.suppress(CursorExpired):  # the other log may still hold it
            (original if is_of_source else copy).plan(cursor, Limit(batches=1))  # refuses one of another history
        if is_of_source:
            return copy.cursor_at(copied.to_target(cursor.next))
        return original.cursor_at(copied.to_source(cursor.next))


class CopiedRanges:
    """The batches of a target that hold records of one source, found by binary search."""

    def __init__(self, source: LogReading, target: IngestedLog) -> None:
        """``NotReady`` if nothing of the source was ever ingested into the target."""
        self._writer = source_writer(str(source.log_id))
        self._target = target
        last = target.last_append(self._writer)
        if last is None:
            raise NotReady(f"Nothing of log {source.log_id} is in {target!r} yet: ingest it first.")
        self.last = last
        """The last append from the source."""
        self._end = last.first + last.count

    def to_target(self, position: int) -> int:
        """The offset in the target of a position in the source."""
        if position >= self.last.number:
            if position > self.last.number:
                raise NotReady(
                    f"{self._target!r} holds the source up to position {self.last.number}, and not up to {position}: "
                    "ingest it up to there first."
                )
            return self._end
        lowest, highest = self._target.bounds().first, self._end
        while lowest < highest:
            middle = (lowest + highest) // 2
            try:
                found = self._from(middle, highest)
            except CursorExpired:  # in a cold tier, whose batches do not name their writers: only later ones do
                lowest = middle + 1
                continue
            if found is None:
                highest = middle
            elif found.upto <= position:
                lowest = found.next
            elif found.since > position:
                highest = min(middle, found.first)
            else:
                return found.to_target(position)
        raise CursorExpired(
            f"{self._target!r} does not hold position {position} of the source: it was deleted there, or the ingest "
            "began later. Start the consumer again, at a position of the target."
        )

    def to_source(self, offset: int) -> int:
        """The position in the source behind all of its records below an offset of the target."""
        found = self._from(offset, self._end)
        return self.last.number if found is None else found.to_source(offset)

    def has_same_offsets(self, first: int, end: int) -> bool:
        """Whether the target has at these offsets exactly the source's records of these positions.

        Asks for each batch there: another writer's records may be among them, or some may have been skipped.
        """
        if end > self._end:
            return False
        while first < end:
            copied = self._from(first, first + 1)
            if copied is None or copied.upto != copied.next:  # what a batch skips comes before its first record
                return False
            first = copied.next
        return True

    def _from(self, offset: int, end: int) -> CopiedRange | None:
        """The first batch of the source with an offset from here on; None if there is none up to ``end``."""
        while offset < end:
            stored = self._target.append_at(offset)
            if stored.append is not None and known_as(stored.append[0]) == self._writer:
                writer, number = stored.append
                return CopiedRange(number, number + advance_of(writer), stored.first, stored.next)
            offset = stored.next
        return None
