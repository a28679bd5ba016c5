"""Lock file of a write-ahead log: one writing process, named in the file."""

from __future__ import annotations

import contextlib
import os
import platform

from strandline.errors import Fenced, NotFound
from strandline.log.wal.names import LOCK
from strandline.storage.disk import Disk


def hold_lock(held: contextlib.ExitStack, folder: str, *, disk: Disk) -> None:
    """Become the one process that writes, or say who is; a process that died does not count."""
    path = f"{folder}/{LOCK}"
    try:
        is_mine = held.enter_context(disk.try_locked(path))
    except NotFound:
        return  # there is no such folder, and so no log: what follows says so
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
    """Who had the lock last, dead or alive; empty if nobody has said so. Does not touch the lock."""
    try:
        return disk.read(f"{folder}/{LOCK}").decode(errors="replace").strip()
    except NotFound:
        return ""
