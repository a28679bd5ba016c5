"""Spans of a version 1 queue."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from strandline.compat.v1.format import decode_queue_batch
from strandline.compat.v1.names import stored_as, time_of
from strandline.errors import InvalidInput, NotFound
from strandline.log.object.produce.upload import PAGE_ROWS
from strandline.log.planning import known_columns
from strandline.model.head import Descriptor, QueueEntry
from strandline.model.records import READ_SCHEMA
from strandline.storage.metrics import fetching
from strandline.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class QueueFetcher:
    """Reads the batches of a queue; see :class:`~strandline.log.queue.contract.Fetcher`."""

    store: ObjectStore

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records, read and checked whole; the offset of each is the batch's sequence.

        A record's timestamp is the ingestion time of its metadata range. Without one it is the time in the object's
        name, and 0 if there is none either.
        """
        location = descriptor.location
        where = f"{self.store.url}/{location}"
        with fetching() as count:
            data = self.raw(descriptor)
            batch = decode_queue_batch(data, where, metadata=descriptor.metadata, uncovered=time_of(location) or 0)
            count(batch.num_rows, len(data))
        offsets = pa.repeat(pa.scalar(descriptor.sequence, pa.int64()), batch.num_rows)
        numbered = pa.RecordBatch.from_arrays([offsets, *batch.columns], schema=READ_SCHEMA)
        return [numbered.slice(at, PAGE_ROWS) for at in range(0, numbered.num_rows, PAGE_ROWS)]

    def raw(self, descriptor: Descriptor) -> bytes | memoryview:
        """The object's bytes as they are; also a location that can be none, as only damage has it, is ``NotFound``.

        Some implementations list a location as it was given, and store the object under the encoded name.
        """
        stored = stored_as(descriptor.location)
        if stored != descriptor.location:
            with contextlib.suppress(NotFound, InvalidInput):
                return self.store.get(stored).data
        try:
            return self.store.get(descriptor.location).data
        except (NotFound, InvalidInput) as error:
            raise NotFound(
                f"The batch object {self.store.url}/{descriptor.location} is missing (it is listed as batch "
                f"{descriptor.sequence}): restore it, or set the batch aside."
            ) from error


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """One listed batch as a piece of a plan. Picklable: it carries its store's address.

    Its only offset is the batch's sequence. ``size`` is 0 if the store did not list the object.
    """

    store: ObjectStore
    entry: QueueEntry
    size: int

    @property
    def first(self) -> int:
        """The batch's sequence."""
        return self.entry.sequence

    @property
    def next(self) -> int:
        """The sequence behind it."""
        return self.entry.sequence + 1

    @property
    def fingerprint(self) -> int:
        """Tells its batch from every other that could be listed with its sequence."""
        return self.entry.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole object, and return its records."""
        batches = QueueFetcher(self.store).fetch(self.entry)
        return batches if columns is None else [batch.select(known_columns(columns)) for batch in batches]
