"""The log contract on the write-ahead log: with its thread and without, from memory, files and other processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from strandline.log.contract import Log
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.retention import InvalidReason
from tests.contracts.logs import LogContract


class WalContract(LogContract):
    options: ClassVar[dict[str, Any]] = {}
    appends = 20

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        with WalLog.open(str(tmp_path / "log"), **self.options) as log:
            yield log

    def retain_from(self, log: WalLog, offset: int) -> None:
        log.trim(offset, beyond_slots=True)

    def invalidate(self, log: WalLog, name: str) -> None:
        log.slots.invalidate(name, InvalidReason.HORIZON)


class TestWalLog(WalContract):
    """As users open it: a thread commits, and the newest records are in memory."""


@pytest.mark.matrix
class TestWalLogWithoutAThread(WalContract):
    options: ClassVar = {"background": False}


@pytest.mark.matrix
class TestWalLogFromItsFiles(WalContract):
    """Nothing is in memory, and each group has a file of its own."""

    options: ClassVar = {"tail_bytes": 0, "roll_bytes": 0}


@pytest.mark.matrix
class TestWalLogSeenByAReader(WalContract):
    """Reads go through a reader, as in another process."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[Log]:
        folder = str(tmp_path / "log")
        with WalLog.open(folder, roll_bytes=2000) as log:
            yield Seen(log, folder)


class Seen:
    """A log that is written by one object and read by others, each opened for one call."""

    def __init__(self, log: WalLog, folder: str) -> None:
        self._log = log
        self._folder = folder

    def __getattr__(self, name: str) -> object:
        if name in ("log_id", "bounds", "start", "end", "position_of", "plan", "wait", "read"):
            return getattr(WalReader(self._folder), name)
        return getattr(self._log, name)
