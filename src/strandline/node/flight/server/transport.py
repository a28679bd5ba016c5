"""A gRPC server that bounds the memory that callers can make it hold, also before they are authenticated.

Until a call is admitted, gRPC receives no more of it than a window of 64 KiB. A message above the limit is refused by
its length, before it is received, and a compressed one by its header.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final, final
from urllib.parse import unquote

from strandline.errors import MissingExtra, StorageError
from strandline.node.flight.security import ServerSecurity
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.wire.errors import Refusal
from strandline.storage.connections import peer_name
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)

_VERBOSITY: Final = "GRPC_VERBOSITY"
_IDENTITY_ONLY: Final = 1
"""The set of accepted compression algorithms: none."""

_MESSAGE_SLACK: Final = 64 << 10
"""Bytes that a message may have besides its content."""

_STREAMS: Final = 128
"""Calls per connection; further ones wait at the client."""

_METADATA_BYTES: Final = 16 << 10
_PING_SECONDS: Final = (30, 20)
"""Keep-alive interval and timeout of a connection."""

_REFUSING: Final = 32
"""Threads beyond the limit of calls, for calls that are refused."""

_ANY: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - the names of all addresses
_LOOK: Final = 0.25
_SPARE: Final = 30.0
"""Seconds after which an idle thread ends."""


def _grpc() -> Any:
    """The library, quiet unless ``GRPC_VERBOSITY`` is set: malformed requests would fill the node's log."""
    is_configured = _VERBOSITY in os.environ or "grpc" in sys.modules
    if not is_configured:
        os.environ[_VERBOSITY] = "NONE"
    try:
        import grpc  # waits for a thread that is importing it, which looking into sys.modules does not
    except ImportError as error:
        raise MissingExtra("Serving a node needs the extra 'server': pip install 'strandline[server]'.") from error
    finally:
        if not is_configured:
            os.environ.pop(_VERBOSITY, None)
    return grpc


class CallCancelled(Exception):
    """The caller has ended the call, or the call was ended."""


@final
class GrpcCall:
    """One call: its headers, its messages, and how long the node has waited for it. For one thread, except ``end``."""

    def __init__(self, method: str, requests: Iterator[bytes], context: Any, env: Env) -> None:
        self.method = method
        self._requests = requests
        self._context = context
        self._clock = env.clock
        self._since: float | None = None

    @property
    def headers(self) -> Mapping[str, list[str]]:
        """The text headers of the call."""
        found: dict[str, list[str]] = {}
        for name, value in self._context.invocation_metadata():
            if isinstance(value, str):
                found.setdefault(name, []).append(value)
        return found

    @property
    def connection(self) -> str:
        """Address and port of the caller."""
        return parse_peer(self._context.peer())

    @property
    def address(self) -> str:
        """The caller's address."""
        return self.connection.rpartition(":")[0]

    @property
    def identity(self) -> str | None:
        """The first name in the caller's certificate, if it showed one."""
        names = self._context.peer_identities()
        return None if not names else names[0].decode(errors="replace")

    @property
    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        return bool(self._context.is_active())

    def receive(self, *, is_limited: bool = True) -> bytes | None:
        """The next message, or None at the end; ``CallCancelled`` if the caller cancelled.

        Without ``is_limited`` the message may come at any time: the call is not ended for taking long.
        """
        with self.waiting() if is_limited else contextlib.nullcontext():
            try:
                message: bytes = next(self._requests)
            except StopIteration:
                return None
            except _grpc().RpcError as error:
                raise CallCancelled from error
        return message

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for the caller."""
        self._since = self._clock.monotonic()
        try:
            yield
        finally:
            self._since = None

    def waited(self, now: float) -> float:
        """Seconds that the node has waited for the caller by now."""
        since = self._since
        return 0.0 if since is None else now - since

    def end(self) -> None:
        """End the call, from any thread; a thread that waits for its caller gets ``CallCancelled``."""
        with contextlib.suppress(Exception):  # it may have ended already
            self._context.cancel()

    def refuse(self, refusal: Refusal) -> None:
        """End the call with an error for its caller."""
        self._context.set_trailing_metadata(refusal.trailers)
        self._context.set_code(_grpc().StatusCode[refusal.code])
        self._context.set_details(refusal.sentence)


Serve = Callable[[GrpcCall], Generator[bytes, None, None]]
"""Serves a call: gives its answers one after another, and raises nothing."""


@final
class GrpcServer:
    """Serves the methods of one service until it is stopped, each call in its own thread."""

    def __init__(
        self,
        host: str,
        port: int,
        service: str,
        serve: Mapping[str, Serve],
        *,
        security: ServerSecurity,
        limits: ServerLimits,
        env: Env,
    ) -> None:
        """Listen at every address of a host, at a free port for 0; ``StorageError`` if that fails."""
        grpc = _grpc()
        self._limits = limits
        self._env = env
        self._calls: set[GrpcCall] = set()
        self._stopped: threading.Event | None = None
        self._renewed: Any = None
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(self._handler(name, one)) for name, one in serve.items()
        }
        self._server = grpc.server(_DaemonThreads(limits.calls + _REFUSING), options=_options(limits))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.port = port
        addresses = _addresses(host)
        plain = {address.strip("[]") for address in addresses}
        self.hosts = frozenset() if plain & _ANY else frozenset(plain)
        """The own addresses that it listens at; none for all."""
        try:
            credentials = None if security.certificate is None else self._credentials(security)
            for address in addresses:
                place = f"{address}:{self.port}"
                if credentials is None:
                    self.port = self._server.add_insecure_port(place)
                else:
                    self.port = self._server.add_secure_port(place, credentials)
        except (RuntimeError, ValueError) as error:
            raise StorageError(
                f"The node cannot listen at {host}:{port} ({str(error)[:200]}): another program has that port, or the "
                "certificate does not match its key, or it is not an address of this machine."
            ) from error
        self._server.start()

    def _credentials(self, security: ServerSecurity) -> Any:
        is_known = security.client_roots is not None
        return _grpc().dynamic_ssl_server_credentials(_certificates(security), self._take_renewed, is_known)

    def renew(self, security: ServerSecurity) -> None:
        """Use these certificates for new connections; open ones go on. gRPC keeps the former if it refuses these."""
        if security.certificate is not None:
            self._renewed = _certificates(security)

    def _take_renewed(self) -> Any:
        """The certificates since the last connection; None if they are the same. Called by gRPC for each one."""
        renewed, self._renewed = self._renewed, None
        return renewed

    def _handler(self, method: str, serve: Serve) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        def handle(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            call = GrpcCall(method, requests, context, self._env)
            self._calls.add(call)
            try:
                with contextlib.closing(serve(call)) as messages:
                    for message in messages:
                        with call.waiting():  # sending counts as waiting, until the next message is requested
                            yield message
            finally:
                self._calls.discard(call)

        return handle

    def end_stuck(self) -> None:
        """End calls whose callers keep the node waiting for too long."""
        now = self._env.clock.monotonic()
        for call in list(self._calls):
            if call.waited(now) > self._limits.idle_seconds:
                _LOGGER.info("A call of %s kept the node waiting, and was ended.", call.address)
                call.end()

    def stop(self, grace: float) -> threading.Event:
        """Accept no more calls, and end the running ones after ``grace`` seconds. Returns an event for that."""
        if self._stopped is None:
            self._stopped = self._server.stop(grace)
        return self._stopped


def _options(limits: ServerLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second server at the same port is a mistake
        ("grpc.max_receive_message_length", limits.message_bytes + _MESSAGE_SLACK),
        ("grpc.max_send_message_length", -1),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", int(limits.silent_seconds * 1000)),
        ("grpc.max_connection_idle_ms", int(limits.connection_idle_seconds * 1000)),
        # A window that grows with the traffic would take memory before the caller is authenticated.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", _PING_SECONDS[0] * 1000),
        ("grpc.keepalive_timeout_ms", _PING_SECONDS[1] * 1000),
    ]


def _addresses(host: str) -> list[str]:
    """The addresses of a host that this machine has. gRPC accepts if one of them works; this checks each of them.

    >>> _addresses("127.0.0.1"), _addresses("[::1]")
    (['127.0.0.1'], ['[::1]'])
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return [host]
    found: list[str] = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, (name, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as tried:
                tried.bind((name, 0))  # the machine may lack the address family, such as IPv6
                found.append(f"[{name}]" if family == socket.AF_INET6 else str(name))
    return list(dict.fromkeys(found)) or [host]


def _certificates(security: ServerSecurity) -> Any:
    return _grpc().ssl_server_certificate_configuration(
        [(security.key, security.certificate)], root_certificates=security.client_roots
    )


def parse_peer(peer: str) -> str:
    """Address and port of a caller; IPv4 addresses that are mapped into IPv6 are unmapped.

    >>> parse_peer("ipv4:127.0.0.1:7"), parse_peer("ipv6:%5B::ffff:10.0.0.1%5D:7"), parse_peer("ipv6:[::1]:7")
    ('127.0.0.1:7', '10.0.0.1:7', '::1:7')
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return peer_name(host.strip("[]"), port)


def watch(owner: object, look: Callable[[Any], None]) -> threading.Event:
    """Call ``look`` with ``owner`` a few times a second, until the returned event is set or the owner is collected."""
    stop, watched = threading.Event(), weakref.ref(owner)

    def run() -> None:
        while not stop.wait(_LOOK):
            found = watched()
            if found is None:
                return
            try:
                look(found)
            except Exception:
                _LOGGER.exception("The check for calls that keep the node waiting failed; it is repeated.")
            del found

    threading.Thread(target=run, name="strandline-flight-watch", daemon=True).start()
    return stop


class _DaemonThreads(Executor):
    """Runs calls in up to ``most`` daemon threads, which do not delay the end of the process; further calls wait."""

    def __init__(self, most: int) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._left = most
        """Threads that may still be started."""
        self._spare = 0
        """Idle threads, less the queued jobs."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        with self._lock:
            is_new = self._spare <= 0 < self._left
            self._left -= is_new
            self._spare -= not is_new
        if is_new:
            threading.Thread(target=self._work, name="strandline-flight-call", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, job = self._jobs.get(timeout=_SPARE)
            except Empty:
                with self._lock:
                    if self._spare > 0:
                        self._spare -= 1
                        self._left += 1
                        return
                continue  # a job was queued just now
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by the future
                future.set_exception(error)
            del future, job
            with self._lock:
                self._spare += 1
