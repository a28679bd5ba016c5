"""Commits to an Iceberg table that follows a log: each is one snapshot with the cursor, durable before it counts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from strandline.errors import Conflict, StrandlineError, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.storage.disk import make_own_folder
from strandline.tables.files.followed import OwnCommit
from strandline.tables.files.recorded import CHANGE_KEY, COMMIT_KEY, CURSOR_KEY, HOLDER_KEY, START_KEY, told_rebuild
from strandline.tables.iceberg.files import data_file, location_path
from strandline.tables.iceberg.history import LOG_KEY, NAME_KEY, ancestors, commit_mark, current_since, start_in
from strandline.tables.iceberg.table import FollowedIceberg, IcebergVersion
from strandline.tables.written import DataFile

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

_LOGGER: Final = logging.getLogger(__name__)


class IcebergCommits(FollowedIceberg):
    """An Iceberg table, and commits on versions of it whose state was proved."""

    def accept(self, version: IcebergVersion, at: Cursor, told: str = "") -> None:
        """Commit a snapshot that changes no row."""
        self.commit(replace(version, told=told), (), (), at)

    def commit(
        self,
        version: IcebergVersion,
        added: Sequence[DataFile],
        removed: Collection[str],
        upto: Cursor,
        *,
        holder: str | None = None,
        start: int | None = None,
    ) -> None:
        """Commit files and cursor as one snapshot; a table that is not there is created by it."""
        transaction, metadata = version.transaction, version.metadata
        folder = location_path(version.files.location)
        if folder is not None and version.found is None:
            make_own_folder(f"{folder}/metadata", disk=self.env.disk)  # others could read the library's
        listed = self.data_files(version) if removed else {}
        with self.named_errors():
            begins = start_in(metadata) if start is None else start
            summary = {CURSOR_KEY: str(upto), NAME_KEY: self.name, START_KEY: str(begins)}
            held = holder if holder is not None or version.found is None else version.found.holder
            if held is not None:
                summary[HOLDER_KEY] = held
            told = ["" if start is None else told_rebuild(start, upto), version.told]
            if any(told):
                summary[CHANGE_KEY] = "; ".join(filter(None, told))
            producer = _producer(transaction, version.files.io, summary, is_replacing=bool(removed))
            with producer:
                for file in added:
                    producer.append_data_file(data_file(file, metadata.schema()))
                for path in removed:
                    producer.delete_data_file(listed[path])
            first = {} if start is None else {START_KEY: str(start)}  # for when this snapshot has expired
            mark = commit_mark(upto, producer.snapshot_id)
            transaction.set_properties({LOG_KEY: str(upto.log_id), COMMIT_KEY: mark, **first})
        done = self._committed(transaction, producer)
        self.make_durable(done, producer.snapshot_id, is_own=True)
        self.known[upto.log_id] = OwnCommit(done.id, producer.snapshot_id, upto, held)

    def _committed(self, transaction: Transaction, producer: Any) -> IcebergVersion:
        """Commit, and return the new version. A commit whose answer was lost is recognised by the snapshot's number."""
        snapshot_id, clean_up = producer.snapshot_id, producer._clean_all_uncommitted  # noqa: SLF001
        # A refused commit makes the library delete the snapshot's manifests. The refusal may be that of a repeated
        # request, whose first one landed: the table would be lost.
        producer._clean_all_uncommitted = lambda: None  # noqa: SLF001
        try:
            with self.named_errors():
                return IcebergVersion.of(transaction.commit_transaction().transaction(), self.env.disk)
        except (Conflict, TransientStorageError) as error:
            with contextlib.suppress(StrandlineError):
                version = self.open()
                if version is not None and snapshot_id in _line(version):
                    _LOGGER.warning(
                        "Snapshot %d of %s is committed, though its answer was lost: %s",
                        *(snapshot_id, self.where, error),
                    )
                    return version
                if isinstance(error, Conflict):
                    clean_up()
            raise

    def restored(self, version: IcebergVersion, log_id: UUID, serves: Callable[[Cursor], bool]) -> bool:
        """Go back to the newest own snapshot, of the current one and its ancestors, whose files all exist."""
        table = version.table
        for one in self.snapshots(version, log_id):
            snapshot = table.metadata.snapshot_by_id(one.snapshot_id)
            if one.cursor is not None and serves(one.cursor) and self.damage_of(table, snapshot) is None:
                self._reset(table, one.snapshot_id, one.cursor)
                return True
        return False

    def _reset(self, table: Table, snapshot_id: int, cursor: Cursor) -> None:
        """Go back to a snapshot, with its cursor, in one commit."""
        current = table.metadata.current_snapshot()
        back = _updates().SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot_id)
        mark = _updates().SetPropertiesUpdate(updates={COMMIT_KEY: commit_mark(cursor, snapshot_id)})
        self._commit_updates(table, {"main": None if current is None else current.snapshot_id}, back, mark)
        _LOGGER.warning("The table %s is at snapshot %d again, at %s.", self.where, snapshot_id, cursor)

    def _commit_updates(self, table: Table, refs: Mapping[str, int | None], *updates: Any) -> None:
        """Commit updates if these branches and tags are where they were; the library does not ask for that."""
        same_table = _updates().AssertTableUUID(uuid=table.metadata.table_uuid)
        same_refs = [_updates().AssertRefSnapshotId(ref=name, snapshot_id=at) for name, at in refs.items()]
        with self.named_errors():
            table.catalog.commit_table(table, (same_table, *same_refs), updates)

    def expire(self, version: IcebergVersion, log_id: UUID, before: datetime) -> int:
        """Expire older snapshots, but none back to the follower's last commit, and none that was current since.

        Those may have readers who began before they were replaced. ``Conflict`` if a branch or a tag was moved since
        ``version`` was opened: catalogs drop a branch whose snapshot expires, and the current snapshot is that of one.
        """
        proof, table = self.last_commit(version, log_id).version, version.table
        needed = set()
        for snapshot_id in _line(version):
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
            refs = {name: ref.snapshot_id for name, ref in table.metadata.refs.items()}
            self._commit_updates(table, refs, _updates().RemoveSnapshotsUpdate(snapshot_ids=old))
        return len(old)


def _updates() -> Any:
    """The library's updates of a table: models that take names which type checkers do not know."""
    from pyiceberg.table import update

    return update


def _line(version: IcebergVersion) -> Iterator[int]:
    """The numbers of the current snapshot and its ancestors."""
    return (snapshot.snapshot_id for snapshot in ancestors(version.metadata))


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
