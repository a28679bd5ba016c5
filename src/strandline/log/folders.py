"""Recognition of a folder's kind by file names and first bytes, and the checks before something new is created there.

Ignores damage. Openers call it first: no log is created inside a folder of another kind.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from pathlib import Path, PurePath
from typing import Final

from strandline.errors import NotALog, NotFound, WrongKind
from strandline.formats.object.head import HEAD_MAGIC
from strandline.formats.object.identity import OPEN_OBJECT_LOG, OPEN_WAL
from strandline.formats.wal.folder import KIND as WAL_KIND
from strandline.formats.wal.folder import SLOTS_KIND
from strandline.formats.wal.frame import MAGIC as FRAME_MAGIC
from strandline.model.addresses import Address, as_address
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.objects.store import ObjectStore


class FolderKind(StrEnum):
    """Kinds of a path's content; the value is its name in a sentence."""

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
"""The files whose first bytes are read."""
FIRST_BYTES: Final = 4096

_LEFT: Final = frozenset({"lock", "node.lock"})
"""Files that a refused or interrupted opening leaves: a folder with only these counts as empty."""
SPOOL_SUFFIX: Final = ".logical.wal"
_FRAMES: Final = re.compile(r"[0-9]{20}\.log")
_NODE_DATA: Final = re.compile(r"data-[0-9]{8}")
_ROCKS_MANIFEST: Final = re.compile(r"MANIFEST-[0-9]+")
_LOG_KINDS: Final = {
    WAL_KIND: FolderKind.WAL,
    SLOTS_KIND: FolderKind.WAL,
    "strandline-object-log": FolderKind.OBJECT_LOG,
}
_OWN_NAMES: Final = {
    FolderKind.WAL: ("log.json", "slots.json", "mark", "rewind.json"),
    FolderKind.OBJECT_LOG: ("log.json", "head", "batches", "chunks", "slots"),
}


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a path: its kinds, each with the file names that identify it. A folder may have several."""

    path: str
    found: Mapping[FolderKind, tuple[str, ...]] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[FolderKind]:
        """All kinds of content."""
        return frozenset(self.found)

    @property
    def bare(self) -> str:
        """The path without a slash at its end."""
        return self.path.rstrip("/") or self.path

    @property
    def spool(self) -> str | None:
        """The spool that the path is, or that a folder of this name would be moved from; None for another path."""
        names = self.found.get(FolderKind.SPOOL)
        if names is None:
            return None
        return self.bare if not names else self.bare + SPOOL_SUFFIX if names[0].startswith("../") else None

    def is_free(self) -> bool:
        """Whether something new may be created here: the path is absent, or an empty folder."""
        return self.kinds <= {FolderKind.ABSENT, FolderKind.EMPTY}

    def __str__(self) -> str:
        """The content in words: ``a write-ahead log (log.json) and an append-log store (fold.log)``."""
        parts = [f"{kind}{_named(names)}" for kind, names in self.found.items()]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _named(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")  # noqa: PLR2004 - three are enough to find them
    return f" ({shown})" if names else ""


def recognise(rows: Iterable[FolderRow], firsts: Mapping[str, bytes]) -> dict[FolderKind, tuple[str, ...]]:
    """The kinds of a folder with these names; ``firsts`` has the first bytes of those in :data:`PROBED` that exist.

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
    if len(found) > 1:  # the identity file belongs to one of them
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
    spools = tuple(name for name in files if name.endswith(SPOOL_SUFFIX))
    if spools:  # beside other content they are ignored
        return {FolderKind.SPOOL: spools}
    others = tuple(name for name in (*files, *folders) if name not in _LEFT)
    return {FolderKind.OTHER: others} if others else {FolderKind.EMPTY: ()}


def _json_kind(first: bytes) -> str:
    try:
        fields = json.loads(first)
        return str(fields["kind"])
    except (ValueError, RecursionError, KeyError, TypeError):
        found = re.search(rb'"kind": ?"([a-z0-9-]{1,40})"', first)  # longer than the bytes that were read, or damaged
        return found[1].decode() if found else ""


def contents(path: Address, *, disk: Disk) -> Contents:
    """Identify the content of a path. Reads a listing and a few first bytes, and changes nothing."""
    named = as_address(path)
    bare = named.rstrip("/") or named
    rows = disk.scan(bare)
    if not rows:
        with contextlib.suppress(NotFound):
            first = disk.read(bare, 0, len(FRAME_MAGIC))  # a folder has no bytes: NotFound
            is_spool = bare.endswith(SPOOL_SUFFIX) or first == FRAME_MAGIC
            return Contents(named, {FolderKind.SPOOL if is_spool else FolderKind.FILE: ()})
    found: dict[FolderKind, tuple[str, ...]] = recognise(rows, _first_bytes(bare, disk=disk))
    place = PurePath(bare)
    if not rows and not any(row.name == place.name and row.is_folder for row in disk.scan(str(place.parent))):
        found = {FolderKind.ABSENT: ()}
    if set(found) <= {FolderKind.EMPTY, FolderKind.ABSENT}:
        with contextlib.suppress(NotFound):
            disk.size(bare + SPOOL_SUFFIX)
            found = {FolderKind.SPOOL: (f"../{place.name}{SPOOL_SUFFIX}",)}
    return Contents(named, found)


def _first_bytes(folder: str, *, disk: Disk) -> dict[str, bytes]:
    firsts = {}
    for name in PROBED:
        with contextlib.suppress(NotFound):
            firsts[name] = disk.read(f"{folder}/{name}", 0, FIRST_BYTES)
    return firsts


OPENED_WITH: Final = {
    FolderKind.WAL: OPEN_WAL + ", or look at it with 'strandline wal inspect {path}' and 'strandline verify {path}'",
    FolderKind.OBJECT_LOG: OPEN_OBJECT_LOG + ", or with 'strandline tail {path}'; 'strandline verify {path}' checks it",
    FolderKind.QUEUE_V1: (
        "open it in the format queue-v1, look at it with 'strandline lag {path} --format queue-v1', or copy it into a "
        "log with 'strandline upgrade {path} TARGET_URL'"
    ),
    FolderKind.TOPIC: "open it as a topic, or one of its partitions, which are the logs in the folders below it",
    FolderKind.NODE: (
        "run it as a Primary or a Replica, or with 'strandline node run {path} --name NAME'; 'strandline verify' "
        "checks its copy of the log, in the last data folder in it"
    ),
    FolderKind.APPEND_LOG_STORE: "a program opens it, as an AppendLogStore",
    FolderKind.ROCKSDB_STORE: "a program opens it, as a RocksStore",
    FolderKind.SNAPSHOT: "a program imports it into a store, with import_from of the store which exported it",
    FolderKind.DELTA_TABLE: (
        "follow into it, with a DeltaSink or 'strandline follow', or look at it with 'strandline table describe {path}'"
    ),
    FolderKind.SPOOL: (
        "open it with migrate, or look at it with 'strandline wal inspect {spool}', and move it into a folder with "
        "'strandline wal migrate {spool}'"
    ),
    FolderKind.FILE: "name a folder",
}
"""What to do with each kind where another was expected."""
TAKEN_OVER: Final = {
    (FolderKind.NODE, FolderKind.WAL): (
        "give the node a folder of its own, and let it take this log over ('strandline node run FOLDER --take-over "
        "{path}')"
    ),
    (FolderKind.NODE, FolderKind.SPOOL): (
        "move it into a write-ahead log, with 'strandline wal migrate {spool}', and let a node with a folder of its "
        "own take that over ('strandline node run FOLDER --take-over {moved}')"
    ),
}
"""How one kind becomes another."""


def advice_on(there: Contents, found: FolderKind, wanted: FolderKind) -> str:
    """What to do about a kind that was found instead of a wanted one."""
    spool = there.spool or f"{there.bare}/{next(iter(there.found.get(FolderKind.SPOOL, ())), f'NAME{SPOOL_SUFFIX}')}"
    text = TAKEN_OVER.get((wanted, found), OPENED_WITH[found])
    return text.format(path=there.bare, spool=spool, moved=spool.removesuffix(SPOOL_SUFFIX))


def refuse_others(
    there: Contents,
    *needs: FolderKind,
    nothing: str = "check the path.",
) -> None:
    """Raise ``NotALog`` unless the path has exactly one kind of content, and it is one of the needed ones.

    ``WrongKind`` if it is another kind of this package, or several. ``nothing`` says what to do with an absent or empty
    path.
    """
    if len(there.kinds) == 1 and there.kinds <= set(needs):
        return
    needed = " or ".join(kind.partition(" ")[2] for kind in needs)
    path = there.bare
    if len(there.kinds) > 1:
        raise WrongKind(
            f"{path} holds several things: {there}. Nothing was changed: move all but one of them, each with all its "
            "files, into a folder of its own, and repeat this."
        )
    kind = next(iter(there.kinds))
    if kind in (FolderKind.ABSENT, FolderKind.EMPTY, FolderKind.OTHER):
        what = "there is no such folder" if kind is FolderKind.ABSENT else f"it is {kind}"
        raise NotALog(f"There is no {needed} in {path} ({what}): {nothing}")
    raise WrongKind(f"{path} is {there}, and no {needed}: {advice_on(there, kind, needs[0])}.")


_STRANGERS: Final = frozenset({FolderKind.ABSENT, FolderKind.EMPTY, FolderKind.OTHER})
"""Kinds that may be there: unknown files do not matter."""

TABLE_SIGNS: Final = ("_delta_log/_last_checkpoint", "_delta_log/00000000000000000000.json")
"""Object names of which each Delta table has one: a table without its first commit has had a checkpoint."""
_IN_BUCKETS: Final = (*PROBED, "topic.json", *TABLE_SIGNS)
"""Object names that identify a kind in a bucket."""


def check_new(
    folder: str | PathLike[str],
    kind: FolderKind,
    *,
    disk: Disk,
    is_leftover: Callable[[str], bool] = lambda _: False,
) -> None:
    """``WrongKind`` if this kind would be created where another one is; names that one, and its use.

    Leftovers of an interrupted creation of the same kind are handled by the opener; ``is_leftover`` recognises those of
    a table by their names.
    """
    there = contents(folder, disk=disk)
    _refuse_new(there, kind, "folder")
    if kind not in there.found:
        path = Path(there.path).absolute()
        around = next((parent for parent in path.parents if disk.scan(str(parent / "_delta_log"))), None)
        _refuse_beside_table(Contents(str(path), there.found), kind, around, is_leftover)


def check_new_table(there: Contents, around: str | None, is_leftover: Callable[[str], bool]) -> None:
    """``WrongKind`` if a Delta table would be created at a prefix of a bucket that holds something else.

    ``around`` is the table within which it would be; ``is_leftover`` as of :func:`check_new`.
    """
    _refuse_new(there, FolderKind.DELTA_TABLE, "path")
    if FolderKind.DELTA_TABLE not in there.found:
        _refuse_beside_table(there, FolderKind.DELTA_TABLE, around, is_leftover)


def _refuse_beside_table(
    there: Contents, kind: FolderKind, around: str | Path | None, is_leftover: Callable[[str], bool]
) -> None:
    """``WrongKind`` for a new folder within a table, and for a table around other files: VACUUM would delete those."""
    others = [name for name in there.found.get(FolderKind.OTHER, ()) if not is_leftover(name)]
    if kind is FolderKind.DELTA_TABLE and others:
        raise WrongKind(
            f"{there.path} holds other files ({', '.join(others[:3])}), which a VACUUM of a table there would delete: "
            "nothing was changed. Name an empty folder."
        )
    if around is not None:
        raise WrongKind(
            f"{there.path} is within the Delta table {around}, and a VACUUM of that would delete it: nothing was "
            "changed. Name a folder outside of the table."
        )


def check_new_in_store(store: ObjectStore, kind: FolderKind) -> None:
    """``WrongKind`` if this kind would be created in an object store where another one is.

    A listing of a bucket may be long: only the objects that identify a kind are read.
    """
    firsts = {}
    for name in _IN_BUCKETS:
        with contextlib.suppress(NotFound):
            firsts[name] = bytes(store.get(name).data[:FIRST_BYTES])
    rows = {FolderRow(name.partition("/")[0], "/" in name) for name in firsts}
    _refuse_new(Contents(store.url, recognise(rows, firsts)), kind, "path")


def _refuse_new(there: Contents, kind: FolderKind, place: str) -> None:
    found = _other(there, kind)
    if found is not None:
        path, what, advice = found
        raise WrongKind(
            f"{path} is {what}, and an empty {_bare(kind)} there would hide it. Nothing was changed: {advice}, or "
            f"choose another {place}."
        )


def check_missing(
    folder: str | PathLike[str], kind: FolderKind, *, disk: Disk, beside: Collection[FolderKind] = ()
) -> None:
    """``WrongKind`` if a folder holds another kind than the missing one; names that kind, and its use.

    The kinds ``beside`` are allowed.
    """
    found = _other(contents(folder, disk=disk), kind, beside=beside)
    if found is not None:
        path, what, advice = found
        raise WrongKind(f"{path} is {what}, and no {_bare(kind)}: {advice}.")


def _other(there: Contents, kind: FolderKind, *, beside: Collection[FolderKind] = ()) -> tuple[str, str, str] | None:
    """The path, the other kind that is there, and what to do with it; None if there is none."""
    others = [found for found in there.found if found not in _STRANGERS and found not in beside]
    if not others or kind in others:
        return None
    return there.bare, str(there), advice_on(there, others[0], kind)


def _bare(kind: FolderKind) -> str:
    return "node" if kind is FolderKind.NODE else kind.partition(" ")[2]
