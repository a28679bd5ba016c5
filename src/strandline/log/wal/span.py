"""A piece of a plan over frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from strandline.formats.frame import Frame, FrameScanner, decode_frame
from strandline.log.planning import clipped, known_columns
from strandline.log.wal.catalog import Located, damaged
from strandline.log.wal.tail import Records
from strandline.model.errors import NotFound
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

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read and check the whole frame, and return the span's records with their offsets."""
        if self.cached is None:
            with fetching() as count:
                batches: Sequence[pa.RecordBatch] = self._read()
                count(self.frame.next - self.frame.first, self.frame.size)
        else:
            batches = self.cached.batches()
        numbered = clipped(with_offsets(batches, self.frame.first), self.first, self.next)
        return numbered if columns is None else [batch.select(known_columns(columns)) for batch in numbered]

    def _read(self) -> list[pa.RecordBatch]:
        path, position = self.frame.path, self.frame.position
        try:
            data = memoryview(self.disk.read(path, position, self.frame.size))
        except NotFound as error:
            raise NotFound(
                f"{path} is gone (offsets {self.frame.first} to {self.frame.next - 1}): it was pruned since this was "
                "planned, or has to be restored."
            ) from error
        return decode_frame(whole_frame(data, self.frame), f"{path} at byte {position}").batches


def whole_frame(data: memoryview, frame: Located) -> Frame:
    """The frame in these bytes, every one of them checked; ``CorruptData`` unless it is the one that was located."""
    scanner = FrameScanner(data, origin=frame.position)
    found = next(iter(scanner), None)
    if found is None:
        raise damaged(frame.path, frame.position, scanner.stop.why)
    if (found.info.first, found.info.count) != (frame.first + 1, frame.next - frame.first):
        raise damaged(frame.path, frame.position, "another frame is there than the one that was found")
    return found
