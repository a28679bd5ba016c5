"""Span of an object log: a range of offsets in one batch object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from strandline.errors import CorruptData, NotFound
from strandline.formats.object.batch import decode_batch
from strandline.log.planning import clipped, known_columns
from strandline.model.head import Entry
from strandline.model.records import with_offsets
from strandline.storage.metrics import fetching
from strandline.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """Offsets ``first`` up to ``next`` of one listed batch. Picklable: it carries its store's address."""

    store: ObjectStore
    entry: Entry
    first: int
    next: int

    @property
    def size(self) -> int:
        """The bytes of the batch object."""
        return self.entry.size

    @property
    def fingerprint(self) -> int:
        """Tells its batch from every other that could be listed there."""
        return self.entry.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole object, and return the span's records with their offsets."""
        with fetching() as count:
            batches = self._read()
            count(self.entry.count, self.entry.size)
        numbered = clipped(with_offsets(batches, self.entry.first), self.first, self.next)
        return numbered if columns is None else [batch.select(known_columns(columns)) for batch in numbered]

    def _read(self) -> list[pa.RecordBatch]:
        where = f"{self.store.url}/{self.entry.location}"
        held = f"it is listed as offsets {self.entry.first} to {self.entry.next - 1}"
        try:
            data = self.store.get(self.entry.location).data
        except NotFound as error:
            raise NotFound(
                f"The batch object {where} is missing ({held}): restore it, or bootstrap the consumer past it."
            ) from error
        if len(data) != self.entry.size:  # before its end is looked at, which may then be anything
            raise CorruptData(
                f"{where} is damaged: it has {len(data)} bytes and was listed with {self.entry.size} ({held}). "
                "Restore the object."
            )
        info, batches = decode_batch(data, where)
        if (info.count, info.writer, info.number) != (self.entry.count, self.entry.writer, self.entry.number):
            raise CorruptData(f"{where} holds another batch than the one listed ({held}). Restore the object.")
        return batches
