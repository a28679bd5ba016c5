"""The Arrow Flight server of a node."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final, final

from strandline.errors import StrandlineError
from strandline.formats.node.ticket import SpanTicket
from strandline.node.flight.security import ServerSecurity, check_listening
from strandline.node.flight.server.actions import NodeService
from strandline.node.flight.server.admission import Admission
from strandline.node.flight.server.limits import ServerLimits, share_heaps
from strandline.node.flight.server.methods import FlightMethods
from strandline.node.flight.server.transport import GrpcServer, watch
from strandline.node.flight.wire.protocol import SERVICE
from strandline.storage.closing import Closing
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process, call_in_child

_LOGGER: Final = logging.getLogger(__name__)

REREAD_SECONDS: Final = 5.0
"""Seconds between two looks at the files of certificates and tokens."""

_CLOSE_SECONDS: Final = 1.0
"""Seconds that closing waits for streams before it ends them."""

_EXIT_SECONDS: Final = 6.0
_LOOK: Final = 0.01


@bound_to_process(keep=("port", "url"))
@final
class FlightNode(Closing):
    """Serves a node over Arrow Flight until it is closed. Does not close the node itself.

    Listens on loopback by default; other machines may connect only with ``security`` that authenticates them, or with
    ``insecure=True``.
    """

    def __init__(
        self,
        served: NodeService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: ServerSecurity | None = None,
        limits: ServerLimits | None = None,
        insecure: bool = False,
        heartbeat_seconds: float = 1.0,
        is_member: Callable[[str], bool] = lambda _: False,
        env: Env = SYSTEM,
    ) -> None:
        """Start serving; port 0 takes a free one. ``InvalidInput`` for an address that is not safe to listen on.

        ``is_member`` says whether a node of this name belongs to the log: its certificate is that of a replica.
        ``StorageError`` if the port is taken, or the certificate is invalid.
        """
        security = security or ServerSecurity()
        check_listening(host, security, insecure=insecure)
        self._stop = threading.Event()
        self._host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._scheme = "grpc+tls" if security.is_encrypted else "grpc"
        limits = limits or ServerLimits()
        share_heaps()

        def verify(text: str) -> SpanTicket:  # a starting node has no tickets yet
            return served.node.node_folder.tickets.verify(text)

        admission = Admission(security, limits, verify, is_member, env=env)
        self._admission = admission
        self._reread_at = env.clock.monotonic() + REREAD_SECONDS
        self._unread = ""
        """Why the files of certificates and tokens could not be read last time."""
        methods = FlightMethods(served, admission, stop=self._stop, heartbeat_seconds=heartbeat_seconds, env=env)
        self._server = GrpcServer(self._host, port, SERVICE, methods.by_name, security=security, limits=limits, env=env)
        self._clock = env.clock
        self._watch = watch(self, FlightNode._look)
        _NODES.add(self)
        self._origin = Origin(f"The server {self.url}", self)
        call_in_child(self, _NODES.discard)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"{self._scheme}://{self._host}:{self.port}"

    @property
    def calls(self) -> int:
        """Number of open calls and streams."""
        return self._admission.limiter.inside

    def close(self) -> None:
        """Accept no more calls, and end streams within about a second. Idempotent.

        Without calls the port is free afterwards. Calls that only wait for their clients are not waited for: they end,
        and the port is released, a moment later.
        """
        self._stop.set()
        self._watch.set()
        ended = self._server.stop(_CLOSE_SECONDS)
        deadline = self._clock.monotonic() + _CLOSE_SECONDS
        # Without calls, too: gRPC releases the port in a thread of its own, and the next node there needs it.
        limiter = self._admission.limiter
        while not ended.is_set() and (limiter.busy or not limiter.inside) and self._clock.monotonic() < deadline:
            ended.wait(_LOOK)

    def _look(self) -> None:
        self._admission.limiter.end_silent()
        self._server.end_stuck()
        self._admission.connections.end_unknown(self.port, self._server.hosts)
        if self._clock.monotonic() >= self._reread_at:
            self._reread_at = self._clock.monotonic() + REREAD_SECONDS
            self.reread_security()

    def reread_security(self) -> None:
        """Read certificates and tokens again, if they are from files; those that cannot be read change nothing."""
        before = self._admission.security
        if before.reread is None:
            return
        try:
            security = before.reread()
        except StrandlineError as error:
            if str(error) != self._unread:
                _LOGGER.warning("The node goes on with its former certificates and tokens: %s", error)
            self._unread = str(error)
            return
        self._unread = ""
        if security != before:
            self._server.renew(security)
            self._admission.security = security
            _LOGGER.info("The node uses the certificates and tokens that were written meanwhile.")


_NODES: Final[weakref.WeakSet[FlightNode]] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """Give streams time to end: a thread that returns from one during interpreter shutdown aborts the process."""
    for node in list(_NODES):
        node.close()
        node._server.stop(_CLOSE_SECONDS).wait(_EXIT_SECONDS)  # noqa: SLF001 - of the same module
