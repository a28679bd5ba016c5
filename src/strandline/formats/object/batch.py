"""Batch object, version 2: an Arrow block, a footer, and a fixed tail with the version."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.arrow.block import Compression, Parts, decode_block, frame_pages
from strandline.formats.checksum import crc32c
from strandline.model.head import WriterId

VERSION: Final = 2

_FOOTER = struct.Struct("<QIqq16sQ")
_CHECKSUM = struct.Struct("<I")
_TAIL = struct.Struct("<BIH")
_TRAILER_SIZE: Final = _FOOTER.size + _CHECKSUM.size + _TAIL.size


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The footer of a batch. Times are microseconds."""

    compression: Compression
    count: int
    pages: int
    oldest: int
    newest: int
    writer: WriterId
    number: int


def encode_batch(pages: Sequence[Parts], info: BatchInfo) -> Parts:
    """The object's buffers, to be written one after another."""
    parts = frame_pages(pages)
    footer = _FOOTER.pack(sum(map(len, parts)), info.pages, info.oldest, info.newest, info.writer.bytes, info.number)
    tail = _TAIL.pack(info.compression, info.count, VERSION)
    checksum = 0
    for part in (*parts, footer, tail):
        checksum = crc32c(part, checksum)
    return [*parts, footer + _CHECKSUM.pack(checksum) + tail]


def decode_batch(data: bytes | memoryview, where: str) -> tuple[BatchInfo, list[pa.RecordBatch]]:
    """The batch in these bytes, fully checked: checksum, schema, every buffer, counts."""
    view = memoryview(data).cast("B")
    if len(view) < _TAIL.size:
        raise CorruptData(f"{where} is damaged: {len(view)} bytes cannot be a batch. Restore the object.")
    compression, count, version = _TAIL.unpack_from(view, len(view) - _TAIL.size)
    if version > VERSION:
        raise UnsupportedVersion(
            f"{where} is a batch of version {version}, and this program reads up to {VERSION}: upgrade strandline."
        )
    if version != VERSION or len(view) < _TRAILER_SIZE:
        raise CorruptData(f"{where} is damaged: it does not end as a batch of version {VERSION} should.")
    at = len(view) - _TRAILER_SIZE
    length, pages, oldest, newest, writer, number = _FOOTER.unpack_from(view, at)
    (checksum,) = _CHECKSUM.unpack_from(view, at + _FOOTER.size)
    sealed = crc32c(view[-_TAIL.size :], crc32c(view[: at + _FOOTER.size]))
    if length != at or checksum != sealed:
        raise CorruptData(f"{where} is damaged: its checksum is wrong. Restore the object; retrying does not help.")
    try:
        info = BatchInfo(Compression(compression), count, pages, oldest, newest, WriterId(UUID(bytes=writer)), number)
    except ValueError as error:
        raise CorruptData(f"{where} is damaged: it names the unknown compression {compression}.") from error
    batches = decode_block(view[:at], where, info.compression)
    rows = sum(batch.num_rows for batch in batches)
    if rows != count or len(batches) != pages:
        raise CorruptData(
            f"{where} is damaged: it holds {rows} records in {len(batches)} pages, its footer says {count} in {pages}."
        )
    return info, batches
