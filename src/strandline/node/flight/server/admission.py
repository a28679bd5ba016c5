"""Admission of calls: authentication, the limit on calls, memory for the next message; connections without any."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, final

from strandline.errors import Fenced, InvalidInput
from strandline.formats.node.ticket import SpanTicket
from strandline.node.flight.security import Grant, Role, ServerSecurity, ticket_in
from strandline.node.flight.server.caller_rights import CallerRights
from strandline.node.flight.server.limits import ActiveCall, CallLimiter, MemoryBudget, ServerLimits
from strandline.node.flight.server.transport import GrpcCall
from strandline.node.flight.wire.errors import Unauthenticated
from strandline.storage.connections import connections_at, end_connection, network_of
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)

_MEMORY_SECONDS: Final = 2.0
"""Seconds that a call waits for memory for its next message."""

_STREAMED: Final = ("DoPut", "DoExchange")
_READ: Final = "DoGet"


@final
class Admission:
    """Admits calls below the limits, and with valid credentials where those are required."""

    def __init__(
        self,
        security: ServerSecurity,
        limits: ServerLimits,
        verify: Callable[[str], SpanTicket],
        is_member: Callable[[str], bool],
        *,
        env: Env,
    ) -> None:
        """No call runs yet. ``verify`` gives the content of a signed ticket, or raises."""
        self._verify = verify
        self._is_member = is_member
        self.limiter = CallLimiter(limits, env=env)
        self.connections = ConnectionGuard(limits, env=env)
        self.security = security
        """How callers are authenticated, from the next call on."""
        self.limits = limits
        reserved = limits.receive_bytes // 4
        self._received = MemoryBudget("messages", limits.receive_bytes - reserved, limits.receive_bytes // 2)
        self._reserved_for_replicas = MemoryBudget("messages of replicas and administrators", reserved, reserved // 2)
        self.reports = MemoryBudget("reports", limits.receive_bytes, limits.feeds_each * limits.message_bytes)

    @contextlib.contextmanager
    def enter(self, call: GrpcCall) -> Iterator[AdmittedCall]:
        """Admit a call for the block. None of its messages is received before."""
        ticket = self._ticket(call)
        grant = self._grant(call) if ticket is None else Grant(ticket.name, frozenset())
        self.connections.admitted(call.connection)
        # Without credentials, small calls may take the reserved places: they arrive in one message.
        is_reserved = call.method not in _STREAMED if grant is None else grant.may(Role.REPLICA, Role.ADMIN)
        name = None if grant is None else grant.name or None
        place = self.limiter.enter(name, is_reserved=is_reserved, end=call.end)
        try:
            yield AdmittedCall(
                self,
                call,
                CallerRights(grant, ticket),
                place,
                self._reserved_for_replicas if is_reserved else self._received,
            )
        finally:
            self.limiter.leave(place)

    def _ticket(self, call: GrpcCall) -> SpanTicket | None:
        text = ticket_in(call.headers)
        if text is None:
            return None
        if call.method != _READ:
            raise Unauthenticated("A ticket allows reading and nothing else: send a token, or a certificate.")
        try:
            return self._verify(text)
        except Fenced as error:
            raise Unauthenticated(str(error)) from error

    def _grant(self, call: GrpcCall) -> Grant | None:
        security = self.security
        if security.tokens is not None:
            grant = security.tokens.find(call.headers)
            if grant is None:
                raise Unauthenticated(
                    "The call has no token that this node knows: send the header 'authorization: Bearer TOKEN'."
                )
            return grant
        if security.client_roots is not None:
            identity = call.identity
            if identity is None:
                raise Unauthenticated("The call has no client certificate that names its caller.")
            return security.grant_of(identity, is_member=self._is_member(identity))
        return None


@final
class AdmittedCall:
    """An admitted call."""

    def __init__(
        self, admission: Admission, call: GrpcCall, rights: CallerRights, place: ActiveCall, received: MemoryBudget
    ) -> None:
        """``received`` is the memory budget for its messages."""
        self.rights = rights
        self.who = place.who or call.address
        self._admission = admission
        self._call = call
        self.place = place
        self._share = place.who or call.connection
        self._received = received

    @property
    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        return self._call.is_wanted

    def first(self) -> bytes:
        """The first message, which every call has."""
        message = self.receive()
        if message is None:
            raise InvalidInput("The call ended without a message.")
        return message

    def named(self, asked: str | None = None) -> None:
        """Count the call for its caller: the name of its credentials, or the name ``asked``, or its address."""
        grant = self.rights.grant
        if grant is None and asked:
            self.who = asked
        is_reserved = grant is None or grant.may(Role.REPLICA, Role.ADMIN)
        self._admission.limiter.name(self.place, self.who, is_reserved=is_reserved)

    def receive(self) -> bytes | None:
        """The next message, once there is memory for it; None if there are no more."""
        with self._received.waited_for(self._share, self._admission.limits.message_bytes, _MEMORY_SECONDS):
            return self._call.receive()

    def receive_report(self) -> bytes | None:
        """The next message, which may arrive at any time: :meth:`reporting` has reserved its memory."""
        return self._call.receive(is_limited=False)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Reserve memory for one message during the block; the call counts as idle while it waits."""
        self.place.is_idle = True
        with self._admission.reports.waited_for(self._share, self._admission.limits.message_bytes, _MEMORY_SECONDS):
            yield


def superfluous(unknown: Mapping[str, float], limits: ServerLimits, now: float) -> list[str]:
    """The connections to end, of those without an admitted call, given when each was first seen.

    If there are too many, the networks with the most lose their oldest: a caller with credentials sends its first call
    at once, and many callers may share one address (NAT, a load balancer).
    """
    ranked: list[tuple[int, str]] = []
    each: Counter[str] = Counter()
    for peer, since in sorted(unknown.items(), key=lambda item: item[1], reverse=True):
        if now - since < limits.authenticate_seconds:
            ranked.append((each[network_of(peer)], peer))
            each[network_of(peer)] += 1
    ranked.sort(key=lambda item: item[0])  # stable: of equal rank, the newest first
    kept = {peer for _, peer in ranked[: limits.connections_unknown]}
    return [peer for peer in unknown if peer not in kept]


@final
class ConnectionGuard:
    """Ends connections that no admitted call has used. Safe in threads.

    The gRPC library counts connections, and neither shows them nor who they are from: this looks at the sockets of the
    process a few times a second.
    """

    def __init__(self, limits: ServerLimits, *, env: Env) -> None:
        self._limits = limits
        self._clock = env.clock
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._since: dict[str, float] = {}

    def admitted(self, peer: str) -> None:
        """Note that a call over this connection was admitted."""
        with self._lock:
            self._known.add(peer)

    def judge(self, peers: Iterable[str], known: set[str]) -> list[str]:
        """The connections to end, of all open ones; ``known`` are those of admitted calls before these were listed."""
        now, found = self._clock.monotonic(), set(peers)
        with self._lock:
            self._known -= known - found  # they are closed; a later one is in neither set
            unknown = found - self._known
            self._since = {peer: self._since.get(peer, now) for peer in unknown}
            return superfluous(self._since, self._limits, now)

    def end_unknown(self, port: int, hosts: Collection[str] = ()) -> None:
        """End the superfluous connections at a port of this process, of these own addresses."""
        with self._lock:
            known = set(self._known)
        try:
            found = connections_at(port, hosts)
        except OSError as error:  # without a list nobody is judged: all would seem closed
            _LOGGER.info("The connections of the node cannot be listed now: %s.", error)
            return
        ended = self.judge(found, known)
        for peer in ended:
            end_connection(peer, found[peer])
        if ended:
            _LOGGER.info("%d connections without an admitted call were ended.", len(ended))
