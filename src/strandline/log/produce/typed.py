"""Typed producing: values that are no bytes are encoded before anything is appended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from strandline.errors import InvalidInput, MissingExtra, StorageError, Unsupported, UnsupportedVersion
from strandline.model.records import EMPTY_BATCH, RECORD_SCHEMA, Op, RecordSource
from strandline.values.codecs.raw import Raw
from strandline.values.contract import Codec
from strandline.values.schema.evolution import is_list

TYPES: Final = "Keys and values are bytes or None: encode text first."
_UNTYPED: Final = (
    "This log names no format for its values, so that they are bytes: give the producer a codec "
    "(value=sl.values.Json(...)), or encode the value first."
)
_AMBIGUOUS: Final = (
    "The column 'value' holds bytes, which may be encoded values or the value's field of that name: for the field name "
    "the record's columns with an underscore (at least '_key', null or not), and append encoded values one by one."
)
_TEXT: Final = "The column 'value' is text, and encoded values are bytes: cast it to binary, or give fields."
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
    _asked: bool = False

    def one(self, value: Any) -> bytes:
        """The bytes of a mapping, a dataclass or a Struct; ``InvalidInput`` names the field that does not fit."""
        if isinstance(value, _NO_VALUES):
            raise InvalidInput(TYPES)
        encoded: bytes = self._try(lambda codec: codec.encode_one(value))
        return encoded

    def records(self, batch: RecordSource) -> RecordSource:
        """The batch with its values encoded; one whose values are encoded already is returned unchanged."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        if not isinstance(table, pa.Table):
            return batch
        if not table.num_rows:
            raise InvalidInput(EMPTY_BATCH)
        if _is_plain(table.schema) and self._is_untyped(table.schema):
            return batch
        return self._try(lambda codec: batch if _is_encoded(table.schema, codec) else encoded_table(table, codec))

    def _is_untyped(self, schema: pa.Schema) -> bool:
        """Whether there is no codec, or none that can be used here; the log is asked until it has answered once.

        While the store fails, bytes are accepted as encoded values, so that producers of bytes continue to buffer.
        """
        if self.given is None and not self._asked:
            try:
                self._found = self.find()
            except (MissingExtra, Unsupported, UnsupportedVersion):
                self._found = None
            except StorageError:
                if any(map(_is_bytes, _value_kinds(schema))):
                    return True
                raise
            self._asked = True
        return self.given is None and self._found is None

    def _try(self, encode: Callable[[Codec], Any]) -> Any:
        known = self._found if self.given is None else self.given
        codec = self._find_codec() if known is None else known
        try:
            return encode(codec)
        except InvalidInput:
            if self.given is not None or (newer := self._find_codec()) == codec:
                raise
            return encode(newer)

    def _find_codec(self) -> Codec:
        self._found = self.find()
        if self._found is None:
            raise InvalidInput(_UNTYPED)
        return self._found


def _is_plain(schema: pa.Schema) -> bool:
    """Whether there are only the columns of a record, and values are bytes or text."""
    if any(name not in RECORD_SCHEMA.names for name in schema.names):
        return False
    return all(_is_bytes(kind) or _is_text(kind) or pt.is_null(kind) for kind in _value_kinds(schema))


def _is_encoded(schema: pa.Schema, codec: Codec) -> bool:
    """Whether all columns are the record's, also those with the name of a field, since ``value`` has encoded values.

    ``InvalidInput`` if it is text, or if it could also be the value's field of that name.
    """
    if not _is_plain(schema):
        return False
    if isinstance(codec, Raw):
        return True
    kinds, names = _value_kinds(schema), codec.schema.names
    if any(map(_is_bytes, kinds)):
        if "value" in names:
            raise InvalidInput(_AMBIGUOUS)
        return True
    if any(map(_is_text, kinds)) and "value" not in names:
        raise InvalidInput(_TEXT)
    return not any(name in names for name in schema.names)


def _value_kinds(schema: pa.Schema) -> list[pa.DataType]:
    kinds = [field.type for field in schema if field.name == "value"]
    return [kind.value_type if pt.is_dictionary(kind) else kind for kind in kinds]


def _is_bytes(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary, pt.is_binary_view))


def _is_text(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pt.is_string, pt.is_large_string, pt.is_string_view))


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
        gone = pc.fill_null(pc.not_equal(_operations(own["op"]), int(Op.PUT)), False)
        absent = reduce(pc.and_, (column.is_null() for column in fields.values()), gone)
    values = _encoded(pa.table(fields), codec, table.num_rows)
    if absent is not None:
        values = pc.if_else(absent, pa.scalar(None, values.type), values)
    return pa.table({**own, "value": values})


def _operations(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The operations as numbers; whether there are such numbers is checked with the other columns of a record."""
    kind = column.type.value_type if pt.is_dictionary(column.type) else column.type
    if not (
        pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind) or pt.is_null(kind)
    ):
        raise InvalidInput(
            f"The column 'op' is {str(kind)[:100]}, and operations are the numbers {Op.PUT:d} to {Op.PURGE:d} (put, "
            "delete, purge): give these."
        )
    return column.cast(kind).cast(pa.int8(), safe=False)


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
    fitting = _fitting(column.type, kind)
    if fitting == column.type:
        return column
    try:
        return column.cast(fitting)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        row = _first(lambda part: column.slice(0, part).cast(fitting), len(column))
        raise InvalidInput(
            f"The value of row {row} does not fit: the field '{name}' is {str(column[row])[:100]}, and {kind} cannot "
            "hold that. Nothing was appended."
        ) from None


def _fitting(given: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """The given type without dictionaries, and with the numbers and times of ``kind``, also inside of others.

    What a cast to it does not refuse is exact. All else stays as it is given.
    """
    if pt.is_dictionary(given):
        return _fitting(given.value_type, kind)
    is_time = pt.is_timestamp(given) and pt.is_timestamp(kind) and given.tz == kind.tz
    if is_time or (pt.is_integer(given) and pt.is_integer(kind)):
        return kind
    if pt.is_struct(given):
        known = {field.name: field.type for field in kind} if pt.is_struct(kind) else {}
        return pa.struct([one.with_type(_fitting(one.type, known.get(one.name, one.type))) for one in given])
    if pt.is_map(given):
        item = kind.item_type if pt.is_map(kind) else given.item_type
        return pa.map_(_fitting(given.key_type, pa.string()), _fitting(given.item_type, item))
    if is_list(given):
        item = kind.value_type if is_list(kind) else given.value_type
        return (pa.list_ if pt.is_list(given) else pa.large_list)(_fitting(given.value_type, item))
    return given


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
        except (InvalidInput, pa.ArrowInvalid, pa.ArrowNotImplementedError):
            high = middle
        else:
            low = middle + 1
    return low
