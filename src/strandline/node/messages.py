"""Messages between nodes, and between a node and its clients, as values; and what one node calls of another.

Over Flight or directly: the simulation does the latter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

import msgspec

from strandline.errors import CommitTimedOut, InvalidInput
from strandline.formats.node.ticket import TicketKey
from strandline.log.slots.resume import FullRebootstrap, PartialResync
from strandline.log.slots.slot_lag import SlotLag
from strandline.model.arguments import Natural
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch, Receipt
from strandline.model.json_values import PlainName
from strandline.model.node import Heartbeat, Membership
from strandline.model.retention import Retention, SlotLimits, SlotState

WAIT: Final = "wait"
"""The action that blocks until there is a record past a cursor."""
SEAL: Final = "seal"
"""The action that seals the log, and blocks until the seal satisfies the commit policy."""


class Caller(NamedTuple):
    """The caller, and the highest term that it has seen: a primary of a lower term steps down."""

    name: str
    term: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """State of one replica on its primary. Positions are next offsets; times are microseconds."""

    name: PlainName
    region: str | None
    sent: Natural
    applied: Natural | None
    """None before its first acknowledgement: until then it counts for nothing."""
    durable: Natural | None
    apply_errors: Natural
    divergences: Natural
    """Of errors and divergences, the highest counts that it has acknowledged."""
    connected_at: Natural
    last_seen: Natural
    bootstrapping: bool
    """Whether it is bootstrapping, and serves no reads after a bookmark."""
    healthy: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The replicas of a log, as its primary sees them. ``epoch`` grows with each change of membership or health."""

    log_id: UUID
    primary: PlainName
    term: Natural
    term_start: Natural
    """Where the primary's log ended when its term began: only a replica that has everything below counts."""
    epoch: Natural
    policy: str
    """The node's commit policy, as :func:`~strandline.node.lead.policies.parse_policy` reads it."""
    durable: Natural
    committed: Natural
    """The commit watermark: what readers see."""
    members: tuple[Member, ...] = ()
    first: Natural = 0
    """The first offset that the primary itself retains: a replica behind it has to bootstrap."""
    cold: str | None = None
    """The store of the log's cold tier; None for none."""
    membership: Membership | None = None
    """The recorded members of the log; None if they were never changed, or from an earlier version."""
    sealed: bool | None = None
    """Whether the primary's log was sealed, which counts as one more record in ``durable`` and ``committed``, and in
    the offsets of its replicas; None from an earlier version."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A primary's answer to a replica that registers."""

    topology: Topology
    position: Natural | None
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
class ReplicaProgress:
    """The content of an acknowledgement: a replica's offsets and error counts."""

    applied: int
    durable: int
    apply_errors: int = 0
    divergences: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.durable <= self.applied:
            raise InvalidInput(
                f"A replica acknowledges {self.durable} as durable and {self.applied} as applied: durable must be "
                "from 0 up to applied."
            )


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A primary's answer to a replica's acknowledgement."""

    heartbeat: Heartbeat
    refused: str | None = None
    """Why it was rejected: the slot is invalid, and only a bootstrap resets it. None if it counted."""


@dataclass(frozen=True, slots=True)
class Handover:
    """State that the next primary needs besides the log; replicas fetch it about once per heartbeat interval."""

    slots: tuple[SlotState, ...]
    """The slots of consumers, as they are stored."""
    ticket_keys: tuple[TicketKey, ...] = ()
    """The keys by which the nodes of the log sign tickets, the one that signs first."""
    membership: Membership | None = None
    """The recorded members of the log."""


class SlotKind(StrEnum):
    """The holder of a slot on a primary."""

    CONSUMER = "consumer"
    REPLICA = "replica"
    TIER = "tier"
    """The tierer: everything below its position is in the cold tier."""


class NodeSlot(NamedTuple):
    """A slot on a primary with its lag; of a consumer by the name that the consumer gave."""

    kind: SlotKind
    lag: SlotLag


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """All slots of a primary: what each pins, and the retention and limits that apply."""

    slots: tuple[NodeSlot, ...]
    retention: Retention
    limits: SlotLimits
    records_kept: int | None
    """Records that the next trim would delete without the slots that pin the floor; None if it deletes none."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A sealed snapshot that a primary keeps for one replica until its bootstrap is done."""

    name: str
    manifest: bytes
    """Its ``MANIFEST.json``: the cursor, and size and hash of each file."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
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
    term: Natural
    adopted: Natural
    durable: Natural
    committed: Natural
    """The highest commit watermark that it knows of."""
    unhealthy: str | None
    """The condition that stops it from following, or None."""
    membership: Membership | None = None
    """The newest record of the log's members that it has."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of a node in either role, for operators."""

    name: PlainName
    condition: str
    """``leading``, ``following``, ``connecting``, …"""
    trouble: str | None
    """Why it has stopped until an operator acts, or None."""
    term: Natural
    """The highest term that it has seen."""
    primary: str
    """The last primary that it knew of; empty for none."""
    position: Cursor | None
    """The cursor behind everything durable here; None without a copy of the log."""
    committed: Natural | None
    """The commit watermark here; None while it is unknown, or there is no copy: reads raise ``NotReady``."""
    divergences: Natural = 0
    """How often this node stopped with a divergence; on a primary, all that its replicas reported."""
    tiering: str | None = None
    """Why the primary's last round of tiering failed; None if it did not."""
    membership: Membership | None = None
    """The newest record of the log's members that it has; None if they were never changed."""


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span of a plan on the wire; its records are read with a ticket."""

    first: Natural
    next: Natural
    size: Natural
    term: Natural
    fingerprint: str | None
    """None for a span of the cold tier."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan on the wire."""

    spans: tuple[PlannedSpan, ...]
    is_whole: bool
    """Whether the plan has all spans that are within the limit and in the log."""
    end: Natural | None = None
    """Where the log ends for readers of this node; None from an earlier version."""
    ticket: str | None = None
    """The signed right to read these spans, for a while; None from a node that has no key yet."""


@dataclass(frozen=True, slots=True)
class NotRequired:
    """The policy needs the records durable on the primary only, and they are."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The policy is satisfied: its watermark has passed the records."""

    watermark: Natural


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The records are durable on the primary; the policy was not satisfied in time, and may still be."""

    watermark: Natural
    policy: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


CommitOutcome: TypeAlias = NotRequired | Reached | TimedOut


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of an append: the offsets of its records, and whether the policy was satisfied in time.

    Satisfies :class:`~strandline.log.contract.Handle`, whose outcome is known.
    """

    receipt: Receipt
    outcome: CommitOutcome
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


# --- what nodes call -------------------------------------------------------------------------------------------


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


@runtime_checkable
class Upstream(Protocol):
    """A node as other nodes call it. All calls may block on the network.

    ``TransientStorageError`` if no answer came: the call may have been executed, and repeating it is safe. ``NotReady``
    from a node that does not lead. ``Fenced`` if the caller has seen a higher term, or is not authorised. Errors of
    the node are raised as the same classes.
    """

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Register as a replica; repeating it only refreshes when it was last seen."""

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """How to resume from the caller's position; None for a new replica. Registers an unknown caller."""

    def feed(self, caller: Caller, since: Cursor) -> ReplicationFeed:
        """The batches from a position on, up to the durable end and following it."""

    def acknowledge(self, caller: Caller, progress: ReplicaProgress) -> Acknowledgement:
        """Acknowledge the caller's offsets. ``NotFound`` if unregistered, ``Diverged`` past the log's end."""

    def acknowledge_nowait(self, caller: Caller, progress: ReplicaProgress) -> str | None:
        """Acknowledge without waiting for the answer; returns why it was rejected, if that is known at once.

        Over a network the rejection is not known at once: a later :meth:`acknowledge` raises it.
        """

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log at its end, and seal a snapshot behind that; repeating it returns the same while it is kept."""

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[SnapshotChunk]:
        """A file of a snapshot from a byte on. ``NotFound`` if the snapshot has expired: begin another."""

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor: reset the slot to it, and remove the snapshot."""

    def topology(self, caller: Caller) -> Topology:
        """The replicas of the log with their offsets."""

    def handover(self, caller: Caller, *, membership: tuple[int, int]) -> Handover:
        """State that a replica needs beside its copy of the log, to become the primary.

        ``membership`` is the version of the members' record that is durable at the caller; (0, 0) for none.
        """

    def report(self, caller: Caller) -> ElectionReport:
        """The node's election report, in either role; from now on it refuses terms below the caller's."""

    def close(self) -> None:
        """Close the connection. Idempotent."""
