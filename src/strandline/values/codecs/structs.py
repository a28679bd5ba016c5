"""Values as ``msgspec`` Structs, for the codecs that msgspec decodes: the Struct types of a schema.

msgspec checks types and ranges while it decodes, and names what is wrong with a row: the fastest way to find them all.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import InvalidInput, MissingExtra, SchemaRefused
from strandline.values.codecs.columns import ColumnShape
from strandline.values.codecs.rows import RowCodec, reason_of
from strandline.values.schema.json_schema import unenforced_keyword
from strandline.values.schema.schemas import as_schema, leaves

MAX_FLOAT32: Final = 3.4028234663852886e38
_MAX_FLOAT64: Final = 1.7976931348623157e308
_NATIVE: Final = (bytes, bytearray, dt.datetime, dt.date, dt.time, Decimal)


def msgspec_module(name: str) -> Any:
    """The module ``msgspec``, or ``MissingExtra``."""
    try:
        import msgspec
    except ImportError as error:
        raise MissingExtra(f"{name} values need the extra 'typed': pip install 'strandline[typed]'.") from error
    return msgspec


@dataclass(frozen=True, slots=True)
class Form:
    """Conventions of an encoding for types that it does not have itself.

    ``text_times``: dates and timestamps are text, which Arrow parses. ``any_float``: NaN and the infinities can
    be encoded.
    """

    text_times: bool
    any_float: bool


class StructCodec(RowCodec):
    """The part that the codecs of msgspec share. Equal by class and schema."""

    rounds_floats = True
    """See :func:`~strandline.values.contract.rounds_floats`."""
    _FORM: Form
    _MODULE: str
    """The module of msgspec that decodes and encodes."""
    __slots__ = ("_checks", "_convert", "_plain")

    def __init__(self, schema: Any) -> None:
        library = msgspec_module(type(self).__name__)
        self._schema = as_schema(schema)
        self.unenforced = unenforced_keyword(schema)
        try:
            self._make = row = _struct_type(library, "Value", list(self._schema), self._FORM, strict=False)
            given = _struct_type(library, "Value", list(self._schema), self._FORM, strict=True)
            module = getattr(library, self._MODULE)
            self._decode, self._encode = module.Decoder(row).decode, module.Encoder().encode
        except (ValueError, TypeError) as error:
            raise SchemaRefused(f"A {self.name} value cannot have this schema: {error}") from error
        self._shapes = _shapes(list(self._schema), row, self._FORM)
        self._empty = row()
        self._plain = partial(library.to_builtins, builtin_types=_NATIVE, str_keys=True)
        self._convert = partial(library.convert, type=given)
        self._checks = any(_is_checked_by_arrow(leaf) for field in self._schema for leaf in leaves(field.type))

    def encode_one(self, value: Any) -> bytes:
        """Encode a mapping, a dataclass or a Struct; an unknown field is refused, a missing one is null."""
        try:
            encoded = self._encode(self._convert(self._plain(value)))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"The value does not fit the schema: {reason_of(error)}") from error
        if self._checks:
            bad = self.decode(pa.array([encoded], pa.binary())).bad
            if bad.num_rows:
                raise InvalidInput(f"The value does not fit the schema: {bad.column('reason')[0]}")
        return encoded


def _is_checked_by_arrow(kind: pa.DataType) -> bool:
    """Whether msgspec accepts values that the Arrow type does not."""
    precise = pt.is_timestamp(kind) and kind.unit != "us"
    return bool(precise or pt.is_decimal(kind) or pt.is_uint64(kind) or pt.is_time(kind))


def _struct_type(library: Any, name: str, fields: list[pa.Field], form: Form, *, strict: bool) -> Any:
    """A Struct with the attributes ``c0``, ``c1``, …, so that names of fields need not be names of Python."""
    parts = [
        (f"c{number}", _python_type(library, f"{name}.{field.name}", field.type, form, strict=strict) | None, None)
        for number, field in enumerate(fields)
    ]
    names = {f"c{number}": field.name for number, field in enumerate(fields)}
    # Without cycles the collector need not track rows, which halves the time of decoding.
    return library.defstruct(name, parts, rename=names, gc=False, forbid_unknown_fields=strict)


def _python_type(library: Any, name: str, kind: pa.DataType, form: Form, *, strict: bool) -> Any:  # noqa: PLR0911
    meta = library.Meta
    if pt.is_struct(kind):
        return _struct_type(library, name, list(kind), form, strict=strict)
    if pt.is_list(kind) or pt.is_large_list(kind):
        return list[_python_type(library, name, kind.value_type, form, strict=strict) | None]  # type: ignore[misc]
    if pt.is_map(kind):
        return dict[str, _python_type(library, name, kind.item_type, form, strict=strict) | None]  # type: ignore[misc]
    if pt.is_integer(kind):
        return Annotated[int, meta(**_range(kind))]
    if pt.is_fixed_size_binary(kind):
        return Annotated[bytes, meta(min_length=kind.byte_width, max_length=kind.byte_width)]
    if pt.is_floating(kind):
        limit = MAX_FLOAT32 if pt.is_float32(kind) else _MAX_FLOAT64
        bounded = not form.any_float and (strict or pt.is_float32(kind))
        return Annotated[float, meta(ge=-limit, le=limit)] if bounded else float
    if pt.is_temporal(kind):
        return _time_type(meta, kind, form, strict=strict)
    for is_kind, python in ((pt.is_boolean, bool), (pt.is_decimal, Decimal), (pt.is_binary, bytes)):
        if is_kind(kind):
            return python
    return bytes if pt.is_large_binary(kind) else str


def _time_type(meta: Any, kind: pa.DataType, form: Form, *, strict: bool) -> Any:
    if pt.is_time(kind):
        return Annotated[dt.time, meta(tz=False)]
    if not strict and form.text_times:
        return str
    if pt.is_timestamp(kind):
        if kind.unit == "ns":
            return Any if strict else str
        return Annotated[dt.datetime, meta(tz=kind.tz is not None)]
    return dt.date


def _range(kind: pa.DataType) -> dict[str, int]:
    if pt.is_uint64(kind):
        return {"ge": 0}  # msgspec has no larger bounds than those of int64: Arrow checks the upper one
    if pt.is_unsigned_integer(kind):
        return {"ge": 0, "le": 2**kind.bit_width - 1}
    return {"ge": -(2 ** (kind.bit_width - 1)), "le": 2 ** (kind.bit_width - 1) - 1}


def _is_text(kind: pa.DataType, form: Form) -> bool:
    if pt.is_timestamp(kind):
        return bool(form.text_times or kind.unit == "ns")
    return bool(form.text_times and pt.is_date(kind))


def _shapes(fields: list[pa.Field], row: Any, form: Form) -> tuple[ColumnShape, ...]:
    return tuple(
        _shape(field, attrgetter(f"c{number}"), row.__annotations__[f"c{number}"], form)
        for number, field in enumerate(fields)
    )


def _shape(field: pa.Field, get: Callable[[Any], Any], python: Any, form: Form) -> ColumnShape:
    kind = field.type
    if pt.is_struct(kind):
        row = next(part for part in python.__args__ if part is not type(None))
        return ColumnShape(field, get, _shapes(list(kind), row, form), make=row)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        item = kind.item_field if pt.is_map(kind) else kind.value_field
        container = next(part for part in python.__args__ if part is not type(None))
        return ColumnShape(field, get, (_shape(item, get, container.__args__[-1], form),))
    return ColumnShape(field, get, via=pa.string() if _is_text(kind, form) else None, finite=not form.any_float)
