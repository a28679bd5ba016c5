"""Reads an Iceberg table's snapshots: the sink's own commits, and changes by others since. No I/O.

The cursor is in the summary of the sink's snapshot, so that a rollback takes it back; and with that snapshot's id in a
property of the table, which a rollback leaves. Together they show that the sink's last commit is still in effect:
the snapshot of the property is an ancestor of the current one, and no snapshot since changed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from strandline.errors import Diverged, InvalidInput
from strandline.model.cursor import Cursor
from strandline.tables.files.followed import REMEDY, OwnCommit
from strandline.tables.files.recorded import COMMIT_KEY, CURSOR_KEY, HOLDER_KEY, START_KEY

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

NAME_KEY: Final = "strandline.name"
"""Property of the table, and part of each snapshot's summary: the name of the sink."""
LOG_KEY: Final = "strandline.log-id"
"""Property of the table: the log that it follows.

Further properties are those of every table of files. ``START_KEY`` is part of each snapshot's summary, too. The value
of ``COMMIT_KEY`` is the next offset, and the snapshot that brought it there (``next@snapshot``).
"""

MINUTE: Final = 60_000
"""Milliseconds between snapshots that upkeep keeps of all but the last few minutes."""
HARMLESS: Final = frozenset({"replace"})
"""Operations that keep all rows: files were rewritten."""


def ancestors(metadata: TableMetadata) -> Iterator[Snapshot]:
    """The current snapshot, then its ancestors back to the oldest that has not expired."""
    snapshot = metadata.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot_by_id(parent)


def lineage(metadata: TableMetadata) -> Iterator[Snapshot]:
    """The current snapshot and its ancestors, then older ones that were current: upkeep leaves gaps among ancestors.

    An older one has a lower number than all before it, so that what was rolled back and replaced is left out.
    """
    lowest: Snapshot | None = None
    for lowest in ancestors(metadata):
        yield lowest
    for entry in reversed(metadata.snapshot_log):
        one = metadata.snapshot_by_id(entry.snapshot_id)
        if one is not None and lowest is not None and (one.sequence_number or 0) < (lowest.sequence_number or 0):
            lowest = one
            yield one


def current_since(metadata: TableMetadata, limit: int, dense: int | None = None) -> set[int]:
    """The snapshots that were current at a time (in milliseconds) or after it, also those that were rolled back.

    Of those that were replaced before the time ``dense`` only the ones that were current at a full minute.
    """
    line = [(one.timestamp_ms, one.snapshot_id) for one in lineage(metadata)][::-1]
    logged = [(one.timestamp_ms, one.snapshot_id) for one in metadata.snapshot_log]
    # A log may lack what other programs removed of it.
    return {number for times in (line, logged) for number in kept(times, limit, limit if dense is None else dense)}


def kept(times: Sequence[tuple[int, int]], limit: int, dense: int) -> Iterator[int]:
    """The snapshots that are kept of those which became current at these times (in milliseconds), in that order.

    >>> second, minute = 1000, 60_000
    >>> times = [(at * second, at) for at in range(0, 300, 20)]
    >>> list(kept(times, limit=50 * second, dense=250 * second))
    [40, 60, 120, 180, 240, 260, 280]
    """
    ends = [*(at for at, _ in times[1:]), None]
    for (at, number), end in zip(times, ends, strict=True):
        full_minute = -(-at // MINUTE) * MINUTE
        if end is None or end > dense or (end > limit and (at <= limit or full_minute < end)):
            yield number


def summary_of(snapshot: Snapshot) -> Mapping[str, str]:
    """What writers stored with a snapshot."""
    return {} if snapshot.summary is None else snapshot.summary.additional_properties


def start_in(metadata: TableMetadata) -> int:
    """The offset at which rows begin: that of the newest snapshot that has it, so that a rollback takes it back."""
    summaries = (summary_of(snapshot) for snapshot in ancestors(metadata))
    stored = next((one[START_KEY] for one in summaries if START_KEY in one), None)
    recorded = metadata.properties.get(START_KEY, "0") if stored is None else stored
    return int(recorded) if recorded.isdecimal() else 0


def own_cursor(snapshot: Snapshot, log_id: UUID, name: str) -> Cursor | None:
    """The cursor that the sink stored with a snapshot; None for one of another writer."""
    summary = summary_of(snapshot)
    if summary.get(NAME_KEY) != name:
        return None
    try:
        cursor = Cursor.parse(summary.get(CURSOR_KEY, ""))
    except InvalidInput:
        return None
    return cursor if cursor.log_id == log_id else None


def last_commit(metadata: TableMetadata, log_id: UUID, name: str, where: str, *, is_shared: bool) -> OwnCommit:
    """The sink's last snapshot, proved to be still in effect. ``is_shared``: anybody may change rows."""
    committed = metadata.properties.get(COMMIT_KEY)
    for snapshot in ancestors(metadata):
        cursor = own_cursor(snapshot, log_id, name)
        if cursor is not None:
            mark = commit_mark(cursor, snapshot.snapshot_id)
            if committed != mark:
                raise Diverged(
                    f"The last snapshot that the follower of the table {where} made is {mark}, and it had committed "
                    f"{committed}: the table was rolled back. {REMEDY}"
                )
            holder = summary_of(snapshot).get(HOLDER_KEY)
            return OwnCommit(str(metadata.table_uuid), snapshot.snapshot_id, cursor, holder)
        operation = "unknown" if snapshot.summary is None else snapshot.summary.operation.value
        if operation not in HARMLESS and not is_shared:
            raise Diverged(
                f"Snapshot {snapshot.snapshot_id} of the table {where} was not committed by its follower and changed "
                f"rows ({operation}), so that they no longer match its cursor. {REMEDY}"
            )
    raise Diverged(
        f"The snapshot {committed} of the table {where} is no ancestor of the current one, or has expired, so that it "
        f"is unknown whether rows were changed since. {REMEDY}"
    )


def commit_mark(cursor: Cursor, snapshot_id: int) -> str:
    """The property that names the sink's last commit.

    >>> commit_mark(Cursor(UUID(int=1), 42), 7)
    '42@7'
    """
    return f"{cursor.next}@{snapshot_id}"
