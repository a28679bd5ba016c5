"""The pointer to the newest published snapshot, as JSON in a cell."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Final

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.json.fields import cursor_fields, read_cursor
from strandline.model.json_values import natural, parse_object, read_record, stamp_fields
from strandline.model.snapshot import Artifact, Pointer
from strandline.model.stamp import Stamped

VERSION: Final = 1

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_LOCATION: Final = re.compile(r"payloads/[0-9]{16}/[0-9a-z-]{1,160}")


class PointerCodec:
    """How a pointer becomes bytes. Damage is an error, never "nothing was published"."""

    def encode(self, state: Stamped[Pointer]) -> bytes:
        """The bytes of a state."""
        pointer = state.value
        current = pointer.current
        fields = {
            "kind": "strandline-snapshot-pointer",
            "version": VERSION,
            "generation": pointer.generation,
            "min_generation": pointer.min_generation,
            "current": None if current is None else {**asdict(current), "cursor": cursor_fields(current.cursor)},
            "superseded": list(map(asdict, pointer.superseded)),
            **stamp_fields(state),
        }
        return json.dumps(fields, indent=1).encode() + b"\n"

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[Pointer]:
        """The state in these bytes."""
        try:
            fields = parse_object(data)
            kind, version = fields["kind"], fields["version"]
            known = kind == "strandline-snapshot-pointer"
            if known and version == VERSION:
                return _state(fields)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CorruptData(f"{where} is damaged: {error!r}. Restore the object.") from error
        if known and isinstance(version, int) and version > VERSION:
            raise UnsupportedVersion(
                f"{where} is of version {version}, and this program reads version {VERSION}: upgrade strandline."
            )
        raise CorruptData(f"{where} is damaged: {str(kind)[:80]!r} points at no snapshot. Restore the object.")


def _state(fields: dict[str, Any]) -> Stamped[Pointer]:
    found = fields["current"]
    current = None if found is None else _artifact(found)
    pointer = read_record(Pointer, fields, current=current)
    for row in pointer.superseded:
        _check(_LOCATION, row.location)
    return read_record(Stamped, fields, value=pointer)


def _artifact(fields: dict[str, Any]) -> Artifact:
    cursor, part = read_cursor(fields["cursor"]), max(1, natural(fields["part"]))
    artifact = read_record(Artifact, fields, cursor=cursor, part=part)
    _check(_LOCATION, artifact.location)
    _check(_HASH, artifact.sha256)
    return artifact


def _check(pattern: re.Pattern[str], found: str) -> None:
    if not pattern.fullmatch(found):
        raise ValueError(f"{found[:80]!r} is no payload or hash")
