"""Shippers: how a producer builds batches, sends them to its log, and learns that they are listed; and its limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, TypeVar

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.model.head import MetadataRanges, Receipt
from strandline.model.records import MAX_BATCH_BYTES, MAX_RECORD_BYTES

L = TypeVar("L")

RANGE_BYTES: Final = 16
"""Bytes of a metadata range in the listing, besides its payload."""

MAX_METADATA: Final = 1 << 14
"""A batch is closed when it has so much metadata, which is stored in the head; no single piece may be larger."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When batches are closed, how many are uploaded at a time, and when appenders wait."""

    batch_bytes: int = 64 << 20
    linger: float = 0.1
    budget: int = 256 << 20
    block: bool = True
    uploads: int = 8

    def __post_init__(self) -> None:
        least = min(self.batch_bytes, self.budget, self.uploads)
        if least < 1 or self.linger < 0 or self.batch_bytes > MAX_RECORD_BYTES:
            raise InvalidInput(
                "batch_bytes, budget and uploads must be at least 1, linger not negative, and batch_bytes at most "
                f"{MAX_RECORD_BYTES:,}."
            )


@dataclass(frozen=True, slots=True)
class FinishedBatch(Generic[L]):
    """A finished batch with its number; it can be uploaded repeatedly.

    ``listing`` is the entry of its format; the producer does not use it.
    """

    parts: Sequence[bytes | memoryview]
    listing: L


@dataclass(slots=True)
class Draft(ABC):
    """A batch being built. Used by one thread at a time."""

    count: int = 0
    size: int = 0
    """Approximate encoded bytes in memory, which count against the producer's budget."""
    plain: int = 0
    """Bytes that a reader needs to decode it; a batch is closed by these."""
    metadata: list[MetadataRanges] = field(default_factory=list)
    attached: int = 0
    """Bytes of its metadata in the listing."""

    @abstractmethod
    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches, all or, if it raises, none; returns the index of their first record."""

    def attach(self, ranges: MetadataRanges) -> None:
        """Add the metadata of ``produce`` calls, at times that are whole ticks."""
        self.metadata.append(ranges)
        self.attached += sum(map(len, ranges.payloads)) + RANGE_BYTES * len(ranges)


D = TypeVar("D", bound=Draft)


class Shipper(ABC, Generic[D, L]):
    """One producer's connection to a log: it knows the format, the writer and the place.

    The only part of a producer that differs between kinds of logs. Uploads may run in several threads at once, also
    during a listing; listings are made one at a time.
    """

    opaque: ClassVar[bool] = False
    """Whether records are values only. Then a producer refuses keys, headers and deletes at the call.

    Timestamps of records are not stored either.
    """
    tick: ClassVar[int] = 1
    """Resolution of ingestion times in microseconds: those of calls are multiples of it."""
    most_metadata: ClassVar[int] = MAX_METADATA
    """Largest metadata of one ``produce`` call in bytes; 0 if the log has no place for any."""
    most_bytes: ClassVar[int] = MAX_BATCH_BYTES
    """Bytes that a batch may have, as a reader needs them."""
    most_record_bytes: ClassVar[int] = MAX_RECORD_BYTES
    """Bytes that one record may have, with its key and headers."""

    @property
    def crowded(self) -> bool:
        """Whether other writers list, too, as observed recently. Then a producer leaves them room."""
        return False

    @abstractmethod
    def new_draft(self) -> D:
        """An empty draft."""

    @abstractmethod
    def seal(self, draft: D, *, number: int, expect: int | None = None) -> FinishedBatch[L]:
        """Seal a draft as the writer's batch of this number; no I/O. It is not stored yet."""

    @abstractmethod
    def upload(self, sealed: FinishedBatch[L]) -> FinishedBatch[L]:
        """Store the batch under a fresh name; durable when it returns, but not listed. The result has the name."""

    @abstractmethod
    def enlist(self, batches: Sequence[FinishedBatch[L]]) -> list[Receipt]:
        """Let the log list uploaded batches with consecutive numbers: all of them, or at least the first.

        Returns a receipt for each that is durable and listed; the caller repeats it with the rest. Repeating it with
        the same batches is safe after every error: a batch that is listed already is recognised, and listed once.
        ``ExpectationFailed`` if the first of them expected another end: nothing was listed.
        """
