"""What is at the path or URL of a command."""

from __future__ import annotations

from pathlib import Path

from strandline.log.folders import Contents, FolderKind, contents
from strandline.model.addresses import ParsedAddress
from strandline.storage.disk import DISK


def folder_at(url: str) -> Path | None:
    """The folder of a local address, from the root; None for any other."""
    place = ParsedAddress.of(url)
    folder = None if place.is_wal else place.folder
    return None if folder is None else Path(folder).absolute()


def contents_at(path: str) -> Contents:
    """Look at a path: which kinds of content it has."""
    return contents(path, disk=DISK)


def is_free(there: Contents) -> bool:
    """Whether the path has no content of this package."""
    return there.kinds <= {FolderKind.EMPTY, FolderKind.ABSENT, FolderKind.OTHER}
