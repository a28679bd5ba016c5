"""Arguments and checks shared by the ``wal`` commands."""

from __future__ import annotations

from typing import Annotated

import typer

from strandline.cli.targets import look, need
from strandline.log.folders import FolderKind
from strandline.log.wal.names import firsts_in
from strandline.storage.disk import DISK

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="The log's folder.", show_default=False)]


def need_wal(folder: str) -> None:
    """Refuse a path that leads to anything but a write-ahead log."""
    need(look(folder), FolderKind.WAL)


def data_bytes(folder: str) -> int:
    """How many bytes of frames there are to read, as of now."""
    rows = DISK.scan(folder)
    return sum(row.size for row in rows if firsts_in([row]))
