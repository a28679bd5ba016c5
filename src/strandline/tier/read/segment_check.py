"""Checks of every byte of a segment, for verifications: also of those that no reader of the log needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import pyarrow as pa

from strandline.formats.checksum import crc32c, joined_crc32c
from strandline.formats.segment.file import LISTED, ByteRange, damaged_segment
from strandline.formats.segment.records import decode_group
from strandline.log.read.planning import clipped
from strandline.model.records import READ_SCHEMA
from strandline.tier.copy.segment_files import ColdSpan, is_longer, read_range

_COLUMNS: Final = (*READ_SCHEMA.names, LISTED)


def read_whole_group(span: ColdSpan) -> list[pa.RecordBatch]:
    """The records of a span, as :meth:`ColdSpan.fetch` returns them, with every column verified and decoded.

    A reader does not read the stored offsets, and listing times only to find a time.
    """
    tail = span.tail()
    group = tail.group(span.group)
    batches = decode_group(tail, span.group, _COLUMNS, span.pieces(tail.chunks(span.group)))
    stored = pa.concat_arrays([batch.column(0) for batch in batches])
    if not stored.equals(pa.arange(group.first, group.next)):
        raise damaged_segment(tail.where, f"its offsets from {group.first} on do not follow each other")
    return [batch.select(READ_SCHEMA.names) for batch in clipped(batches, span.first, span.next)]


def check_between_columns(span: ColdSpan) -> None:
    """Verify the bytes of a segment that belong to no column, such as the page index; ``CorruptData``.

    The columns are not read: their checksums in the tail, joined with those of the bytes between, are the checksum of
    the whole object in the events.
    """
    tail, seal = span.tail(), span.seal
    columns = sorted((chunk for number in range(len(tail)) for chunk in tail.chunks(number)), key=lambda one: one.start)
    borders = [ByteRange(0, 0, 0), *columns, ByteRange(seal.size - seal.tail, 0, 0)]
    checksum = 0
    for before, after in pairwise(borders):
        size = after.start - before.next
        if size < 0:
            raise damaged_segment(tail.where, "its columns overlap")
        between = read_range(span.store, span.path, before.next, size, "it has a tail") if size else b""
        checksum = joined_crc32c(crc32c(between, checksum), after.checksum, after.size)
    if joined_crc32c(checksum, seal.tail_checksum, seal.tail) != seal.checksum:
        raise damaged_segment(tail.where, "the checksum of the bytes between its columns is wrong")
    if is_longer(span.store, span.path, seal.size):
        raise damaged_segment(tail.where, f"it has more than its {seal.size} bytes")
