"""Snapshots: a sink's content at a cursor, sealed in a folder with hashes."""

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
