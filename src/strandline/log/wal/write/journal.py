"""Journal: encodes groups as frames, writes them to the active file, syncs them, and rolls to a new file.

Also the two steps of a group commit: write the frames; sync and publish them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final
from uuid import UUID

from strandline.errors import CorruptData, NotFound
from strandline.formats.arrow.block import Compression, Parts
from strandline.formats.arrow.value_page import MOST_RECORDS, encode_values
from strandline.formats.wal.folder import batch_metadata, lead_metadata
from strandline.formats.wal.frame import FrameInfo, encode_frame
from strandline.formats.wal.index import INDEX_LEAD, Index, IndexEntry, encode_entry, new_chain
from strandline.log.wal.names import LEAD, data_name, index_name, salt_of
from strandline.log.wal.read.catalog import Located
from strandline.log.wal.read.span import Records, Tail, WalSpan
from strandline.log.wal.read.watermark import Published
from strandline.log.wal.write.groups import FrameContent, Item, ValueRun
from strandline.log.writers.numbered import MAX_WRITERS, forget_silent
from strandline.log.writers.source import remembered
from strandline.model.cursor import SECOND
from strandline.model.head import WriterId, WriterState, proof_of
from strandline.model.times import DAY, TOLERANCE
from strandline.storage.disk import Disk
from strandline.storage.env import Env
from strandline.storage.metrics import BATCHES_WRITTEN, BYTES_WRITTEN, COMMIT_SECONDS, RECORDS_WRITTEN

FRAME_BYTES: Final = 4 << 20
"""Most bytes of a frame that single values share; a larger value has a frame of its own."""


def contents_of(items: Sequence[Item]) -> Iterator[FrameContent]:
    """A frame for each batch, and one or more for each run of values, in their order."""
    for item in items:
        if isinstance(item, FrameContent):
            yield item
        elif len(item.values) <= MOST_RECORDS and sum(map(len, item.values)) <= FRAME_BYTES:
            yield _values(item.first, item.term, item.values, item.timestamps)
        else:
            yield from _pieces(item)


def _values(first: int, term: int, values: Sequence[bytes], timestamps: Sequence[int]) -> FrameContent:
    page = encode_values(values, timestamps)
    return FrameContent(len(values), [[page]], len(page), Records(None, page), first=first, term=term)


def _pieces(run: ValueRun) -> Iterator[FrameContent]:
    """A long run in several frames: its records need not stay together."""
    start = size = 0
    for at, value in enumerate(run.values):
        if at > start and (size + len(value) > FRAME_BYTES or at - start >= MOST_RECORDS):
            yield _values(run.first + start, run.term, run.values[start:at], run.timestamps[start:at])
            start, size = at, 0
        size += len(value)
    yield _values(run.first + start, run.term, run.values[start:], run.timestamps[start:])


_LOGGER: Final = logging.getLogger(__name__)
_PLAIN: Final = Compression.NONE

_MOST_STEP: Final = 4096
"""Milliseconds."""

INDEX_FRAMES: Final = 64
INDEX_BYTES: Final = 1 << 20
"""Distance between two checkpoints of the index, in frames or bytes, whichever is reached first."""


@dataclass(frozen=True, slots=True)
class WalSettings:
    """Settings of an open log; see :meth:`~strandline.log.wal.log.WalLog.open`."""

    roll_bytes: int
    tail_bytes: int
    pending_bytes: int
    background: bool
    durable: Callable[[int], object] | None
    boot: UUID
    env: Env


@dataclass(slots=True)
class JournalPosition:
    """Position of the next frame, and the state after the frames before it."""

    first: int
    """First offset of the file."""
    size: int
    """Bytes of the file, all durable."""
    next: int
    term: int
    timestamp: int
    """Time of the last frame in milliseconds; see :class:`FrameTimes`."""
    writers: dict[WriterId, WriterState]


@final
class FrameTimes:
    """Times of frames, in milliseconds: in order, so that seeking by time is a binary search.

    A clock that was ahead would keep all later frames in the future. So frames use the clock again once the last time
    was ahead of it for a whole day; readers know that times in the future are wrong. Not earlier: if the clock is
    behind instead, and is corrected, frames would seem older than they are, and expire.

    Until then frames repeat the last time. The first of them adds a few random seconds, because times distinguish a
    frame from the one at its offset in another history of the log: a log that was restored from a copy while its clock
    was behind would otherwise write the same time as the original.
    """

    def __init__(self, where: str, env: Env) -> None:
        self._where = where
        self._env = env
        self._is_first = True
        """Whether no frame was written by the own clock since the log was opened."""
        self._ahead_since: float | None = None

    def next(self, last: int, now: int, given: int | None) -> int:
        """The time of a frame after one of the time ``last``: now, or the given time."""
        wanted = now if given is None else given
        if wanted >= last:
            self._ahead_since = None
            self._is_first = self._is_first and given is not None
            return wanted
        if last <= now + TOLERANCE // 1000:
            self._ahead_since = None
        elif given is not None or self._is_believed(last - now):
            return wanted  # a replica follows its primary's times at once
        if given is not None:
            return last
        step = 1 + int(_MOST_STEP * self._env.chance.jitter()) if self._is_first else 0
        self._is_first = False
        return last + step

    def _is_believed(self, ahead: int) -> bool:
        if self._ahead_since is None:
            self._ahead_since = self._env.clock.monotonic()
            _LOGGER.warning(
                "%s: its last frames are %d s ahead of this machine's clock, which was ahead when they were written, "
                "or is behind now: correct it. If it stays so for a day, new frames use the clock again.",
                self._where, ahead // 1000,
            )  # fmt: skip
        return self._env.clock.monotonic() - self._ahead_since >= DAY / SECOND


class WrittenGroup(NamedTuple):
    """A group that is written to the file, but not durable yet."""

    held: list[WalSpan]
    appends: list[tuple[WriterId, int] | None]
    """Writer and number of each frame."""
    size: int
    """Bytes of the file including it."""
    begun: float
    """Time at which the write began, on the monotonic clock."""
    seals: bool
    """Whether the log is sealed behind it."""


class Journal:
    """Writes frames to the last file of a log, and its index beside it. One thread at a time.

    After an error it is not used again: the bytes after the durable end are undefined.
    """

    def __init__(
        self,
        folder: str,
        log_id: UUID,
        place: JournalPosition,
        index: IndexWriter,
        rolled: Callable[[int], None],
        settings: WalSettings,
    ) -> None:
        """Continue at the log's end. ``rolled`` is called with each new file when it is durable."""
        self._folder = folder
        self._log_id = log_id
        self._salt = salt_of(log_id)
        self._roll_bytes = settings.roll_bytes
        self._rolled = rolled
        self._disk = settings.env.disk
        self._clock = settings.env.clock
        self._index = index
        self._new = False
        """Whether the name of the file is not durable yet."""
        self.place = place
        self._times = FrameTimes(folder, settings.env)
        self._path = f"{folder}/{data_name(place.first)}"
        self._file = self._disk.open_append(self._path)

    def write(self, items: Sequence[Item]) -> WrittenGroup:
        """Write a group, one frame for each item; durable only after :meth:`finish`."""
        place, begun = self.place, self._clock.monotonic()
        if place.size >= self._roll_bytes and place.next > place.first:
            self._begin(place.next)
        now = self._clock.now() // 1000
        path = self._path
        parts: Parts = []
        held: list[WalSpan] = []
        appends: list[tuple[WriterId, int] | None] = []
        position, following = place.size, place.next
        for content in contents_of(items):
            if content.first != following:
                raise AssertionError(f"offset {content.first} was given where {following} follows")
            written = place.timestamp = self._times.next(place.timestamp, now, content.timestamp)
            info = FrameInfo(
                content.term, following + 1, content.count, written, place.next, self._salt, len(content.pages)
            )
            metadata = None if content.writer is None else batch_metadata(*content.writer)
            frame = encode_frame(info, content.pages, metadata)
            size = sum(map(len, frame)) if len(frame) > 1 else len(frame[0])
            parts += frame
            following += content.count
            frame_at = Located(path, position, size, content.first, following, content.term, written)
            held.append(WalSpan.of(frame_at, content.kept, self._disk))
            appends.append(content.writer)
            position += size
        self._file.write(parts)
        return WrittenGroup(held, appends, position, begun, content.seals)

    def sync(self) -> None:
        """Make the written frames durable; :meth:`settle` follows."""
        self._file.sync()
        if self._new:
            # A file whose name a power failure can remove must hold nothing that is acknowledged.
            self._disk.sync_folder(self._folder)
            self._new = False

    def check_in_place(self) -> None:
        """``NotFound`` if the files of the log were removed, moved or replaced, so that its path belongs to another
        log.

        Safe in threads.
        """
        while True:
            file = self._file
            try:
                return file.check_in_place()
            except NotFound:
                if self._file is file:  # otherwise the log rolled, and was trimmed, in between
                    raise

    def settle(self, written: WrittenGroup) -> None:
        """Record that the written frames are durable."""
        place = self.place
        for span, append in zip(written.held, written.appends, strict=True):
            frame, writers = span.frame, {}
            if append is not None:
                writer, number = remembered(*append)
                count, written_at = frame.next - frame.first, frame.timestamp * 1000
                state = WriterState(number, frame.first, frame.first, count, written_at, proof_of(append[0]))
                place.writers[writer] = writers[writer] = state
            self._index.passed(frame, writers)
        if len(place.writers) > MAX_WRITERS:
            forget_silent(place.writers)
        last = written.held[-1].frame
        place.next, place.size, place.term = last.next, written.size, last.term

    def write_index(self) -> None:
        """Write the checkpoints of committed frames to the index; durability does not depend on it."""
        self._index.write()

    def begin_file(self, first: int) -> None:
        """Durably continue in a new file that begins at this offset, with no records yet."""
        self._begin(first)
        self.sync()

    def _begin(self, first: int) -> None:
        """Roll from the file, all of which is durable, to a new one, which is durable after the next sync."""
        place = self.place
        self.check_in_place()  # the folder may belong to another log now
        self._file.close()
        self._index.finish()
        name = self._path = f"{self._folder}/{data_name(first)}"
        self._file = self._disk.open_append(name)
        if self._file.size():
            raise CorruptData(f"{name} exists although the log ended before it: move it away, and open the log again.")
        self._new = True
        lead = encode_lead(self._log_id, first, place)
        self._file.write(lead)
        place.first, place.size, place.next = first, sum(map(len, lead)), first
        self._index = IndexWriter(
            self._folder, first, Index([], 0, new_chain(self._log_id, first)), place.size, disk=self._disk
        )
        self._rolled(first)

    def close(self) -> None:
        """Close the files; nothing is waiting to be written."""
        self._file.close()
        self._index.close()


def encode_lead(log_id: UUID, first: int, place: JournalPosition) -> Parts:
    """The first frame of a file: without records, with the state before it."""
    info = FrameInfo(place.term, first + 1, 0, place.timestamp, first, salt_of(log_id) | LEAD, 0)
    return encode_frame(info, [], lead_metadata(log_id, place.writers.items()))


class CommitSteps:
    """Called by the committing thread only, :meth:`write` and then :meth:`finish` for each group; each may raise."""

    def __init__(
        self,
        journal: Journal,
        tail: Tail,
        published: Published,
        *,
        durable: Callable[[int], object] | None,
        sealing: Callable[[int], object],
        env: Env,
    ) -> None:
        """``durable`` is called with each new durable end, before readers see it.

        ``sealing`` durably notes the offset at which the log is sealed, before the batch below it is written.
        """
        self._sealing = sealing
        self._journal = journal
        self._tail = tail
        self._published = published
        self._durable = durable
        self._clock = env.clock
        self.unsynced: list[WalSpan] = []
        """Frames that are written, but not known to be durable."""

    def write(self, items: Sequence[Item]) -> WrittenGroup:
        """Write a group's frames; not durable yet."""
        last = items[-1]
        if isinstance(last, FrameContent) and last.seals:
            self._journal.check_in_place()  # must not seal another log at this path
            # First: if the batch becomes durable, the log is sealed, and if it does not, the log does not end there.
            self._sealing(last.first + last.count)
        written = self._journal.write(items)
        self.unsynced = written.held
        # Before the sync: the woken threads run during it.
        self._published.wrote(written.held[-1].next)
        return written

    def finish(self, written: WrittenGroup) -> None:
        """Sync the frames, and move the watermark past them."""
        held = written.held
        self._journal.sync()
        if self._durable is not None:
            self._durable(held[-1].next)
        self._journal.settle(written)
        # First the frames, then the end: a reader that sees the end finds the frames.
        self._tail.add(held)
        place = self._journal.place
        self._published.advance(upto=place.next, active=place.first, term=place.term, sealed=written.seals)
        self.unsynced = []
        COMMIT_SECONDS.observe(self._clock.monotonic() - written.begun)
        BATCHES_WRITTEN.inc(len(held))
        RECORDS_WRITTEN.inc(held[-1].next - held[0].first)
        BYTES_WRITTEN.inc(sum(span.size for span in held))
        # Last: it needs no interpreter lock, so that waiting threads continue meanwhile.
        self._published.write()

    def after_wake(self) -> None:
        """Write the index: work that can wait until the threads that wait for a group are woken."""
        self._journal.write_index()


class IndexWriter:
    """Adds checkpoints to the index of the active file; the index needs no sync."""

    def __init__(self, folder: str, first: int, found: Index, position: int, *, disk: Disk) -> None:
        """Continue after the valid entries; the last of them, or the first frame, is at ``position``."""
        self._file = disk.open_append(f"{folder}/{index_name(first)}")
        self._file.cut(found.size)
        self._waiting = [] if found.size else [INDEX_LEAD]
        self._chain = found.chain
        self._last = position
        self._frames = 0
        self._writers: dict[WriterId, WriterState] = {}

    def passed(self, frame: Located, writers: Mapping[WriterId, WriterState]) -> None:
        """Note that a frame with an append of these writers is durable; the next one may get an entry."""
        self._frames += 1
        self._writers.update(writers)
        end = frame.position + frame.size
        if self._frames < INDEX_FRAMES and end - self._last < INDEX_BYTES:
            return
        entry = IndexEntry(frame.next, end, frame.term, frame.timestamp, self._writers)
        data, self._chain = encode_entry(entry, self._chain)
        self._waiting.append(data)
        self._last, self._frames, self._writers = end, 0, {}

    def write(self) -> None:
        """Write the pending entries."""
        if self._waiting:
            self._file.write(self._waiting)
            self._waiting = []

    def finish(self) -> None:
        """Write and sync all entries: the file is full, and so is its index."""
        self.write()
        self._file.sync()
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
