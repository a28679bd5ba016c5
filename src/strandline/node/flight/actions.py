"""Actions of a node: a name, a JSON object as the request, and an answer in one or more pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from strandline.errors import InvalidInput
from strandline.formats.json.fields import Fields, write_fields, write_record
from strandline.node.flight.security import Role, Session
from strandline.node.messages import Caller, NodeService, write_resume


@dataclass(frozen=True, slots=True)
class Action:
    """An action: one sentence for clients that list actions, and its implementation."""

    what: str
    do: Callable[[NodeService, Session, Fields], list[bytes]]


def act(served: NodeService, session: Session, name: str, body: bytes) -> list[bytes]:
    """Run an action; ``InvalidInput`` for an unknown action or unknown fields, ``Fenced`` without the role for it."""
    action = ACTIONS.get(name)
    if action is None:
        raise InvalidInput(f"There is no action {name[:40]!r}; the actions are {', '.join(ACTIONS)}.")
    return action.do(served, session, Fields.parse(body or b"{}", f"The action {name!r}"))


def _replica(session: Session, fields: Fields) -> Caller:
    return session.replica(fields.name("name"), fields.natural("term"))


def _register(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "region")
    return [write_record(served.primary.register(_replica(session, fields), region=fields.maybe_text("region")))]


def _unregister(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "keep_slot")
    caller = session.leaving_replica(fields.name("name"), fields.natural("term"))
    served.primary.unregister(caller, keep_slot=fields.flag("keep_slot"))
    return []


def _resume(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "since")
    return [write_resume(served.primary.resume(_replica(session, fields), fields.maybe_cursor("since")))]


def _begin_snapshot(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "kind")
    offer = served.primary.begin_snapshot(_replica(session, fields), fields.text("kind"))
    return [write_fields({"name": offer.name}), offer.manifest]


def _end_snapshot(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "cursor")
    served.primary.end_snapshot(_replica(session, fields), fields.cursor("cursor"))
    return []


def _topology(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term")
    session.need(Role.REPLICA, Role.CLIENT, Role.ADMIN)
    caller = Caller(fields.name("name") if "name" in fields else "", fields.maybe_natural("term") or 0)
    if session.grant is not None and not session.grant.may(Role.REPLICA):
        caller = Caller(session.grant.name)  # a client cannot report a higher term
    return [write_record(served.primary.topology(caller))]


def _report(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("name", "term")
    return [write_record(served.report(_replica(session, fields)))]


def _bounds(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only()
    session.need(Role.REPLICA, Role.CLIENT, Role.ADMIN)
    log = served.reading()
    bounds = log.bounds()
    return [write_fields({"log_id": log.log_id, "first": bounds.first, "next": bounds.next})]


def _status(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only()
    session.need(Role.REPLICA, Role.CLIENT, Role.ADMIN)
    return [write_record(served.status())]


def _promote(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only("force")
    session.need(Role.ADMIN)
    return [write_record(served.promote(force=fields.flag("force")))]


def _rebootstrap(served: NodeService, session: Session, fields: Fields) -> list[bytes]:
    fields.only()
    session.need(Role.ADMIN)
    served.rebootstrap()
    return []


ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {
        "register": Action("Register a replica.", _register),
        "unregister": Action("Unregister a replica.", _unregister),
        "resume": Action("How a replica resumes from its position.", _resume),
        "begin-snapshot": Action("Seal a snapshot for a replica that has to bootstrap.", _begin_snapshot),
        "end-snapshot": Action("End a bootstrap: the replica's copy is complete.", _end_snapshot),
        "topology": Action("The replicas of the log with their offsets.", _topology),
        "report": Action("The state of this node's copy; from then on it refuses terms below the caller's.", _report),
        "bounds": Action("The first and the next offset that readers see.", _bounds),
        "status": Action("Role, position and health of this node.", _status),
        "promote": Action("Become the primary.", _promote),
        "rebootstrap": Action("Build this replica's copy of the log again.", _rebootstrap),
    }
)
