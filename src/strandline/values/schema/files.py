"""Codecs by schemas in files of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike

from strandline.errors import InvalidInput, NotFound, SchemaRefused, StorageError
from strandline.storage.disk import DISK, Disk
from strandline.values.codecs.structs import Json
from strandline.values.contract import Codec


def json_codec(schema: str | PathLike[str], disk: Disk = DISK) -> Codec:
    """The codec of JSON values with the schema in a file."""
    return codec_by(Json, schema, disk)


def codec_by(kind: Callable[[str], Codec], schema: str | PathLike[str], disk: Disk = DISK) -> Codec:
    """The codec of a kind with the schema in a file; the error names the file."""
    text = schema_text(schema, disk)
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"The schema {schema} is not JSON: {error}.") from error
    if not is_object:
        raise SchemaRefused(f"The schema {schema} is neither a JSON Schema nor an Avro schema: those are JSON objects.")
    try:
        return kind(text)
    except SchemaRefused as error:
        raise SchemaRefused(f"The schema {schema} cannot be used: {error}") from error


def schema_text(schema: str | PathLike[str], disk: Disk = DISK) -> str:
    """The text of a schema in a file."""
    try:
        return disk.read(str(schema)).decode()
    except StorageError as error:
        cause = error.__cause__
        why = f"{error}".rstrip(".") if not isinstance(cause, OSError) else str(cause.strerror)
        raise NotFound(f"The schema {schema} cannot be read: {why}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The schema {schema} is no text: it is not UTF-8.") from error
