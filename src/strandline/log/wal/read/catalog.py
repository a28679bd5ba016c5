"""Catalog of frames: from an offset, term or time to file and byte, by the sparse index and frame headers."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import CorruptData, NotFound
from strandline.formats.wal.frame import HEADER_SIZE, FrameInfo, Stop, frame_head
from strandline.formats.wal.index import Index, IndexEntry, decode_index, new_chain, read_entries
from strandline.log.wal.names import data_name, firsts_in, index_name
from strandline.model.cursor import batch_fingerprint
from strandline.storage.disk import Disk

_WINDOW: Final = 64 << 10
"""Bytes read at a time when following frame headers."""

_CACHED: Final = 256
"""Number of file indexes in memory."""


class Located(NamedTuple):
    """A frame, by its header: its offsets, and its position."""

    path: str
    position: int
    size: int
    first: int
    next: int
    term: int
    timestamp: int
    """When it was written, in milliseconds."""

    @property
    def fingerprint(self) -> int:
        """Identifies the frame among all that could be at its offset, also on replicas, which copy these fields.

        A rewind that cuts a batch keeps the part below the cut, so the fingerprint does not include the end.
        """
        return batch_fingerprint(self.term, self.first, self.timestamp)


class Catalog:
    """The files of a log, oldest first, and their indexes. Reads only; safe in threads.

    A writer adds new files and removes deleted ones; a reader lists the folder again.
    """

    def __init__(self, folder: str, log_id: UUID, firsts: Sequence[int], *, disk: Disk) -> None:
        self.folder = folder
        self.firsts = tuple(firsts)
        self._log_id = log_id
        self._disk = disk
        self._indexes: dict[int, Index] = {}
        self._lock = threading.Lock()

    def path(self, first: int) -> str:
        """The file that begins at this offset."""
        return f"{self.folder}/{data_name(first)}"

    def list_files(self) -> None:
        """List the files again."""
        self.firsts = tuple(firsts_in(self._disk.scan(self.folder)))

    def reset(self) -> None:
        """Forget all cached files and indexes: the log was truncated, and may have been written again."""
        with self._lock:
            self._indexes.clear()
        self.list_files()

    def add(self, first: int) -> None:
        """Add a new last file."""
        with self._lock:  # appends add files while trims remove others
            self.firsts = (*self.firsts, first)

    def forget(self, firsts: Collection[int]) -> None:
        """Forget removed files."""
        gone = set(firsts)
        with self._lock:
            self.firsts = tuple(known for known in self.firsts if known not in gone)
            for first in gone:
                self._indexes.pop(first, None)

    def index(self, first: int, *, offset: int) -> Sequence[IndexEntry]:
        """The entries of a file's index, read again if ``offset`` is past the last known one."""
        known = self._indexes.get(first)
        if known is not None and known.entries and offset < known.entries[-1].offset:
            return known.entries
        found = self._load(first, known)
        with self._lock:
            self._indexes[first] = found
            while len(self._indexes) > _CACHED:
                self._indexes.pop(next(iter(self._indexes)))
        return found.entries

    def _load(self, first: int, known: Index | None) -> Index:
        path = f"{self.folder}/{index_name(first)}"
        chain = new_chain(self._log_id, first)
        try:
            if known is None or not known.size:
                return decode_index(self._disk.read(path), chain)
            return read_entries(self._disk.read(path, known.size), known)
        except NotFound:
            return known or Index([], 0, chain)

    def frames(self, since: int, end: int) -> Iterator[Located]:
        """The durable frames with the offsets from ``since`` up to ``end``, in order and without a gap.

        The cost is proportional to the result. ``NotFound`` if a file was removed meanwhile, ``CorruptData`` for any
        damage.
        """
        firsts = self.firsts
        at = bisect_right(firsts, since) - 1
        if at < 0:
            # Trimmed since the caller looked: the next file must not be returned in its place.
            raise NotFound(f"{self.folder} has no file with offset {since}.")
        for first, following in pairwise((*firsts[at:], end)):
            if since >= end:
                return
            upto = min(following, end)
            for frame in self._within(first, since, upto):
                if frame.next > since:
                    yield frame
                    since = frame.next
        if since < end:
            raise CorruptData(f"{self.folder} has no frames with the offsets {since} to {end - 1}: restore its files.")

    def _within(self, first: int, since: int, upto: int) -> Iterator[Located]:
        entries = self.index(first, offset=since)
        at = bisect_right(entries, since, key=attrgetter("offset"))
        position = entries[at - 1].position if at else 0
        path = self.path(first)
        offset = entries[at - 1].offset if at else first
        window, origin = memoryview(b""), position
        size = 0
        while offset < upto:
            if position + HEADER_SIZE > origin + len(window):
                # After a frame that is larger than the window there is probably another one.
                length = HEADER_SIZE if size > _WINDOW else _WINDOW
                window, origin = memoryview(self._disk.read(path, position, length)), position
            head = frame_head(window, position - origin, origin=origin)
            if isinstance(head, Stop):
                raise damaged_file(path, position, f"{head.why}, and offset {offset} should be there")
            info = head.info
            if info.first != offset + 1:
                raise damaged_file(path, position, f"the frame there begins at offset {info.first - 1}, not {offset}")
            size = head.end - head.start
            if info.count:
                yield Located(path, position, size, offset, offset + info.count, info.term, info.timestamp)
            position, offset = head.end, offset + info.count

    # --- by term and by time -----------------------------------------------------------------------------------

    def term_before(self, first: int) -> int | None:
        """The term of the record before an offset, which may be trimmed already; None if unknown.

        A file begins with the term of the record before it; within a file, the record itself still exists.
        """
        if first in self.firsts:
            return self._lead(first).term or None
        try:
            return next(self.frames(first - 1, first)).term
        except NotFound:
            if first not in self.firsts:
                raise
            return self._lead(first).term or None  # a trim began a file there meanwhile

    def end_of_term(self, term: int, start: int, end: int) -> int:
        """The first offset from about ``start`` on of a frame of a higher term; ``end`` if there is none."""
        firsts = self._from(start)
        # A file begins with the term of the record before it: so the frame is in the last file of which
        # that is not above the term, and nowhere if there is none.
        at = bisect_right(firsts, term, key=lambda first: self._lead(first).term) - 1
        if at < 0:
            return start
        entries = self.index(firsts[at], offset=end)
        known = bisect_right(entries, term, key=attrgetter("term"))
        since = max(start, entries[known - 1].offset if known else firsts[at])
        return next((frame.first for frame in self.frames(since, end) if frame.term > term), end)

    def written_since(self, time: int, start: int, end: int, *, now: int) -> int | None:
        """The first offset from ``start`` on of a frame that was written at a time (milliseconds) or later.

        A frame with a time after ``now`` was written by a wrong clock: it counts as written when the next frame with a
        plausible time was, or now. Plausible times are in order.
        """
        firsts = self._from(start)
        # The frame may also be in the file before the first one that begins at this time or later.
        low = _first_since(time, now, len(firsts), lambda at: self._lead(firsts[at]).timestamp)
        first = firsts[max(0, low - 1)]
        entries = self.index(first, offset=end)
        at = _first_since(time, now, len(entries), lambda at: entries[at].timestamp)
        since = max(start, entries[at - 1].offset if at else first)
        unknown: int | None = None
        for frame in self.frames(since, end):
            if frame.timestamp > now:
                unknown = frame.first if unknown is None else unknown
            elif frame.timestamp >= time:
                return frame.first if unknown is None else unknown
            else:
                unknown = None
        return unknown

    def bytes_behind(self, frame: Located) -> int:
        """The bytes of all files from a frame on."""
        at = bisect_right(self.firsts, frame.first)
        return self._disk.size(frame.path) - frame.position + sum(map(self._size, self.firsts[at:]))

    def newest(self, size: int, start: int, end: int) -> int:
        """The first offset from ``start`` on with at most ``size`` bytes from there to ``end``; ``end`` if none.

        A frame that does not fit is excluded with all before it.
        """
        for first in reversed(self._from(start)):
            whole = self._size(first)
            if whole <= size:
                size -= whole
                end = min(end, first)
                continue
            entries = self.index(first, offset=end)
            known = bisect_right(entries, whole - size, key=attrgetter("position"))
            since = max(start, entries[known - 1].offset if known else first)
            fitting = (frame.first for frame in self.frames(since, end) if frame.position >= whole - size)
            return next(fitting, end)
        return start

    def _size(self, first: int) -> int:
        return self._disk.size(self.path(first))

    def _from(self, start: int) -> Sequence[int]:
        """The files with offsets from ``start`` on: those before may be removed at this moment."""
        firsts = self.firsts
        return firsts[max(0, bisect_right(firsts, start) - 1) :]

    def _lead(self, first: int) -> FrameInfo:
        path = self.path(first)
        head = frame_head(memoryview(self._disk.read(path, 0, HEADER_SIZE)))
        if isinstance(head, Stop):
            raise damaged_file(path, 0, head.why)
        return head.info


def _first_since(time: int, now: int, count: int, timestamp: Callable[[int], int]) -> int:
    """The first of ``count`` in order at a time or later; a time ahead of ``now`` counts as the next one's."""

    def is_since(at: int) -> bool:
        return next((known >= time for place in range(at, count) if (known := timestamp(place)) <= now), True)

    return bisect_left(range(count), True, key=is_since)


def damaged_file(path: str, at: int, why: str) -> CorruptData:
    """The error for damage at or below the durable mark."""
    return CorruptData(
        f"{path} is damaged at byte {at}: {why}. It affects acknowledged records, and nothing was changed: "
        "restore the file, or run 'strandline verify'."
    )
