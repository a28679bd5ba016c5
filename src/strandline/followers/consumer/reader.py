"""The read side of a consumer: batches, the handle that reads them anywhere, and the reader that moves the cursor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import pyarrow as pa

from strandline.errors import ConsumerClosed, CorruptData, NotFound, TooManyDeadLetters
from strandline.followers.consumer.progress import AckProgress
from strandline.log.queue.contract import Fetcher, Queue, start_of
from strandline.log.read.reading import fetch_in_order
from strandline.model.cursor import SECOND
from strandline.model.head import Descriptor, MetadataRange
from strandline.model.records import READ_SCHEMA
from strandline.storage.env import Env
from strandline.storage.metrics import ACKNOWLEDGED, DEAD_LETTERS, LAG_BYTES, LAG_RECORDS, LAG_SECONDS, QUEUE_LENGTH

_LOGGER: Final = logging.getLogger(__name__)
_DESCRIPTORS: Final = 64
"""Number of descriptors that the read-ahead requests at a time."""
MOST_DEAD_LETTERS: Final = 16
"""How many batches a consumer sets aside: more of them are not an accident."""


@dataclass(frozen=True)
class ConsumedBatch:
    """One batch, read and checked. Equal descriptors give equal batches; picklable."""

    descriptor: Descriptor
    """The descriptor of the batch."""
    batches: tuple[pa.RecordBatch, ...]
    """Its decoded records with their offsets."""

    @property
    def sequence(self) -> int:
        """Its sequence in the listing, by which it is acknowledged."""
        return self.descriptor.sequence

    @property
    def location(self) -> str:
        """The path of its object in the store."""
        return self.descriptor.location

    @property
    def metadata(self) -> tuple[MetadataRange, ...]:
        """Metadata of each ``produce`` call: first record, ingestion time in microseconds, payload."""
        return tuple(self.descriptor.metadata)

    @cached_property
    def records(self) -> pa.Table:
        """All records, with the columns of ``READ_SCHEMA``; copies nothing."""
        return pa.Table.from_batches(self.batches, READ_SCHEMA)

    @cached_property
    def values(self) -> list[bytes | None]:
        """The value of each record, computed on access; None for a record without a value."""
        return list(self.records["value"].to_pylist())


@dataclass(frozen=True, slots=True)
class FetchHandle:
    """Reads batches by their descriptors, independently of the consumer that handed them out.

    Picklable and stateless: for threads, other processes and Spark executors. It moves no cursor and acknowledges
    nothing, and works as long as the objects exist.
    """

    fetcher: Fetcher

    def fetch(self, descriptor: Descriptor) -> ConsumedBatch:
        """The batch; ``CorruptData`` or ``NotFound`` naming its object."""
        return ConsumedBatch(descriptor, tuple(self.fetcher.fetch(descriptor)))


@dataclass(slots=True)
class BatchPiece:
    """One batch of the read-ahead; a read error is raised only when the batch is delivered."""

    descriptor: Descriptor
    fetcher: Fetcher
    poison: CorruptData | NotFound | None = None

    @property
    def size(self) -> int:
        """The stored bytes, or 0 if unknown."""
        size: int = getattr(self.descriptor, "size", 0)
        return size

    def fetch(self, columns: object = None) -> list[pa.RecordBatch]:
        """The batch; after an error nothing, and the error is kept."""
        try:
            return self.fetcher.fetch(self.descriptor)
        except (CorruptData, NotFound) as error:
            self.poison = error
            return []


@dataclass(slots=True, eq=False)
class BatchReader:
    """Reads the batches of a claimed queue in order, and sets aside those that cannot be read, up to a limit.

    It does not refer to its consumer, which can be garbage-collected unclosed.
    """

    queue: Queue
    progress: AckProgress
    state: threading.Lock
    """Guards the positions in ``progress``, and the numbers below."""
    raises: bool
    """Whether an unreadable batch is an error, unless the caller sets it aside."""
    env: Env
    handle: FetchHandle = field(init=False)
    """Reads batches by their descriptors."""
    length: int = 0
    """Batches that were listed, and not durably acknowledged, at the last access to the queue."""
    ended: bool = False
    """Whether no batch follows those that were listed at the last read of the listing: the log was sealed."""
    lag: float | None = None
    """Seconds between ingestion and reading of the last batch with metadata."""
    dead_letters: int = 0
    """Batches that were set aside."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Protects the read cursor, with its I/O."""
    closed: bool = False
    _labels: tuple[str, str] = field(init=False)
    look: Callable[[], None] = lambda: None
    """Called at each read of the listing: looks for a limit of the slot that was set meanwhile."""

    def __post_init__(self) -> None:
        self.handle = FetchHandle(self.queue.fetcher())
        self._labels = self.queue.url, self.queue.slot

    def check_open(self) -> None:
        """``ConsumerClosed`` after the consumer was closed."""
        if self.closed:
            raise ConsumerClosed(f"The consumer of {self.queue.url} is closed: open a new one.")

    @property
    def position(self) -> int:
        """The read cursor: the next position to deliver."""
        with self.state:
            return self.progress.read

    def peek(self, limit: int, since: int | None = None) -> list[Descriptor]:
        """Up to ``limit`` descriptors from a position on, by default the read cursor."""
        self.check_open()
        self.look()
        found = self.queue.peek(self.position if since is None else since, limit)
        self.ended = found.ended
        with self.state:
            self._show_length(found.length)
        if found.records is not None:
            LAG_RECORDS.labels(*self._labels).set(found.records)
        if found.size is not None:
            LAG_BYTES.labels(*self._labels).set(found.size)
        return list(found.descriptors)

    def _show_length(self, length: int) -> None:
        self.length = length
        QUEUE_LENGTH.labels(*self._labels).set(length)

    def acknowledged(self, batches: int, length: int | None) -> None:
        """Count durably acknowledged batches; ``length`` is that of the queue just written, if it is known.

        The caller holds the lock of the numbers.
        """
        ACKNOWLEDGED.inc(batches)
        self._show_length(max(0, self.length - batches) if length is None else length)

    def fetch(self, descriptor: Descriptor) -> ConsumedBatch:
        """Read a batch, and record its lag; moves no cursor."""
        batch = self.handle.fetch(descriptor)
        self._note_lag(descriptor)
        return batch

    def _note_lag(self, descriptor: Descriptor) -> None:
        if descriptor.metadata:
            self.lag = max(0.0, (self.env.clock.now() - descriptor.metadata[-1].ingested) / SECOND)
            LAG_SECONDS.labels(*self._labels).set(self.lag)

    def fetch_next(self) -> ConsumedBatch | None:
        """Read the batch after the read cursor, which stays; an unreadable batch is dead-lettered or raised.

        The caller holds the lock.
        """
        while found := self.peek(1):
            (descriptor,) = found
            try:
                return self.fetch(descriptor)
            except (CorruptData, NotFound) as error:
                self._take_letter(descriptor, error)
        return None

    def _take_letter(self, descriptor: Descriptor, error: CorruptData | NotFound) -> None:
        """Set an unreadable batch aside, with a warning, or raise its error. The caller holds the lock."""
        if self.raises:
            raise error
        try:
            where = self.set_aside(descriptor, str(error))
        except TooManyDeadLetters as limit:
            raise limit from error
        _LOGGER.warning("Batch %d of %s was set aside as %s: %s", descriptor.sequence, self.queue.url, where, error)

    def set_aside(self, descriptor: Descriptor, reason: str) -> str:
        """Durably store what is left of a batch, and move past it; returns its location. The caller holds the lock."""
        with self.state:
            self.progress.check_aside(descriptor)
        if self.dead_letters >= MOST_DEAD_LETTERS:
            raise TooManyDeadLetters(
                f"Batch {descriptor.sequence} ({descriptor.location}) of {self.queue.url} cannot be read, and "
                f"{self.dead_letters} were set aside before it, which is the limit: find out what damages them. The "
                f"cursor stays before it. {reason}"
            )
        where = self.queue.dead_letter(descriptor, reason)  # durable before the consumer continues
        with self.state:
            self.progress.set_aside(descriptor)
            self.dead_letters += 1
        DEAD_LETTERS.inc()
        return where

    def hand_out(self, descriptors: list[Descriptor]) -> None:
        """Move the read cursor past batches that are delivered now. The caller holds the lock."""
        with self.state:
            self.progress.hand_out(descriptors)

    def take_back(self, descriptor: Descriptor) -> None:
        """Move the read cursor back before a batch that did not reach the caller of the consumer."""
        with self.lock, self.state:
            self.progress.take_back(descriptor)

    def batches(self, *, parallel: int, ahead: int) -> Iterator[ConsumedBatch]:
        """All batches after the read cursor, read ahead in parallel; skips those that another call has delivered."""
        found = True
        while found:
            found = False
            for piece, pages in fetch_in_order(self._pieces(), workers=parallel, ahead=ahead):
                found = True
                batch = None
                try:
                    with self.lock:
                        if piece.descriptor.sequence < self.position:
                            continue  # another call delivered it
                        if start_of(piece.descriptor) != self.position:
                            break  # another call delivered a part of it: read the descriptors again
                        if piece.poison is not None:
                            self._take_letter(piece.descriptor, piece.poison)
                            continue
                        self.check_open()
                        self._note_lag(piece.descriptor)
                        batch = ConsumedBatch(piece.descriptor, tuple(pages))
                        self.hand_out([piece.descriptor])  # last: a handed-out batch is also delivered
                except BaseException:
                    if batch is not None:  # interrupted before the caller got it
                        self.take_back(batch.descriptor)
                    raise
                yield batch

    def _pieces(self) -> Iterator[BatchPiece]:
        since = self.position
        while found := self.peek(_DESCRIPTORS, since):
            since = found[-1].sequence + 1
            for descriptor in found:
                yield BatchPiece(descriptor, self.handle.fetcher)
