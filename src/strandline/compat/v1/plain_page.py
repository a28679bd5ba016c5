"""Values of a batch read by Arrow's own decoder of plain Parquet pages: no Python for each value."""

from __future__ import annotations

import struct
from typing import Final

import pyarrow as pa

_MAGIC: Final = b"PAR1"
_LENGTH = struct.Struct("<I")
_NAME: Final = b"value"

# Types of fields and of list items in Thrift's compact protocol.
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
# Numbers of Parquet's enumerations.
_BYTE_ARRAY: Final = 6
_REQUIRED = _PLAIN = _UNCOMPRESSED = _DATA_PAGE = 0
_RLE: Final = 3


def read_values(block: memoryview, count: int) -> pa.Array:
    """The first ``count`` values of a block; an ``ArrowException`` or ``OSError`` if it holds fewer.

    The caller ensures that the block can hold the lengths, and that nothing is left over. Blocks end below 2 GiB.
    """
    import pyarrow.parquet as pq

    header = _MAGIC + _page_header(len(block), count)
    footer = _footer(len(header) - len(_MAGIC) + len(block), count)
    file = b"".join((header, block, footer, _LENGTH.pack(len(footer)), _MAGIC))
    column = pq.ParquetFile(pa.BufferReader(file)).read(use_threads=False).column(0)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.nulls(0, pa.binary()), *column.chunks])


def _page_header(size: int, count: int) -> bytes:
    page = _struct({1: (_I32, count), 2: (_I32, _PLAIN), 3: (_I32, _RLE), 4: (_I32, _RLE)})
    return _struct({1: (_I32, _DATA_PAGE), 2: (_I32, size), 3: (_I32, size), 5: (_STRUCT, page)})


def _footer(size: int, count: int) -> bytes:
    """The metadata of a file with one row group of one column, whose only page begins after the magic."""
    start = len(_MAGIC)
    column = _struct(
        {
            1: (_I32, _BYTE_ARRAY),
            2: (_LIST, _list(_I32, _zigzag(_PLAIN))),
            3: (_LIST, _list(_BINARY, _text(_NAME))),
            4: (_I32, _UNCOMPRESSED),
            5: (_I64, count),
            6: (_I64, size),
            7: (_I64, size),
            9: (_I64, start),
        }
    )
    chunk = _struct({2: (_I64, start), 3: (_STRUCT, column)})
    group = _struct({1: (_LIST, _list(_STRUCT, chunk)), 2: (_I64, size), 3: (_I64, count)})
    root = _struct({4: (_BINARY, _text(b"root")), 5: (_I32, 1)})
    leaf = _struct({1: (_I32, _BYTE_ARRAY), 3: (_I32, _REQUIRED), 4: (_BINARY, _text(_NAME))})
    schema, groups = _list(_STRUCT, root, leaf), _list(_STRUCT, group)
    return _struct({1: (_I32, 1), 2: (_LIST, schema), 3: (_I64, count), 4: (_LIST, groups)})


def _struct(fields: dict[int, tuple[int, int | bytes]]) -> bytes:
    """A structure: each field after its distance to the one before, and its type."""
    parts, last = [], 0
    for number, (kind, value) in fields.items():
        parts.append(bytes([(number - last) << 4 | kind]))
        parts.append(_zigzag(value) if isinstance(value, int) else value)
        last = number
    return b"".join((*parts, b"\x00"))


def _list(kind: int, *items: bytes) -> bytes:
    return bytes([len(items) << 4 | kind]) + b"".join(items)


def _text(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _zigzag(number: int) -> bytes:
    return _varint(2 * number)  # Thrift's encoding of signed numbers


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
