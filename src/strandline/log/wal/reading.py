"""What the writer of a log and its readers in other processes have in common: planning, and looking things up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from uuid import UUID

import pyarrow as pa

from strandline.log import slots as rules
from strandline.log.planning import plan_entries
from strandline.log.reading import read_between
from strandline.log.wal.catalog import Catalog
from strandline.log.wal.published import View
from strandline.log.wal.span import WalSpan
from strandline.log.wal.tail import Held
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.errors import Diverged, NotFound
from strandline.storage.disk import Disk


class WalReading(ABC):
    """The reading half of a write-ahead log. Changes nothing; shows only what is durable; safe in threads."""

    def __init__(self, folder: str, log_id: UUID, catalog: Catalog, *, disk: Disk) -> None:
        """Read the log in this folder."""
        self._folder = folder
        self._log_id = log_id
        self._catalog = catalog
        self._disk = disk

    @abstractmethod
    def view(self) -> View:
        """What is durable and retained now."""

    @abstractmethod
    def _frames(self, since: int, end: int) -> Iterator[Held]:
        """The frames with these offsets, in order."""

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._log_id

    @property
    def folder(self) -> str:
        """Where the log is."""
        return self._folder

    def bounds(self) -> Bounds:
        """The first retained and the next offset; all of them are durable."""
        return self.view().bounds

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return Cursor(self._log_id, self.bounds().first)

    def end(self) -> Cursor:
        """The cursor behind everything that is durable now."""
        view = self.view()
        return Cursor(self._log_id, view.bounds.next, view.term)

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this; whether it is retained is not looked at."""
        bounds = self.bounds()

        def written_since(time: int) -> int | None:
            return self._catalog.written_since(time // 1000, bounds.first, bounds.next)

        return rules.position_of(start, self._log_id, bounds, written_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[WalSpan]:
        """What to fetch after a cursor; costs about what it gives, wherever in the log that is."""
        end = self._checked(since)
        try:
            return self._plan(since, end, limit)
        except NotFound:
            self._checked(since)  # if it was pruned since, this says so
            return self._plan(since, end, limit)

    def _checked(self, since: Cursor) -> int:
        view = self.view()
        rules.check_cursor(since, Cursor(self._log_id, 0), view.bounds)
        if since.term > view.term:
            raise Diverged(
                f"The cursor is of term {since.term} and the log is in term {view.term}: what the consumer has applied "
                "was never in this log, and it has to bootstrap again."
            )
        return view.bounds.next

    def _plan(self, since: Cursor, end: int, limit: Limit) -> list[WalSpan]:
        return [
            WalSpan(held.frame, first, upto, held.records, self._disk)
            for held, first, upto in plan_entries(self._frames(since.next, end), since.next, limit)
        ]

    def read(
        self, since: Cursor | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from a cursor (or the beginning) up to an offset (or the end as of now)."""
        return read_between(self, since, upto, columns)
