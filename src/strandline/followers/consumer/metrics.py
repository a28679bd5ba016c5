"""Last observed lag and sizes of a consumer's queue, for its properties and for Prometheus."""

from __future__ import annotations

from strandline.log.queue.contract import Look
from strandline.model.cursor import SECOND
from strandline.model.head import Descriptor
from strandline.storage.metrics import (
    ACKNOWLEDGED,
    DEAD_LETTERS,
    DESCRIPTORS,
    LAG_BYTES,
    LAG_RECORDS,
    LAG_SECONDS,
    QUEUE_LENGTH,
)


class Gauges:
    """The numbers of one consumer; no I/O, and not safe in threads by themselves."""

    __slots__ = ("_labels", "dead_letters", "lag", "length")

    def __init__(self, url: str, slot: str) -> None:
        """Of the consumer of this slot; nothing was seen yet."""
        self._labels = (url, slot)
        self.length = 0
        """Batches that are listed and not durably acknowledged."""
        self.lag: float | None = None
        """How many seconds after its ingestion the last batch that has metadata was read."""
        self.dead_letters = 0
        """Batches that were set aside."""

    def looked(self, look: Look) -> None:
        """The queue was looked at."""
        self._show_length(look.length)
        if look.records is not None:
            LAG_RECORDS.labels(*self._labels).set(look.records)
        if look.size is not None:
            LAG_BYTES.labels(*self._labels).set(look.size)

    def handed_out(self, descriptors: int) -> None:
        """Descriptors left the consumer without having been read."""
        DESCRIPTORS.inc(descriptors)

    def fetched(self, descriptor: Descriptor, now: int) -> None:
        """A batch was read."""
        if descriptor.metadata:
            self.lag = max(0.0, (now - descriptor.metadata[-1].ingested) / SECOND)
            LAG_SECONDS.labels(*self._labels).set(self.lag)

    def acknowledged(self, batches: int) -> None:
        """So many more batches are durably acknowledged."""
        ACKNOWLEDGED.inc(batches)
        self._show_length(max(0, self.length - batches))

    def set_aside(self) -> None:
        """A batch could not be read."""
        self.dead_letters += 1
        DEAD_LETTERS.inc()

    def _show_length(self, length: int) -> None:
        self.length = length
        QUEUE_LENGTH.labels(*self._labels).set(length)
