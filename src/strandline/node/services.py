"""The protocols of nodes: what a server, another node and the simulation call, over Flight or directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.node import Heartbeat
from strandline.node.lead.replicas import ReplicaProgress
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    ElectionReport,
    Handover,
    Registration,
    Resume,
    SnapshotChunk,
    SnapshotOffer,
    Topology,
)


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
