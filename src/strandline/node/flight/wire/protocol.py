"""Flight's protobuf messages as bytes, where pyarrow has no public functions for them."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.header import CONTINUATION, RECORD_BYTES, check_message
from strandline.formats.arrow.stream import batch_header
from strandline.formats.json.fields import LARGEST_REQUEST as LARGEST_JSON
from strandline.node.flight.wire.errors import first_line

SERVICE: Final = "arrow.flight.protocol.FlightService"

# Numbers of fields in Flight.proto.
_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000
_RESULT_METADATA: Final = 1
_ACTION_NAME, _ACTION_WHAT = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10
_SEVEN_BITS, _MORE_BITS = 0x7F, 0x80
_ALIGNMENT: Final = 8
_PREFIX: Final = struct.Struct("<Ii")

LARGEST_REQUEST: Final = 2 * LARGEST_JSON
"""Larger requests are refused unread: their fields may take a hundred times as much memory."""

_MOST_FIELDS: Final = 64
"""Limit on the fields of a message: each takes time to find."""

Piece = bytes | memoryview


class FlightData(NamedTuple):
    """One message of a stream of Arrow batches; missing parts are empty."""

    descriptor: Piece = b""
    header: Piece = b""
    metadata: Piece = b""
    body: Piece = b""


def read_flight_data(message: bytes) -> FlightData:
    """Split a message into its fields without copying; ``InvalidInput`` if it is not a Flight message.

    >>> read_flight_data(write_flight_data(b"", metadata=b"note")).metadata.tobytes()
    b'note'
    """
    found: dict[int, memoryview] = {}
    view = memoryview(message)
    at = count = 0
    while at < len(message):
        count += 1
        if count > _MOST_FIELDS:
            raise InvalidInput(f"The message is no Flight message: it has more than {_MOST_FIELDS} fields.")
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _BYTES:
            size, at = _read_varint(message, at)
            if size > len(message) - at:
                raise InvalidInput("The message is no Flight message: it ends within a field.")
            found[key >> 3] = view[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise InvalidInput("The message is no Flight message: it has a field of no known kind.")
    return FlightData(*(found.get(number, b"") for number in (_DESCRIPTOR, _HEADER, _METADATA, _BODY)))


def check_request(request: Piece) -> bytes:
    """The bytes of a request: of an action, a ticket or a descriptor; ``InvalidInput`` if they are too many."""
    if len(request) > LARGEST_REQUEST:
        raise InvalidInput(f"A request of {len(request):,} bytes is larger than the limit of {LARGEST_REQUEST:,}.")
    return bytes(request)


def write_flight_data(message: Piece | pa.Buffer, *, metadata: bytes = b"") -> bytes:
    """An Arrow message, which may be empty, with its metadata."""
    parts: list[Piece] = [*_field(_METADATA, metadata)] if metadata else []
    if len(message):
        view = memoryview(message).cast("B")
        _, size = _PREFIX.unpack_from(view)
        header, body = view[_PREFIX.size : _PREFIX.size + size], view[_PREFIX.size + size :]
        parts += (*_field(_HEADER, header), *_field(_BODY, body))
    return b"".join(parts)


def write_put_result(metadata: bytes) -> bytes:
    """The answer to a put."""
    return b"".join(_field(_RESULT_METADATA, metadata))


def write_action_type(name: str, what: str) -> bytes:
    """One entry of the list of actions."""
    return b"".join((*_field(_ACTION_NAME, name.encode()), *_field(_ACTION_WHAT, what.encode())))


def arrow_message(header: Piece, body: Piece) -> pa.Buffer:
    """Header and body as Arrow reads them from a stream, aligned."""
    padding = bytes(-len(header) % _ALIGNMENT)
    prefix = _PREFIX.pack(CONTINUATION, len(header) + len(padding))
    return pa.py_buffer(b"".join((prefix, header, padding, body)))


def read_batch(message: pa.Buffer, schema: pa.Schema, largest: int) -> pa.RecordBatch:
    """The record batch of an Arrow message, not validated yet.

    ``InvalidInput`` for any other message, for a compressed one, and for one that announces more records than
    ``largest`` bytes hold, or than it has bytes itself: columns of nulls and of empty values take none, and would
    become records of a log. Only the header is read for that: Arrow unpacks nothing before.
    """
    try:
        found = _read_message(message)
        if found.type != "record batch":
            raise InvalidInput(f"A {found.type} message arrived among the records: send plain record batches.")
        rows, is_compressed = batch_header(found, "An Arrow batch")
        if is_compressed:
            raise InvalidInput("An Arrow batch is compressed, which a node does not accept: send it uncompressed.")
        if rows * RECORD_BYTES > largest:
            raise InvalidInput(
                f"An Arrow batch announces {rows:,} records, which take more than the limit of {largest:,} bytes: "
                "send it in several batches of the same append."
            )
        if rows > message.size:
            raise InvalidInput(
                f"An Arrow batch announces {rows:,} records in {message.size:,} bytes, and a record takes at least "
                "one: send columns with values, such as keys or timestamps."
            )
        return pa.ipc.read_record_batch(found, schema)
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, struct.error, CorruptData) as error:
        raise unreadable(error) from error


def read_schema_message(message: pa.Buffer) -> pa.Schema:
    """The schema of an Arrow message; ``InvalidInput`` for any other."""
    try:
        found = _read_message(message)
        if found.type != "schema":  # Arrow reads any message as a schema, and crashes the process
            raise InvalidInput(f"A message of type {found.type!r} arrived in place of the schema.")
        schema = pa.ipc.read_schema(found)
        for column in schema:  # ValueError now, not later, for names that are not text
            repr((column.name, str(column.type)))
        return schema  # noqa: TRY300 - the errors are those of reading it
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        raise unreadable(error) from error


def _read_message(message: pa.Buffer) -> pa.Message:
    check_message(memoryview(message).cast("B"))
    return pa.ipc.read_message(message)


def unreadable(error: Exception) -> InvalidInput:
    """The error for bytes from outside that Arrow cannot read."""
    return InvalidInput(f"The request cannot be read: {first_line(error)}.")


def _field(number: int, content: Piece) -> tuple[Piece, Piece, Piece]:
    return _varint(number << 3 | _BYTES), _varint(len(content)), content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > _SEVEN_BITS:
        out.append(value & _SEVEN_BITS | _MORE_BITS)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & _SEVEN_BITS) << 7 * index
        if byte <= _SEVEN_BITS:
            return value, at + index + 1
    raise InvalidInput("The message is no Flight message: a number in it does not end.")
