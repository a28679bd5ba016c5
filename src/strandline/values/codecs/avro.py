"""The codec of Avro records, with a schema or with a schema registry."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import InvalidInput, MissingExtra, SchemaRefused
from strandline.model.arguments import checked
from strandline.values.codecs.columns import ColumnShape
from strandline.values.codecs.registry import open_registry
from strandline.values.codecs.rows import RowCodec
from strandline.values.schema.avro_schema import avro_fields, check_writer, missing_default, plain_schema, to_avro
from strandline.values.schema.evolution import is_list
from strandline.values.schema.json_schema import constraining_keyword
from strandline.values.schema.schemas import as_schema, parsed

_MAGIC: Final = 0
_HEADER: Final = 5
_DECIMAL_BYTES: Final = 32
_EXACT: Final = Context(prec=80)
_BITS: Final = 7
_MOST_BITS: Final = 64
_SIZES: Final = {"null": 0, "boolean": 1, "float": 4, "double": 8}
# Rare in good records: so long a number, or as many letters that are no ASCII.
_SUSPECT: Final = re.compile(rb"[\x80-\xff]{9}[\x02-\xff]")


class Avro(RowCodec):
    r"""Values that are Avro records, without a file's header.

    Written with ``schema``; or, with a ``registry``, each with the schema that it names: a zero byte, the schema's id
    in four bytes, and the record, as Confluent's serializers write it. Records of another schema are resolved
    to ``schema`` by Avro's rules. A row is bad if it does not end where its bytes do, and if its schema is unknown.

    >>> codec = Avro('{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}')
    >>> codec.encode_one({"id": 7})
    b'\x0e'
    >>> codec.decode(pa.array([b"\x0e"], pa.binary())).columns.to_pylist()
    [{'id': 7}]

    Args:
        schema: An Avro schema, or anything that :func:`~strandline.values.as_schema` takes. None: the schema
            ``schema_id`` of the registry.
        registry: Schemas by their ids, or the address of a schema registry (``https://…``), which is asked for each
            schema once. While it cannot be reached, decoding raises ``TransientStorageError``.
        schema_id: The id under which ``schema`` is registered: needed for encoding.

    Raises:
        SchemaRefused: A field has no columnar type.
        MissingExtra: ``strandline[typed]`` is not installed.
    """

    name = "avro"
    __slots__ = ("_id", "_readers", "_registry", "_text")

    @checked
    def __init__(
        self, schema: Any = None, *, registry: str | Mapping[int, Any] | None = None, schema_id: int | None = None
    ) -> None:
        self._registry = None if registry is None else open_registry(registry)
        self._id = schema_id
        if schema_id is not None and schema_id >= 1 << 32:
            raise InvalidInput("schema_id is a whole number from 0 up to 2**32 - 1.")
        if schema is None:
            if self._registry is None or schema_id is None:
                raise InvalidInput("Avro needs a schema, or a registry and the schema_id of one in it.")
            try:
                schema = self._registry.schema(schema_id)
            except (ValueError, RecursionError) as error:
                raise SchemaRefused(f"The schema {schema_id} of the registry cannot be used: {error}.") from error
        self.unenforced = constraining_keyword(schema)
        given = _avro_of(schema)
        self._text = json.dumps(given, sort_keys=True, separators=(",", ":"))
        self._schema = as_schema(given)
        library = _library()
        try:
            own = library.parse_schema(plain_schema(given))
        except (ValueError, KeyError, TypeError, library.schema.SchemaParseException) as error:
            raise SchemaRefused(f"The Avro schema is not valid: {error!r:.300}.") from error
        self._readers: dict[int, Any] = {}
        self._shapes = _shapes(list(self._schema))
        self._make = _maker(list(self._schema))
        self._empty = dict.fromkeys(self._schema.names)
        self._decode = _reader(library, own, None) if self._registry is None else self._framed(library, own, given)
        self._encode = _writer(library, own, self._prefix())

    @checked
    def check_reads(self, older: Avro) -> None:
        """``SchemaRefused`` if values of the older codec cannot be decoded by this one."""
        if older._registry is None or self._registry is None:
            raise SchemaRefused(
                "Avro values without a registry do not name the schema that they were written with, so that a changed "
                "schema cannot decode the older ones: use a schema registry, or begin a new log."
            )
        known, now = older._registry.settings(), self._registry.settings()
        if isinstance(known, Mapping) and isinstance(now, Mapping):
            lost = [number for number, schema in known.items() if now.get(number) != schema]
            if lost:
                raise SchemaRefused(f"The schema {lost[0]} of older values is not in the new registry: keep it there.")
        missing = missing_default(json.loads(older._text), json.loads(self._text))
        if missing is not None:
            raise SchemaRefused(
                f"The new field '{missing}' has no default in the Avro schema, so that older values have none for it: "
                "give it one, such as null."
            )

    def _prefix(self) -> bytes | None:
        if self._registry is None:
            return b""
        return None if self._id is None else bytes([_MAGIC]) + self._id.to_bytes(4, "big")

    def settings(self) -> dict[str, Any]:
        """The arguments that make an equal codec, as a log records them."""
        registry = None if self._registry is None else self._registry.settings()
        return {"schema": self._text, "registry": registry, "schema_id": self._id}

    def _framed(self, library: Any, own: Any, given: Any) -> Callable[[bytes], Any]:
        readers, registry = self._readers, self._registry
        assert registry is not None  # noqa: S101 - for the type checker

        def decode(value: bytes) -> Any:
            if len(value) < _HEADER or value[0] != _MAGIC:
                raise ValueError("It does not begin with a zero byte and the id of a schema")
            number = int.from_bytes(value[1:_HEADER], "big")
            if number not in readers:
                written = registry.schema(number)
                check_writer(written, given)
                readers[number] = _reader(library, library.parse_schema(plain_schema(written)), own)
            return readers[number](value[_HEADER:])

        return decode


def _library() -> Any:
    try:
        import fastavro
        import fastavro.schema
    except ImportError as error:
        raise MissingExtra("Avro values need the extra 'typed': pip install 'strandline[typed]'.") from error
    return fastavro


def _avro_of(schema: Any) -> Any:
    """The Avro schema as it is, or one with the columns of another kind of schema."""
    given = parsed(schema)
    if isinstance(given, Mapping) and (given.get("type") == "record" or "fields" in given):
        avro_fields(given)
        return given
    return to_avro(as_schema(given))


def _reader(library: Any, written: Any, own: Any) -> Callable[[bytes], Any]:
    read, check = library.schemaless_reader, _varint_check(written)

    def decode(value: bytes) -> Any:
        # With one byte more: the library does not notice the end where it skips, and then stands behind that byte.
        source = io.BytesIO(value + b"\0")
        try:
            row = read(source, written, own)
        except EOFError as error:
            raise ValueError("It ends too early") from error
        if source.tell() > len(value):
            raise ValueError("It ends too early")
        check(value)
        if source.tell() != len(value):
            raise ValueError(f"{len(value) - source.tell()} bytes follow the record")
        return row

    return decode


def _writer(library: Any, own: Any, prefix: bytes | None) -> Callable[[Any], bytes]:
    write = library.schemaless_writer

    def encode(row: Any) -> bytes:
        if prefix is None:
            raise InvalidInput("Encoding for a registry needs the schema_id under which the schema is registered.")
        sink = io.BytesIO()
        sink.write(prefix)
        write(sink, own, row)
        return sink.getvalue()

    return encode


def _shapes(fields: list[pa.Field]) -> tuple[ColumnShape, ...]:
    return tuple(_shape(field, itemgetter(field.name)) for field in fields)


def _shape(field: pa.Field, get: Callable[[Any], Any]) -> ColumnShape:
    kind = field.type
    if pt.is_struct(kind):
        return ColumnShape(field, get, _shapes(list(kind)), make=_maker(list(kind)))
    if is_list(kind) or pt.is_map(kind):
        return ColumnShape(field, get, (_shape(kind.item_field if pt.is_map(kind) else kind.value_field, get),))
    if pt.is_decimal(kind):
        scale = kind.scale
        return ColumnShape(
            field, get, load=lambda data: _decimal(data, scale), dump=lambda number: _unscaled(number, scale)
        )
    if pt.is_temporal(kind):
        return ColumnShape(field, get, via=pa.int32() if kind.bit_width == pa.int32().bit_width else pa.int64())
    return ColumnShape(field, get)


def _maker(fields: list[pa.Field]) -> Callable[..., dict[str, Any]]:
    names = [field.name for field in fields]
    return lambda *values: dict(zip(names, values, strict=True))


def _decimal(data: bytes, scale: int) -> Decimal:
    if len(data) > _DECIMAL_BYTES:
        raise ValueError(f"a decimal of {len(data)} bytes")
    return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-scale, _EXACT)


def _unscaled(number: Decimal, scale: int) -> bytes:
    whole = int(number.scaleb(scale, _EXACT))
    return whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True)


def _varint_check(schema: Any) -> Callable[[bytes], None]:
    """The check of a record that the library has read: ``ValueError`` if a number has more than 64 bits.

    ``schema`` is as the library parsed it: each name is a full one.
    """
    named: dict[str, Any] = {}
    _collect(schema, named)

    def check(value: bytes) -> None:
        if _SUSPECT.search(value):
            _Walk(value, named).pass_over(schema)

    return check


def _collect(schema: Any, named: dict[str, Any]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, named)
    elif isinstance(schema, Mapping):
        if "name" in schema:
            named[schema["name"]] = schema
        for part in (schema.get("type"), schema.get("items"), schema.get("values")):
            _collect(part, named)
        for field in schema.get("fields", ()):
            _collect(field["type"], named)


class _Walk:
    """Goes over the bytes of one record."""

    def __init__(self, data: bytes, named: Mapping[str, Any]) -> None:
        self._data = data
        self._named = named
        self._at = 0

    def pass_over(self, schema: Any) -> None:
        if isinstance(schema, list):
            self.pass_over(schema[self._number()])
            return
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        if not isinstance(kind, str):
            self.pass_over(kind)
        elif kind in _SIZES:
            self._at += _SIZES[kind]
        elif kind in ("int", "long", "enum"):
            self._number()
        elif kind in ("bytes", "string"):
            self._skip(self._number())
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind in ("record", "error"):
            for field in schema["fields"]:
                self.pass_over(field["type"])
        elif kind in ("array", "map"):
            self._blocks(kind, schema)
        else:
            self.pass_over(self._named[kind])

    def _blocks(self, kind: str, schema: Mapping[str, Any]) -> None:
        while count := self._number():
            if count < 0:
                self._number()  # the bytes of the block
            for _ in range(abs(count)):
                if kind == "map":
                    self._skip(self._number())
                self.pass_over(schema["items" if kind == "array" else "values"])

    def _skip(self, size: int) -> None:
        self._at += size

    def _number(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            shift += _BITS
            if number >> _MOST_BITS or shift > _MOST_BITS + _BITS - 1:
                raise ValueError("It has a number of more than 64 bits")
            if byte <= 0x7F:  # noqa: PLR2004 - the last one
                return (number >> 1) ^ -(number & 1)
