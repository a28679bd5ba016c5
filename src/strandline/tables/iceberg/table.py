"""An Iceberg table that follows a log: proof of its state, and commits on exactly that.

Each commit is one snapshot with the cursor, durable before it counts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from strandline.model.arguments import shown
from strandline.model.cursor import Cursor
from strandline.storage.disk import Disk, limit_rights, make_own_folder
from strandline.storage.env import Env
from strandline.tables.files.data_files import lost_file
from strandline.tables.files.followed import REMEDY, FollowedTable, OwnCommit, TableVersion
from strandline.tables.files.paths import is_below, outside
from strandline.tables.files.recorded import (
    CHANGE_KEY,
    COMMIT_KEY,
    CURSOR_KEY,
    HOLDER_KEY,
    START_KEY,
    check_recorded,
    properties_at,
    told_change,
    told_rebuild,
)
from strandline.tables.iceberg.files import (
    IcebergFiles,
    arrow_schema,
    data_file,
    iceberg_library,
    iceberg_schema,
    in_iceberg,
    is_partitioned_by,
    location_path,
    partition_spec,
)
from strandline.tables.iceberg.history import (
    LOG_KEY,
    NAME_KEY,
    ancestors,
    commit_mark,
    last_commit,
    lineage,
    own_cursor,
    start_in,
)
from strandline.tables.iceberg.transactions import producer_on, transaction_on
from strandline.tables.rows.logged import refuse_untyped
from strandline.tables.rows.partitions import PartitionValues
from strandline.tables.rows.shape import DeadLetters, TableShape
from strandline.tables.written import DataFile

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

_RETRIES: Final = "commit.retry.num-retries"
_NEWEST_FORMAT: Final = 2
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class IcebergVersion(TableVersion):
    """See :class:`~strandline.tables.files.followed.TableVersion`. A transaction on exactly the state of a table."""

    transaction: Transaction
    disk: Disk
    metadata: TableMetadata
    """The metadata of the table, with the changes of the transaction."""
    told: str = ""
    """What the history says of a change of columns by the transaction."""

    @classmethod
    def of(cls, transaction: Transaction, disk: Disk, **more: Any) -> IcebergVersion:
        """The version on which a transaction begins, by its sequence number."""
        found = transaction.table_metadata
        number, own = max(0, found.next_sequence_number() - 1), (transaction, disk, found)
        return cls(*own, id=str(found.table_uuid), number=number, properties=found.properties, **more)

    @property
    def table(self) -> Table:
        """The table as it was loaded, or staged."""
        return self.transaction._table  # noqa: SLF001 - the table being created has no other name

    @property
    def columns(self) -> pa.Schema:
        """The columns after the commit."""
        return self.files.numbered

    @cached_property
    def files(self) -> IcebergFiles:
        """The data files."""
        location = self.metadata.location
        if "://" in location and ("?" in location or "#" in location):
            raise InvalidInput(
                f"The table {'.'.join(self.table.name()[-2:])} is at {location}, and pyiceberg drops what is behind "
                "'?' or '#' in addresses: choose another location."
            )
        return IcebergFiles(self.table.io, location.rstrip("/"), arrow_schema(self.metadata.schema()), self.disk)


class FollowedIceberg(FollowedTable[IcebergVersion]):
    """An Iceberg table as its follower sees it: which snapshot has which cursor, and whether it is in effect."""

    def __init__(self, catalog: Catalog, identifier: str, shape: TableShape, name: str, env: Env) -> None:
        super().__init__(identifier, identifier, shape, name, env)
        self._catalog = catalog
        self.settings: dict[str, str] = {}
        """Properties that each commit gives the table."""
        self._read: tuple[tuple[str, str, int | None], dict[str, Any]] | None = None
        """The data files of the snapshot that was read last, until the next commit."""

    def open(self) -> IcebergVersion | None:
        """The newest version."""
        errors = iceberg_library().exceptions
        with self.named_errors():
            try:
                table: Table = self._catalog.load_table(self.where)
            except (errors.NoSuchTableError, errors.NoSuchNamespaceError):
                return None
        # In memory only: the library would repeat a refused commit on a table that nobody has looked at.
        table.metadata.properties[_RETRIES] = "0"
        return IcebergVersion.of(transaction_on(table), self.env.disk)

    def new(self, since: Cursor) -> IcebergVersion:
        """A transaction that creates the table."""
        with self.named_errors():
            self._catalog.create_namespace_if_not_exists(self.where.rpartition(".")[0])
            columns = iceberg_schema(self.shape.schema())
            told = {} if self.shape.description is None else {"comment": self.shape.description}
            created = self._catalog.create_table_transaction(
                self.where,
                schema=columns,
                partition_spec=partition_spec(self.shape.layout, columns),
                properties={
                    LOG_KEY: str(since.log_id),
                    NAME_KEY: self.name,
                    **properties_at(since, self.shape),
                    **told,
                },
            )
        return IcebergVersion.of(created, self.env.disk, is_new=True)

    def check_followed(self, version: IcebergVersion, log_id: UUID, *, is_rebuilt: bool = False) -> None:
        """``Diverged`` for a table of another log, or of none; ``InvalidInput`` for one of another kind."""
        self.refuse_another_log(version, log_id)
        check_recorded(version.properties, self.shape, self.where)
        spec, columns = version.metadata.spec(), version.metadata.schema()
        is_laid_out = is_partitioned_by(self.shape.layout, spec, columns)
        if not is_laid_out or version.metadata.format_version > _NEWEST_FORMAT:
            raise Diverged(
                f"The partitions of the table {self.where} were changed, or its format was, and its follower cannot "
                "write to it: follow into a new table."
            )
        if not self.shape.is_typed and not version.columns.equals(in_iceberg(self.shape.schema())):
            refuse_untyped(version.columns, self.shape, self.where)
            raise Diverged(
                f"The columns of the table {self.where} were changed, so that its follower cannot write to it: "
                "change them back, or follow into a new table."
            )

    def refuse_another_log(self, version: IcebergVersion, log_id: UUID) -> None:
        """``Diverged`` for a table of another log, or of none."""
        if version.properties.get(LOG_KEY) != str(log_id) or version.properties.get(NAME_KEY) != self.name:
            raise self.not_followed(log_id, version.properties.get(LOG_KEY))

    def proof(self, version: IcebergVersion, log_id: UUID, known: OwnCommit | None) -> OwnCommit:
        """The sink's last snapshot, an ancestor of the current one; none since has changed a row."""
        is_shared = isinstance(self.shape, DeadLetters)  # anybody may delete letters
        return last_commit(version.metadata, log_id, self.name, self.where, is_shared=is_shared)

    def make_durable(self, version: IcebergVersion, number: int, *, is_own: bool = False) -> None:
        """Sync the metadata of a snapshot on a local disk; ``CorruptData`` if it is gone."""
        table = version.table
        snapshot = table.metadata.snapshot_by_id(number)
        if location_path(table.metadata.location) is None or snapshot is None:
            return
        with self.named_errors():
            manifests = [one for one in snapshot.manifests(table.io) if one.added_snapshot_id == number]
        written = [table.metadata_location, snapshot.manifest_list, *[one.manifest_path for one in manifests]]
        paths = [path for path in map(location_path, written) if path is not None]
        for path in paths:
            if is_own:
                limit_rights(path)
            try:
                self.env.disk.sync_file(path)
            except NotFound as error:
                raise self._lost_metadata(error) from error
        folders = {path.rpartition("/")[0] for path in paths}
        for folder in folders | {str(location_path(table.metadata.location)).rstrip("/")}:
            self.env.disk.sync_folder(folder)
            self.env.disk.sync_folder(folder.rpartition("/")[0] or "/")

    def cursor_in(self, version: IcebergVersion, log_id: UUID) -> Cursor:
        """The cursor by the table's properties; ``NotFound`` if it has none in that log."""
        mark = version.properties.get(COMMIT_KEY)
        if mark is None or version.properties.get(LOG_KEY) != str(log_id):
            raise NotFound(f"There is no table {self.where} with a cursor in log {log_id} to adopt.")
        offset = mark.partition("@")[0]
        if not offset.isdecimal():
            raise Conflict(f"The property {COMMIT_KEY} of the table {self.where} is {shown(mark)}, and no cursor.")
        return Cursor(log_id, int(offset))

    def log_of(self, version: IcebergVersion) -> UUID:
        """The log that a table follows; ``InvalidInput`` if it follows none."""
        try:
            return UUID(version.properties.get(LOG_KEY, ""))
        except ValueError as error:
            raise InvalidInput(f"The table {self.where} follows no log: name another.") from error

    def committed(self, version: IcebergVersion, log_id: UUID) -> Iterator[tuple[int, int]]:
        """The offset and the id of each own snapshot up to a version, from the newest on, as far as they are kept."""
        for one in lineage(version.metadata):
            cursor = own_cursor(one, log_id, self.name)
            if cursor is not None:
                yield cursor.next, one.snapshot_id

    def start_of(self, version: IcebergVersion) -> int:
        """The offset at which the rows begin: that of the newest snapshot that has it."""
        return start_in(version.metadata)

    def sizes(self, version: IcebergVersion) -> dict[str, int]:
        """The data files; ``InvalidInput`` if rows are deleted by delete files."""
        return {path: file.file_size_in_bytes for path, file in self.data_files(version).items()}

    def file_partitions(self, version: IcebergVersion) -> dict[str, PartitionValues]:
        """By the manifests."""
        count = len(version.metadata.spec().fields)
        return {
            path: tuple(file.partition[at] for at in range(count)) for path, file in self.data_files(version).items()
        }

    def size(self, version: IcebergVersion) -> tuple[int, int, int]:
        """Rows, files and bytes, by the manifests."""
        files = self.data_files(version).values()
        return sum(file.record_count for file in files), len(files), sum(file.file_size_in_bytes for file in files)

    def evolved(self, version: IcebergVersion, *, is_rebuilt: bool = False) -> IcebergVersion:
        """The version with new and wider columns, which become part of the commit."""
        if version.is_new or not self.shape.is_typed:
            return version
        change = self.shape.evolution(version.columns, in_iceberg(self.shape.schema()), is_rebuilt=is_rebuilt)
        if not change:
            return version
        told = told_change(change, self.where)
        try:
            with self.named_errors(), version.transaction.update_schema() as update:
                update.union_by_name(iceberg_schema(change.schema))
        except ValueError as error:
            raise SchemaRefused(f"The columns of the table {self.where} cannot be changed: {error}") from error
        return IcebergVersion.of(version.transaction, self.env.disk, found=version.found, told=told)

    def letters_upto(self, version: IcebergVersion, log_id: UUID) -> Cursor | None:
        """The cursor of the letters, proved as that of any table: no other table shares them."""
        return self.last_commit(version, log_id).cursor

    def logs(self, version: IcebergVersion) -> set[str]:
        """The one log."""
        return {version.properties.get(LOG_KEY, "")}

    def data_files(self, version: IcebergVersion) -> dict[str, Any]:
        """The data files of the table, by path. Nothing changes what it returns."""
        snapshot = version.metadata.current_snapshot()
        place = version.id, version.files.location, None if snapshot is None else snapshot.snapshot_id
        read = self._read
        if read is not None and read[0] == place:
            return read[1]
        found: dict[str, Any] = {}
        with self.named_errors():
            for file in listed_files(version.table, snapshot):
                if file.content.value != 0:
                    raise InvalidInput(
                        f"Another writer deleted rows of the table {self.where} with delete files, and a "
                        "follower that writes its data files again would bring the rows back: rewrite the data "
                        "files with the tools of your catalog, or drop the table to build it again."
                    )
                if not is_below(file.file_path, version.files.location):
                    raise outside(file.file_path, self.where)
                found[file.file_path] = file
        self._read = place, found
        return found

    def damage(self, version: IcebergVersion) -> CorruptData | None:
        """The error for a lost file of the current snapshot, or one elsewhere."""
        return self.damage_of(version.table, version.metadata.current_snapshot())

    def damage_of(self, table: Table, snapshot: Snapshot | None) -> CorruptData | None:
        """The error for a lost file of a snapshot, or one elsewhere; None if all are there."""
        try:
            with self.named_errors():
                for file in listed_files(table, snapshot):
                    path = str(file.file_path)
                    if not is_below(path, table.metadata.location) or not table.io.new_input(path).exists():
                        return lost_file(path, self.where)
        except CorruptData as error:
            return error
        return None

    def accept(self, version: IcebergVersion, at: Cursor, told: str = "") -> None:
        """Commit a snapshot that changes no row."""
        self.commit(replace(version, told=told), (), (), at)

    def commit(
        self, version: IcebergVersion, added: Sequence[DataFile], removed: Collection[str], upto: Cursor
    ) -> None:
        """Commit files and cursor as one snapshot; a table that is not there is created by it."""
        transaction, metadata = version.transaction, version.metadata
        folder = location_path(version.files.location)
        if folder is not None and version.found is None:
            make_own_folder(f"{folder}/metadata", disk=self.env.disk)  # others could read the library's
        listed = self.data_files(version) if removed else {}
        with self.named_errors():
            start = version.start
            begins = start_in(metadata) if start is None else start
            summary = {CURSOR_KEY: str(upto), NAME_KEY: self.name, START_KEY: str(begins)}
            if version.held_by is not None:
                summary[HOLDER_KEY] = version.held_by
            told = ["" if start is None else told_rebuild(start, upto), version.told]
            if any(told):
                summary[CHANGE_KEY] = "; ".join(filter(None, told))
            producer = producer_on(transaction, version.files.io, summary, is_replacing=bool(removed))
            with producer:
                for file in added:
                    producer.append_data_file(data_file(file, metadata.schema(), metadata.default_spec_id))
                for path in removed:
                    producer.delete_data_file(listed[path])
            first = {} if start is None else {START_KEY: str(start)}  # for when this snapshot has expired
            mark = commit_mark(upto, producer.snapshot_id)
            transaction.set_properties({LOG_KEY: str(upto.log_id), COMMIT_KEY: mark, **first, **self.settings})
        done = self._committed(transaction, producer)
        self.make_durable(done, producer.snapshot_id, is_own=True)
        self.known[upto.log_id] = OwnCommit(done.id, producer.snapshot_id, upto, version.held_by)
        self._read = None

    def _committed(self, transaction: Transaction, producer: Any) -> IcebergVersion:
        """Commit, and return the new version. A commit whose answer was lost is recognised by the snapshot's number."""
        snapshot_id, clean_up = producer.snapshot_id, producer._clean_all_uncommitted  # noqa: SLF001
        # A refused commit makes the library delete the snapshot's manifests. The refusal may be that of a repeated
        # request, whose first one landed: the table would be lost.
        producer._clean_all_uncommitted = lambda: None  # noqa: SLF001
        try:
            with self.named_errors():
                return IcebergVersion.of(transaction_on(transaction.commit_transaction()), self.env.disk)
        except (Conflict, TransientStorageError) as error:
            with contextlib.suppress(StrandlineError):
                version = self.open()
                if version is not None and snapshot_id in (one.snapshot_id for one in ancestors(version.metadata)):
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
        for one in lineage(table.metadata):
            cursor = own_cursor(one, log_id, self.name)
            if cursor is not None and serves(cursor) and self.damage_of(table, one) is None:
                self._reset(table, one.snapshot_id, cursor)
                return True
        return False

    def _reset(self, table: Table, snapshot_id: int, cursor: Cursor) -> None:
        """Go back to a snapshot, with its cursor, in one commit."""
        current = table.metadata.current_snapshot()
        back = table_updates().SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot_id)
        mark = table_updates().SetPropertiesUpdate(updates={COMMIT_KEY: commit_mark(cursor, snapshot_id)})
        self.commit_updates(table, {"main": None if current is None else current.snapshot_id}, back, mark)
        _LOGGER.warning("The table %s is at snapshot %d again, at %s.", self.where, snapshot_id, cursor)

    def commit_updates(self, table: Table, refs: Mapping[str, int | None], *updates: Any) -> None:
        """Commit updates if these branches and tags are where they were; the library does not ask for that."""
        same_table = table_updates().AssertTableUUID(uuid=table.metadata.table_uuid)
        same_refs = [table_updates().AssertRefSnapshotId(ref=name, snapshot_id=at) for name, at in refs.items()]
        with self.named_errors():
            table.catalog.commit_table(table, (same_table, *same_refs), updates)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Translate the errors of the library and its stores; ``Conflict``: another commit was first."""
        errors = iceberg_library().exceptions
        try:
            yield
        except (StrandlineError, MemoryError):
            raise  # what does not fit into memory is tried again in smaller pieces
        except (errors.CommitFailedException, errors.TableAlreadyExistsError, errors.ValidationException) as error:
            raise Conflict(f"Another job committed to the table {self.where} first. ({error})") from error
        except errors.NoSuchTableError as error:
            raise Diverged(f"The table {self.where} was dropped while it was committed to. {REMEDY}") from error
        except errors.NoSuchIcebergTableError as error:
            raise InvalidInput(f"{self.where} is no Iceberg table: name another.") from error
        except FileNotFoundError as error:
            raise self._lost_metadata(error) from error
        except Exception as error:
            raise TransientStorageError(
                f"The table {self.where} could not be read, or its commit not be confirmed: {error}"
            ) from error

    def _lost_metadata(self, error: Exception) -> CorruptData:
        return CorruptData(
            f"A metadata file is gone, though the table {self.where} names it ({error}): put it back, repair it "
            "('strandline table repair'), which goes back to the last snapshot whose files are all there, or drop "
            "the table to build it again."
        )


def listed_files(table: Table, *snapshots: Snapshot | None) -> Iterator[Any]:
    """The files of some snapshots, each once."""
    manifests = {one.manifest_path: one for some in snapshots if some is not None for one in some.manifests(table.io)}
    for manifest in manifests.values():
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            yield entry.data_file


def table_updates() -> Any:
    """The library's updates of a table: models that take names which type checkers do not know."""
    from pyiceberg.table import update

    return update
