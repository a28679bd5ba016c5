"""The offset at which the rows of a Delta table begin: as recorded, after rebuilds and after restores by others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from uuid import UUID

from strandline.errors import NotFound, TransientStorageError
from strandline.tables.delta.handles import id_of, listed_files, log_of
from strandline.tables.delta.history import TableCommit, last_restore, parse_commit, version_with
from strandline.tables.delta.recorded_shape import recorded_start
from strandline.tables.delta.table import FollowedDelta

if TYPE_CHECKING:
    from deltalake import DeltaTable


def start_of(followed: FollowedDelta, table: DeltaTable) -> int:
    """The offset at which the table's rows begin.

    That of its last rebuild from another start, else that of its first follower. If another writer has restored
    the table since, the start of the version whose rows it has again: Delta keeps transactions over a restore.
    Searches the whole transaction log: too slow for each commit.
    """
    log_id = log_of(table)
    if log_id is None:
        return first_start(followed, table)
    restore = last_restore(table.version(), followed.read_commit, followed.application(UUID(log_id)))
    if restore is not None:
        with contextlib.suppress(NotFound):  # that version was cleaned up
            version = _restored_by(followed, restore)
            if version is not None and version < restore.version:
                return start_of(followed, followed.at_version(version))
    return stored_start(followed, table)


def _restored_by(followed: FollowedDelta, restore: TableCommit) -> int | None:
    """The version whose rows a RESTORE has brought back; None if that cannot be known."""
    if restore.restored is not None:
        return restore.restored
    after, before = (set(listed_files(followed.at_version(restore.version - back))) for back in (0, 1))
    return version_with(after, before, restore.version - 1, followed.read_commit)


def stored_start(followed: FollowedDelta, table: DeltaTable) -> int:
    """The start by the table's transactions, which may be that of rows that a restore has undone."""
    log_id = log_of(table)
    if log_id is None:
        return first_start(followed, table)
    name = followed.application(UUID(log_id)).start(id_of(table))
    try:
        moved = followed.transaction_in(table, name)
    except TransientStorageError:  # the handle names commits that were cleaned up since
        fresh = followed.open_again()
        moved = None if fresh is None else followed.transaction_in(fresh, name)
    return first_start(followed, table) if moved is None else moved


def first_start(followed: FollowedDelta, table: DeltaTable) -> int:
    """The offset at which the table's first follower began, as recorded, or by its first commit."""
    recorded = recorded_start(table)
    if recorded is not None:
        return recorded
    log_id, first = log_of(table), followed.read_commit(0)
    if log_id is None or first is None:
        return 0
    cursor = parse_commit(0, first, followed.application(UUID(log_id))).cursor
    return 0 if cursor is None else cursor.next
