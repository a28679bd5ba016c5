"""A blocking NATS JetStream connection, with an event loop in its own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import UUID, uuid5

from strandline.errors import (
    Conflict,
    DiskFull,
    InvalidInput,
    MissingExtra,
    NotFound,
    StorageError,
    TransientStorageError,
)
from strandline.model.addresses import as_address, refuse_credentials
from strandline.storage.env import Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.metrics import NATS_BROKEN_HEADERS

T = TypeVar("T")

_IDENTITIES: Final = UUID("5f0a3c56-6a0e-5c0e-9f5b-0d6a4f1a7c11")
"""UUID namespace of stream identities."""
_MESSAGE: Final = "$JS.ACK."
"""How the reply subject of a stream's message begins; answers of the server itself have none."""
_VERSION: Final = b"NATS/1.0"
_END: Final = b"\r\n"
_SLACK: Final = 2.0
"""Extra seconds that a caller waits, so that it gets the loop's more precise error."""

_STREAM_NOT_FOUND: Final = 10059
NO_MESSAGE: Final = 10037
_WRONG_LAST: Final = (10071, 10164)
_NO_ROOM: Final = (10077, 10023, 10047)
_TOO_LARGE: Final = 10054
NAME_TAKEN: Final = 10058
NANOSECONDS: Final = 1_000_000_000


def client() -> Any:
    """The module ``nats``."""
    try:
        import nats
    except ImportError as error:
        raise MissingExtra("NATS buckets need the extra 'nats': pip install 'strandline[nats]'.") from error
    return nats


class MessageHeaders(dict[str, str]):
    """The headers of a message: the last value of each name; bytes that are not UTF-8 are surrogates (PEP 383)."""

    def __init__(self, lines: Sequence[tuple[str, bytes]], *, is_broken: bool) -> None:
        super().__init__((name, value.decode(errors="surrogateescape")) for name, value in lines)
        self.lines = list(lines)
        """All headers in their order, with the bytes of their values; a name may be there several times."""
        self.is_broken = is_broken
        """Whether something in the block is no header, and is missing here."""


def parse_headers(block: bytes) -> MessageHeaders:
    r"""The headers in a block; never an error, since any client may have written it.

    >>> parse_headers(b"NATS/1.0 404 No Messages\r\n\r\n")
    {'Status': '404', 'Description': 'No Messages'}
    >>> found = parse_headers(b"NATS/1.0\r\na: 1\r\nno header\r\na: \xff\r\n\r\n")
    >>> found.lines, found.is_broken
    ([('a', b'1'), ('a', b'\xff')], True)
    """
    first, _, rest = block.partition(_END)
    lines: list[tuple[str, bytes]] = []
    is_broken = not first.startswith(_VERSION) or not block.endswith(_END + _END)
    code, _, words = first.removeprefix(_VERSION).strip().partition(b" ")
    if code.isdigit():
        lines.append(("Status", code))
        if words.strip():
            lines.append(("Description", words.strip()))
    elif code:
        is_broken = True
    for line in rest.split(_END):
        name, colon, value = line.partition(b":")
        if parsed := _name(name) if colon else "":
            lines.append((parsed, value.strip(b" \t")))
        elif line:
            is_broken = True
    return MessageHeaders(lines, is_broken=is_broken)


def _name(name: bytes) -> str:
    """The name of a header; empty if it is none."""
    try:
        text = name.strip(b" \t").decode()
    except UnicodeDecodeError:
        return ""
    return "" if any(letter.isspace() for letter in text) else text


class _Subject(bytes):
    """A subject, whose bytes need not be UTF-8: those that are not are kept as surrogates (PEP 383)."""

    def decode(self, encoding: str = "utf-8", errors: str = "surrogateescape") -> str:
        return super().decode(encoding, errors)


def _tolerant_client(nats: Any) -> Any:
    """A client of the library that survives messages with any subject and headers: its own one stops reading."""

    class Client(nats.NATS):  # type: ignore[misc]
        def _build_message(self, sid: int, subject: bytes, *rest: Any) -> Any:
            return super()._build_message(sid, _Subject(subject), *rest)

        async def _process_headers(self, headers: bytes | None) -> MessageHeaders | None:
            if not headers:
                return None
            found = parse_headers(headers)
            if found.is_broken:
                NATS_BROKEN_HEADERS.inc()
            return found

    return Client()


class NoResponder(TransientStorageError):
    """No responder for the subject: no such stream or consumer, or JetStream is down."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """Identity of a stream, and its lowest and highest sequence numbers."""

    identity: UUID
    first: int
    last: int


def identity(stream: str, created: str) -> UUID:
    """The identity of a stream, from its name and creation time in nanoseconds: differs if it is created again.

    >>> one = identity("KV_routes", "2026-01-01T00:00:00.123456789Z")
    >>> one == identity("KV_routes", "2026-01-01T01:00:00.123456789+01:00")
    True
    >>> one == identity("KV_routes", "2026-01-01T00:00:00.12345678Z")
    False
    """
    whole, dot, rest = created.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))] if dot else ""
    zone = rest[len(digits) :] if dot else ""
    seconds = int(datetime.fromisoformat(whole + zone).astimezone(UTC).timestamp())
    return uuid5(_IDENTITIES, f"{stream}/{seconds}{digits.ljust(9, '0')}")


def granted(answer: dict[str, Any], what: str, *, unless: int | None = None) -> dict[str, Any]:
    """The server's response; empty for its error ``unless``, and any other one is raised."""
    error = answer.get("error")
    if error is None:
        return answer
    if unless is not None and error.get("err_code") == unless:
        return {}
    raise _refusal(error, what)


def _refusal(error: Mapping[str, Any], what: str) -> StorageError | InvalidInput:
    code, kind = error.get("code"), error.get("err_code")
    words = f"{what} failed at NATS: {error.get('description', 'no reason given')} ({kind})"
    if kind in _WRONG_LAST:
        return Conflict(f"{words}: the key was changed meanwhile; read it again. Nothing was changed.")
    if kind in _NO_ROOM:
        return DiskFull(f"{words}: make room in the bucket or raise its limit, and try again.")
    if kind == _TOO_LARGE:
        return InvalidInput(f"{words}: the value is larger than the bucket allows.")
    if kind == _STREAM_NOT_FOUND:
        return NotFound(f"{words}: there is no such bucket; connect with create=True to create it.")
    kinds = {404: NotFound, 500: TransientStorageError, 503: TransientStorageError}
    return kinds.get(code or 0, StorageError)(f"{words}.")


@bound_to_process()
class NatsConnection:
    """A thread-safe connection. Every call returns or raises within about ``timeout`` seconds."""

    def __init__(self, servers: Sequence[str], *, timeout: float, env: Env, options: Mapping[str, Any]) -> None:
        """Connect; ``TransientStorageError`` if no server answers in time."""
        for server in map(as_address, servers):
            refuse_credentials(
                server if "://" in server else f"nats://{server}",
                "give them by options (user and password, token, or user_credentials, the path of a file)",
            )
        self._nats = client()
        self.url = servers[0]
        self.timeout = timeout
        self.env = env
        self.closed = False
        self._lost_at: float | None = None
        self.generation = 0
        self._wakers: set[Callable[[], None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="strandline-nats", daemon=True)
        self._thread.start()
        self._client: Any = None
        try:
            self._client = self._connect(servers, options)
        except BaseException:
            self.closed = True
            self._stop()
            raise
        self._origin = Origin(f"The connection to {self.url}", self)

    def _connect(self, servers: Sequence[str], options: Mapping[str, Any]) -> Any:
        async def connect() -> Any:
            settings = {
                "name": "strandline",
                "max_reconnect_attempts": -1,
                "reconnect_time_wait": 0.25,
                "ping_interval": 10,
                **options,
                # No buffering across reconnects: a change that was given up must not be applied minutes later.
                "pending_size": -1,
                "disconnected_cb": self._on_disconnect,
                "reconnected_cb": self._on_reconnect,
                "error_cb": _on_error,
            }
            connected = _tolerant_client(self._nats)
            await asyncio.wait_for(connected.connect(list(servers), **settings), self.timeout)
            return connected

        return self.run(connect(), f"Connecting to {', '.join(servers)}")

    async def _on_disconnect(self) -> None:
        if self._lost_at is None:
            self._lost_at = self.env.clock.monotonic()
        # The client would send its pending data after the reconnect, and has no call to drop it.
        if self._client is not None:
            self._client._pending, self._client._pending_data_size = [], 0  # noqa: SLF001

    async def _on_reconnect(self) -> None:
        self._lost_at = None
        self.generation += 1
        for wake in list(self._wakers):
            wake()

    def lost_for(self) -> float:
        """Seconds since the connection was lost; 0 while connected."""
        since = self._lost_at
        return 0.0 if since is None else self.env.clock.monotonic() - since

    def run(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine on the loop and wait for it."""
        if self.closed:
            work.close()
            raise InvalidInput(f"{what} failed: the bucket is closed; connect again.")
        errors = self._nats.errors
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.timeout + _SLACK)
        except errors.NoRespondersError as error:
            raise NoResponder(f"{what} failed: NATS has no responder for it; try again.") from error
        except errors.MaxPayloadError as error:
            raise InvalidInput(f"{what} failed: the value is larger than the server allows.") from error
        except (errors.AuthorizationError, errors.InvalidUserCredentialsError) as error:
            raise StorageError(f"{what} failed: NATS refuses this user ({error}).") from error
        except (errors.TimeoutError, TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise TransientStorageError(f"{what} failed: no answer from NATS within {self.timeout} s.") from error
        except errors.OutboundBufferLimitError as error:  # no buffering: a write must not be applied later
            raise TransientStorageError(f"{what} failed: there is no connection to NATS now; try again.") from error
        except (errors.Error, OSError) as error:
            raise TransientStorageError(f"{what} failed: {error or type(error).__name__}; try again.") from error

    async def request(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """A request to the server, on the loop; the response may hold an ``error``."""
        answer = await self._client.request(subject, payload, timeout=self.timeout, headers=headers)
        parsed: dict[str, Any] = json.loads(answer.data)
        return parsed

    async def api(self, name: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A JetStream API request, on the loop; the response may hold an ``error``."""
        return await self.request(f"$JS.API.{name}", b"" if body is None else json.dumps(body).encode())

    def ask(
        self, name: str, what: str, body: Mapping[str, Any] | None = None, *, unless: int | None = None
    ) -> dict[str, Any]:
        """A JetStream API request, :func:`granted`."""
        return granted(self.run(self.api(name, body), what), what, unless=unless)

    def state(self, stream: str, what: str) -> StreamState:
        """The state of a stream; ``NotFound`` if it does not exist."""
        answer = self.ask(f"STREAM.INFO.{stream}", what)
        state = answer["state"]
        return StreamState(identity(stream, answer["created"]), int(state["first_seq"]), int(state["last_seq"]))

    def last(self, stream: str, subjects: Sequence[str], what: str) -> int:
        """The highest retained sequence number of these subjects; 0 without any."""

        async def highest() -> list[dict[str, Any]]:
            questions = (self.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}) for subject in subjects)
            return list(await asyncio.gather(*questions))

        found = [granted(answer, what, unless=NO_MESSAGE) for answer in self.run(highest(), what)]
        return max((int(answer["message"]["seq"]) for answer in found if answer), default=0)

    def listen(self, inbox: str, on_message: Callable[[Any], Awaitable[None]], wake: Callable[[], None]) -> Any:
        """Call ``on_message`` on the loop with every message to the inbox, and ``wake`` after a reconnect."""
        # Without client limits: pulls bound the messages, and a dropped message would be a gap.
        listening = self._client.subscribe(inbox, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0)
        subscription = self.run(listening, "Subscribing")
        self._wakers.add(wake)
        return subscription

    def unlisten(self, subscription: Any, wake: Callable[[], None]) -> None:
        """Unsubscribe."""
        self._wakers.discard(wake)
        self.run(subscription.unsubscribe(), "Unsubscribing")

    def inbox(self) -> str:
        """A unique subject."""
        name: str = self._client.new_inbox()
        return name

    def post(self, subject: str, body: Mapping[str, Any], reply: str) -> None:
        """Send without waiting. A lost message shows only as a missing reply."""
        if self.closed:
            return

        async def publish() -> None:
            with contextlib.suppress(self._nats.errors.Error, OSError):
                await self._client.publish(subject, json.dumps(body).encode(), reply=reply)

        asyncio.run_coroutine_threadsafe(publish(), self._loop)

    @property
    def cluster(self) -> str:
        """The name of the servers' cluster; empty for a single server."""
        return str(getattr(self._client, "_server_info", {}).get("cluster", ""))

    def next_sequence(self, stream: str, since: int) -> int | None:
        """The sequence of the first retained message from a sequence on; None if there is none."""
        body = {"seq": since, "next_by_subj": ">"}
        answer = self.ask(f"STREAM.MSG.GET.{stream}", f"Reading stream {stream}", body, unless=NO_MESSAGE)
        return int(answer["message"]["seq"]) if answer else None

    def close(self) -> None:
        """Close the connection and its thread. Idempotent, and allowed in a forked child."""
        if self.closed:
            return
        with contextlib.suppress(StorageError):
            self.run(self._client.close(), "Closing")
        self.closed = True
        for wake in list(self._wakers):
            wake()
        self._stop()

    def _stop(self) -> None:
        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(_SLACK)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SLACK)
        if not self._thread.is_alive():
            self._loop.close()


async def _on_error(_: Exception) -> None:
    """Keep the client from logging errors: each caller gets its own."""
