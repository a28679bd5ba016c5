"""The demo's folder, and the marker files by which its processes signal one another."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SLOT: Final = "orders-table"
LATE_SLOT: Final = "late-history"
STALLED_SLOT: Final = "stalled-report"
OUTPUT: Final = "output"
"""The folder of the processes' output."""


class DemoFolder:
    """The paths below the demo's folder: the log, the tables, the checkpoints and the markers."""

    def __init__(self, path: Path) -> None:
        """Only names paths; :meth:`prepare` creates the folders."""
        tables, markers = path / "tables", path / "markers"
        self.path = path
        self.log = str(path / "log")
        self.orders = str(tables / "orders")
        self.naive = str(tables / "naive")
        self.history = str(tables / "history")
        """All changes, written by the late consumer."""
        self.stalled = str(tables / "stalled")
        self.checkpoints = path / "checkpoints"
        self.output = path / OUTPUT
        self.hold = markers / "hold"
        """While it exists, each query stops for good right after its next write."""
        self.stop = markers / "stop"
        """Asks the pipeline to stop."""
        self.naive_position = markers / "naive.json"
        """The next offset of the naive pipeline."""
        self.exposed = markers / "exposed.json"
        """The share of its working time in which the naive pipeline had a batch written and not recorded."""
        self._markers = markers

    def held(self, query: str) -> Path:
        """Marks that a query has written a batch and waits to be killed."""
        return self._markers / f"held-{query}"

    def up(self, run: int) -> Path:
        """Marks that both queries of a run are started."""
        return self._markers / f"up-{run}"

    def prepare(self) -> None:
        """Create the folders."""
        for folder in (self._markers, self.output, self.checkpoints, self.path / "tables"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_marker(path: Path, fact: Any = None) -> None:
    """Write a marker atomically."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(fact))
    hidden.replace(path)


def read_marker(path: Path) -> Any:
    """The value of a marker; None if it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def exit_with_parent(on_line: Callable[[str], None] = lambda _: None) -> None:
    """End this process when its parent has ended, which closes standard input; pass each line of it to ``on_line``."""

    def listen() -> None:
        for line in sys.stdin:
            on_line(line.strip())
        os._exit(3)

    threading.Thread(target=listen, name="parent", daemon=True).start()
