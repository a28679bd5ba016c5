"""Reading half of a write-ahead log, and the reader for other processes than the one that writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn, Self, TypeVar, final
from uuid import UUID

from strandline.errors import Diverged, NotFound, NotReady, Unsupported
from strandline.log import slots as rules
from strandline.log.contract import LogReading
from strandline.log.planning import check_fingerprint, plan_entries
from strandline.log.reading import HeadPoller
from strandline.log.slot_table import ReadOnlySlots
from strandline.log.slots import kept_from
from strandline.log.wal.names import firsts_in
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.span import Held, WalSpan
from strandline.log.wal.read.watermark import LOOKS, View, read_mark
from strandline.log.wal.recover.scan_tail import read_identity, read_kept
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import Signed, Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.model.retention import Retention
from strandline.model.times import TOLERANCE
from strandline.storage.clock import CLOCK, Clock, boot_id
from strandline.storage.disk import DISK, Disk
from strandline.storage.fork_check import Origin, bound_to_process

R = TypeVar("R")


@checked
class WalReading(LogReading, ABC):
    """The reading half of a write-ahead log. Changes nothing; shows only what is durable; safe in threads."""

    clock: Clock

    def __init__(self, folder: str, log_id: UUID, catalog: Catalog, *, disk: Disk) -> None:
        self.folder = folder
        self._log_id = log_id
        self._catalog = catalog
        self.disk = disk

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
            now = self.clock.now()
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
            view = self._checked(since)  # if it was trimmed since, this says so
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
            WalSpan(held.frame, first, upto, held.records, self.disk)
            for held, first, upto in plan_entries(frames, since.next, limit)
        ]

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
        """What a look at what is retained finds; it looks again if what it misses was trimmed meanwhile."""
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


@bound_to_process(keep=("log_id",))
@final
@checked
class WalReader(WalReading):
    """A log as other processes on the machine see it: up to the mark that its writer publishes after each sync.

    Changes nothing, takes no lock, and never shows what is not durable. After the machine stopped without the log being
    closed, ``NotReady`` until it was opened for writing: how far it reaches is known only then. Its slots can be looked
    at; what would change the log is ``Unsupported``.
    """

    def __init__(self, folder: Address, *, disk: Disk = DISK, clock: Clock = CLOCK, boot: UUID | None = None) -> None:
        """Read the log in this folder; ``NotALog`` if there is none."""
        folder = as_folder(folder)
        log_id = read_identity(folder, disk=disk)
        super().__init__(folder, log_id, Catalog(folder, log_id, firsts_in(disk.scan(folder)), disk=disk), disk=disk)
        self.clock = clock
        self._boot = boot_id() if boot is None else boot
        self._waiter = HeadPoller()
        self._seen = 0
        """Where the log ended when it was looked at last."""
        self._origin = Origin(f"The log in {folder}", advice="open it again there")

    def __repr__(self) -> str:
        return f"WalReader({self.folder!r}, log_id={self._log_id})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def view(self) -> View:
        """What is durable and retained now, by the word of the writer."""
        for _ in range(LOOKS):
            mark = read_mark(self.folder, self._log_id, disk=self.disk)
            if mark is None:
                continue
            if not mark.clean and mark.boot != self._boot:
                break  # a crash of the machine may have set it back
            if mark.next < self._seen:
                self._catalog.begin_anew()
            elif mark.active not in self._catalog.firsts[-1:]:
                self._catalog.look_again()
            self._seen = mark.next
            return View(Bounds(mark.start, mark.next), mark.term)
        raise NotReady(
            f"How far the log in {self.folder} reaches is not known, since the machine stopped while it was open: "
            "open it for writing once, which repairs what is left."
        )

    def _frames(self, since: int, end: int) -> Iterator[Held]:
        return map(Held, self._catalog.frames(since, end))

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until something past the cursor is durable (True) or the time is over (False), looking now and then."""
        return self._waiter.wait(self, past, timeout, self.clock)

    @property
    def slots(self) -> ReadOnlySlots:
        """The slots as they were last written; their positions may be further by now."""
        kept = partial(read_kept, self.folder, self._log_id, disk=self.disk, clock=self.clock)
        return ReadOnlySlots(lambda: kept().slots, self._refusal)

    @property
    def _refusal(self) -> str:
        return f"The log in {self.folder} was opened for reading: only the process that writes it may change it."

    def append(self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None) -> NoReturn:
        """``Unsupported``: it was opened for reading."""
        raise Unsupported(self._refusal)
