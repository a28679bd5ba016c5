"""Records of a segment file: a row group's columns, bounded by their headers, decompressed, validated."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strandline.formats.arrow.header import check_unpacked, unpacked_limit
from strandline.formats.checksum import crc32c
from strandline.formats.segment.file import (
    LARGEST_SEGMENT,
    PHYSICAL,
    SEGMENT_SCHEMA,
    ByteRange,
    SegmentTail,
    damaged_segment,
)
from strandline.formats.segment.thrift import DELTA_BINARY_PACKED, PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY, read_pages
from strandline.model.records import HEADERS, Op, are_operations

_HEADER_NAMES: Final = "headers.key_value.key"
_ENCODINGS: Final = {
    path: frozenset((PLAIN, DELTA_BINARY_PACKED, PLAIN_DICTIONARY, RLE_DICTIONARY))
    if kind != "BYTE_ARRAY" or path == _HEADER_NAMES
    else frozenset((PLAIN,))
    for path, kind in PHYSICAL
}
"""The allowed encodings per column. Only header names and numbers have dictionaries."""
_CODECS: Final = frozenset(("ZSTD", "UNCOMPRESSED"))
_VALUE_WIDTH: Final = 16
"""Memory per value during decoding, besides its bytes."""


def decode_group(
    tail: SegmentTail, number: int, columns: Sequence[str], pieces: Sequence[tuple[ByteRange, bytes | memoryview]]
) -> list[pa.RecordBatch]:
    """These columns of a group, from the bytes of the ranges of :meth:`SegmentTail.ranges`, each checked.

    The unpacked size is checked by the headers of the pages, before anything is unpacked.
    """
    for piece, data in pieces:
        if len(data) != piece.size or crc32c(data, 0) != piece.checksum:
            raise damaged_segment(tail.where, f"the checksum of bytes {piece.start} to {piece.next - 1} is wrong")
    group = tail.group(number)
    try:
        is_shared = _check_pages(tail, number, columns, pieces)
        source = pa.PythonFile(_SparseFile(pieces), mode="r")
        shared = [_HEADER_NAMES] if is_shared else None
        with pq.ParquetFile(source, metadata=tail.footer, pre_buffer=False, read_dictionary=shared) as file:
            table = file.read_row_group(number, columns=list(columns), use_threads=False)
        if is_shared:
            table = _decode_header_names(table, tail.where)
        table = table.combine_chunks()
        table.validate(full=True)
        wanted = pa.schema([SEGMENT_SCHEMA.field(name) for name in columns])
        batches: list[pa.RecordBatch] = table.select(list(columns)).cast(wanted).to_batches()
    except pa.ArrowMemoryError:  # within the limits: the machine lacks memory, and the bytes may be valid
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise damaged_segment(tail.where, f"its row group {number} cannot be read ({str(error)[:200]})") from error
    if table.num_rows != group.next - group.first:
        raise damaged_segment(tail.where, f"its row group {number} holds {table.num_rows} records")
    for batch in batches:
        if "op" in columns and not are_operations(batch.column("op")):
            raise damaged_segment(
                tail.where, f"its row group {number} has operations outside {Op.PUT:d} to {Op.PURGE:d}"
            )
    return batches


def _check_pages(
    tail: SegmentTail, number: int, columns: Sequence[str], pieces: Sequence[tuple[ByteRange, bytes | memoryview]]
) -> bool:
    """Check the unpacked size of these columns; returns whether the header names must be counted exactly.

    ``CorruptData`` if it is too large, ``ValueError`` for pages that the writer never produces.
    """
    found = {piece.start: memoryview(data) for piece, data in pieces}
    group = tail.footer.row_group(number)
    stored = unpacked = shared = 0
    for leaf, chunk in enumerate(tail.chunks(number)):
        path, _ = PHYSICAL[leaf]
        if path.partition(".")[0] not in columns:
            continue
        pages = read_pages(found[chunk.start])
        column_metadata = group.column(leaf)
        if column_metadata.compression not in _CODECS or not pages.encodings <= _ENCODINGS[path]:
            raise ValueError(f"{path} has an encoding that segments do not use")
        if pages.values != column_metadata.num_values or ("." not in path and pages.values != group.num_rows):
            raise ValueError(f"{path} has {pages.values:,} values, instead of {column_metadata.num_values:,}")
        stored += chunk.size
        unpacked += pages.unpacked + pages.values * _VALUE_WIDTH
        if path == _HEADER_NAMES and pages.dictionary is not None:
            shared = pages.values * pages.dictionary
    check_unpacked(unpacked, stored, tail.where)
    return unpacked + shared > unpacked_limit(stored)


def _decode_header_names(table: pa.Table, where: str) -> pa.Table:
    """The table with header names decoded from their dictionary, if their total size is allowed."""
    for chunk in table.column("headers").chunks:
        names = chunk.keys
        size = pc.sum(pc.binary_length(names.dictionary).cast(pa.int64()).take(names.indices)).as_py() or 0
        check_unpacked(size, 0, where)
    place = table.column_names.index("headers")
    return table.set_column(place, SEGMENT_SCHEMA.field("headers"), table.column(place).cast(HEADERS))


class _SparseFile(io.RawIOBase):
    """A file-like object over some byte ranges; reading others is an error."""

    def __init__(self, pieces: Sequence[tuple[ByteRange, bytes | memoryview]]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece[0].start)
        self._starts = [piece.start for piece, _ in self._pieces]
        self._position = 0

    def read(self, size: int = -1) -> Any:
        number = bisect_right(self._starts, self._position) - 1
        piece, data = self._pieces[number]
        start = self._position - piece.start
        if number < 0 or start + size > piece.size:
            raise OSError(f"bytes {self._position} to {self._position + size - 1} were not fetched")
        self._position += size
        return memoryview(data)[start : start + size]

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = LARGEST_SEGMENT if whence else position
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True
