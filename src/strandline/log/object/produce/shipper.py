"""Shippers: what a producer needs of a log format to build, upload and list batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import pyarrow as pa

from strandline.errors import Contended, OutcomeUnknown
from strandline.log.contract import Receipt
from strandline.log.object.head.edits import StaleUpload
from strandline.model.head import MetadataRanges
from strandline.storage.metrics import count_written

L = TypeVar("L")

RANGE_BYTES: Final = 16
"""What a metadata range takes where batches are listed, beside its payload."""


RESOLVES: Final = 5
"""How often an append whose outcome is unknown is asked for again before its caller is told so."""


@dataclass(frozen=True, slots=True)
class Sealed(Generic[L]):
    """A finished batch with its place in its writer's order: what can be uploaded, and uploaded again.

    ``listing`` is what its format lists; the producer never looks into it.
    """

    parts: Sequence[bytes | memoryview]
    listing: L


@dataclass(slots=True)
class Draft(ABC):
    """A batch being built. Used by one thread at a time."""

    count: int = 0
    size: int = 0
    """Roughly the bytes that it takes in memory, encoded: what counts against the producer's budget."""
    plain: int = 0
    """The bytes that a reader will take to decode it; a batch is closed by these."""
    metadata: list[MetadataRanges] = field(default_factory=list)
    attached: int = 0
    """The bytes that its metadata takes where batches are listed."""

    @abstractmethod
    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches, all or, if it raises, none; returns the index of their first record."""

    def attach(self, ranges: MetadataRanges) -> None:
        """Keep what ``produce`` calls attached to their records, at times that are whole ticks."""
        self.metadata.append(ranges)
        self.attached += sum(map(len, ranges.payloads)) + RANGE_BYTES * len(ranges)


D = TypeVar("D", bound=Draft)


class Shipper(ABC, Generic[D, L]):
    """One producer's way into a log: it knows the format, the writer and the store.

    Uploads may run in several threads at once, also beside a listing; listings are made one at a time.
    """

    opaque = False
    """Whether records are values and nothing else. Then a producer refuses keys, headers and deletes at the call.

    Times of records are not kept either.
    """
    tick = 1
    """To how many microseconds the ingestion times of calls are kept: attached ones are multiples of it."""

    @property
    def crowded(self) -> bool:
        """Whether others list too, as far as was seen lately. Then a producer leaves them room for theirs."""
        return False

    @abstractmethod
    def new_draft(self) -> D:
        """An empty draft."""

    @abstractmethod
    def seal(self, draft: D, *, number: int, expect: int | None = None) -> Sealed[L]:
        """The finished batch of a draft, as the writer's batch of this number; no I/O. It has no place yet."""

    @abstractmethod
    def upload(self, sealed: Sealed[L]) -> Sealed[L]:
        """Store the batch under a fresh name; durable when it returns, and not listed. The answer knows the name."""

    @abstractmethod
    def _enlist(self, batches: Sequence[Sealed[L]]) -> list[Receipt]:
        """List uploaded batches once; ``StaleUpload`` if some have to be uploaded again."""

    @abstractmethod
    def _uploaded_again(self, batches: Sequence[Sealed[L]]) -> list[Sealed[L]]:
        """The batches, with those uploaded again that could not be listed any more."""

    @property
    @abstractmethod
    def _never_fresh(self) -> str:
        """What is told if the batches were too old to be listed each time."""

    def enlist(self, batches: Sequence[Sealed[L]]) -> list[Receipt]:
        """List uploaded batches, whose numbers follow one another, with one conditional write: all of them or none.

        Doing it again with the same batches is safe after every error, ``OutcomeUnknown`` too: what is listed already
        is recognised, and listed once. ``ExpectationFailed`` if the first of them expected another end: nothing was
        listed.
        """
        for attempt in range(1, RESOLVES + 1):
            try:
                return self._enlist(batches)
            except StaleUpload:
                batches = self._uploaded_again(batches)
            except OutcomeUnknown:
                if attempt == RESOLVES:
                    raise
        raise Contended(self._never_fresh)

    def ship(self, draft: D, *, number: int, expect: int | None = None) -> Receipt:
        """Seal, upload and list one batch by itself; durable when it returns."""
        sealed = self.upload(self.seal(draft, number=number, expect=expect))
        (receipt,) = self.enlist([sealed])
        count_written(receipt.count, sum(map(len, sealed.parts)))
        return receipt
