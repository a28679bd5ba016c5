"""A log in two tiers: what the hot one has forgotten is read from segments, without a seam."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, final, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired, InvalidInput, NotReady, StrandlineError
from strandline.log.contract import Handle, Log, Slot
from strandline.log.heartbeat import Limited, SlotToucher
from strandline.log.object.log import ObjectLog
from strandline.log.object.slots import Hold, HoldSeconds
from strandline.log.planning import Gathering, behind
from strandline.log.reading import read_between
from strandline.log.slots import position_of
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.model.retention import NO_LIMITS, SlotLimits
from strandline.model.segments import SegmentMetadata
from strandline.model.slots import TIER_SLOT, SlotState
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.tier.attachment import ColdCell
from strandline.tier.copy.agreement import parting
from strandline.tier.copy.history import Termed, read_history
from strandline.tier.read.cold_reader import ColdPiece, ColdReader, Seam, check_term

P = TypeVar("P")

_TRIES: Final = 8
"""How often a plan goes from one tier to the other and back while the log is being trimmed."""


class Hot(Log, Protocol):
    """A log that may have a cold tier: its slots may stand where only that is."""

    def create_slot(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Create a slot; ``retained_from`` is where the cold tier begins."""

    def reset_slot(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Put a slot elsewhere."""


@runtime_checkable
class NewcomerSlots(Protocol):
    """A log whose slots can be made for consumers that have stored nothing yet."""

    def create_newcomer_slot(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Create a slot that goes after a while, unless it is claimed or touched."""


@bound_to_process(keep=("log_id",))
@final
@checked
class TieredLog:
    """A log whose older records are in segments. Satisfies :class:`~strandline.log.contract.Log`; safe in threads.

    Everything that either tier has is retained, and read as one log, also while records move from one to the other.
    Consumers' slots pin the log, in whichever tier; the tierer's slot pins the hot one. While it cannot be known which
    segments there are, what needs them is ``NotReady``; what is in the hot tier is served all the same.

    Everything that is not about old records is the hot log's, and can be asked for here as there.
    """

    def __init__(self, hot: Hot, cold: ColdCell, reader: Callable[[ExitStack], ColdReader]) -> None:
        """Use :func:`~strandline.tier.opening.tiered`. ``reader`` is called when somebody needs old records."""
        self._hot = hot
        self._cold = cold
        self._open_reader = reader
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._reader: ColdReader | None = None
        self._is_checked = False
        self._origin = Origin(f"The log {hot!r}", self)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the hot log offers: producers, retention, collecting."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._hot, name)

    def __repr__(self) -> str:
        return f"TieredLog({self._hot!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop following the segments' events; the hot log is its owner's to close. Old records can be read again."""
        with self._lock:
            opened, self._opened, self._reader = self._opened, ExitStack(), None
        opened.close()

    @property
    def hot(self) -> Hot:
        """The log without its cold tier."""
        return self._hot

    def _old(self) -> ColdReader:
        with self._lock:
            if self._reader is None:
                with ExitStack() as opened, _opening():
                    self._reader, self._is_checked = self._open_reader(opened), False
                    self._opened = opened.pop_all()
            # What the log has forgotten is read from segments, and only the tierer's slot tells whose they are. A log
            # that has all its records needs no segment: those of another history do not keep it from being read.
            if not self._is_checked and self._hot.bounds().first:
                with _opening():
                    for slot in self._hot.slots():
                        if slot.name == TIER_SLOT and slot.pins:
                            self._reader.check_slot(slot, self._hot)
                self._is_checked = True
            return self._reader

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._hot.log_id

    def bounds(self) -> Bounds:
        """The first offset that is retained in either tier, and the next one. ``NotReady`` while that is not known."""
        # The hot tier first: what it has forgotten by then was told of before.
        end = self._hot.bounds().next
        return Bounds(self._old().first(self._seam()), end)

    def _seam(self) -> Seam:
        """Where the hot tier begins now, and behind which record."""
        while True:
            first = self._hot.bounds().first
            term = self._hot.term_at(first - 1) if first and isinstance(self._hot, Termed) else None
            if self._hot.bounds().first == first:  # otherwise it is that of another record, or none
                return Seam(first, term)

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return Cursor(self.log_id, self.bounds().first)

    def end(self) -> Cursor:
        """The cursor behind everything that is there now."""
        return self._hot.end()

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``; what the hot tier has forgotten is not looked up for it."""
        return self._hot.cursor_at(offset)

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this; whether it is retained is not looked at."""
        found = self._hot.position_of(start)
        if start == "retained":
            return self.bounds().first
        if not isinstance(start, datetime):
            return found
        bounds = self._hot.bounds()
        if found > bounds.first:
            return found  # something in the hot tier is earlier, and so is everything in segments

        def listed_since(time: int) -> int | None:
            old = self._old().listed_since(time, self._seam())
            return found if old is None else min(old, found)

        return position_of(start, self.log_id, Bounds(0, bounds.next), listed_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """What to fetch after a cursor, from either tier, in order and without a hole.

        ``CursorExpired`` if neither retains the cursor's position, ``Diverged`` if the cursor is of another log, past
        the end, or of another term than the record before it; ``NotReady`` if it is old and the segments' events are
        not known yet. A span of the cold tier is a row group of a segment, and never split by a size either.
        """
        planned: Gathering[Span] = Gathering(limit)
        for _ in range(_TRIES):
            try:
                recent = self._hot.plan(since, planned.rest)
            except CursorExpired:
                seam = self._seam()
                old = self._old().plan(since, planned.rest, seam)
                if not old and not planned.spans and self._old().holding(since.next, seam) is None:
                    raise  # what the hot tier had forgotten was told of before: it is in neither
            else:
                if not planned.spans:
                    self._check_border(since)
                planned.add(recent)
                return planned.spans
            if not old or not planned.add(old) or planned.is_full or old[-1].next == limit.upto:
                return planned.spans
            since = behind(since, old[-1])
        if planned.spans:
            return planned.spans
        raise NotReady(f"Offset {since.next} moved between the tiers at each of {_TRIES} looks: try again.")

    def _check_border(self, since: Cursor) -> None:
        """Refuse a cursor at the hot tier's beginning whose term is not that of the record before it."""
        if not since.term or not since.next or since.next > self._hot.bounds().first:
            return  # what is before it is in the hot tier, which has looked
        seam = self._seam()
        if seam.term is None or since.next != seam.first:
            self._old().check_cursor(since, seam)
        else:
            check_term(since, seam.term)

    def pieces(self, first: int, end: int) -> list[ColdPiece]:
        """Which segments have the offsets from ``first`` on, for who reads Parquet by other means than a plan's spans.

        As of one moment, each offset once, up to ``end`` or as far as segments go and are of the log's history: the
        hot tier has what comes behind.
        """
        seam, old = self._seam(), self._old()
        found = old.following(first, end, seam)
        behind_it = found[-1][1] if found else first
        if seam.first <= behind_it < end:
            more = self._shared(behind_it, end)
            if more and found and more[0][0].segment == found[-1][0].segment:
                found.pop()
            found += more
        return old.pieces(first, found)

    def _shared(self, first: int, end: int) -> list[tuple[SegmentMetadata, int]]:
        """The segments that hold, from an offset on, what the hot tier has: as far as their terms agree with the log's.

        None of them if the last record is another one there: then the log went on differently within a term.
        """
        history = read_history(self._hot, end)
        found: list[tuple[SegmentMetadata, int]] = []
        for segment, behind_it in self._old().following(first, end, None):
            parted = parting(segment, history)
            agreed = behind_it if parted is None else min(parted, behind_it)
            if agreed > first:
                found.append((segment, agreed))
            if agreed < behind_it:
                break
            first = agreed
        return found if found and self._old().is_same_record(self._hot, found[-1][0], found[-1][1] - 1) else []

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the log reaches past the cursor (True) or the time is over (False)."""
        return self._hot.wait(past, timeout)

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``.
        """
        # By the hot tier's own word: the end is to be known also where the beginning is not.
        return read_between(self, since, self._hot.bounds().next if upto is None else upto, columns)

    # --- appending ---------------------------------------------------------------------------------------------

    def append(self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None) -> Handle:
        """Append a batch to the hot tier, whole or not at all."""
        return self._hot.append(batch, writer=writer, number=number, expect=expect)

    # --- slots -------------------------------------------------------------------------------------------------

    def create_slot(self, name: str, position: int) -> SlotState:
        """Create a slot that pins everything from ``position`` on, in whichever tier that is.

        ``CursorExpired`` if it is no longer retained, or if that is being decided right now.
        """
        hot = self._hot
        return self._pin(
            position,
            lambda first: hot.create_slot(name, position, retained_from=first),
            lambda _: hot.drop_slot(name),
        )

    def create_newcomer_slot(self, name: str, position: int) -> SlotState:
        """The same for a consumer that has stored nothing yet: unclaimed and untouched it goes after a while."""
        hot = self._hot
        if not isinstance(hot, NewcomerSlots):
            return self.create_slot(name, position)
        return self._pin(
            position,
            lambda first: hot.create_newcomer_slot(name, position, retained_from=first),
            lambda _: hot.drop_slot(name),
        )

    def reset_slot(self, name: str, position: int) -> SlotState:
        """Put a slot elsewhere, back or ahead, and make it valid again; raises as creating one does.

        If what it was put on is being removed at this very moment, it stands there all the same: it pins more than can
        be read then, and is to be reset to something else.
        """
        hot = self._hot
        return self._pin(position, lambda first: hot.reset_slot(name, position, retained_from=first), lambda _: None)

    def hold(self, position: int, seconds: HoldSeconds) -> Hold:
        """Pin everything from ``position`` on for some time, in whichever tier; raises as creating a slot does."""
        hot = self._hot
        if not isinstance(hot, ObjectLog):
            raise InvalidInput(f"{hot!r} has no holds, only slots: create one.")
        return self._pin(position, lambda first: hot.hold(position, seconds, retained_from=first), Hold.release)

    def _pin(self, position: int, pin: Callable[[int | None], P], undo: Callable[[P], None]) -> P:
        try:
            return pin(None)
        except CursorExpired:
            first = self.bounds().first
        self._check_announced(position)
        pinned = pin(first)
        try:
            # After it is pinned: expiry either saw the pin, or had announced before that what it removes.
            self._check_announced(position)
        except CursorExpired:
            undo(pinned)
            raise
        return pinned

    def _check_announced(self, position: int) -> None:
        cold = self._cold.look()
        if cold is not None and position < cold.start:
            raise CursorExpired(
                f"Offset {position} is about to be removed from the cold tier, which begins at {cold.start} then: "
                "begin there, or bootstrap."
            )

    def claim_slot(self, name: str, holder: str) -> Slot:
        """Become the slot's holder; a former holder is fenced from now on."""
        return self._hot.claim_slot(name, holder)

    def drop_slot(self, name: str) -> None:
        """Remove a slot; what only it needed may be removed from now on."""
        self._hot.drop_slot(name)

    def slot_limits(self) -> SlotLimits:
        """Within which limits slots pin, as the hot tier's log knows it now."""
        return self._hot.slot_limits() if isinstance(self._hot, Limited) else NO_LIMITS

    def touch_slot(self, name: str, epoch: int) -> None:
        """Say that a slot is needed which nobody has claimed yet."""
        if isinstance(self._hot, SlotToucher):
            self._hot.touch_slot(name, epoch)

    def slots(self) -> list[SlotState]:
        """All slots, by name."""
        return self._hot.slots()

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs; None without any."""
        return self._hot.floor()


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except StrandlineError as error:
        if not error.retryable:
            raise
        raise NotReady(f"The events of the log's segments cannot be had; try again: {error}") from error
