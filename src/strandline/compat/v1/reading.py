"""Reading of a version 1 queue: batches by their descriptors, and the spans of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from strandline.compat.v1.batch_format import decode_queue_batch
from strandline.compat.v1.edits import names_of, stored_as, time_of
from strandline.errors import InvalidInput, NotFound
from strandline.log.object.upload import PAGE_ROWS
from strandline.log.read.planning import known_columns
from strandline.model.head import Descriptor, QueueEntry
from strandline.model.records import READ_SCHEMA
from strandline.storage.metrics import fetching
from strandline.storage.objects.store import ObjectStore

_PAGE: Final = 512
"""Number of batches whose sizes are requested at a time."""


@dataclass(frozen=True, slots=True)
class QueueFetcher:
    """Reads the batches of a queue; see :class:`~strandline.log.queue.contract.Fetcher`."""

    store: ObjectStore

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records, fully checked; the offset of each is the batch's sequence.

        A record's timestamp is the ingestion time of its metadata range; without one, the time in the object's
        name, or 0.
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
        """The object's bytes, unchecked; ``NotFound`` also for an invalid location, which only damage causes.

        Some implementations list a location as they were given it, and store the object under the normalised name.
        """
        for name in names_of(descriptor.location):
            with contextlib.suppress(NotFound, InvalidInput):
                return self.store.get(name).data
        raise NotFound(
            f"The batch object {self.store.url}/{descriptor.location} is missing (it is listed as batch "
            f"{descriptor.sequence}): restore it, or set the batch aside."
        )


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
        """The next sequence."""
        return self.entry.sequence + 1

    @property
    def numbers_batches(self) -> bool:
        """Its offset is that of all its records."""
        return True

    @property
    def fingerprint(self) -> int:
        """Identifies its batch among all that could be listed with its sequence."""
        return self.entry.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole object, and return its records."""
        batches = QueueFetcher(self.store).fetch(self.entry)
        return batches if columns is None else [batch.select(known_columns(columns)) for batch in batches]


def sized_spans(store: ObjectStore, folder: str, entries: Sequence[QueueEntry]) -> Iterator[QueueSpan]:
    """The spans of these batches, with the sizes of their objects, which are requested page by page."""
    for at in range(0, len(entries), _PAGE):
        page = entries[at : at + _PAGE]
        names = [stored_as(entry.location) for entry in page]
        sizes = _sizes(store, folder, set(names))
        for entry, name in zip(page, names, strict=True):
            yield QueueSpan(store, entry, sizes.get(name, 0))


def _sizes(store: ObjectStore, folder: str, names: set[str]) -> dict[str, int]:
    """Sizes of the objects, which are not in the manifest. Names sort by time, so that one listing gives many."""
    inside = {name for name in names if name.startswith(f"{folder}/")}
    sizes = {}
    if inside:
        last = max(inside)
        for item in store.list(f"{folder}/", start_after=min(inside)[:-1]):
            if item.path in inside:
                sizes[item.path] = item.size
            if item.path >= last:
                break
    for name in names - inside:
        first = next(iter(store.list(name)), None)
        if first is not None and first.path == name:
            sizes[name] = first.size
    return sizes
