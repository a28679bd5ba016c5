"""Checks of a command's path or URL. If it holds something else, the error names the right command."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from strandline.errors import NotALog
from strandline.log.folders import Contents, FolderKind, contents, refuse_others
from strandline.model.addresses import ParsedAddress
from strandline.storage.disk import DISK

_SUFFIX: Final = ".logical.wal"
_PROGRAM: Final = "no command is for it; a program opens it with strandline.followers.{}."


def folder_at(url: str) -> Path | None:
    """The folder of a local address, from the root; None for any other."""
    place = ParsedAddress.of(url)
    folder = None if place.is_wal else place.folder
    return None if folder is None else Path(folder).absolute()


def contents_at(path: str) -> Contents:
    """Look at a path: which kinds of content it has."""
    return contents(path, disk=DISK)


def meant(there: Contents) -> dict[FolderKind, str]:
    """For each kind of content, the sentence that names its commands."""
    path = there.path.rstrip("/") or there.path
    data = next((name for name in reversed(there.found.get(FolderKind.NODE, ())) if name.startswith("data-")), None)
    copy = "" if data is None else f"; its copy of the log is in {path}/{data}, which 'strandline verify' checks"
    spool = spool_at(there) or f"{path}/{next(iter(there.found.get(FolderKind.SPOOL, ())), 'NAME' + _SUFFIX)}"
    return {
        FolderKind.WAL: f"look at it with 'strandline wal inspect {path}', and check it with 'strandline verify "
        f"{path}'.",
        FolderKind.OBJECT_LOG: f"read it with 'strandline tail {path}', and check it with 'strandline verify {path}'.",
        FolderKind.QUEUE_V1: f"look at it with 'strandline lag {path} --format queue-v1', or copy it into a log with "
        f"'strandline upgrade {path} TARGET_URL'.",
        FolderKind.TOPIC: "its partitions are logs in the folders below it: name one of those.",
        FolderKind.NODE: f"run it with 'strandline node run {path} --name NAME'{copy}.",
        FolderKind.APPEND_LOG_STORE: _PROGRAM.format("AppendLogStore"),
        FolderKind.ROCKSDB_STORE: _PROGRAM.format("RocksStore"),
        FolderKind.SNAPSHOT: _PROGRAM.format("AppendLogStore.import_from, or with that of the store which exported it"),
        FolderKind.DELTA_TABLE: f"look at it with 'strandline table describe {path}'.",
        FolderKind.SPOOL: f"look at it with 'strandline wal inspect {spool}', and move it into a folder with "
        f"'strandline wal migrate {spool}'.",
    }


def spool_at(there: Contents) -> str | None:
    """The spool of a path: by its own name, or by that of the folder that it would be moved to."""
    names = there.found.get(FolderKind.SPOOL)
    if names is None:
        return None
    path = there.path.rstrip("/")
    return path if not names else path + _SUFFIX if names[0].startswith("../") else None


def need(there: Contents, *kinds: FolderKind, nothing: str = "check the path.") -> None:
    """Refuse a path whose content is not exactly one of these kinds."""
    refuse_others(there, *kinds, instead=meant(there), nothing=nothing)


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
        need(there, FolderKind.OBJECT_LOG)
    # A lone log.json may be too damaged to identify: opening it reports that.
    elif not create and "log.json" not in there.found.get(FolderKind.OTHER, ()):
        why = "there is no such folder" if FolderKind.ABSENT in there.kinds else f"it is {there}"
        raise NotALog(f"There is no log at {url} ({why}): {hint}.")


def is_free(there: Contents) -> bool:
    """Whether the path has no content of this package."""
    return there.kinds <= {FolderKind.EMPTY, FolderKind.ABSENT, FolderKind.OTHER}
