"""Sizes from Parquet page headers, checked before Parquet's reader allocates.

A page tells how many values it has and to how many bytes it unpacks; Parquet's reader makes room for both at once. And
two encodings make much of little: a dictionary is unpacked as often as it is referred to, and values that share
prefixes (``DELTA_BYTE_ARRAY``) are written out one by one.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from strandline.formats.segment.thrift import Fields, ThriftReader

PLAIN: Final = 0
PLAIN_DICTIONARY: Final = 2
DELTA_BINARY_PACKED: Final = 5
RLE_DICTIONARY: Final = 8

_DICTIONARIES: Final = frozenset((PLAIN_DICTIONARY, RLE_DICTIONARY))

# Page types, and fields of their headers.
_DATA_PAGE: Final = 0
_DICTIONARY_PAGE: Final = 2
_TYPE, _UNPACKED, _STORED, _DATA_HEADER, _DICTIONARY_HEADER = 1, 2, 3, 5, 7
_VALUES, _ENCODING = 1, 2
_SMALLEST_ENTRY: Final = 4
"""What any entry of a dictionary takes at least: a number, or the length of a text."""


class Pages(NamedTuple):
    """What the pages of one column of a row group announce, all of them together."""

    values: int
    unpacked: int
    """Bytes, with those of the dictionary."""
    dictionary: int | None
    """Bytes of the dictionary alone; None if there is none."""
    encodings: frozenset[int]


def read_pages(chunk: memoryview) -> Pages:
    """What these bytes, which are nothing but pages, announce; ``ValueError`` if they are anything else."""
    values = unpacked = at = 0
    dictionary: int | None = None
    encodings = set()
    while at < len(chunk):
        reader = ThriftReader(chunk, at)
        header = reader.struct()
        size, stored = _natural(header, _UNPACKED), _natural(header, _STORED)
        at = reader.at + stored
        if at > len(chunk):
            raise ValueError("a page is longer than its column")
        unpacked += size
        kind = _natural(header, _TYPE)
        if kind == _DATA_PAGE:
            told = _within(header, _DATA_HEADER)
            values += _natural(told, _VALUES)
            encodings.add(_natural(told, _ENCODING))
        elif kind == _DICTIONARY_PAGE and dictionary is None and not encodings:
            told = _within(header, _DICTIONARY_HEADER)
            if _natural(told, _ENCODING) not in (PLAIN, PLAIN_DICTIONARY):
                raise ValueError("a dictionary is encoded as none is")
            if _natural(told, _VALUES) * _SMALLEST_ENTRY > size:
                raise ValueError("a dictionary announces more entries than it has room for")
            dictionary = size
        else:
            raise ValueError(f"a page of type {kind} stands where none should")
    if encodings & _DICTIONARIES and dictionary is None:
        raise ValueError("values refer to a dictionary that is not there")
    return Pages(values, unpacked, dictionary, frozenset(encodings))


def _natural(fields: Fields, number: int) -> int:
    found = fields.get(number)
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"a page has no field {number}")
    return found


def _within(fields: Fields, number: int) -> Fields:
    found: Any = fields.get(number)
    if not isinstance(found, dict):
        raise ValueError(f"a page has no field {number}")  # noqa: TRY004 - the bytes are wrong, not the program
    return found
