"""Removes orphan data files of a Delta table: written by workers, and never committed.

A data file has the version in its name as which its job was to be committed, and a commit takes exactly that version
or none. So a file that the commit of its version does not name can never become part of the table, however slow its
job is. Clocks decide only when it is removed. Files that were committed and removed since are left to VACUUM: earlier
versions need them. So are files in folders within the table's: they are not of its jobs, but maybe of another table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from strandline.errors import CorruptData
from strandline.storage.env import SYSTEM, Env
from strandline.tables.delta.history import NOBODY, parse_commit
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.layout import version_in

if TYPE_CHECKING:
    from deltalake import DeltaTable

ORPHAN_HOURS: Final = 168
"""Hours for which files of failed jobs are kept."""
EVERY_VERSIONS: Final = 100
"""A follower looks for orphans when the table reaches a multiple of this version, so that short runs do, too."""
_EVERY_SECONDS: Final = 86_400.0
"""It does so once a day, and not more often."""
_LOGGER: Final = logging.getLogger(__name__)


class OrphanSweeper:
    """Removes orphans in a background thread, at most once a day. Failures are logged, and delay no commit."""

    def __init__(self, followed: FollowedDelta, hours: int = ORPHAN_HOURS, *, env: Env = SYSTEM) -> None:
        """``hours``: files that are younger stay."""
        self._followed = followed
        self._hours = hours
        self._clock = env.clock
        self._begun = env.clock.monotonic()
        self._last: float | None = None
        self.thread: threading.Thread | None = None
        """The last one."""

    def remove_in_time(self, version: int) -> None:
        """Begin to remove orphans, if it is time; returns at once. ``version`` is the table's next one."""
        now = self._clock.monotonic()
        is_first = self._last is None and (version % EVERY_VERSIONS == 0 or now - self._begun >= _EVERY_SECONDS)
        is_next = self._last is not None and now - self._last >= _EVERY_SECONDS
        if not (is_first or is_next):
            return
        self._last = now
        self.thread = threading.Thread(target=self._swept, name="strandline-orphans", daemon=True)
        self.thread.start()

    def _swept(self) -> None:
        try:
            self.removed()
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the next one tries again
            _LOGGER.warning("Orphan files of the table %s could not be removed now: %s", self._followed.url, error)

    def removed(self) -> int:
        """Remove orphans now; returns how many there were."""
        version = self._followed.open_again()  # other threads use the remembered handle
        gone = [] if version is None else list(self._orphans(version.table))
        for path in gone:
            self._followed.files.remove(path)
        if gone:
            _LOGGER.info("%d orphan files of the table %s were removed.", len(gone), self._followed.url)
        return len(gone)

    def _orphans(self, table: DeltaTable) -> Iterator[str]:
        with self._followed.named_errors():
            unused = table.vacuum(self._hours, dry_run=True, enforce_retention_duration=False, full=True)
        by_version: dict[int, list[str]] = {}
        for path in unused:
            version = None if "/" in path else version_in(path)
            if version is not None and version <= table.version():
                by_version.setdefault(version, []).append(path)
        for version, paths in by_version.items():
            named = self._named(version)
            if named is not None:  # otherwise it is unknown: only VACUUM removes those
                yield from (path for path in paths if unquote(path) not in named)

    def _named(self, version: int) -> set[str] | None:
        """The data files of a commit; None if its file is gone or damaged."""
        try:
            data = self._followed.read_commit(version)
            return None if data is None else {unquote(one) for one in parse_commit(version, data, NOBODY).data_files}
        except CorruptData:
            return None
