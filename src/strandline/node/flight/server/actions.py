"""Actions of a node: a name, a JSON object as the request, and an answer in one or more pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import msgspec

from strandline.errors import InvalidInput, NotReady
from strandline.formats.json.fields import Fields, write_fields, write_record
from strandline.formats.json.slots import slot_fields
from strandline.log.contract import Slots
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.head import WriterId
from strandline.model.json_values import fingerprint_text
from strandline.node.flight.client.channel import Channel
from strandline.node.flight.security import APPENDERS, CONSUMERS, EVERYBODY, READERS, Role
from strandline.node.flight.server.caller_rights import CallerRights
from strandline.node.members.rules import AddNode, Change
from strandline.node.message_json import write_handover, write_node_slots, write_resume
from strandline.node.messages import SEAL, WAIT, Caller, Plan, PlannedSpan
from strandline.node.node import Node

_MOST_SPANS: Final = 4096
"""Most spans of one answer; a client that needs more asks again behind the last."""


@runtime_checkable
class NodeService(Protocol):
    """A node as its server calls it. Every call raises ``NotReady`` while the node is starting."""

    @property
    def node(self) -> Node:
        """The copy of the log in its role; the server does not step it."""

    def promote(self, *, force: bool) -> object:
        """Become the primary if that loses nothing committed; ``force`` ignores nodes that cannot be reached."""

    def rebootstrap(self) -> None:
        """Rebuild the copy of the log from a snapshot of the primary; ``NotReady`` on a primary."""


@dataclass(frozen=True, slots=True)
class Action:
    """An action: one sentence for clients that list actions, and its implementation."""

    what: str
    do: Callable[[NodeService, CallerRights, Fields], list[bytes]]


def act(served: NodeService, rights: CallerRights, name: str, body: bytes) -> list[bytes]:
    """Run an action; ``InvalidInput`` for an unknown action or unknown fields, ``Fenced`` without the role for it."""
    action = ACTIONS.get(name)
    if action is None:
        raise InvalidInput(f"There is no action {name[:40]!r}; the actions are {', '.join(ACTIONS)}.")
    return action.do(served, rights, Fields.parse(body or b"{}", f"The action {name!r}"))


def _replica(rights: CallerRights, fields: Fields) -> Caller:
    return rights.replica(fields.name("name"), fields.natural("term"))


def _register(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "region")
    return [write_record(served.node.primary.register(_replica(rights, fields), region=fields.maybe_text("region")))]


def _unregister(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "keep_slot")
    caller = rights.leaving_replica(fields.name("name"), fields.natural("term"))
    served.node.primary.unregister(caller, keep_slot=fields.flag("keep_slot"))
    return []


def _resume(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "since")
    return [write_resume(served.node.primary.resume(_replica(rights, fields), fields.maybe_cursor("since")))]


def _begin_snapshot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "kind")
    offer = served.node.primary.begin_snapshot(_replica(rights, fields), fields.text("kind"))
    return [write_fields({"name": offer.name}), offer.manifest]


def _end_snapshot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "cursor")
    served.node.primary.end_snapshot(_replica(rights, fields), fields.cursor("cursor"))
    return []


def _topology(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term")
    rights.need(*EVERYBODY)
    caller = Caller(fields.name("name") if "name" in fields else "", fields.maybe_natural("term") or 0)
    if rights.grant is not None and not rights.grant.may(Role.REPLICA):
        caller = Caller(rights.grant.name)  # a client cannot report a higher term
    return [write_record(served.node.primary.topology(caller))]


def _handover(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term", "members_term", "members_number")
    held = fields.maybe_natural("members_term") or 0, fields.maybe_natural("members_number") or 0
    return [write_handover(served.node.primary.handover(_replica(rights, fields), membership=held))]


def _report(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "term")
    return [write_record(served.node.report(rights.candidate(fields.name("name"), fields.natural("term"))))]


def _bounds(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(*EVERYBODY)
    log = served.node.reading()
    bounds = log.bounds()
    found = {"first": bounds.first, "next": bounds.next, "sealed": bounds.sealed}
    return [write_fields({"log_id": log.log_id, **found, "content_type": served.node.log.content_type})]


def wait_of(body: bytes) -> tuple[Cursor, float]:
    """The cursor and the seconds of a wait."""
    fields = Fields.parse(body or b"{}", f"The action {WAIT!r}").only("past", "seconds")
    return fields.cursor("past"), fields.seconds("seconds")


def seal_of(body: bytes) -> tuple[Fields, float]:
    """The fields of the action that seals the log, and how many seconds it waits for its policy."""
    fields = Fields.parse(body or b"{}", f"The action {SEAL!r}").only("seconds")
    return fields, fields.seconds("seconds")


def _wait(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    """The end of the log, after the server has waited for it to grow."""
    del fields
    rights.need(*EVERYBODY)
    log = served.node.reading()
    end = log.end().next
    return [write_fields({"next": end, "sealed": log.ended(end)})]


def _seal(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("seconds")
    rights.need(*APPENDERS)
    return [write_fields({"cursor": served.node.primary.seal(timeout=fields.seconds("seconds"))})]


def _plan(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("since", "records", "bytes", "batches", "upto")
    rights.need(*READERS)
    asked = fields.maybe_natural("batches")
    most = _MOST_SPANS if asked is None else min(asked, _MOST_SPANS)
    limit = Limit(fields.maybe_natural("records"), fields.maybe_natural("bytes"), most, fields.maybe_natural("upto"))
    log = served.node.reading()
    end = log.end().next  # before the plan, which reaches at least so far
    planned = tuple(_planned(span) for span in log.plan(fields.cursor("since"), limit))
    ticket = None
    if planned:
        name = "" if rights.grant is None else rights.grant.name
        ticket = served.node.node_folder.tickets.issue(log.log_id, planned[0].first, planned[-1].next, name)
        if ticket is None and rights.grant is not None:
            raise NotReady("This node does not know the log's key for tickets yet: ask again, or ask another node.")
    return [write_record(Plan(planned, is_whole=len(planned) < most or most == asked, end=end, ticket=ticket))]


def _planned(span: Span) -> PlannedSpan:
    term, known = getattr(span, "term", 0), getattr(span, "fingerprint", None)
    return PlannedSpan(span.first, span.next, span.size, term, None if known is None else fingerprint_text(known))


def _cursor_at(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("offset")
    rights.need(*EVERYBODY)
    log = served.node.reading()
    end = log.end().next
    return [write_fields({"cursor": log.cursor_at(fields.natural("offset")), "end": end})]


def _offset_at(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("time")
    rights.need(*EVERYBODY)
    asked = fields.whole("time")
    try:
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=asked)
    except OverflowError:  # before year 1 or after year 9999, as a time of another zone may be
        time = datetime(1, 1, 1, tzinfo=UTC) if asked < 0 else datetime(9999, 12, 31, tzinfo=UTC)
    log = served.node.reading()
    end = log.end().next
    return [write_fields({"offset": log.position_of(time), "end": end})]


def _last_number(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("writer")
    rights.need(*APPENDERS)
    return [write_fields({"number": served.node.primary.last_number(WriterId(fields.uuid("writer")))})]


def _last_append(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("writer")
    rights.need(*APPENDERS)
    last = served.node.primary.last_append(WriterId(fields.uuid("writer")))
    if last is None:
        return [write_fields({})]
    return [write_fields({**asdict(last), "proof": None if last.proof is None else str(last.proof)})]


def _append_at(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("offset")
    rights.need(*EVERYBODY)
    found = served.node.hot.append_at(fields.natural("offset"))
    writer, number = found.append or (None, None)
    return [write_fields({"first": found.first, "next": found.next, "writer": writer, "number": number})]


def _consumers(served: NodeService, rights: CallerRights, slot: str) -> Slots:
    rights.need_slot(slot)
    return served.node.slots


def _slots(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(*CONSUMERS, Role.READ)
    return [write_fields({"slots": [slot_fields(state) for state in served.node.slots.list()]})]


def _slot_lags(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(*EVERYBODY)
    return [write_node_slots(served.node.primary.slot_lags())]


def _create_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "position", "lifetime")
    lifetime = fields.seconds("lifetime") if "lifetime" in fields else None
    created = _consumers(served, rights, fields.name("name")).create(
        fields.name("name"), fields.natural("position"), lifetime=lifetime
    )
    return [write_fields(slot_fields(created))]


def _claim_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "holder", "former")
    name, holder = fields.name("name"), fields.text("holder", longest=256)
    slots = _consumers(served, rights, name)
    former = fields.maybe_natural("former")
    claimed = slots.claim(name, holder) if former is None else served.node.primary.slots.resume(name, holder, former)
    return [write_fields({"epoch": claimed.epoch})]


def _reset_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "position")
    moved = _consumers(served, rights, fields.name("name")).reset(fields.name("name"), fields.natural("position"))
    return [write_fields(slot_fields(moved))]


def _drop_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name")
    _consumers(served, rights, fields.name("name")).drop(fields.name("name"))
    return []


def _touch_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "epoch")
    _consumers(served, rights, fields.name("name")).touch(fields.name("name"), fields.natural("epoch"))
    return []


def _advance_slot(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("name", "holder", "epoch", "to")
    holder = fields.text("holder", longest=256)
    rights.need_slot(fields.name("name"))
    served.node.primary.slots.advance(fields.name("name"), holder, fields.natural("epoch"), fields.cursor("to"))
    return []


def _flush_slots(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    if rights.grant is None or not rights.grant.scopes:  # whoever may consume one may make all durable
        rights.need(*CONSUMERS)
    served.node.slots.flush()
    return []


def _status(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(*EVERYBODY)
    return [write_record(served.node.status())]


def _promote(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only("force")
    rights.need(Role.ADMIN)
    served.promote(force=fields.flag("force"))
    return [write_record(served.node.primary.topology(Caller("")))]


def _rebootstrap(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(Role.ADMIN)
    served.rebootstrap()
    return []


def _change_members(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    rights.need(Role.ADMIN)
    force = fields.flag("force")
    change: Change = fields.decoded(
        lambda found: msgspec.convert({name: found[name] for name in found if name != "force"}, Change)
    )
    if isinstance(change, AddNode):
        Channel(change.url).close()  # an address, or it raises
    return [write_record(served.node.primary.change_members(change, force=force))]


def _rotate_keys(served: NodeService, rights: CallerRights, fields: Fields) -> list[bytes]:
    fields.only()
    rights.need(Role.ADMIN)
    served.node.primary.rotate_keys()
    return []


ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {
        "register": Action("Register a replica.", _register),
        "unregister": Action("Unregister a replica.", _unregister),
        "resume": Action("How a replica resumes from its position.", _resume),
        "begin-snapshot": Action("Seal a snapshot for a replica that has to bootstrap.", _begin_snapshot),
        "end-snapshot": Action("End a bootstrap: the replica's copy is complete.", _end_snapshot),
        "topology": Action("The replicas of the log with their offsets.", _topology),
        "handover": Action("State that a replica needs to lead: slots of consumers, and keys of tickets.", _handover),
        "report": Action("The state of this node's copy; from then on it refuses terms below the caller's.", _report),
        "bounds": Action("The first and the next offset that readers see.", _bounds),
        WAIT: Action("Block until there is a record past a cursor; answers with the next offset.", _wait),
        SEAL: Action("End the log for good; answers with the cursor of its end.", _seal),
        "plan": Action("The spans after a cursor, within a limit.", _plan),
        "cursor-at": Action("The cursor at an offset.", _cursor_at),
        "offset-at": Action("The offset of the first batch at a time or later.", _offset_at),
        "last-number": Action("The number of a writer's last append.", _last_number),
        "last-append": Action("The last append of a writer, or of a source of ingested records.", _last_append),
        "append-at": Action("The batch with the record at an offset: its offsets, writer and number.", _append_at),
        "slots": Action("The slots of consumers.", _slots),
        "slot-lags": Action("All slots, also of replicas: what each pins, the retention and the limits.", _slot_lags),
        "create-slot": Action("Create the slot of a consumer.", _create_slot),
        "claim-slot": Action("Become the holder of a slot.", _claim_slot),
        "reset-slot": Action("Move a slot, and make it valid again.", _reset_slot),
        "drop-slot": Action("Remove a slot.", _drop_slot),
        "touch-slot": Action("Keep a slot alive.", _touch_slot),
        "advance-slot": Action("Acknowledge everything below a cursor.", _advance_slot),
        "flush-slots": Action("Write the positions of slots that are only in memory so far.", _flush_slots),
        "status": Action("Role, position and health of this node.", _status),
        "change-members": Action("Add or remove a node of the log, or change its policy.", _change_members),
        "promote": Action("Become the primary.", _promote),
        "rebootstrap": Action("Build this replica's copy of the log again.", _rebootstrap),
        "rotate-keys": Action("Make a new key for tickets; former keys expire.", _rotate_keys),
    }
)
