"""The head of an object log and the manifest of a version 1 queue, as values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, NewType, Protocol, Self, final, overload, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.model.arguments import LARGEST_NUMBER, Natural
from strandline.model.cursor import LARGEST_FINGERPRINT, Cursor, batch_fingerprint

WriterId = NewType("WriterId", UUID)
"""Identifies one writer; its appends have the numbers 0, 1, 2, … and are listed strictly in that order."""


class SourceProof(NamedTuple):
    """The history of an ingested source: at position ``next`` it had this term and fingerprint, as a cursor has them.

    ``next`` is the position of the append that holds the proof, or a later one in the same history.

    >>> str(SourceProof(9, 2, 255)), SourceProof.parse("9/2/00000000000000ff")
    ('9/2/00000000000000ff', SourceProof(next=9, term=2, fingerprint=255))
    """

    next: int
    term: int
    fingerprint: int

    def __str__(self) -> str:
        return f"{self.next}/{self.term}/{self.fingerprint:016x}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``; ``ValueError`` for anything else."""
        following, term, fingerprint = text.split("/")
        found = cls(int(following), int(term), int(fingerprint, 16))
        if min(found) < 0 or max(found.next, found.term) > LARGEST_NUMBER or found.fingerprint > LARGEST_FINGERPRINT:
            raise ValueError(f"{text[:80]!r} is no proof of a source")
        return found

    @classmethod
    def at(cls, cursor: Cursor) -> Self | None:
        """The proof that a cursor holds; None if it has no fingerprint."""
        return None if cursor.fingerprint is None else cls(cursor.next, cursor.term, cursor.fingerprint)

    def cursor(self, log_id: UUID) -> Cursor:
        """The cursor of the source that it proves."""
        return Cursor(log_id, self.next, self.term, self.fingerprint)


@final
class ProvenWriter(UUID):
    """The writer id of an append from a source, together with the proof that the log stores with the append.

    Equal to the plain id. It travels wherever a writer id does; a log that does not know proofs stores the id alone.
    """

    __slots__ = ("proof",)
    proof: SourceProof

    def __init__(self, writer: UUID, proof: SourceProof) -> None:
        super().__init__(int=writer.int)
        object.__setattr__(self, "proof", proof)

    def __reduce__(self) -> tuple[type[ProvenWriter], tuple[UUID, SourceProof]]:
        return ProvenWriter, (UUID(int=self.int), self.proof)


def proof_of(writer: UUID) -> SourceProof | None:
    """The proof that travels with a writer id; None without one."""
    return writer.proof if isinstance(writer, ProvenWriter) else None


def proven(writer: WriterId, proof: SourceProof | None) -> WriterId:
    """The writer id with a proof, if there is one.

    >>> writer = WriterId(UUID(int=7))
    >>> proven(writer, SourceProof(9, 0, 1)) == writer, proof_of(proven(writer, SourceProof(9, 0, 1)))
    (True, SourceProof(next=9, term=0, fingerprint=1))
    """
    return writer if proof is None else WriterId(ProvenWriter(writer, proof))


class MetadataRange(NamedTuple):
    """Metadata of one ``produce`` call, and the first record of its batch that it belongs to."""

    start: int
    ingested: int
    payload: bytes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MetadataRanges(Sequence[MetadataRange]):
    """Metadata of the ``produce`` calls of one batch, in columns; equal to the tuple of its ranges.

    With one object per call, Python's garbage collector would visit each of them while the batch is listed, which took
    a quarter of the cost of a call. It does not visit numbers and bytes.

    >>> MetadataRanges.of([MetadataRange(0, 5, b"a"), MetadataRange(2, 6, b"b")])[1]
    MetadataRange(start=2, ingested=6, payload=b'b')
    """

    starts: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    payloads: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[MetadataRange]) -> Self:
        """These ranges in columns."""
        if isinstance(ranges, cls):
            return ranges
        columns = tuple(zip(*ranges, strict=True))
        return cls(*columns)

    @classmethod
    def joined(cls, parts: Sequence[MetadataRanges]) -> MetadataRanges:
        """The ranges of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tuple(chain.from_iterable(part.starts for part in parts)),
            tuple(chain.from_iterable(part.times for part in parts)),
            tuple(chain.from_iterable(part.payloads for part in parts)),
        )

    def shifted(self, records: int) -> MetadataRanges:
        """The same ranges in a batch where this many other records precede theirs."""
        if not records:
            return self
        return MetadataRanges(tuple([records + start for start in self.starts]), self.times, self.payloads)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> MetadataRange: ...

    @overload
    def __getitem__(self, index: slice) -> MetadataRanges: ...

    def __getitem__(self, index: int | slice) -> MetadataRange | MetadataRanges:
        if isinstance(index, slice):
            return MetadataRanges(self.starts[index], self.times[index], self.payloads[index])
        return MetadataRange(self.starts[index], self.times[index], self.payloads[index])

    def __iter__(self) -> Iterator[MetadataRange]:
        return map(MetadataRange, self.starts, self.times, self.payloads)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MetadataRanges):
            return (self.starts, self.times, self.payloads) == (other.starts, other.times, other.payloads)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed batch: its location and offsets. Times are microseconds."""

    sequence: int
    location: str
    first: int
    count: int
    size: int
    oldest: int
    newest: int
    listed: int
    writer: WriterId
    number: int
    metadata: Sequence[MetadataRange] = ()

    def __reduce__(self) -> tuple[type[Entry], tuple[Any, ...]]:
        # Plans of many batches are pickled: positional arguments take a third of the time.
        return Entry, (
            self.sequence, self.location, self.first, self.count, self.size, self.oldest, self.newest, self.listed,
            self.writer, self.number, self.metadata,
        )  # fmt: skip

    @property
    def next(self) -> int:
        """One past the last offset of the batch."""
        return self.first + self.count

    @property
    def fingerprint(self) -> int:
        """Distinguishes it from any other batch that could be listed in its place; object names are never reused."""
        return batch_fingerprint(self.location, self.writer, self.number, self.first)


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Names an immutable chunk of older entries (level 0) or of other references (above)."""

    generation: int
    first_sequence: int
    next_sequence: int
    first: int
    next: int
    size: int
    listed_first: int
    listed_last: int


@dataclass(frozen=True, slots=True)
class WriterState:
    """The last listed append of a writer, by which a retry is recognised."""

    number: Natural
    sequence: Natural
    first: Natural
    count: Natural
    listed: Natural
    proof: SourceProof | None = field(default=None, compare=False)
    """Of an append from a source: the history of the source. None if it is not known, as of older versions."""


class StoredAppend(NamedTuple):
    """One stored batch: its offsets ``first`` up to ``next``, and writer and number of its append, if it had them."""

    first: int
    next: int
    append: tuple[WriterId, int] | None


@dataclass(frozen=True, slots=True)
class Pin:
    """A position that a slot is about to take; it pins until the slot's own cell is written.

    ``mark`` distinguishes a pin from a later one of the same slot: only its creator may remove it.
    """

    position: int
    mark: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The offsets ``since`` up to ``upto`` that one trim removed from the listing.

    ``entries`` were removed from the head. Each of ``chunks``, with its level, was removed too, or straddles ``upto``:
    then only its part below ``upto`` is meant.
    """

    since: int
    upto: int
    entries: tuple[Entry, ...]
    chunks: tuple[tuple[int, ChunkRef], ...]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Location of a stored :class:`Cut`, whose objects may be deleted a grace period after ``at``."""

    location: str
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class Head:
    """The shared state of a log's writers. ``levels[k]`` has references to chunks of level ``k``, oldest first."""

    log_id: UUID
    next_offset: int = 0
    next_sequence: int = 0
    floor: int = 0
    listed: int = 0
    generation: int = 0
    min_generation: int = 0
    swept_generation: int = 0
    tiered_through: int = 0
    writers_floor: int = 0
    membership: int = 0
    trim_began: int = 0
    tail: tuple[Entry, ...] = ()
    levels: tuple[tuple[ChunkRef, ...], ...] = ()
    writers: dict[WriterId, WriterState] = field(default_factory=dict)
    slots: dict[str, Pin | None] = field(default_factory=dict)
    trimmed: tuple[Trimmed, ...] = ()
    sealed: bool = False
    """Whether the log takes no more batches."""
    deleting: bool = False
    """Whether its deletion has begun: then the log is neither read nor changed any more."""


@runtime_checkable
class Descriptor(Protocol):
    """One listed batch: enough to fetch it anywhere, at any time while its object exists.

    A plain value: picklable, and equal to every other descriptor of the same batch. An object log's
    :class:`~strandline.model.head.Entry` is one, and so is a :class:`QueueEntry`.
    """

    @property
    def sequence(self) -> int:
        """The batch's number in listing order; dense."""

    @property
    def location(self) -> str:
        """The path of its object in the store."""

    @property
    def metadata(self) -> Sequence[MetadataRange]:
        """Metadata of each ``produce`` call."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A batch in a version 1 queue manifest, which has neither counts nor sizes."""

    sequence: int
    location: str
    metadata: Sequence[MetadataRange] = ()

    @property
    def fingerprint(self) -> int:
        """Distinguishes it from any other batch that could be listed with its sequence."""
        return batch_fingerprint(self.location, self.sequence)


@dataclass(frozen=True, slots=True)
class QueueManifest:
    """The manifest of a version 1 queue: the batches not acknowledged yet, and the consumer's epoch."""

    entries: tuple[QueueEntry, ...] = ()
    next_sequence: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that records are durable and listed: ``count`` of them from offset ``first``.

    ``first`` is None only for a repeated append whose offset the log no longer remembers: it *is* listed.
    """

    first: int | None
    count: int

    def part(self, index: int, count: int) -> Receipt:
        """The receipt of ``count`` of the records, from the one at ``index`` on."""
        return Receipt(None if self.first is None else self.first + index, count)


@dataclass(slots=True, eq=False)
class LogBatch:
    """A batch on its way from a log to a replica; never split or reordered. Immutable by convention.

    Not a frozen dataclass: one is created per append, and that would take three times as long.
    """

    first: int
    """The offset of its first record."""
    term: int
    timestamp: int
    """When it was written, in milliseconds."""
    append: tuple[WriterId, int] | None
    """Writer and number of the append; None without a number."""
    batches: tuple[pa.RecordBatch, ...]
    """The records, of :data:`~strandline.model.records.RECORD_SCHEMA`."""
    pages: tuple[list[bytes | memoryview], ...] | None = None
    """The encoded record batches, each in parts; None until needed."""
    checksums: tuple[int, ...] | None = None
    """The CRC32C of each encoded record batch; None until needed."""
    next: int = field(init=False)
    """One past the offset of its last record."""

    def __post_init__(self) -> None:
        # Computed once: it is used several times per batch, and small batches are many.
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
