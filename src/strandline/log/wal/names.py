"""File names and lock file of a write-ahead log, and the salt that marks its frames."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from strandline.errors import Fenced, NotFound
from strandline.formats.checksum import crc32c
from strandline.storage.disk import Disk, FolderRow

IDENTITY: Final = "log.json"
SLOTS_FILE: Final = "slots.json"
MARK: Final = "mark"
LOCK: Final = "lock"
REWIND: Final = "rewind.json"
DATA: Final = ".log"
INDEX: Final = ".index"
TORN: Final = ".torn"
NEW: Final = ".new"

LEAD: Final = 1
"""Flag of the first frame of a file, which holds no records."""

_DATA = re.compile(r"([0-9]{20})\.log")


def data_name(first: int) -> str:
    """The file whose first record has this offset."""
    return f"{first:020d}{DATA}"


def index_name(first: int) -> str:
    """The index of that file."""
    return f"{first:020d}{INDEX}"


def torn_name(first: int, at: int, number: int) -> str:
    """The torn tail that was cut off that file at a byte, for the ``number``-th time."""
    return f"{first:020d}.{at}.{number}{TORN}"


def firsts_in(rows: Iterable[FolderRow]) -> list[int]:
    """The first offset of each file of frames, in order."""
    return sorted(int(found[1]) for row in rows if not row.is_folder and (found := _DATA.fullmatch(row.name)))


def salt_of(log_id: UUID) -> int:
    """A mark of the log in the flags of its frames.

    A user may store a frame of another log as a value. When the bytes around it are damaged, it must not count as a
    frame of this log, which would move the durable end.
    """
    return crc32c(log_id.bytes) << 1 & 0xFFFE


def hold_lock(held: contextlib.ExitStack, folder: str, *, disk: Disk) -> None:
    """Lock the log for writing; ``Fenced``, naming the holder, while another process that is alive holds the lock."""
    path = f"{folder}/{LOCK}"
    try:
        is_mine = held.enter_context(disk.try_locked(path))
    except NotFound:
        return  # there is no such folder: the caller raises NotALog
    if not is_mine:
        holder = read_holder(folder, disk=disk) or "another process"
        raise Fenced(
            f"The log in {folder} is open for writing by {holder}; nothing was changed. Close it there first, or open "
            "it for reading."
        )
    file = disk.open_append(path)
    with contextlib.closing(file):
        file.cut(0)
        file.write([f"process {os.getpid()} on {platform.node()}\n".encode()])


def read_holder(folder: str, *, disk: Disk) -> str:
    """The last holder of the lock, dead or alive; empty if unknown. Does not touch the lock."""
    try:
        return disk.read(f"{folder}/{LOCK}").decode(errors="replace").strip()
    except NotFound:
        return ""
