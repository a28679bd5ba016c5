"""The pointer to the newest published snapshot: a cell's content, in JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Final
from uuid import UUID

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.json.fields import cursor_fields, read_cursor
from strandline.model.artifacts import Artifact, Pointer, Superseded
from strandline.model.json_values import natural, parse_object
from strandline.model.stamp import OpId, Stamped

VERSION: Final = 1

_HASH: Final = re.compile(r"[0-9a-f]{64}")
_LOCATION: Final = re.compile(r"payloads/[0-9]{16}/[0-9a-z-]{1,160}")


class PointerCodec:
    """How a pointer becomes bytes. Damage is an error, never "nothing was published"."""

    def encode(self, state: Stamped[Pointer]) -> bytes:
        """The bytes of a state."""
        pointer = state.value
        fields = {
            "kind": "strandline-snapshot-pointer",
            "version": VERSION,
            "generation": pointer.generation,
            "min_generation": pointer.min_generation,
            "current": None if pointer.current is None else _fields(pointer.current),
            "superseded": [{"location": gone.location, "at": gone.at} for gone in pointer.superseded],
            "revision": state.revision,
            "recent": [op.hex for op in state.recent],
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


def _fields(artifact: Artifact) -> dict[str, Any]:
    cursor = artifact.cursor
    return {
        "location": artifact.location,
        "cursor": cursor_fields(cursor),
        "kind": artifact.kind,
        "kind_version": artifact.kind_version,
        "size": artifact.size,
        "part": artifact.part,
        "sha256": artifact.sha256,
        "published": artifact.published,
    }


def _state(fields: dict[str, Any]) -> Stamped[Pointer]:
    current = fields["current"]
    pointer = Pointer(
        generation=natural(fields["generation"]),
        min_generation=natural(fields["min_generation"]),
        current=None if current is None else _artifact(current),
        superseded=tuple(Superseded(_location(row["location"]), natural(row["at"])) for row in fields["superseded"]),
    )
    return Stamped(pointer, natural(fields["revision"]), tuple(OpId(UUID(hex=op)) for op in fields["recent"]))


def _artifact(fields: dict[str, Any]) -> Artifact:
    cursor, kind, sha256 = fields["cursor"], fields["kind"], fields["sha256"]
    if not isinstance(kind, str) or not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise ValueError("its kind or its hash is none")
    return Artifact(
        location=_location(fields["location"]),
        cursor=read_cursor(cursor),
        kind=kind,
        kind_version=natural(fields["kind_version"]),
        size=natural(fields["size"]),
        part=max(1, natural(fields["part"])),
        sha256=sha256,
        published=natural(fields["published"]),
    )


def _location(text: object) -> str:
    if not isinstance(text, str) or not _LOCATION.fullmatch(text):
        raise ValueError(f"{str(text)[:80]!r} cannot be a payload")
    return text
