"""A piece of a plan over batch objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from strandline.formats.batch import decode_batch
from strandline.model.cursor import Limit
from strandline.model.errors import CorruptData, InvalidInput, NotFound
from strandline.model.head import Entry
from strandline.model.records import READ_SCHEMA, with_offsets
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


def known_columns(columns: Sequence[str]) -> list[str]:
    """The columns, if a log has them."""
    unknown = [name for name in columns if name not in READ_SCHEMA.names]
    if unknown:
        raise InvalidInput(f"There is no column {unknown}; a log has {READ_SCHEMA.names}.")
    return list(columns)


def clipped(batches: list[pa.RecordBatch], first: int, end: int) -> list[pa.RecordBatch]:
    """Numbered batches without what is below ``first`` or not below ``end``; copies nothing."""
    kept = []
    for batch in batches:
        start = batch.column(0)[0].as_py() if batch.num_rows else first
        skip = max(0, first - start)
        rows = min(batch.num_rows, end - start) - skip
        if rows > 0:
            kept.append(batch if rows == batch.num_rows else batch.slice(skip, rows))
    return kept


def plan_spans(store: ObjectStore, entries: Iterable[Entry], since: int, limit: Limit) -> list[ObjectSpan]:
    """Spans over consecutive entries from ``since`` on, within the limit but at least one."""
    return [ObjectSpan(store, entry, first, end) for entry, first, end in plan_entries(entries, since, limit)]


def plan_entries(entries: Iterable[Entry], since: int, limit: Limit) -> list[tuple[Entry, int, int]]:
    """Consecutive entries from ``since`` on with the offsets wanted of each, within the limit but at least one."""
    planned: list[tuple[Entry, int, int]] = []
    records = size = 0
    for entry in entries:
        end = entry.next if limit.upto is None else min(entry.next, limit.upto)
        first = max(entry.first, since)
        records += end - first
        size += entry.size
        fits = limit.allows(records=records, size=size, batches=len(planned) + 1)
        if end <= first or (planned and not fits):
            break
        planned.append((entry, first, end))
        # Looking at the next entry may cost reading a chunk: do not, if it cannot fit.
        if not limit.allows(records=records + 1, size=size + 1, batches=len(planned) + 1):
            break
    return planned
