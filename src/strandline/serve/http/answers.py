"""Answers: headers, problem documents (RFC 9457), and bodies that a slow reader takes in small pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import msgspec

from strandline.errors import (
    BadRecord,
    BufferFull,
    Contended,
    CursorExpired,
    DiskFull,
    Diverged,
    ExpectationFailed,
    Fenced,
    InvalidInput,
    LogClosed,
    LogFailed,
    NotFound,
    NotReady,
    OutcomeUnknown,
    Overloaded,
    SchemaRefused,
    StrandlineError,
    Unsupported,
    WriterExpired,
)
from strandline.serve.http.requests import Busy, Send, TooLarge, TooSlow

PIECE: Final = 64 << 10
"""Bytes of a body that are sent at once: about what a reader that stops reading makes the server hold."""

RETRY_AFTER: Final = "1"

_ROOM_AFTER: Final = "5"
_FULL: Final = (
    "The server's disk is full, and nothing was acknowledged; what is stored can be read. Make room there: the log "
    "then takes appends again by itself."
)

_ALWAYS: Final = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "cross-origin"}

_STATUSES: Final[tuple[tuple[type[StrandlineError], HTTPStatus], ...]] = (
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (TooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (Busy, HTTPStatus.TOO_MANY_REQUESTS),
    (Overloaded, HTTPStatus.TOO_MANY_REQUESTS),
    (BufferFull, HTTPStatus.TOO_MANY_REQUESTS),
    (Contended, HTTPStatus.TOO_MANY_REQUESTS),
    (DiskFull, HTTPStatus.INSUFFICIENT_STORAGE),
    (CursorExpired, HTTPStatus.GONE),
    (Diverged, HTTPStatus.GONE),
    (ExpectationFailed, HTTPStatus.CONFLICT),
    (SchemaRefused, HTTPStatus.UNPROCESSABLE_ENTITY),
    (BadRecord, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Unsupported, HTTPStatus.NOT_IMPLEMENTED),
    (InvalidInput, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.INTERNAL_SERVER_ERROR),
    (NotReady, HTTPStatus.SERVICE_UNAVAILABLE),
    (OutcomeUnknown, HTTPStatus.SERVICE_UNAVAILABLE),
    (WriterExpired, HTTPStatus.SERVICE_UNAVAILABLE),
    (Fenced, HTTPStatus.SERVICE_UNAVAILABLE),
    (LogFailed, HTTPStatus.SERVICE_UNAVAILABLE),
    (LogClosed, HTTPStatus.SERVICE_UNAVAILABLE),
)
"""The first that matches decides; others are 503 if repeating helps, else 500."""

_AGAIN: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(slots=True)
class HttpAnswer:
    """The answer to a request, with all of its body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any) -> HttpAnswer:
    """A problem document: what happened, and what to do."""
    fields = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        **more,
    }
    found = {"Content-Type": "application/problem+json", "Cache-Control": "no-store", **(headers or {})}
    if status in _AGAIN:
        found.setdefault("Retry-After", RETRY_AFTER)
    return HttpAnswer(status, found, msgspec.json.encode(fields))


def problem_of(error: StrandlineError) -> HttpAnswer:
    """The problem document of an error."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
    if status is None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(error, DiskFull):
        return problem(status, _FULL, {"Retry-After": _ROOM_AFTER})
    return problem(status, str(error))


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send status and headers; every answer has those that protect browsers."""
    rows = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (_ALWAYS | dict(headers)).items()
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": rows})


async def send_piece(send: Send, data: bytes, seconds: float, *, more: bool) -> None:
    """Send a part of a body in small pieces, each within the limit of time; ``TimeoutError`` if the reader stalls."""
    view = memoryview(data)
    for start in range(0, max(1, len(view)), PIECE):
        piece = bytes(view[start : start + PIECE])
        last = start + PIECE >= len(view)
        async with asyncio.timeout(seconds):
            await send({"type": "http.response.body", "body": piece, "more_body": more or not last})


async def send_answer(send: Send, answer: HttpAnswer, seconds: float, *, head: bool = False) -> None:
    """Send an answer, without its body to HEAD."""
    headers = dict(answer.headers)
    if answer.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        headers.setdefault("Content-Length", str(len(answer.body)))
    await send_start(send, answer.status, headers)
    await send_piece(send, b"" if head else answer.body, seconds, more=False)
