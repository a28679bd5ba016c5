"""A log over both tiers: records that the hot tier has trimmed are read from segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, final
from uuid import UUID

import pyarrow as pa

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import CursorExpired, NotFound, NotReady, StrandlineError, Unsupported
from strandline.log.contract import READING, Handle, LogReading, require
from strandline.log.folders import FolderKind, contents
from strandline.log.object.log import ObjectLog
from strandline.log.object.slots import Hold, HoldSeconds, SlotKeeper
from strandline.log.produce.producer import Producer
from strandline.log.read.planning import PlanBuilder, cursor_after
from strandline.log.slots.heartbeat import Limited
from strandline.log.slots.resume import position_of
from strandline.log.slots.table import SlotTable
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader, WalReading
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Span, Start
from strandline.model.head import WriterId
from strandline.model.records import RecordSource
from strandline.model.retention import NO_LIMITS, TIER_SLOT, SlotLimits, SlotState
from strandline.model.segments import ColdTier, SegmentMetadata
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.tier.attachment import ColdCell
from strandline.tier.copy.history import TermLookups, divergence, is_same_record, read_history
from strandline.tier.copy.segment_files import ColdSpan, plan_segment
from strandline.tier.read.cold_reader import ColdPiece, ColdReader, HotStart, check_term
from strandline.tier.read.tiered_slots import Hot, TierableSlots, TieredSlots

_TRIES: Final = 8
"""How often a plan may move between the tiers while the log is trimmed."""


@bound_to_process(keep=("log_id",))
@final
@checked
class TieredLog(Closing):
    """A log whose older records are in segments. Satisfies :class:`~strandline.log.contract.Log`; thread-safe.

    The records of both tiers are retained and read as one log, also while records move between the tiers. Consumers'
    slots pin the log in either tier; the tierer's slot pins the hot one. While the segments are not known, operations
    that need them are ``NotReady``; the hot tier is served anyway.

    All other attributes are those of the hot log.
    """

    def __init__(
        self,
        hot: Hot,
        cold: ColdCell,
        reader: Callable[[ExitStack], ColdReader],
        *,
        close_hot: bool = False,
        tier_slot: Callable[[], SlotState | None] | None = None,
        role: Callable[[], object] = lambda: None,
    ) -> None:
        """Use :func:`~strandline.tier.opening.tiered`. ``reader`` opens the cold tier on first use.

        ``tier_slot`` gives the tierer's slot, if it is not among those of the hot log; when the ``role`` of this
        process changes, that slot may be another one, and is compared with the segments again.
        """
        self._close_hot = close_hot
        self._find_tier_slot = tier_slot or self._listed_tier_slot
        self._hot = hot
        self._cold = cold
        self._open_reader = reader
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._reader: ColdReader | None = None
        self._role = role
        self._checked: tuple[object] | None = None
        """The role in which the tierer's slot was compared with the segments; None if it was not."""
        self._origin = Origin(f"The log {hot!r}", self)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the hot log, such as producers, retention and trimming."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._hot, name)

    def __repr__(self) -> str:
        return f"TieredLog({self._hot!r})"

    def close(self) -> None:
        """Close the cold tier, which reopens on the next use; the hot log stays open unless this one owns it."""
        with self._lock:
            opened, self._opened, self._reader = self._opened, ExitStack(), None
        if self._close_hot and isinstance(self._hot, Closing):
            opened.callback(self._hot.close)
        opened.close()

    @property
    def hot(self) -> Hot:
        """The log without its cold tier."""
        return self._hot

    @property
    def counts_batches(self) -> bool:
        """A queue of version 1 has no cold tier."""
        return False

    @property
    def content_type(self) -> str | None:
        """The media type of the values; None: unspecified."""
        return self._hot.content_type

    def _opened_reader(self) -> ColdReader:
        if self._reader is None:
            with ExitStack() as opened, _opening():
                self._reader, self._checked = self._open_reader(opened), None
                self._opened = opened.pop_all()
        return self._reader

    def _cold_reader(self) -> ColdReader:
        with self._lock:
            reader = self._opened_reader()
            # Trimmed records are read from segments, and only the tierer's slot proves that these are the log's. A log
            # that was never trimmed needs no segment: diverged ones do not keep it from being read.
            role = self._role()
            if (self._checked is None or self._checked[0] is not role) and self._hot.bounds().first:
                with _opening():
                    slot = self._find_tier_slot()
                    if slot is not None and slot.pins:
                        reader.check_slot(slot, self._hot)
                self._checked = (role,)
            return reader

    def _listed_tier_slot(self) -> SlotState | None:
        return next((slot for slot in self._hot.slots.list() if slot.name == TIER_SLOT), None)

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._hot.log_id

    def bounds(self) -> Bounds:
        """The first offset retained in either tier, and the end. ``NotReady`` while the segments are not known."""
        # The hot tier first: the segments of its trimmed records were published before.
        bounds = self._hot.bounds()
        return replace(bounds, first=self._cold_reader().first(self._hot_start())) if bounds.first else bounds

    def ended(self, at: int) -> bool:
        """Whether the log was sealed at an offset or below; known to the hot tier, also while the start is not."""
        return self._hot.ended(at)

    def _hot_start(self) -> HotStart:
        """The start of the hot tier, and the term of the record before it."""
        while True:
            first = self._hot.bounds().first
            term = self._hot.term_at(first - 1) if first and isinstance(self._hot, TermLookups) else None
            if self._hot.bounds().first == first:  # otherwise the log was trimmed meanwhile: once more
                return HotStart(first, term)

    def start(self) -> Cursor:
        """The cursor at the first retained offset."""
        return Cursor(self.log_id, self.bounds().first)

    def end(self) -> Cursor:
        """The cursor at the end."""
        return self._hot.end()

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor at ``offset``, with term and fingerprint of the record before it, if a tier has them.

        Without them, as from a log that does not retain that record, while the segments cannot be read.
        """
        found = self._hot.cursor_at(offset)
        if found.fingerprint is None and 0 < offset <= self._hot.bounds().first:
            with suppress(StrandlineError):
                return self._cold_reader().cursor_at(found, self._hot_start())
        return found

    def position_of(self, start: Start) -> int:
        """The offset of a start; whether it is retained is not checked."""
        found = self._hot.position_of(start)
        if start == "retained":
            return self.bounds().first
        if not isinstance(start, datetime):
            return found
        bounds = self._hot.bounds()
        if found > bounds.first:
            return found  # some hot records are earlier, and so are all segments

        def listed_since(time: int) -> int | None:
            old = self._cold_reader().listed_since(time, self._hot_start())
            return found if old is None else min(old, found)

        return position_of(start, self.log_id, Bounds(0, bounds.next), listed_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """Spans after a cursor, from either tier, in order and without a gap.

        ``CursorExpired`` if neither tier retains the cursor's position, ``Diverged`` if the cursor is of another log,
        past the end, or of another term than the record before it; ``NotReady`` if the position is in the cold tier and
        its segments are not known yet. A span of the cold tier is one row group of a segment, never split.
        """
        planned: PlanBuilder[Span] = PlanBuilder(limit)
        for _ in range(_TRIES):
            try:
                recent = self._hot.plan(since, planned.rest)
            except CursorExpired:
                start = self._hot_start()
                old = self._cold_reader().plan(since, planned.rest, start)
                if not old and not planned.spans and self._cold_reader().holding(since.next, start) is None:
                    raise  # segments of trimmed records were published before: neither tier has it
            else:
                if not planned.spans:
                    self._check_border(since)
                planned.add(recent)
                return planned.spans
            if not old or not planned.add(old) or planned.is_full or old[-1].next == limit.upto:
                return planned.spans
            since = cursor_after(since, old[-1])
        if planned.spans:
            return planned.spans
        raise NotReady(f"Offset {since.next} moved between the tiers at each of {_TRIES} tries: try again.")

    def _check_border(self, since: Cursor) -> None:
        """``Diverged`` for a cursor at the start of the hot tier with another record before it, by term or batch."""
        is_proven = since.term or since.fingerprint is not None
        if not is_proven or not since.next or since.next > self._hot.bounds().first:
            return  # the record before it is in the hot tier, which has checked it
        start = self._hot_start()
        if since.term and start.term is not None and since.next == start.first:
            check_term(since, start.term)
        if since.fingerprint is not None or start.term is None or since.next != start.first:
            self._cold_reader().check_cursor(since, start)

    def pieces(self, first: int, end: int) -> list[ColdPiece]:
        """The segments with the offsets from ``first`` on, for readers that read the Parquet objects themselves.

        As of one moment, each offset once, up to ``end`` or the last segment of the log's history: the hot tier has
        the records after them.
        """
        start, old = self._hot_start(), self._cold_reader()
        found = old.following(first, end, start)
        behind_it = found[-1][1] if found else first
        if start.first <= behind_it < end:
            more = self._shared(behind_it, end)
            if more and found and more[0][0].segment == found[-1][0].segment:
                found.pop()
            found += more
        return old.pieces(first, found)

    def unchecked_cold_tier(self) -> tuple[ColdTier, ColdReader]:
        """The cold tier, which may be damaged or of another history, for a verification."""
        cold = self._cold.read()
        if cold is None:
            raise NotFound(f"{self!r} has no cold tier any more.")
        with self._lock:
            return cold, self._opened_reader()

    def copies(self, first: int, end: int) -> list[ColdSpan]:
        """Spans of segments over offsets that the hot tier has, too, for a comparison of both: in order, may be fewer.

        Segments of a term that the log has abandoned are left out.
        """
        first = max(first, self._hot.bounds().first)
        planned: list[ColdSpan] = []
        for segment, behind_it in self._agreeing(first, end):
            planned += plan_segment(self._cold_reader().store, segment, first, Limit(upto=behind_it))
            first = behind_it
        return planned

    def _shared(self, first: int, end: int) -> list[tuple[SegmentMetadata, int]]:
        """The segments from an offset on that duplicate hot records, as far as their terms agree with the log's.

        Empty if their last record differs from the log's: then the log diverged within a term.
        """
        found, store = self._agreeing(first, end), self._cold_reader().store
        return found if found and is_same_record(self._hot, store, found[-1][0], found[-1][1] - 1) else []

    def _agreeing(self, first: int, end: int) -> list[tuple[SegmentMetadata, int]]:
        """Segments that agree with the log by their terms alone."""
        history = read_history(self._hot, end)
        found: list[tuple[SegmentMetadata, int]] = []
        for segment, behind_it in self._cold_reader().following(first, end, None):
            diverged_at = divergence(segment, history)
            agreed = behind_it if diverged_at is None else min(diverged_at, behind_it)
            if agreed > first:
                found.append((segment, agreed))
            if agreed < behind_it:
                break
            first = agreed
        return found

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the log reaches past the cursor (True) or the time is over (False)."""
        return self._hot.wait(past, timeout)

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now).

        ``since`` is an offset, a cursor, a time or a word: ``"beginning"``, ``"retained"`` or ``"now"``.
        """
        # The end is known to the hot tier, also while the start is not.
        return LogReading.read(self, since, upto=self._hot.bounds().next if upto is None else upto, columns=columns)

    def append(
        self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None, seal: bool = False
    ) -> Handle:
        """Append a batch to the hot tier, whole or not at all."""
        return self._hot.append(batch, writer=writer, number=number, expect=expect, seal=seal)

    def seal(self) -> Cursor:
        """Durably end the log, and return the cursor of its end. What is hot can still become cold."""
        return self._hot.seal()

    def producer(self, **options: Any) -> Producer:
        """A producer of the hot tier, with the same options."""
        return self._hot.producer(**options)

    def hold(self, position: int, seconds: HoldSeconds) -> Hold:
        """Pin all records from ``position`` on for some time, in either tier; raises as creating a slot does."""
        hot = self._hot
        if not isinstance(hot, ObjectLog):
            raise Unsupported(f"{hot!r} has no holds: create a slot, which pins the log, too.")
        return self.slots.pin(position, lambda first: hot.hold(position, seconds, retained_from=first), Hold.release)

    def slot_limits(self) -> SlotLimits:
        """The limits of slots in the hot log."""
        return self._hot.slot_limits() if isinstance(self._hot, Limited) else NO_LIMITS

    @property
    def slots(self) -> TieredSlots:
        """The log's slots, which pin records in either tier."""
        return TieredSlots(self._hot.slots, self._cold, lambda: self.bounds().first)


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except StrandlineError as error:
        if not error.retryable:
            raise
        raise NotReady(f"The events of the log's segments cannot be read; try again: {error}") from error


_STATE = "node.json"


def hot_tier(log: Any) -> Any:
    """The hot tier of a log; a log without a cold tier is its own."""
    return log.hot if isinstance(log, TieredLog) else log


def hot_log(log: object) -> ObjectLog | WalLog | WalReader:
    """The hot log behind a tiered log or an lsn API; ``Unsupported`` for logs that cannot have a cold tier."""
    if isinstance(log, WriteAheadLog):
        log = log.log
    log = hot_tier(log)
    if not isinstance(log, ObjectLog | WalLog | WalReader):
        raise Unsupported(
            f"A {type(log).__name__} cannot have a cold tier: only object logs can, and write-ahead logs on their own. "
            "A node attaches that of its log itself (--cold)."
        )
    check_own(log)
    return log


def check_tierable(log: object) -> None:
    """``Unsupported`` for a log that a tierer cannot or must not copy."""
    require(log, "tiered", *READING, slots=True)
    if isinstance(log, WalReader):
        raise Unsupported(
            f"{log!r} was opened for reading, but tiering moves a slot: run it in the process that writes the log."
        )
    if not isinstance(getattr(log, "slots", None), SlotTable | SlotKeeper | TieredSlots | TierableSlots):
        raise Unsupported(
            f"A {type(log).__name__} cannot be tiered: only object logs can, and write-ahead logs on their own. A node "
            "tiers its log itself (--cold)."
        )
    check_own(log)


def check_own(log: object) -> None:
    """``Unsupported`` for a node's copy of a log: after a failover another copy is authoritative."""
    if not isinstance(log, WalReading):
        return
    folder = Path(log.folder).absolute()
    names = contents(folder.parent, disk=log.env.disk).found.get(FolderKind.NODE, ())
    if _STATE in names and folder.name in names:
        raise Unsupported(
            f"The log in {folder} belongs to the node in {folder.parent}, and another copy may lead after a failover: "
            "run the node with --cold, and whichever node leads tiers the log."
        )
