"""Copy of a write-ahead log at one moment, and verification of such a copy. Callers seal it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import AlreadyExists, CorruptData, CursorExpired, Diverged, NotALog, NotFound
from strandline.formats.wal.folder import FORMAT_VERSION, KIND
from strandline.formats.wal.frame import HEADER_SIZE, Stop, frame_head
from strandline.formats.wal.mark import NO_BOOT, Mark
from strandline.log.findings import FindingKind, Severity
from strandline.log.folders import FolderKind, contents
from strandline.log.wal.log import WalLog
from strandline.log.wal.names import data_name, firsts_in, index_name
from strandline.log.wal.read.catalog import Catalog, damaged_file
from strandline.log.wal.read.reading import WalReader
from strandline.log.wal.read.watermark import View, read_mark
from strandline.log.wal.recover.repair import describe_copy
from strandline.log.wal.recover.scan_tail import read_log_json
from strandline.log.wal.recover.verify import verify as verify_log
from strandline.model.cursor import Bounds, Cursor
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.disk import DISK, Disk

KIND_VERSION: Final = FORMAT_VERSION
_READ_BYTES: Final = 8 << 20
"""Bytes copied at a time."""

__all__ = ["KIND", "KIND_VERSION", "fill", "verify"]


class _End(NamedTuple):
    """End of a copy: its last file, the byte in it, and the term."""

    next: int
    firsts: list[int]
    """First offsets of the files up to there."""
    size: int
    term: int

    @property
    def first(self) -> int:
        """The last file."""
        return self.firsts[-1]


def fill(log: WalLog | WalReader, folder: str, *, upto: Cursor | None = None, disk: Disk | None = None) -> Cursor:
    """Copy all durable records at one moment into an empty folder, as a log of its own; returns the cursor after them.

    The copy is a write-ahead log with the same identity and writers, but without slots. Appends,
    new files and trims may continue: records trimmed meanwhile may be missing at its beginning, and only there.
    ``upto`` is an end that the log once had (:meth:`~strandline.log.wal.log.WalLog.end`), for a copy without later
    records: ``CursorExpired`` if the log has trimmed that, ``Diverged`` if it was never there.

    Every file is synced; the folder is not. It is on the log's disk unless another is given. ``NotFound`` if the folder
    does not exist, ``AlreadyExists`` unless it is empty.
    """
    disk = log.disk if disk is None else disk
    _check_destination(log, folder, disk)
    if not contents(folder, disk=disk).is_free() or disk.scan(folder):
        raise AlreadyExists(f"{folder} is not empty: name an empty folder for a copy of the log in {log.folder}.")
    copy = _WalCopy(log, folder, disk)
    while (cursor := copy.attempt(upto)) is None:
        copy.clear()  # everything was trimmed meanwhile
    return cursor


def _check_destination(log: WalLog | WalReader, folder: str, disk: Disk) -> None:
    if FolderKind.ABSENT in contents(folder, disk=disk).kinds:
        raise NotFound(f"There is no folder {folder} for a copy of the log in {log.folder}: make it, and copy again.")


@dataclass(slots=True)
class _WalCopy:
    """A copy being made."""

    _log: WalLog | WalReader
    _folder: str
    _disk: Disk
    _copied: list[int] = field(default_factory=list)

    def attempt(self, upto: Cursor | None) -> Cursor | None:
        """Copy the log up to its current end, or up to ``upto``; None if everything below was trimmed meanwhile."""
        view = self._log.view()
        end = None
        while end is None:
            with contextlib.suppress(NotFound):
                end = self._end(view, upto)
            if end is None:
                view = self._after_trim(view.bounds.first)
        start = view.bounds.first
        for first, following in pairwise([*end.firsts, end.next]):
            if following <= start and first != end.first:
                continue
            try:
                self._copy_file(first, end.size if first == end.first else None)
            except NotFound:
                # It was trimmed: copies of earlier files are removed, too, and later files still exist.
                start = self._after_trim(start).bounds.first
                if start >= end.next:
                    return None
                if following > start:
                    raise
        self._drop_below(start)
        self._finish(start, end)
        return Cursor(self._log.log_id, end.next, end.term)

    def _after_trim(self, start: int) -> View:
        """The log after a file was found missing; ``NotFound`` if it was not trimmed."""
        view = self._log.view()
        if view.bounds.first == start:
            _check_destination(self._log, self._folder, self._disk)  # the missing folder may be the destination
            raise NotFound(f"{self._log.folder} lacks a file that it should have: see 'strandline verify'.")
        return view

    def _end(self, view: View, upto: Cursor | None) -> _End:
        log = self._log
        bounds = view.bounds
        following = bounds.next
        if upto is not None:
            _check(upto, log.log_id, bounds)
            following = upto.next
        firsts = firsts_in(self._disk.scan(log.folder))
        if firsts[:1] > [bounds.first]:
            raise NotFound(f"{log.folder} no longer has offset {bounds.first}.")
        catalog = Catalog(log.folder, log.log_id, firsts, disk=self._disk)
        if following > bounds.first:
            frame = next(catalog.frames(following - 1, following))
            if frame.next != following:
                raise Diverged(f"The log never ended at offset {following}, which is within a batch: ask for its end.")
            firsts = [first for first in firsts if first <= frame.first]
            end = _End(following, firsts, frame.position + frame.size, frame.term)
        else:
            # Nothing is retained: only the first frame of a file is copied, which has writers and term.
            end = self._lead_end(catalog, [first for first in firsts if first <= following], following)
        if upto is not None and upto.term not in (0, end.term):
            raise Diverged(f"{upto} is of another term than the log has there ({end.term}): ask for the log's end.")
        return end

    def _lead_end(self, catalog: Catalog, firsts: list[int], following: int) -> _End:
        """The end of a copy without records, in the last of these files, which begins at or before its end."""
        path = catalog.path(first := firsts[-1])
        head = frame_head(memoryview(self._disk.read(path, 0, HEADER_SIZE)))
        if isinstance(head, Stop):
            raise damaged_file(path, 0, head.why)
        size, term = head.end, head.info.term
        for frame in catalog.frames(first, following) if first < following else ():
            size, term = frame.position + frame.size, frame.term
        return _End(following, firsts, size, term)

    def _copy_file(self, first: int, size: int | None) -> None:
        """Copy a file and its index; with a ``size``, that of the active file, only its first bytes and no index."""
        source, target = f"{self._log.folder}/{data_name(first)}", f"{self._folder}/{data_name(first)}"
        self._copied.append(first)
        if size is None:
            self._disk.copy(source, target)
            # The copy is valid without it: it can be rebuilt.
            with contextlib.suppress(NotFound):
                self._disk.copy(f"{self._log.folder}/{index_name(first)}", f"{self._folder}/{index_name(first)}")
            return
        file = self._disk.open_append(target)
        with contextlib.closing(file):
            at = 0
            while at < size:
                piece = self._disk.read(source, at, min(_READ_BYTES, size - at))
                if not piece:
                    raise damaged_file(source, at, f"it ends there, and was durable up to byte {size}")
                file.write([piece])
                at += len(piece)
            file.sync()

    def _drop_below(self, start: int) -> None:
        """Remove the copies of files without records from ``start`` on."""
        for first, following in pairwise(self._copied):
            if following <= start:
                self._remove(first)

    def _remove(self, first: int) -> None:
        self._disk.remove(f"{self._folder}/{data_name(first)}")
        self._disk.remove(f"{self._folder}/{index_name(first)}")

    def clear(self) -> None:
        """Remove everything that was copied."""
        for first in self._copied:
            self._remove(first)
        self._copied = []

    def _finish(self, start: int, end: _End) -> None:
        mark = Mark(self._log.log_id, start, end.next, end.first, end.term, NO_BOOT, clean=True)
        values = read_log_json(self._log.folder, disk=self._disk)[1]
        describe_copy(self._folder, mark, values, disk=self._disk)


def _check(upto: Cursor, log_id: UUID, bounds: Bounds) -> None:
    if upto.log_id != log_id or upto.next > bounds.next:
        raise Diverged(f"{upto} was never the end of log {log_id}, which ends at {bounds.next}: ask for its end.")
    if upto.next < bounds.first:
        raise _expired(upto, bounds.first)


def _expired(upto: Cursor, start: int) -> CursorExpired:
    return CursorExpired(f"The log was trimmed up to {start} while it was copied up to {upto.next}: copy it again.")


def verify(folder: str, *, disk: Disk = DISK, clock: Clock = CLOCK) -> Cursor:
    """Read every byte of a copy, and return its cursor; changes nothing.

    ``CorruptData``, naming the first place, for any damage, and for anything after its end.
    """
    try:
        found = verify_log(folder, disk=disk, clock=clock)
    except NotALog as error:
        raise CorruptData(f"There is no copy of a log in {folder}: {error}") from error
    # A copy needs no crash recovery: it was made whole.
    wrong = [
        finding
        for finding in found.findings
        if finding.severity is Severity.DAMAGE or finding.kind is not FindingKind.INDEX
    ]
    if wrong:
        raise CorruptData(wrong[0].message)
    mark = None if found.log_id is None else read_mark(folder, found.log_id, disk=disk)
    if mark is None or not mark.clean or Bounds(mark.start, mark.next) != found.bounds:
        raise CorruptData(f"The copy of a log in {folder} does not match its mark ({mark}): make it again.")
    return Cursor(mark.log_id, mark.next, mark.term)
