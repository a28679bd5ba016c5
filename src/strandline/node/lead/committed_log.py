"""A log as readers see it who must never see what may still be lost: up to a watermark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final
from uuid import UUID

import pyarrow as pa

from strandline.log.reading import read_between
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.read.span import WalSpan
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start


@final
class Committed:
    """The reading half of a log that ends at a watermark. Satisfies :class:`~strandline.node.messages.CommittedLog`.

    A reader that has been further, on a primary that was ahead, is not told that it diverged: it waits.
    """

    def __init__(self, log: WalReading, watermark: Callable[[], int], wait: Callable[[int, float], bool]) -> None:
        """Read ``log`` up to ``watermark()``; ``wait(past, timeout)`` blocks until that is above an offset."""
        self._log = log
        self._watermark = watermark
        self._wait = wait

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._log.log_id

    def bounds(self) -> Bounds:
        """The first retained and the next offset that readers see."""
        bounds = self._log.bounds()
        return Bounds(bounds.first, max(bounds.first, min(bounds.next, self._watermark())))

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return self._log.start()

    def end(self) -> Cursor:
        """The cursor behind everything that readers see now."""
        return Cursor(self.log_id, self.bounds().next)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``, as the log knows it."""
        return self._log.cursor_at(offset)

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this; ``now`` is the end that readers see."""
        if start == "now":
            return self.bounds().next
        return self._log.position_of(start)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[WalSpan]:
        """What to fetch after a cursor; raises as the log does."""
        end = self.bounds().next
        upto = end if limit.upto is None else min(end, limit.upto)
        spans = self._log.plan(since, Limit(limit.records, limit.bytes, limit.batches, max(upto, since.next)))
        return [span for span in spans if span.next > span.first]

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until there is something to read past the cursor (True) or the time is over (False)."""
        return self._wait(past.next, timeout)

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``.
        """
        return read_between(self, since, upto, columns)


@final
class Current:
    """What a node may show at each moment, whichever copy and role it has by then; what :class:`Committed` promises.

    Who reads on and on, such as a stream, need not begin again when the node is promoted or builds its copy again.
    """

    def __init__(self, now: Callable[[], Committed]) -> None:
        """``now`` tells it; ``NotReady`` from there is raised here."""
        self._now = now

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._now().log_id

    def bounds(self) -> Bounds:
        """The first retained and the next offset that readers see now."""
        return self._now().bounds()

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return self._now().start()

    def end(self) -> Cursor:
        """The cursor behind everything that readers see now."""
        return self._now().end()

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``."""
        return self._now().cursor_at(offset)

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this."""
        return self._now().position_of(start)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[WalSpan]:
        """What to fetch after a cursor; raises as the log does."""
        return self._now().plan(since, limit)

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until there is something to read past the cursor (True), or the time is over or about so (False)."""
        return self._now().wait(past, timeout)

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``.
        """
        return read_between(self, since, upto, columns)
