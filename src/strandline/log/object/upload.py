"""Uploads batch objects and lists them in the head: the shipper of the object log."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import (
    Contended,
    Diverged,
    OutcomeUnknown,
    OutOfOrder,
    Sealed,
    StrandlineError,
    TransientStorageError,
)
from strandline.formats.arrow.block import Compression, Parts, encode_page
from strandline.formats.object.batch import BatchInfo, encode_batch
from strandline.formats.object.head import HeadCodec, OtherLogsHead, encode_chunk
from strandline.log.object.head.edits import (
    BatchListing,
    Group,
    Spill,
    StaleUpload,
    apply_spills,
    list_batches,
    list_group,
    plan_spills,
    receipt_of,
    seal_log,
)
from strandline.log.object.head.index import chunk_path
from strandline.log.produce.shipper import D, Draft, FinishedBatch, L, Shipper
from strandline.model.head import Head, MetadataRanges, Receipt, WriterId
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.metrics import count_written
from strandline.storage.objects.store import ObjectStore
from strandline.storage.retry import Backoff
from strandline.storage.task_pool import side_by_side

RESOLVES: Final = 5
"""How often an append with an unknown outcome is repeated before it is raised."""


class StoreShipper(Shipper[D, L]):
    """A shipper to an object store: uploads objects, then lists them by one conditional write."""

    @abstractmethod
    def _enlist(self, batches: Sequence[FinishedBatch[L]]) -> list[Receipt]:
        """List uploaded batches once; ``StaleUpload`` if some have to be uploaded again."""

    @abstractmethod
    def _uploaded_again(self, batches: Sequence[FinishedBatch[L]]) -> list[FinishedBatch[L]]:
        """The batches; those that could no longer be listed were uploaded again."""

    @property
    @abstractmethod
    def _stale_message(self) -> str:
        """The error text if the batches were too old to be listed each time."""

    def enlist(self, batches: Sequence[FinishedBatch[L]]) -> list[Receipt]:
        """List uploaded batches by one conditional write: all of them or none. Repeats it if the outcome is unknown."""
        for attempt in range(1, RESOLVES + 1):
            try:
                return self._enlist(batches)
            except StaleUpload:
                batches = self._uploaded_again(batches)
            except OutcomeUnknown:
                if attempt == RESOLVES:
                    raise
        raise Contended(self._stale_message)

    def ship(self, draft: D, *, number: int, expect: int | None = None) -> Receipt:
        """Finish, upload and list one batch by itself; durable when it returns."""
        sealed = self.upload(self.seal(draft, number=number, expect=expect))
        (receipt,) = self.enlist([sealed])
        count_written(receipt.count, sum(map(len, sealed.parts)))
        return receipt


PAGE_ROWS: Final = 1 << 16
"""Larger record batches are split into pages of this many rows, which suits readers."""

_AMONG_OTHERS: Final = Backoff(attempts=64, base=0.005, ceiling=0.1)
"""Back-off against other writers. A writer that waits much longer than a write takes loses to the others."""

_MANY: Final = 16
"""Number of chunks that are written at the same time."""

_ALONE: Final = 16
"""Number of listings without one of another writer, after which this writer counts as the only one."""


@dataclass(slots=True)
class ObjectDraft(Draft):
    """A batch being built. Pages are encoded on arrival, so that records are in memory once."""

    compression: Compression = Compression.LZ4
    pages: list[Parts] = field(default_factory=list)
    oldest: int = 0
    newest: int = 0

    def add(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Append record batches; returns the index of their first record within the draft."""
        start = self.count
        # All of them are encoded before the first is added: a failure must not leave half of a call.
        for page in [_Page.of(page, self.compression) for batch in batches for page in _cut(batch)]:
            self.oldest = min(self.oldest, page.oldest) if self.count else page.oldest
            self.newest = max(self.newest, page.newest) if self.count else page.newest
            self.pages.append(page.parts)
            self.count += page.count
            self.size += page.size
            self.plain += page.plain
        return start

    def sealed(self, writer: WriterId, number: int) -> FinishedBatch[BatchListing]:
        """The batch as the writer's of this number; it is not stored yet."""
        info = BatchInfo(self.compression, self.count, len(self.pages), self.oldest, self.newest, writer, number)
        parts = encode_batch(self.pages, info)
        listing = BatchListing(
            location="",
            generation=0,
            count=self.count,
            size=sum(map(len, parts)),
            oldest=self.oldest,
            newest=self.newest,
            writer=writer,
            number=number,
            born=0,
            metadata=MetadataRanges.joined(self.metadata),
        )
        return FinishedBatch(parts, listing)


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


@contextmanager
def _same_log() -> Iterator[None]:
    try:
        yield
    except OtherLogsHead as error:
        raise Diverged(f"{error} The log was replaced, and nothing was appended: open it again.") from error


class Lister:
    """Puts batch objects and lists them in the head."""

    def __init__(self, store: ObjectStore, log_id: UUID, *, env: Env) -> None:
        """Write to the log in ``store``. Each lister caches its own head."""
        self._store = store
        self._env = env
        self.cell: StoreCell[Head] = StoreCell(
            store, "head", HeadCodec(log_id), required_by="the log", backoff=_AMONG_OTHERS, env=env
        )
        self._alone = _ALONE  # listings in a row without one of another writer

    def known(self) -> Head:
        """The head as this lister last saw it; reads it the first time."""
        held = self.cell.held
        return self.cell.read().value if held is None else held

    def put(self, batch: FinishedBatch[BatchListing]) -> FinishedBatch[BatchListing]:
        """Write the object under a fresh name of the generation last seen; durable when it returns."""
        with _same_log():
            generation = self.known().generation
        location = f"batches/{generation:016d}/{self._env.chance.uuid().hex}.batch"
        self._store.put(location, batch.parts)
        return FinishedBatch(batch.parts, replace(batch.listing, location=location, generation=generation))

    def enlist(self, listings: Sequence[BatchListing], check: Callable[[Head], None] = lambda _: None) -> Head:
        """List batches of one writer with one conditional write; returns a head in which they are listed.

        Each call is a new operation: the outcome of the last one does not matter, the head knows the numbers.
        ``check`` may refuse to list them in a given head; it never gets a head that this call has made.
        """

        def edit(head: Head) -> Head:
            check(head)
            return list_batches(head, listings, self._env.clock.now())

        return self._listed(edit)

    @_same_log()
    def seal(self) -> Head:
        """Seal the log by one conditional write; returns the sealed head."""
        return self.cell.update(OpId(self._env.chance.uuid()), seal_log, role="producer")

    def enlist_group(self, group: Group) -> Head:
        """List the batches of a group with one conditional write; returns a head in which they are listed."""
        return self._many_listed(lambda head: list_group(head, group, self._env.clock.now()))

    def enlist_all(self, listings: Sequence[BatchListing]) -> int:
        """List many numbered batches with one conditional write; returns how many records this call has listed.

        Another process may have listed some of the numbers, or all of them.
        """
        added = 0

        def edit(head: Head) -> Head:
            nonlocal added
            listed = list_batches(head, listings, self._env.clock.now())
            added = listed.next_offset - head.next_offset  # the last edit is the one that was stored
            return listed

        self._many_listed(edit)
        return added

    def _many_listed(self, edit: Callable[[Head], Head]) -> Head:
        head = self._listed(edit)
        if plan_spills(head):  # a large group makes the head large, and its next writer would pay for that
            with suppress(StrandlineError):
                self._listed(replace)
        return head

    @_same_log()
    def _listed(self, listing: Callable[[Head], Head]) -> Head:
        self._read_if_crowded()
        lost = self.cell.conflicts
        spills = self._put_chunks()  # a writer of single batches must keep the head small, too

        def edit(head: Head) -> Head:
            listed = listing(head)
            return listed if listed is head else apply_spills(listed, spills)

        try:
            return self.cell.update(OpId(self._env.chance.uuid()), edit, role="producer")
        finally:
            if self.cell.conflicts > lost:
                self._alone = 0

    def _put_chunks(self) -> Sequence[Spill]:
        """Write the chunks that keep the head small, usually none; their spills, for the head."""
        if not plan_spills(self.known()):
            return ()
        # By the head as it is now: a log that was deleted and made again here, or restored, has others of these names.
        try:
            spills = plan_spills(self.cell.read().value)
        except TransientStorageError:
            return ()  # the next listing does it

        def put(spill: Spill) -> None:
            # A plain put: every writer of this chunk writes the same bytes under the same name.
            self._store.put(chunk_path(spill.reference, spill.level), encode_chunk(spill.items, spill.level))

        if spills:
            side_by_side(put, spills, threads=_MANY, name="strandline-chunks")
        return spills

    @property
    def crowded(self) -> bool:
        """Whether other writers list, too, as observed recently."""
        return self._alone < _ALONE

    def _read_if_crowded(self) -> None:
        """Read the head first while other writers list, too: cheaper than to lose a race, and then to read it."""
        if self.crowded:
            known = self.cell.held
            with suppress(TransientStorageError):  # then the write finds out
                self._alone = self._alone + 1 if self.cell.read().value is known else 0


@dataclass(eq=False)
class ObjectShipper(StoreShipper[ObjectDraft, BatchListing]):
    """One writer's shipper to an object log."""

    lister: Lister
    writer: WriterId
    born: int
    """The log's next sequence when the writer took its id."""
    compression: Compression
    seals: bool = False
    """Whether listing a batch seals the log behind it."""
    sole: bool = False
    """Whether no other process may ship as this writer: a listed number must have been listed from here.

    Without it, a listed number counts as the repetition of another process's append.
    """
    _names: dict[int, set[str]] = field(default_factory=dict)  # uploaded objects that are not known to be listed
    _asked: set[int] = field(default_factory=set)  # those numbers that may be listed

    @property
    def crowded(self) -> bool:
        """Whether other writers list, too, as observed recently."""
        return self.lister.crowded

    def new_draft(self) -> ObjectDraft:
        """An empty draft."""
        return ObjectDraft(compression=self.compression)

    def seal(self, draft: ObjectDraft, *, number: int, expect: int | None = None) -> FinishedBatch[BatchListing]:
        """Seal a draft; it is not stored yet."""
        sealed = draft.sealed(self.writer, number)
        return FinishedBatch(sealed.parts, replace(sealed.listing, born=self.born, expect=expect, seal=self.seals))

    def upload(self, sealed: FinishedBatch[BatchListing]) -> FinishedBatch[BatchListing]:
        """Write the object under a fresh name of the generation last seen; durable when it returns."""
        stored = self.lister.put(sealed)
        self._names.setdefault(stored.listing.number, set()).add(stored.listing.location)
        return stored

    def _enlist(self, batches: Sequence[FinishedBatch[BatchListing]]) -> list[Receipt]:
        listings = [batch.listing for batch in batches]
        try:
            head = self._list(listings)
        except Sealed:
            # The first of them may have been listed before the seal, by a write whose answer was lost.
            head = self.lister.known()
            last = head.writers.get(self.writer)
            listings = [] if last is None else [each for each in listings if each.number <= last.number]
            if not listings:
                raise
        return [receipt_of(head, self.writer, listing.number, listing.count) for listing in listings]

    def _uploaded_again(self, batches: Sequence[FinishedBatch[BatchListing]]) -> list[FinishedBatch[BatchListing]]:
        self.lister.cell.read()
        return [self.upload(batch) for batch in batches]

    @property
    def _stale_message(self) -> str:
        return (
            f"{self.lister.cell.where} was trimmed at each of {RESOLVES} tries, so that the batch had to be "
            "uploaded again each time; nothing was listed. Try again."
        )

    def _list(self, listings: Sequence[BatchListing]) -> Head:
        asked = frozenset(self._asked)
        numbers = {listing.number for listing in listings}
        self._asked |= numbers  # before the write: afterwards only a success is certain
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
            # A number that was sent before may have landed after an error: then it names an object of this shipper.
            ours = listing.number in asked if entry is None else entry.location in self._names[listing.number]
            if not ours:
                raise OutOfOrder(
                    f"Number {listing.number} of writer {self.writer} was listed by another process: another producer "
                    "uses this writer id. Nothing was appended. Open a producer with an id of its own."
                )
