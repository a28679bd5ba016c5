"""Reading of streams: chunks from an offset, long polls, and events."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from strandline.errors import InvalidInput, NotFound, StrandlineError
from strandline.formats.checksum import crc32c
from strandline.log.read.planning import divided_spans
from strandline.model.cursor import Cursor, Limit, parse_start
from strandline.serve.http.answers import HttpAnswer, send_piece, send_start
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol.content import DataEvents, body_of, event, is_text, sizes_of, within
from strandline.serve.http.protocol.records import NOTATIONS, accepted, body_of_records, sizes_of_records, with_prefix
from strandline.serve.http.protocol.tokens import BEGINNING, NOW, cursor_of_token, live_cursor, token_of
from strandline.serve.http.requests import Bodies, Receive, Request, Send
from strandline.serve.http.stream import Stream
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)

CATCH_UP: Final = "private, max-age=60, stale-while-revalidate=300"
NO_STORE: Final = "no-store"

_POLL, _EVENTS = "long-poll", "sse"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some records after a cursor, as a body, and where they end."""

    since: Cursor
    next: Cursor
    body: bytes
    content_type: str
    up_to_date: bool
    closed: bool
    """Whether the stream is closed, and this is its end."""

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to read."""
        return self.since.next == self.next.next

    @property
    def etag(self) -> str:
        """Names this range, and whether it is the end of a closed stream."""
        end = "c" if self.closed else "o"
        digest = f"{crc32c(self.body):08x}" if self.content_type in NOTATIONS else ""
        return f'"{token_of(self.since)}.{self.next.next}.{end}{digest}"'


@dataclass(frozen=True, slots=True)
class SharedEvents:
    """A chunk, and its events as they are for most readers."""

    chunk: Chunk
    text: bytes | None
    """For a reader that gave no cursor, and has whole characters only; None if the chunk ends within one."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a reader wants the records: the stream's own content, or a notation of whole records."""

    notation: str | None = None
    prefix: bytes = b""
    """Only records whose key begins with this."""


def form_of(request: Request) -> Form:
    """What a request asks for."""
    notation, prefix = accepted(request.headers.get("accept")), request.only("key_prefix")
    if prefix is not None and notation is None:
        raise InvalidInput(f"key_prefix is for whole records: send Accept: {' or '.join(NOTATIONS)} with it.")
    return Form(notation, (prefix or "").encode())


def read_chunk(stream: Stream, since: Cursor, room: int, form: Form) -> Chunk:
    """Records after a cursor, up to about ``room`` bytes but at least one; blocks.

    ``CursorExpired`` if they are not retained, ``Diverged`` for a cursor of another history or past the end.
    """
    if stream.is_gone:
        raise NotFound(f"Stream {stream.name} was deleted.")
    log = stream.log
    bounds = log.bounds()
    batches: list[pa.RecordBatch] = []
    at, left = since, room
    for span in divided_spans(log.plan(since, Limit(bytes=room, upto=max(bounds.next, since.next)))):
        for batch in span.fetch(["value"] if form.notation is None else None):
            sizes = sizes_of(batch.column("value"), 4) if form.notation is None else sizes_of_records(batch)
            count = within(sizes, left, at_least_one=not batches)
            batches.append(batch.slice(0, count))
            left -= int(sizes[:count].sum())
            at = at.at(at.next + count)
            if count < batch.num_rows:
                left = 0
            if left <= 0:
                break
        if left <= 0:
            break
    at = stream.cursor_at(at.next)  # an offset has one token, whatever showed it
    is_end = at.next >= bounds.next
    if form.notation is None:
        body, content_type = body_of([batch.column(0) for batch in batches], stream.content_type), stream.content_type
    else:
        taken = [with_prefix(batch, form.prefix) for batch in batches]
        body = body_of_records(taken, form.notation, stream.log_id, stream.content_type)
        content_type = form.notation
    return Chunk(since, at, body, content_type, is_end, bounds.sealed and is_end)


def start_of(stream: Stream, request: Request) -> tuple[Cursor, bool]:
    """The cursor from which a request reads, and whether another one may be found later; blocks."""
    given, since = request.only("offset"), request.only("since")
    if since is not None:
        if given is not None:
            raise InvalidInput("A read begins at its offset, or at what since says: give one of the two.")
        start = Cursor.parse(since) if "/" in since else parse_start(since)
        return start if isinstance(start, Cursor) else stream.cursor_at(stream.log.position_of(start)), True
    if given is None or given == BEGINNING:
        return stream.cursor_at(stream.log.bounds().first), False
    if given == NOW:
        return stream.cursor_at(stream.log.bounds().next), True
    return cursor_of_token(given, stream.log_id), False


@dataclass(frozen=True, slots=True)
class Reader:
    """Answers GET and HEAD of one stream."""

    stream: Stream
    limits: HttpLimits
    env: Env
    bodies: Bodies

    async def answer(self, request: Request, receive: Receive, send: Send, calls: Any) -> HttpAnswer | None:
        """The answer to GET; None if it was sent as events."""
        live = request.only("live")
        if live not in (None, _POLL, _EVENTS):
            raise InvalidInput(f"live is {_POLL} or {_EVENTS}.")
        if live is not None and not {"offset", "since"} & request.query.keys():
            raise InvalidInput("A live read begins somewhere: its offset is -1, now, or one of an answer.")
        form = form_of(request)
        since, may_move = await calls(start_of, self.stream, request)
        if live == _EVENTS:
            if form.notation is not None:
                raise InvalidInput("Events carry the stream's own content: read whole records by long-poll.")
            await self._send_events(request, since, receive, send, calls)
            return None
        if live == _POLL:
            return await self._long_poll(request, since, form, receive, calls)
        chunk = await self._read(since, form, calls)
        headers = self._headers(chunk) | {
            "Vary": "Accept",
            "Cache-Control": NO_STORE if may_move else CATCH_UP,
            "ETag": chunk.etag,
        }
        if request.headers.get("if-none-match") == chunk.etag:
            return HttpAnswer(304, headers)
        return HttpAnswer(200, headers, chunk.body)

    async def head(self, calls: Any) -> HttpAnswer:
        """The answer to HEAD: what the stream is, and where it ends."""
        bounds = await calls(self.stream.log.bounds)
        return HttpAnswer(
            200,
            {
                "Content-Type": self.stream.content_type,
                "Stream-Next-Offset": await self.stream.token_at(bounds.next),
                "Cache-Control": NO_STORE,
                **({"Stream-Closed": "true"} if bounds.sealed else {}),
            },
        )

    async def _read(self, since: Cursor, form: Form, calls: Any) -> Chunk:
        found: Chunk = await calls(read_chunk, self.stream, since, self.limits.chunk_bytes, form)
        return found

    async def _read_live(self, since: Cursor, form: Form, calls: Any) -> Chunk:
        """The same, read once for all live readers at this position."""
        found: Chunk = await self.stream.tail.shared((str(since), form), lambda: self._read(since, form, calls))
        return found

    def _headers(self, chunk: Chunk) -> dict[str, str]:
        found = {"Content-Type": chunk.content_type, "Stream-Next-Offset": token_of(chunk.next)}
        if chunk.up_to_date:
            found["Stream-Up-To-Date"] = "true"
        if chunk.closed:
            found["Stream-Closed"] = "true"
        return found

    def _cursor(self, given: str | None) -> str:
        return live_cursor(given, self.env.clock.now(), self.env.chance.jitter())

    async def _long_poll(self, request: Request, since: Cursor, form: Form, receive: Receive, calls: Any) -> HttpAnswer:
        deadline = self.env.clock.monotonic() + self.limits.long_poll_seconds
        left = asyncio.ensure_future(_left(receive))
        try:
            while True:
                version = self.stream.tail.version
                chunk = await self._read_live(since, form, calls)
                seconds = deadline - self.env.clock.monotonic()
                if not chunk.is_empty or chunk.closed or seconds <= 0 or left.done():
                    break
                await self.stream.tail.wait(version, seconds, left)
        finally:
            left.cancel()
        headers = self._headers(chunk) | {
            "Stream-Cursor": self._cursor(request.only("cursor")),
            "Cache-Control": NO_STORE,
        }
        if chunk.is_empty:
            del headers["Content-Type"]
            return HttpAnswer(204, headers)
        return HttpAnswer(200, headers | {"ETag": chunk.etag}, chunk.body)

    async def _send_events(self, request: Request, since: Cursor, receive: Receive, send: Send, calls: Any) -> None:
        deadline = self.env.clock.monotonic() + self.limits.events_seconds
        version = self.stream.tail.version
        found = await self._read_events(since, calls)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if not is_text(self.stream.content_type):
            headers["Stream-SSE-Data-Encoding"] = "base64"
        await send_start(send, 200, headers)
        left = asyncio.ensure_future(_left(receive))
        is_first, events = True, DataEvents(self.stream.content_type)
        cursor = request.only("cursor")
        try:
            while not left.done():
                chunk = found.chunk
                if is_first or not chunk.is_empty or chunk.closed:
                    is_first = False
                    text = found.text if events.is_whole and cursor is None else None
                    if text is None:
                        text = self._events(chunk, events, cursor)
                    with self.bodies.sending(text):
                        await send_piece(send, text, self.limits.send_seconds, more=True)
                    if chunk.closed:
                        break
                since = chunk.next
                seconds = deadline - self.env.clock.monotonic()
                if seconds <= 0:
                    break
                if chunk.up_to_date:
                    await self.stream.tail.wait(version, seconds, left)
                version = self.stream.tail.version
                found = await self._read_events(since, calls)
        except StrandlineError as error:  # such as a stream that was deleted: the client comes back, and is told
            _LOGGER.debug("Events of stream %s end: %s", self.stream.name, error)
        finally:
            left.cancel()
        await send_piece(send, b"", self.limits.send_seconds, more=False)

    async def _read_events(self, since: Cursor, calls: Any) -> SharedEvents:
        """Events after a cursor, read and encoded once for all live readers at this position."""

        async def read() -> SharedEvents:
            chunk = await self._read_live(since, Form(), calls)
            events = DataEvents(self.stream.content_type)
            text = self._events(chunk, events, None)
            return SharedEvents(chunk, text if events.is_whole else None)

        found: SharedEvents = await self.stream.tail.shared(("events", str(since)), read)
        return found

    def _events(self, chunk: Chunk, events: DataEvents, cursor: str | None) -> bytes:
        """The events of a chunk for a reader that came with this cursor."""
        data = b"" if chunk.is_empty else events(chunk.body, last=chunk.closed)
        return data + event("control", self._control(chunk, cursor))

    def _control(self, chunk: Chunk, cursor: str | None) -> str:
        fields: dict[str, Any] = {"streamNextOffset": token_of(chunk.next)}
        if not chunk.closed:
            fields["streamCursor"] = self._cursor(cursor)
        if chunk.up_to_date:
            fields["upToDate"] = True
        if chunk.closed:
            fields["streamClosed"] = True
        return msgspec.json.encode(fields).decode()


async def _left(receive: Receive) -> None:
    """Return when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
