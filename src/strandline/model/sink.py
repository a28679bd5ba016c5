"""Sinks and stores: a sink stores data and cursor atomically; a store can be read, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Gap, NullKey
from strandline.model.addresses import Address
from strandline.model.cursor import Cursor
from strandline.model.head import LogBatch
from strandline.model.snapshot import Snapshot


@runtime_checkable
class Sink(Protocol):
    """Stores records together with its cursor, which alone determines its position.

    All calls may block. After a ``StorageError`` either nothing was stored, or both data and cursor were;
    :meth:`cursor` shows which.
    """

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The stored cursor in that log; None for a new sink. ``Diverged`` if the sink follows another log."""

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Store the records of offsets ``since`` up to ``upto`` and the cursor ``upto``, atomically, exactly once.

        ``records`` has the columns of :data:`~strandline.model.records.READ_SCHEMA`; a sink that keeps the newest
        record per key may be given only those. A range at or below the sink's cursor changes nothing; of one that
        overlaps it, records below the cursor are dropped; one that starts above it is ``Gap``. ``Fenced`` if another
        follower committed at the same time.
        """


@runtime_checkable
class LogAwareSink(Protocol):
    """A sink that asks its log for something, such as the codec of the values."""

    def meet(self, log: Any) -> None:
        """Called by a follower before anything else, with the log that the sink follows."""


@runtime_checkable
class RestorableSink(Sink, Protocol):
    """A sink that other writers can change, and that has earlier versions: a table."""

    def resume(self, log_id: UUID) -> Cursor | None:
        """The cursor for a follower that starts; earlier knowledge of this object is discarded.

        ``Diverged`` if the sink's data does not match its cursor.
        """

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the last version of the sink whose data matches its cursor, if needed; returns the cursor.

        ``serves``: whether the log can continue from a cursor. ``Diverged`` if there is no such version.
        """


@runtime_checkable
class BatchSink(Protocol):
    """A replica's copy of a log: takes whole batches, with their metadata. Its cursor alone determines its position."""

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The stored cursor; None for a new replica."""

    def take(self, batches: Sequence[LogBatch], *, since: Cursor, upto: Cursor) -> None:
        """Durably append the batches of offsets ``since`` up to ``upto``, all of them or a first part.

        Batches below the cursor are skipped; a range that starts above it is ``Gap``.
        """


def without_key(offset: int) -> NullKey:
    """The error for a record without key in a table of the latest values."""
    return NullKey(
        f"The record at offset {offset} has no key, and a table of the latest values keeps one row per key: follow "
        "into a table of mode 'append', or stop producing records without key. Nothing was applied."
    )


def not_a_state(offset: int) -> NullKey:
    """The error for a record without key in a store, or in a snapshot for one."""
    return NullKey(
        f"The record at offset {offset} has no key, and a store keeps one value per key: only a log whose records all "
        "have keys has such a state. Nothing was applied."
    )


def is_applied(*, since: Cursor, upto: Cursor, at: Cursor | None) -> bool:
    """Whether a sink at ``at`` has a range already: the exactly-once rule. ``Gap`` if it starts above the sink."""
    if upto.next < since.next:
        raise Gap(f"A range cannot end ({upto.next}) before it starts ({since.next}).")
    if at is None:
        return False
    if since.next > at.next:
        raise Gap(
            f"The range starts at offset {since.next} and the sink is at {at.next}: applying it would skip "
            f"{since.next - at.next} records. Follow from the sink's own cursor."
        )
    return upto.next <= at.next


def remaining(records: Any, *, since: Cursor, upto: Cursor, at: Cursor | None) -> Any:
    """The part of a range that a sink at ``at`` still has to store; None for nothing: the exactly-once rule.

    ``records`` is a table; other types are passed through if nothing is dropped. A new sink (``at`` is None) takes the
    whole range: the follower chooses its start.
    """
    if is_applied(since=since, upto=upto, at=at):
        return None
    if at is None:
        return records
    if since.next == at.next:
        return records
    return records.filter(pc.greater_equal(records.column("offset"), at.next))


@dataclass(frozen=True, slots=True)
class StorePosition:
    """Position of a store. While ``resync`` names a stream, the state belongs to no cursor.

    The cursor is then that from before the resync; following continues only after a resync that was finished.
    """

    cursor: Cursor | None
    resync: UUID | None = None


@runtime_checkable
class Store(Sink, Protocol):
    """Keyed state on disk or in memory, written by one follower, read by any thread.

    ``apply`` is the sink's: puts set, deletes and purges delete, a null value is empty, a record without key is
    ``NullKey``. Each write is atomic. Whether it is durable when the call returns is an option of the store
    (``sync``). During a resync ``apply``, ``cursor`` and ``export_to`` raise ``NotReady``.

    After a failed write :meth:`position` shows what is stored; the same write may be retried.
    """

    def position(self) -> StorePosition:
        """The cursor, of any stream, and whether a resync is running. Never raises for another log."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call.

        Streamed: beyond the keys, a large range takes no more memory than a small one.
        """

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark that a resync with a stream is running. May be repeated, also with another stream."""

    def resync(self, records: pa.Table) -> None:
        """Apply puts and deletes without the rule of offsets; the cursor stays. ``InvalidInput`` without a resync."""

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync at a cursor. ``InvalidInput`` without a resync, or for another stream."""

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call as a snapshot in a folder that must be absent or empty.

        Its cursor matches its data exactly. ``AlreadyExists`` if the folder is occupied, ``NotReady`` for a
        store without cursor. Reads and writes continue meanwhile.
        """

    def close(self) -> None:
        """Close the store; stored data stays. Idempotent."""
