"""Watermark: the durable end of a log, in memory for this process and in the mark file for others."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import NotFound
from strandline.formats.wal.mark import MARK_SIZE, Mark, decode_mark, encode_mark
from strandline.log.wal.names import MARK
from strandline.model.cursor import Bounds
from strandline.storage.clock import CLOCK
from strandline.storage.disk import AppendFile, Disk

MARK_READS: Final = 8
"""Number of tries to read a mark, which may be written at the same moment."""


def read_mark(folder: str, log_id: UUID, *, disk: Disk, tries: int = 1) -> Mark | None:
    """The mark of this log; None if it is missing or unreadable, which says nothing about the log."""
    for _ in range(tries):
        with contextlib.suppress(NotFound):
            mark = decode_mark(disk.read(f"{folder}/{MARK}", 0, MARK_SIZE))
            if mark is not None and mark.log_id == log_id:
                return mark
    return None


class View(NamedTuple):
    """The durable, retained range of a log and its term, at one moment."""

    bounds: Bounds
    term: int


class Published:
    """The durable end and the start of a log, moved by its writer and visible to all readers. Safe in threads."""

    def __init__(self, file: AppendFile, mark: Mark) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        """Locks of waiting threads: one each, since threads woken by a condition queue for its lock again."""
        self._early: list[threading.Lock] = []
        """Locks of threads that are woken as soon as something is written."""
        self._written = mark.next
        self._writing = threading.Lock()
        with self._lock:
            self._show(mark)
        self.write()

    @classmethod
    def open(cls, folder: str, mark: Mark, *, disk: Disk) -> Published:
        """Publish the mark in this folder."""
        file = disk.open_append(f"{folder}/{MARK}")
        is_new = not file.size()
        published = cls(file, mark)
        file.sync()  # or a power failure would restore the former clean end
        if is_new:
            disk.sync_folder(folder)  # a clean end must not be lost with the file's name
        return published

    def advance(self, *, upto: int, active: int, term: int, sealed: bool = False) -> None:
        """Publish that everything below ``upto`` is durable, and the seal there. Other processes see it after
        :meth:`write`.
        """
        with self._lock:
            mark = self._mark
            self._show(replace(mark, next=upto, active=active, term=term, sealed=sealed or mark.sealed))

    def wrote(self, upto: int) -> None:
        """Note that everything below ``upto`` is written, and will be durable if the sync succeeds."""
        with self._lock:
            self._written = upto
            early, self._early = self._early, []
        for waiter in early:
            waiter.release()

    def retain(self, start: int) -> None:
        """Publish a new start: nothing below it can be read any more."""
        with self._lock:
            self._show(replace(self._mark, start=start, next=max(start, self._mark.next)))
        self.write()

    def seal(self) -> None:
        """Publish that the log was sealed at its end."""
        with self._lock:
            self._show(replace(self._mark, sealed=True))
        self.write()

    def _show(self, mark: Mark) -> None:
        """Publish within this process. That need not wait for the file: recovery finds what is durable without it."""
        self._mark = mark
        self.view = View(Bounds(mark.start, mark.next, mark.sealed), mark.term)
        waiters, self._waiters, self._early = self._waiters + self._early, [], []
        for waiter in waiters:
            waiter.release()

    def write(self) -> None:
        """Publish the latest state to other processes."""
        with self._writing:
            self._file.rewrite(0, [encode_mark(self._mark)])

    def wait(self, past: int, timeout: float, *, written: int | None = None) -> bool:
        """Block until the durable end is above ``past`` (True), or until the timeout (False).

        With ``written``, also until more than that is written. False at once at the end of a sealed log.
        """
        if self._is_past(past, written):
            return True
        if self.view.bounds.sealed:
            return False
        deadline = CLOCK.monotonic() + timeout
        while (left := deadline - CLOCK.monotonic()) > 0:
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                if self._is_past(past, written) or self.view.bounds.sealed:
                    break
                (self._waiters if written is None else self._early).append(waiter)
            if not waiter.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                with self._lock:
                    for waiters in (self._waiters, self._early):  # in neither, if it was just woken
                        with contextlib.suppress(ValueError):
                            waiters.remove(waiter)
            if self._is_past(past, written):
                return True
        return self._is_past(past, written)

    def _is_past(self, durable: int, written: int | None) -> bool:
        return self.view.bounds.next > durable or (written is not None and self._written > written)

    def after_fork(self) -> None:
        """In a forked child: close its descriptor."""
        self._file.close()

    def close(self, *, clean: bool) -> None:
        """Close the file. A clean end is synced: it is valid even after the machine restarted."""
        with self._lock, self._writing:
            try:
                if clean:
                    self._file.rewrite(0, [encode_mark(replace(self._mark, clean=True))])
                    self._file.sync()
            finally:
                self._file.close()
