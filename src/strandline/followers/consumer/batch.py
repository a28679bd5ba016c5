"""A batch as the queue API returns it, and the picklable handle that reads batches anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from strandline.errors import CorruptData, NotFound
from strandline.log.queue.contract import Fetcher
from strandline.model.head import Descriptor, MetadataRange
from strandline.model.records import READ_SCHEMA


@dataclass(frozen=True)
class ConsumedBatch:
    """One batch, read and checked. Equal descriptors give equal batches; picklable."""

    descriptor: Descriptor
    """The descriptor of the batch."""
    batches: tuple[pa.RecordBatch, ...]
    """Its decoded records with their offsets."""

    @property
    def sequence(self) -> int:
        """Its sequence in the listing, by which it is acknowledged."""
        return self.descriptor.sequence

    @property
    def location(self) -> str:
        """The path of its object in the store."""
        return self.descriptor.location

    @property
    def metadata(self) -> tuple[MetadataRange, ...]:
        """Metadata of each ``produce`` call: first record, ingestion time in microseconds, payload."""
        return tuple(self.descriptor.metadata)

    @cached_property
    def records(self) -> pa.Table:
        """All records, with the columns of ``READ_SCHEMA``; copies nothing."""
        return pa.Table.from_batches(self.batches, READ_SCHEMA)

    @cached_property
    def values(self) -> list[bytes | None]:
        """The value of each record, computed on access; None for a record without a value."""
        return list(self.records["value"].to_pylist())


@dataclass(frozen=True, slots=True)
class FetchHandle:
    """Reads batches by their descriptors, independently of the consumer that handed them out.

    Picklable and stateless: for threads, other processes and Spark executors. It moves no cursor and acknowledges
    nothing, and works as long as the objects exist.
    """

    fetcher: Fetcher

    def fetch(self, descriptor: Descriptor) -> ConsumedBatch:
        """The batch; ``CorruptData`` or ``NotFound`` naming its object."""
        return ConsumedBatch(descriptor, tuple(self.fetcher.fetch(descriptor)))


@dataclass(slots=True)
class BatchPiece:
    """One batch of the read-ahead; a read error is raised only when the batch is delivered."""

    descriptor: Descriptor
    fetcher: Fetcher
    poison: CorruptData | NotFound | None = None

    @property
    def size(self) -> int:
        """The stored bytes, or 0 if unknown."""
        size: int = getattr(self.descriptor, "size", 0)
        return size

    def fetch(self, columns: object = None) -> list[pa.RecordBatch]:
        """The batch; after an error nothing, and the error is kept."""
        try:
            return self.fetcher.fetch(self.descriptor)
        except (CorruptData, NotFound) as error:
            self.poison = error
            return []
