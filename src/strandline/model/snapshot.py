"""Snapshots: a sink's content at a cursor, sealed in a folder with hashes; and the pointer to the published one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from strandline.model.arguments import Natural
from strandline.model.cursor import Cursor

Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""In hexadecimal."""

Location = Annotated[str, msgspec.Meta(pattern=r"\Apayloads/[0-9]{16}/[0-9a-z-]{1,160}\Z")]
"""The folder of a payload, below that of the pointer."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot: its path below ``data/``, its size, and the SHA-256 of its bytes."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    size: Natural
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The manifest of a sealed folder: its data is the state at ``cursor``."""

    folder: str
    kind: str
    kind_version: Natural
    cursor: Cursor
    created: Natural
    """Microseconds since the epoch."""
    files: tuple[SnapshotFile, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published snapshot: its location, cursor and kind, and the SHA-256 of its manifest."""

    location: Location
    cursor: Cursor
    kind: str
    kind_version: Natural
    size: Natural
    """Bytes of all its files."""
    part: Natural
    """Bytes of a file per object; the last object has the rest."""
    sha256: Sha256
    published: Natural
    """Publication time in microseconds since the epoch, by the publisher's clock."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A payload that the pointer no longer names, and since when; kept for a while for its readers."""

    location: Location
    at: Natural


@dataclass(frozen=True, slots=True)
class Pointer:
    """The object that names the newest published snapshot.

    A payload has the generation that was current when its upload began. The pointer can never move to a payload of a
    generation below ``min_generation``: that may be deleted if it is not listed here.
    """

    generation: Natural = 1
    min_generation: Natural = 0
    current: Artifact | None = None
    superseded: tuple[Superseded, ...] = ()
