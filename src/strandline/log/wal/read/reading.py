"""Read methods shared by the writer of a log and by readers in other processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar
from uuid import UUID

from strandline.errors import Diverged, NotFound
from strandline.log import slots as rules
from strandline.log.contract import ReadableLog
from strandline.log.planning import check_fingerprint, plan_entries
from strandline.log.retention import kept_from
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.span import WalSpan
from strandline.log.wal.read.tail import Held
from strandline.log.wal.read.watermark import View
from strandline.model.arguments import Signed, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.retention import Retention
from strandline.model.times import TOLERANCE
from strandline.storage.clock import Clock
from strandline.storage.disk import Disk

R = TypeVar("R")


@checked
class WalReading(ReadableLog, ABC):
    """The reading half of a write-ahead log. Changes nothing; shows only what is durable; safe in threads."""

    _clock: Clock

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

    @property
    def disk(self) -> Disk:
        """The disk that it is on."""
        return self._disk

    def bounds(self) -> Bounds:
        """The first retained and the next offset; all of them are durable."""
        return self.view().bounds

    def end(self) -> Cursor:
        """The cursor behind everything that is durable now."""
        view = self.view()
        return Cursor(self._log_id, view.bounds.next, view.term)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``, with term and fingerprint if the record there is held."""

        def look(view: View) -> Cursor:
            if not view.bounds.first < offset <= view.bounds.next:
                return Cursor(self._log_id, offset)
            frame = next(self._frames(offset - 1, offset)).frame
            return Cursor(self._log_id, offset, frame.term, frame.fingerprint)

        return self._look(look)

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this; whether it is retained is not looked at."""

        def look(view: View) -> int:
            first, end = view.bounds.first, view.bounds.next
            now = self._clock.now()
            return rules.position_of(
                start, self._log_id, view.bounds, lambda time: self._written_since(time, first, end, now)
            )

        return self._look(look)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[WalSpan]:
        """What to fetch after a cursor; costs about what it gives, wherever in the log that is.

        ``Diverged`` also if the record below the cursor is of another term than the cursor says; 0 stands for a term
        that is not known, and is not looked at; so with its fingerprint. If that record is gone, only what cannot be
        is refused: a term above that of the record behind it.
        """
        view = self._checked(since)
        try:
            return self._plan(since, view.bounds, limit)
        except NotFound:
            view = self._checked(since)  # if it was pruned since, this says so
            return self._plan(since, view.bounds, limit)

    def _checked(self, since: Cursor) -> View:
        view = self.view()
        rules.check_cursor(since, Cursor(self._log_id, 0), view.bounds)
        if since.term > view.term:
            raise _diverged(since, f"the log is in term {view.term}")
        return view

    def _plan(self, since: Cursor, bounds: Bounds, limit: Limit) -> list[WalSpan]:
        looks_back = bool(since.term or since.fingerprint is not None) and since.next > bounds.first
        frames = _agreeing(since, self._frames(since.next - looks_back, bounds.next))
        return [
            WalSpan(held.frame, first, upto, held.records, self._disk)
            for held, first, upto in plan_entries(frames, since.next, limit)
        ]

    # --- terms -------------------------------------------------------------------------------------------------

    def term_at(self, offset: Signed) -> int | None:
        """The term of the record at an offset; None if it is not retained, or not there yet.

        That of the last one before the log's start is known, too, unless it is of term 0.
        """

        def look(view: View) -> int | None:
            if offset == view.bounds.first - 1:
                return self._catalog.term_before(view.bounds.first)
            is_there = view.bounds.first <= offset < view.bounds.next
            return next(self._frames(offset, offset + 1)).frame.term if is_there else None

        return self._look(look)

    def end_of_term(self, term: int) -> int:
        """The first retained offset whose record is of a term above this one, or the log's end if there is none.

        Terms never go down along a log: everything retained below it is of this term or of a lower one. Costs the same
        however long the log is.
        """

        def look(view: View) -> int:
            first, end = view.bounds.first, view.bounds.next
            return end if first == end or view.term <= term else self._catalog.end_of_term(term, first, end)

        return self._look(look)

    # --- sizes -------------------------------------------------------------------------------------------------

    def bytes_behind(self, position: int) -> int:
        """How many bytes are stored from the frame with an offset on; below the first that is retained, from there.

        Costs about as much as a look at the files' sizes.
        """

        def look(view: View) -> int:
            at = max(position, view.bounds.first)
            return 0 if at >= view.bounds.next else self._catalog.bytes_behind(next(self._frames(at, at + 1)).frame)

        return self._look(look)

    def _kept_from(self, retention: Retention, floor: int | None, now: int) -> int:
        """From where on a policy keeps the log."""

        def look(view: View) -> int:
            first, end = view.bounds.first, view.bounds.next
            return kept_from(
                retention,
                view.bounds,
                floor,
                written_since=lambda time: self._written_since(time, first, end, now),
                newest=lambda size: self._catalog.newest(size, first, end),
                now=now,
            )

        return self._look(look)

    def _written_since(self, time: int, first: int, end: int, now: int) -> int | None:
        return self._catalog.written_since(time // 1000, first, end, now=(now + TOLERANCE) // 1000)

    def _look(self, look: Callable[[View], R]) -> R:
        """What a look at what is retained finds; it looks again if what it misses was pruned meanwhile."""
        while True:
            view = self.view()
            try:
                return look(view)
            except NotFound:
                if self.bounds().first == view.bounds.first:
                    raise


def _agreeing(since: Cursor, frames: Iterator[Held]) -> Iterator[Held]:
    """The frames from a cursor on; ``Diverged`` if the first of them, which may end there, is not of its history."""
    for held in frames:
        term = held.frame.term
        if held.first < since.next:
            if since.term not in (0, term):
                raise _diverged(since, f"the record before it, at offset {since.next - 1}, is of term {term}")
            check_fingerprint(since, held)
        elif term < since.term:
            raise _diverged(since, f"the record there is of term {term}")
        if held.next > since.next:
            yield held
        break
    yield from frames


def _diverged(since: Cursor, but: str) -> Diverged:
    return Diverged(
        f"The cursor is at offset {since.next} in term {since.term}, and {but}: what the consumer has applied is not "
        "what this log holds, and it has to go back to where both agree, or to bootstrap again."
    )
