"""The ASGI application: streams at ``/v1/stream/{name}``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Final, final

from strandline.errors import DiskFull, InvalidInput, StrandlineError
from strandline.model.addresses import check_plain_name
from strandline.serve.http.access import Access, Authoriser, Denied, allow_all
from strandline.serve.http.answers import HttpAnswer, problem, problem_of, send_answer
from strandline.serve.http.calls import Calls
from strandline.serve.http.hub import Hub, LogEntry
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.methods import Methods
from strandline.serve.http.origins import Origins
from strandline.serve.http.protocol.bad_rows import BadRow
from strandline.serve.http.requests import Bodies, Busy, Gone, Message, Receive, Request, Scope, Send
from strandline.serve.http.streams import StreamRoot
from strandline.storage.env import SYSTEM, Env

__all__ = ["LogEntry", "StreamApp", "StreamRoot", "create_app"]

_LOGGER: Final = logging.getLogger(__name__)

PREFIX: Final = "/v1/stream/"

_ACCESS: Final = {
    "GET": Access.READ,
    "HEAD": Access.READ,
    "POST": Access.APPEND,
    "PUT": Access.ADMIN,
    "DELETE": Access.ADMIN,
}
_METHODS: Final = ", ".join([*_ACCESS, "OPTIONS"])


def create_app(
    logs: Mapping[str, LogEntry],
    streams: StreamRoot | None = None,
    *,
    authorise: Authoriser = allow_all,
    origins: Collection[str] = (),
    limits: HttpLimits | None = None,
    env: Env = SYSTEM,
) -> StreamApp:
    """The application that serves streams.

    Args:
        logs: The configured logs by name; the caller opens and closes them. The mapping may change while it is served.
        streams: Where clients create streams; None: they cannot.
        authorise: Decides on each request; by default everything is allowed.
        origins: Origins of browsers' pages (``https://app.example``) that may call it; ``"*"`` is any.
        limits: What callers may make it hold.
        env: Clock, disk and chance, for tests.
    """
    return StreamApp(logs, streams, authorise, Origins(origins), limits or HttpLimits(), env)


@final
class StreamApp:
    """An ASGI application. Runs on one event loop; ``aclose`` releases what it has opened."""

    def __init__(
        self,
        logs: Mapping[str, LogEntry],
        streams: StreamRoot | None,
        authorise: Authoriser,
        origins: Origins,
        limits: HttpLimits,
        env: Env,
    ) -> None:
        """Use :func:`create_app`."""
        self._calls = Calls(limits)
        self.hub = Hub(logs, streams, self._calls, limits, env)
        """The streams."""
        self._authorise = authorise
        self._origins = origins
        self._limits = limits
        self._bodies = Bodies(limits)
        self._methods = Methods(self.hub, self._calls, self._bodies, limits, env)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        self.hub.start()
        is_head = scope["method"] == "HEAD"
        origin = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"), None)
        sender = _AnswerSender(send, self._origins.headers(origin))
        try:
            answer = await self._answer(scope, receive, sender)
        except BadRow as error:
            answer = problem(
                HTTPStatus.UNPROCESSABLE_ENTITY, str(error), row=error.row, field=error.field, reason=error.reason
            )
        except StrandlineError as error:
            answer = problem_of(error)
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, DiskFull):
                _LOGGER.warning("%s %s failed: %s", scope["method"], scope["path"], error)
        except Gone:
            return
        except TimeoutError:  # the reader stalled
            if sender.has_started:
                raise
            answer = problem(HTTPStatus.SERVICE_UNAVAILABLE, "The log did not answer in time. Try again.")
        if answer is None:
            return
        if sender.has_started:
            raise ConnectionAbortedError("The answer was broken off.")
        try:
            with self._bodies.sending(answer.body):
                await send_answer(sender, answer, self._limits.send_seconds, head=is_head)
        except Busy as error:
            await send_answer(sender, problem_of(error), self._limits.send_seconds, head=is_head)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> HttpAnswer | None:
        request = Request.of(scope)
        name = _name_of(request)
        if name is None:
            return problem(HTTPStatus.NOT_FOUND, f"Streams are at {PREFIX} and a name.")
        if request.method == "OPTIONS":
            return self._origins.options(_METHODS)
        access = _ACCESS.get(request.method)
        if access is None:
            return problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"A stream has no {request.method[:20]}: use {_METHODS}.",
                {"Allow": _METHODS},
            )
        denied = self._authorise(request.headers, access, name)
        if denied is None and access is Access.APPEND and request.closes and self.hub.is_configured(name):
            denied = self._authorise(request.headers, Access.ADMIN, name)
            if denied is not None:
                denied = Denied(denied.status, f"Stream-Closed would seal the log {name!r} for good. {denied.reason}")
        if denied is not None:
            return denied.answer()
        return await self._methods.answer(name, request, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def aclose(self) -> None:
        """Close the streams that clients created, and end the threads. Configured logs stay open."""
        await self.hub.close()
        self._calls.close()


class _AnswerSender:
    """Sends with further headers, and knows whether an answer has begun."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)


def _name_of(request: Request) -> str | None:
    """The name of the stream in the path; None for another path, ``InvalidInput`` for what is no plain name.

    The path as it was sent decides: an encoded slash, or two dots, is no other name than its own.
    """
    raw = request.raw_path.decode("latin-1") or request.path
    if not raw.startswith(PREFIX):
        return None
    name = raw.removeprefix(PREFIX)
    if "%" in name:
        raise InvalidInput("The name of a stream needs no percent signs: use letters, digits, '.', '_' and '-'.")
    return check_plain_name(name, "stream")
