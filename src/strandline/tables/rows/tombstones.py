"""Tombstones: deletes without a value, in a table whose key is made of fields of the values. Pure functions on Arrow.

Such a delete names its row by the record's key alone, so that the sink has to be told how to read that one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import BadRecord, InvalidInput
from strandline.model.records import Op
from strandline.values.codecs.columns import null_rows
from strandline.values.codecs.exact import decimal_fit
from strandline.values.codecs.structs import Json
from strandline.values.contract import Codec, Decoded, bad_rows

Tombstones: TypeAlias = Codec | Literal["key", "json", "dead-letters"]
"""What a delete without a value means: ``"key"``, the record's key is the text of the key column; ``"json"``, it is a
JSON object with the key columns, as Debezium writes it; a codec of the record's key; or ``"dead-letters"``, it is
a bad record."""

_PAYLOAD: Final = "payload"
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII).fullmatch


def check_tombstones(tombstones: Tombstones | None, key: Sequence[str], declared: pa.Schema) -> None:
    """``InvalidInput`` for tombstones without a meaning, or with keys of other types than the ``declared`` fields."""
    if tombstones is None:
        return
    if not key:
        raise InvalidInput(
            "A table without key columns has the record's key, by which a delete without a value finds its row: leave "
            "tombstones out."
        )
    if tombstones == "key" and len(key) > 1:
        raise InvalidInput(
            f"The record's key cannot be the text of {len(key)} columns: let tombstones be 'json', or a codec."
        )
    given = pa.schema([]) if isinstance(tombstones, str) else tombstones.schema
    if tombstones == "key":
        given = pa.schema({name: pa.string() for name in key})
    for name in key if len(given) else ():
        if name not in given.names:
            raise InvalidInput(f"The codec of tombstones gives no column {name!r} of the key.")
        if name in declared.names and not _is_castable(given.field(name).type, declared.field(name).type):
            raise InvalidInput(
                f"A key that is {given.field(name).type} cannot name a row by {name!r}, which is "
                f"{declared.field(name).type}: give tombstones a codec of that type, or the table another key."
            )


def _is_castable(given: pa.DataType, kind: pa.DataType) -> bool:
    is_text = pt.is_string(given) or pt.is_large_string(given)
    try:
        return (is_text and pt.is_decimal(kind)) or pa.nulls(0, given).cast(kind) is not None
    except pa.ArrowNotImplementedError:
        return False


def refuse_tombstones(records: pa.Table, deletes: pa.ChunkedArray, key: Sequence[str]) -> None:
    """``BadRecord`` for the first delete without a value among records that have no row; ``deletes`` are offsets."""
    is_delete = pc.is_in(records.column("offset"), value_set=deletes.combine_chunks())
    found = records.filter(pc.and_(is_delete, pc.is_null(records.column("value"))))
    if found.num_rows:
        names = repr(key[0]) if len(key) == 1 else repr(tuple(key))
        raise BadRecord(
            f"The record at offset {pc.min(found.column('offset')).as_py()} is a delete without a value, and the table "
            f"finds its rows by fields of the value ({names}). Nothing was applied: name its tombstones "
            "(--tombstones): 'key' if the record's key is that field, 'json' if it is a JSON object with it, a codec "
            "of the record's key, or 'dead-letters' to set such deletes aside."
        )


@dataclass(frozen=True, slots=True)
class TombstoneKeys:
    """Reads the key columns of deletes without a value from the records' keys."""

    tombstones: Tombstones
    key: tuple[str, ...]
    declared: pa.Schema
    """The fields of values that their codec knows beforehand; none if values describe themselves."""

    def filled(self, found: Decoded, records: pa.RecordBatch, ops: pa.Array) -> Decoded:
        """Values whose tombstones have key columns, or are bad; ``InvalidInput`` if only a transform knows the key."""
        missing = [name for name in self.key if name not in found.columns.schema.names]
        if missing and len(self.declared):
            raise InvalidInput(
                f"The values have no field {missing[0]!r} that tombstones could fill from the record's key: let the "
                "transform find the key of a delete, and leave tombstones out."
            )
        is_tombstone = pc.and_(
            pc.is_null(records.column("value")), pc.not_equal(ops, pa.scalar(int(Op.PUT), pa.int8()))
        )
        places = pc.indices_nonzero(is_tombstone)
        if missing or not len(places):
            return found
        fields = [found.columns.schema.field(name) for name in self.key]
        columns, reasons = self._read(records.column("key").take(places), fields)
        at = list(range(len(records)))
        for number, place in enumerate(places.to_pylist()):
            at[place] = len(records) + number
        rows = found.columns
        for field, column in zip(fields, null_rows(columns, sorted(reasons)), strict=True):
            whole = pa.concat_arrays([rows.column(field.name), column]).take(pa.array(at, pa.int64()))
            rows = rows.set_column(rows.schema.get_field_index(field.name), field, whole)
        bad = dict(zip(*found.bad.to_pydict().values(), strict=True))
        bad |= {places[row].as_py(): why for row, why in reasons.items()}
        return replace(found, columns=rows, bad=bad_rows(bad))

    def _read(self, keys: pa.Array, fields: Sequence[pa.Field]) -> tuple[list[pa.Array], dict[int, str]]:
        """The key columns of these keys, and the reasons of those that cannot be read; a null key gives nulls."""
        if self.tombstones == "key":
            column, unread = _texts(keys, fields[0])
            return [column], unread
        is_json = isinstance(self.tombstones, str)
        codec = _json_key(fields) if isinstance(self.tombstones, str) else self.tombstones
        decoded = codec.decode(keys)
        reasons = {row: f"Its key: {why}" for row, why in zip(*decoded.bad.to_pydict().values(), strict=True)}
        found = []
        for field in fields:
            if field.name not in decoded.columns.schema.names:
                raise InvalidInput(f"The codec of tombstones gives no column {field.name!r} of the key.")
            column = decoded.columns.column(field.name)
            if is_json and _PAYLOAD in decoded.columns.schema.names[len(fields) :]:
                column = pc.coalesce(pc.struct_field(decoded.columns.column(_PAYLOAD), field.name), column)
            column, unfit = _conformed(column, field)
            found.append(column)
            reasons = unfit | reasons
        return found, reasons


def _json_key(fields: Sequence[pa.Field]) -> Codec:
    """A JSON object with these fields, also with the ``schema`` and ``payload`` that Kafka Connect puts around it."""
    around = [pa.field(_PAYLOAD, pa.struct(list(fields)))]
    return Json(pa.schema([*fields, *([] if _PAYLOAD in [field.name for field in fields] else around)]))


def _texts(keys: pa.Array, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    if pt.is_binary(field.type) or pt.is_large_binary(field.type):
        return keys.cast(field.type), {}
    try:
        texts = keys.cast(pa.string())
    except pa.ArrowException:
        texts, unread = _each(keys, pa.field(field.name, pa.string()), lambda key: key.cast(pa.string()))
        column, unfit = _conformed(texts, field)
        return column, dict.fromkeys(unread, _unfit(field)) | unfit
    return _conformed(texts, field)


def _conformed(column: pa.Array, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """The keys as values of the field, and the reasons of those that are none."""
    if pt.is_decimal(field.type) and (pt.is_string(column.type) or pt.is_large_string(column.type)):
        return _each(column, field, lambda key: _decimal(key, field.type))
    try:
        return column if column.type == field.type else column.cast(field.type), {}
    except pa.ArrowException:
        return _each(column, field, lambda key: key.cast(field.type))


def _each(
    column: pa.Array, field: pa.Field, convert: Callable[[pa.Scalar], pa.Scalar]
) -> tuple[pa.Array, dict[int, str]]:
    values: list[Any] = []
    reasons = {}
    for row, key in enumerate(column):
        try:
            values.append(convert(key))
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, ArithmeticError, ValueError):
            values.append(pa.scalar(None, field.type))
            reasons[row] = _unfit(field)
    return pa.array(values, field.type), reasons


def _unfit(field: pa.Field) -> str:
    return f"Its key is not the text of a value of {field.name!r}, which is {field.type}."


def _decimal(text: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    """Not cast by Arrow, which ends the process for large exponents: see :mod:`strandline.values.codecs.exact`."""
    if text.as_py() is not None and not _NUMBER(text.as_py()):
        raise ValueError
    return pa.scalar(None if text.as_py() is None else decimal_fit(kind)(Decimal(text.as_py())), kind)
