"""The contract of a queue: claim, list, durable acknowledgement, fetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from strandline.log.heartbeat import SlotHeartbeat
from strandline.model.head import Descriptor


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a queue found: consecutive batches, and how much is listed and not acknowledged.

    ``length`` counts batches; ``records`` and ``size``, in stored bytes, are None where the queue does not know them.
    """

    descriptors: tuple[Descriptor, ...]
    length: int
    records: int | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Writes:
    """How many conditional writes a queue has done, and how many of them lost a race."""

    done: int
    lost: int


@runtime_checkable
class Fetcher(Protocol):
    """Reads batches. Picklable and stateless: safe in threads, other processes and Spark executors."""

    def fetch(self, descriptor: Descriptor) -> list[pa.RecordBatch]:
        """The batch's records with their offsets; equal descriptors give equal batches.

        ``CorruptData`` or ``NotFound`` naming the object.
        """

    def raw(self, descriptor: Descriptor) -> bytes | memoryview:
        """The object's bytes as they are, unchecked, or ``NotFound``."""


@runtime_checkable
class Queue(Protocol):
    """One consumer's side of a log: an own log with a slot, or a queue of version 1.

    All calls but :meth:`writes` and :meth:`fetcher` may block on the store. Only :meth:`claim` and
    :meth:`acknowledge` move anything. Once claimed it is safe in threads. ``strandline.testing.queues.QueueContract``
    is its test.
    """

    @property
    def url(self) -> str:
        """Where the queue is."""

    @property
    def slot(self) -> str:
        """The name of the slot that is consumed."""

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer, fencing the former one; returns the sequence that is to be acknowledged next.

        With ``last_acked`` everything through it is acknowledged. Durable when it returns. ``InvalidInput`` or
        ``Diverged`` if there is no such batch yet, ``CursorExpired`` if the one behind it is gone: both claim nothing.
        """

    def look(self, since: int, limit: int | None = None) -> Look:
        """Consecutive listed batches from sequence ``since`` on, up to ``limit``, which may be 0.

        ``Fenced`` if someone else has claimed since, ``CursorExpired`` if the first of them is gone.
        """

    def between(self, first: int, last: int) -> Sequence[Descriptor]:
        """The listed batches ``first`` through ``last``; ``CursorExpired`` if some are gone, ``Fenced``."""

    def acknowledge(self, through: Descriptor) -> None:
        """Durably acknowledge everything through this batch. ``Fenced`` and storage errors change nothing."""

    def fetcher(self) -> Fetcher:
        """What reads the batches of this queue."""

    def dead_letter(self, descriptor: Descriptor, reason: str) -> str:
        """Durably keep a batch that cannot be read, descriptor and bytes if there are any; returns where.

        Repeating it for the same batch replaces what was kept. ``Fenced`` changes nothing: to a fenced consumer a batch
        may be missing only because someone newer is past it.
        """

    def trim(self, pause: float = 0.0) -> None:
        """One round of trimming and garbage collection; not needed if anybody began one ``pause`` seconds ago."""

    def heartbeat(self) -> SlotHeartbeat | None:
        """What says in time that the consumer is alive, also while it is busy; None if nobody has to know."""

    def writes(self) -> Writes:
        """Conditional writes so far; no I/O."""
