"""Manifest cell and upload path of a version 1 queue: batches are listed within half the grace period."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import pyarrow as pa

from strandline.compat.v1.batch_format import encode_queue_batch, encode_values
from strandline.compat.v1.edits import Moment, QueueListing, list_batches, mark_of, new_location, places_of
from strandline.compat.v1.manifest_format import ManifestCodec
from strandline.errors import AlreadyExists, Contended, InvalidInput, NotFound, OutcomeUnknown
from strandline.formats.arrow.block import Compression
from strandline.log.object.upload import RESOLVES, StoreShipper
from strandline.log.produce.rows import check_opaque
from strandline.log.produce.shipper import Draft, FinishedBatch
from strandline.log.queue.contract import Writes
from strandline.model.head import MetadataRanges, QueueManifest, Receipt, WriterId
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.metrics import Role, count_write
from strandline.storage.objects.store import ObjectStore

_CREATIONS: Final = 16
"""Number of tries of an update whose manifest is created, or removed, at the same moment."""


class ManifestCell:
    """The manifest of one queue. An absent object is an empty manifest, and is created by the first change.

    Edits may run several times, also after they took effect: they must recognise that (see
    :mod:`strandline.compat.v1.edits`). ``register`` is called before the first change.
    """

    def __init__(self, store: ObjectStore, path: str, *, env: Env, register: Callable[[], None] = lambda: None) -> None:
        self._chance = env.chance
        self._register = register
        self._registered = False
        self._codec = ManifestCodec()
        self._cell: StoreCell[QueueManifest] = StoreCell(store, path, self._codec, env=env)
        self.where = self._cell.where

    def read(self) -> QueueManifest:
        """The current manifest."""
        try:
            return self._cell.read().value
        except NotFound:
            return QueueManifest()

    def update(self, edit: Callable[[QueueManifest], QueueManifest], *, role: Role = "consumer") -> QueueManifest:
        """Apply an edit; returns a manifest in which it was applied, by this call or, as far as the edit can tell,
        before.

        An error of the edit on a current manifest is raised and changes nothing. ``Contended`` after too many
        lost races, ``OutcomeUnknown`` if the store failed and could not be read back: both may be repeated.
        """
        if not self._registered:
            self._register()  # before the first listing: from then on only this keeps other trimmers off the batch
            self._registered = True
        for attempt in range(1, _CREATIONS + 1):
            # A new operation each time: the object remembers none, the edit recognises its own effect.
            try:
                return self._cell.update(OpId(self._chance.uuid()), edit, role=role)
            except NotFound:
                empty = QueueManifest()
                first = edit(empty)
            if first is empty:
                return empty
            try:
                # One try: an edit may depend on the time, so it must run again before each write.
                created = self._cell.create(OpId(self._chance.uuid()), first, attempts=1)
            except AlreadyExists:
                continue  # another writer was faster; or this one was, and its answer was lost
            except OutcomeUnknown:
                if attempt == _CREATIONS:
                    raise
            else:
                count_write(role, landed=True)
                return created
        raise Contended(f"{self.where} was created and removed at each of {_CREATIONS} tries. Try again.")

    def writes(self) -> Writes:
        """Conditional writes so far, and how many of them lost a race."""
        return Writes(self._codec.encoded, self._cell.conflicts)


@dataclass(slots=True)
class QueueDraft(Draft):
    """A batch being built. Values are encoded on arrival, so that records are in memory once."""

    blocks: list[memoryview] = field(default_factory=list)

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


@dataclass(frozen=True, slots=True)
class QueueReceipt(Receipt):
    """Proof that records are durable and listed. ``first`` is their batch's sequence: all of them have that offset."""

    def part(self, index: int, count: int) -> QueueReceipt:
        """The receipt of some of the records."""
        return QueueReceipt(self.first, count)


@dataclass(frozen=True)
class QueueShipper(StoreShipper[QueueDraft, QueueListing]):
    """One writer's shipper to a queue.

    A listed batch is recognised by its name, which is derived from writer and number, while it is listed:
    a batch whose answer was lost *and* that was acknowledged before the retry is listed again.
    """

    opaque: ClassVar = True
    tick: ClassVar = 1000  # ingestion times are stored in milliseconds

    store: ObjectStore
    cell: ManifestCell
    folder: str
    writer: WriterId
    compression: Compression
    grace: float
    """Seconds that trimmers wait before they delete an object."""
    env: Env

    def __post_init__(self) -> None:
        if self.compression not in (Compression.NONE, Compression.ZSTD):
            raise InvalidInput(
                f"A queue of version 1 is compressed by 'zstd' or 'none', not {self.compression.name.lower()!r}."
            )

    @property
    def _max_age(self) -> float:
        # Half of it: the other half is for a write that took long to reach the store after the check.
        return self.grace / 2

    def new_draft(self) -> QueueDraft:
        """An empty draft."""
        return QueueDraft()

    def seal(self, draft: QueueDraft, *, number: int, expect: int | None = None) -> FinishedBatch[QueueListing]:
        """Seal a draft; it is not stored yet."""
        parts = encode_queue_batch(draft.blocks, draft.count, self.compression)
        return FinishedBatch(parts, QueueListing(draft.count, number, MetadataRanges.joined(draft.metadata), expect))

    def upload(self, sealed: FinishedBatch[QueueListing]) -> FinishedBatch[QueueListing]:
        """Write the object under a fresh name; durable when it returns."""
        began = Moment.of(self.env.clock)  # before the upload: the age of its first byte counts
        location = new_location(self.folder, began.wall, self.writer, sealed.listing.number)
        self.store.put(location, sealed.parts)
        return FinishedBatch(sealed.parts, replace(sealed.listing, location=location, began=began))

    def _enlist(self, batches: Sequence[FinishedBatch[QueueListing]]) -> list[Receipt]:
        listings = [batch.listing for batch in batches]

        def edit(manifest: QueueManifest) -> QueueManifest:
            # The time is read here, right before each attempted write.
            return list_batches(manifest, listings, Moment.of(self.env.clock), self._max_age)

        places = places_of(self.cell.update(edit, role="producer"), [listing.location for listing in listings])
        return [QueueReceipt(places[mark_of(listing.location)], listing.count) for listing in listings]

    def _uploaded_again(self, batches: Sequence[FinishedBatch[QueueListing]]) -> list[FinishedBatch[QueueListing]]:
        return [self.upload(batch) if self._is_old(batch.listing) else batch for batch in batches]

    @property
    def _stale_message(self) -> str:
        return (
            f"A batch could not be listed in {self.cell.where} within {self._max_age} s of its upload, in "
            f"{RESOLVES} tries; nothing was listed. Try again."
        )

    def _is_old(self, listing: QueueListing) -> bool:
        # Half of the limit: a nearly stale batch would be stale at the next try.
        return listing.began is None or Moment.of(self.env.clock).since(listing.began) > self._max_age / 2
