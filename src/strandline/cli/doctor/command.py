"""``strandline doctor``: checks the machine, the store and the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from strandline.cli.doctor.lines import CheckStatus, Line
from strandline.cli.doctor.machine import machine
from strandline.cli.doctor.place import StoreChecks, disk_line, log_lines, other_line
from strandline.cli.shared import output as show
from strandline.cli.shared.common import guarded
from strandline.cli.shared.options import argument
from strandline.cli.shared.targets import folder_at
from strandline.storage.objects.urls import open_store

_STYLES: Final = {CheckStatus.OK: "green", CheckStatus.WARNING: "bold yellow", CheckStatus.PROBLEM: "bold red"}
_WORST_FIRST: Final = (CheckStatus.PROBLEM, CheckStatus.WARNING, CheckStatus.OK)


@guarded
def doctor(
    url: Annotated[
        str | None, argument("URL", "A log, or a place for one: a folder, file://, s3://, gs:// or az://.")
    ] = None,
) -> None:
    """Check this machine, and the store of a log.

    Looks at Python, packages, extras and Java. At URL it writes, reads, lists and deletes objects in the store, and
    checks that it refuses conditional writes whose condition does not hold, also when several race: logs rely on that.
    Everything happens in a folder doctor-… below the address, which is removed again. Ends with status 1 if there is a
    problem.

    Example: strandline doctor s3://bucket/orders
    """
    found = []
    for line in _lines(url):
        found.append(line)
        if not show.for_programs():
            text = Text.assemble((f"{line.status:>8}", _STYLES[line.status]), f"  {line.what:<20}  ", line.said)
            show.say(text)
    worst = next(status for status in _WORST_FIRST if status in {line.status for line in found})
    if show.for_programs():
        show.document({"status": worst, "lines": [asdict(line) for line in found]})
    if worst is CheckStatus.PROBLEM:
        raise typer.Exit(1)


def _lines(url: str | None) -> Iterator[Line]:
    yield from machine()
    if url is None:
        return
    other = other_line(url)
    if other is not None:
        yield other
        return
    disk = disk_line(url)
    if disk is not None:
        yield disk
    store = open_store(url)
    place = StoreChecks(store)
    with _left_as_found(url, place.folder):
        yield from place.lines()
    yield from log_lines(store)


@contextmanager
def _left_as_found(url: str, folder: str) -> Iterator[None]:
    """Remove the folders that a local store has created: object stores have none to delete. Only empty ones."""
    root = folder_at(url)
    if root is None:
        yield
        return
    new = list(takewhile(lambda path: not path.exists(), (root, *root.parents)))
    try:
        yield
    finally:
        ours = root / folder
        with suppress(OSError):
            for lock in ours.glob("**/.~*"):  # locks of the store
                lock.unlink()
            for path in (*_folders(ours), ours, *new):
                path.rmdir()


def _folders(below: Path) -> list[Path]:
    return sorted((path for path in below.glob("**/") if path != below), reverse=True)
