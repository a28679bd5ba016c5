"""Atomic folders: filled under a hidden name, renamed last."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strandline.errors import AlreadyExists, NotFound, StorageError
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.env import Env

_STAGING: Final = re.compile(r"\..+\.~staging-[0-9a-f]{32}(\.lock)?")
_REMOVING: Final = re.compile(r"\..+\.~removing-[0-9a-f]{32}")


@contextlib.contextmanager
def staged(dest: str, *, env: Env) -> Iterator[str]:
    """An empty hidden folder that is durably renamed to ``dest`` when the block succeeds, and removed otherwise.

    ``AlreadyExists`` unless ``dest`` is absent or an empty folder, both before and after the block. ``dest`` changes
    atomically. The block syncs its files; folders are synced here. The leftovers of a process that died in such a
    block are removed by the next call in the same parent folder.
    """
    place = Path(dest).absolute()
    was_there = check_free(dest, disk=env.disk)
    with scratch_folder(dest, env=env) as hidden:
        yield hidden
        sync_folders(hidden, disk=env.disk)
        _rename(hidden, str(place), disk=env.disk)
        try:
            env.disk.sync_folder(str(place.parent))
        except BaseException:
            # Not acknowledged yet, and a power failure might undo it: undo it now.
            with contextlib.suppress(StorageError):
                env.disk.rename(str(place), hidden)
                if was_there:
                    env.disk.make_folders(str(place))
            raise


@contextlib.contextmanager
def scratch_folder(beside: str, *, env: Env) -> Iterator[str]:
    """An empty hidden folder beside a path, for the duration of the block; that of a dead process is removed later.

    A lock says that its process lives. It is removed with all that is left in it.
    """
    place = Path(beside).absolute()
    parent = str(place.parent)
    env.disk.make_folders(parent)
    sweep(parent, env=env)
    with contextlib.ExitStack() as stack:
        hidden = _locked_name(stack, parent, place.name, env=env)
        try:
            env.disk.make_folders(hidden)
            yield hidden
        finally:
            with contextlib.suppress(StorageError):
                env.disk.remove_folder(hidden)
            with contextlib.suppress(StorageError):
                env.disk.remove(f"{hidden}.lock")


def check_free(dest: str, *, disk: Disk) -> bool:
    """Whether ``dest`` is an empty folder (True) or absent (False); ``AlreadyExists`` if it is anything else."""
    place = Path(dest).absolute()
    row = next((row for row in disk.scan(str(place.parent)) if row.name == place.name), None)
    if row is None:
        return False
    if not row.is_folder or row.is_link or disk.scan(str(place)):
        raise AlreadyExists(f"{dest} is occupied; nothing was changed. Name a folder that is absent or empty.")
    return True


def set_aside(folder: str, *, env: Env) -> None:
    """Remove a folder atomically; absent is fine."""
    place = Path(folder).absolute()
    gone = str(place.parent / f".{place.name}.~removing-{env.chance.uuid().hex}")
    try:
        env.disk.rename(folder, gone)
    except NotFound:
        return
    env.disk.remove_folder(gone)


def sweep(parent: str, *, env: Env) -> None:
    """Remove the leftovers in ``parent`` of processes that died while staging or removing a folder. Never raises.

    A process holds a lock beside its staged folder from before it is created until after it is renamed, and the kernel
    releases the lock of a dead process. So a free lock means that the folder is abandoned.
    """
    for row in env.disk.scan(parent):
        path = f"{parent}/{row.name}"
        with contextlib.suppress(StorageError):
            if _REMOVING.fullmatch(row.name):
                env.disk.remove_folder(path)
            elif _STAGING.fullmatch(row.name):
                hidden = path.removesuffix(".lock")
                with env.disk.try_locked(f"{hidden}.lock") as held:
                    if held:
                        set_aside(hidden, env=env)
                        env.disk.remove(f"{hidden}.lock")


def _locked_name(stack: contextlib.ExitStack, parent: str, name: str, *, env: Env) -> str:
    while True:
        hidden = f"{parent}/.{name}.~staging-{env.chance.uuid().hex}"
        lock = f"{hidden}.lock"
        with contextlib.ExitStack() as trying:
            trying.enter_context(env.disk.locked(lock))
            # A concurrent sweep may have removed the lock file just after it was created: then it protects nothing.
            with contextlib.suppress(NotFound):
                env.disk.size(lock)
                stack.push(trying.pop_all())
                return hidden


def _rename(hidden: str, dest: str, *, disk: Disk) -> None:
    try:
        disk.rename(hidden, dest)
    except StorageError:
        names = {row.name for row in disk.scan(str(Path(dest).parent))}
        if Path(hidden).name not in names and Path(dest).name in names:
            return  # the rename happened, only its answer was lost
        check_free(dest, disk=disk)  # AlreadyExists is the better error if another process was faster
        raise


def sync_folders(folder: str, *, disk: Disk) -> None:
    """Sync a folder and all folders below it."""
    for row in disk.scan(folder):
        if row.is_folder and not row.is_link:
            sync_folders(f"{folder}/{row.name}", disk=disk)
    disk.sync_folder(folder)


def files_below(folder: str, *, disk: Disk) -> dict[str, FolderRow]:
    """All files below a folder, by path; links are listed and not followed."""
    found: dict[str, FolderRow] = {}
    waiting = [""]
    while waiting:
        below = waiting.pop()
        for row in disk.scan(f"{folder}/{below}" if below else folder):
            path = f"{below}/{row.name}" if below else row.name
            if row.is_folder and not row.is_link:
                waiting.append(path)
            else:
                found[path] = row
    return dict(sorted(found.items()))
