"""The ASGI application of a server: health and metrics, state and actions, and streams."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Final, final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from strandline.errors import InvalidInput, StrandlineError
from strandline.serve.api.openapi import openapi
from strandline.serve.api.permissions import REREAD_SECONDS, Permissions
from strandline.serve.api.routes import StateApi, matched
from strandline.serve.api.state import ServerState
from strandline.serve.config.changes import PartName
from strandline.serve.config.settings import Settings
from strandline.serve.http.access import Access
from strandline.serve.http.answers import HttpAnswer, problem, problem_of, send_answer
from strandline.serve.http.app import PREFIX, LogEntry, StreamRoot, create_app
from strandline.serve.http.calls import Calls
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.origins import Origins
from strandline.serve.http.requests import Bodies, Gone, Receive, Request, Scope, Send
from strandline.serve.http.tls import ServerTls
from strandline.serve.parts.logs import Opening
from strandline.serve.server import Server
from strandline.storage.env import Env
from strandline.storage.metrics import report_build

_LOGGER: Final = logging.getLogger("strandline.serve")
_READING: Final = ("GET", "HEAD")
_PAGES: Final = ("/healthz", "/readyz", "/metrics", "/v1/openapi.json")


class ServedLogs(Mapping[str, LogEntry]):
    """The logs of a server as streams: as many as there are now."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getitem__(self, name: str) -> LogEntry:
        return LogEntry(self._server.served(name).current)

    def __contains__(self, name: object) -> bool:
        return name in self._server.settings.logs

    def __iter__(self) -> Iterator[str]:
        return iter(self._server.settings.logs)

    def __len__(self) -> int:
        return len(self._server.settings.logs)


@final
class ServerApp:
    """Answers every request to the port of a server."""

    def __init__(self, server: Server, streams: StreamRoot | None, permissions: Permissions, env: Env) -> None:
        limits, origins = HttpLimits(), server.settings.http.origins
        self._server, self._permissions, self._limits = server, permissions, limits
        self._streams = create_app(
            ServedLogs(server), streams, authorise=permissions.denied, origins=origins, limits=limits, env=env
        )
        self._origins = Origins(origins)
        self._calls = Calls(HttpLimits(threads=4, waiting=64))
        self._api = StateApi(ServerState(server, env), permissions, self._calls)
        self._bodies = Bodies(HttpLimits(body_bytes=64 << 10))
        report_build()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._streams(scope, receive, send)
            return
        path = scope.get("raw_path", b"").decode("latin-1") or scope.get("path", "")
        origin = None
        try:
            request = Request.of(scope)
            origin = request.headers.get("origin")
            strange = self._permissions.strange(request.headers)
            if strange is None and path.startswith(PREFIX):
                await self._streams(scope, receive, send)
                return
            if strange is None:
                answer = await self._answer(request, receive)
            else:
                answer = strange.answer()
        except Gone:
            return
        except StrandlineError as error:
            answer = problem_of(error)
        except OSError:  # the caller has left, or takes nothing
            raise
        except Exception:
            _LOGGER.exception("%s %s failed, which should not be.", scope["method"], path)
            raise
        answer.headers |= self._origins.headers(origin)
        with contextlib.suppress(TimeoutError):
            await send_answer(send, answer, self._limits.send_seconds, head=scope["method"] == "HEAD")

    async def _answer(self, request: Request, receive: Receive) -> HttpAnswer:
        if b"%" in request.raw_path:  # what a proxy in front has let pass is what is meant here
            raise InvalidInput("The path needs no percent signs: names are letters, digits, '.', '_' and '-'.")
        if request.method == "OPTIONS" and (methods := _methods_of(request.path)):
            return self._origins.options(methods)
        page = await self._page(request)
        if page is not None:
            return page
        if not request.path.startswith("/v1/"):
            return problem(
                HTTPStatus.NOT_FOUND, f"Here are /healthz, /readyz, /metrics, /v1/logs, /v1/parts and {PREFIX}NAME."
            )
        body = b""
        if request.method not in _READING:
            body = await self._bodies.receive(request, receive)
        with self._bodies.held(body):
            return await self._api.answer(request, body)

    async def _page(self, request: Request) -> HttpAnswer | None:
        """What has a path of its own."""
        answer: HttpAnswer | None = None
        match request.path:
            case "/healthz":
                answer = _probed(self._server.why_failed())
            case "/readyz":
                why = self._server.why_not_ready()
                if why is not None and self._permissions.denied(request.headers, Access.READ) is not None:
                    why = "it is not ready"  # names, addresses and errors are for callers who may read
                answer = _probed(why)
            case "/metrics":
                denied = self._permissions.denied(request.headers, Access.READ)
                if denied is not None:
                    return denied.answer()
                answer = HttpAnswer(
                    HTTPStatus.OK, {"Content-Type": CONTENT_TYPE_LATEST}, await self._calls(generate_latest)
                )
            case "/v1/openapi.json":
                document = msgspec.json.encode(openapi(version("strandline")))
                answer = HttpAnswer(HTTPStatus.OK, {"Content-Type": "application/json"}, document)
        if answer is not None and request.method not in _READING:
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD are served here.", {"Allow": "GET, HEAD"})
        return answer


def _methods_of(path: str) -> str:
    """The methods of a path, other than that of a stream; empty if nothing is there."""
    if path in _PAGES:
        return ", ".join(_READING)
    methods = {route.method for route, _ in matched(path)}
    return ", ".join(sorted(methods.union(_READING) if "GET" in methods else methods))


def _probed(why: str | None) -> HttpAnswer:
    status = HTTPStatus.OK if why is None else HTTPStatus.SERVICE_UNAVAILABLE
    headers = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
    return HttpAnswer(status, headers, f"{why or 'ok'}\n".encode())


@contextlib.contextmanager
def served(settings: Settings, server: Server, opening: Opening) -> Iterator[str]:
    """Serve the port of a server during the block; gives its address. Port 0 is a free one."""
    from strandline.serve.http.server import serving  # needs the extra 'http', which other commands do without

    permissions = Permissions(opening.server, Origins(settings.http.origins))
    root = None
    if settings.streams is not None:
        given = settings.streams
        options = opening.options(given.options)
        root = StreamRoot(given.root, options=options) if options else StreamRoot(given.root)
    app = ServerApp(server, root, permissions, opening.env)
    security, tls = settings.security, None
    if security.cert is not None and security.key is not None:
        tls = ServerTls(security.cert, security.key, security.client_ca)

    def renew(stop: threading.Event) -> float:
        del stop
        permissions.reread()
        if tls is not None:
            tls.renew()
        return REREAD_SECONDS

    host, port = settings.http.listen.place
    with serving(app, host, port, tls=tls) as port:
        rounds = server.add_rounds(PartName("http", "security"), renew)
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"{'http' if tls is None else 'https'}://{shown}:{port}"
        finally:
            rounds.stop()
