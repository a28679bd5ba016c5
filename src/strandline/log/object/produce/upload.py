"""Shippers: how a producer builds, uploads and lists batches; that of the object log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Generic, TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Contended, Diverged, OutcomeUnknown, OutOfOrder, TransientStorageError
from strandline.formats.arrow.block import Compression, Parts, encode_page
from strandline.formats.object.batch import BatchInfo, encode_batch
from strandline.formats.object.head import HeadCodec, encode_chunk
from strandline.log.contract import Receipt
from strandline.log.object.head.edits import BatchListing, StaleUpload, apply_spills, list_batches, plan_spills
from strandline.log.object.head.index import chunk_path
from strandline.model.head import Head, MetadataRanges, WriterId
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.clock import Chance, Clock
from strandline.storage.metrics import count_written
from strandline.storage.retry import Backoff
from strandline.storage.store import ObjectStore

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

    opaque: ClassVar[bool] = False
    """Whether records are values and nothing else. Then a producer refuses keys, headers and deletes at the call.

    Times of records are not kept either.
    """
    tick: ClassVar[int] = 1
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


PAGE_ROWS: Final = 1 << 16
"""Larger record batches are cut into pages of this many rows, which readers like best."""

_AMONG_OTHERS: Final = Backoff(attempts=64, base=0.005, ceiling=0.1)
"""Patience with other writers. Who waits much longer than a write takes, loses to those who do not wait."""

_ALONE: Final = 16
"""After so many listings between which nobody else had listed, there is nobody else."""


@dataclass(slots=True)
class ObjectDraft(Draft):
    """A batch being built. Pages are encoded as they come, so that records are held once."""

    compression: Compression = Compression.LZ4
    pages: list[Parts] = field(default_factory=list)
    oldest: int = 0
    newest: int = 0

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches; returns the index of their first record within the draft."""
        start = self.count
        # All of them are encoded before the first is added: one that fails must not leave half of a call behind.
        for page in [_Page.of(page, self.compression) for batch in batches for page in _cut(batch)]:
            self.oldest = min(self.oldest, page.oldest) if self.count else page.oldest
            self.newest = max(self.newest, page.newest) if self.count else page.newest
            self.pages.append(page.parts)
            self.count += page.count
            self.size += page.size
            self.plain += page.plain
        return start


@dataclass(frozen=True, slots=True)
class _Page:
    parts: Parts
    count: int
    size: int
    plain: int
    oldest: int
    newest: int

    @classmethod
    def of(cls, page: pa.RecordBatch, compression: Compression) -> _Page:
        span = pc.min_max(page.column(0).view(pa.int64()))
        parts = encode_page(page, compression)
        size = sum(map(len, parts))
        return cls(parts, page.num_rows, size, page.nbytes, span["min"].as_py(), span["max"].as_py())


def _cut(batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
    if batch.num_rows <= PAGE_ROWS:
        return [batch]
    return [batch.slice(at, PAGE_ROWS) for at in range(0, batch.num_rows, PAGE_ROWS)]


class Lister:
    """Puts batch objects and lists them in the head."""

    def __init__(self, store: ObjectStore, log_id: UUID, *, clock: Clock, chance: Chance) -> None:
        """Write to the log in ``store``. Each lister keeps its own view of the head."""
        self._store = store
        self._clock = clock
        self._chance = chance
        self._log_id = log_id
        self.cell: StoreCell[Head] = StoreCell(
            store,
            "head",
            HeadCodec(log_id),
            required_by="the log",
            backoff=_AMONG_OTHERS,
            clock=clock,
            chance=chance,
        )
        self._alone = _ALONE  # how often in a row nobody else had listed since we last did

    def known(self) -> Head:
        """The head as this lister last saw it; read if it never did."""
        held = self.cell.held
        return self.cell.read().value if held is None else held

    def put(self, batch: Sealed[BatchListing]) -> Sealed[BatchListing]:
        """Write the object under a fresh name of the generation last seen; durable when it returns."""
        generation = self.known().generation
        location = f"batches/{generation:016d}/{self._chance.uuid().hex}.batch"
        self._store.put(location, batch.parts)
        return Sealed(batch.parts, replace(batch.listing, location=location, generation=generation))

    def enlist(self, listings: Sequence[BatchListing], check: Callable[[Head], None] = lambda _: None) -> Head:
        """List batches of one writer with one conditional write; returns a head in which they are listed.

        Each time it is a new operation: what became of the last one does not matter, the head knows the numbers.
        ``check`` may refuse to list them in the head that it is given, and is never given one that this call has made.
        """
        self._look_if_crowded()
        lost = self.cell.conflicts
        spills = plan_spills(self.known())  # also one who lists a single batch must keep the head small
        for spill in spills:
            # A plain put: whoever else writes this chunk writes the same bytes under the same name.
            self._store.put(chunk_path(spill.reference, spill.level), encode_chunk(spill.items, spill.level))

        def edit(head: Head) -> Head:
            if head.log_id != self._log_id:
                raise Diverged(
                    f"{self.cell.where} belongs to log {head.log_id}, not to {self._log_id}: the log was replaced, and "
                    "nothing was appended. Open it again."
                )
            check(head)
            listed = list_batches(head, listings, self._clock.now())
            return listed if listed is head else apply_spills(listed, spills)

        try:
            return self.cell.update(OpId(self._chance.uuid()), edit, role="producer")
        finally:
            if self.cell.conflicts > lost:
                self._alone = 0

    @property
    def crowded(self) -> bool:
        """Whether others list too, as far as was seen lately."""
        return self._alone < _ALONE

    def _look_if_crowded(self) -> None:
        """Read the head first for as long as others list too: cheaper than to lose, and then to read it."""
        if self.crowded:
            known = self.cell.held
            with suppress(TransientStorageError):  # then it shows when it is written
                self._alone = self._alone + 1 if self.cell.read().value is known else 0


@dataclass(eq=False)
class ObjectShipper(Shipper[ObjectDraft, BatchListing]):
    """One writer's way into an own log."""

    lister: Lister
    writer: WriterId
    born: int
    """The log's next sequence when the writer took its id."""
    compression: Compression
    sole: bool = False
    """Whether nobody else may ship as this writer: a number that is listed must have been listed from here.

    Without it such a number is taken for a repetition of what another process has done.
    """
    _names: dict[int, set[str]] = field(default_factory=dict)  # of what was uploaded and is not known to be listed
    _asked: set[int] = field(default_factory=set)  # the numbers among them that may be listed

    @property
    def crowded(self) -> bool:
        """Whether others list too, as far as was seen lately."""
        return self.lister.crowded

    def new_draft(self) -> ObjectDraft:
        """An empty draft."""
        return ObjectDraft(compression=self.compression)

    def seal(self, draft: ObjectDraft, *, number: int, expect: int | None = None) -> Sealed[BatchListing]:
        """The finished batch of a draft; it has no place in the store yet."""
        info = BatchInfo(
            draft.compression, draft.count, len(draft.pages), draft.oldest, draft.newest, self.writer, number
        )
        parts = encode_batch(draft.pages, info)
        listing = BatchListing(
            location="",
            generation=0,
            count=draft.count,
            size=sum(map(len, parts)),
            oldest=draft.oldest,
            newest=draft.newest,
            writer=self.writer,
            number=number,
            born=self.born,
            metadata=MetadataRanges.joined(draft.metadata),
            expect=expect,
        )
        return Sealed(parts, listing)

    def upload(self, sealed: Sealed[BatchListing]) -> Sealed[BatchListing]:
        """Write the object under a fresh name of the generation last seen; durable when it returns."""
        stored = self.lister.put(sealed)
        self._names.setdefault(stored.listing.number, set()).add(stored.listing.location)
        return stored

    def _enlist(self, batches: Sequence[Sealed[BatchListing]]) -> list[Receipt]:
        return self._receipts(self._list([batch.listing for batch in batches]), batches)

    def _uploaded_again(self, batches: Sequence[Sealed[BatchListing]]) -> list[Sealed[BatchListing]]:
        self.lister.cell.read()
        return [self.upload(batch) for batch in batches]

    @property
    def _never_fresh(self) -> str:
        return (
            f"{self.lister.cell.where} was collected at each of {RESOLVES} tries, so that the batch had to be "
            "uploaded again each time; nothing was listed. Try again."
        )

    def _list(self, listings: Sequence[BatchListing]) -> Head:
        asked = frozenset(self._asked)
        numbers = {listing.number for listing in listings}
        self._asked |= numbers  # before it is done: afterwards only a success is certain
        if not self.sole:
            return self.lister.enlist(listings)
        head = self.lister.enlist(listings, lambda head: self._check_sole(head, listings, asked))
        self._asked -= numbers
        for number in numbers:
            self._names.pop(number, None)
        return head

    def _check_sole(self, head: Head, listings: Sequence[BatchListing], asked: frozenset[int]) -> None:
        last = head.writers.get(self.writer)
        listed = [] if last is None else [listing for listing in listings if listing.number <= last.number]
        for listing in listed:
            key = (self.writer, listing.number)
            entry = next((entry for entry in head.tail if (entry.writer, entry.number) == key), None)
            # One that was asked for before may have landed, whatever we were told: then it names an object of ours.
            ours = listing.number in asked if entry is None else entry.location in self._names[listing.number]
            if not ours:
                raise OutOfOrder(
                    f"Number {listing.number} of writer {self.writer} was listed by someone else: another producer "
                    "uses this writer id. Nothing was appended. Open a producer with an id of its own."
                )

    def _receipts(self, head: Head, batches: Sequence[Sealed[BatchListing]]) -> list[Receipt]:
        writer = self.writer
        places = {entry.number: Receipt(entry.first, entry.count) for entry in head.tail if entry.writer == writer}
        last = head.writers.get(writer)
        if last is not None:
            places[last.number] = Receipt(last.first, last.count)
        # What is listed counts, not what a repeated append brought along.
        return [places.get(batch.listing.number, Receipt(None, batch.listing.count)) for batch in batches]
