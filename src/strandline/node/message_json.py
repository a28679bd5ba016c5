"""Messages of nodes as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any, Final

import msgspec

from strandline.errors import CorruptData
from strandline.formats.json.fields import Fields, write_fields
from strandline.formats.json.slots import read_slot, slot_fields
from strandline.formats.node.ticket import key_columns, keys_of
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.log.slots.slot_lag import SlotLag
from strandline.model.arguments import Natural
from strandline.model.head import Receipt
from strandline.model.json_values import read_record
from strandline.model.node import Membership
from strandline.model.retention import SlotLimits, parse_retention
from strandline.node.messages import (
    Commit,
    CommitOutcome,
    Handover,
    NodeSlot,
    NodeSlots,
    NodeStatus,
    NotRequired,
    Reached,
    Resume,
    Rewind,
    SlotKind,
    TimedOut,
)

_LARGEST_ANSWER: Final = 16 << 20
_OUTCOMES: Final[dict[str, type[CommitOutcome]]] = {
    "not-required": NotRequired,
    "reached": Reached,
    "timed-out": TimedOut,
}
_LAG_FIELDS: Final = tuple(each.name for each in fields_of(SlotLag) if each.name != "state")


def answer(data: bytes | memoryview, url: str) -> Fields:
    """The fields of an answer; every fault in them is ``CorruptData``."""
    return Fields.parse(data, f"An answer of {url}", largest=_LARGEST_ANSWER, wrong=CorruptData)


def write_resume(resume: Resume) -> bytes:
    """Encode how a replica resumes."""
    match resume:
        case PartialResync(cursor):
            return write_fields({"resume": str(cursor)})
        case Rewind(upto, term):
            return write_fields({"rewind": upto, "term": term})
        case FullRebootstrap(cause):
            return write_fields({"rebootstrap": cause})


def read_resume(fields: Fields) -> Resume:
    """The inverse of :func:`write_resume`; ``CorruptData`` for other fields."""
    if "resume" in fields:
        return PartialResync(fields.cursor("resume"))
    if "rewind" in fields:
        return Rewind(fields.natural("rewind"), fields.natural("term"))
    try:
        return FullRebootstrap(Cause(fields.text("rebootstrap")))
    except ValueError as error:
        raise fields.refused("the cause of a bootstrap is not known") from error


def read_status(fields: Fields) -> NodeStatus:
    """The state of a node; ``CorruptData`` for other fields."""
    return fields.record(NodeStatus, position=fields.maybe_cursor("position"))


def write_handover(handover: Handover) -> bytes:
    """Encode the state that a replica needs to lead."""
    keys, until = key_columns(handover.ticket_keys)
    slots = [slot_fields(state) for state in handover.slots]
    known = {"membership": handover.membership}
    return write_fields({"slots": slots, "ticket_keys": keys, "ticket_keys_until": until, **known})


def read_handover(fields: Fields) -> Handover:
    """The inverse of :func:`write_handover`; ``CorruptData`` for other fields."""

    def decoded(found: Mapping[str, Any]) -> Handover:
        keys = keys_of(found["ticket_keys"], found.get("ticket_keys_until"))
        membership = msgspec.convert(found.get("membership"), Membership | None)
        return Handover(tuple(map(read_slot, found["slots"])), keys, membership)

    return fields.decoded(decoded)


def write_node_slots(found: NodeSlots) -> bytes:
    """Encode the slots of a primary."""
    slots = []
    for kind, lag in found.slots:
        numbers = {name: getattr(lag, name) for name in _LAG_FIELDS}
        slots.append({"kind": kind, "slot": slot_fields(lag.state), **numbers})
    limits = {"lag_bytes": found.limits.lag_bytes, "idle_seconds": found.limits.idle_seconds}
    kept = {"retention": str(found.retention), "records_kept": found.records_kept}
    return write_fields({"slots": slots, **kept, **limits})


def read_node_slots(fields: Fields) -> NodeSlots:
    """The inverse of :func:`write_node_slots`; ``CorruptData`` for other fields."""

    def slot(found: Mapping[str, Any]) -> NodeSlot:
        return NodeSlot(SlotKind(found["kind"]), read_record(SlotLag, found, state=read_slot(found["slot"])))

    def decoded(found: Mapping[str, Any]) -> NodeSlots:
        slots = tuple(map(slot, found["slots"]))
        kept = msgspec.convert(found["records_kept"], Natural | None)
        return NodeSlots(slots, parse_retention(found["retention"]), read_record(SlotLimits, found), kept)

    return fields.decoded(decoded)


def write_commit(commit: Commit) -> bytes:
    """Encode the result of an append."""
    receipt, outcome = commit.receipt, commit.outcome
    name = next(name for name, kind in _OUTCOMES.items() if kind is type(outcome))
    fields = {"first": receipt.first, "count": receipt.count, "bookmark": commit.bookmark, "repeated": commit.repeated}
    return write_fields({**fields, "outcome": name, **{each: getattr(outcome, each) for each in outcome.__slots__}})


def read_commit(fields: Fields) -> Commit:
    """The inverse of :func:`write_commit`; ``CorruptData`` for other fields."""
    kind = _OUTCOMES.get(fields.text("outcome"))
    if kind is None:
        raise fields.refused("its outcome is not known")
    receipt = Receipt(fields.maybe_natural("first"), fields.natural("count"))
    return Commit(receipt, fields.record(kind), fields.cursor("bookmark"), fields.flag("repeated"))
