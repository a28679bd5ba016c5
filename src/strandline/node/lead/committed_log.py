"""The log as readers see it: up to the commit watermark, in either role of the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple, NoReturn, final
from uuid import UUID

from strandline.errors import NotReady, Unsupported
from strandline.log.contract import LogReading
from strandline.log.read.value_format import WithoutFormat
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import StoredAppend, WriterId
from strandline.model.records import RecordSource
from strandline.tier.read.tiered_slots import HotSlots

_FOR_READERS: Final = "This is a node's log for readers: append with the Primary, or over the network."


class ReadableLog(NamedTuple):
    """A copy of the log, and its commit watermark."""

    log: WalReading
    watermark: Callable[[int], int]
    """The watermark, of a copy with this durable extent; a committed seal counts as one more record."""
    wait_past: Callable[[int, float], object]
    """``wait_past(past, timeout)`` blocks until the watermark is above an offset."""

    def bounds(self) -> Bounds:
        """The first retained offset, the watermark, and whether the log was sealed there."""
        bounds = self.log.bounds()
        reached = self.watermark(bounds.extent)
        end = max(bounds.first, min(bounds.next, reached))
        return Bounds(bounds.first, end, bounds.sealed and reached >= bounds.extent)

    def wait(self, past: int, timeout: float) -> bool:
        """Block until there is a record to read past an offset (True), or until the timeout or a seal (False)."""
        if (bounds := self.bounds()).next <= past and not bounds.sealed:
            self.wait_past(past, timeout)
        return self.bounds().next > past


@final
class CommittedLog(WithoutFormat, LogReading):
    """A node's copy of the log for readers. It ends at the commit watermark, and outlives changes of role and copy.

    A stream continues when the node is promoted or bootstraps. A reader that was ahead on another primary waits, and
    gets no ``Diverged``.
    """

    def __init__(self, source: Callable[[], ReadableLog], slots: Callable[[], HotSlots]) -> None:
        """``source`` gives the copy and the watermark as of now; its ``NotReady`` is raised by every call.

        ``slots`` gives the slots of consumers, which the primary has.
        """
        self._source = source
        self._slots = slots

    @property
    def slots(self) -> HotSlots:
        """The slots of consumers; ``NotReady`` on a node that does not lead."""
        return self._slots()

    def append(
        self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None, seal: bool = False
    ) -> NoReturn:
        """``Unsupported``: this is the log for readers."""
        raise Unsupported(_FOR_READERS)

    def seal(self) -> NoReturn:
        """``Unsupported``, too."""
        raise Unsupported(_FOR_READERS)

    def producer(self, *, writer: WriterId | None = None, **options: object) -> NoReturn:
        """``Unsupported``, too."""
        raise Unsupported(_FOR_READERS)

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._source().log.log_id

    def bounds(self) -> Bounds:
        """The first retained offset, and the next one that readers will see."""
        return self._source().bounds()

    def end(self) -> Cursor:
        """The cursor behind the last record that readers see now."""
        source = self._source()
        return Cursor(source.log.log_id, source.bounds().next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``."""
        return self._source().log.cursor_at(offset)

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset; ``NotReady`` if it is not committed yet."""
        source = self._source()
        if offset >= source.bounds().next:
            raise NotReady(f"The log ends at offset {source.bounds().next}, and has no record at {offset} yet.")
        return source.log.append_at(offset)

    def term_at(self, offset: int) -> int | None:
        """The term of a record; None if it is not retained here, or not committed."""
        source = self._source()
        return source.log.term_at(offset) if offset < source.bounds().next else None

    def end_of_term(self, term: int) -> int:
        """The first committed offset with a record of a higher term, or the end if there is none."""
        source = self._source()
        return min(source.log.end_of_term(term), source.bounds().next)

    def position_of(self, start: Start) -> int:
        """The offset at which a new consumer begins; neither ``now`` nor a time is past the end that readers see.

        Records that are not committed may yet be replaced by others with other timestamps.
        """
        source = self._source()
        end = source.bounds().next
        if start == "now":
            return end
        found = source.log.position_of(start)
        return min(found, end) if isinstance(start, datetime) else found

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[WalSpan]:
        """The spans to fetch after a cursor; raises the errors of the log."""
        source = self._source()
        end = source.bounds().next
        upto = end if limit.upto is None else min(end, limit.upto)
        spans = source.log.plan(since, Limit(limit.records, limit.bytes, limit.batches, max(upto, since.next)))
        return [span for span in spans if span.next > span.first]

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until there is a record to read past the cursor (True), or until the timeout (False)."""
        return self._source().wait(past.next, timeout)
