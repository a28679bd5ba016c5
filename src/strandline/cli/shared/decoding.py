"""Decoded values for the command line: as the log names them, or by a schema in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

import strandline as sl
from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.log.value_format import named_codec
from strandline.values import Codec
from strandline.values.decoding import ERROR, decode_records, value_fields

DecodeValues: TypeAlias = Callable[[pa.RecordBatch], list[Any]]
"""The value of each record: its fields, :class:`Unreadable`, or None."""


class Unreadable(str):
    """Why a value could not be decoded."""

    __slots__ = ()


def json_codec(schema: Path) -> Codec:
    """The codec of JSON values with the schema in a file."""
    try:
        return sl.Json(schema.read_text())
    except OSError as error:
        raise NotFound(f"The schema {schema} cannot be read: {error.strerror}.") from error


def value_decoder(log: Any, schema: Path | None) -> DecodeValues:
    """Decodes values, in the newest version that the log names at each call, or by the schema."""
    if schema is not None:
        given = json_codec(schema)
        return lambda records: _values(records, given)
    _named(log)  # at once, not when there are records

    return lambda records: _values(records, _named(log))


def _named(log: Any) -> Codec:
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
    """The rows as JSON values, in the form of JSON logs: bytes in Base64, decimals and times as text."""
    try:
        return [json.loads(row) for row in sl.Json(columns.schema).encode(columns).to_pylist()]
    except InvalidInput:  # what JSON lacks: a NaN, a year beyond 9999
        return [
            {name: str(columns.column(name)[row]) for name in columns.schema.names} for row in range(columns.num_rows)
        ]


def format_of(log: Any) -> str | None:
    """Name and version of the format of a log's values; None if they are plain bytes, or the log does not tell."""
    versions = getattr(log, "value_versions", ())
    return f"{versions[-1].format}, version {versions[-1].number}" if versions else None
