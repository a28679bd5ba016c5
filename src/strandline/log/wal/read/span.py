"""Frames that are in memory, and the span of a write-ahead log: a range of offsets in one frame."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from strandline.errors import NotFound
from strandline.formats.arrow.block import Parts
from strandline.formats.arrow.stream import ArrowStream
from strandline.formats.arrow.value_page import decode_values
from strandline.formats.wal.folder import append_of
from strandline.formats.wal.frame import Frame, FrameScanner, decode_frame
from strandline.log.read.planning import clipped, known_columns
from strandline.log.wal.read.catalog import Located, damaged_file
from strandline.model.head import LogBatch, WriterId
from strandline.model.records import with_offsets
from strandline.storage.disk import DISK, Disk
from strandline.storage.metrics import fetching

_TAKEN: Final = 64
"""Number of frames read from the tail in one turn: a plan seldom needs more."""


@dataclass(slots=True, eq=False)
class Records:
    """The records of a frame, in memory: shared by all readers without copies."""

    _batches: tuple[pa.RecordBatch, ...] | None
    _page: bytes = b""
    append: tuple[WriterId, int] | None = None
    """Writer and number of the append; None if unnumbered."""
    checksums: tuple[int, ...] | None = None

    def batches(self) -> tuple[pa.RecordBatch, ...]:
        """The records; a page is decoded by its first reader, not by the committing thread."""
        if self._batches is None:
            self._batches = (decode_values(self._page),)
        return self._batches


class Tail:
    """The last durable frames of a log, without a gap, up to about ``limit`` bytes. Safe in threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._firsts: list[int] = []
        self._frames: list[WalSpan] = []
        self._held = 0
        self._lock = threading.Lock()

    def add(self, frames: Sequence[WalSpan]) -> None:
        """Add frames that have become durable."""
        with self._lock:
            self._firsts += [held.first for held in frames]
            self._frames += frames
            self._held += sum(map(_weight, frames))
            if self._held > self._limit:
                self._shrink()

    def _shrink(self) -> None:
        """Drop the oldest frames, a quarter more than needed: removing from the front of a list moves the rest."""
        gone = 0
        while gone < len(self._frames) and self._held > self._limit - self._limit // 4:
            self._held -= _weight(self._frames[gone])
            gone += 1
        del self._firsts[:gone], self._frames[:gone]

    def begins(self) -> int | None:
        """The first offset in the tail; None if it is empty."""
        with self._lock:
            return self._firsts[0] if self._firsts else None

    def since(self, offset: int) -> Iterator[WalSpan]:
        """The frames from the one with this offset on; the tail must begin at or before it."""
        while taken := self.some(offset):
            yield from taken
            offset = taken[-1].next

    def some(self, offset: int) -> list[WalSpan]:
        """The first few frames from the one with this offset on; none if the tail does not have them."""
        with self._lock:
            at = bisect_right(self._firsts, offset) - 1
            taken = self._frames[at : at + _TAKEN] if at >= 0 else []
        return taken if taken and taken[-1].next > offset else []


def _weight(held: WalSpan) -> int:
    # A frame without its records costs a little, too, so that a tail of many small ones is bounded.
    return 512 + (held.size if held.cached is not None else 0)


@dataclass(frozen=True, slots=True)
class WalSpan:
    """Offsets ``first`` up to ``next`` of one frame. Picklable: another process on this machine reads the file.

    Frames in the log's in-memory tail are not read or copied.
    """

    frame: Located
    first: int
    next: int
    cached: Records | None = field(default=None, compare=False, repr=False)
    disk: Disk = field(default=DISK, compare=False, repr=False)

    @classmethod
    def of(cls, frame: Located, cached: Records | None, disk: Disk) -> WalSpan:
        """A whole frame."""
        return cls(frame, frame.first, frame.next, cached, disk)

    def part(self, first: int, upto: int) -> WalSpan:
        """Some of its offsets."""
        is_whole = first == self.first and upto == self.next
        return self if is_whole else WalSpan(self.frame, first, upto, self.cached, self.disk)

    def __reduce__(self) -> tuple[Any, ...]:
        return (WalSpan, (self.frame, self.first, self.next))

    @property
    def size(self) -> int:
        """The bytes of the frame."""
        return self.frame.size

    @property
    def term(self) -> int:
        """The term of its records."""
        return self.frame.term

    @property
    def fingerprint(self) -> int:
        """Identifies its batch among all that could be written there."""
        return self.frame.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole frame, and return the span's records with their offsets."""
        if self.cached is None:
            batches: Sequence[pa.RecordBatch] = self._read().batches
        else:
            batches = self.cached.batches()
        numbered = clipped(with_offsets(batches, self.frame.first), self.first, self.next)
        return numbered if columns is None else [batch.select(known_columns(columns)) for batch in numbered]

    def batch(self, data: memoryview | None = None) -> LogBatch:
        """The whole frame as it was written, even if the span is a part of it: a replica appends it.

        Raises as :meth:`fetch` does. Frames in memory are neither read nor copied; ``data`` are the frame's bytes, if
        they are read already.
        """
        frame = self.frame
        if self.cached is not None:
            return batch_of(frame, self.cached)
        block = self._read(data)
        append = append_of(block.metadata, f"{frame.path} at byte {frame.position}")
        return batch_of(frame, Records(tuple(block.batches), append=append), _stored_pages(block))

    def raw(self) -> memoryview:
        """The bytes of the frame as they are on the disk, unchecked; ``NotFound`` if the file is missing."""
        return self.bytes_at(self.frame.position, self.frame.size)

    def _read(self, data: memoryview | None = None) -> ArrowStream:
        frame = self.frame
        data = self.raw() if data is None else data
        with fetching() as count:
            block = decode_frame(whole_frame(data, frame), f"{frame.path} at byte {frame.position}")
            count(frame.next - frame.first, frame.size)
        return block

    def bytes_at(self, position: int, size: int) -> memoryview:
        """Bytes of the file of the frame."""
        try:
            return memoryview(self.disk.read(self.frame.path, position, size))
        except NotFound as error:
            raise NotFound(
                f"{self.frame.path} is missing (offsets {self.frame.first} to {self.frame.next - 1}): it was trimmed "
                "since this was planned, or has to be restored."
            ) from error

    def follows(self, other: WalSpan) -> bool:
        """Whether its frame directly follows another one on the disk, and neither is in memory."""
        before = other.frame
        return (
            self.cached is None
            and other.cached is None
            and self.frame.path == before.path
            and self.frame.position == before.position + before.size
        )


def batch_of(frame: Located, records: Records, pages: tuple[Parts, ...] | None = None) -> LogBatch:
    """The batch of a frame whose records are in memory, with its pages if those are, too."""
    batches = tuple(map(_plain, records.batches()))
    return LogBatch(frame.first, frame.term, frame.timestamp, records.append, batches, pages, records.checksums)


def _stored_pages(block: ArrowStream) -> tuple[Parts, ...] | None:
    """The stored pages, if Arrow would write as many bytes today: senders need not encode them again.

    A page with another layout, by another version of Arrow, would not match the checksum of a replica, which encodes
    the received records itself.
    """
    sizes = [pa.ipc.get_record_batch_size(batch) for batch in block.batches]
    return tuple([[page] for page in block.messages]) if sizes == list(map(len, block.messages)) else None


def some_batches(frames: Iterable[WalSpan], size: int) -> list[LogBatch]:
    """The batches of the first few frames, up to ``size`` bytes and at least one, as long as they are in memory."""
    batches: list[LogBatch] = []
    for held in frames:
        size -= held.size
        if held.cached is None or (batches and size < 0):
            break
        batches.append(batch_of(held.frame, held.cached))
    return batches


def whole_batches(spans: Sequence[WalSpan]) -> list[LogBatch]:
    """The batch of each span, in order; contiguous frames are read at once."""
    batches: list[LogBatch] = []
    at = 0
    while at < len(spans):
        end = at + 1
        while end < len(spans) and spans[end].follows(spans[end - 1]):
            end += 1
        run = spans[at:end]
        if len(run) == 1:
            batches.append(run[0].batch())
        else:
            start, last = run[0].frame.position, run[-1].frame
            data = run[0].bytes_at(start, last.position + last.size - start)
            batches += [span.batch(data[span.frame.position - start :][: span.frame.size]) for span in run]
        at = end
    return batches


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without schema metadata: the written batch does not have it either."""
    return batch if batch.schema.metadata is None else batch.replace_schema_metadata(None)


def whole_frame(data: memoryview, frame: Located) -> Frame:
    """The frame in these bytes, fully checked; ``CorruptData`` unless it is the located one."""
    scanner = FrameScanner(data, origin=frame.position)
    found = next(iter(scanner), None)
    if found is None:
        raise damaged_file(frame.path, frame.position, scanner.stop.why)
    if (found.info.first, found.info.count) != (frame.first + 1, frame.next - frame.first):
        raise damaged_file(frame.path, frame.position, "another frame is there than the located one")
    return found
