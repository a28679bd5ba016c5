"""Small JSON files with a kind, a version and a checksum over all bytes, and the one error for a damaged one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from strandline.errors import CorruptData, UnsupportedVersion, WrongKind
from strandline.formats.checksum import crc32c
from strandline.model.json_values import natural, parse_object


class damage:  # noqa: N801 - reads as a statement: "with damage(where, advice): ..."
    """Fields that are read within: whatever is wrong with them is ``CorruptData`` of ``where``, with this advice."""

    def __init__(self, where: str, advice: str) -> None:
        """The file or object, and what to do about its damage, as sentences."""
        self._where = where
        self._advice = advice

    def __enter__(self) -> None:
        """Nothing was read yet."""

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raise the error for what was wrong; a file of another kind is not damaged."""
        if isinstance(error, WrongKind):
            return
        if isinstance(error, KeyError | ValueError | TypeError | AttributeError | OverflowError | RecursionError):
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)[:200].rstrip(".")
            raise CorruptData(f"{self._where} is damaged: {why}. {self._advice}") from error


def decode_description(
    data: bytes | memoryview,
    where: str,
    kind: str,
    *,
    newest: int,
    otherwise: str,
    advice: str,
    other: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """The fields of a file that describes what is beside it, once its kind, version and checksum are right.

    ``CorruptData`` says that a file of another kind is ``otherwise``; ``WrongKind``, what one of the kind ``other[0]``
    is. ``UnsupportedVersion`` if it needs a reader above version ``newest``.
    """
    with damage(where, advice):
        fields = parse_object(data)
        if other is not None and fields["kind"] == other[0]:
            raise WrongKind(f"{where} is of {other[1]}.")
        if fields["kind"] != kind:
            raise CorruptData(f"{where} describes a {str(fields['kind'])[:80]!r}, which is {otherwise}.")
        if (needs := natural(fields["min_reader"])) > newest:
            raise UnsupportedVersion(
                f"{where} needs a reader of version {needs}, and this program is of version {newest}: upgrade "
                "strandline."
            )
        check_checksum(fields)
        return fields


def encode_checked(kind: str, version: int, fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file."""
    return sealed({"kind": kind, "version": version, **fields})


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


def sealed(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file with these fields and their checksum."""
    return json.dumps(with_checksum(fields), indent=1, sort_keys=True).encode() + b"\n"


def _checksum(fields: Mapping[str, Any]) -> str:
    try:
        return f"{crc32c(json.dumps(fields, sort_keys=True).encode()):08x}"
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
