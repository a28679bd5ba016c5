"""The codec of MessagePack maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strandline.values.codecs.structs import Form, StructCodec

if TYPE_CHECKING:
    import msgspec


class MessagePack(StructCodec):
    r"""Values that are MessagePack maps from the names of a schema's fields.

    As :class:`~strandline.values.Json`, with binary as it is, and timestamps as MessagePack's own, which have
    a zone; those without a zone, those in nanoseconds, dates, times and decimals are text.

    >>> import pyarrow as pa
    >>> codec = MessagePack(pa.schema({"id": pa.int64()}))
    >>> codec.encode_one({"id": 7})
    b'\x81\xa2id\x07'

    Args:
        schema: An Arrow schema, or what :func:`~strandline.values.as_schema` takes.

    Raises:
        SchemaRefused: A field has no columnar type.
        MissingExtra: ``strandline[typed]`` is not installed.
    """

    name = "messagepack"
    _FORM = Form(text_times=False, any_float=True)
    __slots__ = ()

    def _coders(self, library: Any, row: type[msgspec.Struct]) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
        return library.msgpack.Decoder(row).decode, library.msgpack.Encoder().encode
