"""Where the demo keeps its things, and how its processes tell each other what happens."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SLOT: Final = "orders-table"
LATE_SLOT: Final = "late-history"
STALLED_SLOT: Final = "stalled-report"
OUTPUT: Final = "output"
"""The folder of what the demo's processes print."""


@dataclass(frozen=True, slots=True)
class Places:
    """The folders and marker files below the demo's home."""

    home: Path

    @property
    def log(self) -> str:
        """The log, a folder as an object store."""
        return str(self.home / "log")

    @property
    def orders(self) -> str:
        """The table that follows the log through Spark."""
        return str(self.home / "tables" / "orders")

    @property
    def naive(self) -> str:
        """The naive twin's table."""
        return str(self.home / "tables" / "naive")

    @property
    def history(self) -> str:
        """The late consumer's table, of all changes."""
        return str(self.home / "tables" / "history")

    @property
    def stalled(self) -> str:
        """The stalled consumer's table."""
        return str(self.home / "tables" / "stalled")

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of both Spark queries."""
        return self.home / "checkpoints"

    @property
    def hold(self) -> Path:
        """While it exists, each query stops for good right after its next write."""
        return self.home / "markers" / "hold"

    @property
    def stop(self) -> Path:
        """When it exists, the pipeline ends in order."""
        return self.home / "markers" / "stop"

    def held(self, query: str) -> Path:
        """Written by a query that has written a batch and goes no further."""
        return self.home / "markers" / f"held-{query}"

    def up(self, run: int) -> Path:
        """Written when both queries of a run are started."""
        return self.home / "markers" / f"up-{run}"

    @property
    def naive_status(self) -> Path:
        """What the naive twin says of itself: the next offset it would read."""
        return self.home / "markers" / "naive.json"

    @property
    def exposed(self) -> Path:
        """What part of its working time the naive twin had a batch written and not recorded."""
        return self.home / "markers" / "exposed.json"

    def output(self, child: str) -> Path:
        """What a child process prints."""
        return self.home / OUTPUT / f"{child}.txt"

    def prepare(self) -> None:
        """Make the folders that nobody else makes."""
        for folder in ("markers", OUTPUT, "checkpoints", "tables"):
            (self.home / folder).mkdir(mode=0o700, parents=True, exist_ok=True)


def tell(place: Path, fact: Any = None) -> None:
    """Write a marker so that nobody sees it half written."""
    hidden = place.with_name(f".{place.name}.{os.getpid()}")
    hidden.write_text(json.dumps(fact))
    hidden.replace(place)


def ask(place: Path) -> Any:
    """What a marker says; None if there is none."""
    try:
        return json.loads(place.read_text())
    except FileNotFoundError:
        return None


def on_a_leash(heard: Callable[[str], None] = lambda _: None) -> None:
    """End this process as soon as its parent is gone, which closes our standard input; lines of it are handed on."""

    def listen() -> None:
        for line in sys.stdin:
            heard(line.strip())
        os._exit(3)

    threading.Thread(target=listen, name="leash", daemon=True).start()
