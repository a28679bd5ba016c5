"""The codecs of JSON and of MessagePack: msgspec decodes both, with the Struct types of a schema.

msgspec checks types and ranges while it decodes, and names what is wrong with a row: the fastest way to find them all.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import InvalidInput, SchemaRefused
from strandline.values.codecs.columns import ColumnShape, build_columns
from strandline.values.codecs.rows import RowCodec, reason_of
from strandline.values.contract import Columns
from strandline.values.schema.constraints import MAX_FLOAT32, Constrained, Constraints, has_pattern, int_range
from strandline.values.schema.evolution import is_list
from strandline.values.schema.schemas import constrained, leaves

_MAX_FLOAT64: Final = 1.7976931348623157e308
_MAX_INT64: Final = 2**63 - 1
_NO_CONSTRAINTS: Final[Constraints] = MappingProxyType({})
_NATIVE: Final = (bytes, bytearray, dt.datetime, dt.date, dt.time, Decimal)


class StructCodec(RowCodec):
    """The part that the codecs of msgspec share. Equal by class, schema and constraints.

    Both decoding and encoding enforce the constraints of a JSON Schema: all by the types that msgspec decodes and
    converts to, except patterns, which Arrow matches against a decoded column.
    """

    rounds_floats = True
    """See :func:`~strandline.values.contract.rounds_floats`."""
    _MODULE: str
    """The module of msgspec that decodes and encodes."""
    _is_text: bool
    """Whether the encoding is text: it has no NaN and no infinities, and dates and timestamps are text for Arrow."""
    __slots__ = ("_checks", "_convert", "_plain", "constraints")
    _checks: tuple[ColumnShape, ...]
    """Columns with values that msgspec accepts and Arrow does not."""
    constraints: Constraints
    """The constraints of the given JSON Schema, which each value has to fulfil."""

    def __init__(self, schema: Any) -> None:
        found = constrained(schema)
        self._schema, self.constraints, self.unenforced = found.schema, found.constraints, found.unenforced
        make = partial(_struct_type, "Value", list(self._schema), is_text=self._is_text)
        try:
            self._make = row = make(strict=False)
            held = make(strict=False, constraints=self.constraints) if self.constraints else row
            given = make(strict=True, constraints=self.constraints)
            module = getattr(msgspec, self._MODULE)
            self._decode, self._encode = module.Decoder(held).decode, module.Encoder().encode
        except (ValueError, TypeError) as error:
            raise SchemaRefused(f"A {self.name} value cannot have this schema: {error}") from error
        self._shapes = _shapes(list(self._schema), row, self.constraints, is_text=self._is_text)
        self._empty = row()
        self._plain = partial(msgspec.to_builtins, builtin_types=_NATIVE, str_keys=True)
        self._convert = partial(msgspec.convert, type=given)
        inside = self.constraints.get("properties", {})
        self._checks = tuple(
            shape
            for shape in self._shapes
            if any(map(_is_checked_by_arrow, leaves(shape.field.type))) or has_pattern(inside.get(shape.field.name, {}))
        )

    def settings(self) -> dict[str, Any]:
        """The arguments that make an equal codec."""
        return {"schema": Constrained(self._schema, self.constraints) if self.constraints else self._schema}

    def encode(self, columns: Columns) -> pa.Array:
        """Encode rows, with every field of the schema, null or not; ``InvalidInput`` if one violates a constraint."""
        encoded = super().encode(columns)
        bad = self.decode(encoded).bad.to_pylist() if self.constraints else []
        if bad:
            row, reason = bad[0].values()
            raise InvalidInput(f"The row {row} does not fit the schema: {reason}")
        return encoded

    def encode_one(self, value: Any) -> bytes:
        """Encode a mapping, a dataclass or a Struct; an unknown field is refused, a missing one is null."""
        try:
            encoded = self._encode(self._convert(self._plain(value)))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"The value does not fit the schema: {reason_of(error)}") from error
        if self._checks:
            bad: dict[int, str] = {}
            build_columns(self._checks, self._decode_rows([encoded], bad), bad)
            if bad:
                raise InvalidInput(f"The value does not fit the schema: {bad[0]}")
        return encoded


def _is_checked_by_arrow(kind: pa.DataType) -> bool:
    """Whether msgspec accepts values that the Arrow type does not."""
    precise = pt.is_timestamp(kind) and kind.unit != "us"
    return bool(precise or pt.is_decimal(kind) or pt.is_uint64(kind) or pt.is_time(kind))


def _struct_type(
    name: str,
    fields: list[pa.Field],
    *,
    is_text: bool,
    strict: bool,
    constraints: Constraints = _NO_CONSTRAINTS,
) -> Any:
    """A Struct with the attributes ``c0``, ``c1``, …, so that names of fields need not be names of Python."""
    inside, required = constraints.get("properties", {}), constraints.get("required", ())
    nullable = constraints.get("nullable", ())
    parts: list[tuple[Any, ...]] = []
    for number, field in enumerate(fields):
        further = inside.get(field.name, _NO_CONSTRAINTS)
        kind = _python_type(f"{name}.{field.name}", field.type, is_text=is_text, strict=strict, constraints=further)
        if field.name not in required:
            parts.append((f"c{number}", kind | None, None))
        else:
            parts.append((f"c{number}", kind | None if field.name in nullable else kind))
    names = {f"c{number}": field.name for number, field in enumerate(fields)}
    is_closed = strict or constraints.get("additionalProperties") is False
    # Without cycles the collector need not track rows, which halves the time of decoding.
    return msgspec.defstruct(
        name, parts, rename=names, gc=False, forbid_unknown_fields=is_closed, kw_only=bool(required)
    )


def _python_type(  # noqa: PLR0911 - one for each kind of type
    name: str, kind: pa.DataType, *, is_text: bool, strict: bool, constraints: Constraints
) -> Any:
    make = partial(_python_type, name, is_text=is_text, strict=strict)
    items = constraints.get("items", _NO_CONSTRAINTS)
    if pt.is_struct(kind):
        return _struct_type(name, list(kind), is_text=is_text, strict=strict, constraints=constraints)
    if is_list(kind):
        item = make(kind=kind.value_type, constraints=items) | None
        return _limited(list[item], constraints, "Items")  # type: ignore[valid-type]
    if pt.is_map(kind):
        item = make(kind=kind.item_type, constraints=items) | None
        return _limited(dict[str, item], constraints, "Properties")  # type: ignore[valid-type]
    if "enum" in constraints:
        return Literal[tuple(constraints["enum"])]
    if pt.is_integer(kind):
        return Annotated[int, msgspec.Meta(**_range(kind, constraints))]
    if pt.is_floating(kind):
        return _float_type(kind, is_text=is_text, strict=strict, constraints=constraints)
    return _leaf_type(kind, is_text=is_text, strict=strict, constraints=constraints)


def _leaf_type(kind: pa.DataType, *, is_text: bool, strict: bool, constraints: Constraints) -> Any:
    if pt.is_fixed_size_binary(kind):
        return Annotated[bytes, msgspec.Meta(min_length=kind.byte_width, max_length=kind.byte_width)]
    if pt.is_temporal(kind):
        return _time_type(kind, is_text=is_text, strict=strict)
    for is_kind, python in ((pt.is_boolean, bool), (pt.is_decimal, Decimal), (pt.is_binary, bytes)):
        if is_kind(kind):
            return python
    return bytes if pt.is_large_binary(kind) else _limited(str, constraints, "Length")


def _limited(python: Any, constraints: Constraints, what: str) -> Any:
    """The type with limits on its length: ``minLength``, ``maxItems`` and so on."""
    limits = {f"{end}_length": constraints[end + what] for end in ("min", "max") if end + what in constraints}
    return Annotated[python, msgspec.Meta(**limits)] if limits else python


def _float_type(kind: pa.DataType, *, is_text: bool, strict: bool, constraints: Constraints) -> Any:
    limit = MAX_FLOAT32 if pt.is_float32(kind) else _MAX_FLOAT64
    bounded = is_text and (strict or pt.is_float32(kind))
    bounds: dict[str, Any] = {word: constraints[keyword] for keyword, word in _BOUNDS.items() if keyword in constraints}
    if bounded and not bounds.keys() & {"ge", "gt"}:
        bounds["ge"] = -limit
    if bounded and not bounds.keys() & {"le", "lt"}:
        bounds["le"] = limit
    return Annotated[float, msgspec.Meta(**bounds)] if bounds else float


def _time_type(kind: pa.DataType, *, is_text: bool, strict: bool) -> Any:
    if pt.is_time(kind):
        return Annotated[dt.time, msgspec.Meta(tz=False)]
    if not strict and is_text:
        return str
    if pt.is_timestamp(kind):
        if kind.unit == "ns":
            return Any if strict else str
        return Annotated[dt.datetime, msgspec.Meta(tz=kind.tz is not None)]
    return dt.date


_BOUNDS: Final = {
    "minimum": "ge",
    "exclusiveMinimum": "gt",
    "maximum": "le",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
}
"""Constraints of numbers, as msgspec names them."""


def _range(kind: pa.DataType, constraints: Constraints) -> dict[str, Any]:
    low, high = int_range(kind)
    bounds = {"ge": low, "le": high, **{_BOUNDS[word]: constraints[word] for word in _BOUNDS if word in constraints}}
    if bounds["le"] > _MAX_INT64:
        del bounds["le"]  # msgspec has no larger bounds than those of int64: Arrow checks the upper one of uint64
    return bounds


def _is_via_text(kind: pa.DataType, *, is_text: bool) -> bool:
    if pt.is_timestamp(kind):
        return bool(is_text or kind.unit == "ns")
    return bool(is_text and pt.is_date(kind))


def _shapes(fields: list[pa.Field], row: Any, constraints: Constraints, *, is_text: bool) -> tuple[ColumnShape, ...]:
    inside = constraints.get("properties", {})
    return tuple(
        _shape(
            field,
            attrgetter(f"c{number}"),
            row.__annotations__[f"c{number}"],
            inside.get(field.name, _NO_CONSTRAINTS),
            is_text=is_text,
        )
        for number, field in enumerate(fields)
    )


def _shape(
    field: pa.Field, get: Callable[[Any], Any], python: Any, constraints: Constraints, *, is_text: bool
) -> ColumnShape:
    kind = field.type
    if pt.is_struct(kind):
        row = next(part for part in python.__args__ if part is not type(None))
        return ColumnShape(field, get, _shapes(list(kind), row, constraints, is_text=is_text), make=row)
    if is_list(kind) or pt.is_map(kind):
        item = kind.item_field if pt.is_map(kind) else kind.value_field
        container = next(part for part in python.__args__ if part is not type(None))
        items = constraints.get("items", _NO_CONSTRAINTS)
        return ColumnShape(field, get, (_shape(item, get, container.__args__[-1], items, is_text=is_text),))
    via = pa.string() if _is_via_text(kind, is_text=is_text) else None
    return ColumnShape(field, get, via=via, finite=is_text, pattern=constraints.get("pattern"))


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
    _is_text = True
    __slots__ = ()


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
    _is_text = False
    __slots__ = ()
