"""Messages between nodes, as values and as JSON, and the protocols of a node, over Flight and in the simulation."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

from strandline.errors import CommitTimedOut, CorruptData
from strandline.formats.json.fields import Fields, write_fields
from strandline.formats.node.ticket import keys_of
from strandline.formats.wal.slots import slot_fields, slot_of
from strandline.log.contract import Log, Receipt, Slots
from strandline.log.slots import Cause, FullRebootstrap, PartialResync
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch, StoredAppend, WriterId, WriterState
from strandline.model.json_values import PlainName
from strandline.model.node import Heartbeat
from strandline.model.records import RecordSource
from strandline.model.retention import SlotState
from strandline.node.lead.consumer_slots import ConsumerSlots
from strandline.node.lead.policies import CommitPolicy
from strandline.node.lead.replicas import ReplicaProgress
from strandline.node.tickets import Tickets

_LARGEST_ANSWER: Final = 16 << 20


class Caller(NamedTuple):
    """The caller, and the highest term that it has seen: a primary of a lower term steps down."""

    name: str
    term: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A replica in the topology. Positions are next offsets, None before its first acknowledgement."""

    name: PlainName
    region: str | None
    sent: int
    applied: int | None
    durable: int | None
    apply_errors: int
    divergences: int
    connected_at: int
    last_seen: int
    bootstrapping: bool
    healthy: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The replicas of a log, as its primary sees them. ``epoch`` grows with each change of membership or health."""

    log_id: UUID
    primary: PlainName
    term: int
    term_start: int
    """Where the primary's log ended when its term began: only a replica that has everything below counts."""
    epoch: int
    policy: str
    """The node's commit policy, as :func:`~strandline.node.lead.policies.parse_policy` reads it."""
    durable: int
    committed: int
    """The commit watermark: what readers see."""
    members: tuple[Member, ...] = ()
    first: int = 0
    """The first offset that the primary itself retains: a replica behind it has to bootstrap."""
    cold: str | None = None
    """The store of the log's cold tier; None for none."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A primary's answer to a replica that registers."""

    topology: Topology
    position: int | None
    """The position of its slot; None if the slot is invalid, and only a bootstrap resets it."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """The record before the cursor is not the primary's.

    The common prefix ends at ``upto`` or before, and has records of ``term`` or lower terms: ask again from there.
    """

    upto: int
    term: int


Resume: TypeAlias = PartialResync | Rewind | FullRebootstrap


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A primary's answer to a replica's acknowledgement."""

    heartbeat: Heartbeat
    refused: str | None = None
    """Why it was rejected: the slot is invalid, and only a bootstrap resets it. None if it counted."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What the next primary needs besides the log; replicas fetch it about once a heartbeat interval."""

    slots: tuple[SlotState, ...]
    """The slots of consumers, as they are stored."""
    ticket_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """The keys by which the nodes of the log sign tickets."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A sealed snapshot that a primary keeps for one replica until its bootstrap is done."""

    name: str
    manifest: bytes
    """Its ``MANIFEST.json``: the cursor, and size and hash of each file."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a snapshot's file, with its CRC32C."""

    offset: int
    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class ElectionReport:
    """A node's answer to a candidate for a term; from then on it refuses lower terms.

    ``adopted`` is the highest term of which the node has everything before its start. Of two nodes, the one with the
    higher (adopted, durable) has every committed record of the other.
    """

    name: PlainName
    term: int
    adopted: int
    durable: int
    committed: int
    """The highest commit watermark that it knows of."""
    unhealthy: str | None
    """The condition that stops it from following, or None."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of a node in either role, for operators."""

    name: PlainName
    condition: str
    """``leading``, ``following``, ``connecting``, …"""
    trouble: str | None
    """Why it has stopped until an operator acts, or None."""
    term: int
    """The highest term that it has seen."""
    primary: str
    """The last primary that it knew of; empty for none."""
    position: Cursor | None
    """The cursor behind everything durable here; None without a copy of the log."""
    committed: int | None
    """The commit watermark here; None while it is unknown, or there is no copy: reads raise ``NotReady``."""
    divergences: int = 0
    """How often this node stopped with a divergence; on a primary, all that its replicas reported."""
    tiering: str | None = None
    """Why the primary's last round of tiering failed; None if it did not."""


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span of a plan on the wire; its records are read with a ticket."""

    first: int
    next: int
    size: int
    term: int
    fingerprint: str | None
    """None for a span of the cold tier."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan on the wire."""

    spans: tuple[PlannedSpan, ...]
    is_whole: bool
    """Whether more would not be within the limit, or is not there."""
    end: int | None = None
    """Where the log ends for readers of this node; None from an earlier version."""
    ticket: str | None = None
    """The signed right to read these spans, for a while; None from a node that has no key yet."""


@dataclass(frozen=True, slots=True)
class NotRequired:
    """The policy needs the records durable on the primary only, and they are."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The policy is satisfied: its watermark has passed the records."""

    watermark: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The records are durable on the primary; the policy was not satisfied in time, and may still be."""

    watermark: int
    policy: str
    seconds: float


Outcome: TypeAlias = NotRequired | Reached | TimedOut


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of an append: the offsets of its records, and whether the policy was satisfied in time.

    Satisfies :class:`~strandline.log.contract.Handle`, whose outcome is known.
    """

    receipt: Receipt
    outcome: Outcome
    bookmark: Cursor
    """The cursor behind the records: a read after it, on any node, sees them."""
    repeated: bool = False
    """Whether the log had this writer's append of this number before, so that this one added nothing."""

    def ensure(self) -> Receipt:
        """The receipt; ``CommitTimedOut`` if the policy was not satisfied in time."""
        if isinstance(self.outcome, TimedOut):
            raise CommitTimedOut(
                f"The append is durable on the primary, but {self.outcome.policy} was not satisfied within "
                f"{self.outcome.seconds:g} s (its watermark is {self.outcome.watermark}). It may still be satisfied; "
                "if the primary is lost before that, so is the append. Wait, or append again with the same writer and "
                "number."
            )
        return self.receipt

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout: float | None = None) -> Receipt:
        """As :meth:`ensure`, at once."""
        del timeout
        return self.ensure()

    def __await__(self) -> Generator[object, None, Receipt]:
        """As :meth:`ensure`, at once."""
        yield from ()
        return self.ensure()


# --- as JSON ---------------------------------------------------------------------------------------------------


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
    """And back."""
    if "resume" in fields:
        return PartialResync(fields.cursor("resume"))
    if "rewind" in fields:
        return Rewind(fields.natural("rewind"), fields.natural("term"))
    try:
        return FullRebootstrap(Cause(fields.text("rebootstrap")))
    except ValueError as error:
        raise fields.refused("the cause of a bootstrap is not known") from error


def write_handover(handover: Handover) -> bytes:
    """Encode what a replica keeps to lead with."""
    keys = [key.hex() for key in handover.ticket_keys]
    return write_fields({"slots": [slot_fields(state) for state in handover.slots], "ticket_keys": keys})


def read_handover(fields: Fields) -> Handover:
    """And back."""
    slots = tuple(each.decoded(lambda slot: slot_of(slot, 0)) for each in fields.objects("slots"))
    return Handover(slots, fields.decoded(lambda found: keys_of(found["ticket_keys"])))


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
    return Commit(receipt, outcome, fields.cursor("bookmark"), fields.flag("repeated"))


# --- protocols -------------------------------------------------------------------------------------------------


class ReplicationFeed(Protocol):
    """A stream of batches from a primary, in order and without gaps. One thread takes, any thread closes."""

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The primary's latest heartbeat; None before the first."""

    def wait(self, timeout: float) -> int:
        """How many bytes the next take will read from a disk, so that the caller can reserve memory first.

        0 if there is nothing, or it is in memory already. May wait for up to ``timeout`` seconds; then the next take
        does not wait again.
        """

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """The received batches, waiting up to ``timeout`` seconds; empty if none came, or only a heartbeat.

        A batch above the durable end of the latest heartbeat must not be applied yet: the primary may lose it in a
        crash, and write something else in its place.

        Raises why the stream ended: ``TransientStorageError`` if the connection broke, ``CursorExpired``, ``Fenced``.
        """

    def close(self) -> None:
        """End the stream; closing twice is fine."""


class PrimaryApi(Protocol):
    """Calls of replicas to their primary."""

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Register as a replica; repeating it only refreshes when it was last seen."""

    def unregister(self, caller: Caller, *, keep_slot: bool) -> None:
        """Unregister; an unknown replica is fine."""

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """How to resume from the caller's position; None for a new replica. Registers an unknown caller."""

    def feed(self, caller: Caller, since: Cursor) -> ReplicationFeed:
        """The batches from a position on, up to the durable end and following it."""

    def acknowledge(self, caller: Caller, progress: ReplicaProgress) -> Acknowledgement:
        """Acknowledge the caller's offsets. ``NotFound`` if unregistered, ``Diverged`` past the log's end."""

    def acknowledge_nowait(self, caller: Caller, progress: ReplicaProgress) -> str | None:
        """The same without waiting for the answer; returns why it was rejected, if that is known at once.

        Over a network the rejection is not known at once: a later :meth:`acknowledge` raises it.
        """

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log at its end, and seal a snapshot behind that; repeating it returns the same while it is kept."""

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[Chunk]:
        """A file of a snapshot from a byte on. ``NotFound`` if the snapshot has expired: begin another."""

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor: reset the slot to it, and remove the snapshot."""

    def topology(self, caller: Caller) -> Topology:
        """The replicas of the log with their offsets."""

    def handover(self, caller: Caller) -> Handover:
        """What the caller keeps beside its copy of the log, to lead with it."""


class PrimaryService(PrimaryApi, Protocol):
    """A primary as its server calls it: for its replicas, and for clients that append."""

    @property
    def slots(self) -> ConsumerSlots:
        """The slots of consumers."""

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None,
        policy: CommitPolicy | None,
        timeout: float,
        expect: int | None = None,
    ) -> Commit:
        """Append a batch and wait for the node's commit policy, or for a stronger one that the call asks for."""

    def last_number(self, writer: WriterId) -> int | None:
        """The number of the writer's last append; None if the log does not know the writer."""

    def last_append(self, writer: WriterId) -> WriterState | None:
        """The last append of a writer, or of a source of ingested records; None if the log does not know it."""


@runtime_checkable
class Upstream(PrimaryApi, Protocol):
    """A node as other nodes call it. All calls may block on the network.

    ``TransientStorageError`` if no answer came: the call may have been executed, and repeating it is safe. ``NotReady``
    from a node that does not lead. ``Fenced`` if the caller has seen a higher term, or is not authorised. Errors of
    the node are raised as the same classes.
    """

    def report(self, caller: Caller) -> ElectionReport:
        """The node's election report, in either role; from now on it refuses terms below the caller's."""

    def close(self) -> None:
        """Close the connection. Idempotent."""


@runtime_checkable
class NodeService(Protocol):
    """A node as its server calls it. Every call raises ``NotReady`` while the node is starting."""

    @property
    def primary(self) -> PrimaryService:
        """The node as the primary; ``NotReady`` if it does not lead."""

    def report(self, caller: Caller) -> ElectionReport:
        """The node's election report, in either role; from now on it refuses terms below the caller's."""

    @property
    def slots(self) -> Slots:
        """The slots of consumers; ``NotReady`` if it does not lead."""

    def append_at(self, offset: int) -> StoredAppend:
        """The batch with the record at an offset, in the hot tier."""

    def reading(self) -> Log:
        """The log up to the commit watermark, over both tiers."""

    @property
    def tickets(self) -> Tickets:
        """Issues and verifies tickets for the spans of a plan."""

    def promote(self, *, force: bool) -> Topology:
        """Become the primary if that loses nothing committed; ``force`` ignores nodes that cannot be reached."""

    def status(self) -> NodeStatus:
        """Role, position and health of this node."""

    def rebootstrap(self) -> None:
        """Rebuild the copy of the log from a snapshot of the primary; ``NotReady`` on a primary."""
