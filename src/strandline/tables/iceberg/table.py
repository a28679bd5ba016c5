"""An Iceberg table that follows a log: proof of its state, its commits, and their durability. Through ``pyiceberg``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    Conflict,
    Diverged,
    Fenced,
    InvalidInput,
    SchemaRefused,
    StrandlineError,
    TransientStorageError,
)
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.storage.disk import Disk
from strandline.tables.iceberg.columns import arrow_schema, iceberg_library, iceberg_schema, in_iceberg
from strandline.tables.iceberg.files import IcebergFiles, data_file, local_path
from strandline.tables.iceberg.history import (
    COMMIT_KEY,
    CURSOR_KEY,
    LOG_KEY,
    MODE_KEY,
    NAME_KEY,
    REMEDY,
    SHAPE_KEY,
    START_KEY,
    TRANSFORM_KEY,
    KnownSnapshot,
    TableSnapshot,
    check_known,
    commit_mark,
    last_commit,
    own_cursor,
)
from strandline.tables.rows.shape import DeadLetters, TableShape, refuse_another_shape, refuse_lost_transform

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata

_RETRIES: Final = "commit.retry.num-retries"
_NEWEST_FORMAT: Final = 2
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A table whose state was proved, and the transaction on exactly that state."""

    transaction: Transaction
    at: Cursor | None
    """None: the transaction creates the table."""
    files: IcebergFiles

    @property
    def columns(self) -> pa.Schema:
        """The columns of the table after the commit."""
        return self.files.numbered


class FollowedIceberg:
    """An Iceberg table as its follower sees it: which snapshot has which cursor, and whether it is in effect."""

    def __init__(
        self, catalog: Catalog, identifier: str, shape: TableShape | DeadLetters, name: str, disk: Disk
    ) -> None:
        self.identifier = identifier
        self.shape = shape
        self.known: dict[UUID, KnownSnapshot] = {}
        """The last commit of this object, by log."""
        self._catalog = catalog
        self._name = name
        self._disk = disk

    def open(self) -> Table | None:
        """The table now; None if there is none."""
        errors = iceberg_library().exceptions
        with self._named_errors():
            try:
                table: Table = self._catalog.load_table(self.identifier)
            except (errors.NoSuchTableError, errors.NoSuchNamespaceError):
                return None
        # In memory only: the library would repeat a refused commit on a table that nobody has looked at.
        table.metadata.properties[_RETRIES] = "0"
        return table

    def columns(self) -> pa.Schema | None:
        """The columns of the table now; None if there is none."""
        table = self.open()
        return None if table is None else arrow_schema(table.schema())

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The cursor of the sink's last commit; None if there is no table. Safe beside a commit of another thread."""
        known = self.known.get(log_id)  # before the table is loaded: what is committed meanwhile is newer
        table = self.open()
        if table is None:
            self.refuse_removed(known)
            return None
        return self._proved(table, log_id, known).cursor

    def last_commit(self, table: Table, log_id: UUID) -> KnownSnapshot:
        """The sink's last commit in the table, which is still in effect."""
        return self._proved(table, log_id, self.known.get(log_id))

    def _proved(self, table: Table, log_id: UUID, known: KnownSnapshot | None) -> KnownSnapshot:
        properties, where = table.metadata.properties, self.identifier
        self.check_followed(table, log_id)
        chain = self._chain(table, log_id)
        if isinstance(self.shape, DeadLetters):  # anybody may delete letters
            chain = self.own_snapshots(table, log_id)
        found = last_commit(chain, properties.get(COMMIT_KEY), where)
        if found.cursor is None:
            raise AssertionError("a commit of the sink has a cursor")
        commit = KnownSnapshot(table.metadata.table_uuid, found.snapshot_id, found.cursor)
        check_known(known, commit, where)
        return commit

    def _chain(self, table: Table, log_id: UUID) -> Iterator[TableSnapshot]:
        """The snapshots from the current one to the oldest that has not expired."""
        snapshot = table.metadata.current_snapshot()
        while snapshot is not None:
            summary = snapshot.summary
            further = {} if summary is None else summary.additional_properties
            operation = "unknown" if summary is None else summary.operation.value
            yield TableSnapshot(snapshot.snapshot_id, operation, own_cursor(further, log_id, self._name))
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else table.metadata.snapshot_by_id(parent)

    def _check_shape(self, table: Table) -> None:
        mode = table.metadata.properties.get(MODE_KEY)
        if mode != self.shape.kind:
            raise InvalidInput(f"The table {self.identifier} was made with mode={mode!r}; open it with that mode.")
        refuse_another_shape(table.metadata.properties.get(SHAPE_KEY), self.shape, self.identifier)
        if not table.spec().is_unpartitioned() or table.metadata.format_version > _NEWEST_FORMAT:
            raise Diverged(
                f"The table {self.identifier} was partitioned, or its format changed, so that its follower cannot "
                "write to it: follow into a new table."
            )
        if not self.shape.is_typed and not arrow_schema(table.schema()).equals(in_iceberg(self.shape.schema())):
            raise Diverged(
                f"The columns of the table {self.identifier} were changed, so that its follower cannot write to it: "
                "change them back, or follow into a new table."
            )

    def refuse_removed(self, known: KnownSnapshot | None) -> None:
        """A starting follower creates a dropped table again; a running one never does."""
        if known is not None:
            raise Diverged(
                f"The table {self.identifier} was dropped while it was followed, up to offset {known.cursor.next}: put "
                "it back, or start the follower again, which builds the table from the log's beginning."
            )

    def refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        """``Fenced`` if the cursor moved since it was seen at ``at``: another follower committed."""
        table = self.open()
        now = None if table is None else self.last_commit(table, log_id).cursor
        if now != at:
            raise Fenced(
                f"Another follower changed {self.identifier} at the same time; this one committed nothing and must "
                "stop. Keep one follower per table."
            )

    def begin(self, since: Cursor) -> Begun:
        """Prove the table, and begin a transaction on it; one that creates it at ``since`` if there is none."""
        log_id = since.log_id
        table = self.open()
        with self._named_errors():
            if table is None:
                self.refuse_removed(self.known.get(log_id))
                self._catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
                created = self._catalog.create_table_transaction(
                    self.identifier,
                    schema=iceberg_schema(self.shape.schema()),
                    properties={
                        LOG_KEY: str(log_id),
                        NAME_KEY: self._name,
                        MODE_KEY: self.shape.kind,
                        SHAPE_KEY: self.shape.recorded(),
                        START_KEY: str(since.next),
                        **(
                            {TRANSFORM_KEY: "true"}
                            if isinstance(self.shape, TableShape) and self.shape.transform
                            else {}
                        ),
                    },
                )
                return Begun(created, None, self._files(created))
            self.refuse_lost_transform(table)
            at = self.last_commit(table, log_id).cursor
            transaction = table.transaction()
            self._evolve(transaction)
            return Begun(transaction, at, self._files(transaction))

    def on(self, table: Table) -> Begun:
        """A transaction on a table whose state the caller vouches for."""
        transaction = table.transaction()
        return Begun(transaction, Cursor(UUID(int=0), 0), self._files(transaction))

    def rebuilding(self, table: Table) -> Begun:
        """A transaction that replaces all rows of a table: its columns may change with it."""
        begun = self.on(table)
        self._evolve(begun.transaction, is_rebuilt=True)
        return Begun(begun.transaction, begun.at, self._files(begun.transaction))

    def refuse_lost_transform(self, table: Table) -> None:
        """``InvalidInput`` if the rows come from a transform, and the sink has none."""
        if isinstance(self.shape, TableShape):
            is_transformed = TRANSFORM_KEY in table.metadata.properties
            refuse_lost_transform(self.shape, self.identifier, is_transformed=is_transformed)

    def check_followed(self, table: Table, log_id: UUID) -> None:
        """``Diverged`` for a table of another log, or of none; ``InvalidInput`` for one of another kind."""
        properties = table.metadata.properties
        if properties.get(LOG_KEY) != str(log_id) or properties.get(NAME_KEY) != self._name:
            follows = f"log {properties[LOG_KEY]}" if LOG_KEY in properties else "no log at all"
            raise Diverged(
                f"The table {self.identifier} does not follow log {log_id} as {self._name!r}, but {follows}: give this "
                "log a table of its own, or drop that one to build it again."
            )
        self._check_shape(table)

    def _evolve(self, transaction: Transaction, *, is_rebuilt: bool = False) -> None:
        """New and wider columns of a typed table become part of the commit; ``SchemaRefused`` for any other change."""
        if isinstance(self.shape, DeadLetters) or not self.shape.is_typed:
            return
        wanted = in_iceberg(self.shape.schema())
        found = arrow_schema(transaction.table_metadata.schema())
        change = self.shape.evolution(found, wanted, is_rebuilt=is_rebuilt)
        if not change:
            return
        _LOGGER.warning(
            "The table %s gets the columns %s; wider are %s.",
            self.identifier,
            [field.name for field in change.added],
            [field.name for field in change.widened],
        )
        try:
            with transaction.update_schema() as update:
                update.union_by_name(iceberg_schema(change.schema))
        except ValueError as error:
            raise SchemaRefused(f"The columns of the table {self.identifier} cannot be changed: {error}") from error

    def _files(self, transaction: Transaction) -> IcebergFiles:
        metadata = transaction.table_metadata
        table = transaction._table  # noqa: SLF001 - the table being created has no other name
        if "://" in metadata.location and ("?" in metadata.location or "#" in metadata.location):
            raise InvalidInput(
                f"The table {self.identifier} is at {metadata.location}, and pyiceberg drops what is behind '?' or '#' "
                "in addresses: choose another location."
            )
        return IcebergFiles(table.io, metadata.location.rstrip("/"), arrow_schema(metadata.schema()), self._disk)

    def data_files(self, begun: Begun) -> dict[str, Any]:
        """The data files of the table, by path."""
        found: dict[str, Any] = {}
        snapshot = begun.transaction.table_metadata.current_snapshot()
        if snapshot is None:
            return found
        with self._named_errors():
            for manifest in snapshot.manifests(begun.files.io):
                for entry in manifest.fetch_manifest_entry(begun.files.io, discard_deleted=True):
                    if entry.data_file.content.value != 0:
                        raise InvalidInput(
                            f"Another writer deleted rows of the table {self.identifier} with delete files, and a "
                            "follower that writes its data files again would bring the rows back: rewrite the data "
                            "files with the tools of your catalog, or drop the table to build it again."
                        )
                    found[entry.data_file.file_path] = entry.data_file
        return found

    def commit(
        self,
        begun: Begun,
        added: Sequence[DataFile],
        removed: Sequence[str],
        upto: Cursor,
        *,
        start: int | None = None,
    ) -> None:
        """Commit files and cursor as one snapshot; ``Conflict`` if another commit was first.

        ``start``: the table's rows begin at this offset then.
        """
        transaction = begun.transaction
        listed = self.data_files(begun) if removed else {}
        with self._named_errors():
            schema = transaction.table_metadata.schema()
            begins = start_in(transaction.table_metadata) if start is None else start
            summary = {CURSOR_KEY: str(upto), NAME_KEY: self._name, START_KEY: str(begins)}
            producer = _producer(transaction, begun.files.io, summary, is_replacing=bool(removed))
            with producer:
                for file in added:
                    producer.append_data_file(data_file(file, schema))
                for path in removed:
                    producer.delete_data_file(listed[path])
            moved = {} if start is None else {START_KEY: str(start)}  # for when this snapshot has expired
            transaction.set_properties({COMMIT_KEY: commit_mark(upto, producer.snapshot_id), **moved})
        table = self._committed(transaction, producer)
        self._make_durable(table, producer.snapshot_id)
        self.known[upto.log_id] = KnownSnapshot(table.metadata.table_uuid, producer.snapshot_id, upto)

    def _committed(self, transaction: Transaction, producer: Any) -> Table:
        """Commit; the table is returned also if the catalog did, and its answer was lost: by the snapshot's number."""
        snapshot_id, clean_up = producer.snapshot_id, producer._clean_all_uncommitted  # noqa: SLF001
        # A refused commit makes the library delete the snapshot's manifests. The refusal may be that of a repeated
        # request, whose first one landed: the table would be lost.
        producer._clean_all_uncommitted = lambda: None  # noqa: SLF001
        try:
            with self._named_errors():
                return transaction.commit_transaction()
        except (Conflict, TransientStorageError) as error:
            with contextlib.suppress(StrandlineError):
                table = self.open()
                if table is not None and snapshot_id in self._line(table):
                    _LOGGER.warning(
                        "Snapshot %d of %s is committed, though its answer was lost: %s",
                        *(snapshot_id, self.identifier, error),
                    )
                    return table
                if isinstance(error, Conflict):
                    clean_up()
            raise

    @staticmethod
    def _line(table: Table) -> Iterator[int]:
        """The current snapshot and its ancestors."""
        snapshot = table.metadata.current_snapshot()
        while snapshot is not None:
            yield snapshot.snapshot_id
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else table.metadata.snapshot_by_id(parent)

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
        with self._named_errors():
            self._catalog.commit_table(table, requirements, (back, mark))
        _LOGGER.warning("The table %s is at snapshot %d again, at %s.", self.identifier, snapshot_id, cursor)

    def expire(self, table: Table, log_id: UUID, before: datetime) -> int:
        """Expire older snapshots, but neither the current one nor those back to the follower's last commit."""
        proof = self.last_commit(table, log_id).snapshot_id
        needed = set()
        for snapshot_id in self._line(table):
            needed.add(snapshot_id)
            if snapshot_id == proof:
                break
        limit = int(before.timestamp() * 1000)
        refs = {ref.snapshot_id for ref in table.metadata.refs.values()}
        old = [
            one.snapshot_id
            for one in table.metadata.snapshots
            if one.timestamp_ms < limit and one.snapshot_id not in needed | refs
        ]
        if old:
            with self._named_errors():
                table.maintenance.expire_snapshots().by_ids(old).commit()
        return len(old)

    def own_snapshots(self, table: Table, log_id: UUID) -> Iterator[TableSnapshot]:
        """The sink's snapshots among the current one and its ancestors, newest first."""
        return (snapshot for snapshot in self._chain(table, log_id) if snapshot.cursor is not None)

    def _make_durable(self, table: Table, snapshot_id: int) -> None:
        """Sync the metadata of a commit on a local disk: ``pyiceberg`` does not, and a slot may follow it."""
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        if local_path(table.metadata.location) is None or snapshot is None:
            return
        manifests = [one for one in snapshot.manifests(table.io) if one.added_snapshot_id == snapshot_id]
        written = [table.metadata_location, snapshot.manifest_list, *[one.manifest_path for one in manifests]]
        paths = [path for path in map(local_path, written) if path is not None]
        for path in paths:
            self._disk.sync_file(path)
        folders = {path.rpartition("/")[0] for path in paths}
        for folder in folders | {str(local_path(table.metadata.location)).rstrip("/")}:
            self._disk.sync_folder(folder)
            self._disk.sync_folder(folder.rpartition("/")[0] or "/")

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Translate the errors of the library and its stores; ``Conflict``: another commit was first."""
        errors = iceberg_library().exceptions
        try:
            yield
        except StrandlineError:
            raise
        except (errors.CommitFailedException, errors.TableAlreadyExistsError, errors.ValidationException) as error:
            raise Conflict(f"Another job committed to the table {self.identifier} first. ({error})") from error
        except errors.NoSuchTableError as error:
            raise Diverged(f"The table {self.identifier} was dropped while it was committed to. {REMEDY}") from error
        except errors.NoSuchIcebergTableError as error:
            raise InvalidInput(f"{self.identifier} is no Iceberg table: name another.") from error
        except Exception as error:
            raise TransientStorageError(
                f"The table {self.identifier} could not be read, or its commit not be confirmed: {error}"
            ) from error


def start_in(metadata: TableMetadata) -> int:
    """The offset at which a table's rows begin: by the newest snapshot that has it, else by the table's properties.

    So a table that goes back to a snapshot before a rebuild has its former start again.
    """
    recorded, snapshot = metadata.properties.get(START_KEY, "0"), metadata.current_snapshot()
    while snapshot is not None:
        summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
        if START_KEY in summary:
            recorded = summary[START_KEY]
            break
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot_by_id(parent)
    return int(recorded) if recorded.isdecimal() else 0


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
