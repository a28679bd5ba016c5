"""Decoded Python values to Arrow columns, column by column, with the exact rows that do not fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import printable
from strandline.values.codecs.exact import OTHER_YEARS, decimal_fit, is_in_years, misfit_of
from strandline.values.schema.evolution import is_list

Getter: TypeAlias = Callable[[Any], Any]
"""Takes a field's value out of a row, or of a struct inside it."""

Owner: TypeAlias = Callable[[int], int]
"""The row to which the value at a position of a nested column belongs."""

# What pyarrow and `load` raise if a Python value does not fit a type.
_MISFITS: Final = (pa.ArrowException, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_SPARE: Final = 16 << 20

_UNITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_FINER: Final = {
    "s": (r"^(.{19})\.[0-9]{1,9}([Z+-].*)?$", r"\1\2"),
    "ms": (r"^(.{19}\.[0-9]{3})[0-9]{1,6}([Z+-].*)?$", r"\1\2"),
    "us": (r"^(.{19}\.[0-9]{6})[0-9]{1,3}([Z+-].*)?$", r"\1\2"),
}
"""By unit: texts of timestamps with finer digits, and the same without these."""


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """Recipe of one column: its field, the function that takes its value out of a row, and the recipes inside it.

    Single values that are not null go through ``load``, then become an array of type ``via``, then are cast; without
    either they become an array of the field's type at once. ``dump`` is the inverse of ``load``, for encoding; ``make``
    gives a struct from the values of its fields. ``finite``: the encoding has neither NaN nor infinities. Text has to
    match ``pattern``, somewhere, by RE2.
    """

    field: pa.Field
    get: Getter
    inside: tuple[ColumnShape, ...] = ()
    via: pa.DataType | None = None
    make: Callable[..., Any] = tuple
    load: Getter | None = None
    dump: Getter | None = None
    finite: bool = False
    pattern: str | None = None


def build_columns(shapes: Sequence[ColumnShape], rows: list[Any], reasons: dict[int, str]) -> list[pa.Array]:
    """The columns of the rows. Values that do not fit are null, and ``reasons`` gets an entry for their rows."""
    builder = _Builder(reasons)
    return [
        builder.build(shape, builder.taken(shape, rows, shape.field.name, int), shape.field.name, int)
        for shape in shapes
    ]


class _Builder:
    def __init__(self, reasons: dict[int, str]) -> None:
        self._reasons = reasons

    def taken(self, shape: ColumnShape, rows: list[Any], path: str, owner: Owner) -> list[Any]:
        """The field's values in the rows, or structs; some libraries look at a field only when it is asked for."""
        get = shape.get
        try:
            return list(map(get, rows))
        except (ValueError, TypeError, AttributeError):
            values = []
            for position, row in enumerate(rows):
                try:
                    values.append(None if row is None else get(row))
                except ValueError as error:
                    self._note(owner(position), f"The field '{path}' is damaged: {_first_line(error)}")
                    values.append(None)
            return values

    def _note(self, row: int, reason: str) -> None:
        if row not in self._reasons:
            self._reasons[row] = printable(reason[:500])[:500].rstrip(".") + "."

    def build(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner) -> pa.Array:
        kind = shape.field.type
        if pt.is_struct(kind):
            return self._struct(shape, values, path, owner)
        if pt.is_map(kind):
            return self._map(shape, values, path, owner)
        if is_list(kind):
            return self._list(shape, values, path, owner)
        return self._leaf(shape, values, path, owner)

    def _struct(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner) -> pa.Array:
        children = []
        for part in shape.inside:
            name = f"{path}.{part.field.name}"
            children.append(self.build(part, self.taken(part, values, name, owner), name, owner))
        return pa.StructArray.from_arrays(children, fields=list(shape.field.type), mask=_nulls(values))

    def _list(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner) -> pa.Array:
        [item] = shape.inside
        large = pt.is_large_list(shape.field.type)
        ends = list(accumulate((0 if value is None else len(value) for value in values), initial=0))
        items = list(chain.from_iterable(value for value in values if value))
        child = self.build(item, items, f"{path}[]", _inner(ends, owner))
        offsets = pa.array(ends, pa.int64() if large else pa.int32())
        make = pa.LargeListArray if large else pa.ListArray
        return make.from_arrays(offsets, child, type=shape.field.type, mask=_nulls(values))

    def _map(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner) -> pa.Array:
        [item] = shape.inside
        kind = shape.field.type
        ends = list(accumulate((0 if value is None else len(value) for value in values), initial=0))
        inner = _inner(ends, owner)
        names = ColumnShape(kind.key_field, item.get)
        keys = self._leaf(names, list(chain.from_iterable(value for value in values if value)), path, inner, "")
        items = list(chain.from_iterable(value.values() for value in values if value))
        child = self.build(item, items, path + "{}", inner)
        return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), keys, child, type=kind, mask=_nulls(values))

    def _leaf(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner, instead: Any = None) -> pa.Array:
        column = self._fitting(shape, values, path, owner, instead)
        if shape.pattern is not None:
            matched = pc.match_substring_regex(column, shape.pattern)
            for position in pc.indices_nonzero(pc.invert(matched)).to_pylist():
                self._note(owner(position), f"The field '{path}' does not match the pattern {shape.pattern[:200]!r}")
        return column

    def _fitting(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner, instead: Any) -> pa.Array:
        try:
            return convert(shape, values)
        except _MISFITS:
            pass
        misfit = misfit_of(shape.field.type, shape.via, shape.load)
        if misfit is None:
            return self._piecewise(shape, values, path, owner, instead)
        fitting, begin = list(values), f"The field '{path}' does not fit {shape.field.type}"
        for position, value in enumerate(values):
            reason = None if value is None else misfit(value)
            if reason is not None:
                self._note(owner(position), f"{begin}: {reason}")
                fitting[position] = instead
        try:
            return convert(shape, fitting)
        except _MISFITS:
            return self._piecewise(shape, fitting, path, owner, instead)

    def _piecewise(self, shape: ColumnShape, values: list[Any], path: str, owner: Owner, instead: Any) -> pa.Array:
        """The column in pieces, by halving, so that a few misfits are found with few conversions.

        The first misfit of a row decides about it: a long list of them would take a conversion for each.
        """
        pieces = []
        pending = [range(len(values))]
        position = 0
        while pending:
            part = pending.pop()
            part = range(max(part.start, position), part.stop)
            if not part:
                continue
            try:
                piece = convert(shape, values[part.start : part.stop])
            except _MISFITS as error:
                if len(part) > 1:
                    middle = part.start + len(part) // 2
                    pending += [range(middle, part.stop), range(part.start, middle)]
                    continue
                check_memory(error)
                row = owner(position)
                self._note(row, f"The field '{path}' does not fit {shape.field.type}: {_first_line(error)}")
                rest = bisect_right(range(len(values)), row, lo=position, key=owner) - position
                piece = pa.array([instead] * rest, shape.field.type)
            pieces.append(piece)
            position += len(piece)
        return pa.concat_arrays(pieces)


def convert(shape: ColumnShape, values: list[Any]) -> pa.Array:  # noqa: PLR0911 - one for each kind of type
    """A column of single values; raises if any of them does not fit.

    Timestamps and times that are finer than the column's unit are cut off.
    """
    kind, via, load = shape.field.type, shape.via, shape.load
    if load is not None:
        values = [None if value is None else load(value) for value in values]
    if via is not None and pt.is_integer(via):
        return _in_a_day(pa.array(values, via)).cast(kind) if pt.is_time(kind) else _dated(pa.array(values, via), kind)
    if pt.is_timestamp(kind):
        return _dated(_timestamps(values, kind, text=via is not None), kind)
    if via is not None:
        return _dated(pa.array(values, via), kind) if pt.is_date32(kind) else pa.array(values, via).cast(kind)
    if pt.is_time32(kind):
        return pa.array(values, pa.time64("us")).cast(kind, safe=False)
    if pt.is_float32(kind):
        return _floats(pa.array(values, pa.float64()))
    if pt.is_decimal(kind):
        fit = decimal_fit(kind)
        return pa.array([None if value is None else fit(value) for value in values], kind)
    return pa.array(values, kind)


def _floats(wide: pa.Array) -> pa.Array:
    narrow = wide.cast(pa.float32())
    if pc.any(pc.xor(pc.is_inf(wide), pc.is_inf(narrow))).as_py():
        raise ValueError("the number is too large")
    return narrow


def _dated(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column as timestamps or dates."""
    dated = column.cast(kind)
    if not is_in_years(dated):
        raise ValueError(f"the value is {OTHER_YEARS}")
    return dated


def _in_a_day(times: pa.Array) -> pa.Array:
    per_day = 86_400 * (1000 if times.type == pa.int32() else 1_000_000)
    if pc.any(pc.or_(pc.less(times, 0), pc.greater_equal(times, per_day))).as_py():
        raise ValueError("the time is not within a day")
    return times


def _timestamps(values: list[Any], kind: pa.DataType, *, text: bool) -> pa.Array:
    if not text:
        return _floor(pa.array(values, pa.timestamp("us", tz=kind.tz)), kind)
    texts = pa.array(values, pa.string())
    if kind.unit == "ns":
        return texts.cast(kind)
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        # Arrow refuses more digits than the unit has.
        return pc.replace_substring_regex(texts, *_FINER[kind.unit]).cast(kind)


def _floor(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if _UNITS[column.type.unit] < _UNITS[kind.unit]:
        return column.cast(kind)
    names = {"s": "second", "ms": "millisecond", "us": "microsecond"}
    return pc.floor_temporal(column, unit=names[kind.unit]).cast(kind)


def _inner(ends: list[int], owner: Owner) -> Owner:
    return lambda position: owner(bisect_right(ends, position) - 1)


def _nulls(values: list[Any]) -> pa.Array | None:
    return pa.array([value is None for value in values], pa.bool_()) if None in values else None


def check_memory(error: BaseException) -> None:
    """``MemoryError`` if the process lacks memory: then an error says nothing about the value that was decoded."""
    if isinstance(error, MemoryError):
        bytearray(_SPARE)  # a value that asks for too much leaves room for this


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".") + "."


def null_rows(columns: list[pa.Array], rows: Sequence[int]) -> list[pa.Array]:
    """The columns with nulls in the given rows."""
    if not rows or not columns:
        return columns
    keep: list[int | None] = list(range(len(columns[0])))
    for row in rows:
        keep[row] = None
    indices = pa.array(keep, pa.int64())
    return [column.take(indices) for column in columns]
