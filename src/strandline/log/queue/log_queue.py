"""Queue API of an object log: its batches have the numbers of their listing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, cast

import pyarrow as pa

from strandline.errors import CursorExpired, Diverged, InvalidInput, SlotInvalid
from strandline.log.contract import LogReading
from strandline.log.object.head.head_log import HeadView
from strandline.log.object.head.index import bytes_from, entries_from, entries_from_sequence
from strandline.log.object.log import ObjectLog, ObjectSpan
from strandline.log.object.slots import ObjectSlot
from strandline.log.queue.contract import PeekedBatches, Writes
from strandline.log.queue.slot_queue import SlotQueue
from strandline.model.cursor import Cursor, Span, Start
from strandline.model.head import Descriptor, Entry, Head
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


class ObjectLogQueue(SlotQueue):
    """A slot of an object log as a queue; see :class:`~strandline.log.queue.contract.Queue`.

    It reads the log's batch objects, and no cold tier: while it holds its slot, they are retained, also after a tierer
    copied them. A follower that used the slot may have left it in the middle of a batch: then that whole batch is
    delivered first, since batches are never split, and replays are harmless.
    """

    _log: ObjectLog

    def __init__(self, log: ObjectLog, slot: str = "default", *, start: Start = "retained") -> None:
        """As :class:`SlotQueue`; dead letters go to ``dead-letter/<slot>/`` of the log itself."""
        super().__init__(log, slot, start=start, url=log.url, letters=log.store, env=log.env)
        self._seen = 0.0
        self._before = Writes(0, 0)  # of former claims

    def _look(self) -> tuple[LogReading, int]:
        view = HeadView(self._log)
        return view, view.head().next_offset

    def _may_exist(self, log: LogReading) -> bool:
        return self.slot in _head_of(log).slots

    def _claim(self, holder: str) -> ObjectSlot:
        slot = self._log.slots.claim(self.slot, holder, hot=True)
        self._before, self._seen = self.writes(), self._env.clock.monotonic()
        return slot

    def _sequence_at(self, log: LogReading, offset: int) -> int:
        head = _head_of(log)
        if offset < head.floor:
            raise SlotInvalid(
                f"{self._where} is at {offset}, but the log begins at {head.floor} (wal-removed): choose "
                f"where to resume, and reset it ('strandline slots reset')."
            )
        entry = next(entries_from(head, offset, self._log.chunks), None)
        return head.next_sequence if entry is None else entry.sequence

    def _offset_at(self, log: LogReading, sequence: int) -> int:
        head = _head_of(log)
        if sequence > head.next_sequence:
            raise Diverged(
                f"Batch {sequence} is past the end of {self.url}, whose next one is {head.next_sequence}: the log was "
                "restored or replaced. Reset the slot to where its consumer should resume."
            )
        if sequence == head.next_sequence:
            return head.next_offset
        entry = next(entries_from_sequence(head, sequence, self._log.chunks), None)
        if entry is None or entry.sequence != sequence or entry.next <= head.floor:
            raise CursorExpired(
                f"Batch {sequence} of {self.url} is no longer retained (the log begins at offset {head.floor}): "
                "bootstrap the consumer again."
            )
        return max(entry.first, head.floor)

    def _size_from(self, log: LogReading, offset: int) -> int:
        return bytes_from(_head_of(log), offset, self._log.chunks)

    def _descriptor(self, span: Span) -> Entry:
        return cast("ObjectSpan", span).entry

    def _cursor_after(self, descriptor: Descriptor) -> Cursor:
        """The cursor after a batch; advancing to it is ``Diverged`` if the log has another one in its place."""
        entry = _entry(descriptor)
        return Cursor(self._log.log_id, entry.next, fingerprint=entry.fingerprint)

    def _check_moved_back(self, reached: Cursor, position: int) -> NoReturn:
        raise Diverged(
            f"{self._where} is at {position}, but this consumer had moved it to {reached.next}: the log was "
            "restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done with batches "
            "of the other history, and open a new consumer, which begins at the slot's position."
        )

    def _gone(self) -> SlotInvalid:
        # Of a dropped slot the cell is still there.
        return SlotInvalid(
            f"{self._where} is gone: the log was restored from a copy that did not have it, or replaced. Undo what was "
            "done with batches of the other history, and open a new consumer."
        )

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """As for any log. Also counts as a heartbeat of the slot."""
        found, idle = super().peek(since, limit), self._log.identity.limits.idle_seconds
        if idle and self._env.clock.monotonic() - self._seen >= idle / 3:
            self._own.touch()
            self._seen = self._env.clock.monotonic()
        return found

    def fetcher(self) -> ObjectLogFetcher:
        """The reader for the batches of this log."""
        return ObjectLogFetcher(self._log.store)

    def trim(self, pause: float = 0.0) -> None:
        """Touch the slot, then trim the log."""
        try:
            super().trim()
        finally:
            self._log.trim(pause=pause)

    def writes(self) -> Writes:
        """Writes of the slot's cell so far."""
        if not isinstance(self._claimed, ObjectSlot):
            return self._before
        cell = self._claimed.cell
        return Writes(self._before.done + cell.writes + cell.conflicts, self._before.lost + cell.conflicts)


def _head_of(log: LogReading) -> Head:
    return cast("HeadView[ObjectSpan]", log).head()


def _entry(descriptor: Descriptor) -> Entry:
    if not isinstance(descriptor, Entry):
        raise InvalidInput(f"{descriptor!r} is no batch of an object log: it belongs to another queue.")
    return descriptor
