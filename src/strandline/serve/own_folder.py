"""The folder of a server: its lock, which names the process that holds it, and the file that is in force."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from strandline.errors import Fenced, NotFound
from strandline.storage.disk import Disk
from strandline.storage.env import Env

LOCK: Final = "serve.lock"
RUNNING: Final = "running.toml"
"""The text of the file that is in force; secrets are not in it."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Holder(NamedTuple):
    """A process, and since when it runs (microseconds)."""

    pid: int
    since: int

    def __str__(self) -> str:
        started = _EPOCH + timedelta(microseconds=self.since)
        return f"process {self.pid}, which runs since {started:%Y-%m-%d %H:%M:%S} UTC"


@contextlib.contextmanager
def held_folder(folder: str, env: Env) -> Iterator[None]:
    """Hold a server's folder during the block; ``Fenced``, naming the process that holds it, if another one does."""
    env.disk.make_folders(folder)
    with env.disk.try_locked(f"{folder}/{LOCK}") as is_mine:
        if not is_mine:
            holder = _holder(folder, env.disk) or "another process"
            raise Fenced(
                f"The folder {folder} is in use by {holder}: stop that server first, or give this one another folder "
                "([process] folder)."
            )
        file = env.disk.open_append(f"{folder}/{LOCK}")
        with contextlib.closing(file):
            file.cut(0)
            file.write([msgspec.json.encode(Holder(os.getpid(), env.clock.now()))])
        yield


def keep_running(folder: str, text: str, disk: Disk) -> None:
    """Store the text of the file that is in force."""
    new = f"{folder}/{RUNNING}.new"
    disk.remove(new)
    disk.write_new(new, [text.encode()])
    disk.rename(new, f"{folder}/{RUNNING}")


def running_process(folder: str, disk: Disk) -> Holder | None:
    """The process that holds a server's folder now; None if no process does."""
    try:
        with disk.try_locked(f"{folder}/{LOCK}") as is_free:
            return None if is_free else _holder(folder, disk)
    except NotFound:
        return None


def _holder(folder: str, disk: Disk) -> Holder | None:
    try:
        return msgspec.json.decode(disk.read(f"{folder}/{LOCK}"), type=Holder)
    except (NotFound, msgspec.DecodeError):
        return None
