"""The receiving end of a stream: a thread receives ahead of the reader, and checks each message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar, final

import pyarrow as pa

from strandline.errors import CorruptData, StrandlineError, TransientStorageError
from strandline.formats.arrow.block import Compression, Parts, encode_page, page_checksum
from strandline.formats.arrow.header import admit_batch
from strandline.formats.node.wire import Flag, Note, content_checksum, decode_note
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.model.records import MAX_BATCH_BYTES, RECORD_SCHEMA, are_operations
from strandline.node.flight.wire.errors import node_error
from strandline.storage.env import SYSTEM, Env

QUEUE_BYTES: Final = 64 << 20
TAKE_BYTES: Final = 16 << 20
_JOIN_SECONDS: Final = 1.0

_TIMESTAMP: Final = RECORD_SCHEMA.get_field_index("timestamp")
_OP: Final = RECORD_SCHEMA.get_field_index("op")

T = TypeVar("T")


class Assembler:
    """Assembles log batches from their parts, in order and without gaps.

    ``CorruptData`` for anything else: parts of another batch, missing or additional records, damaged Arrow data.
    """

    def __init__(self, url: str, since: int) -> None:
        """Expect the batch that holds the offset ``since`` first."""
        self._url = url
        self._since = since
        self._next: int | None = None
        self._note: Note | None = None
        self._parts: list[pa.RecordBatch] = []
        self._pages: list[Parts] = []
        self._rows = self._size = 0

    def check_note(self, note: Note) -> None:
        """Check a note that arrived without records."""
        if not note.flags & Flag.HEARTBEAT or self._parts:
            raise self._damaged("a note arrived without its records, or a heartbeat among the parts of a batch")

    def add(self, part: pa.RecordBatch, note: Note, page: Parts) -> LogBatch | None:
        """Add a part, of which ``page`` is the encoding; returns the log batch if this was its last part."""
        if note.flags & (Flag.HEARTBEAT | Flag.READ) or not part.num_rows:
            raise self._damaged("a part of a batch holds no records, or not the columns of a log")
        if self._note is None:
            self._begin(note)
        elif _same(self._note) != _same(note):
            raise self._damaged(f"parts of the batches at {self._note.first} and {note.first} are mixed")
        check_records(part, self._url)
        self._parts.append(part)
        self._pages.append(page)
        self._rows += part.num_rows
        self._size += sum(map(len, page))
        is_last = bool(note.flags & Flag.LAST)
        if self._rows > note.records or is_last != (self._rows == note.records) or self._size > 2 * MAX_BATCH_BYTES:
            raise self._damaged(
                f"the batch at {note.first} should have {note.records} records, and has {self._rows} so far"
            )
        return self._finish(note) if is_last else None

    def _begin(self, note: Note) -> None:
        after = note.first + note.records
        fits = note.first <= self._since < after if self._next is None else note.first == self._next
        if not fits:
            expected = self._since if self._next is None else self._next
            raise self._damaged(f"offsets {note.first} to {after - 1} arrived where {expected} was expected")
        self._note = note

    def _finish(self, note: Note) -> LogBatch:
        batch = LogBatch(note.first, note.term, note.timestamp, note.append, tuple(self._parts), tuple(self._pages))
        self._next = note.first + note.records
        self._note, self._parts, self._pages = None, [], []
        self._rows = self._size = 0
        return batch

    def _damaged(self, why: str) -> CorruptData:
        return CorruptData(f"The stream of {self._url} is damaged: {why}. The batch was discarded: connect again.")


def size_of(batch: pa.RecordBatch) -> int:
    """Memory of a received batch; ten times faster than ``nbytes``."""
    size: int = batch.get_total_buffer_size()
    return size


def _held(batch: LogBatch) -> int:
    """Memory of a batch with its pages: contiguous pages are copies, others are not."""
    copies = [len(page[0]) for page in batch.pages or () if len(page) == 1]
    return batch.size + sum(copies)


def _same(note: Note) -> tuple[object, ...]:
    return (note.first, note.records, note.term, note.timestamp, note.append)


def check_records(batch: pa.RecordBatch, url: str) -> None:
    """``CorruptData`` unless this admitted batch holds records."""
    timestamps, ops = batch.column(_TIMESTAMP), batch.column(_OP)
    if timestamps.null_count or ops.null_count or not are_operations(ops):
        raise CorruptData(f"Records that {url} sent have no timestamp or no operation. Connect again.")


class Receiver(Generic[T]):
    """Receives in its own thread, up to about ``QUEUE_BYTES`` ahead of the taking thread. Any thread closes it."""

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[Any]],
        accept: Callable[[Any], tuple[T, int] | None],
        *,
        url: str,
        what: str,
        silence: float,
        env: Env = SYSTEM,
        queue_bytes: int | None = None,
    ) -> None:
        """Read the stream that ``begin`` opens; ``accept`` turns each chunk into an item and its size.

        After ``silence`` seconds without a message, the connection counts as lost.
        """
        self._begin = begin
        self._accept = accept
        self._url = url
        self._what = what
        self._silence = silence
        self._clock = env.clock
        self._limit = QUEUE_BYTES if queue_bytes is None else queue_bytes
        self._changed = threading.Condition(threading.Lock())
        """Guards all that follows."""
        self._items: deque[tuple[T, int]] = deque()
        """Received items with their sizes."""
        self._held = 0
        """Bytes of the received items."""
        self._is_news = False
        """Whether a take need not wait: a message came since the last one, or the stream has ended."""
        self._last_message = env.clock.monotonic()
        self._ended: BaseException | None = None
        self._done = False
        self._closed = False
        self._reader: Any = None
        # A daemon: before the stream has begun, nothing can interrupt the thread.
        self._thread = threading.Thread(target=self._receive, name="strandline-receive", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        try:
            with self._begin() as reader:
                with self._changed:
                    self._reader = reader
                    closed = self._closed
                if closed:
                    reader.cancel()
                    return
                while self._put(self._accept(reader.read_chunk())):
                    pass
        except StopIteration:
            self._end(None)
        except StrandlineError as error:
            self._end(error)
        except pa.ArrowException as error:
            self._end(node_error(error, self._url, self._what))
        except BaseException as error:  # noqa: BLE001 - raised by the next take
            self._end(error)

    def _put(self, item: tuple[T, int] | None) -> bool:
        """Keep the item of a message, once there is room for it or no other; returns False if the stream was closed."""
        with self._changed:
            if item is not None:
                while self._held and self._held + item[1] > self._limit and not self._closed:
                    self._changed.wait()
                self._items.append(item)
                self._held += item[1]
            self._last_message = self._clock.monotonic()
            self._wake()
            return not self._closed

    def _wake(self) -> None:
        self._is_news = True
        self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._done = error, True
            self._wake()

    def take(self, timeout: float, *, most: int = TAKE_BYTES) -> list[T]:
        """The received items, about ``most`` bytes, waiting until any message comes; empty after the timeout.

        Raises why the stream ended, once everything was taken.
        """
        taken: list[T] = []
        size = 0
        with self._changed:
            left = min(timeout, self._last_message + self._silence - self._clock.monotonic())
            if not self._is_news and left > 0:
                self._changed.wait(left)
            if self._closed:
                raise TransientStorageError(f"The stream of {self._url} was closed: open another one.")
            while self._items and (not taken or size + self._items[0][1] <= most):
                item, its_size = self._items.popleft()
                taken.append(item)
                size += its_size
            self._held -= size
            self._is_news = bool(self._items) or self._done
            if taken:
                self._changed.notify_all()
            elif self._ended is not None:
                raise self._ended
            elif not self._done and self._clock.monotonic() - self._last_message >= self._silence:
                raise TransientStorageError(
                    f"{self._url} has sent nothing for {self._silence:g} s, not even a heartbeat: connect again."
                )
        return taken

    @property
    def done(self) -> bool:
        """Whether the stream has ended without an error, and everything was taken."""
        return self._done and self._ended is None and not self._items

    def close(self) -> None:
        """End the stream and its thread. Idempotent."""
        with self._changed:
            self._closed = True
            reader = self._reader
            self._wake()
        if reader is not None:
            reader.cancel()
            if self._thread is not threading.current_thread():
                self._thread.join(_JOIN_SECONDS)


@final
class RemoteFeed(Receiver[LogBatch]):
    """A primary's log batches. Satisfies :class:`~strandline.node.messages.ReplicationFeed`."""

    def __init__(
        self, begin: Callable[[], AbstractContextManager[Any]], since: int, *, url: str, silence: float, **more: Any
    ) -> None:
        """The batches from the one that holds the offset ``since`` on; ``begin`` opens the stream.

        ``more``: the clock.
        """
        self._heartbeat: Heartbeat | None = None
        self._assembler = Assembler(url, since)
        super().__init__(begin, self._assemble, url=url, what="the stream of records", silence=silence, **more)

    def _assemble(self, chunk: Any) -> tuple[LogBatch, int] | None:
        if chunk.data is None:
            note, batch = _note_of(chunk, self._url), None
            self._assembler.check_note(note)
        else:
            part = admit_batch(chunk.data, f"A part of the stream of {self._url}")
            # Encoded once, for the checksum and for the local log.
            page = encode_page(part, Compression.NONE) if part.num_rows else []
            note = _checked_note(chunk, self._url, part, page)
            batch = self._assembler.add(part, note, page)
        self._heartbeat = note.heartbeat
        return None if batch is None else (batch, _held(batch))

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The primary's latest heartbeat; None before the first."""
        return self._heartbeat

    def wait(self, timeout: float) -> int:
        """0: the received batches are in memory, where their size is limited."""
        return 0

    def take(self, timeout: float, *, most: int = TAKE_BYTES) -> list[LogBatch]:
        """The received batches, waiting up to ``timeout`` seconds; empty if none came, or only a heartbeat."""
        taken = super().take(timeout, most=most)
        if not taken and self.done:
            raise TransientStorageError(f"{self._url} ended the stream of records: connect again.")
        return taken


def read_part(chunk: Any, url: str) -> tuple[pa.RecordBatch, Note]:
    """The records of a chunk and its note; ``CorruptData`` if the checksum of the records does not match."""
    part = admit_batch(chunk.data, f"A part of the stream of {url}")
    return part, _checked_note(chunk, url, part, None)


def _checked_note(chunk: Any, url: str, part: pa.RecordBatch, page: Parts | None) -> Note:
    """The checked note of a chunk; ``page`` is the encoding of its records, if known."""
    note = _note_of(chunk, url)
    if part.num_rows:
        content = content_checksum(part) if page is None else page_checksum(page)
        if content != note.content:
            raise CorruptData(f"Records that {url} sent do not match their checksum: connect again.")
    return note


def _note_of(chunk: Any, url: str) -> Note:
    return decode_note(None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes(), url)
