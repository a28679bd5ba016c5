"""Streams of a node: records for readers, log batches for replicas, files of snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from strandline.errors import NotFound, NotReady
from strandline.formats.arrow.block import Parts, page_checksum
from strandline.formats.node.ticket import FeedTicket, FileTicket, ReadTicket
from strandline.formats.node.wire import Flag, Note, encode_note
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after, known_columns
from strandline.model.cursor import Cursor, Limit
from strandline.model.head import LogBatch
from strandline.model.node import NO_HEARTBEAT, Heartbeat
from strandline.model.records import READ_SCHEMA
from strandline.node.messages import Caller
from strandline.storage.clock import Clock

if TYPE_CHECKING:
    from strandline.node.lead.primary import PrimaryRole

TURN: Final = 0.2
"""Seconds between two checks whether a stream is still wanted."""

SOON: Final = 0.005
"""The first interval while replicas wait to learn that the sent batches are committed."""

_PLANNED: Final = Limit(batches=64, bytes=32 << 20)

CHUNK_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("data", pa.binary(), nullable=False),
        pa.field("checksum", pa.uint32(), nullable=False),
    ]
)
"""A chunk of a snapshot's file: its offset, its bytes, and their CRC32C."""

RecordMessage: TypeAlias = tuple[memoryview, bytes]
"""Records as an Arrow message, encoded once, and their note."""
NoteMessage: TypeAlias = tuple[None, bytes]
"""A note without records."""
ReserveMemory: TypeAlias = Callable[[int], contextlib.AbstractContextManager[object]]
"""Reserves memory during a block; may wait, and raise ``Overloaded``."""


class Wanted(NamedTuple):
    """How long a stream goes on, and how often it says that it does."""

    is_live: Callable[[], bool]
    """Whether the stream is still wanted. Raises if the node is stopping."""
    heartbeat_seconds: float
    """Interval of the heartbeats of an idle stream."""
    clock: Clock

    def next_heartbeat(self) -> float:
        """When the next heartbeat is due, unless there is something else to send."""
        return self.clock.monotonic() + self.heartbeat_seconds


def schema_of_columns(columns: Sequence[str] | None) -> pa.Schema:
    """The schema for a reader; ``InvalidInput`` for unknown columns."""
    if columns is None:
        return READ_SCHEMA
    return pa.schema([READ_SCHEMA.field(name) for name in known_columns(columns)])


def reading(log: Log, ticket: ReadTicket, wanted: Wanted, hold: ReserveMemory) -> Generator[RecordMessage, None, None]:
    """Records with their offsets up to the watermark; with ``follow`` also what is committed later.

    An idle stream sends an empty batch per heartbeat interval. Memory for a batch is held until it was sent.
    """
    nothing = _message(pa.RecordBatch.from_pylist([], schema=schema_of_columns(ticket.columns)))
    cursor, due = log.start() if ticket.since is None else ticket.since, wanted.clock.monotonic()
    end = ticket.upto if ticket.follow or ticket.upto is not None else log.end().next
    if end is not None and cursor.next >= end:
        log.plan(cursor, Limit(batches=1))  # nothing to read, but a cursor past the end or of another log is refused
    while wanted.is_live() and (end is None or cursor.next < end):
        spans = log.plan(cursor, Limit(batches=_PLANNED.batches, bytes=_PLANNED.bytes, upto=end))
        for span in spans:
            after = cursor_after(cursor, span)
            with hold(span.size):
                for batch in _fetched(log, span, cursor, ticket.columns):
                    message = _message(batch)
                    content = page_checksum([message])
                    yield message, _read_note(Flag.READ | Flag.LAST, span.first, after, log, content)
            cursor = after
        if spans:
            due = wanted.next_heartbeat()
        elif not ticket.follow:
            raise NotReady(f"The log does not reach offset {end} yet; it ends at {cursor.next}.")
        elif log.ended(cursor.next):
            return
        elif not log.wait(cursor, TURN) and wanted.clock.monotonic() >= due:
            yield nothing, _read_note(Flag.READ | Flag.HEARTBEAT, cursor.next, cursor, log)
            due = wanted.next_heartbeat()


def _fetched(log: Log, span: Any, cursor: Cursor, columns: Sequence[str] | None) -> list[pa.RecordBatch]:
    try:
        found: list[pa.RecordBatch] = span.fetch(columns)
    except NotFound:
        log.plan(cursor, Limit(batches=1))  # raises if the span was trimmed after it was planned
        raise
    return found


def _read_note(flags: int, first: int, after: Cursor, log: Log, content: int = 0) -> bytes:
    """The note of the records from ``first`` up to a cursor. The reader needs its term to continue at another node."""
    heartbeat = NO_HEARTBEAT._replace(committed=log.end().next)
    return encode_note(Note(flags, first, after.next - first, after.term, 0, None, heartbeat, content))


def feeding(
    primary: PrimaryRole, ticket: FeedTicket, caller: Caller, wanted: Wanted, hold: ReserveMemory
) -> Generator[RecordMessage | NoteMessage, None, None]:
    """Log batches without an end, and heartbeats: when there are no batches, and whenever the heartbeat has changed.

    Memory for a batch is reserved before it is read, and held until it was sent.
    """
    with contextlib.closing(primary.feed(caller, ticket.since)) as feed:
        last_heartbeat: Heartbeat | None = None
        turn, due = TURN, wanted.clock.monotonic()
        while wanted.is_live():
            size = feed.wait(turn)
            with hold(size) if size else contextlib.nullcontext():
                batches = feed.take(turn)
                for batch in batches:
                    last_heartbeat = feed.heartbeat
                    for part, note in parts(batch, last_heartbeat):
                        # Feeds share batches in memory; each copies them to send them.
                        with contextlib.nullcontext() if size else hold(len(part)):
                            yield part, note
            heartbeat = feed.heartbeat
            is_news = heartbeat != last_heartbeat or (wanted.clock.monotonic() >= due and not batches)
            if is_news:
                last_heartbeat = heartbeat
                yield None, encode_note(Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, heartbeat))
            if batches or is_news:
                due = wanted.next_heartbeat()
            turn = next_turn(turn, last_heartbeat, is_news=bool(batches) or is_news)


def next_turn(turn: float, last_heartbeat: Heartbeat | None, *, is_news: bool) -> float:
    """Seconds to wait for more batches: briefly while the last heartbeat had records that are not committed yet.

    The acknowledgement that commits them may arrive at any moment, and readers of the replica wait for it. The wait
    doubles each time.
    """
    if last_heartbeat is None or last_heartbeat.committed >= last_heartbeat.durable:
        return TURN
    return SOON if is_news else min(TURN, 2 * turn)


def parts(batch: LogBatch, heartbeat: Heartbeat | None) -> Generator[RecordMessage, None, None]:
    """A log batch on the wire: its Arrow batches one after another, each with its note."""
    word = NO_HEARTBEAT if heartbeat is None else heartbeat
    left = count = batch.count
    checksums = batch.checksums
    for index, part in enumerate(batch.batches):
        if not part.num_rows:
            continue
        left -= part.num_rows
        message = _message(part, None if batch.pages is None else batch.pages[index])
        content = page_checksum([message]) if checksums is None else checksums[index]
        flags = 0 if left else Flag.LAST
        note = Note(flags, batch.first, count, batch.term, batch.timestamp, batch.append, word, content)
        yield message, encode_note(note)


def _message(batch: pa.RecordBatch, page: Parts | None = None) -> memoryview:
    """A batch as an Arrow message: the page that it was read from if that is contiguous, else a new encoding."""
    return memoryview(page[0] if page is not None and len(page) == 1 else batch.serialize()).cast("B")


def pieces(
    primary: PrimaryRole, ticket: FileTicket, caller: Caller, is_live: Callable[[], bool]
) -> Generator[pa.RecordBatch, None, None]:
    """A piece of a snapshot's file: at most ``limit`` bytes."""
    left = ticket.limit
    chunks = primary.chunks(caller, ticket.snapshot, ticket.path, ticket.offset)
    with contextlib.closing(chunks):
        for chunk in chunks:
            if left <= 0 or not is_live():
                return
            left -= len(chunk.data)
            yield pa.RecordBatch.from_pylist([asdict(chunk)], schema=CHUNK_SCHEMA)
