"""The HTTP server: uvicorn, and limits on headers and on silent connections, which uvicorn does not have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, Final, cast

from strandline.errors import MissingExtra, StorageError
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.requests import App
from strandline.serve.http.tls import ServerTls

try:
    import uvicorn
    from httptools import HttpParserUpgrade, HttpRequestParser
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError as _error:  # pragma: no cover - the extra is there in development
    raise MissingExtra("The HTTP server needs the extra 'http': pip install 'strandline[http]'.") from _error

_BACKLOG: Final = 2048
_KEEP_ALIVE: Final = 65
_DRAIN_SECONDS: Final = 10


class _Parser:
    """A parser of requests that ignores offers of an upgrade, as a server may (RFC 9110, 7.8).

    Clients in Java offer HTTP/2 with each request without TLS. httptools stops behind the headers of such a request,
    and its body would be lost: so the request is parsed once more, without the offer.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded
        self._parser = self._new()

    def _new(self) -> Any:
        parser = HttpRequestParser(self._guarded)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """Parse what has come; ``HttpParserUpgrade`` only behind a CONNECT, which is nothing without its upgrade."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as stopped:
                head = self._guarded.head_without_offer
                if head is None:
                    raise
                rest = rest[stopped.args[0] :]
                self._parser = self._new()
                self._parser.feed_data(head)
            else:
                return


class Guarded(HttpToolsProtocol):
    """The HTTP protocol of a connection, within limits of header bytes, header time and number of connections."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _in_headers = True
    _header_bytes = 0
    head_without_offer: bytes | None = None
    """Of a request that offers an upgrade: its line and its headers without the offer. It is parsed by these again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self.parser = cast("HttpRequestParser", _Parser(self))

    def connection_made(self, transport: Any) -> None:
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_timer()
        self._takes_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The caller takes no more: unless it goes on in time, the connection ends, with what is still to be sent."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller goes on."""
        self._takes_again()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless its headers are too large."""
        if self._in_headers:
            self._expect_headers()
            room = self.limits.header_bytes - self._header_bytes
            self._header_bytes += len(data)
            if len(data) > room and b"\r\n\r\n" not in data[:room]:
                self._refuse_headers()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_headers, self.head_without_offer = True, None
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Those behind a body are dropped: they decide nothing, and no limit is on their number."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers of a request have come."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self.head_without_offer = self._without_offer()
            return
        self._in_headers, self._header_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body of a request has come."""
        if self.head_without_offer is not None:
            return
        super().on_message_complete()
        self._in_headers = True

    def _without_offer(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        return line + b"".join(kept) + b"\r\n"

    def _expect_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _takes_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.abort()

    def _refuse_headers(self) -> None:
        self._stop_timer()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()


def _server_of(app: App, limits: HttpLimits, tls: ServerTls | None) -> uvicorn.Server:
    """A uvicorn server for an application; it logs nothing by itself, and installs no signal handlers in a thread."""
    config = uvicorn.Config(
        app,
        http=type("Guarded", (Guarded,), {"limits": limits}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=True,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    config.load()
    logging.getLogger("uvicorn").handlers[:] = [logging.NullHandler()]  # what callers send wrongly is told to them
    config.ssl = None if tls is None else tls.context
    return uvicorn.Server(config)


@contextlib.contextmanager
def serving(
    app: App, host: str, port: int, limits: HttpLimits | None = None, *, tls: ServerTls | None = None
) -> Iterator[int]:
    """Serve an application in a thread during the block; gives the port. Port 0 is a free one."""
    server = _server_of(app, limits or HttpLimits(), tls)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StorageError(f"HTTP cannot be served on {host}:{port}: {error}. Give another address.") from error
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="strandline-http", daemon=True)
    with listening:
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
