"""Messages of nodes as JSON, and back."""

from __future__ import annotations

from typing import Any, Final

from strandline.errors import CorruptData
from strandline.formats.json.fields import Fields, write_fields
from strandline.formats.node.ticket import key_columns, keys_of
from strandline.formats.wal.slots import slot_fields, slot_of
from strandline.log.contract import Receipt
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.node.messages import Commit, CommitOutcome, Handover, NotRequired, Reached, Resume, Rewind, TimedOut

_LARGEST_ANSWER: Final = 16 << 20


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


def write_handover(handover: Handover) -> bytes:
    """Encode the state that a replica needs to lead."""
    keys, until = key_columns(handover.ticket_keys)
    slots = [slot_fields(state) for state in handover.slots]
    return write_fields({"slots": slots, "ticket_keys": keys, "ticket_keys_until": until})


def read_handover(fields: Fields) -> Handover:
    """The inverse of :func:`write_handover`; ``CorruptData`` for other fields."""
    slots = tuple(each.decoded(lambda slot: slot_of(slot, 0)) for each in fields.objects("slots"))
    return Handover(slots, fields.decoded(lambda found: keys_of(found["ticket_keys"], found.get("ticket_keys_until"))))


def write_commit(commit: Commit) -> bytes:
    """Encode the result of an append."""
    fields: dict[str, Any] = {
        "first": commit.receipt.first,
        "count": commit.receipt.count,
        "bookmark": str(commit.bookmark),
        "repeated": commit.repeated,
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
    """The inverse of :func:`write_commit`; ``CorruptData`` for other fields."""
    outcome: CommitOutcome
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
    return Commit(receipt, outcome, fields.cursor("bookmark"), fields.flag("repeated"))
