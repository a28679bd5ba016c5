"""Snapshots: a sink's content at a cursor, sealed in a folder with hashes; and the pointer to the published one."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.model.cursor import Cursor


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot: its path below ``data/``, its size, and the SHA-256 of its bytes in hexadecimal."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The manifest of a sealed folder: its data is the state at ``cursor``."""

    folder: str
    kind: str
    kind_version: int
    cursor: Cursor
    created: int
    """Microseconds since the epoch."""
    files: tuple[SnapshotFile, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published snapshot: its location, cursor and kind, and the SHA-256 of its manifest."""

    location: str
    cursor: Cursor
    kind: str
    kind_version: int
    size: int
    """Bytes of all its files."""
    part: int
    """Bytes of a file per object; the last object has the rest."""
    sha256: str
    published: int
    """Publication time in microseconds since the epoch, by the publisher's clock."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A payload that the pointer no longer names, and since when; kept for a while for its readers."""

    location: str
    at: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """The object that names the newest published snapshot.

    A payload has the generation that was current when its upload began. The pointer can never move to a payload of a
    generation below ``min_generation``: that may be deleted if it is not listed here.
    """

    generation: int = 1
    min_generation: int = 0
    current: Artifact | None = None
    superseded: tuple[Superseded, ...] = ()
