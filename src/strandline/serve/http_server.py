"""An HTTP server for a WSGI application, in a bounded number of threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from strandline.errors import StorageError

MOST: Final = 8
"""Connections at a time, each with a thread. A further one ends the oldest, of those without a request first."""

_SILENT_SECONDS: Final = 10.0
"""Longest time that a connection may send or read nothing."""

_ROOM_SECONDS: Final = 1.0
"""Longest wait for the thread of the connection that was ended."""


@final
class _Request(WSGIRequestHandler):
    """One connection, with one request; logs nothing."""

    timeout = _SILENT_SECONDS
    server: HttpServer

    def parse_request(self) -> bool:
        """Whether there is a request to answer; no answer is made for a connection that was ended."""
        return super().parse_request() and self.server.has_asked(self.request)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        del format, args


@final
class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves an application. Connections that stay silent cannot keep other callers out, nor take all threads."""

    daemon_threads = True
    request_queue_size = 128  # with fewer, a caller that arrives in a crowd waits for seconds

    def __init__(self, host: str, port: int, app: WSGIApplication) -> None:
        """Listen at an address; ``OSError`` if that fails."""
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._places = threading.Semaphore(MOST)
        self._lock = threading.Lock()
        self._open: dict[Any, bool] = {}
        """Sockets of open connections, the oldest first, and whether each has sent its request."""
        super().__init__((str(place[0]), port), _Request)
        self.set_app(app)

    def server_bind(self) -> None:
        """Listen, without the look at a name server for the own name that the base class takes."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; at the limit, end the oldest first."""
        if not self._places.acquire(blocking=False):
            self._end_oldest()
            if not self._places.acquire(timeout=_ROOM_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = False
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self._places.release()

    def has_asked(self, request: Any) -> bool:
        """Note that a connection has sent its request; returns False if it was ended."""
        with self._lock:
            if request in self._open:
                self._open[request] = True
            return request in self._open

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that leaves early is no error of the server."""
        del request, client_address

    def _end_oldest(self) -> None:
        with self._lock:
            oldest = min(self._open, key=self._open.__getitem__, default=None)
            self._open.pop(oldest, None)
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just ended
                oldest.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(app: WSGIApplication, place: tuple[str, int], *, what: str) -> Iterator[None]:
    """Serve an application at a host and port during the block; ``what`` it is begins the error if that fails."""
    host, port = place
    try:
        server = HttpServer(host, port, app)
    except OSError as error:
        raise StorageError(f"{what} cannot be served on {host}:{port}: {error}. Give another address.") from error
    threading.Thread(target=server.serve_forever, name="strandline-http", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
