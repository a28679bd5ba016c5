"""Batches on their way into a log: built of pages, uploaded, then listed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.formats.batch import BatchInfo, encode_batch
from strandline.formats.block import Compression, Parts, encode_page
from strandline.formats.head import HeadCodec, encode_chunk
from strandline.log.contract import Receipt
from strandline.log.object.edits import Listing, StaleGeneration, apply_spills, list_batches, plan_spills
from strandline.log.object.index import chunk_path
from strandline.model.errors import Contended, Diverged, OutcomeUnknown
from strandline.model.head import Head, MetadataRange, WriterId
from strandline.model.stamp import OpId
from strandline.storage.ambient import Chance, Clock
from strandline.storage.cell import StoreCell
from strandline.storage.store import ObjectStore

PAGE_ROWS: Final = 1 << 16
"""Larger record batches are cut into pages of this many rows, which readers like best."""

_RANGE: Final = 16
"""What a metadata range takes in the head beside its payload."""

_RESOLVES: Final = 5
"""How often an append whose outcome is unknown is asked for again before its caller is told so."""


@dataclass(slots=True)
class Draft:
    """A batch being built. Pages are encoded as they come, so that records are held once.

    ``size`` is what they take encoded, ``plain`` what a reader will take to decode them.
    """

    compression: Compression
    pages: list[Parts] = field(default_factory=list)
    count: int = 0
    size: int = 0
    plain: int = 0
    oldest: int = 0
    newest: int = 0
    metadata: list[MetadataRange] = field(default_factory=list)
    attached: int = 0

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches; returns the index of their first record within the draft."""
        start = self.count
        for batch in batches:
            for at in range(0, batch.num_rows, PAGE_ROWS):
                self._add_page(batch if batch.num_rows <= PAGE_ROWS else batch.slice(at, PAGE_ROWS))
        return start

    def attach(self, metadata: MetadataRange) -> None:
        """Keep what one ``produce`` call attached to its records; ``attached`` is what all of it takes in the head."""
        self.metadata.append(metadata)
        self.attached += len(metadata.payload) + _RANGE

    def _add_page(self, page: pa.RecordBatch) -> None:
        span = pc.min_max(page.column(0).view(pa.int64()))
        oldest, newest = span["min"].as_py(), span["max"].as_py()
        self.oldest = min(self.oldest, oldest) if self.count else oldest
        self.newest = max(self.newest, newest) if self.count else newest
        encoded = encode_page(page, self.compression)
        self.pages.append(encoded)
        self.count += page.num_rows
        self.size += sum(map(len, encoded))
        self.plain += page.nbytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """A finished batch with its place in its writer's order: what can be uploaded, and uploaded again."""

    parts: Sequence[bytes | memoryview]
    listing: Listing


def seal(draft: Draft, *, writer: WriterId, number: int, born: int, expect: int | None = None) -> Sealed:
    """The finished batch of a draft; it has no place in the store yet."""
    info = BatchInfo(draft.compression, draft.count, len(draft.pages), draft.oldest, draft.newest, writer, number)
    parts = encode_batch(draft.pages, info)
    listing = Listing(
        location="",
        generation=0,
        count=draft.count,
        size=sum(map(len, parts)),
        oldest=draft.oldest,
        newest=draft.newest,
        writer=writer,
        number=number,
        born=born,
        metadata=tuple(draft.metadata),
        expect=expect,
    )
    return Sealed(parts, listing)


class Lister:
    """Puts batch objects and lists them in the head."""

    def __init__(self, store: ObjectStore, log_id: UUID, *, clock: Clock, chance: Chance) -> None:
        """Write to the log in ``store``. Each lister keeps its own view of the head."""
        self._store = store
        self._clock = clock
        self._chance = chance
        self._log_id = log_id
        self.cell: StoreCell[Head] = StoreCell(store, "head", HeadCodec(), clock=clock, chance=chance)

    def upload(self, batch: Sealed, generation: int) -> Sealed:
        """Write the object under a fresh name of this generation; durable when it returns."""
        location = f"batches/{generation:016d}/{self._chance.uuid().hex}.batch"
        self._store.put(location, batch.parts)
        return Sealed(batch.parts, replace(batch.listing, location=location, generation=generation))

    def enlist(self, batches: Sequence[Sealed]) -> list[Receipt]:
        """List uploaded batches of one writer with one conditional write; each is listed exactly once.

        ``OutcomeUnknown`` if the store failed for long: asking again with the same batches is safe.
        """
        for attempt in range(_RESOLVES):
            # Each time a new operation: what became of the last one no longer matters, the head knows the numbers.
            op = OpId(self._chance.uuid())
            try:
                return self._receipts(self._update(op, batches), batches)
            except StaleGeneration:
                generation = self.cell.read().value.generation
                batches = [self.upload(batch, generation) for batch in batches]
            except OutcomeUnknown:
                # Listing again is harmless: the head knows the writer's last number.
                if attempt + 1 == _RESOLVES:
                    raise
        raise Contended(
            f"{self.cell.where} was collected at each of {_RESOLVES} tries, so that the batch had to be uploaded again "
            "each time; nothing was listed. Try again."
        )

    def _update(self, op: OpId, batches: Sequence[Sealed]) -> Head:
        listings = [batch.listing for batch in batches]
        known = self.cell.held
        if known is None:  # also one who lists a single batch must keep the head small
            known = self.cell.read().value
        spills = plan_spills(known)
        for spill in spills:
            # A plain put: whoever else writes this chunk writes the same bytes under the same name.
            self._store.put(chunk_path(spill.reference, spill.level), encode_chunk(spill.items, spill.level))

        def edit(head: Head) -> Head:
            if head.log_id != self._log_id:
                raise Diverged(
                    f"{self.cell.where} belongs to log {head.log_id}, not to {self._log_id}: the log was replaced, and "
                    "nothing was appended. Open it again."
                )
            listed = list_batches(head, listings, self._clock.now())
            return listed if listed is head else apply_spills(listed, spills)

        return self.cell.update(op, edit)

    def _receipts(self, head: Head, batches: Sequence[Sealed]) -> list[Receipt]:
        writer = batches[0].listing.writer
        places = {entry.number: Receipt(entry.first, entry.count) for entry in head.tail if entry.writer == writer}
        last = head.writers.get(writer)
        if last is not None:
            places[last.number] = Receipt(last.first, last.count)
        # What is listed counts, not what a repeated append brought along.
        return [places.get(batch.listing.number, Receipt(None, batch.listing.count)) for batch in batches]
