"""The file of an append-log store: one frame per write, with the store's position in its metadata.

In this file the lsn numbers *frames*, from 1: a write may hold no records. The term is a number drawn when the file is
made: it distinguishes the frames of the file from frames that were stored as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.followers.stores.state import KeyChange, KeyedState, change_of
from strandline.formats.arrow.block import Compression, Parts, encode_page
from strandline.formats.wal.frame import MAGIC, MAX_PAYLOAD, Ending, Frame, FrameInfo, decode_frame, encode_frame
from strandline.log.wal.recover.walk import Hole, walk
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, TIMESTAMP, halved, no_headers
from strandline.model.sink import StorePosition
from strandline.storage.disk import Disk

CONTINUES: Final = 1
"""The next frame belongs to the same write: without it, this one does not count."""
BASE: Final = 2
"""Part of the whole state that a compaction wrote. It was durable before the file had its name."""

CURSOR: Final = "strandline.cursor"
RESYNC: Final = "strandline.resync"

ROW_OVERHEAD: Final = 22
"""Bytes of a record in a frame besides its key and value."""

_WINDOW: Final = 32 << 20
"""Bytes read at once."""
PIECE_ROWS: Final = 1 << 16
PIECE_BYTES: Final = 8 << 20
"""Rows and bytes of a piece of the whole state."""
_FRAME_BYTES: Final = MAX_PAYLOAD - (1 << 20)
"""Largest part of a write in one frame: the limit, less room for Arrow's structures."""
_FEW_ROWS: Final = 1 << 16
_LARGEST_NUMBER: Final = (1 << 64) - 1


class FileBlock(NamedTuple):
    """State of a file: its term, the numbers of its last frame and its last durable one, and its sizes."""

    term: int
    frames: int = 0
    durable: int = 0
    size: int = 0
    base: int = 0
    """The size up to the end of the last compaction."""


def encode_write(
    records: pa.Table | Updates | None, position: StorePosition, place: FileBlock, timestamp: int
) -> tuple[Parts, FileBlock]:
    """One write as frames, and the file's state after them. More than one frame only above 256 MiB."""
    groups: list[list[pa.RecordBatch]] = [[]] if records is None else _groups(records)
    parts: Parts = []
    metadata = _metadata_of(position)
    number = place.frames
    for index, group in enumerate(groups):
        number += 1
        info = FrameInfo(
            term=place.term,
            first=number,
            count=sum(batch.num_rows for batch in group),
            timestamp=timestamp,
            durable=place.durable,
            flags=CONTINUES if index + 1 < len(groups) else 0,
            pages=len(group),
        )
        parts += encode_frame(info, [encode_page(batch, Compression.NONE) for batch in group], metadata)
    return parts, place._replace(frames=number, size=place.size + sum(map(len, parts)))


def encode_base(
    keys: Sequence[bytes] | dict[bytes, bytes],
    values: Sequence[bytes],
    position: StorePosition,
    term: int,
    timestamp: int,
) -> Iterator[Parts]:
    """The whole state as the first frames of a file, one at a time.

    Each frame says that all of them are durable, which is true once the file has its name; the last one holds nothing
    else. So if a frame is damaged, another one proves that it is no torn tail.
    """
    chunks = list(_pieces(keys, values))
    columns = ((pa.array(some, pa.binary()), pa.array(theirs, pa.binary())) for some, theirs in chunks)
    return encode_columns(columns, len(chunks), position, term, timestamp)


def _pieces(keys: Iterable[bytes], values: Iterable[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    some: list[bytes] = []
    theirs: list[bytes] = []
    held = 0
    for key, value in zip(keys, values, strict=True):
        length = len(key) + len(value)
        if some and (len(some) == PIECE_ROWS or held + length > PIECE_BYTES):
            yield some, theirs
            some, theirs, held = [], [], 0
        some.append(key)
        theirs.append(value)
        held += length
    if some:
        yield some, theirs


def encode_columns(
    pieces: Iterable[tuple[pa.Array, pa.Array]], count: int, position: StorePosition, term: int, timestamp: int
) -> Iterator[Parts]:
    """The same for a state in ``count`` pieces of keys and values, of :data:`PIECE_BYTES` or one larger value each."""
    metadata = _metadata_of(position)
    for number, (keys, values) in enumerate(pieces, 1):
        rows = len(keys)
        zeros = pa.py_buffer(bytes(8 * rows))
        times = pa.Array.from_buffers(pa.int64(), rows, [None, zeros]).view(TIMESTAMP)
        ops = pa.Array.from_buffers(pa.int8(), rows, [None, zeros])
        batch = pa.RecordBatch.from_arrays([times, ops, keys, values, no_headers(rows)], schema=RECORD_SCHEMA)
        info = FrameInfo(term, number, rows, timestamp, count + 1, BASE | CONTINUES)
        yield encode_frame(info, [encode_page(batch, Compression.NONE)], metadata)
    yield encode_frame(FrameInfo(term, count + 1, 0, timestamp, count + 1, BASE, pages=0), [], metadata)


def _metadata_of(position: StorePosition) -> dict[str, str]:
    metadata = {}
    if position.cursor is not None:
        metadata[CURSOR] = str(position.cursor)
    if position.resync is not None:
        metadata[RESYNC] = str(position.resync)
    return metadata


def _groups(records: pa.Table | Updates) -> list[list[pa.RecordBatch]]:
    """The records without their offsets, grouped into frames."""
    if isinstance(records, Updates):
        batch = records.batch()
        if batch.get_total_buffer_size() <= _FRAME_BYTES:
            return [[batch]]
        records = pa.Table.from_batches([batch])
    if records.schema.equals(READ_SCHEMA):
        records = records.remove_column(0)
    else:
        records = records.select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA)
    if records.column(0).num_chunks > 1 and records.num_rows <= _FEW_ROWS:
        records = records.combine_chunks()
    batches = [batch for batch in records.to_batches() if batch.num_rows]
    if records.get_total_buffer_size() <= _FRAME_BYTES or records.nbytes <= _FRAME_BYTES:
        return [batches]
    return [[half] for batch in batches for half in halved(batch, _FRAME_BYTES)]


@dataclass(slots=True)
class Content:
    """Content of a file, up to the end of its last whole write."""

    path: str
    state: KeyedState = field(default_factory=KeyedState)
    position: StorePosition = field(default_factory=lambda: StorePosition(None))
    place: FileBlock | None = None
    """None while there is no frame."""
    torn: int = 0
    """Bytes after it that a crash has left; they can be truncated."""
    why: str = ""

    @property
    def size(self) -> int:
        """Bytes of the valid content."""
        return 0 if self.place is None else self.place.size


@dataclass(slots=True)
class _Replay:
    """Replays frames in order; a write of several frames counts when its last one is read."""

    content: Content
    seen: FileBlock | None = None
    """The state including the frames of an unfinished write."""
    mark: int = 0
    """The highest frame that another frame marks as durable."""
    waiting: list[KeyChange] = field(default_factory=list)
    keeps: bool = True
    """Whether the state is kept; otherwise the frames are only checked."""

    @property
    def expected(self) -> int:
        """The number of the next frame."""
        return 1 if self.seen is None else self.seen.frames + 1

    def is_own(self, info: FrameInfo) -> bool:
        return self.seen is None or (info.term == self.seen.term and info.first >= self.expected)

    def fits(self, frame: Frame) -> bool:
        return frame.info.first == self.expected and self.is_own(frame.info)

    def note(self, info: FrameInfo) -> None:
        """Note what a frame behind damage marks as durable."""
        if self.is_own(info):
            self.mark = max(self.mark, info.durable)

    def take(self, frame: Frame) -> None:
        info = frame.info
        where = f"The frame at byte {frame.start} of {self.content.path}"
        if info.flags & ~(CONTINUES | BASE):
            raise UnsupportedVersion(f"{where} has flags that this program does not know: upgrade strandline.")
        block = decode_frame(frame, where)
        if any(batch.column("key").null_count for batch in block.batches):
            raise CorruptData(f"{where} is damaged: it holds a record without key.")
        if self.keeps:
            self.waiting += [change_of(batch) for batch in block.batches if batch.num_rows]
        seen = self.seen or FileBlock(info.term)
        base = frame.end if info.flags & BASE else seen.base
        self.seen = seen._replace(frames=info.first, size=frame.end, base=base)
        self.mark = max(self.mark, info.durable)
        if info.flags & CONTINUES:
            return
        for change in self.waiting:
            self.content.state.take(change)
        self.waiting.clear()
        self.content.position = _position(block.metadata, where)
        self.content.place = self.seen


def read_content(path: str, *, disk: Disk, keeps: bool = True) -> Content:
    """The content of the file; changes nothing. A torn tail is reported; the writer truncates it.

    Without ``keeps`` everything is checked, and the state is left out.
    ``CorruptData``, with file and byte, for damage that a crash cannot cause: at or below a frame that any frame in the
    file, also one after the damage, marks as durable. ``UnsupportedVersion`` for frames of another version.
    """
    size = disk.size(path)
    replay = _Replay(Content(path), keeps=keeps)
    broken: Hole | None = None
    for piece in walk(path, size, is_own=replay.is_own, disk=disk, window=_WINDOW):
        if isinstance(piece, Hole):
            broken = broken or piece
        elif broken is None and replay.fits(piece):
            replay.take(piece)
        else:
            broken = broken or Hole(piece.start, piece.end, "the frame there is not the next one", Ending.DAMAGED)
            replay.note(piece.info)
    content = replay.content
    if broken is None and content.place == replay.seen:
        return content
    broken = broken or Hole(size, size, "the bytes end", Ending.CLEAN)  # within a write of several frames
    _judge(replay, broken, disk)
    content.torn, content.why = size - content.size, broken.why
    return content


def _judge(replay: _Replay, broken: Hole, disk: Disk) -> None:
    """Raise unless a crash can have left the end of the file."""
    path = replay.content.path
    if broken.ending is Ending.UNSUPPORTED:
        raise UnsupportedVersion(
            f"{path} cannot be read at byte {broken.at} by this program: {broken.why}. Nothing was changed; use the "
            "strandline that wrote it."
        )
    if replay.mark >= replay.expected:
        raise CorruptData(
            f"{path} is damaged at byte {broken.at}: {broken.why}, and that frame was durable. Nothing was changed; "
            "restore the file, or remove its folder and let the store be built again."
        )
    rest = disk.read(path, broken.at, len(MAGIC))
    if replay.seen is None and not all(found in (0, known) for found, known in zip(rest, MAGIC, strict=False)):
        raise CorruptData(f"{path} is damaged at byte 0, or no store at all: {broken.why}. Nothing was changed.")


def _position(metadata: dict[bytes, bytes], where: str) -> StorePosition:
    cursor, resync = metadata.get(CURSOR.encode()), metadata.get(RESYNC.encode())
    try:
        found = None if cursor is None else Cursor.parse(cursor.decode("ascii"))
        if found is not None and max(found.next, found.term) > _LARGEST_NUMBER:
            raise ValueError("the offset is too large")  # noqa: TRY301 - one sentence for all
        return StorePosition(found, None if resync is None else UUID(resync.decode("ascii")))
    except (InvalidInput, ValueError) as error:
        raise CorruptData(f"{where} is damaged: its cursor cannot be read ({str(error)[:200]}).") from error


def cursor_of_snapshot(path: str, *, disk: Disk) -> Cursor:
    """The cursor of a file that must hold a state and nothing else, such as that of a snapshot."""
    content = read_content(path, disk=disk, keeps=False)
    if content.torn or content.position.cursor is None or content.position.resync is not None:
        raise CorruptData(f"{path} is damaged: it does not hold a whole state and its cursor. {content.why}".rstrip())
    return content.position.cursor
