"""Upload path of a version 1 queue: batches are built, uploaded, and listed within half the grace period."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from strandline.compat.v1.edits import Moment, QueueListing, UploadTooOld, list_batches, places_of
from strandline.compat.v1.format import encode_queue_batch, encode_values
from strandline.compat.v1.manifest import ManifestCell
from strandline.compat.v1.names import mark_of, new_location
from strandline.errors import Contended, InvalidInput, OutcomeUnknown
from strandline.formats.arrow.block import Compression
from strandline.log.contract import Receipt
from strandline.log.object.produce.rows import check_opaque
from strandline.log.object.produce.shipper import Sealed, listed_size
from strandline.model.head import MetadataRanges, QueueManifest, WriterId
from strandline.storage.clock import Clock
from strandline.storage.store import ObjectStore

_TICK: Final = 1000
"""Ingestion times are kept to the millisecond."""

_RESOLVES: Final = 5
"""How often a listing whose outcome is unknown, or whose objects are too old, is tried again."""


@dataclass(slots=True)
class QueueDraft:
    """A batch being built. Values are laid out as they come, so that records are held once."""

    blocks: list[memoryview] = field(default_factory=list)
    count: int = 0
    size: int = 0
    plain: int = 0
    metadata: list[MetadataRanges] = field(default_factory=list)
    attached: int = 0

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches, all or none; returns the index of their first record within the draft."""
        start, added = self.count, list(batches)
        check_opaque(added)
        blocks = [encode_values(batch.column("value")) for batch in added]
        self.blocks += blocks
        self.count += sum(batch.num_rows for batch in added)
        self.size += sum(map(len, blocks))
        self.plain += sum(batch.nbytes for batch in added)
        return start

    def attach(self, ranges: MetadataRanges) -> None:
        """Keep what ``produce`` calls attached to their records, at times that are whole ticks."""
        self.metadata.append(ranges)
        self.attached += listed_size(ranges)


@dataclass(frozen=True, slots=True)
class QueueReceipt(Receipt):
    """Proof that records are durable and listed. ``first`` is their batch's sequence: all of them have that offset."""

    def part(self, index: int, count: int) -> QueueReceipt:
        """The receipt of some of the records."""
        return QueueReceipt(self.first, count)


class QueueShipper:
    """One writer's way into a queue; see :class:`~strandline.log.object.produce.shipper.Shipper`.

    What is listed already is recognised by its name, which is drawn from writer and number, as long as it is listed:
    a batch whose answer was lost *and* that was acknowledged before anyone could look is listed again.
    """

    opaque: Final = True
    tick: Final = _TICK

    def __init__(
        self,
        store: ObjectStore,
        cell: ManifestCell,
        folder: str,
        *,
        writer: WriterId,
        compression: Compression,
        grace: float,
        clock: Clock,
    ) -> None:
        """Ship as ``writer`` into ``folder``; collectors wait for ``grace`` seconds before they take an object."""
        if compression not in (Compression.NONE, Compression.ZSTD):
            raise InvalidInput(
                f"A queue of version 1 is compressed by 'zstd' or 'none', not {compression.name.lower()!r}."
            )
        self._store = store
        self._cell = cell
        self._folder = folder
        self._writer = writer
        self._compression = compression
        # Half of it: the other half is for a write that was checked in time and then took long to reach the store.
        self._patience = grace / 2
        self._clock = clock

    @property
    def crowded(self) -> bool:
        """Whether others list too; a queue does not keep count of that."""
        return False

    def new_draft(self) -> QueueDraft:
        """An empty draft."""
        return QueueDraft()

    def seal(self, draft: QueueDraft, *, number: int, expect: int | None = None) -> Sealed[QueueListing]:
        """The finished batch of a draft; it has no place in the store yet."""
        parts = encode_queue_batch(draft.blocks, draft.count, self._compression)
        return Sealed(parts, QueueListing(draft.count, number, MetadataRanges.joined(draft.metadata), expect))

    def upload(self, sealed: Sealed[QueueListing]) -> Sealed[QueueListing]:
        """Write the object under a fresh name; durable when it returns."""
        began = Moment.of(self._clock)  # before the upload: what counts is the age of the oldest byte of it
        location = new_location(self._folder, began.wall, self._writer, sealed.listing.number)
        self._store.put(location, sealed.parts)
        return Sealed(sealed.parts, replace(sealed.listing, location=location, began=began))

    def enlist(self, batches: Sequence[Sealed[QueueListing]]) -> list[Receipt]:
        """List uploaded batches with one conditional write, all of them or none."""
        for attempt in range(1, _RESOLVES + 1):
            try:
                return self._receipts(self._list([batch.listing for batch in batches]), batches)
            except UploadTooOld:
                batches = [self.upload(batch) if self._is_old(batch.listing) else batch for batch in batches]
            except OutcomeUnknown:
                if attempt == _RESOLVES:
                    raise
        raise Contended(
            f"A batch could not be listed in {self._cell.where} within {self._patience} s of its upload, in "
            f"{_RESOLVES} tries; nothing was listed. Try again."
        )

    def _list(self, listings: Sequence[QueueListing]) -> QueueManifest:
        def edit(manifest: QueueManifest) -> QueueManifest:
            # The time is looked at here, right before each write that is tried.
            return list_batches(manifest, listings, Moment.of(self._clock), self._patience)

        return self._cell.update(edit, role="producer")

    def _is_old(self, listing: QueueListing) -> bool:
        # Half of what is allowed: what is nearly too old would be too old at the next try.
        return listing.began is None or Moment.of(self._clock).since(listing.began) > self._patience / 2

    def _receipts(self, manifest: QueueManifest, batches: Sequence[Sealed[QueueListing]]) -> list[Receipt]:
        places = places_of(manifest, [batch.listing.location for batch in batches])
        return [QueueReceipt(places[mark_of(batch.listing.location)], batch.listing.count) for batch in batches]
