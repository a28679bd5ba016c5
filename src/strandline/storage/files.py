"""Folders with owner-only permissions, and atomic replacement of small files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from strandline.errors import InvalidInput, NotFound, StorageError
from strandline.storage.disk import Disk


def below(folder: str, *names: str) -> str:
    """The path of what has these names in a folder; ``InvalidInput`` for a name that could lead out of it.

    >>> below("/data", "snapshots", "replica-1")
    '/data/snapshots/replica-1'
    """
    for name in names:
        if name in ("", ".", "..") or any(letter in "/\\" or ord(letter) < ord(" ") for letter in name):
            raise InvalidInput(f"{name[:200]!r} is no plain name of a file in {folder}: nothing was done there.")
    return "/".join((folder, *names))


def replace_file(disk: Disk, path: str, data: bytes, *, temporary: str) -> None:
    """Durably put a file in place of whatever is at ``path``: afterwards, and after any crash, the old or the new.

    ``temporary`` is a name in the same folder that nobody else uses; what a crash has left there is overwritten.
    """
    disk.remove(temporary)
    try:
        disk.write_new(temporary, [data])
        disk.rename(temporary, path)
    except StorageError:
        with contextlib.suppress(StorageError):
            disk.remove(temporary)
        raise
    disk.sync_folder(os.path.dirname(path) or ".")


def exists(path: str, *, disk: Disk) -> bool:
    """Whether there is a file of this name."""
    try:
        disk.size(path)
    except NotFound:
        return False
    return True


def make_own_folder(folder: str, *, disk: Disk) -> None:
    """Make a folder, and its name durable even if it is there.

    Whoever made it, or put something into it, may have died before syncing the name: then a power cut would take it,
    with all that was acknowledged in it since.
    """
    disk.make_folders(folder)
    sync_name(folder, disk=disk)


def sync_name(folder: str, *, disk: Disk) -> None:
    """Make the name of a folder durable."""
    disk.sync_folder(str(Path(folder).absolute().parent))
