"""Span of a write-ahead log: a range of offsets in one frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from strandline.errors import NotFound
from strandline.formats.arrow.block import Parts
from strandline.formats.arrow.stream import ArrowStream
from strandline.formats.wal.folder import append_of
from strandline.formats.wal.frame import Frame, FrameScanner, decode_frame
from strandline.log.planning import clipped, known_columns
from strandline.log.wal.read.catalog import Located, damaged
from strandline.log.wal.read.tail import Held, Records
from strandline.model.head import LogBatch
from strandline.model.records import with_offsets
from strandline.storage.disk import DISK, Disk
from strandline.storage.metrics import fetching


@dataclass(frozen=True, slots=True)
class WalSpan:
    """Offsets ``first`` up to ``next`` of one frame. Picklable: another process on this machine reads the file.

    What is in the tail that the log keeps in memory comes from there, without a copy, for every reader the same.
    """

    frame: Located
    first: int
    next: int
    cached: Records | None = field(default=None, compare=False, repr=False)
    disk: Disk = field(default=DISK, compare=False, repr=False)

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
        """Tells its batch from every other that could be written there."""
        return self.frame.fingerprint

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole frame, and return the span's records with their offsets."""
        if self.cached is None:
            batches: Sequence[pa.RecordBatch] = self._read().batches
        else:
            batches = self.cached.batches()
        numbered = clipped(with_offsets(batches, self.frame.first), self.first, self.next)
        return numbered if columns is None else [batch.select(known_columns(columns)) for batch in numbered]

    def batch(self) -> LogBatch:
        """The whole frame as it was written, whatever part of it the span is: what a replica appends.

        Raises as :meth:`fetch` does. What is in memory is neither read nor copied.
        """
        return self._batch(self._read() if self.cached is None else None)

    def _batch(self, block: ArrowStream | None) -> LogBatch:
        frame = self.frame
        if self.cached is not None:
            return batch_of(frame, self.cached)
        if block is None:
            raise AssertionError("it was neither kept nor read")
        append = append_of(block.metadata, f"{frame.path} at byte {frame.position}")
        return batch_of(frame, Records(tuple(block.batches), append=append), _stored_pages(block))

    def _read(self) -> ArrowStream:
        frame = self.frame
        return self._decode(self._bytes(frame.position, frame.size))

    def _decode(self, data: memoryview) -> ArrowStream:
        frame = self.frame
        with fetching() as count:
            block = decode_frame(whole_frame(data, frame), f"{frame.path} at byte {frame.position}")
            count(frame.next - frame.first, frame.size)
        return block

    def _bytes(self, position: int, size: int) -> memoryview:
        try:
            return memoryview(self.disk.read(self.frame.path, position, size))
        except NotFound as error:
            raise NotFound(
                f"{self.frame.path} is gone (offsets {self.frame.first} to {self.frame.next - 1}): it was pruned since "
                "this was planned, or has to be restored."
            ) from error

    def follows(self, other: WalSpan) -> bool:
        """Whether its frame stands right behind another one on the disk, and neither is in memory."""
        before = other.frame
        return (
            self.cached is None
            and other.cached is None
            and self.frame.path == before.path
            and self.frame.position == before.position + before.size
        )


def batch_of(frame: Located, records: Records, pages: tuple[Parts, ...] | None = None) -> LogBatch:
    """The batch of a frame whose records are in memory, with its pages if they are, too."""
    batches = tuple(map(_plain, records.batches()))
    return LogBatch(frame.first, frame.term, frame.timestamp, records.append, batches, pages, records.checksums)


def _stored_pages(block: ArrowStream) -> tuple[Parts, ...] | None:
    """The pages as they are stored, if Arrow would write as many bytes today; whoever sends them need not encode them.

    A page that was laid out in another way, by another version of Arrow, would not have the checksum that a replica
    finds: it encodes what has come by itself.
    """
    sizes = [pa.ipc.get_record_batch_size(batch) for batch in block.batches]
    return tuple([[page] for page in block.messages]) if sizes == list(map(len, block.messages)) else None


def some_batches(frames: Iterable[Held], size: int) -> list[LogBatch]:
    """The batches of the first few frames, up to ``size`` bytes and at least one, as long as they are in memory."""
    batches: list[LogBatch] = []
    for frame, records in frames:
        size -= frame.size
        if records is None or (batches and size < 0):
            break
        batches.append(batch_of(frame, records))
    return batches


def whole_batches(spans: Sequence[WalSpan]) -> list[LogBatch]:
    """The batch of each span, in order; what stands together on the disk is read at once."""
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
            first, last = run[0].frame, run[-1].frame
            data = run[0]._bytes(first.position, last.position + last.size - first.position)  # noqa: SLF001
            for span in run:
                start = span.frame.position - first.position
                block = span._decode(data[start : start + span.frame.size])  # noqa: SLF001 - of the same module
                batches.append(span._batch(block))  # noqa: SLF001
        at = end
    return batches


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without what somebody had noted beside its schema: what is written does not have it either."""
    return batch if batch.schema.metadata is None else batch.replace_schema_metadata(None)


def whole_frame(data: memoryview, frame: Located) -> Frame:
    """The frame in these bytes, every one of them checked; ``CorruptData`` unless it is the one that was located."""
    scanner = FrameScanner(data, origin=frame.position)
    found = next(iter(scanner), None)
    if found is None:
        raise damaged(frame.path, frame.position, scanner.stop.why)
    if (found.info.first, found.info.count) != (frame.first + 1, frame.next - frame.first):
        raise damaged(frame.path, frame.position, "another frame is there than the one that was found")
    return found
