"""Reading half of a log that a head describes (the object log, and the log in memory), and its listing for slot lag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, final
from uuid import UUID

from strandline.errors import NotReady
from strandline.log.contract import LogReading
from strandline.log.object.head.edits import bounds_of
from strandline.log.object.head.index import Chunks, bytes_from, entries_from, entries_listed_since, start_of_newest
from strandline.log.read.planning import entries_after, plan_entries
from strandline.log.slots import resume
from strandline.log.slots.trimming import retention_start
from strandline.log.writers.source import known_as
from strandline.model.arguments import checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import Entry, Head, StoredAppend, WriterId, WriterState
from strandline.model.retention import Retention

S = TypeVar("S", bound=Span)


@checked
class HeadLog(LogReading, ABC, Generic[S]):
    """Finds batches in the head and its chunks. Safe in threads, if ``head`` is."""

    chunks: Chunks
    """Reads the chunks of the listing."""

    @abstractmethod
    def head(self) -> Head:
        """The head as it is now."""

    @abstractmethod
    def _span(self, entry: Entry, first: int, end: int) -> S:
        """Offsets of a listed batch, to be fetched."""

    def bounds(self) -> Bounds:
        """The first retained and the next offset."""
        return bounds_of(self.head())

    def end(self) -> Cursor:
        """The cursor after everything that is listed now."""
        head = self.head()
        return self._cursor_in(head, head.next_offset)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor after everything below ``offset``, with the fingerprint of the batch there if it is listed."""
        return self._cursor_in(self.head(), offset)

    def _cursor_in(self, head: Head, offset: int) -> Cursor:
        if offset <= head.floor:
            return Cursor(self.log_id, offset)
        before = next(entries_from(head, offset - 1, self.chunks), None)
        return Cursor(self.log_id, offset, fingerprint=None if before is None else before.fingerprint)

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer, or of a source of ingested records; None if the log does not know it."""
        return self.head().writers.get(known_as(writer))

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset; ``CursorExpired`` if it is not retained."""
        head = self.head()
        resume.check_cursor(Cursor(self.log_id, offset), Cursor(self.log_id, 0), bounds_of(head))
        entry = next(entries_from(head, offset, self.chunks), None)
        if entry is None:
            raise NotReady(f"The log ends at offset {head.next_offset}, and has no record at {offset} yet.")
        return StoredAppend(entry.first, entry.next, (entry.writer, entry.number))

    def position_of(self, start: Start) -> int:
        """The offset at which a new consumer with this start begins; does not check whether it is retained."""
        head = self.head()
        return resume.position_of(start, self.log_id, bounds_of(head), partial(_listed_since, head, self.chunks))

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[S]:
        """The spans to fetch after a cursor; see :class:`~strandline.log.contract.Log`."""
        head = self.head()
        resume.check_cursor(since, Cursor(self.log_id, 0), bounds_of(head))
        entries = entries_after(since, head.floor, lambda offset: entries_from(head, offset, self.chunks))
        return [self._span(*planned) for planned in plan_entries(entries, since.next, limit)]


class HeadView(HeadLog[S]):
    """A log as its head is now: several reads of the view agree, and the head is read once."""

    def __init__(self, log: HeadLog[S]) -> None:
        self.chunks = log.chunks
        self._log = log
        self._head = log.head()

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._head.log_id

    def head(self) -> Head:
        """The head as it was read."""
        return self._head

    def _span(self, entry: Entry, first: int, end: int) -> S:
        return self._log._span(entry, first, end)  # noqa: SLF001 - the same class


@final
@dataclass(frozen=True, slots=True)
class HeadListing:
    """Satisfies :class:`~strandline.log.slots.slot_lag.Listing`; reads at most one chunk of each level per position."""

    head: Head
    chunks: Chunks
    now: int

    @property
    def bounds(self) -> Bounds:
        """The retained offsets."""
        return bounds_of(self.head)

    def bytes_from(self, position: int) -> int:
        """Stored bytes of the batches from a position on."""
        return bytes_from(self.head, position, self.chunks)

    def written_at(self, position: int) -> int | None:
        """When the batch with this offset was listed, in microseconds; None at the end."""
        entry = next(entries_from(self.head, position, self.chunks), None)
        return None if entry is None else entry.listed

    def policy_start(self, retention: Retention, consumed: int | None) -> int:
        """The first offset that a policy retains; a batch that begins below may hold it."""
        return retention_start(
            retention,
            self.bounds,
            consumed,
            written_since=partial(_listed_since, self.head, self.chunks),
            newest=lambda size: start_of_newest(self.head, size, self.chunks),
            now=self.now,
        )


def _listed_since(head: Head, chunks: Chunks, time: int) -> int | None:
    entry = next(entries_listed_since(head, time, chunks), None)
    return None if entry is None else entry.first
