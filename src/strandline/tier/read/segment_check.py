"""Checks of every byte of a segment, for verifications: also of those that no reader of the log needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import pyarrow as pa

from strandline.errors import CorruptData
from strandline.formats.checksum import crc32c, joined_crc32c
from strandline.formats.segment.file import (
    LISTED,
    ByteRange,
    RowGroup,
    SegmentFacts,
    SegmentTail,
    damaged_segment,
    decode_tail,
    tail_size,
)
from strandline.formats.segment.records import decode_group
from strandline.log.read.planning import clipped
from strandline.model.records import READ_SCHEMA
from strandline.storage.objects.store import ObjectStore
from strandline.tier.copy.segment_files import ColdSpan, fetch_ranges, is_longer, numbered_batches, read_range

_COLUMNS: Final = (*READ_SCHEMA.names, LISTED)
_NEEDED: Final = tuple(name for name in READ_SCHEMA.names if name != "offset")
_READ: Final = 8 << 20
"""Bytes per read."""
_GUESSED_TAIL: Final = 64 << 10


def examine_segment(store: ObjectStore, path: str, size: int) -> SegmentFacts:
    """Read and decode a whole segment without its events, and return its facts.

    ``CorruptData`` names the damage. Another valid segment in its place is not detected.
    """
    where = f"{store.url}/{path}"
    end: bytes | memoryview = b""
    length = min(size, _GUESSED_TAIL)
    while len(end) < length:  # with many groups the tail is longer than guessed
        if length > size:
            raise CorruptData(f"{where} is damaged: its footer is longer than the object. Restore the object.")
        end = read_range(store, path, size - length, length, "it was listed with more")
        length = tail_size(end, where)
    tail, before = decode_tail(memoryview(end)[len(end) - length :], where, before=size - length)
    checksum = 0
    for at in range(0, size - length, _READ):
        checksum = crc32c(read_range(store, path, at, min(_READ, size - length - at), "it ends there"), checksum)
    if checksum != before:
        raise CorruptData(f"{where} is damaged: its checksum is wrong. Restore the object; retrying does not help.")
    for number in range(len(tail)):
        _decoded(tail, tail.group(number), fetch_ranges(store, path, tail.chunks(number)))
    return tail.facts


def read_whole_group(span: ColdSpan) -> list[pa.RecordBatch]:
    """The records of a span, as :meth:`ColdSpan.fetch` returns them, with the bytes of every column verified.

    A reader does not read the stored offsets, and listing times only to find a time.
    """
    tail = span.tail()
    batches = decode_group(tail, span.group, _NEEDED, span.pieces(tail.chunks(span.group)))
    whole = numbered_batches(batches, tail.group(span.group).first)
    return [batch.select(READ_SCHEMA.names) for batch in clipped(whole, span.first, span.next)]


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


def _decoded(
    tail: SegmentTail, group: RowGroup, pieces: Sequence[tuple[ByteRange, bytes | memoryview]]
) -> list[pa.RecordBatch]:
    """All columns of a row group; ``CorruptData`` unless its records are valid, and its offsets without a gap."""
    first = group.first
    batches = decode_group(tail, group.number, _COLUMNS, pieces)
    for batch in batches:
        batch.validate(full=True)
        if not batch.column(0).equals(pa.arange(first, first + batch.num_rows)):
            raise CorruptData(f"{tail.where} is damaged: its offsets from {first} on do not follow each other.")
        first += batch.num_rows
    return batches
