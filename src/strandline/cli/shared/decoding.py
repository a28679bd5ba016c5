"""Decoded values for the command line: as the log names them, by a schema in a file, or by one that is inferred."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

import strandline as sl
from strandline.bulk import SchemaProposal
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import LogPlace
from strandline.errors import InvalidInput, NotALog, Unsupported
from strandline.log.read.value_format import named_codec
from strandline.values import Codec
from strandline.values.decoding import ERROR, decode_records, value_fields
from strandline.values.schema.files import json_codec

DecodeValues: TypeAlias = Callable[[pa.RecordBatch], list[Any]]
"""The value of each record: its fields, :class:`Unreadable`, or None."""


class Unreadable(str):
    """Why a value could not be decoded."""

    __slots__ = ()


def value_decoder(log: Any, schema: Path | None) -> DecodeValues:
    """A function that decodes values: by the schema, or by the newest version that the log names at each call."""
    if schema is not None:
        given = json_codec(schema)
        return lambda records: _values(records, given)
    named(log)  # at once, not when there are records

    return lambda records: _values(records, named(log))


def named(log: Any) -> Codec:
    """The codec that a log names; if it names none, the error says what to give instead."""
    try:
        codec = named_codec(log)
    except Unsupported as error:
        raise Unsupported(f"{log.url} does not record a format of its values: name a JSON Schema, --schema.") from error
    if codec is None:
        raise InvalidInput(f"{log.url} names no format for its values: name a JSON Schema, --schema.")
    return codec


def _values(records: pa.RecordBatch, codec: Codec) -> list[Any]:
    found = decode_records(records.select(["offset", "value"]), codec, "null")
    columns = found.select([field.name for field in value_fields(codec)])
    present = records.column("value").is_valid().to_pylist()
    errors = found.column(ERROR.name).to_pylist()
    parts = zip(_rows(columns), present, errors, strict=True)
    return [Unreadable(error) if error is not None else row if is_there else None for row, is_there, error in parts]


def _rows(columns: pa.RecordBatch) -> list[Any]:
    """The rows as JSON values, in the form of JSON logs: bytes in Base64, decimals and times as text.

    A field that JSON lacks (a NaN, a year beyond 9999) is text, in its row alone.
    """
    fields = {name: _field(columns.select([name])) for name in columns.schema.names}
    return [{name: values[row] for name, values in fields.items()} for row in range(columns.num_rows)]


def _field(column: pa.RecordBatch) -> list[Any]:
    try:
        return _encoded(column, sl.values.Json(column.schema))
    except InvalidInput:  # a type that JSON lacks
        return _texts(column)


def _encoded(column: pa.RecordBatch, codec: Codec) -> list[Any]:
    [name] = column.schema.names
    try:
        return [json.loads(row)[name] for row in codec.encode(column).to_pylist()]
    except InvalidInput:
        if column.num_rows <= 1:
            return _texts(column)
        middle = column.num_rows // 2
        return _encoded(column.slice(0, middle), codec) + _encoded(column.slice(middle), codec)


def _texts(column: pa.RecordBatch) -> list[Any]:
    return [None if not value.is_valid else _text(value) for value in column.column(0)]


def _text(value: pa.Scalar) -> str:
    try:
        return str(value)
    except (OverflowError, ValueError):  # a year that Python lacks
        return " ".join(pa.array([value]).to_string(indent=0).strip("[]\n ").split())


def inferred(source: str) -> SchemaProposal:
    """The schema that the values at an address suggest."""
    try:
        with LogPlace(source).reading() as log:
            return sl.bulk.infer(log)
    except NotALog:
        return sl.bulk.infer(source)


def say_notes(found: SchemaProposal) -> None:
    """Print what was ambiguous, a line each, on standard error; programs get it in the answer."""
    for note in () if show.for_programs() else found.notes:
        show.line(f"note: {note}", file=sys.stderr)
