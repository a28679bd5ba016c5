"""The identity file of an open write-ahead log (``log.json``), changed by its writer only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from strandline.errors import CorruptData
from strandline.formats.wal.folder import WalIdentity
from strandline.log.wal.names import IDENTITY
from strandline.log.wal.recover.repair import write_identity
from strandline.log.wal.recover.scan_tail import read_log_json
from strandline.storage.disk import Disk


class IdentityFile:
    """Each change is durable when it returns. Safe in threads: a committing thread and a caller may change it."""

    def __init__(self, folder: str, *, is_sealed: bool, disk: Disk) -> None:
        """Use :meth:`opened`."""
        self._folder = folder
        self._disk = disk
        self._lock = threading.Lock()
        self.is_sealed = is_sealed
        """Whether the log was sealed when it was opened."""

    @classmethod
    def opened(cls, folder: str, end: int, *, disk: Disk) -> Self:
        """The identity of a repaired log with this end; the caller has its lock, and has appended nothing yet.

        A seal above the end is that of a batch which a crash has lost, and is taken back: another batch may end there.
        """
        identity = read_log_json(folder, disk=disk)
        file = cls(folder, is_sealed=identity.sealed == end, disk=disk)
        if identity.sealed is not None and identity.sealed < end:
            raise CorruptData(
                f"{folder}/{IDENTITY} says that the log was sealed at offset {identity.sealed}, and it ends at {end}: "
                "restore the folder; nothing was changed."
            )
        if identity.sealed is not None and not file.is_sealed:
            file.edit(lambda found: replace(found, sealed=None))
        return file

    def seal(self, at: int) -> None:
        """Note the offset at which the log is sealed as soon as it ends there."""
        self.edit(lambda found: replace(found, sealed=at))

    def edit(self, change: Callable[[WalIdentity], WalIdentity]) -> None:
        """Change the identity; nothing is written if it stays the same."""
        with self._lock:
            found = read_log_json(self._folder, disk=self._disk)
            if (changed := change(found)) != found:
                write_identity(self._folder, changed, disk=self._disk)
