"""Codecs that decode row by row: a library turns each value into a row, and rows become columns; and back.

Rows are never joined, so a value cannot change what another one means, and every bad row is known by its number.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput, StrandlineError, printable
from strandline.values.codecs.columns import ColumnShape, build_columns, check_memory, null_rows
from strandline.values.codecs.exact import OTHER_YEARS, decimal_fit, has_years, is_in_years
from strandline.values.contract import Columns, Decoded, bad_rows, check_values
from strandline.values.schema.evolution import conform_columns, is_list
from strandline.values.schema.schemas import is_record_class

# Python objects of a chunk live at the same time: this bounds their memory, and is large enough for Arrow.
_CHUNK_ROWS: Final = 4096
_CHUNK_BYTES: Final = 32 << 20


class CodecValue:
    """What makes a codec a value: equal to another of its class with the same settings, and picklable."""

    name: str
    __slots__ = ("_schema",)
    _schema: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        """The columns of a decoded value."""
        return self._schema

    def settings(self) -> dict[str, Any]:
        """The arguments that make an equal codec, as a log records them."""
        return {"schema": self._schema}

    @abstractmethod
    def encode(self, columns: Columns) -> pa.Array:
        """Encode rows, one value per row."""

    def encode_one(self, value: Any) -> bytes:
        """Encode a mapping, a dataclass or a Struct; an unknown field is refused, a missing one is null."""
        encoded: bytes = self.encode(one_row(self._schema, value))[0].as_py()
        return encoded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{field.name}: {field.type}' for field in self._schema)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodecValue) and type(other) is type(self) and other.settings() == self.settings()

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._schema.names)))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.settings()), ()


class RowCodec(CodecValue):
    """A codec whose library decodes and encodes one value at a time.

    A subclass sets how: ``_decode`` gives a row from bytes or raises, ``_encode`` is its inverse, ``_shapes`` take the
    row apart, ``_make`` gives a row from the values of its fields, and ``_empty`` is a row of nulls.
    """

    __slots__ = ("_decode", "_empty", "_encode", "_make", "_shapes", "unenforced")
    unenforced: str | None
    """A keyword of the given JSON Schema that the codec does not enforce: a new log refuses the schema."""
    _shapes: tuple[ColumnShape, ...]
    _decode: Callable[[bytes], Any]
    _encode: Callable[[Any], bytes]
    _make: Callable[..., Any]
    _empty: Any

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
            except StrandlineError:
                raise  # a schema registry that does not answer says nothing about the value
            except Exception as error:  # noqa: BLE001 - whatever a library makes of hostile bytes
                check_memory(error)
                bad[len(rows)] = reason_of(error)
                rows.append(self._empty)
        return rows

    def encode(self, columns: Columns) -> pa.Array:
        """Encode rows, with every field of the schema, null or not."""
        batch = conform_columns(columns, self._schema)
        if not batch.num_rows:
            return pa.array([], pa.binary())
        pairs = zip(self._shapes, batch.columns, strict=True)
        parts = [python_values(shape, column) for shape, column in pairs]
        try:
            return pa.array(map(self._encode, map(self._make, *parts)), pa.binary())
        except StrandlineError:
            raise
        except Exception as error:
            raise InvalidInput(f"A row cannot be encoded as {self.name}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The message of a library's error, as a sentence."""
    text = "It is nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    return printable(text[:500])[:500].rstrip(".") + "."


def one_row(schema: pa.Schema, value: Any) -> pa.RecordBatch:
    """A batch of one row; ``InvalidInput`` if the value does not fit the schema."""
    try:
        row = _plain(pa.struct(list(schema)), value, "The value")
        return pa.RecordBatch.from_pylist([row], schema=schema)
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"The value does not fit the schema: {reason_of(error)}") from error


def _plain(kind: pa.DataType, value: Any, path: str) -> Any:
    if value is None:
        return None
    if pt.is_struct(kind):
        fields = _fields_of(value, path)
        if unknown := [name for name in fields if kind.get_field_index(str(name)) < 0]:
            raise InvalidInput(f"The value does not fit the schema: {path} has the unknown field {unknown[0]!r:.100}.")
        return {name: _plain(kind.field(name).type, part, f"'{name}'") for name, part in fields.items()}
    if pt.is_map(kind):
        pairs = value.items() if isinstance(value, Mapping) else value
        return [(name, _plain(kind.item_type, part, path)) for name, part in pairs]
    if is_list(kind):
        if not isinstance(value, Sequence | set | frozenset) or isinstance(value, str | bytes):
            raise InvalidInput(f"The value does not fit the schema: {path} is a list, not {value!r:.100}.")
        return [_plain(kind.value_type, part, path) for part in value]
    return _exact(kind, value, path) if pt.is_decimal(kind) and isinstance(value, Decimal) else value


def _exact(kind: pa.DataType, number: Decimal, path: str) -> Decimal:
    try:
        return decimal_fit(kind)(number)
    except ArithmeticError as error:
        raise InvalidInput(f"The value does not fit the schema: {path} is {number:.10e}, and no {kind}.") from error


def _fields_of(value: Any, path: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if is_record_class(type(value)):
        if hasattr(value, "__struct_fields__"):
            names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            return {stored: getattr(value, name) for stored, name in names}
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise InvalidInput(f"The value does not fit the schema: {path} has fields by name, and is not {value!r:.100}.")


def python_values(shape: ColumnShape, column: pa.Array) -> list[Any]:
    """The values of a column as their library encodes them; ``InvalidInput`` for one that the encoding lacks."""
    kind = shape.field.type
    if pt.is_struct(kind):
        parts = [python_values(part, child) for part, child in zip(shape.inside, column.flatten(), strict=True)]
        rows = map(shape.make, *parts)
        if not column.null_count:
            return list(rows)
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if pt.is_map(kind):
        [item] = shape.inside
        names = column.keys.to_pylist()
        items = python_values(item, column.items)
        return [None if at is None else _dict(shape, names[at], items[at]) for at in _places(column)]
    if is_list(kind):
        items = python_values(shape.inside[0], column.values)
        return [None if at is None else items[at] for at in _places(column)]
    return _leaf_values(shape, column)


def _dict(shape: ColumnShape, names: list[str], items: list[Any]) -> dict[str, Any]:
    made = dict(zip(names, items, strict=True))
    if len(made) < len(names):
        raise InvalidInput(f"The field '{shape.field.name}' has a map with a key twice.")
    return made


def _places(column: pa.Array) -> list[slice | None]:
    """Where the items of each list or map are among all items; ``None`` for a null."""
    ends = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    return [slice(*ends[row : row + 2]) if valid[row] else None for row in range(len(column))]


def _leaf_values(shape: ColumnShape, column: pa.Array) -> list[Any]:
    kind = shape.field.type
    if pt.is_floating(kind) and shape.finite and pc.any(pc.invert(pc.is_finite(column))).as_py():
        raise InvalidInput(f"The field '{shape.field.name}' holds a NaN or an infinity: the encoding has neither.")
    if has_years(kind) and not is_in_years(column):
        what = "date" if pt.is_date32(kind) else "timestamp"
        raise InvalidInput(f"The field '{shape.field.name}' holds a {what} {OTHER_YEARS}.")
    if shape.via is not None and pt.is_integer(shape.via):
        column = column.view(shape.via)
    elif pt.is_timestamp(kind):
        column = column if kind.tz in (None, "UTC") else column.cast(pa.timestamp(kind.unit, tz="UTC"))
        if shape.via is not None:
            column = pc.strftime(column, format="%Y-%m-%dT%H:%M:%SZ" if kind.tz else "%Y-%m-%dT%H:%M:%S")
    elif shape.via is not None:
        column = column.cast(shape.via)
    dump = shape.dump
    if dump is None:
        return list(column.to_pylist())
    return [None if value is None else dump(value) for value in column.to_pylist()]
