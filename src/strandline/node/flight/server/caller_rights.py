"""What the caller of one call may do at a node."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.errors import Fenced
from strandline.formats.node.ticket import ReadTicket, SpanTicket
from strandline.node.flight.security import CONSUMERS, EVERYBODY, READERS, Grant, Role
from strandline.node.messages import Caller


@dataclass(frozen=True, slots=True)
class CallerRights:
    """The caller of one call; None if the node requires no authentication."""

    grant: Grant | None
    ticket: SpanTicket | None = None
    """The ticket by which it was admitted, instead of credentials: it has no role."""

    def need_to_read(self, asked: ReadTicket) -> None:
        """``Fenced`` for a caller that may not read this: without a role, or outside of its ticket."""
        if self.ticket is None:
            self.need(*READERS)
        elif not self.ticket.allows(asked):
            raise Fenced(
                f"The ticket allows reading offsets {self.ticket.first} to {self.ticket.next - 1} of log "
                f"{self.ticket.log_id}, and nothing else: plan another read."
            )

    def need(self, *roles: Role) -> None:
        """``Fenced`` for a caller without any of these roles."""
        if self.grant is not None and not self.grant.may(*roles):
            raise Fenced(
                f"{self.grant.name!r} may not do this: it takes the role {' or '.join(roles)}. Use another token or "
                "certificate."
            )

    def need_slot(self, slot: str) -> None:
        """``Fenced`` for a caller that may not change the slot of this name."""
        if self.grant is not None and not self.grant.may_consume(slot):
            self.need(*CONSUMERS)

    def replica(self, name: str, term: int) -> Caller:
        """The calling replica; ``Fenced`` if its credentials have another name."""
        if self.grant is not None and not self.grant.may(Role.REPLICA):
            raise Fenced(
                f"{self.grant.name!r} may not do this: it takes the role replica. If it is a new node of this log, add "
                f"it at the primary's address ('strandline node add URL {self.grant.name}=NODE_URL'); with tokens, "
                "give it that role in the token file. It tries again by itself."
            )
        return self._itself(name, term)

    def candidate(self, name: str, term: int) -> Caller:
        """The node that asks for a report: as a replica, or without a term, which changes nothing.

        A report says no more than the status. A node whose certificate is a client's, since it was removed, learns by
        it that it was.
        """
        if term:
            return self.replica(name, term)
        self.need(*EVERYBODY)
        return self._itself(name, term)

    def leaving_replica(self, name: str, term: int) -> Caller:
        """The replica to unregister, named by itself or by an administrator."""
        self.need(Role.REPLICA, Role.ADMIN)
        grant = self.grant
        if grant is not None and (not grant.may(Role.REPLICA) or (grant.may(Role.ADMIN) and grant.name != name)):
            return Caller(name)  # terms are accepted from replicas only
        return self._itself(name, term)

    def _itself(self, name: str, term: int) -> Caller:
        if self.grant is not None and self.grant.name != name:
            raise Fenced(f"{self.grant.name!r} may not call as replica {name!r}: a replica calls under its own name.")
        return Caller(name, term)
