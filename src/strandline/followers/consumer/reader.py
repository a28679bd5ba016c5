"""The read side of a consumer: reads batches after the read cursor, which moves only when a batch is delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from strandline.errors import ConsumerClosed, CorruptData, NotFound
from strandline.followers.consumer.batch import BatchPiece, ConsumedBatch, FetchHandle
from strandline.followers.consumer.dead_letters import BatchDeadLetters
from strandline.followers.consumer.progress import AckProgress, Gauges
from strandline.log.queue.contract import Queue, start_of
from strandline.log.read.reading import fetch_in_order
from strandline.model.head import Descriptor
from strandline.storage.clock import Clock

_DESCRIPTORS: Final = 64
"""Number of descriptors that the read-ahead requests at a time."""


class BatchReader:
    """Reads the batches of a claimed queue in order. ``state`` guards the positions in ``progress``.

    It does not refer to its consumer, which can be garbage-collected unclosed.
    """

    def __init__(
        self,
        queue: Queue,
        progress: AckProgress,
        gauges: Gauges,
        letters: BatchDeadLetters,
        state: threading.Lock,
        *,
        clock: Clock,
    ) -> None:
        self.lock = threading.Lock()
        """Protects the read cursor, with its I/O."""
        self.closed = False
        self.handle = FetchHandle(queue.fetcher())
        """Reads batches by their descriptors."""
        self.look: Callable[[], None] = lambda: None
        """Called at each read of the listing: looks for a limit of the slot that was set meanwhile."""
        self._queue = queue
        self._progress = progress
        self._gauges = gauges
        self._letters = letters
        self._state = state
        self._clock = clock

    def check_open(self) -> None:
        """``ConsumerClosed`` after the consumer was closed."""
        if self.closed:
            raise ConsumerClosed(f"The consumer of {self._queue.url} is closed: open a new one.")

    @property
    def position(self) -> int:
        """The read cursor: the next position to deliver."""
        with self._state:
            return self._progress.read

    def peek(self, limit: int, since: int | None = None) -> list[Descriptor]:
        """Up to ``limit`` descriptors from a position on, by default the read cursor; updates the gauges."""
        self.check_open()
        self.look()
        found = self._queue.peek(self.position if since is None else since, limit)
        with self._state:
            self._gauges.peeked(found)
        return list(found.descriptors)

    def fetch(self, descriptor: Descriptor) -> ConsumedBatch:
        """Read a batch, and record its lag; moves no cursor."""
        batch = self.handle.fetch(descriptor)
        self._gauges.fetched(descriptor, self._clock.now())
        return batch

    def fetch_next(self) -> ConsumedBatch | None:
        """Read the batch after the read cursor, which stays; an unreadable batch is dead-lettered or raised.

        The caller holds the lock.
        """
        while found := self.peek(1):
            (descriptor,) = found
            try:
                return self.fetch(descriptor)
            except (CorruptData, NotFound) as error:
                self._letters.take(descriptor, error)
        return None

    def hand_out(self, descriptors: list[Descriptor]) -> None:
        """Move the read cursor past batches that are delivered now. The caller holds the lock."""
        with self._state:
            self._progress.hand_out(descriptors)

    def take_back(self, descriptor: Descriptor) -> None:
        """Move the read cursor back before a batch that did not reach the caller of the consumer."""
        with self.lock, self._state:
            self._progress.take_back(descriptor)

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
                            self._letters.take(piece.descriptor, piece.poison)
                            continue
                        self.check_open()
                        self._gauges.fetched(piece.descriptor, self._clock.now())
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
