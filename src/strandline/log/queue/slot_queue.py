"""Queue API of every log with slots: batches are the spans of its plan, numbered by the offset of their last record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pyarrow as pa

from strandline.errors import (
    AlreadyExists,
    CorruptData,
    CursorExpired,
    Diverged,
    InvalidInput,
    NotFound,
    SlotInvalid,
    Unsupported,
)
from strandline.log.contract import Log, Slot
from strandline.log.queue.contract import MOST_CLAIMS, PeekedBatches, Writes, check_usable, keep_letter, never_claimed
from strandline.log.read.planning import cursor_after
from strandline.log.slots import rules
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor, Limit, Span, Start
from strandline.model.head import Descriptor, MetadataRange
from strandline.model.retention import NEWCOMER_SECONDS, SlotState
from strandline.storage.clock import Clock
from strandline.storage.objects.store import ObjectStore


@dataclass(frozen=True, slots=True)
class SpanDescriptor:
    """Offsets ``start`` through ``sequence`` of a log, and how to read them. Picklable, if the span is."""

    start: int
    sequence: int
    location: str
    """The log, and the offsets."""
    span: Span = field(repr=False, compare=False)  # two plans of the same batch may differ in how it is read
    term: int = 0
    fingerprint: int | None = None
    """Identifies the batch among all that could be there; None if the log does not have it."""
    metadata: tuple[MetadataRange, ...] = ()


@runtime_checkable
class StoredSpan(Protocol):
    """A span whose bytes can be read as they are stored."""

    def raw(self) -> bytes | memoryview:
        """The stored bytes, unchecked, or ``NotFound``."""


@dataclass(frozen=True, slots=True)
class SpanFetcher:
    """Reads the batches of a log; see :class:`~strandline.log.queue.contract.Fetcher`."""

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records with their offsets."""
        span = _span(descriptor).span
        try:
            return list(span.fetch())
        except CorruptData:
            return list(span.fetch())  # the bytes may have been damaged in transfer only

    def raw(self, descriptor: Descriptor) -> bytes | memoryview:
        """The stored bytes, unchecked; ``NotFound`` where a log does not give them."""
        span = _span(descriptor).span
        if isinstance(span, StoredSpan):
            return span.raw()
        raise NotFound(f"The stored bytes of {descriptor.location} cannot be read from here.")


class SlotQueue:
    """A slot of a log as a queue; see :class:`~strandline.log.queue.contract.Queue`. Safe in threads once claimed.

    A batch is what a plan gives in one piece: a frame of a write-ahead log, or a part of a segment. Its sequence is the
    offset of its last record, so that the slot's position is one past the last acknowledged sequence, wherever a batch
    begins after a restart.
    """

    def __init__(
        self,
        log: Log,
        slot: str = "default",
        *,
        start: Start = "retained",
        url: str,
        letters: ObjectStore | None,
        clock: Clock,
    ) -> None:
        """Use the slot of this name; nothing is read or written yet. ``letters`` is the store of dead letters."""
        self._log = log
        self.url = url
        self.slot = rules.check_name(slot)
        self._start = start
        self._letters = letters
        self._clock = clock
        self._claimed: Slot | None = None
        self._holder = ""
        self._reached: Cursor | None = None
        """The cursor that the slot had reached under this claim."""
        self._given: Cursor | None = None
        """The cursor after the last batch that was given: with it the log's history is checked."""
        self._acknowledged = 0

    def __repr__(self) -> str:
        return f"SlotQueue({self._log!r}, {self.slot!r})"

    # --- claiming -----------------------------------------------------------------------------------------------

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer of the slot, which is created if there is none; returns the next offset.

        With ``last_acked``, an offset, the slot is moved right after it, ahead or back; ``InvalidInput`` if there is
        no such record yet, ``CursorExpired`` if the one after it is deleted. ``SlotInvalid`` if the slot was
        invalidated: only a reset makes it valid again. None of these changes the slot or its holder.
        """
        self._create_if_missing(last_acked)
        for _ in range(MOST_CLAIMS):
            self._claimed, self._holder = self._log.slots.claim(self.slot, holder), holder
            self._reached = None
            state = self._own_state()
            wanted = state.position if last_acked is None else last_acked + 1
            if wanted < state.position:
                # Moving back must be pinned before it counts, and that fences this claim, too.
                self._log.slots.reset(self.slot, wanted)
                continue
            if wanted > state.position:
                self._advance(self._log.cursor_at(wanted))
            self._reached = Cursor(self._log.log_id, wanted)
            return wanted
        raise never_claimed(self._where)

    def _create_if_missing(self, last_acked: int | None) -> None:
        """Check before claiming, so that an impossible request fences no consumer."""
        if last_acked is not None:
            self._check_last(last_acked)
        try:
            check_usable(self._log.slots.get(self.slot), self.slot, self.url)
        except NotFound:
            position = self._log.position_of(self._start) if last_acked is None else last_acked + 1
            try:
                self._log.slots.create(self.slot, position, lifetime=NEWCOMER_SECONDS)
            except AlreadyExists:
                check_usable(self._log.slots.get(self.slot), self.slot, self.url)  # another consumer was faster

    def _check_last(self, last_acked: int) -> None:
        bounds = self._log.bounds()
        if not 0 <= last_acked < bounds.next:
            raise InvalidInput(
                f"last_acked={last_acked} is no record of {self.url}, whose next one will be {bounds.next}: pass the "
                "sequence of a batch that was acknowledged, or None."
            )
        if last_acked + 1 < bounds.first:
            raise CursorExpired(
                f"Offset {last_acked + 1} of {self.url} is no longer retained (the log begins at {bounds.first}): "
                "bootstrap the consumer again."
            )

    @property
    def _where(self) -> str:
        return f"Slot {self.slot!r} of {self.url}"

    @property
    def _own(self) -> Slot:
        if self._claimed is None:
            raise InvalidInput(f"{self._where} was not claimed yet: open a Consumer on it.")
        return self._claimed

    def _own_state(self) -> SlotState:
        """The slot, if this consumer still holds it and it is valid; ``Fenced`` or ``SlotInvalid`` otherwise.

        A new primary may have an older position of the slot: then it is moved up again, if the log is the same up to
        there; ``Diverged`` if it is not.
        """
        slot, reached = self._own, self._reached  # read first: another thread may be acknowledging
        state = self._held(slot)
        if reached is not None and state.position < reached.next:
            self._planned(reached, Limit(batches=1))
            self._advance(reached)
            state = self._held(slot)
        return state

    def _held(self, slot: Slot) -> SlotState:
        try:
            state = slot.state()  # it may get a new epoch by that, from a new primary
        except NotFound as error:
            raise self._gone() from error
        rules.check_held(state, holder=self._holder, epoch=slot.epoch)
        return state

    def _gone(self) -> SlotInvalid:
        last = -1 if self._reached is None else self._reached.next - 1
        return SlotInvalid(
            f"{self._where} is gone: it was dropped, or another node leads now, which does not know it. Open a new "
            f"consumer with last_acked={last} to continue after what this one has acknowledged."
        )

    # --- reading ------------------------------------------------------------------------------------------------

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """Consecutive batches from an offset on; ``Fenced``, or ``SlotInvalid`` if nothing pins them any more."""
        end = self._log.end().next
        state = self._own_state()  # after the end: everything below it was pinned when it was read
        self._check_given(since)
        found = self._planned(self._cursor(since), Limit(batches=None if limit is None else max(1, limit)))[:limit]
        if found and (self._given is None or found[-1].next > self._given.next):
            self._given = cursor_after(self._cursor(since), found[-1])
        return PeekedBatches(
            tuple(map(self._descriptor, found)),
            length=max(0, end - max(state.position, self._acknowledged)),
            records=max(0, end - state.position),
        )

    def _cursor(self, offset: int) -> Cursor:
        given = self._given
        return given if given is not None and given.next == offset else Cursor(self._log.log_id, offset)

    def _planned(self, since: Cursor, limit: Limit) -> Sequence[Span]:
        try:
            return self._log.plan(since, limit)
        except Diverged as error:
            raise Diverged(
                f"{self.url} has another history than this consumer was given, up to offset {since.next}: the log was "
                "restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done with batches "
                f"of the other history, and open a new consumer. {error}"
            ) from error

    def _check_given(self, since: int) -> None:
        """``Diverged`` if the last batch that was given is not the log's any more."""
        given = self._given
        if given is not None and given.next != since:
            self._planned(given, Limit(batches=1))

    def _descriptor(self, span: Span) -> SpanDescriptor:
        where = f"{self.url} offsets {span.first} to {span.next - 1}"
        end = cursor_after(Cursor(self._log.log_id, span.first), span)
        return SpanDescriptor(span.first, span.next - 1, where, span, end.term, end.fingerprint)

    def between(self, first: int, last: int) -> Sequence[Descriptor]:
        """The batches with the offsets ``first`` through ``last``; ``CursorExpired`` if some are gone, ``Fenced``."""
        end = self._log.end().next
        self._own_state()
        if first >= end:
            return ()
        self._check_given(first)
        return tuple(map(self._descriptor, self._planned(self._cursor(first), Limit(upto=min(end, last + 1)))))

    def fetcher(self) -> SpanFetcher:
        """The reader of the batches."""
        return SpanFetcher()

    # --- acknowledging ------------------------------------------------------------------------------------------

    def acknowledge(self, through: Descriptor) -> None:
        """Durably move the slot past this batch; ``Diverged`` if the log has another one in its place."""
        found = _span(through)
        upto = cursor_after(Cursor(self._log.log_id, found.start), found.span)
        self._planned(upto, Limit(batches=1))
        self._advance(upto)
        if self._reached is None or upto.next > self._reached.next:
            self._reached = upto
        self._acknowledged = max(self._acknowledged, upto.next)

    def _advance(self, to: Cursor) -> None:
        try:
            self._own.advance(to)
            self._log.slots.flush()  # positions are written late otherwise, and a crash would deliver them again
        except NotFound as error:
            raise self._gone() from error

    def dead_letter(self, descriptor: Descriptor, reason: str) -> str:
        """Store the batch below ``dead-letter/<slot>/`` of the store that was given for it."""
        if self._letters is None:
            raise Unsupported(no_letters(self.url))
        self._own_state()  # a newer consumer may have passed a missing batch
        folder, now = f"dead-letter/{self.slot}", self._clock.now()
        return keep_letter(self._letters, folder, self.fetcher(), descriptor, reason=reason, now=now)

    def trim(self, pause: float = 0.0) -> None:
        """Touch the slot. The writer of the log, or its node, trims it."""
        self._own.touch()

    def heartbeat(self) -> SlotHeartbeat | None:
        """The heartbeat that keeps the slot alive, also while the consumer is busy; None if nothing limits it now."""
        return SlotHeartbeat(self._own, self._log, clock=self._clock).if_needed()

    def writes(self) -> Writes:
        """Zero: the slot has one writer, so that no write can lose a race."""
        return Writes(0, 0)


def no_letters(url: str) -> str:
    """Why a batch cannot be set aside."""
    return (
        f"{url} has no object store for batches that cannot be read: pass dead_letters=, the address of a folder or "
        "bucket for them. Nothing was changed."
    )


def _span(descriptor: Descriptor) -> SpanDescriptor:
    if not isinstance(descriptor, SpanDescriptor):
        raise InvalidInput(f"{descriptor!r} is no batch of this log: it belongs to another queue.")
    return descriptor
