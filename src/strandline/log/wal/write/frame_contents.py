"""Frame contents: one batch per frame, or single values packed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.formats.arrow.block import Parts
from strandline.formats.arrow.value_page import MOST_RECORDS, encode_values
from strandline.formats.wal.folder import batch_metadata
from strandline.log.wal.read.tail import Records
from strandline.log.wal.write.groups import Item, ValueRun, Whole
from strandline.model.head import WriterId

_LITTLE: Final = 4096

FRAME_BYTES: Final = 4 << 20
"""Values that were appended one by one share a frame up to so many bytes; a larger one has its own."""


class FrameContent(NamedTuple):
    """What goes into one frame."""

    first: int
    term: int
    records: int
    pages: Sequence[Parts]
    metadata: Mapping[str, str] | None
    timestamp: int | None
    """When it says that it was written, in milliseconds; None for when it is."""
    append: tuple[WriterId, int] | None
    """Whose append it is, and its number; None if nobody numbered it."""
    kept: Records | None
    """The records, if they may stay in memory for readers."""


def contents_of(items: Sequence[Item]) -> Iterator[FrameContent]:
    """A frame for each batch, and one or more for each run of values, in their order."""
    for item in items:
        if isinstance(item, Whole):
            yield _batch(item)
        elif len(item.values) <= MOST_RECORDS and sum(map(len, item.values)) <= FRAME_BYTES:
            yield _values(item.first, item.term, item.values, item.timestamps)
        else:
            yield from _pieces(item)


def _batch(whole: Whole) -> FrameContent:
    metadata = None if whole.writer is None else batch_metadata(*whole.writer)
    records = Records(whole.batches, append=whole.writer, checksums=whole.checksums)
    kept = records if _is_compact(whole.batches) else None
    return FrameContent(
        whole.first, whole.term, whole.count, whole.pages, metadata, whole.timestamp, whole.writer, kept
    )


def _values(first: int, term: int, values: Sequence[bytes], timestamps: Sequence[int]) -> FrameContent:
    page = encode_values(values, timestamps)
    return FrameContent(first, term, len(values), [[page]], None, None, None, Records(None, page))


def _pieces(run: ValueRun) -> Iterator[FrameContent]:
    """A long run in several frames: nobody was promised that its records stay together."""
    start = size = 0
    for at, value in enumerate(run.values):
        if at > start and (size + len(value) > FRAME_BYTES or at - start >= MOST_RECORDS):
            yield _values(run.first + start, run.term, run.values[start:at], run.timestamps[start:at])
            start, size = at, 0
        size += len(value)
    yield _values(run.first + start, run.term, run.values[start:], run.timestamps[start:])


def _is_compact(batches: Sequence[pa.RecordBatch]) -> bool:
    """Whether these batches hold on to little more than their own bytes: a slice keeps all it was cut from."""
    for batch in batches:
        size = batch.get_total_buffer_size()  # quick; the other one is not
        if size > _LITTLE and size > 2 * batch.nbytes + _LITTLE:
            return False
    return True
