"""Queue API of an object log: a slot whose position is the acknowledged offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa

from strandline.errors import AlreadyExists, CursorExpired, Diverged, InvalidInput, NotFound, SlotInvalid
from strandline.log.object.head.index import bytes_from, entries_from, entries_from_sequence
from strandline.log.object.log import ObjectLog, ObjectSpan
from strandline.log.object.slots import ObjectSlot
from strandline.log.queue.contract import (
    MOST_CLAIMS,
    GivenBatches,
    PeekedBatches,
    Writes,
    check_usable,
    keep_letter,
    never_claimed,
)
from strandline.log.slots import rules
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor, Start
from strandline.model.head import Descriptor, Entry, Head
from strandline.model.retention import NEWCOMER_SECONDS, SlotState
from strandline.storage.objects.store import ObjectStore


@dataclass(frozen=True, slots=True)
class ObjectLogFetcher:
    """Reads the batches of an object log; see :class:`~strandline.log.queue.contract.Fetcher`."""

    store: ObjectStore

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records with their offsets, read and checked whole."""
        entry = _entry(descriptor)
        return ObjectSpan(self.store, entry, entry.first, entry.next).fetch()

    def raw(self, descriptor: Descriptor) -> bytes | memoryview:
        """The object's bytes, unchecked."""
        return self.store.get(descriptor.location).data


class ObjectLogQueue:
    """A log's slot as a queue; see :class:`~strandline.log.queue.contract.Queue`. Safe in threads once claimed.

    It reads the log's batch objects, and no cold tier: while it holds its slot, they are retained, also after a tierer
    copied them. A follower that used the slot may have left it in the middle of a batch: then that whole batch is
    delivered first, since batches are never split, and replays are harmless.
    """

    def __init__(self, log: ObjectLog, slot: str = "default", *, start: Start = "retained") -> None:
        """Use the slot of this name; nothing is read or written yet.

        ``start`` is where the slot is created if there is none: ``"retained"``, ``"beginning"``,
        ``"now"``, an offset, a time, or a cursor, such as a snapshot's.
        """
        self._log = log
        self._store = log.store
        self._clock = log.clock
        self.url = log.url
        self.slot = rules.check_name(slot)
        self._start = start
        self._chunks = log.chunks
        self._claimed: ObjectSlot | None = None
        self._acknowledged = 0
        self._position = 0  # the offset that the slot had reached under this claim
        self._given = GivenBatches()
        self._seen = 0.0
        self._before = Writes(0, 0)  # of former claims

    def __repr__(self) -> str:
        return f"ObjectLogQueue({self._log!r}, {self.slot!r})"

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer of the slot, which is created if there is none.

        With ``last_acked`` the slot is moved right after that batch, ahead or back; ``InvalidInput`` if that is not
        listed yet, ``CursorExpired`` if the one after it is deleted. ``SlotInvalid`` if the slot was invalidated: only
        a reset makes it valid again. None of these changes the slot or its holder.
        """
        self._create_if_missing(last_acked)
        for _ in range(MOST_CLAIMS):
            slot = self._log.slots.claim(self.slot, holder, hot=True)
            self._take(slot)
            head = self._log.head()
            state = self._own_state()
            first = self._sequence_at(head, state)
            wanted = first if last_acked is None else last_acked + 1
            if wanted < first:
                # Moving back must be pinned before it counts, and that fences this claim, too.
                self._log.slots.reset(self.slot, self._offset_after(head, wanted - 1))
                continue
            self._position, self._acknowledged = state.position, wanted
            if wanted > first:
                self._position = self._offset_after(head, wanted - 1)
                slot.advance(Cursor(self._log.log_id, self._position))
            return wanted
        raise never_claimed(self._where)

    def _create_if_missing(self, last_acked: int | None) -> None:
        """Check before claiming, so that an impossible request fences no consumer."""
        head = self._log.head()
        after = None if last_acked is None else self._offset_after(head, last_acked)
        if self.slot in head.slots:
            try:
                check_usable(self._log.slots.get(self.slot), self.slot, self.url)
            except NotFound:
                pass  # its creator died
            else:
                return
        try:
            position = self._log.position_of(self._start) if after is None else after
            self._log.slots.create(self.slot, position, lifetime=NEWCOMER_SECONDS)
        except AlreadyExists:
            check_usable(self._log.slots.get(self.slot), self.slot, self.url)  # another consumer was faster

    def _take(self, slot: ObjectSlot) -> None:
        self._before = self.writes()
        self._claimed = slot
        self._position = 0
        self._seen = self._clock.monotonic()

    @property
    def _slot(self) -> ObjectSlot:
        if self._claimed is None:
            raise InvalidInput(f"{self._where} was not claimed yet: open a Consumer on it.")
        return self._claimed

    @property
    def _where(self) -> str:
        return f"Slot {self.slot!r} of {self.url}"

    def _own_state(self) -> SlotState:
        """The slot, if this consumer still holds it and it is valid; ``Fenced`` or ``SlotInvalid`` otherwise.

        ``Diverged`` if it is before a position that it had under the same claim: only a restore causes that.
        """
        slot, known = self._slot, self._position  # read first: another thread may be acknowledging
        slots = self._log.slots
        # Not through the claimed slot's own cell, which another thread may use to acknowledge.
        state = slots.read(slots.cell(self.slot), self.slot)  # also of a slot that was dropped
        rules.check_held(state, holder=slot.holder, epoch=slot.epoch)
        if state.position < known:
            raise Diverged(
                f"{self._where} is at {state.position}, but this consumer had moved it to {known}: the log was "
                "restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done with batches "
                "of the other history, and open a new consumer, which begins at the slot's position."
            )
        return state

    # --- from sequences to offsets and back --------------------------------------------------------------------

    def _sequence_at(self, head: Head, state: SlotState) -> int:
        if state.position < head.floor:
            raise SlotInvalid(
                f"{self._where} is at {state.position}, but the log begins at {head.floor} (wal-removed): choose "
                f"where to resume, and reset it ('strandline slots reset')."
            )
        for entry in entries_from(head, state.position, self._chunks):
            return entry.sequence
        return head.next_sequence

    def _offset_after(self, head: Head, sequence: int) -> int:
        """The offset at which the batch after this one begins, or will begin."""
        if not 0 <= sequence < head.next_sequence:
            raise InvalidInput(
                f"last_acked={sequence} is no batch of {self.url}, whose next one will be {head.next_sequence}: pass "
                "the sequence of a batch that was acknowledged, or None."
            )
        for entry in self._entries(head, sequence + 1):
            return max(entry.first, head.floor)
        return head.next_offset

    def _entries(self, head: Head, first: int) -> Iterator[Entry]:
        """The listed batches from this sequence on; ``CursorExpired`` if it is deleted: no batch is skipped."""
        if first > head.next_sequence:
            raise Diverged(
                f"Batch {first} is past the end of {self.url}, whose next one is {head.next_sequence}: the log was "
                "restored or replaced. Reset the slot to where its consumer should resume."
            )
        expected = first
        for entry in entries_from_sequence(head, first, self._chunks):
            if entry.sequence != expected or entry.next <= head.floor:
                raise CursorExpired(
                    f"Batch {expected} of {self.url} is no longer retained (the log begins at offset {head.floor}): "
                    "bootstrap the consumer again."
                )
            yield entry
            expected += 1

    def _check_history(self, head: Head) -> None:
        def listed(sequence: int) -> Entry | None:
            found = next(entries_from_sequence(head, sequence, self._chunks), None)
            return found if found is not None and found.sequence == sequence else None

        self._given.check(self.url, head.next_sequence, listed)

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """Consecutive listed batches from ``since`` on; ``Fenced``, or ``SlotInvalid`` if nothing pins them any more.

        Also counts as a heartbeat of the slot.
        """
        head = self._log.head()
        state = self._own_state()  # after the head: its batches were pinned when it was read
        self._check_history(head)
        idle = self._log.identity.limits.idle_seconds
        if idle and self._clock.monotonic() - self._seen >= idle / 3:
            self._slot.touch()
            self._seen = self._clock.monotonic()
        found = tuple(islice(self._entries(head, since), limit))
        self._given.note(found)
        return PeekedBatches(
            found,
            length=max(0, head.next_sequence - self._acknowledged),
            records=head.next_offset - state.position,
            size=bytes_from(head, state.position, self._chunks),
        )

    def between(self, first: int, last: int) -> Sequence[Descriptor]:
        """The listed batches ``first`` through ``last``; ``CursorExpired`` if some are deleted, ``Fenced``."""
        head = self._log.head()
        self._own_state()
        self._check_history(head)
        return tuple(islice(self._entries(head, min(first, head.next_sequence)), last + 1 - first))

    def fetcher(self) -> ObjectLogFetcher:
        """The reader for the batches of this log."""
        return ObjectLogFetcher(self._store)

    def acknowledge(self, through: Descriptor) -> None:
        """Durably move the slot past this batch; ``Diverged`` if the log has another one in its place."""
        entry = _entry(through)
        self._slot.advance(Cursor(self._log.log_id, entry.next, fingerprint=entry.fingerprint))
        self._position = max(self._position, entry.next)
        self._acknowledged = max(self._acknowledged, entry.sequence + 1)

    def dead_letter(self, descriptor: Descriptor, reason: str) -> str:
        """Store the batch below ``dead-letter/<slot>/``; ``Fenced`` or ``SlotInvalid`` if the slot is lost."""
        self._own_state()  # a newer consumer may have passed a missing batch
        folder, now = f"dead-letter/{self.slot}", self._clock.now()
        return keep_letter(self._store, folder, self.fetcher(), descriptor, reason=reason, now=now)

    def trim(self, pause: float = 0.0) -> None:
        """Touch the slot, then trim the log."""
        try:
            self._slot.touch()
        finally:
            self._log.trim(pause=pause)

    def heartbeat(self) -> SlotHeartbeat | None:
        """The heartbeat that keeps the slot alive, also while the consumer is busy; None if nothing limits it now."""
        # A cell of its own: another thread may use the claimed slot's to acknowledge.
        slot = replace(self._slot, cell=self._log.slots.cell(self.slot))
        return SlotHeartbeat(slot, self._log, clock=self._clock).if_needed()

    def writes(self) -> Writes:
        """Writes of the slot's cell so far."""
        if self._claimed is None:
            return self._before
        cell = self._claimed.cell
        return Writes(self._before.done + cell.writes + cell.conflicts, self._before.lost + cell.conflicts)


def _entry(descriptor: Descriptor) -> Entry:
    if not isinstance(descriptor, Entry):
        raise InvalidInput(f"{descriptor!r} is no batch of an object log: it belongs to another queue.")
    return descriptor
