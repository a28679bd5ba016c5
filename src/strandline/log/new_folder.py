"""Checks before creation: nothing new is created where it would hide something else, in a folder or in a bucket.

A place that already holds what is opened belongs to the opener, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Final

from strandline.errors import NotFound, WrongKind
from strandline.formats.object.identity import OPEN_OBJECT_LOG, OPEN_WAL
from strandline.log.folders import FIRST_BYTES, PROBED, Contents, FolderKind, contents, recognise
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.store import ObjectStore

_STRANGERS: Final = frozenset({FolderKind.ABSENT, FolderKind.EMPTY, FolderKind.OTHER})
"""What may be there: files of nobody here are in nobody's way."""

_OPENED_WITH: Final = {
    FolderKind.WAL: OPEN_WAL,
    FolderKind.OBJECT_LOG: OPEN_OBJECT_LOG,
    FolderKind.QUEUE_V1: "open it with strandline.open(..., format='queue-v1')",
    FolderKind.TOPIC: "open it as a topic",
    FolderKind.NODE: "open it with strandline.node.Primary.open, strandline.node.Replica or 'strandline node run'",
    FolderKind.APPEND_LOG_STORE: "open it with strandline.AppendLogStore.open",
    FolderKind.ROCKSDB_STORE: "open it with strandline.RocksStore.open",
    FolderKind.SNAPSHOT: "import it into a store with import_from",
    FolderKind.DELTA_TABLE: "follow into it with strandline.DeltaSink",
    FolderKind.SPOOL: "open it with strandline.compat.WriteAheadLog.open(..., migrate=True)",
    FolderKind.FILE: "name a folder",
}

_TAKE_OVER: Final = (
    "give the node a folder of its own, and let it take this log over, with take_over='{path}', or 'strandline node "
    "run FOLDER --take-over {path}'"
)
_TAKEN_OVER: Final = {
    (FolderKind.NODE, FolderKind.WAL): _TAKE_OVER,
    (FolderKind.NODE, FolderKind.SPOOL): (
        "move it into a write-ahead log, with strandline.compat.WriteAheadLog.open('{path}', migrate=True) or "
        "'strandline wal migrate {path}', and let a node with a folder of its own take that over (take_over='{path}')"
    ),
}
"""How one thing becomes another."""

_IN_BUCKETS: Final = (*PROBED, "topic.json", "_delta_log/_last_checkpoint", "_delta_log/00000000000000000000.json")
"""What tells the kinds of things that a bucket may hold; a table without its first commit has had a checkpoint."""


def check_new(folder: str | PathLike[str], kind: FolderKind, *, disk: Disk) -> None:
    """``WrongKind`` if something of this kind would begin where something else is; says what that is, and its use.

    What an interrupted beginning of the same kind has left is left to the opener.
    """
    there = contents(folder, disk=disk)
    _refuse_new(there, kind, "folder")
    if kind not in there.found:
        _refuse_beside_table(there, kind, disk=disk)


def _refuse_beside_table(there: Contents, kind: FolderKind, *, disk: Disk) -> None:
    """``WrongKind`` for anything new within a table, and for a table around anything: a VACUUM would delete that."""
    path = Path(there.path).absolute()
    others = there.found.get(FolderKind.OTHER, ())
    if kind is FolderKind.DELTA_TABLE and others:
        raise WrongKind(
            f"{path} holds something else ({', '.join(others[:3])}), which a VACUUM of a table there would delete: "
            "nothing was changed. Name an empty folder."
        )
    around = next((parent for parent in path.parents if disk.scan(str(parent / "_delta_log"))), None)
    if around is not None:
        raise WrongKind(
            f"{path} is within the Delta table {around}, and a VACUUM of that would delete it: nothing was changed. "
            "Name a folder outside of the table."
        )


def check_new_in_bucket(url: str, kind: FolderKind, first_bytes: Callable[[str], bytes | None]) -> None:
    """The same for a place in a bucket, where a listing may be long: only names that tell something are asked for.

    ``first_bytes`` gives the first bytes of the object with a name below that place, or None if there is none.
    """
    firsts = {name: found for name in _IN_BUCKETS if (found := first_bytes(name)) is not None}
    rows = {FolderRow(name.partition("/")[0], "/" in name) for name in firsts}
    _refuse_new(Contents(url, recognise(rows, firsts)), kind, "place")


def check_new_in_store(store: ObjectStore, kind: FolderKind) -> None:
    """The same by means of an object store."""

    def first_bytes(name: str) -> bytes | None:
        try:
            return bytes(store.get(name).data[:FIRST_BYTES])
        except NotFound:
            return None

    check_new_in_bucket(store.url, kind, first_bytes)


def _refuse_new(there: Contents, kind: FolderKind, place: str) -> None:
    found = _other(there, kind)
    if found is not None:
        path, what, advice = found
        raise WrongKind(
            f"{path} is {what}, and an empty {_bare(kind)} there would hide it: nothing was changed. "
            f"{advice[:1].upper()}{advice[1:]}; or name another {place}."
        )


def check_missing(
    folder: str | PathLike[str], kind: FolderKind, *, disk: Disk, beside: Collection[FolderKind] = ()
) -> None:
    """``WrongKind`` if what was not found in a folder is not there because something else is; says what, and its use.

    What is of the kinds ``beside`` is in nobody's way.
    """
    found = _other(contents(folder, disk=disk), kind, beside=beside)
    if found is not None:
        path, what, advice = found
        raise WrongKind(f"{path} is {what}, and no {_bare(kind)}: {advice}.")


def _other(there: Contents, kind: FolderKind, *, beside: Collection[FolderKind] = ()) -> tuple[str, str, str] | None:
    """The path, what is there instead of this kind, and what to do with that; None if nothing is in the way."""
    others = [found for found in there.found if found not in _STRANGERS and found not in beside]
    if not others or kind in others:
        return None
    path = there.path.rstrip("/") or there.path
    return path, str(there), _TAKEN_OVER.get((kind, others[0]), _OPENED_WITH[others[0]]).format(path=path)


def _bare(kind: FolderKind) -> str:
    return "node" if kind is FolderKind.NODE else kind.partition(" ")[2]
