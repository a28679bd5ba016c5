"""Count of a worker's input, by which the driver detects missing and duplicate records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from strandline.errors import CorruptData
from strandline.model.records import READ_SCHEMA
from strandline.tables.files.layout import HashRange
from strandline.tables.rows.hashing import key_hashes

_CHUNK_ROWS: Final = 65_536


@dataclass(slots=True)
class InputCount:
    """First and next offset, and number of records, of a worker's input, which is in the order of offsets."""

    first: int = 0
    next: int = 0
    records: int = 0
    taken: int = 0
    decoded: int = 0
    """Their bytes in memory."""

    def counted(
        self, batches: Iterable[pa.RecordBatch], share: HashRange | None, *, by_record_key: bool
    ) -> Iterator[pa.Table]:
        """The records that belong to the share, as tables; counts all."""
        for batch in _chunks(self._checked(batches)):
            if share is None:
                self.taken += batch.num_rows
                yield batch
                continue
            mask = share.mask(key_hashes(batch.column("key")))
            self.taken += int(mask.sum())
            mine = batch.filter(pa.array(mask)) if by_record_key and share.depth else batch
            if mine.num_rows:
                yield mine

    def _checked(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            offsets = batch.column("offset")
            low, high = offsets[0].as_py(), offsets[-1].as_py()
            if high < low or (self.records and low < self.next):
                raise CorruptData(
                    f"A batch has the offsets {low} to {high} after offset {self.next - 1}: records were duplicated or "
                    "reordered. Nothing was committed."
                )
            if not self.records:
                self.first = low
            self.next = high + 1
            self.records += batch.num_rows
            self.decoded += batch.nbytes
            yield batch


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches as tables, small ones together: each step on a table costs more than a small batch."""
    few: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        few.append(batch)
        size += batch.num_rows
        if size >= _CHUNK_ROWS:
            yield pa.Table.from_batches(few, READ_SCHEMA)
            few, size = [], 0
    if few:
        yield pa.Table.from_batches(few, READ_SCHEMA)
