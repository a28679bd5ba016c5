"""In-memory log: the contract in its simplest form, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any
from uuid import UUID

import pyarrow as pa

from strandline.errors import CursorExpired
from strandline.formats.json.value_versions import ValueVersion
from strandline.log.contract import Handle, Settled
from strandline.log.object.head.edits import BatchListing, apply_spills, list_batches, plan_spills, receipt_of, seal_log
from strandline.log.object.head.head_log import HeadLog
from strandline.log.object.head.index import entries_from
from strandline.log.produce.appending import Produces, Shipping, shipping_by
from strandline.log.read.planning import clipped, known_columns
from strandline.log.slots import rules
from strandline.log.slots.table import SlotTable
from strandline.model.arguments import Timeout, checked
from strandline.model.cursor import Cursor
from strandline.model.head import ChunkRef, Entry, Head, WriterId
from strandline.model.records import RecordSource, conform, with_offsets
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.values.contract import Codec
from strandline.values.recorded import newest, with_version


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """A range of offsets in one in-memory batch."""

    batches: tuple[pa.RecordBatch, ...]
    first: int
    next: int
    size: int
    fingerprint: int
    """Identifies the batch among all that could be listed there."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """The span's records with their offsets."""
        kept = clipped(list(self.batches), self.first, self.next)
        return kept if columns is None else [batch.select(known_columns(columns)) for batch in kept]


class MemoryChunks(dict[ChunkRef, Any]):
    """Chunks of a listing, in memory."""

    def read(self, reference: ChunkRef, level: int) -> tuple[Any, ...]:
        """The entries of a chunk of level 0, or the references in one of a level above."""
        return tuple(self[reference])


@bound_to_process(keep=("log_id",))
@checked
class MemoryLog(HeadLog[MemorySpan], Produces, Closing):
    """A log that ends with its process. Satisfies :class:`~strandline.log.contract.Log`; safe in threads."""

    chunks: MemoryChunks

    def __init__(self, *, value: Codec | None = None, env: Env = SYSTEM) -> None:
        self._values = () if value is None else with_version((), value, "a log in memory")
        self._env = env
        self._head = Head(env.chance.uuid())
        self.chunks = MemoryChunks()
        self._batches: dict[int, tuple[pa.RecordBatch, ...]] = {}
        self._changed = threading.Condition()
        self._origin = Origin("A log in memory", self)
        self.slots = SlotTable(self.log_id, (), self.bounds, origin=self._origin, env=env)

    def close(self) -> None:
        """Does nothing: there is nothing to close. Other logs have something to close, so all have this method."""

    @property
    def log_id(self) -> UUID:
        """The log's identity."""
        return self._head.log_id

    @property
    def value(self) -> Codec | None:
        """The codec of the log's values, in its newest version; None if values are plain bytes."""
        return newest(self._values, "a log in memory")

    @property
    def value_versions(self) -> tuple[ValueVersion, ...]:
        """All versions of the value format; none if values are plain bytes."""
        return self._values

    def evolve_value(self, value: Codec) -> Codec:
        """Record a new version of the value format; ``SchemaRefused`` unless fields are new or become wider."""
        with self._changed:
            self._values = with_version(self._values, value, "a log in memory")
        return value

    def head(self) -> Head:
        """The head as it is now."""
        return self._head

    def _span(self, entry: Entry, first: int, end: int) -> MemorySpan:
        batches = self._batches.get(entry.sequence)
        if batches is None:
            raise CursorExpired(f"Offset {first} was trimmed just now: bootstrap the consumer again.")
        return MemorySpan(batches, first, end, entry.size, entry.fingerprint)

    def append(
        self, batch: RecordSource, *, writer: WriterId, number: int, expect: int | None = None, seal: bool = False
    ) -> Handle:
        """Append a batch, whole or not at all."""
        batches = conform(batch, now=self._env.clock.now())
        count, size = sum(page.num_rows for page in batches), sum(page.nbytes for page in batches)
        with self._changed:
            head = self._head
            listing = BatchListing(
                "", head.generation, count, size, 0, 0, writer, number, head.next_sequence, (), expect, seal
            )
            listed = list_batches(head, [listing], self._env.clock.now())
            if listed is not head:
                # The records before the head: planning takes no lock, and reads the head first.
                self._batches[head.next_sequence] = tuple(with_offsets(batches, head.next_offset))
                spills = plan_spills(listed)
                self.chunks.update({spill.reference: spill.items for spill in spills})
                self._head = apply_spills(listed, spills)
                self._changed.notify_all()
            return Settled(receipt_of(self._head, writer, number, count), repeated=listed is head)

    def seal(self) -> Cursor:
        """End the log, and return the cursor of its end: no record is ever appended there. Idempotent."""
        with self._changed:
            self._head = seal_log(self._head)
            self._changed.notify_all()
            return self.end()

    def _shipping(self, writer: WriterId | None, compression: str | None) -> Shipping:
        return shipping_by(self.append, writer, self.last_number, env=self._env)

    def last_number(self, writer: WriterId) -> int | None:
        """The number of the writer's last append; None if the log does not know the writer."""
        last = self._head.writers.get(writer)
        return None if last is None else last.number

    def wait(self, past: Cursor, timeout: Timeout) -> bool:
        """Block until the log reaches past the cursor or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._head.sealed or self._head.next_offset > past.next, timeout)
            return self._head.next_offset > past.next

    def trim(self, floor: int) -> None:
        """Delete everything below an offset, whatever the slots say: for tests of expired cursors."""
        with self._changed:
            before = self._head
            self._head = replace(before, floor=rules.check_position(floor, self.bounds()))
            gone = takewhile(lambda entry: entry.next <= floor, entries_from(before, before.floor, self.chunks))
            for entry in gone:
                del self._batches[entry.sequence]
