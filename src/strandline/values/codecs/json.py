"""The codec of JSON objects."""

from __future__ import annotations

from strandline.values.codecs.structs import Form, StructCodec


class Json(StructCodec):
    """Values that are JSON objects with the fields of a schema.

    Unknown fields are skipped, missing ones are null; of a field that is there twice the last one counts. A row is bad
    if it is not one JSON object, or a field does not fit: a number with a fraction or an exponent for an integer, an
    integer out of range, text for a number and vice versa. Timestamps, dates and times are text (RFC 3339; with a zone
    exactly if the column has one, and not finer than the column's unit), decimals are text or numbers, binary is
    Base64, maps are objects.

    >>> import pyarrow as pa
    >>> codec = Json(pa.schema({"id": pa.int64(), "at": pa.timestamp("us", tz="UTC")}))
    >>> decoded = codec.decode(pa.array([b'{"id": 1, "at": "2024-02-29T12:00:00Z"}', b'{"id": 1.5}'], pa.binary()))
    >>> decoded.columns["id"].to_pylist(), decoded.bad.to_pylist()
    ([1, None], [{'row': 1, 'reason': 'Expected `int | null`, got `float` - at `$.id`.'}])
    >>> codec.encode_one({"id": 2})
    b'{"id":2,"at":null}'

    Args:
        schema: An Arrow schema, or what :func:`~strandline.values.as_schema` takes.

    Raises:
        SchemaRefused: A field has no columnar type.
    """

    name = "json"
    _MODULE = "json"
    _FORM = Form(text_times=True, any_float=False)
    __slots__ = ()
