"""What nodes say to one another, as JSON and back. Requests are checked by who serves them, answers by who asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from strandline.errors import CorruptData
from strandline.formats.json.fields import Fields, write_fields
from strandline.log.contract import Receipt
from strandline.log.resume import Cause, FullRebootstrap, PartialResync
from strandline.model.cursor import Bounds, Cursor
from strandline.node.messages import (
    Commit,
    ElectionReport,
    Member,
    NodeStatus,
    NotRequired,
    Outcome,
    Reached,
    Registration,
    Resume,
    Rewind,
    TimedOut,
    Topology,
)

_LARGEST_ANSWER: Final = 16 << 20


def answer(data: bytes | memoryview, url: str) -> Fields:
    """The fields of an answer; whatever is wrong with them is ``CorruptData``."""
    return Fields.parse(data, f"An answer of {url}", largest=_LARGEST_ANSWER, wrong=CorruptData)


def write_topology(topology: Topology) -> bytes:
    """A topology."""
    return write_fields(asdict(topology))


def read_topology(fields: Fields) -> Topology:
    """And back."""
    members = tuple(map(_member, fields.objects("members")))
    return fields.record(Topology, primary=fields.name("primary"), members=members)


def _member(fields: Fields) -> Member:
    flags = {name: fields.flag(name) for name in ("bootstrapping", "healthy")}
    return fields.record(Member, name=fields.name("name"), **flags)


def write_registration(registration: Registration) -> bytes:
    """The answer to a replica that registers."""
    return write_fields(asdict(registration))


def read_registration(fields: Fields) -> Registration:
    """And back."""
    return Registration(read_topology(fields.object("topology")), fields.maybe_natural("position"))


def write_resume(resume: Resume) -> bytes:
    """How a replica goes on."""
    match resume:
        case PartialResync(cursor):
            return write_fields({"resume": str(cursor)})
        case Rewind(upto, term):
            return write_fields({"rewind": upto, "term": term})
        case FullRebootstrap(cause):
            return write_fields({"rebootstrap": cause})


def read_resume(fields: Fields) -> Resume:
    """And back."""
    if "resume" in fields:
        return PartialResync(fields.cursor("resume"))
    if "rewind" in fields:
        return Rewind(fields.natural("rewind"), fields.natural("term"))
    try:
        return FullRebootstrap(Cause(fields.text("rebootstrap")))
    except ValueError as error:
        raise fields.refused("the cause of a bootstrap is not known") from error


def write_report(report: ElectionReport) -> bytes:
    """What a node has."""
    return write_fields(asdict(report))


def read_report(fields: Fields) -> ElectionReport:
    """And back."""
    return fields.record(ElectionReport, name=fields.name("name"))


def write_status(status: NodeStatus) -> bytes:
    """How a node is."""
    return write_fields({**asdict(status), "position": None if status.position is None else str(status.position)})


def read_status(fields: Fields) -> NodeStatus:
    """And back."""
    return fields.record(NodeStatus, name=fields.name("name"))


def write_bounds(start: Cursor, bounds: Bounds) -> bytes:
    """What readers see of a log."""
    return write_fields({"log_id": str(start.log_id), "first": bounds.first, "next": bounds.next})


def write_commit(commit: Commit) -> bytes:
    """What became of an append."""
    fields: dict[str, Any] = {
        "first": commit.receipt.first,
        "count": commit.receipt.count,
        "bookmark": str(commit.bookmark),
    }
    match commit.outcome:
        case NotRequired():
            fields["outcome"] = "not-required"
        case Reached(watermark):
            fields |= {"outcome": "reached", "watermark": watermark}
        case TimedOut(watermark, policy, seconds):
            fields |= {"outcome": "timed-out", "watermark": watermark, "policy": policy, "seconds": seconds}
    return write_fields(fields)


def read_commit(fields: Fields) -> Commit:
    """And back."""
    outcome: Outcome
    match fields.text("outcome"):
        case "not-required":
            outcome = NotRequired()
        case "reached":
            outcome = Reached(fields.natural("watermark"))
        case "timed-out":
            policy = fields.text("policy", longest=1 << 16)
            outcome = TimedOut(fields.natural("watermark"), policy, fields.seconds("seconds"))
        case other:
            raise fields.refused(f"the outcome {other[:40]!r} is not known")
    receipt = Receipt(fields.maybe_natural("first"), fields.natural("count"))
    return Commit(receipt, outcome, fields.cursor("bookmark"))
