"""The codec of MessagePack maps."""

from __future__ import annotations

from strandline.values.codecs.structs import Form, StructCodec


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
    """

    name = "messagepack"
    _MODULE = "msgpack"
    _FORM = Form(text_times=False, any_float=True)
    __slots__ = ()
