"""Checks of a command's path or URL. If it holds something else, the error names the right command."""

from __future__ import annotations

from pathlib import Path

from strandline.errors import NotALog
from strandline.log.folders import Contents, FolderKind, contents, refuse_others
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


def need_object_log(url: str, *, create: bool = False, hint: str = "check the address") -> None:
    """Refuse a local address with other content; with ``create``, an empty one is fine, too.

    A queue beside a log has its own folder, and is allowed.
    """
    folder = folder_at(url)
    if folder is None:
        return
    there = contents_at(str(folder))
    if FolderKind.OBJECT_LOG in there.kinds or create:
        found = dict(there.found)
        found.pop(FolderKind.QUEUE_V1, None)
        there = Contents(there.path, found or {FolderKind.EMPTY: ()})
    if not is_free(there):
        refuse_others(there, FolderKind.OBJECT_LOG)
    # A lone log.json may be too damaged to identify: opening it reports that.
    elif not create and "log.json" not in there.found.get(FolderKind.OTHER, ()):
        why = "there is no such folder" if FolderKind.ABSENT in there.kinds else f"it is {there}"
        raise NotALog(f"There is no log at {url} ({why}): {hint}.")


def is_free(there: Contents) -> bool:
    """Whether the path has no content of this package."""
    return there.kinds <= {FolderKind.EMPTY, FolderKind.ABSENT, FolderKind.OTHER}
