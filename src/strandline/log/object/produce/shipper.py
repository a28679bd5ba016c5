"""Shipper contract: what a producer needs of a log format to build, upload and list batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import pyarrow as pa

from strandline.log.contract import Receipt
from strandline.model.head import MetadataRanges
from strandline.storage.metrics import count_written

L = TypeVar("L")

RANGE_BYTES: Final = 16
"""What a metadata range takes where batches are listed, beside its payload."""


def listed_size(ranges: MetadataRanges) -> int:
    """The bytes that metadata takes where batches are listed."""
    return sum(map(len, ranges.payloads)) + RANGE_BYTES * len(ranges)


@dataclass(frozen=True, slots=True)
class Sealed(Generic[L]):
    """A finished batch with its place in its writer's order: what can be uploaded, and uploaded again.

    ``listing`` is what its format lists; the producer never looks into it.
    """

    parts: Sequence[bytes | memoryview]
    listing: L


class Drafting(Protocol):
    """A batch being built. Used by one thread at a time."""

    @property
    def count(self) -> int:
        """How many records it holds."""

    @property
    def size(self) -> int:
        """Roughly the bytes that it takes in memory, encoded: what counts against the producer's budget."""

    @property
    def plain(self) -> int:
        """The bytes that a reader will take to decode it; a batch is closed by these."""

    @property
    def attached(self) -> int:
        """The bytes that its metadata takes where batches are listed."""

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches, all or, if it raises, none; returns the index of their first record."""

    def attach(self, ranges: MetadataRanges) -> None:
        """Keep what ``produce`` calls attached to their records."""


D = TypeVar("D", bound=Drafting)


class Shipper(Protocol[D, L]):
    """One producer's way into a log: it knows the format, the writer and the store.

    Uploads may run in several threads at once, also beside a listing; listings are made one at a time.
    """

    @property
    def opaque(self) -> bool:
        """Whether records are values and nothing else. Then a producer refuses keys, headers and deletes at the call.

        Times of records are not kept either.
        """

    @property
    def tick(self) -> int:
        """To how many microseconds the ingestion times of calls are kept: attached ones are multiples of it."""

    @property
    def crowded(self) -> bool:
        """Whether others list too, as far as was seen lately. Then a producer leaves them room for theirs."""

    def new_draft(self) -> D:
        """An empty draft."""

    def seal(self, draft: D, *, number: int, expect: int | None = None) -> Sealed[L]:
        """The finished batch of a draft, as the writer's batch of this number; no I/O."""

    def upload(self, sealed: Sealed[L]) -> Sealed[L]:
        """Store the batch under a fresh name; durable when it returns, and not listed. The answer knows the name."""

    def enlist(self, batches: Sequence[Sealed[L]]) -> list[Receipt]:
        """List uploaded batches, whose numbers follow one another, with one conditional write: all of them or none.

        Doing it again with the same batches is safe after every error: what is listed already is recognised, and
        listed once. ``ExpectationFailed`` if the first of them expected another end: nothing was listed.
        """


def ship(shipper: Shipper[D, L], draft: D, *, number: int, expect: int | None = None) -> Receipt:
    """Seal, upload and list one batch by itself; durable when it returns."""
    sealed = shipper.upload(shipper.seal(draft, number=number, expect=expect))
    (receipt,) = shipper.enlist([sealed])
    count_written(receipt.count, sum(map(len, sealed.parts)))
    return receipt
