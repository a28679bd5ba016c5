"""For every run of pytest here: what makes the tests quick, and what is left out where an extra is not installed."""

from __future__ import annotations

import gc
import os
import sys
import tempfile  # noqa: TID251 - pytest asks it
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

ROOMS = {"pyspark": "src/strandline/spark", "typer": "src/strandline/cli"}
collect_ignore = [room for extra, room in ROOMS.items() if find_spec(extra) is None]
"""Examples of a room whose extra is not installed; everything else must import."""

ROOM_NEEDED = 4 << 30
"""Bytes that a folder in memory must have free: what the largest tests write at a time, several times over."""

SLOW = 1800
"""Seconds that every slow test has at least. The limit guards against hanging, and says nothing about speed."""


def keep_bytecode() -> None:
    """Compile each module once, also where the environment says not to: hundreds of processes import the same ones."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def keep_files_in_memory(folder: Path = Path("/dev/shm")) -> None:  # noqa: S108 - a file system in memory
    """Put temporary files where a sync costs nothing; ``TMPDIR`` names another place, and is taken as it is.

    A killed process leaves there what it leaves on a disk. What a crash of the machine leaves is tried on simulated
    disks, never on the one below a temporary folder.
    """
    if "TMPDIR" not in os.environ and os.access(folder, os.W_OK) and _free(folder) >= ROOM_NEEDED:
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None  # it is asked for again


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


keep_bytecode()
keep_files_in_memory()
gc.disable()  # until all is collected: nothing of that is garbage


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples only in modules that have some: most have none, and each would be searched object by object."""
    found = yield
    if any(isinstance(one, DoctestModule) for one in found) and b">>>" not in file_path.read_bytes():
        return [one for one in found if not isinstance(one, DoctestModule)]
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests their time."""
    for item in items:
        limit = item.get_closest_marker("timeout")
        if item.get_closest_marker("slow") and (limit is None or limit.args[0] < SLOW):
            item.add_marker(pytest.mark.timeout(SLOW), append=False)


def pytest_collection_finish() -> None:
    """Leave the collected tests to themselves: a collection need not look at them, and a forked child not copy them."""
    gc.freeze()
    gc.enable()
