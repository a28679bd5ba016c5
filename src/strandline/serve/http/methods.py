"""The methods of a stream: PUT, POST, GET, HEAD and DELETE."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Final, TypeVar

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.formats.json.streams import StreamDescription
from strandline.model.arguments import LARGEST_NUMBER, shown
from strandline.model.cursor import microseconds
from strandline.serve.http.answers import HttpAnswer, problem
from strandline.serve.http.calls import Calls
from strandline.serve.http.hub import GONE, Hub, Pinned
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol.cloud_events import BATCH, EVENT, is_event
from strandline.serve.http.protocol.content import DEFAULT_TYPE, checked_type, media_type, messages_of
from strandline.serve.http.protocol.counting import check_count
from strandline.serve.http.protocol.producers import (
    KEY,
    FencedEpoch,
    HttpProducer,
    Refusal,
    Repeated,
    SequenceGap,
    producer_of,
)
from strandline.serve.http.protocol.records import is_whole, records_sent
from strandline.serve.http.reads import Reader
from strandline.serve.http.requests import Bodies, Busy, Receive, Request, Send
from strandline.serve.http.stream import Append, Appended, BehindSequence, Closed, Judged, Outcome, Stream, batch_of
from strandline.serve.http.streams import WantedStream
from strandline.storage.env import Env

A = TypeVar("A", bound=HttpAnswer | None)

_TTL: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_FORKS: Final = ("stream-forked-from", "stream-fork-offset", "stream-fork-sub-offset")
_LONGEST_SEQ: Final = 256
_IS_CLOSED: Final = "The stream is closed, and nothing was appended: append to another one."
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Methods:
    """Answers the requests to streams."""

    def __init__(self, hub: Hub, calls: Calls, bodies: Bodies, limits: HttpLimits, env: Env) -> None:
        self._hub = hub
        self._calls = calls
        self._bodies = bodies
        self._live = 0
        self._limits = limits
        self._env = env

    async def answer(self, name: str, request: Request, receive: Receive, send: Send) -> HttpAnswer | None:
        """The answer to a request; None if it was sent already."""
        if request.method == "PUT":
            with self._bodies.held(await self._bodies.receive(request, receive)) as body:
                return await self._put(name, request, body)
        if request.method == "POST":
            producer = producer_of(request.headers)
            with self._bodies.held(await self._bodies.receive(request, receive)) as body:
                return await self._again_if_gone(name, lambda stream: self._post(stream, request, producer, body))
        if request.method == "DELETE":
            return await self._again_if_gone(name, self._delete)
        if request.method == "HEAD":
            return await self._again_if_gone(name, self._head)
        return await self._again_if_gone(name, lambda stream: self._get(stream, request, receive, send))

    async def _again_if_gone(self, name: str, act: Callable[[Stream], Awaitable[A]]) -> A | HttpAnswer:
        """What ``act`` answers for the stream; once more if another server deleted or made it meanwhile."""
        for again in (False, True):
            stream = await self._hub.find(name, again=again)
            if stream is None:
                break
            try:
                return await act(stream)
            except GONE:
                if stream.state is None or again:
                    raise
            finally:
                stream.release()
        return problem(HTTPStatus.NOT_FOUND, f"There is no stream {name!r}: create it with PUT.")

    # --- PUT ---------------------------------------------------------------------------------------------------------

    async def _put(self, name: str, request: Request, body: bytes) -> HttpAnswer:
        if any(header in request.headers for header in _FORKS):
            return problem(
                HTTPStatus.NOT_IMPLEMENTED,
                "This server has no forks of streams: create a stream of its own, and append to it what you read.",
            )
        given = request.headers.get("content-type")
        wanted = WantedStream(checked_type(given or DEFAULT_TYPE), *_lifetime(request.headers), closed=request.closes)
        records = await self._calls(self._messages, body, wanted.content_type) if body else None
        if self._hub.is_configured(name) or not self._hub.creates:
            stream = await self._hub.find(name)
            if stream is None:
                return problem(
                    HTTPStatus.FORBIDDEN,
                    "No streams can be created on this server: it serves the logs of its settings.",
                )
            is_new = False
        else:
            stream, is_new = await self._hub.create(name, wanted, records)
        try:
            return await self._made(stream, request, wanted, is_new=is_new, says_type=given is not None)
        finally:
            stream.release()

    async def _made(
        self, stream: Stream, request: Request, wanted: WantedStream, *, is_new: bool, says_type: bool
    ) -> HttpAnswer:
        bounds = await self._calls(stream.log.bounds)
        if not is_new:
            differs = _difference(stream, wanted, is_closed=bounds.sealed, says_type=says_type)
            if differs is not None:
                return problem(
                    HTTPStatus.CONFLICT,
                    f"The stream {stream.name!r} is there with another {differs}: choose another name.",
                )
        headers = self._headers(stream, await stream.token_at(bounds.next), closed=bounds.sealed)
        headers["Content-Type"] = stream.content_type
        if not is_new:
            return HttpAnswer(HTTPStatus.OK, headers)
        return HttpAnswer(HTTPStatus.CREATED, headers | {"Location": _address(request)})

    # --- POST --------------------------------------------------------------------------------------------------------

    async def _post(self, stream: Stream, request: Request, producer: HttpProducer | None, body: bytes) -> HttpAnswer:
        if not body and not request.closes and not is_event(request.headers):
            return problem(HTTPStatus.BAD_REQUEST, "The body is empty: give what to append, or Stream-Closed: true.")
        read = None
        if body or is_event(request.headers):
            found = await self._reader(stream, request, body)
            if isinstance(found, HttpAnswer):
                return found
            read = found
        await self._hub.used(stream)
        outcome = await stream.append(Append(read, producer, _sequence_of(request), request.closes))
        return await self._appended(stream, outcome, producer, closes=request.closes)

    async def _reader(
        self, stream: Stream, request: Request, body: bytes
    ) -> Callable[[], pa.Table | pa.RecordBatch] | HttpAnswer:
        """What reads the records that a request appends, or why it does not append."""
        given, headers = request.headers.get("content-type"), request.headers
        if not given and not is_event(headers):
            return problem(HTTPStatus.BAD_REQUEST, "The request has no Content-Type: give that of the stream.")
        if media_type(given or "") == media_type(stream.content_type) and not is_event(headers):
            return partial(self._some_messages, body, stream.content_type, _sequence_of(request))
        if not is_whole(headers):
            return await self._refused(
                stream,
                HTTPStatus.CONFLICT,
                f"The stream holds {stream.content_type}, and the body is {shown(given)}: send the same.",
            )
        if "stream-seq" in headers:
            return await self._refused(
                stream, HTTPStatus.BAD_REQUEST, "Stream-Seq goes with the stream's own content, not with whole records."
            )
        return partial(self._sent, request, body)

    def _sent(self, request: Request, body: bytes) -> pa.Table:
        """The whole records of a body; may take seconds, as well."""
        kind = request.headers.get("content-type", "")
        if media_type(kind) in (EVENT, BATCH) or not is_event(request.headers):  # otherwise the body is one value
            check_count(body, kind, self._limits.body_messages)
        return records_sent(request.headers, body, request.only("key"), now=self._env.clock.now())

    def _some_messages(self, body: bytes, content_type: str, sequence: bytes | None) -> pa.RecordBatch:
        """The records of a body that appends; ``InvalidInput`` if it holds no message."""
        records = self._messages(body, content_type, sequence)
        if records is None:
            raise InvalidInput("The array is empty: give at least one message.")
        return records

    def _messages(self, body: bytes, content_type: str, sequence: bytes | None = None) -> pa.RecordBatch | None:
        """The records of a body, None if it holds no message; may take seconds, and so never on the event loop."""
        check_count(body, content_type, self._limits.body_messages)
        values = messages_of(body, content_type)
        return batch_of(values, self._env.clock.now(), sequence) if values else None

    async def _refused(self, stream: Stream, status: int, detail: str) -> HttpAnswer:
        """Why nothing is appended; that the stream is closed goes before all else."""
        bounds = await self._calls(stream.log.bounds)
        return await self._closed(stream, bounds.next) if bounds.sealed else problem(status, detail)

    async def _closed(self, stream: Stream, end: int) -> HttpAnswer:
        token = await stream.token_at(end)
        return problem(HTTPStatus.CONFLICT, _IS_CLOSED, self._headers(stream, token, closed=True))

    async def _appended(
        self, stream: Stream, outcome: Outcome, producer: HttpProducer | None, *, closes: bool
    ) -> HttpAnswer:
        match outcome:
            case Appended(receipt):
                if receipt.first is None:  # a repetition that the log remembers only by its number
                    end = (await self._calls(stream.log.bounds)).next
                else:
                    end = receipt.first + receipt.count
                headers = self._headers(stream, await stream.token_at(end), closed=closes)
                if producer is None or producer.space == KEY:
                    return HttpAnswer(HTTPStatus.NO_CONTENT, headers)
                headers |= _producer_headers(producer, producer.sequence)
                return HttpAnswer(HTTPStatus.OK if receipt.count else HTTPStatus.NO_CONTENT, headers)
            case Closed(end):
                return await self._closed(stream, end)
            case BehindSequence(last):
                return problem(
                    HTTPStatus.CONFLICT,
                    f"Stream-Seq has to be above {shown(last.decode('latin-1'))}, the last one; nothing was appended.",
                )
            case Judged(judged, verdict, bounds):
                token = await stream.token_at(bounds.next)
                return self._judged(stream, verdict, judged, token, closed=bounds.sealed)

    def _judged(
        self, stream: Stream, verdict: Refusal, producer: HttpProducer, token: str, *, closed: bool
    ) -> HttpAnswer:
        """The answer to an append that its producer's headers decided."""
        headers = self._headers(stream, token, closed=closed)
        match verdict:
            case Repeated(sequence):
                headers |= _producer_headers(producer, sequence)
                return HttpAnswer(HTTPStatus.NO_CONTENT, headers)
            case FencedEpoch(epoch):
                return problem(
                    HTTPStatus.FORBIDDEN,
                    f"Epoch {producer.epoch} of the producer is over: epoch {epoch} has taken over, and nothing was "
                    "appended. Stop, or begin a higher epoch.",
                    {"Producer-Epoch": str(epoch)},
                )
            case SequenceGap(expected):
                if closed:
                    return problem(HTTPStatus.CONFLICT, _IS_CLOSED, headers)
                return problem(
                    HTTPStatus.CONFLICT,
                    f"Producer-Seq {expected} is the next one, and nothing was appended: send that first.",
                    {"Producer-Expected-Seq": str(expected), "Producer-Received-Seq": str(producer.sequence)},
                )

    # --- GET, HEAD, DELETE -------------------------------------------------------------------------------------------

    async def _get(self, stream: Stream, request: Request, receive: Receive, send: Send) -> HttpAnswer | None:
        await self._hub.used(stream)
        reader = Reader(stream, self._limits, self._env, self._bodies)
        if "live" not in request.query:
            return await reader.answer(request, receive, send, self._calls)
        if self._live >= self._limits.readers:
            raise Busy(f"The server has {self._live:,} live readers, which are the most: read without live, or wait.")
        self._live += 1
        try:
            return await reader.answer(request, receive, send, self._calls)
        finally:
            self._live -= 1

    async def _head(self, stream: Stream) -> HttpAnswer:
        answer = await Reader(stream, self._limits, self._env, self._bodies).head(self._calls)
        if stream.state is not None:
            answer.headers |= _lifetime_headers(stream.state)
        return answer

    async def _delete(self, stream: Stream) -> HttpAnswer:
        if stream.state is None:
            return problem(
                HTTPStatus.FORBIDDEN,
                "The stream is a log of the server's settings, which no request can delete: take it out of the "
                "settings, then delete it by 'strandline delete'.",
            )
        try:
            deleted = await self._hub.delete(stream)
        except Pinned as error:
            return problem(HTTPStatus.CONFLICT, str(error))
        if deleted:
            return HttpAnswer(HTTPStatus.NO_CONTENT, {"Cache-Control": "no-store"})
        return problem(HTTPStatus.NOT_FOUND, f"There is no stream {stream.name!r}.")

    def _headers(self, stream: Stream, token: str, *, closed: bool) -> dict[str, str]:
        found = {"Stream-Next-Offset": token, "Cache-Control": "no-store"}
        return found | {"Stream-Closed": "true"} if closed else found


def _producer_headers(producer: HttpProducer, sequence: int) -> dict[str, str]:
    if producer.space == KEY:
        return {}
    return {"Producer-Epoch": str(producer.epoch), "Producer-Seq": str(sequence)}


def _sequence_of(request: Request) -> bytes | None:
    text = request.headers.get("stream-seq")
    if text is None:
        return None
    if not text or len(text) > _LONGEST_SEQ:
        raise InvalidInput(f"A Stream-Seq has 1 to {_LONGEST_SEQ} characters.")
    return text.encode("latin-1")


def _lifetime(headers: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The lifetime in seconds, and the end in microseconds, of a stream to create."""
    ttl, expires = headers.get("stream-ttl"), headers.get("stream-expires-at")
    if ttl is not None and expires is not None:
        raise InvalidInput("A stream has a Stream-TTL or a Stream-Expires-At: give one of them.")
    if ttl is not None:
        if not _TTL.fullmatch(ttl):
            raise InvalidInput(f"Stream-TTL is a whole number of seconds below 1,000,000,000, not {shown(ttl)}.")
        return int(ttl), None
    if expires is None:
        return None, None
    try:
        found = microseconds(datetime.fromisoformat(expires))
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"Stream-Expires-At is a time such as 2030-01-01T00:00:00Z, not {shown(expires)}."
        ) from error
    if not 0 <= found <= LARGEST_NUMBER:
        raise InvalidInput(f"Stream-Expires-At is a time since 1970, not {shown(expires)}.")
    return None, found


def _lifetime_headers(state: StreamDescription) -> dict[str, str]:
    if state.ttl is not None:
        return {"Stream-TTL": str(state.ttl)}
    if state.expires is None:
        return {}
    return {"Stream-Expires-At": (_EPOCH + timedelta(microseconds=state.expires)).isoformat().replace("+00:00", "Z")}


def _difference(stream: Stream, wanted: WantedStream, *, is_closed: bool, says_type: bool) -> str | None:
    """What a stream that is there has otherwise than a request to create it; None if it is the same."""
    if media_type(stream.content_type) != media_type(wanted.content_type) and (says_type or stream.state is not None):
        return "content type"
    if stream.state is not None and (stream.state.ttl, stream.state.expires) != (wanted.ttl, wanted.expires):
        return "lifetime"
    return "state (open or closed)" if (wanted.closed and not is_closed) or (is_closed and not wanted.closed) else None


def _address(request: Request) -> str:
    host = request.headers.get("host")
    return request.path if host is None else f"{request.scheme}://{host}{request.path}"
