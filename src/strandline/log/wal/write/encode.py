"""Validation and encoding of appends, in the thread of the caller: a later failure would hit other appends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.formats.arrow.block import Compression, Parts, encode_page, page_checksum
from strandline.formats.wal.frame import MAX_PAYLOAD
from strandline.model.records import RecordSource, conform

LARGEST: Final = (1 << 63) - 1
"""Of offsets, terms, numbers and times."""

_METADATA: Final = 4 << 10
"""More than the schema and the metadata of a frame take."""


class Encoded(NamedTuple):
    """A batch that fits a frame: its records, and their bytes."""

    batches: tuple[pa.RecordBatch, ...]
    pages: Sequence[Parts]
    size: int
    checksums: tuple[int, ...] | None = None
    """Of the records of each page, where they are small: for who sends them on, and has no pages then."""


def encoded(batch: RecordSource, *, now: int) -> Encoded:
    """The batch as the pages of a frame; ``InvalidInput`` if it is none, or over 256 MiB."""
    content = encoded_copy(tuple(conform(batch, now=now)))
    is_small = all(len(page) == 1 for page in content.pages)
    return content._replace(checksums=tuple(map(page_checksum, content.pages))) if is_small else content


def encoded_copy(batches: tuple[pa.RecordBatch, ...], pages: Sequence[Parts] | None = None) -> Encoded:
    """The same for records that are known to be such, or even encoded; ``InvalidInput`` if they are over 256 MiB."""
    if pages is None:
        pages = [encode_page(page, Compression.NONE) for page in batches]
    size = sum(len(part) for page in pages for part in page)
    _check_size(size, "batch")
    return Encoded(batches, pages, size)


def value_of(value: bytes) -> bytes:
    """The value as bytes that nobody can change; ``InvalidInput`` if it is none, or over 256 MiB."""
    if type(value) is not bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidInput(f"A value is bytes, not {type(value).__name__}.")
        value = bytes(value)  # a copy: its owner may change it before it is written
    _check_size(len(value), "value")
    return value


def _check_size(size: int, what: str) -> None:
    if size + _METADATA > MAX_PAYLOAD:
        raise InvalidInput(f"A frame may hold {MAX_PAYLOAD:,} bytes and this {what} has {size:,}: append it in parts.")


def check_numbers(**numbers: int | None) -> None:
    """Refuse what a frame cannot say: each is a whole number from 0 up to 63 bits, or was not given."""
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or not 0 <= number <= LARGEST):
            raise InvalidInput(f"{name} is a whole number from 0 up to {LARGEST}, not {number!r}.")
