"""A batch as a log holds it: its records, and what was written down with them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from strandline.model.head import WriterId


@dataclass(frozen=True, slots=True, eq=False)
class LogBatch:
    """What is never split and never reordered on its way from a log into a copy of it."""

    first: int
    """The offset of its first record."""
    term: int
    timestamp: int
    """When it was written, in milliseconds."""
    append: tuple[WriterId, int] | None
    """Whose append it is, and its number; None if nobody numbered it."""
    batches: tuple[pa.RecordBatch, ...]
    """The records, of :data:`~strandline.model.records.RECORD_SCHEMA`."""

    @property
    def count(self) -> int:
        """How many records it holds."""
        return sum(batch.num_rows for batch in self.batches)

    @property
    def next(self) -> int:
        """One past the offset of its last record."""
        return self.first + self.count

    @property
    def size(self) -> int:
        """About how many bytes its records take, with what they were cut from."""
        size: int = sum(batch.get_total_buffer_size() for batch in self.batches)
        return size
