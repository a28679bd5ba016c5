"""Values as ``msgspec`` Structs, for the codecs that msgspec decodes: Struct types of a schema, and rows to columns.

msgspec decodes row by row, checks types and ranges as it does, and names what is wrong with a row. That makes it both
the fastest way that finds every bad row, and an exact one: rows are never joined, so a value cannot change another's.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput, MissingExtra, SchemaRefused, printable
from strandline.model.arguments import checked
from strandline.values.columns import Shape, build_columns, null_rows
from strandline.values.contract import Columns, Decoded, bad_rows, check_values
from strandline.values.evolution import conform_columns
from strandline.values.schemas import as_schema, leaves

if TYPE_CHECKING:
    import msgspec

MAX_FLOAT32: Final = 3.4028234663852886e38
_MAX_FLOAT64: Final = 1.7976931348623157e308
_NATIVE: Final = (bytes, bytearray, dt.datetime, dt.date, dt.time, Decimal)

# Python objects of a chunk live at the same time: this bounds their memory, and is large enough for Arrow.
_CHUNK_ROWS: Final = 4096
_CHUNK_BYTES: Final = 32 << 20


def msgspec_module(name: str) -> Any:
    """The module ``msgspec``, or ``MissingExtra``."""
    try:
        import msgspec
    except ImportError as error:
        raise MissingExtra(f"{name} values need the extra 'typed': pip install 'strandline[typed]'.") from error
    return msgspec


@dataclass(frozen=True, slots=True)
class Form:
    """How an encoding represents types that have no representation of their own in it.

    ``text_times``: dates and timestamps are text, which Arrow parses. ``any_float``: NaN and the infinities can
    be encoded.
    """

    text_times: bool
    any_float: bool


class StructCodec:
    """The part that the codecs of msgspec share. Equal by class and schema."""

    name: str = ""
    _FORM: Form
    __slots__ = ("_checks", "_convert", "_decode", "_empty", "_encode", "_plain", "_row", "_schema", "_shapes")

    def __init__(self, schema: Any) -> None:
        library = msgspec_module(type(self).__name__)
        self._schema = as_schema(schema)
        try:
            self._row = _struct_type(library, "Value", list(self._schema), self._FORM, strict=False)
            given = _struct_type(library, "Value", list(self._schema), self._FORM, strict=True)
            self._decode, self._encode = self._coders(library, self._row)
        except (ValueError, TypeError) as error:
            raise SchemaRefused(f"A {self.name} value cannot have this schema: {error}") from error
        self._shapes = _shapes(list(self._schema), self._row, self._FORM)
        self._empty = self._row()
        self._plain = partial(library.to_builtins, builtin_types=_NATIVE, str_keys=True)
        self._convert = partial(library.convert, type=given)
        self._checks = any(_is_checked_by_arrow(leaf) for field in self._schema for leaf in leaves(field.type))

    def _coders(self, library: Any, row: type[msgspec.Struct]) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
        raise NotImplementedError

    @property
    def schema(self) -> pa.Schema:
        """The columns of a decoded value."""
        return self._schema

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{field.name}: {field.type}' for field in self._schema)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StructCodec) and type(other) is type(self) and self._schema.equals(other._schema)

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._schema.names)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._schema,)

    @checked
    def decode(self, values: pa.Array) -> Decoded:
        """Decode each value; a row is bad if it is malformed or does not fit the schema. Unknown fields are skipped."""
        check_values(values)
        reasons: dict[int, str] = {}
        step = max(1, min(_CHUNK_ROWS, len(values) * _CHUNK_BYTES // max(values.nbytes, 1)))
        chunks = [
            self._decode_chunk(values.slice(start, step), start, reasons) for start in range(0, len(values), step)
        ] or [self._decode_chunk(values, 0, reasons)]
        arrays = chunks[0] if len(chunks) == 1 else [pa.concat_arrays(parts) for parts in zip(*chunks, strict=True)]
        return Decoded(pa.RecordBatch.from_arrays(arrays, schema=self._schema), bad_rows(reasons))

    def _decode_chunk(self, values: pa.Array, start: int, reasons: dict[int, str]) -> list[pa.Array]:
        rows: list[Any] = []
        bad: dict[int, str] = {}
        if pt.is_null(values.type):
            rows = [self._empty] * len(values)
        elif values.null_count:
            rows = values.to_pylist()
            present = [row for row, value in enumerate(rows) if value is not None]
            decoded = self._decode_rows([rows[row] for row in present], bad)
            bad = {present[row]: reason for row, reason in bad.items()}
            rows = [self._empty] * len(rows)
            for row, value in zip(present, decoded, strict=True):
                rows[row] = value
        else:
            rows = self._decode_rows(values.to_pylist(), bad)
        columns = build_columns(self._shapes, rows, bad)
        reasons.update((start + row, reason) for row, reason in bad.items())
        return null_rows(columns, list(bad))

    def _decode_rows(self, values: list[bytes], bad: dict[int, str]) -> list[Any]:
        decode, rest = self._decode, iter(values)
        rows: list[Any] = []
        while len(rows) < len(values):
            try:
                # Appends each row as it is decoded, so that after an error the length says which one was bad.
                rows.extend(map(decode, rest))
            except (ValueError, RecursionError, MemoryError) as error:  # UnicodeDecodeError is a ValueError
                bad[len(rows)] = _reason(error)
                rows.append(self._empty)
        return rows

    @checked
    def encode(self, columns: Columns) -> pa.Array:
        """Encode rows, with every field of the schema, null or not."""
        batch = conform_columns(columns, self._schema)
        if not batch.num_rows:
            return pa.array([], pa.binary())
        pairs = zip(self._shapes, batch.columns, strict=True)
        parts = [python_values(shape, column, self._FORM) for shape, column in pairs]
        return pa.array(map(self._encode, map(self._row, *parts)), pa.binary())

    def encode_one(self, value: Any) -> bytes:
        """Encode a mapping, a dataclass or a Struct; an unknown field is refused, a missing one is null."""
        try:
            encoded = self._encode(self._convert(self._plain(value)))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"The value does not fit the schema: {_reason(error)}") from error
        if self._checks:
            bad = self.decode(pa.array([encoded], pa.binary())).bad
            if bad.num_rows:
                raise InvalidInput(f"The value does not fit the schema: {bad.column('reason')[0]}")
        return encoded


def _reason(error: BaseException) -> str:
    text = str(error) if not isinstance(error, RecursionError) else "It is nested too deeply"
    return printable(text[:500])[:500].rstrip(".") + "."


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


def _shapes(fields: list[pa.Field], row: Any, form: Form) -> tuple[Shape, ...]:
    return tuple(
        _shape(field, attrgetter(f"c{number}"), row.__annotations__[f"c{number}"], form)
        for number, field in enumerate(fields)
    )


def _shape(field: pa.Field, get: Callable[[Any], Any], python: Any, form: Form) -> Shape:
    kind = field.type
    if pt.is_struct(kind):
        row = next(part for part in python.__args__ if part is not type(None))
        return Shape(field, get, _shapes(list(kind), row, form), make=row)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        item = kind.item_field if pt.is_map(kind) else kind.value_field
        container = next(part for part in python.__args__ if part is not type(None))
        return Shape(field, get, (_shape(item, get, container.__args__[-1], form),))
    return Shape(field, get, text=_is_text(kind, form))


def python_values(shape: Shape, column: pa.Array, form: Form) -> list[Any]:
    """The values of a column as msgspec encodes them; ``InvalidInput`` for one that the encoding does not have."""
    kind = shape.field.type
    if pt.is_struct(kind):
        parts = [python_values(part, child, form) for part, child in zip(shape.inside, column.flatten(), strict=True)]
        rows = map(shape.make, *parts)
        if not column.null_count:
            return list(rows)
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if pt.is_map(kind):
        [item] = shape.inside
        names = column.keys.to_pylist()
        items = python_values(item, column.items, form)
        return [None if at is None else _dict(shape, names[at], items[at]) for at in _places(column)]
    if pt.is_list(kind) or pt.is_large_list(kind):
        items = python_values(shape.inside[0], column.values, form)
        return [None if at is None else items[at] for at in _places(column)]
    return _leaf_values(shape, column, form)


def _dict(shape: Shape, names: list[str], items: list[Any]) -> dict[str, Any]:
    made = dict(zip(names, items, strict=True))
    if len(made) < len(names):
        raise InvalidInput(f"The field '{shape.field.name}' has a map with a key twice.")
    return made


def _places(column: pa.Array) -> list[slice | None]:
    """Where the items of each list or map are among all items; ``None`` for a null."""
    ends = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    return [slice(*ends[row : row + 2]) if valid[row] else None for row in range(len(column))]


def _leaf_values(shape: Shape, column: pa.Array, form: Form) -> list[Any]:
    kind = shape.field.type
    if pt.is_floating(kind) and not form.any_float and pc.any(pc.invert(pc.is_finite(column))).as_py():
        raise InvalidInput(f"The field '{shape.field.name}' holds a NaN or an infinity: the encoding has neither.")
    if pt.is_timestamp(kind):
        column = _utc_in_years(shape.field.name, column)
        if shape.text:
            column = pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ" if kind.tz else "%Y-%m-%dT%H:%M:%S")
    elif shape.text:
        column = column.cast(pa.string())
    return list(column.to_pylist())


_UNITS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_YEAR_1: Final = -62_135_596_800
_YEAR_10000: Final = 253_402_300_800


def _utc_in_years(name: str, column: pa.Array) -> pa.Array:
    """The timestamps in UTC; ``InvalidInput`` for years that text with four digits does not have."""
    kind, unit = column.type, _UNITS[column.type.unit]
    bounds = pc.min_max(column.view(pa.int64()))
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is not None and (low < _YEAR_1 * unit or high >= _YEAR_10000 * unit):
        raise InvalidInput(f"The field '{name}' holds a timestamp outside of the years 1 to 9999.")
    return column if kind.tz in (None, "UTC") else column.cast(pa.timestamp(kind.unit, tz="UTC"))
