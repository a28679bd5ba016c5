"""In-memory log: the contract in its simplest form, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import pyarrow as pa

from strandline.errors import NotFound
from strandline.log import slots as rules
from strandline.log.contract import Handle, Receipt
from strandline.log.object.head.edits import BatchListing, bounds_of, list_batches, pin_slot, settle_slot, unlist_slot
from strandline.log.object.produce.handles import settled
from strandline.log.planning import clipped, entries_after, known_columns, plan_entries
from strandline.log.reading import read_between
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import NO_LIMIT, Bounds, Cursor, Limit, Start
from strandline.model.head import Head, WriterId
from strandline.model.records import RecordSource, conform, with_offsets
from strandline.model.retention import SlotState
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock
from strandline.storage.fork_check import Origin, bound_to_process


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Offsets of one batch that is in memory."""

    batches: tuple[pa.RecordBatch, ...]
    first: int
    next: int
    size: int
    fingerprint: int
    """Tells its batch from every other that could be listed there."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """The span's records with their offsets."""
        kept = clipped(list(self.batches), self.first, self.next)
        return kept if columns is None else [batch.select(known_columns(columns)) for batch in kept]


@bound_to_process(keep=("log_id",))
@checked
class MemoryLog:
    """A log that ends with its process. Satisfies :class:`~strandline.log.contract.Log`; safe in threads."""

    def __init__(self, *, clock: Clock = CLOCK, chance: Chance = CHANCE) -> None:
        """An empty log with a fresh identity."""
        self._clock = clock
        self._head = Head(chance.uuid())
        self._batches: dict[int, tuple[pa.RecordBatch, ...]] = {}
        self._slots: dict[str, SlotState] = {}
        self._changed = threading.Condition()
        self._origin = Origin("A log in memory", self)

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._head.log_id

    def append(self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None) -> Handle:
        """Append a batch, whole or not at all."""
        batches = conform(batch, now=self._clock.now())
        count, size = sum(page.num_rows for page in batches), sum(page.nbytes for page in batches)
        with self._changed:
            head = self._head
            listing = BatchListing(
                "", head.generation, count, size, 0, 0, writer, number, head.next_sequence, (), expect
            )
            listed = list_batches(head, [listing], self._clock.now())
            if listed is not head:
                # The records before the head: planning takes no lock, and goes by the head.
                self._batches[head.next_sequence] = tuple(with_offsets(batches, head.next_offset))
                self._head = listed
                self._changed.notify_all()
            last = self._head.writers[writer]
        if last.number == number:
            return settled(Receipt(last.first, last.count))
        places = {
            entry.number: Receipt(entry.first, entry.count) for entry in self._head.tail if entry.writer == writer
        }
        return settled(places.get(number, Receipt(None, count)))

    def bounds(self) -> Bounds:
        """The first retained and the next offset."""
        return bounds_of(self._head)

    def start(self) -> Cursor:
        """The cursor before everything that is retained."""
        return Cursor(self.log_id, self.bounds().first)

    def end(self) -> Cursor:
        """The cursor behind everything that is listed now."""
        return self.cursor_at(self._head.next_offset)

    def cursor_at(self, offset: int) -> Cursor:
        """The cursor behind everything below ``offset``, with the fingerprint of the batch there."""
        head = self._head
        if offset <= bounds_of(head).first:
            return Cursor(self.log_id, offset)
        found = (entry.fingerprint for entry in head.tail if entry.first < offset <= entry.next)
        return Cursor(self.log_id, offset, fingerprint=next(found, None))

    def position_of(self, start: Start) -> int:
        """The offset at which a newcomer begins that asks for this."""
        head = self._head

        def listed_since(time: int) -> int | None:
            return next((entry.first for entry in head.tail if entry.listed >= time), None)

        return rules.position_of(start, self.log_id, bounds_of(head), listed_since)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> list[MemorySpan]:
        """What to fetch after a cursor."""
        head = self._head
        bounds = bounds_of(head)
        rules.check_cursor(since, Cursor(self.log_id, 0), bounds)
        entries = entries_after(
            since, bounds.first, lambda offset: (entry for entry in head.tail if entry.next > offset)
        )
        return [
            MemorySpan(self._batches[entry.sequence], first, end, entry.size, entry.fingerprint)
            for entry, first, end in plan_entries(entries, since.next, limit)
        ]

    def read(
        self, since: Start | None = None, *, upto: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Batches with offsets, in order, from ``since`` (all that is retained) up to ``upto`` (the end as of now)."""
        return read_between(self, since, upto, columns)

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the log reaches past the cursor or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._head.next_offset > past.next, timeout)

    def trim(self, floor: int) -> None:
        """Forget everything below an offset, whatever the slots say: for tests of expired cursors."""
        with self._changed:
            self._head = replace(self._head, floor=rules.check_position(floor, self.bounds()))

    # --- slots -------------------------------------------------------------------------------------------------

    def create_slot(self, name: str, position: int) -> SlotState:
        """Create a slot that pins everything from ``position`` on."""
        with self._changed:
            self._head = pin_slot(self._head, rules.check_name(name), position)
            dropped = self._slots.get(name)
            epoch = 0 if dropped is None else dropped.epoch + 1  # whoever held the name before stays fenced
            self._slots[name] = SlotState(name, position, holder=None, epoch=epoch, last_seen=self._clock.now())
            self._head = settle_slot(self._head, name, self._head.membership)
            return self._slots[name]

    def reset_slot(self, name: str, position: int) -> SlotState:
        """Put a slot elsewhere, back or ahead, and make it valid again; whoever holds it is fenced."""
        with self._changed:
            before = self.slot(name)
            rules.check_position(position, self.bounds())
            self._slots[name] = rules.reset(before, before, position, self._clock.now())
            return self._slots[name]

    def drop_slot(self, name: str) -> None:
        """Remove a slot; what only it needed may be trimmed from now on."""
        with self._changed:
            self._slots[name] = rules.drop(self.slot(name), self.slot(name).epoch)
            self._head = unlist_slot(self._head, name)

    def claim_slot(self, name: str, holder: str) -> MemorySlot:
        """Become the slot's holder."""
        with self._changed:
            self._slots[name] = rules.claim(self.slot(name), holder, self._clock.now())
            return MemorySlot(self, name, holder, self._slots[name].epoch)

    def slot(self, name: str) -> SlotState:
        """One slot's state, or ``NotFound``."""
        if name not in self._head.slots:
            raise NotFound(f"There is no slot {name!r}: create it first.")
        return self._slots[name]

    def slots(self) -> list[SlotState]:
        """All slots, by name."""
        return [self._slots[name] for name in sorted(self._head.slots)]

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs."""
        return rules.floor(self.slots())

    def advance_slot(self, name: str, holder: str, epoch: int, to: Cursor) -> None:
        """What a claimed slot's ``advance`` does."""
        with self._changed:
            rules.check_cursor(to, Cursor(self.log_id, 0), Bounds(0, self._head.next_offset))
            before, now = self.slot(name), self._clock.now()
            self._slots[name] = rules.advance(before, holder=holder, epoch=epoch, to=to.next, now=now)

    def touch_slot(self, name: str, epoch: int) -> None:
        """What a claimed slot's ``touch`` does."""
        with self._changed:
            self._slots[name] = rules.seen(self.slot(name), epoch=epoch, now=self._clock.now())


@checked
@dataclass(frozen=True, slots=True)
class MemorySlot:
    """A claimed slot of a memory log."""

    log: MemoryLog
    name: str
    holder: str
    epoch: int

    def state(self) -> SlotState:
        """What is stored now."""
        return self.log.slot(self.name)

    def advance(self, to: Cursor) -> None:
        """Move the position up."""
        self.log.advance_slot(self.name, self.holder, self.epoch, to)

    def touch(self) -> None:
        """Say that the holder is alive."""
        self.log.touch_slot(self.name, self.epoch)
