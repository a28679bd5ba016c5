"""One HTTP request with a deadline for all of it, a limit of bytes, and no redirect to another server."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from strandline.errors import InvalidInput

_PORTS: Final = {"http": 80, "https": 443}


class ServerName(NamedTuple):
    """The server of an address."""

    scheme: str
    host: str
    port: int | None


def server_of(url: str) -> ServerName:
    """Scheme, host and port of an address; ``InvalidInput`` if it has an impossible host or port.

    >>> server_of("HTTPS://Registry.example/schemas") == server_of("https://registry.example:443")
    True
    """
    try:
        parts = urllib.parse.urlsplit(url)
        return ServerName(parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme))
    except ValueError as error:
        raise InvalidInput("The address of a server has no valid host or port: write http://host:port.") from error


class _SameServer(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if server_of(newurl) != server_of(req.full_url):
            raise OSError(f"it redirects to another server ({urllib.parse.urlsplit(newurl).netloc[:100]})")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def http_get(url: str, *, seconds: float, most_bytes: int) -> bytes:
    """The answer to a request, up to one byte more than ``most_bytes``.

    ``urllib.error.HTTPError`` for a status of failure, ``OSError`` or ``HTTPException`` if the request failed, and
    ``TimeoutError`` if it is not done in time: a timeout of sockets would begin anew with each byte that arrives.
    """
    watched = _Watched()
    opener = urllib.request.build_opener(_SameServer(), watched)
    request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310 - callers check the scheme

    def fetch() -> bytes:
        with opener.open(request, timeout=seconds) as answer:
            data: bytes = answer.read(most_bytes + 1)
            return data

    return _within(seconds, fetch, watched.opened)


def _within(seconds: float, work: Callable[[], bytes], opened: list[socket.socket]) -> bytes:
    """The result of the work; after the deadline ``TimeoutError``, and its sockets are shut, which ends its thread."""
    done: list[tuple[bytes | None, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            done.append((None, error))

    thread = threading.Thread(target=run, name="strandline-http", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        for each in list(opened):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        raise TimeoutError(f"no whole answer came within {seconds:g} s")
    data, error = done[0]
    if error is not None:
        raise error
    return data or b""


class _Watched(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Notes the sockets of its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[socket.socket] = []

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._noting(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._noting(http.client.HTTPSConnection), req)

    def _noting(self, base: type[http.client.HTTPConnection]) -> Callable[..., Any]:
        opened = self.opened

        class Noting(base):  # type: ignore[misc, valid-type]
            def connect(self) -> None:
                super().connect()
                opened.append(self.sock)

        return Noting
