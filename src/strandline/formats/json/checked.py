"""Small JSON files with a kind, a version and a checksum over all bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strandline.formats.checksum import crc32c
from strandline.model.json_values import parse_object


def encode_checked(kind: str, version: int, fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file."""
    content = {"kind": kind, "version": version, **fields}
    return json.dumps(with_checksum(content), indent=1, sort_keys=True).encode() + b"\n"


def decode_checked(data: bytes, kind: str, version: int) -> dict[str, Any]:
    """The fields of a file of this kind and version.

    ``ValueError``, or ``KeyError`` for a missing field, says what is wrong. The content of the fields is not checked.
    """
    fields = parse_object(data)
    if fields.pop("checksum") != _checksum(fields):
        raise ValueError("its checksum is wrong")
    if (found := (fields.pop("kind"), fields.pop("version"))) != (kind, version):
        raise ValueError(f"it is a {found[0]!r} of version {found[1]!r}")
    return fields


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields and their checksum."""
    return {**fields, "checksum": _checksum(fields)}


def check_checksum(fields: Mapping[str, Any]) -> None:
    """``ValueError`` if the fields have another checksum than theirs. Older releases wrote some files without one."""
    content = dict(fields)
    if "checksum" in content and content.pop("checksum") != _checksum(content):
        raise ValueError("its checksum is wrong")


def _checksum(fields: Mapping[str, Any]) -> str:
    try:
        return f"{crc32c(json.dumps(fields, sort_keys=True).encode()):08x}"
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
