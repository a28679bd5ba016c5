"""Commits to an Iceberg table that follows a log: each is one snapshot with the cursor, durable before it counts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from strandline.errors import Conflict, StrandlineError, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.storage.disk import make_own_folder
from strandline.tables.files.recorded import CHANGE_KEY, COMMIT_KEY, CURSOR_KEY, HOLDER_KEY, START_KEY, told_rebuild
from strandline.tables.iceberg.files import data_file, location_path
from strandline.tables.iceberg.history import (
    LOG_KEY,
    NAME_KEY,
    KnownSnapshot,
    ancestors,
    commit_mark,
    current_since,
    start_in,
)
from strandline.tables.iceberg.table import Begun, FollowedIceberg

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IcebergCommits:
    """Commits to a table on a state that was proved."""

    followed: FollowedIceberg
    holder: str | None = None
    """The follower that holds the table since these commits; None: the one that held it before."""

    def commit(
        self,
        begun: Begun,
        added: Sequence[DataFile],
        removed: Sequence[str],
        upto: Cursor,
        *,
        start: int | None = None,
        moved: str = "",
    ) -> None:
        """Commit files and cursor as one snapshot; ``Conflict`` if another commit was first.

        The table follows the cursor's log. ``start``: its rows begin at this offset then. ``moved``: what the history
        says of another log than before.
        """
        transaction = begun.transaction
        folder = location_path(begun.files.location)
        if folder is not None and begun.found is None:
            make_own_folder(f"{folder}/metadata", disk=self.followed.disk)  # others could read the library's
        listed = self.followed.data_files(begun) if removed else {}
        with self.followed.named_errors():
            schema = transaction.table_metadata.schema()
            begins = start_in(transaction.table_metadata) if start is None else start
            summary = {CURSOR_KEY: str(upto), NAME_KEY: self.followed.name, START_KEY: str(begins)}
            told = [moved, begun.told] if start is None else [told_rebuild(start, upto), begun.told]
            held = begun.holder if self.holder is None else self.holder
            if held is not None:
                summary[HOLDER_KEY] = held
            if any(told):
                summary[CHANGE_KEY] = "; ".join(filter(None, told))
            producer = _producer(transaction, begun.files.io, summary, is_replacing=bool(removed))
            with producer:
                for file in added:
                    producer.append_data_file(data_file(file, schema))
                for path in removed:
                    producer.delete_data_file(listed[path])
            first = {} if start is None else {START_KEY: str(start)}  # for when this snapshot has expired
            mark = commit_mark(upto, producer.snapshot_id)
            transaction.set_properties({LOG_KEY: str(upto.log_id), COMMIT_KEY: mark, **first})
        table = self._committed(transaction, producer)
        self.followed.make_durable(table, producer.snapshot_id, is_own=True)
        self.followed.known[upto.log_id] = KnownSnapshot(table.metadata.table_uuid, producer.snapshot_id, upto, held)

    def _committed(self, transaction: Transaction, producer: Any) -> Table:
        """Commit, and return the table. A commit whose answer was lost is recognised by the snapshot's number."""
        snapshot_id, clean_up = producer.snapshot_id, producer._clean_all_uncommitted  # noqa: SLF001
        # A refused commit makes the library delete the snapshot's manifests. The refusal may be that of a repeated
        # request, whose first one landed: the table would be lost.
        producer._clean_all_uncommitted = lambda: None  # noqa: SLF001
        try:
            with self.followed.named_errors():
                return transaction.commit_transaction()
        except (Conflict, TransientStorageError) as error:
            with contextlib.suppress(StrandlineError):
                table = self.followed.open()
                if table is not None and snapshot_id in _line(table):
                    _LOGGER.warning(
                        "Snapshot %d of %s is committed, though its answer was lost: %s",
                        *(snapshot_id, self.followed.identifier, error),
                    )
                    return table
                if isinstance(error, Conflict):
                    clean_up()
            raise

    def reset(self, table: Table, snapshot_id: int, cursor: Cursor) -> None:
        """Go back to a snapshot, with its cursor, in one commit."""
        from pyiceberg.table import update

        updates: Any = update  # its models take names that type checkers do not know
        current = table.metadata.current_snapshot()
        back = updates.SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot_id)
        mark = updates.SetPropertiesUpdate(updates={COMMIT_KEY: commit_mark(cursor, snapshot_id)})
        requirements = (
            updates.AssertTableUUID(uuid=table.metadata.table_uuid),
            updates.AssertRefSnapshotId(ref="main", snapshot_id=None if current is None else current.snapshot_id),
        )
        with self.followed.named_errors():
            table.catalog.commit_table(table, requirements, (back, mark))
        _LOGGER.warning("The table %s is at snapshot %d again, at %s.", self.followed.identifier, snapshot_id, cursor)

    def expire(self, table: Table, log_id: UUID, before: datetime) -> int:
        """Expire older snapshots, but none back to the follower's last commit, and none that was current since.

        Those may have readers who began before they were replaced. ``Conflict`` if a branch or a tag was moved since
        ``table`` was loaded: catalogs drop a branch whose snapshot expires, and the current snapshot is that of one.
        """
        proof = self.followed.last_commit(table, log_id).snapshot_id
        needed = set()
        for snapshot_id in _line(table):
            needed.add(snapshot_id)
            if snapshot_id == proof:
                break
        limit = int(before.timestamp() * 1000)
        needed |= current_since(table.metadata, limit) | {ref.snapshot_id for ref in table.metadata.refs.values()}
        old = [
            one.snapshot_id
            for one in table.metadata.snapshots
            if one.timestamp_ms < limit and one.snapshot_id not in needed
        ]
        if old:
            self._remove_snapshots(table, old)
        return len(old)

    def _remove_snapshots(self, table: Table, old: Sequence[int]) -> None:
        """Remove snapshots if all branches and tags are where they were; the library does not ask for that."""
        from pyiceberg.table import update

        updates: Any = update  # its models take names that type checkers do not know
        refs = table.metadata.refs.items()
        requirements = (
            updates.AssertTableUUID(uuid=table.metadata.table_uuid),
            *[updates.AssertRefSnapshotId(ref=name, snapshot_id=ref.snapshot_id) for name, ref in refs],
        )
        with self.followed.named_errors():
            table.catalog.commit_table(table, requirements, (updates.RemoveSnapshotsUpdate(snapshot_ids=old),))


def _line(table: Table) -> Iterator[int]:
    """The numbers of the current snapshot and its ancestors."""
    return (snapshot.snapshot_id for snapshot in ancestors(table.metadata))


def _producer(transaction: Transaction, io: Any, summary: dict[str, str], *, is_replacing: bool) -> Any:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _OverwriteFiles

    if not is_replacing:
        return transaction.update_snapshot(snapshot_properties=summary).merge_append()

    class Replacing(_OverwriteFiles):
        """Drops manifests that list deleted files only: the library keeps them for ever."""

        def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
            return [
                one
                for one in manifests
                if one.added_snapshot_id == self.snapshot_id or one.has_added_files() or one.has_existing_files()
            ]

    return Replacing(Operation.OVERWRITE, transaction, io, snapshot_properties=summary)
