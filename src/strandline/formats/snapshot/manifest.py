"""Snapshots as JSON: ``MANIFEST.json`` (cursor, size and hash of each file), and the pointer to the published one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, Final

from strandline.errors import InvalidInput, UnsupportedVersion
from strandline.formats.json.checked import damage
from strandline.formats.json.fields import cursor_fields, read_cursor
from strandline.model.json_values import LARGEST, has_too_many_values, natural, parse_object, read_record, stamp_fields
from strandline.model.snapshot import Artifact, Pointer, Snapshot
from strandline.model.stamp import Stamped

SCHEMA_VERSION: Final = 1

_KIND: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of ``MANIFEST.json``. ``InvalidInput`` for a snapshot that :func:`decode_snapshot` would refuse."""
    fields = {"schema": SCHEMA_VERSION, **asdict(snapshot), "cursor": cursor_fields(snapshot.cursor)}
    del fields["folder"]
    try:
        _checked(fields, snapshot.folder)
        data = json.dumps(fields, indent=1).encode() + b"\n"
    except ValueError as error:
        raise InvalidInput(f"No snapshot can be sealed at {snapshot.folder}: {error}.") from error
    if len(data) > LARGEST or has_too_many_values(data):
        raise InvalidInput(f"No snapshot can be sealed at {snapshot.folder}: it has too many files.")
    return data


def decode_snapshot(data: bytes | memoryview, where: str, folder: str) -> Snapshot:
    """Decode the manifest of the snapshot in ``folder``. Paths that could leave ``data/`` are damage."""
    with damage(where, "Take another snapshot."):
        fields = parse_object(data)
        version = natural(fields["schema"])
        if version == SCHEMA_VERSION:
            return _checked(fields, folder)
    raise UnsupportedVersion(
        f"{where} is of version {version}, and this program reads version {SCHEMA_VERSION}: upgrade strandline."
    )


def _checked(fields: dict[str, Any], folder: str) -> Snapshot:
    """The snapshot in these fields; ``ValueError`` and similar say what is wrong."""
    snapshot = read_record(Snapshot, fields, folder=folder, cursor=read_cursor(fields["cursor"]))
    if not _KIND.fullmatch(snapshot.kind):
        raise ValueError(f"{snapshot.kind!r} cannot be a kind")
    paths = {file.path for file in snapshot.files}
    if len(paths) != len(snapshot.files):
        raise ValueError("it lists a file twice")
    for path in paths:
        _check_path(path)
        pieces = path.split("/")
        if any("/".join(pieces[:depth]) in paths for depth in range(1, len(pieces))):
            raise ValueError(f"{path!r} is listed below another file")
    return snapshot


def _check_path(path: str) -> None:
    path.encode()  # half a surrogate is a ValueError
    strange = any(piece in ("", ".", "..") for piece in path.split("/"))
    # A backslash is a separator on other systems: such a path would leave data/ there.
    if strange or "\\" in path or any(ord(letter) < ord(" ") for letter in path):
        raise ValueError(f"{path!r} is no plain path below data/")


VERSION: Final = 1
_POINTER_KIND: Final = "strandline-snapshot-pointer"


class PointerCodec:
    """A pointer as a cell's content. Damage is an error, never "nothing was published"."""

    def encode(self, state: Stamped[Pointer]) -> bytes:
        """The bytes of a state."""
        fields = {
            "kind": _POINTER_KIND,
            "version": VERSION,
            **asdict(state.value),
            **stamp_fields(state),
        }
        if (current := state.value.current) is not None:
            fields["current"]["cursor"] = cursor_fields(current.cursor)
        return json.dumps(fields, indent=1).encode() + b"\n"

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[Pointer]:
        """The state in these bytes."""
        with damage(where, "Restore the object."):
            fields = parse_object(data)
            kind, version = fields["kind"], fields["version"]
            if kind != _POINTER_KIND or type(version) is not int or version < VERSION:
                raise ValueError(f"{str(kind)[:80]!r} is no snapshot pointer")
            if version == VERSION:
                found = fields["current"]
                if found is not None:
                    cursor, part = read_cursor(found["cursor"]), max(1, natural(found["part"]))
                    found = read_record(Artifact, found, cursor=cursor, part=part)
                return read_record(Stamped, fields, value=read_record(Pointer, fields, current=found))
        raise UnsupportedVersion(
            f"{where} is of version {version}, and this program reads version {VERSION}: upgrade strandline."
        )
