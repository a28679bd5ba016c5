"""What follows a log: a place that takes data and cursor in one atomic step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Gap, NullKey
from strandline.model.batch import LogBatch
from strandline.model.cursor import Cursor


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
