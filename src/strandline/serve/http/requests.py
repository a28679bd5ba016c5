"""Requests of an ASGI server: their parts, and their bodies within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from strandline.errors import InvalidInput
from strandline.serve.http.limits import HttpLimits

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_PARAMETERS: Final = 32
_DECIDING: Final = ("stream-", "producer-", "idempotency-key", "ce-", "content-", "authorization", "host")
"""How the names of headers begin of which one request may not have two."""


class TooLarge(InvalidInput):
    """The body is over the limit; nothing was appended."""


class TooSlow(InvalidInput):
    """The body did not come in time; nothing was appended."""


class Busy(InvalidInput):
    """The server has as much to do as it takes at a time; nothing was changed. Try again."""


class Gone(Exception):
    """The caller has left."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request. Names of headers are in lower case."""

    method: str
    path: str
    raw_path: bytes
    headers: Mapping[str, str]
    query: Mapping[str, list[str]]
    scheme: str = "http"

    @classmethod
    def of(cls, scope: Scope) -> Request:
        """The request in an ASGI scope; ``InvalidInput`` if a header that decides something is there twice."""
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            if name in headers and name.startswith(_DECIDING):
                raise InvalidInput(f"The request has the header {name} twice: send it once.")
            headers[name] = value.decode("latin-1").strip()
        query: dict[str, list[str]] = {}
        try:
            pairs = parse_qsl(
                scope["query_string"].decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_PARAMETERS,
            )
        except ValueError as error:
            raise InvalidInput(f"The query of the address cannot be read: {error}.") from error
        for name, value in pairs:
            query.setdefault(name, []).append(value)
        return cls(
            scope["method"], scope["path"], scope.get("raw_path", b""), headers, query, scope.get("scheme", "http")
        )

    def only(self, name: str) -> str | None:
        """The value of a query parameter, None without it; ``InvalidInput`` if it is there twice, or empty."""
        found = self.query.get(name)
        if found is None:
            return None
        if len(found) > 1 or not found[0]:
            raise InvalidInput(f"The query parameter {name} is there {'twice' if found[0] else 'without a value'}.")
        return found[0]

    @property
    def closes(self) -> bool:
        """Whether the request closes the stream."""
        return self.headers.get("stream-closed", "").lower() == "true"


class Bodies:
    """The bodies that are received or appended, and those that are sent, within the limits. Used on the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._held = 0
        self._sent = 0

    @contextmanager
    def sending(self, body: bytes) -> Iterator[None]:
        """Count a body that is sent until the block ends: its reader may be slow. ``Busy`` at the limit."""
        if self._sent and self._sent + len(body) > self._limits.memory_bytes:
            raise Busy("The server holds as many answers for slow readers as it may. Try again.")
        self._sent += len(body)
        try:
            yield
        finally:
            self._sent -= len(body)

    @contextmanager
    def held(self, body: bytes) -> Iterator[bytes]:
        """Count a body until the block ends; the body was received by :meth:`receive`."""
        try:
            yield body
        finally:
            self._held -= len(body)

    async def receive(self, request: Request, receive: Receive) -> bytes:
        """The whole body, counted until :meth:`held` ends.

        ``TooLarge`` as soon as it is, ``TooSlow`` at the limit of time, ``Busy`` when the bodies of all requests take
        too much, ``Gone`` if the caller leaves before the end.
        """
        announced = request.headers.get("content-length")
        if announced is not None:
            self._check(int(announced) if announced.isdecimal() else self._limits.body_bytes + 1)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    part = _part(message)
                    self._check(size + len(part), len(part))
                    parts.append(part)
                    size += len(part)
                    self._held += len(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            self._held -= size
            raise TooSlow(
                f"The body did not come within {self._limits.body_seconds:g} s; nothing was appended. Send it faster, "
                "or in parts."
            ) from None
        except BaseException:
            self._held -= size
            raise

    def _check(self, size: int, more: int = 0) -> None:
        if self._held + more > self._limits.memory_bytes:
            raise Busy("The server holds as many bodies of appends as it may; nothing was appended. Try again.")
        if size > self._limits.body_bytes:
            raise TooLarge(
                f"A body of more than {self._limits.body_bytes:,} bytes is over the limit of this server; nothing was "
                "appended. Append it in parts."
            )


def _part(message: Message) -> bytes:
    """The bytes of a message; ``Gone`` if the caller has left."""
    if message["type"] == "http.disconnect":
        raise Gone
    found: bytes = message.get("body", b"")
    return found
