"""Recognition of a folder's kind by file names and the first bytes of a few files, before anything is opened.

Does not judge damage. Openers call it first: no log is created inside another thing's folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Final

from strandline.errors import NotALog, NotFound, WrongKind
from strandline.formats.object.head import HEAD_MAGIC
from strandline.formats.wal.folder import KEPT_KIND
from strandline.formats.wal.folder import KIND as WAL_KIND
from strandline.formats.wal.frame import MAGIC as FRAME_MAGIC
from strandline.model.addresses import Address, as_address
from strandline.storage.disk import Disk, FolderRow


class FolderKind(StrEnum):
    """What a path may lead to; the value is its name in a sentence."""

    WAL = "a write-ahead log"
    OBJECT_LOG = "an object log"
    QUEUE_V1 = "a queue of version 1"
    TOPIC = "a topic"
    NODE = "the folder of a node"
    APPEND_LOG_STORE = "an append-log store"
    ROCKSDB_STORE = "a RocksDB store"
    SNAPSHOT = "a snapshot"
    DELTA_TABLE = "a Delta table"
    SPOOL = "a spool of an older version"
    ABSENT = "nothing"
    EMPTY = "an empty folder"
    FILE = "a file"
    OTHER = "a folder of something else"


PROBED: Final = ("log.json", "slots.json", "head", "ingest/manifest")
"""The files whose first bytes are looked at."""
FIRST_BYTES: Final = 4096

_LEFT: Final = frozenset({"lock", "node.lock"})
"""What an opening that was refused or interrupted leaves in a folder: that is still nothing."""
_SPOOL_SUFFIX: Final = ".logical.wal"
_FRAMES: Final = re.compile(r"[0-9]{20}\.log")
_NODE_DATA: Final = re.compile(r"data-[0-9]{8}")
_ROCKS_MANIFEST: Final = re.compile(r"MANIFEST-[0-9]+")
_LOG_KINDS: Final = {
    WAL_KIND: FolderKind.WAL,
    KEPT_KIND: FolderKind.WAL,
    "strandline-object-log": FolderKind.OBJECT_LOG,
}
_OWN_NAMES: Final = {
    FolderKind.WAL: ("log.json", "slots.json", "mark", "rewind.json"),
    FolderKind.OBJECT_LOG: ("log.json", "head", "batches", "chunks", "slots"),
}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a path leads to. Several kinds if a folder holds several things, each with the names that tell so."""

    path: str
    found: Mapping[FolderKind, tuple[str, ...]] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[FolderKind]:
        """All that is there."""
        return frozenset(self.found)

    def is_free(self) -> bool:
        """Whether something new may begin here: there is nothing, or an empty folder."""
        return self.kinds <= {FolderKind.ABSENT, FolderKind.EMPTY}

    def __str__(self) -> str:
        """What is there, in words: ``a write-ahead log (log.json) and an append-log store (fold.log)``."""
        told = [f"{kind}{_named(names)}" for kind, names in self.found.items()]
        return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"


def _named(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004 - three are enough to find them
    return f" ({shown})" if names else ""


def recognise(rows: Iterable[FolderRow], firsts: Mapping[str, bytes]) -> dict[FolderKind, tuple[str, ...]]:
    """What a folder with these names holds; ``firsts`` has the first bytes of those in :data:`PROBED` that exist.

    >>> recognise([FolderRow("fold.log"), FolderRow("lock")], {})
    {<FolderKind.APPEND_LOG_STORE: 'an append-log store'>: ('fold.log',)}
    >>> recognise([FolderRow("lock")], {})
    {<FolderKind.EMPTY: 'an empty folder'>: ()}
    """
    listed = sorted(row for row in rows if not row.name.startswith(".~"))
    files = [row.name for row in listed if not row.is_folder]
    folders = [row.name for row in listed if row.is_folder]
    found: dict[FolderKind, tuple[str, ...]] = {}
    logs = {_LOG_KINDS.get(_json_kind(firsts.get(name, b""))) for name in ("log.json", "slots.json")}
    frames = [name for name in files if _FRAMES.fullmatch(name)]
    for kind, is_there in (
        (FolderKind.WAL, FolderKind.WAL in logs or frames),
        (FolderKind.OBJECT_LOG, FolderKind.OBJECT_LOG in logs or firsts.get("head", b"").startswith(HEAD_MAGIC)),
    ):
        if is_there:
            names = [name for name in _OWN_NAMES[kind] if name in files or name in folders]
            found[kind] = (*names, *(frames if kind is FolderKind.WAL else ()))
    if len(found) > 1:  # the identity is of one of them
        owner = _LOG_KINDS.get(_json_kind(firsts.get("log.json", b"")))
        found = {
            kind: tuple(name for name in names if name != "log.json" or kind is owner) for kind, names in found.items()
        }
    if "ingest/manifest" in firsts or ("manifest" in files and any(name.endswith(".batch") for name in files)):
        found[FolderKind.QUEUE_V1] = ("ingest/manifest" if "ingest/manifest" in firsts else "manifest",)
    data = [name for name in folders if _NODE_DATA.fullmatch(name)]
    if "node.json" in files or data:
        found[FolderKind.NODE] = (*(name for name in ("node.json",) if name in files), *data)
    rocks = [name for name in files if _ROCKS_MANIFEST.fullmatch(name)]
    for kind, names in (
        (FolderKind.TOPIC, ["topic.json"]),
        (FolderKind.APPEND_LOG_STORE, ["fold.log"]),
        (FolderKind.ROCKSDB_STORE, ["CURRENT", *(rocks or [""])]),
        (FolderKind.SNAPSHOT, ["MANIFEST.json", "data"]),
        (FolderKind.DELTA_TABLE, ["_delta_log"]),
    ):
        if all(name in files or name in folders for name in names):
            found[kind] = tuple(names)
    if found:
        return found
    spools = tuple(name for name in files if name.endswith(_SPOOL_SUFFIX))
    if spools:  # beside anything else they are files that get in nobody's way
        return {FolderKind.SPOOL: spools}
    others = tuple(name for name in (*files, *folders) if name not in _LEFT)
    return {FolderKind.OTHER: others} if others else {FolderKind.EMPTY: ()}


def _json_kind(first: bytes) -> str:
    try:
        fields = json.loads(first)
        return str(fields["kind"])
    except (ValueError, RecursionError, KeyError, TypeError):
        found = re.search(rb'"kind": ?"([a-z0-9-]{1,40})"', first)  # longer than what was looked at, or damaged
        return found[1].decode() if found else ""


def contents(path: Address, *, disk: Disk) -> Contents:
    """Look what a path leads to. Reads a listing and a few first bytes, and changes nothing."""
    named = as_address(path)
    bare = named.rstrip("/") or named
    rows = disk.scan(bare)
    if not rows:
        with contextlib.suppress(NotFound):
            first = disk.read(bare, 0, len(FRAME_MAGIC))  # a folder has no bytes: NotFound
            is_spool = bare.endswith(_SPOOL_SUFFIX) or first == FRAME_MAGIC
            return Contents(named, {FolderKind.SPOOL if is_spool else FolderKind.FILE: ()})
    found: dict[FolderKind, tuple[str, ...]] = recognise(rows, _first_bytes(bare, disk=disk))
    if not rows and not _is_folder(bare, disk=disk):
        found = {FolderKind.ABSENT: ()}
    if set(found) <= {FolderKind.EMPTY, FolderKind.ABSENT}:
        with contextlib.suppress(NotFound):
            disk.size(bare + _SPOOL_SUFFIX)
            found = {FolderKind.SPOOL: (f"../{PurePath(bare).name}{_SPOOL_SUFFIX}",)}
    return Contents(named, found)


def _first_bytes(folder: str, *, disk: Disk) -> dict[str, bytes]:
    firsts = {}
    for name in PROBED:
        with contextlib.suppress(NotFound):
            firsts[name] = disk.read(f"{folder}/{name}", 0, FIRST_BYTES)
    return firsts


def _is_folder(path: str, *, disk: Disk) -> bool:
    named = PurePath(path)
    return any(row.name == named.name and row.is_folder for row in disk.scan(str(named.parent)))


OPENED_WITH: Final = {
    FolderKind.WAL: "open it with strandline.compat.WriteAheadLog.",
    FolderKind.OBJECT_LOG: "open it with strandline.open.",
    FolderKind.QUEUE_V1: "open it with strandline.open(..., format='queue-v1').",
    FolderKind.TOPIC: "open the logs of its partitions.",
    FolderKind.NODE: "open it with strandline.node.Primary, or strandline.node.Replica.",
    FolderKind.APPEND_LOG_STORE: "open it with strandline.AppendLogStore.",
    FolderKind.ROCKSDB_STORE: "open it with strandline.RocksStore.",
    FolderKind.SNAPSHOT: "import it into a store with import_from.",
    FolderKind.DELTA_TABLE: "follow into it with strandline.DeltaSink.",
    FolderKind.SPOOL: "open it with strandline.compat.WriteAheadLog and migrate=True.",
}
"""What a program opens each kind with."""


def refuse_others(
    there: Contents,
    *needs: FolderKind,
    instead: Mapping[FolderKind, str] = OPENED_WITH,
    nothing: str = "check the path.",
) -> None:
    """Raise ``NotALog`` unless this is one thing of a kind that is needed; says what it is, and what that is for.

    ``WrongKind`` if it is something else of ours, or several things.
    ``instead`` says what to do with each other kind, ``nothing`` what to do where there is nothing.
    """
    if len(there.kinds) == 1 and there.kinds <= set(needs):
        return
    needed = " or ".join(kind.partition(" ")[2] for kind in needs)
    path = there.path.rstrip("/") or there.path
    if len(there.kinds) > 1:
        raise WrongKind(
            f"{path} holds several things: {there}. Nothing was changed: move all but one of them, each with all its "
            "files, into a folder of its own, and repeat this."
        )
    kind = next(iter(there.kinds))
    if kind in (FolderKind.ABSENT, FolderKind.EMPTY, FolderKind.OTHER):
        what = "there is no such folder" if kind is FolderKind.ABSENT else f"it is {kind}"
        raise NotALog(f"There is no {needed} in {path}, {what}: {nothing}")
    raise WrongKind(f"{path} is {there}, and no {needed}: {instead.get(kind, 'check the path.')}")
