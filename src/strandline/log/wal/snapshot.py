"""Copy of a write-ahead log at one moment, and verification of such a copy. Callers seal it."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Final

from strandline.errors import AlreadyExists, CorruptData, NotALog, NotFound
from strandline.formats.wal.folder import FORMAT_VERSION, KIND
from strandline.log.findings import FindingKind, Severity
from strandline.log.folders import FolderKind, contents
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import data_name, index_name
from strandline.log.wal.read.watermark import read_mark
from strandline.log.wal.recover.repair import copy_range, describe_copy
from strandline.log.wal.recover.scan_tail import read_log_json
from strandline.log.wal.recover.verify import verify as verify_log
from strandline.model.cursor import Bounds, Cursor
from strandline.storage.env import SYSTEM, Env

KIND_VERSION: Final = FORMAT_VERSION

__all__ = ["KIND", "KIND_VERSION", "fill", "verify"]


def fill(log: WalLog, folder: str) -> Cursor:
    """Copy all durable records at one moment into an empty folder, as a log of its own; returns the cursor after them.

    The copy is a write-ahead log with the same identity and writers, but without slots. Appends, new files and trims
    may continue; trimmed files are removed by the next trim after the copy.

    Every file is synced; the folder is not. ``NotFound`` if the folder does not exist, ``AlreadyExists`` unless it is
    empty.
    """
    disk = log.env.disk
    there = contents(folder, disk=disk)
    if FolderKind.ABSENT in there.kinds:
        raise NotFound(f"There is no folder {folder} for a copy of the log in {log.folder}: make it, and copy again.")
    if not there.is_free() or disk.scan(folder):
        raise AlreadyExists(f"{folder} is not empty: name an empty folder for a copy of the log in {log.folder}.")
    with log.keeping_files() as (firsts, size, mark):
        for first, following in pairwise(firsts):
            if following > mark.start:
                disk.copy(f"{log.folder}/{data_name(first)}", f"{folder}/{data_name(first)}")
                with contextlib.suppress(NotFound):  # it can be rebuilt
                    disk.copy(f"{log.folder}/{index_name(first)}", f"{folder}/{index_name(first)}")
        last = data_name(mark.active)
        copy_range(f"{log.folder}/{last}", 0, size, f"{folder}/{last}", disk=disk)
    describe_copy(folder, mark, read_log_json(log.folder, disk=disk), disk=disk)
    return Cursor(log.log_id, mark.next, mark.term)


def verify(folder: str, *, env: Env = SYSTEM) -> Cursor:
    """Read every byte of a copy, and return its cursor; changes nothing.

    ``CorruptData``, naming the first place, for any damage, and for anything after its end.
    """
    try:
        found = verify_log(folder, env=env)
    except NotALog as error:
        raise CorruptData(f"There is no copy of a log in {folder}: {error}") from error
    # A copy needs no crash recovery: it was made whole. A clock that differs between two machines is no damage of it.
    wrong = [
        finding
        for finding in found.findings
        if finding.severity is Severity.DAMAGE or finding.kind not in (FindingKind.INDEX, FindingKind.TIMES)
    ]
    if wrong:
        raise CorruptData(wrong[0].message)
    mark = None if found.log_id is None else read_mark(folder, found.log_id, disk=env.disk)
    if mark is None or not mark.clean or Bounds(mark.start, mark.next) != found.bounds:
        raise CorruptData(f"The copy of a log in {folder} does not match its mark ({mark}): make it again.")
    return Cursor(mark.log_id, mark.next, mark.term)
