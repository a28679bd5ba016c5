"""A batch as a log holds it: its records, and what was written down with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from strandline.model.head import WriterId


@dataclass(slots=True, eq=False)
class LogBatch:
    """What is never split and never reordered on its way from a log into a copy of it. Never changed, either.

    Nothing but this sentence keeps it from that: one is made for each append, and would take three times as long.
    """

    first: int
    """The offset of its first record."""
    term: int
    timestamp: int
    """When it was written, in milliseconds."""
    append: tuple[WriterId, int] | None
    """Whose append it is, and its number; None if nobody numbered it."""
    batches: tuple[pa.RecordBatch, ...]
    """The records, of :data:`~strandline.model.records.RECORD_SCHEMA`."""
    pages: tuple[list[bytes | memoryview], ...] | None = None
    """The same as Arrow encodes them, each in pieces; None if nobody needed that yet."""
    checksums: tuple[int, ...] | None = None
    """The CRC32C of each of ``batches`` as Arrow encodes them; None if nobody needed that yet."""
    next: int = field(init=False)
    """One past the offset of its last record."""

    def __post_init__(self) -> None:
        # Asked for several times on its way, and small batches have a lot of it.
        self.next = self.first + sum([batch.num_rows for batch in self.batches])

    @property
    def count(self) -> int:
        """How many records it holds."""
        return self.next - self.first

    @property
    def size(self) -> int:
        """About how many bytes its records take."""
        if self.pages is not None:
            return sum([len(part) for page in self.pages for part in page])
        size: int = sum(batch.get_total_buffer_size() for batch in self.batches)
        return size
