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
    """What a sealed folder's ``MANIFEST.json`` says: its data holds exactly what is below ``cursor``."""

    folder: str
    kind: str
    kind_version: int
    cursor: Cursor
    created: int
    """Microseconds since the epoch."""
    files: tuple[SnapshotFile, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """One published snapshot: where its objects are, what it holds, and the SHA-256 of its manifest."""

    location: str
    cursor: Cursor
    kind: str
    kind_version: int
    size: int
    """Bytes of all its files."""
    part: int
    """Bytes of a file that one object holds; the last one holds the rest."""
    sha256: str
    published: int
    """When the pointer moved to it: microseconds since the epoch, by the clock of who moved it."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A payload that the pointer has left, and when; kept for a while for those that are reading it."""

    location: str
    at: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """The one object that says which snapshot is the newest.

    Payloads carry the generation that was current when their upload began. One of a generation below
    ``min_generation`` can never be pointed at any more, so that it may be deleted if it is not listed here.
    """

    generation: int = 1
    min_generation: int = 0
    current: Artifact | None = None
    superseded: tuple[Superseded, ...] = ()
