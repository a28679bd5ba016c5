"""Queue API of every log with slots: batches are the spans of its plan, numbered by the offset of their last record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from strandline.errors import (
    AlreadyExists,
    Contended,
    CorruptData,
    CursorExpired,
    Diverged,
    InvalidInput,
    NotFound,
    SlotInvalid,
    Unsupported,
)
from strandline.log.contract import Log, LogReading, Slot
from strandline.log.queue.contract import Fetcher, PeekedBatches, Writes, check_usable, keep_letter
from strandline.log.read.planning import cursor_after
from strandline.log.slots import rules
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor, Limit, Span, Start
from strandline.model.head import Descriptor, MetadataRange
from strandline.model.retention import NEWCOMER_SECONDS, SlotState
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore

_CLAIMS: Final = 8
"""How often opening is repeated because another consumer moved the slot meanwhile."""


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
        raw: Callable[[], bytes | memoryview] | None = getattr(_span(descriptor).span, "raw", None)
        if raw is None:
            raise NotFound(f"The stored bytes of {descriptor.location} cannot be read from here.")
        return raw()


class SlotQueue:
    """A slot of a log as a queue; see :class:`~strandline.log.queue.contract.Queue`. Safe in threads once claimed.

    A batch is what a plan gives in one piece: a frame of a write-ahead log, or a part of a segment. Its sequence is the
    offset of its last record, so that the slot's position is one past the last acknowledged sequence, wherever a batch
    begins after a restart. An object log numbers its batches instead
    (:class:`~strandline.log.queue.log_queue.ObjectLogQueue`).
    """

    def __init__(
        self,
        log: Log,
        slot: str = "default",
        *,
        start: Start = "retained",
        url: str,
        letters: ObjectStore | None,
        env: Env,
    ) -> None:
        """Use the slot of this name; nothing is read or written yet. ``letters`` is the store of dead letters.

        ``start`` is where the slot is created if there is none: ``"retained"``, ``"beginning"``, ``"now"``, an offset,
        a time, or a cursor, such as a snapshot's.
        """
        self._log = log
        self.url = url
        self.slot = rules.check_name(slot)
        self._start = start
        self._letters = letters
        self._env = env
        self._claimed: Slot | None = None
        self._holder = ""
        self._reached: Cursor | None = None
        """The cursor that the slot had reached under this claim."""
        self._given: tuple[Cursor, int] | None = None
        """The cursor after the last batch that was given, which proves the log's history, and the next sequence."""
        self._acknowledged = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._log!r}, {self.slot!r})"

    # --- claiming -----------------------------------------------------------------------------------------------

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer of the slot, which is created if there is none; returns the next sequence.

        With ``last_acked`` the slot is moved right after that batch, ahead or back; ``InvalidInput`` if there is no
        such batch yet, ``CursorExpired`` if the one after it is deleted. ``SlotInvalid`` if the slot was invalidated:
        only a reset makes it valid again. None of these changes the slot or its holder.
        """
        self._create_if_missing(last_acked)
        for _ in range(_CLAIMS):
            self._claimed, self._holder, self._reached = self._claim(holder), holder, None
            log, end = self._look()
            position = self._own_state().position
            first = self._sequence_at(log, position)
            wanted = first if last_acked is None else last_acked + 1
            if wanted < first:
                # Moving back must be pinned before it counts, and that fences this claim, too.
                self._log.slots.reset(self.slot, self._offset_after(log, end, wanted - 1))
                continue
            if wanted > first:
                position = self._offset_after(log, end, wanted - 1)
                self._advance(self._log.cursor_at(position))
            self._reached, self._acknowledged = Cursor(self._log.log_id, position), wanted
            return wanted
        raise Contended(f"{self._where} was claimed by others at each of {_CLAIMS} tries to open it; try again.")

    def _create_if_missing(self, last_acked: int | None) -> None:
        """Check before claiming, so that an impossible request fences no consumer."""
        log, end = self._look()
        after = None if last_acked is None else self._offset_after(log, end, last_acked)
        if self._may_exist(log):
            try:
                check_usable(self._log.slots.get(self.slot), self.slot, self.url)
            except NotFound:
                pass  # or its creator died
            else:
                return
        try:
            position = self._log.position_of(self._start) if after is None else after
            self._log.slots.create(self.slot, position, lifetime=NEWCOMER_SECONDS)
        except AlreadyExists:
            check_usable(self._log.slots.get(self.slot), self.slot, self.url)  # another consumer was faster

    def _offset_after(self, log: LogReading, end: int, last_acked: int) -> int:
        """The offset at which the batch after this one begins, or will begin."""
        following = self._sequence_at(log, end)
        if not 0 <= last_acked < following:
            raise InvalidInput(
                f"last_acked={last_acked} is no batch of {self.url}, whose next one will be {following}: pass the "
                "sequence of a batch that was acknowledged, or None."
            )
        offset, first = self._offset_at(log, last_acked + 1), log.bounds().first
        if offset < first:
            raise CursorExpired(
                f"Batch {last_acked + 1} of {self.url} is no longer retained (the log begins at offset {first}): "
                "bootstrap the consumer again."
            )
        return offset

    # --- what differs in an object log ---------------------------------------------------------------------------

    def _look(self) -> tuple[LogReading, int]:
        """The log as one call reads it, and its end."""
        return self._log, self._log.end().next

    def _may_exist(self, log: LogReading) -> bool:
        """False if the slot does not exist, whatever is stored of it."""
        return True

    def _claim(self, holder: str) -> Slot:
        return self._log.slots.claim(self.slot, holder)

    def _sequence_at(self, log: LogReading, offset: int) -> int:
        """The sequence at which a consumer at this offset goes on."""
        return offset

    def _offset_at(self, log: LogReading, sequence: int) -> int:
        """The offset at which a consumer at this sequence goes on."""
        return sequence

    def _size_from(self, log: LogReading, offset: int) -> int | None:
        """The stored bytes from an offset on; None if the log does not know that."""
        return None

    def _descriptor(self, span: Span) -> Descriptor:
        where = f"{self.url} offsets {span.first} to {span.next - 1}"
        end = cursor_after(Cursor(self._log.log_id, span.first), span)
        return SpanDescriptor(span.first, span.next - 1, where, span, end.term, end.fingerprint)

    def _cursor_after(self, descriptor: Descriptor) -> Cursor:
        """The cursor after a batch; ``Diverged`` if the log has another one in its place."""
        found = _span(descriptor)
        upto = cursor_after(Cursor(self._log.log_id, found.start), found.span)
        self._planned(self._log, upto, Limit(batches=1))
        return upto

    def _check_moved_back(self, reached: Cursor, position: int) -> None:
        """``Diverged`` unless the log is the same up to what was reached: a new primary may have an older position."""
        self._planned(self._log, reached, Limit(batches=1))

    def fetcher(self) -> Fetcher:
        """The reader of the batches."""
        return SpanFetcher()

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

        ``Diverged`` if it is before a position that it had under the same claim, unless a new primary may have an older
        one: then it is moved up again, if the log is the same up to there.
        """
        slot, reached = self._own, self._reached  # read first: another thread may be acknowledging
        state = self._held(slot)
        if reached is not None and state.position < reached.next:
            self._check_moved_back(reached, state.position)
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
        return SlotInvalid(
            f"{self._where} is gone: it was dropped, or another node leads now, which does not know it. Open a new "
            f"consumer with last_acked={self._acknowledged - 1} to continue after what this one has acknowledged."
        )

    # --- reading ------------------------------------------------------------------------------------------------

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """Consecutive batches from ``since`` on; ``Fenced``, or ``SlotInvalid`` if nothing pins them any more."""
        log, end = self._look()
        state = self._own_state()  # after the look: everything below the end was pinned when it was read
        at = self._cursor(log, since)
        found = self._planned(log, at, Limit(batches=None if limit is None else max(1, limit)))[:limit]
        descriptors = tuple(map(self._descriptor, found))
        if found and (self._given is None or found[-1].next > self._given[0].next):
            self._given = cursor_after(at, found[-1]), descriptors[-1].sequence + 1
        return PeekedBatches(
            descriptors,
            length=max(0, self._sequence_at(log, end) - self._acknowledged),
            records=max(0, end - state.position),
            size=self._size_from(log, state.position),
            ended=not found and log.ended(at.next),
        )

    def between(self, first: int, last: int) -> Sequence[Descriptor]:
        """The batches ``first`` through ``last``; ``CursorExpired`` if some are deleted, ``Fenced``."""
        log, end = self._look()
        self._own_state()
        following = self._sequence_at(log, end)
        if first >= following:
            return ()
        upto = end if last + 1 >= following else self._offset_at(log, last + 1)
        return tuple(map(self._descriptor, self._planned(log, self._cursor(log, first), Limit(upto=upto))))

    def _cursor(self, log: LogReading, sequence: int) -> Cursor:
        """The cursor at a sequence; ``Diverged`` if the last batch that was given is not the log's any more."""
        if self._given is not None:
            given, following = self._given
            if following == sequence:
                return given
            self._planned(log, given, Limit(batches=1))
        return Cursor(self._log.log_id, self._offset_at(log, sequence))

    def _planned(self, log: LogReading, since: Cursor, limit: Limit) -> Sequence[Span]:
        try:
            return log.plan(since, limit)
        except Diverged as error:
            raise Diverged(
                f"{self.url} has another history than this consumer was given, up to offset {since.next}: the log was "
                "restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done with batches "
                f"of the other history, and open a new consumer. {error}"
            ) from error

    # --- acknowledging ------------------------------------------------------------------------------------------

    def acknowledge(self, through: Descriptor) -> None:
        """Durably move the slot past this batch; ``Diverged`` if the log has another one in its place."""
        upto = self._cursor_after(through)
        self._advance(upto)
        if self._reached is None or upto.next > self._reached.next:
            self._reached = upto
        self._acknowledged = max(self._acknowledged, through.sequence + 1)

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
        folder, now = f"dead-letter/{self.slot}", self._env.clock.now()
        return keep_letter(self._letters, folder, self.fetcher(), descriptor, reason=reason, now=now)

    def trim(self, pause: float = 0.0) -> None:
        """Touch the slot. The writer of the log, or its node, trims it."""
        self._own.touch()

    def heartbeat(self) -> SlotHeartbeat | None:
        """The heartbeat that keeps the slot alive, also while the consumer is busy; None if nothing limits it now."""
        return SlotHeartbeat(self._own, self._log, env=self._env).if_needed()

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
