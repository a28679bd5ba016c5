"""Admission of calls: authentication, the limit on calls, and memory for the next message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, final

from strandline.errors import Fenced, InvalidInput
from strandline.formats.node.ticket import SpanTicket
from strandline.node.flight.security import CallerRights, Grant, Role, ServerSecurity, ticket_in
from strandline.node.flight.server.connections import ConnectionGuard
from strandline.node.flight.server.limits import ActiveCall, CallLimiter, MemoryBudget, ServerLimits
from strandline.node.flight.server.transport import GrpcCall
from strandline.node.flight.wire.errors import Unauthenticated
from strandline.storage.env import Env

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
        self._place = place
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
        self._admission.limiter.name(self._place, self.who, is_reserved=is_reserved)

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
        room = self._admission.reports.waited_for(self._share, self._admission.limits.message_bytes, _MEMORY_SECONDS)
        with self._admission.limiter.idle(), room:
            yield
