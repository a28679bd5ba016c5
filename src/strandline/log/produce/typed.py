"""Typed producing: values that are no bytes are encoded before anything is appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput
from strandline.model.records import RECORD_SCHEMA, Op, RecordSource
from strandline.values.contract import Codec

TYPES: Final = "Keys and values are bytes or None: encode text first."
_UNTYPED: Final = (
    "This log names no format for its values, so that they are bytes: give the producer a codec (value=sl.Json(...)), "
    "or encode the value first."
)
_NO_VALUES: Final = (str, int, float, bytearray, memoryview, list, tuple, set, frozenset)
_CHUNK_ROWS: Final = 1 << 13
"""Rows encoded at a time: their Python objects live at the same time."""
_BESIDE: Final = tuple(name for name in RECORD_SCHEMA.names if name != "value")


@dataclass(slots=True)
class ValueEncoder:
    """Encodes values with the codec of a producer, or with the one that its log names.

    The log is asked when a value needs it, and again when one does not fit: the format may have a newer version.
    """

    given: Codec | None
    find: Callable[[], Codec | None]
    _found: Codec | None = None

    def one(self, value: Any) -> bytes:
        """The bytes of a mapping, a dataclass or a Struct; ``InvalidInput`` names the field that does not fit."""
        if isinstance(value, _NO_VALUES):
            raise InvalidInput(TYPES)
        encoded: bytes = self._try(lambda codec: codec.encode_one(value))
        return encoded

    def records(self, batch: RecordSource) -> RecordSource:
        """The batch with its values encoded; one that has only a record's own columns is given back as it is."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        if not isinstance(table, pa.Table) or _is_plain(table.schema) or not table.num_rows:
            return batch
        return self._try(lambda codec: encoded_table(table, codec))

    def _try(self, encode: Callable[[Codec], Any]) -> Any:
        known = self._found if self.given is None else self.given
        codec = self._look() if known is None else known
        try:
            return encode(codec)
        except InvalidInput:
            if self.given is not None or (newer := self._look()) == codec:
                raise
            return encode(newer)

    def _look(self) -> Codec:
        self._found = self.find()
        if self._found is None:
            raise InvalidInput(_UNTYPED)
        return self._found


def _is_plain(schema: pa.Schema) -> bool:
    """Whether there are only the columns of a record, and values are bytes or text."""
    if any(name not in RECORD_SCHEMA.names for name in schema.names):
        return False
    kinds = [field.type for field in schema if field.name == "value"]
    return all(_is_bytes(kind.value_type if pt.is_dictionary(kind) else kind) for kind in kinds)


def _is_bytes(kind: pa.DataType) -> bool:
    tests = (pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary, pt.is_binary_view, pt.is_null)
    texts = (pt.is_string, pt.is_large_string, pt.is_string_view)
    return any(test(kind) for test in (*tests, *texts))


def encoded_table(table: pa.Table, codec: Codec) -> pa.Table:
    """A table with the columns of a record: the value's fields are encoded, row by row, into ``value``.

    A column named ``_key``, ``_op``, ``_timestamp`` or ``_headers`` is the record's, and so is one without the
    underscore, unless the value has a field of that name. Either ``value`` is a struct, and a null is a null value; or
    all other columns are the value's fields, and a delete or purge without any has a null value.
    """
    own: dict[str, pa.ChunkedArray] = {}
    fields: dict[str, pa.ChunkedArray] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        role = name.removeprefix("_")
        place = own if role in _BESIDE and (name != role or name not in codec.schema.names) else fields
        role = role if place is own else name
        if role in place:
            raise InvalidInput(f"A batch has the column {role!r} twice: drop or rename one of them.")
        place[role] = column
    if "_offset" in fields:
        raise InvalidInput("The log numbers the records itself: drop the column '_offset'.")
    absent: pa.ChunkedArray | None = None
    whole = fields.get("value")
    if whole is not None and pt.is_struct(whole.type) and "value" not in codec.schema.names:
        if len(fields) > 1:
            others = next(name for name in fields if name != "value")
            raise InvalidInput(
                f"A batch has the value as a struct and a column {others!r} beside it: drop one of them."
            )
        absent = whole.is_null()
        fields = dict(zip([part.name for part in whole.type], whole.flatten(), strict=True))
    elif "op" in own:
        gone = pc.fill_null(pc.not_equal(own["op"].cast(pa.int8(), safe=False), int(Op.PUT)), False)
        absent = gone if not fields else _all((gone, *(column.is_null() for column in fields.values())))
    values = _encoded(pa.table(fields), codec, table.num_rows)
    if absent is not None:
        values = pc.if_else(absent, pa.scalar(None, values.type), values)
    return pa.table({**own, "value": values})


def _all(masks: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    first, *rest = masks
    for mask in rest:
        first = pc.and_(first, mask)
    return first


def _encoded(fields: pa.Table, codec: Codec, rows: int) -> pa.ChunkedArray:
    if not fields.num_columns:
        return pa.chunked_array([pa.nulls(rows, pa.binary())])
    fitted = pa.table(
        [
            _fitted(field.name, column, _kind(codec, field))
            for field, column in zip(fields.schema, fields.columns, strict=True)
        ],
        names=fields.column_names,
    )
    pieces, first = [], 0
    for piece in fitted.to_batches(max_chunksize=_CHUNK_ROWS):
        try:
            pieces.append(codec.encode(piece))
        except InvalidInput as error:
            raise _placed(error, piece, first, codec) from error
        first += piece.num_rows
    return pa.chunked_array(pieces, pa.binary())


def _kind(codec: Codec, field: pa.Field) -> pa.DataType:
    at = codec.schema.get_field_index(field.name)
    return field.type if at < 0 else codec.schema.field(at).type


def _fitted(name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The column with a narrower type, if each of its values fits: Python's numbers become 64 bits wide in Arrow."""
    given = column.type
    is_time = pt.is_timestamp(given) and pt.is_timestamp(kind) and given.tz == kind.tz
    if given == kind or not (is_time or (pt.is_integer(given) and pt.is_integer(kind))):
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        row = _first(lambda part: column.slice(0, part).cast(kind), len(column))
        raise InvalidInput(
            f"The value of row {row} does not fit: the field '{name}' is {column[row]}, and {kind} cannot hold that. "
            "Nothing was appended."
        ) from None


def _placed(error: InvalidInput, piece: pa.RecordBatch, first: int, codec: Codec) -> InvalidInput:
    """The error with the first row that it concerns; unchanged if it concerns whole columns."""
    try:
        codec.encode(piece.slice(0, 0))
    except InvalidInput:
        return error
    row = _first(lambda part: codec.encode(piece.slice(0, part)), piece.num_rows)
    return InvalidInput(f"The value of row {first + row} does not fit: {error} Nothing was appended.")


def _first(attempt: Callable[[int], object], rows: int) -> int:
    """The first row with which an attempt on all rows up to it fails; by halving."""
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high) // 2
        try:
            attempt(middle + 1)
        except (InvalidInput, pa.ArrowInvalid):
            high = middle
        else:
            low = middle + 1
    return low
