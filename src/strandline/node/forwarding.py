"""Passing on what replicas ask, to whoever can answer it at the moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from strandline.model.cursor import Cursor
from strandline.node.lead.replica_registry import Progress
from strandline.node.messages import (
    Acknowledgement,
    Caller,
    Chunk,
    Feed,
    Leading,
    Registration,
    Resume,
    SnapshotOffer,
    Topology,
)


class Relay(ABC):
    """Satisfies :class:`~strandline.node.messages.Leading` by one that does; which, is asked anew with each call."""

    @abstractmethod
    def _leading(self) -> Leading:
        """Who answers now; raises if nobody can."""

    def register(self, caller: Caller, *, region: str | None) -> Registration:
        """Be known as a replica."""
        return self._leading().register(caller, region=region)

    def unregister(self, caller: Caller, *, keep_slot: bool) -> None:
        """Be known no longer."""
        self._leading().unregister(caller, keep_slot=keep_slot)

    def resume(self, caller: Caller, since: Cursor | None) -> Resume:
        """How to go on from the caller's own position."""
        return self._leading().resume(caller, since)

    def feed(self, caller: Caller, since: Cursor) -> Feed:
        """Everything from a position on."""
        return self._leading().feed(caller, since)

    def acknowledge(self, caller: Caller, progress: Progress) -> Acknowledgement:
        """Report how far the caller is."""
        return self._leading().acknowledge(caller, progress)

    def tell(self, caller: Caller, progress: Progress) -> str | None:
        """The same without an answer."""
        return self._leading().tell(caller, progress)

    def begin_snapshot(self, caller: Caller, kind: str) -> SnapshotOffer:
        """Pin the log where it ends, and seal a snapshot behind that."""
        return self._leading().begin_snapshot(caller, kind)

    def chunks(self, caller: Caller, snapshot: str, path: str, offset: int) -> Iterator[Chunk]:
        """A file of a snapshot from a byte on."""
        return self._leading().chunks(caller, snapshot, path, offset)

    def end_snapshot(self, caller: Caller, cursor: Cursor) -> None:
        """The bootstrap is complete."""
        self._leading().end_snapshot(caller, cursor)

    def topology(self, caller: Caller) -> Topology:
        """Who replicates the log, and how far each is."""
        return self._leading().topology(caller)
