"""The contract of a queue (claim, list, durable acknowledgement, fetch), dead letters, and the check of its history."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.errors import Diverged, NotFound, SlotInvalid
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.head import Descriptor, MetadataRange, MetadataRanges
from strandline.model.retention import SlotState
from strandline.storage.objects.store import ObjectStore


def start_of(descriptor: Descriptor) -> int:
    """The position at which a batch begins: its ``start``, if its sequence is that of its last record."""
    start: int = getattr(descriptor, "start", descriptor.sequence)
    return start


@dataclass(frozen=True, slots=True)
class PeekedBatches:
    """Consecutive batches of a queue, and how much is listed but not acknowledged.

    ``length`` counts batches, or records in a queue that numbers batches by their records; ``records`` and ``size``,
    in stored bytes, are None where the queue does not know them.
    """

    descriptors: tuple[Descriptor, ...]
    length: int
    records: int | None = None
    size: int | None = None
    ended: bool = False
    """Whether no batch will ever follow: the log was sealed there."""


@dataclass(frozen=True, slots=True)
class Writes:
    """Number of conditional writes of a queue, and of those that lost a race."""

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
    """The consumer side of a log: a slot of a log, or a queue of version 1.

    All calls except :meth:`writes` and :meth:`fetcher` may block on the store. Only :meth:`claim` and
    :meth:`acknowledge` change anything. Once claimed it is safe in threads.
    """

    @property
    def url(self) -> str:
        """The address of the queue."""

    @property
    def slot(self) -> str:
        """The name of the slot that is consumed."""

    def claim(self, holder: str, last_acked: int | None) -> int:
        """Become the only consumer, fencing the former one; returns the next sequence to acknowledge.

        With ``last_acked`` everything through it is acknowledged. Durable when it returns. ``InvalidInput`` or
        ``Diverged`` if there is no such batch yet, ``CursorExpired`` if the one after it is deleted: both claim
        nothing.
        """

    def peek(self, since: int, limit: int | None = None) -> PeekedBatches:
        """Consecutive listed batches from sequence ``since`` on, up to ``limit``, which may be 0.

        ``Fenced`` if another consumer has claimed since, ``CursorExpired`` if the first of them is deleted.
        """

    def between(self, first: int, last: int) -> Sequence[Descriptor]:
        """The listed batches ``first`` through ``last``; ``CursorExpired`` if some are deleted, ``Fenced``."""

    def acknowledge(self, through: Descriptor) -> int | None:
        """Durably acknowledge everything through this batch. ``Fenced`` and storage errors change nothing.

        Returns how many listed batches are not acknowledged, as :meth:`peek` counts them, if the call knows that; None
        if it does not read the listing.
        """

    def fetcher(self) -> Fetcher:
        """The reader for the batches of this queue."""

    def dead_letter(self, descriptor: Descriptor, reason: str) -> str:
        """Durably store an unreadable batch, descriptor and bytes if there are any; returns its location.

        Repeating it for the same batch replaces it. ``Fenced`` changes nothing: to a fenced consumer a batch
        may be missing only because a newer consumer has passed it.
        """

    def trim(self, pause: float = 0.0) -> None:
        """One round of trimming; skipped if any process began one ``pause`` seconds ago."""

    def heartbeat(self) -> SlotHeartbeat | None:
        """The heartbeat that keeps the consumer's slot alive, also while it is busy; not started yet.

        None if the slot needs none now. It is asked again: a limit may be set at any time.
        """

    def writes(self) -> Writes:
        """Conditional writes so far; no I/O."""


def check_usable(state: SlotState, slot: str, url: str) -> None:
    """``SlotInvalid`` for a slot that was invalidated: the operator has to choose where its consumer resumes."""
    if state.invalid is not None:
        raise SlotInvalid(
            f"Slot {slot!r} of {url} was invalidated ({state.invalid.reason}) and pins nothing: its records may "
            f"be gone. Choose where to resume, and reset it ('strandline slots reset')."
        )


def keep_letter(
    store: ObjectStore, folder: str, fetcher: Fetcher, descriptor: Descriptor, *, reason: str, now: int
) -> str:
    """Durably store a descriptor, and its object's bytes if there are any; returns the location.

    The letter ``<folder>/<sequence>.json`` is written last: if it exists, so does the ``.batch`` beside it
    that it names. Repeating it replaces both.
    """
    path = f"{folder}/{descriptor.sequence:020d}"
    kept: str | None = f"{path}.batch"
    try:
        store.put(f"{path}.batch", fetcher.raw(descriptor))
    except NotFound:
        kept = None
    store.put(f"{path}.json", encode_letter(descriptor, reason=reason, now=now, kept=kept))
    return f"{store.url}/{path}.json"


def encode_letter(descriptor: Descriptor, *, reason: str, now: int, kept: str | None) -> bytes:
    """The letter as JSON: the whole descriptor, the reason, the time (microseconds), and where its bytes are."""
    letter = {"descriptor": _plain(descriptor), "reason": reason, "at": now, "bytes": kept}
    return json.dumps(letter, indent=1).encode()


def _plain(value: object) -> Any:
    if isinstance(value, MetadataRange):
        return {"start": value.start, "ingested": value.ingested, "payload": b64encode(value.payload).decode()}
    if isinstance(value, tuple | MetadataRanges):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        # Fields without a repr are not stored either: the span that reads a batch may hold credentials.
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.repr}
    return str(value) if isinstance(value, UUID) else value


class GivenBatches:
    """Remembers the last batch that a queue gave its consumer, and refuses a queue that has another one in its place.

    A queue that is restored from an older copy while its consumer runs continues with other batches under the same
    sequences. The consumer would skip those that it seems to have read, and acknowledge them with the next.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Descriptor | None = None

    def note(self, batches: Sequence[Descriptor]) -> None:
        """Note that these consecutive batches were given."""
        if batches and (self._last is None or batches[-1].sequence > self._last.sequence):
            self._last = batches[-1]

    def check(self, url: str, end: int, listed: Callable[[int], Descriptor | None]) -> None:
        """``Diverged`` if the queue, whose next batch is ``end``, does not have the last batch that was given.

        ``listed`` returns the batch of a sequence, or None if it is no longer listed; then nothing is checked.
        """
        last = self._last
        if last is None:
            return
        found = listed(last.sequence) if last.sequence < end else None
        if last.sequence >= end or (found is not None and found.location != last.location):
            raise Diverged(
                f"Batch {last.sequence} of {url} is not the one that this consumer was given ({last.location}): the "
                "queue was restored from a copy, or replaced. Nothing was taken or acknowledged: undo what was done "
                "with batches of the other history, and open a new consumer, which begins at the slot's position."
            )
