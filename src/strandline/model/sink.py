"""Sinks and stores: what follows a log takes data and cursor in one atomic step; a store can be read, too."""

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
    """Stores records together with how far it has got. Its cursor is the only truth about that.

    All calls may block, and raise ``StorageError`` when storage fails: then either nothing was stored, or data and
    cursor both were; asking :meth:`cursor` again tells which.
    """

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far this sink has applied that log; None for a newcomer. ``Diverged`` if it follows another log."""

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Store the records of offsets ``since`` up to ``upto`` and the cursor ``upto``, atomically, exactly once.

        ``records`` has the columns of :data:`~strandline.model.records.READ_SCHEMA`; a sink that keeps the newest
        record per key may be given only those. A range at or below the sink's cursor changes nothing; of one that
        overlaps it, records below the cursor are dropped; one that starts above it is ``Gap``. ``Fenced`` if another
        follower committed at the same time.
        """


@runtime_checkable
class RestorableSink(Sink, Protocol):
    """A sink that others can change, and that has earlier versions: a table."""

    def resume(self, log_id: UUID) -> Cursor | None:
        """The cursor for a follower that starts; what this object knew of the sink before does not count any more.

        ``Diverged`` if the sink no longer holds what its cursor says.
        """

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Put the sink back to its last version that holds what its cursor says, if it does not; the cursor there.

        ``serves`` says whether the log can go on from a cursor. ``Diverged`` if there is no such version.
        """


@runtime_checkable
class BatchSink(Protocol):
    """A copy of a log: takes batches as they are, with what was written down beside their records.

    As with every sink, its cursor is the only truth about how far it has got.
    """

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far it has got; None for a newcomer."""

    def take(self, batches: Sequence[LogBatch], *, since: Cursor, upto: Cursor) -> None:
        """Durably append the batches of offsets ``since`` up to ``upto``, all of them or a first part.

        What is below the copy's cursor changes nothing; what starts above it is ``Gap``.
        """


def without_key(offset: int) -> NullKey:
    """The refusal of a record that a table of the latest values has no row for."""
    return NullKey(
        f"The record at offset {offset} has no key, and a table of the latest values keeps one row per key: follow "
        "into mode='append', or stop producing records without key. Nothing was applied."
    )


def remaining(records: Any, *, since: Cursor, upto: Cursor, at: Cursor | None) -> Any:
    """What of a range is still to be stored by a sink that is at ``at``: the exactly-once rule, as a function.

    ``records`` is a table; whatever else it may be is passed through where nothing of it is to be dropped. None means
    that nothing is to be stored. A newcomer (``at`` is None) takes the range as it comes: where it begins is the
    follower's choice.
    """
    if upto.next < since.next:
        raise Gap(f"A range cannot end ({upto.next}) before it starts ({since.next}).")
    if at is None:
        return records
    if upto.next <= at.next:
        return None
    if since.next > at.next:
        raise Gap(
            f"The range starts at offset {since.next} and the sink is at {at.next}: applying it would skip "
            f"{since.next - at.next} records. Follow from the sink's own cursor."
        )
    if since.next == at.next:
        return records
    return records.filter(pc.greater_equal(records.column("offset"), at.next))


@dataclass(frozen=True, slots=True)
class StorePosition:
    """How far a store has got. While ``resync`` names a stream, the state is neither here nor there.

    The cursor then is the one from before; following can go on only when the resync has been done again to its end.
    """

    cursor: Cursor | None
    resync: UUID | None = None


@runtime_checkable
class Store(Sink, Protocol):
    """Keyed state on a disk or in memory, moved by one follower, read by any thread at any time.

    ``apply`` is the sink's: puts set, deletes and purges remove, a null value is the empty one, a record without key
    is ``NullKey``. Each write is atomic: a crash leaves all of it or nothing. Whether it is durable when the call
    returns is the store's stated choice (``sync``). While a resync is under way ``apply`` and ``cursor`` raise
    ``NotReady`` and ``export_to`` does so too.

    After a write failed, what the store holds is what :meth:`position` says; the same write may be tried again.
    """

    def position(self) -> StorePosition:
        """The cursor, of whichever stream, and whether a resync is under way. Never raises for another log."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call.

        Streams: it takes no more memory for a large range than a small one needs, beyond the keys.
        """

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark the state as being brought in step with a stream. Again is fine, of another stream too."""

    def resync(self, records: pa.Table) -> None:
        """Apply puts and removals outside the rule of offsets; the cursor stays. ``InvalidInput`` without a begin."""

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync at a cursor. ``InvalidInput`` without a begin, or of another stream than begun."""

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call as a snapshot in a folder that must be absent or empty.

        Its cursor is exactly what its data holds. ``AlreadyExists`` if the folder is occupied, ``NotReady`` for a
        store without cursor. Reads and writes go on meanwhile.
        """

    def close(self) -> None:
        """Let go of the files; what was written is kept. Closing twice is fine."""
