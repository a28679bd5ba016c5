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
from strandline.model.snapshot import Artifact, Pointer, Snapshot, SnapshotFile
from strandline.model.stamp import Stamped

SCHEMA_VERSION: Final = 1

_KIND: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_LONGEST_PATH: Final = 1024


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of ``MANIFEST.json``. ``InvalidInput`` for a snapshot that :func:`decode_snapshot` would refuse."""
    cursor = snapshot.cursor
    fields = {
        "schema": SCHEMA_VERSION,
        "kind": snapshot.kind,
        "kind_version": snapshot.kind_version,
        "cursor": cursor_fields(cursor),
        "created": snapshot.created,
        "files": [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in snapshot.files],
    }
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
    kind, cursor = fields["kind"], fields["cursor"]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} cannot be a kind")
    return Snapshot(
        folder=folder,
        kind=kind,
        kind_version=natural(fields["kind_version"]),
        cursor=read_cursor(cursor),
        created=natural(fields["created"]),
        files=_files(fields["files"]),
    )


def _files(rows: object) -> tuple[SnapshotFile, ...]:
    if not isinstance(rows, list):
        raise ValueError("its files are no list")  # noqa: TRY004 - the bytes are wrong, not the program
    files = tuple(SnapshotFile(_path(row["path"]), natural(row["size"]), _hash(row["sha256"])) for row in rows)
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise ValueError("it lists a file twice")
    for path in paths:
        pieces = path.split("/")
        if any("/".join(pieces[:depth]) in paths for depth in range(1, len(pieces))):
            raise ValueError(f"{path!r} is listed below another file")
    return files


def _path(path: object) -> str:
    if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH:
        raise ValueError(f"{str(path)[:80]!r} cannot be a path")
    path.encode()  # half a surrogate is a ValueError
    strange = any(piece in ("", ".", "..") for piece in path.split("/"))
    # A backslash is a separator on other systems: such a path would leave data/ there.
    if strange or "\\" in path or any(ord(letter) < ord(" ") for letter in path):
        raise ValueError(f"{path!r} is no plain path below data/")
    return path


def _hash(text: object) -> str:
    if not isinstance(text, str) or not _HASH.fullmatch(text):
        raise ValueError(f"{str(text)[:80]!r} is no SHA-256")
    return text


VERSION: Final = 1

_LOCATION: Final = re.compile(r"payloads/[0-9]{16}/[0-9a-z-]{1,160}")


class PointerCodec:
    """A pointer as a cell's content. Damage is an error, never "nothing was published"."""

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
        with damage(where, "Restore the object."):
            fields = parse_object(data)
            kind, version = fields["kind"], fields["version"]
            if kind != "strandline-snapshot-pointer" or type(version) is not int or version < VERSION:
                raise ValueError(f"{str(kind)[:80]!r} is no snapshot pointer")
            if version == VERSION:
                return _state(fields)
        raise UnsupportedVersion(
            f"{where} is of version {version}, and this program reads version {VERSION}: upgrade strandline."
        )


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
