"""The first offset of a write-ahead log: moved up by trims, and by the first record of an empty log."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from strandline.formats.wal.mark import NO_BOOT, Mark
from strandline.log.wal.read.catalog import Catalog
from strandline.log.wal.read.watermark import Published
from strandline.log.wal.recover.repair import drop_below
from strandline.log.wal.slots import WalSlots
from strandline.log.wal.write.committer import GroupCommitter
from strandline.log.wal.write.journal import Journal
from strandline.storage.env import Env


class DurableFiles(NamedTuple):
    """All files of a log at one moment."""

    firsts: tuple[int, ...]
    size: int
    """Durable bytes of the last one."""
    mark: Mark
    """The mark of a log that ends there."""


class LogStart:
    """Moves the first offset durably, and deletes files that have no retained record."""

    def __init__(
        self,
        folder: str,
        slots: WalSlots,
        journal: Journal,
        published: Published,
        catalog: Catalog,
        committer: GroupCommitter,
        *,
        env: Env,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._journal = journal
        self._published = published
        self._catalog = catalog
        self._committer = committer
        self._disk = env.disk
        self.lock = threading.Lock()
        """Protects the removal of files, the start offset, and closing, which is final."""
        self._keepers = 0
        """Number of running copies, which need the files."""

    @contextlib.contextmanager
    def keeping_files(self) -> Iterator[DurableFiles]:
        """All durable files, now. Within the block trims move the start, and leave the files to the next trim."""
        with self.lock, self._committer.exclusively():
            self._slots.check_open()
            self._journal.check_in_place()  # must not copy another log at this path
            place, start = self._journal.place, self._published.view.bounds.first
            mark = Mark(
                self._slots.log_id,
                start,
                place.next,
                place.first,
                place.term,
                NO_BOOT,
                clean=True,
                sealed=self._published.view.bounds.sealed,
            )
            files = DurableFiles(self._catalog.firsts, place.size, mark)
            self._keepers += 1
        try:
            yield files
        finally:
            with self.lock:
                self._keepers -= 1

    def begin_at(self, offset: int) -> None:
        """Let a log that never held a record begin at the offset of its first one."""
        if not offset or self._committer.next > 0:
            return
        with self.lock, self._committer.exclusively():
            self._slots.check_open()
            if self._committer.sealed or max(self._committer.next, self._published.view.bounds.next) > 0:
                return
            try:
                self._slots.retain(offset, beyond_slots=True)
                self._journal.begin_file(offset)
                # Not before: after a crash, opening relies on files up to the published end.
                self._published.retain(offset)
                self._published.advance(upto=offset, active=offset, term=self._journal.place.term)
                self._published.write()
                self._committer.continue_at(offset)
            except BaseException as error:
                self._committer.fail(error)
                raise
            self._drop_files(offset)

    def trim(self, upto: int, *, beyond_slots: bool) -> int:
        """Delete everything below an offset that no valid slot needs; returns the new first offset."""
        with self.lock:
            self._slots.check_open()
            self._journal.check_in_place()  # must not trim another log at this path
            start = self._slots.retain(min(upto, self._published.view.bounds.next), beyond_slots=beyond_slots)
            # Readers see the new start before files are removed: missing records have expired, and are not lost.
            self._published.retain(start)
            with self._committer.exclusively():
                self._begin_file_if_empty(start)
            self._drop_files(start)
            return start

    def _begin_file_if_empty(self, start: int) -> None:
        """Begin a new file if the current one has no retained records, so that it can be deleted, too."""
        place = self._journal.place
        if place.next > start or place.first == start or self._committer.failed:
            return
        try:
            self._journal.begin_file(start)
            self._published.advance(upto=start, active=start, term=place.term)
            self._published.write()
        except BaseException as error:
            self._committer.fail(error)
            raise

    def _drop_files(self, start: int) -> None:
        if self._keepers:
            return
        firsts = list(self._catalog.firsts)
        self._catalog.forget(drop_below(self._folder, firsts, start, disk=self._disk))
