"""What nodes say to one another, as values, and what a node can be asked: the same over Flight and in a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

from strandline.errors import CommitTimedOut
from strandline.log.contract import Receipt
from strandline.log.resume import FullRebootstrap, PartialResync
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.node import Beat
from strandline.model.records import RecordSource
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.lead.policies import CommitPolicy
from strandline.node.lead.replica_registry import Progress


class Caller(NamedTuple):
    """Who asks, and the highest term that it has seen: a primary of a lower one learns that it is none any more."""

    name: str
    term: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as the topology lists it. Positions are next offsets, None before its first acknowledgement."""

    name: str
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
    """Who replicates a log, as its primary sees it. ``epoch`` grows strictly with each real change of it."""

    log_id: UUID
    primary: str
    term: int
    term_start: int
    """Where the primary's log ended when its term began: only who has everything below counts in it."""
    epoch: int
    policy: str
    """The node's commit policy, as :func:`~strandline.node.lead.policies.parse_policy` reads it."""
    durable: int
    committed: int
    """The policy's watermark: what readers see."""
    members: tuple[Member, ...] = ()
    first: int = 0
    """The first offset that the primary retains: who is behind it has to bootstrap again."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a primary answers to a replica that registers."""

    topology: Topology
    position: int | None
    """Where its slot stands; None if that is invalid, and has to be reset by a bootstrap."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """The record before the cursor is not the primary's.

    What both have ends at ``upto`` or before, and is of ``term`` or lower ones: ask again from there.
    """

    upto: int
    term: int


Resume: TypeAlias = PartialResync | Rewind | FullRebootstrap


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a primary answers to a progress report."""

    beat: Beat
    refused: str | None = None
    """Why it counts for nothing: the slot is invalid, and a bootstrap has to reset it. None if it counted."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A sealed snapshot that a primary keeps for one replica until its bootstrap is over."""

    name: str
    manifest: bytes
    """Its ``MANIFEST.json``: the cursor, and each file with size and hash."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a snapshot's file, with its CRC32C."""

    offset: int
    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of itself when somebody wants to become the primary of a term; it refuses lower ones from then.

    ``adopted`` is the highest term whose beginning is all in its log: of two nodes, the one with the higher
    (adopted, durable) has everything that was committed and the other one has.
    """

    name: str
    term: int
    adopted: int
    durable: int
    committed: int
    """The highest watermark that it has heard of."""
    unhealthy: str | None
    """The name of the state that keeps it from following, or None."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a node is, in either role, for whoever looks after it."""

    name: str
    condition: str
    """What it is doing: ``leading``, ``following``, ``connecting``, …"""
    trouble: str | None
    """Why it does nothing until somebody deals with that, or None."""
    term: int
    """The highest that it has seen."""
    primary: str
    """Who led when it last heard of anybody; empty for never."""
    position: Cursor | None
    """Everything below is durable here; None without a copy of the log."""
    committed: int | None
    """What readers see here; None while it is not known, or nothing is here, and they are told ``NotReady``."""
    divergences: int = 0
    """How often this node stopped since it had diverged; on a primary, all that its replicas have reported."""


@dataclass(frozen=True, slots=True)
class NotRequired:
    """The policy asks for no more than that the primary has the records durably, and it has."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The policy is satisfied: its watermark has passed the records."""

    watermark: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The records are durable on the primary, and the policy was not satisfied in time; it may still come to be."""

    watermark: int
    policy: str
    seconds: float


Outcome: TypeAlias = NotRequired | Reached | TimedOut


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of an append: where the records are, and whether the policy was satisfied in time."""

    receipt: Receipt
    outcome: Outcome
    bookmark: Cursor
    """Behind the records: who reads after it, on any node, sees them."""

    def ensure(self) -> Receipt:
        """The receipt, or ``CommitTimedOut`` for a caller to whom that is an error."""
        if isinstance(self.outcome, TimedOut):
            raise CommitTimedOut(
                f"The append is durable on the primary, and {self.outcome.policy} was not satisfied within "
                f"{self.outcome.seconds:g} s (its watermark is {self.outcome.watermark}): it may still be, and is lost "
                "if the primary is before that. Wait, or append again with the same writer and number."
            )
        return self.receipt


class Feed(Protocol):
    """A stream of batches from a primary, in order and without a hole. One thread takes, any thread closes."""

    @property
    def beat(self) -> Beat | None:
        """The primary's latest word; None before the first."""

    def wait(self, timeout: float) -> int:
        """How many bytes the next take reads from a disk, which is asked before they are read: memory is bounded.

        0 if there is nothing, or it is in memory already. It may wait for up to ``timeout`` seconds; the next take does
        not wait again then.
        """

    def take(self, timeout: float) -> Sequence[LogBatch]:
        """What has come, waiting for it no longer than ``timeout`` seconds; empty if nothing did, or only a beat.

        Nothing above the durable end of the latest beat may be applied yet: the primary's disk may not have it, and it
        may be lost, and something else be written in its place. It is on its way meanwhile.

        Raises why the stream ended: ``TransientStorageError`` if the connection broke, ``CursorExpired``, ``Fenced``.
        """

    def close(self) -> None:
        """End the stream; closing twice is fine."""


class Leading(Protocol):
    """What replicas ask of their primary."""

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Be known as a replica; again refreshes when it was last seen, and changes nothing else."""

    def unregister(self, caller: Caller, *, keep_slot: bool) -> None:
        """Be known no longer; not known is fine."""

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """How to go on from the caller's own position; None for a newcomer. Registers it if it is not known."""

    def feed(self, caller: Caller, since: Cursor) -> Feed:
        """Everything from a position on, up to the durable end and following it."""

    def acknowledge(self, caller: Caller, progress: Progress) -> Acknowledgement:
        """Report how far the caller is. ``NotFound`` if it is not registered, ``Diverged`` past the end of the log."""

    def tell(self, caller: Caller, progress: Progress) -> str | None:
        """The same for who does not wait for the answer; why it did not count, if that is known at once.

        Over a network it is not: what was wrong with it, or that it was lost, is said by a later acknowledgement.
        """

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log where it ends, and seal a snapshot behind that; again gives the same while it is kept."""

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[Chunk]:
        """A file of a snapshot from a byte on. ``NotFound`` if the snapshot is not kept any more: begin another."""

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete and durable at this cursor: reset the slot to it, and forget the snapshot."""

    def topology(self, caller: Caller) -> Topology:
        """Who replicates the log, and how far each is."""


class ServedPrimary(Leading, Protocol):
    """A primary as its server calls it: for its replicas, and for clients that append."""

    def append(
        self,
        records: RecordSource,
        *,
        append: tuple[WriterId, int] | None,
        policy: CommitPolicy | None,
        timeout: float,
    ) -> Commit:
        """Append a batch and wait for the node's commit policy, or for a stronger one that the call asks for."""


@runtime_checkable
class Upstream(Leading, Protocol):
    """A node as others reach it. All calls may block on the network.

    ``TransientStorageError`` if the answer did not come: whether the call was done is not known then, and repeating it
    is safe. ``NotReady`` from a node that is no primary. ``Fenced`` if the caller has seen a higher term, or is not
    who it says. Errors of the node come as the same classes that it raised.
    """

    def report(self, caller: Caller) -> Report:
        """What this node has, whatever its role; from now on it refuses terms below the caller's."""

    def close(self) -> None:
        """Let go of the connection; closing twice is fine."""


@runtime_checkable
class Served(Protocol):
    """A node as its server calls it. Every call raises ``NotReady`` while the node is starting."""

    @property
    def primary(self) -> ServedPrimary:
        """The node as the primary; ``NotReady`` if it does not lead."""

    def report(self, caller: Caller) -> Report:
        """What this node has, whatever its role; from now on it refuses terms below the caller's."""

    def reading(self) -> CommittedLog:
        """The log up to the commit watermark."""

    def promote(self, *, force: bool) -> Topology:
        """Become the primary if that loses nothing committed; ``force`` ignores nodes that cannot be reached."""

    def status(self) -> Status:
        """Role, position and health of this node."""

    def rebootstrap(self) -> None:
        """Rebuild the copy of the log from a snapshot of the primary; ``NotReady`` on a primary."""
