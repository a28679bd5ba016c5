"""Proof of the state of an Iceberg table that follows a log, and transactions that begin on exactly that state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    Conflict,
    CorruptData,
    Diverged,
    InvalidInput,
    NotFound,
    SchemaRefused,
    StrandlineError,
    TransientStorageError,
)
from strandline.model.cursor import Cursor
from strandline.storage.disk import Disk, limit_rights
from strandline.tables.files.data_files import lost_file
from strandline.tables.files.paths import is_below, outside
from strandline.tables.files.recorded import (
    COMMIT_KEY,
    HOLDER_KEY,
    TRANSFORM_KEY,
    check_recorded,
    looked_at_again,
    not_followed,
    properties_at,
    refuse_another_follower,
    refuse_removed,
    told_change,
    warn_of_change,
)
from strandline.tables.iceberg.columns import arrow_schema, iceberg_library, iceberg_schema, in_iceberg
from strandline.tables.iceberg.files import IcebergFiles, location_path
from strandline.tables.iceberg.history import (
    LOG_KEY,
    NAME_KEY,
    REMEDY,
    KnownSnapshot,
    TableSnapshot,
    ancestors,
    last_commit,
    own_cursor,
    refuse_replaced,
    replaced_by_another,
    summary_of,
)
from strandline.tables.rows.shape import DeadLetters, TableShape, refuse_lost_transform

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table, Transaction

_RETRIES: Final = "commit.retry.num-retries"
_NEWEST_FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class Begun:
    """A table whose state was proved, and the transaction on exactly that state."""

    transaction: Transaction
    found: KnownSnapshot | None
    """The sink's last commit; None: the transaction creates the table."""
    files: IcebergFiles
    told: str = ""
    """What the history says of a change of columns by the transaction."""

    @property
    def at(self) -> Cursor | None:
        """The table's cursor."""
        return None if self.found is None else self.found.cursor

    @property
    def holder(self) -> str | None:
        """The follower that holds the table."""
        return None if self.found is None else self.found.holder

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
        self.name = name
        self.disk = disk

    def open(self) -> Table | None:
        """The table now; None if there is none."""
        errors = iceberg_library().exceptions
        with self.named_errors():
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

    def position(self, log_id: UUID) -> KnownSnapshot | None:
        """The sink's last commit; None if there is no table. Safe beside a commit of another thread."""
        known = self.known.get(log_id)  # before the table is loaded: what is committed meanwhile is newer
        with looked_at_again(partial(self.refuse_lost, log_id)):
            table = self.open()
            if table is None:
                self.refuse_removed(known)
                return None
            return self._proved(table, log_id, known)

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
        commit = KnownSnapshot(table.metadata.table_uuid, found.snapshot_id, found.cursor, found.holder)
        refuse_replaced(known, commit, where)
        if commit != known:
            # An earlier process may have died between its commit and its sync, and a slot will follow this cursor.
            self.make_durable(table, commit.snapshot_id)
        return commit

    def make_durable(self, table: Table, snapshot_id: int, *, is_own: bool = False) -> None:
        """Sync the metadata of a commit on a local disk: ``pyiceberg`` does not, and a slot may follow it.

        ``is_own``: this process has just committed it, and the library's files get the rights of ours, too.
        """
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        if location_path(table.metadata.location) is None or snapshot is None:
            return
        with self.named_errors():
            manifests = [one for one in snapshot.manifests(table.io) if one.added_snapshot_id == snapshot_id]
        written = [table.metadata_location, snapshot.manifest_list, *[one.manifest_path for one in manifests]]
        paths = [path for path in map(location_path, written) if path is not None]
        for path in paths:
            if is_own:
                limit_rights(path)
            try:
                self.disk.sync_file(path)
            except NotFound as error:
                raise self._lost_metadata(error) from error
        folders = {path.rpartition("/")[0] for path in paths}
        for folder in folders | {str(location_path(table.metadata.location)).rstrip("/")}:
            self.disk.sync_folder(folder)
            self.disk.sync_folder(folder.rpartition("/")[0] or "/")

    def _chain(self, table: Table, log_id: UUID) -> Iterator[TableSnapshot]:
        """The snapshots from the current one to the oldest that has not expired."""
        for snapshot in ancestors(table.metadata):
            operation = "unknown" if snapshot.summary is None else snapshot.summary.operation.value
            summary = summary_of(snapshot)
            cursor = own_cursor(summary, log_id, self.name)
            yield TableSnapshot(snapshot.snapshot_id, operation, cursor, summary.get(HOLDER_KEY))

    def _check_shape(self, table: Table) -> None:
        check_recorded(table.metadata.properties, self.shape, self.identifier)
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
        refuse_removed(None if known is None else known.cursor, self.identifier)

    def refuse_lost(self, log_id: UUID) -> None:
        """``Diverged`` if the table was dropped or replaced since its follower started."""
        table, known = self.open(), self.known.get(log_id)
        if table is None:
            self.refuse_removed(known)
        elif known is not None and table.metadata.table_uuid != known.table_id:
            raise replaced_by_another(self.identifier)

    def refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        """``Fenced`` if the cursor moved since it was seen at ``at``: another follower committed."""
        table = self.open()
        if table is None:
            self.refuse_removed(self.known.get(log_id))
        now = None if table is None else self.last_commit(table, log_id).cursor
        refuse_another_follower(at, now, self.identifier)

    def begin(self, since: Cursor) -> Begun:
        """Prove the table, and begin a transaction on it; one that creates it at ``since`` if there is none."""
        log_id = since.log_id
        table = self.open()
        with self.named_errors():
            if table is None:
                self.refuse_removed(self.known.get(log_id))
                self._catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
                created = self._catalog.create_table_transaction(
                    self.identifier,
                    schema=iceberg_schema(self.shape.schema()),
                    properties={
                        LOG_KEY: str(log_id),
                        NAME_KEY: self.name,
                        **properties_at(since, self.shape),
                    },
                )
                return Begun(created, None, self._files(created))
            self.refuse_lost_transform(table)
            found = self.last_commit(table, log_id)
            transaction = table.transaction()
            told = self._evolve(transaction)
            return Begun(transaction, found, self._files(transaction), told)

    def on(self, table: Table) -> Begun:
        """A transaction on a table whose state the caller vouches for."""
        transaction = table.transaction()
        return Begun(transaction, None, self._files(transaction))

    def rebuilding(self, table: Table) -> Begun:
        """A transaction that replaces all rows of a table: its columns may change with it."""
        begun = self.on(table)
        told = self._evolve(begun.transaction, is_rebuilt=True)
        return Begun(begun.transaction, None, self._files(begun.transaction), told)

    def refuse_lost_transform(self, table: Table) -> None:
        """``InvalidInput`` if the rows come from a transform, and the sink has none."""
        if isinstance(self.shape, TableShape):
            is_transformed = TRANSFORM_KEY in table.metadata.properties
            refuse_lost_transform(self.shape, self.identifier, is_transformed=is_transformed)

    def log_of(self, table: Table) -> UUID:
        """The log that a table follows; ``InvalidInput`` if it follows none."""
        try:
            return UUID(table.metadata.properties.get(LOG_KEY, ""))
        except ValueError as error:
            raise InvalidInput(f"The table {self.identifier} follows no log: name another.") from error

    def check_followed(self, table: Table, log_id: UUID) -> None:
        """``Diverged`` for a table of another log, or of none; ``InvalidInput`` for one of another kind."""
        self.refuse_another_log(table, log_id)
        self._check_shape(table)

    def refuse_another_log(self, table: Table, log_id: UUID) -> None:
        """``Diverged`` for a table of another log, or of none."""
        properties = table.metadata.properties
        if properties.get(LOG_KEY) != str(log_id) or properties.get(NAME_KEY) != self.name:
            raise not_followed(self.identifier, log_id, self.name, properties.get(LOG_KEY))

    def _evolve(self, transaction: Transaction, *, is_rebuilt: bool = False) -> str:
        """New and wider columns of a typed table become part of the commit; ``SchemaRefused`` for any other change.

        Returns what the history says of it.
        """
        if isinstance(self.shape, DeadLetters) or not self.shape.is_typed:
            return ""
        wanted = in_iceberg(self.shape.schema())
        found = arrow_schema(transaction.table_metadata.schema())
        change = self.shape.evolution(found, wanted, is_rebuilt=is_rebuilt)
        if not change:
            return ""
        warn_of_change(change, self.identifier)
        try:
            with transaction.update_schema() as update:
                update.union_by_name(iceberg_schema(change.schema))
        except ValueError as error:
            raise SchemaRefused(f"The columns of the table {self.identifier} cannot be changed: {error}") from error
        return told_change(change)

    def _files(self, transaction: Transaction) -> IcebergFiles:
        metadata = transaction.table_metadata
        table = transaction._table  # noqa: SLF001 - the table being created has no other name
        if "://" in metadata.location and ("?" in metadata.location or "#" in metadata.location):
            raise InvalidInput(
                f"The table {self.identifier} is at {metadata.location}, and pyiceberg drops what is behind '?' or '#' "
                "in addresses: choose another location."
            )
        return IcebergFiles(table.io, metadata.location.rstrip("/"), arrow_schema(metadata.schema()), self.disk)

    def data_files(self, begun: Begun) -> dict[str, Any]:
        """The data files of the table, by path."""
        found: dict[str, Any] = {}
        snapshot = begun.transaction.table_metadata.current_snapshot()
        if snapshot is None:
            return found
        with self.named_errors():
            for manifest in snapshot.manifests(begun.files.io):
                for entry in manifest.fetch_manifest_entry(begun.files.io, discard_deleted=True):
                    if entry.data_file.content.value != 0:
                        raise InvalidInput(
                            f"Another writer deleted rows of the table {self.identifier} with delete files, and a "
                            "follower that writes its data files again would bring the rows back: rewrite the data "
                            "files with the tools of your catalog, or drop the table to build it again."
                        )
                    if not is_below(entry.data_file.file_path, begun.files.location):
                        raise outside(entry.data_file.file_path, self.identifier)
                    found[entry.data_file.file_path] = entry.data_file
        return found

    def damage_of(self, table: Table, snapshot_id: int | None) -> CorruptData | None:
        """The error for a lost file of a snapshot (None: the current one), or one elsewhere; None if all are there."""
        metadata = table.metadata
        snapshot = metadata.current_snapshot() if snapshot_id is None else metadata.snapshot_by_id(snapshot_id)
        try:
            with self.named_errors():
                for manifest in () if snapshot is None else snapshot.manifests(table.io):
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                        path = str(entry.data_file.file_path)
                        if not is_below(path, metadata.location) or not table.io.new_input(path).exists():
                            return lost_file(path, self.identifier)
        except CorruptData as error:
            return error
        return None

    def own_snapshots(self, table: Table, log_id: UUID) -> Iterator[TableSnapshot]:
        """The sink's snapshots among the current one and its ancestors, newest first."""
        return (snapshot for snapshot in self._chain(table, log_id) if snapshot.cursor is not None)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Translate the errors of the library and its stores; ``Conflict``: another commit was first."""
        errors = iceberg_library().exceptions
        try:
            yield
        except (StrandlineError, MemoryError):
            raise  # what does not fit into memory is tried again in smaller pieces
        except (errors.CommitFailedException, errors.TableAlreadyExistsError, errors.ValidationException) as error:
            raise Conflict(f"Another job committed to the table {self.identifier} first. ({error})") from error
        except errors.NoSuchTableError as error:
            raise Diverged(f"The table {self.identifier} was dropped while it was committed to. {REMEDY}") from error
        except errors.NoSuchIcebergTableError as error:
            raise InvalidInput(f"{self.identifier} is no Iceberg table: name another.") from error
        except FileNotFoundError as error:
            raise self._lost_metadata(error) from error
        except Exception as error:
            raise TransientStorageError(
                f"The table {self.identifier} could not be read, or its commit not be confirmed: {error}"
            ) from error

    def _lost_metadata(self, error: Exception) -> CorruptData:
        return CorruptData(
            f"A metadata file is gone, though the table {self.identifier} names it ({error}): put it back, repair it "
            "('strandline table repair'), which goes back to the last snapshot whose files are all there, or drop "
            "the table to build it again."
        )
