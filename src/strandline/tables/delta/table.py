"""A Delta table that follows a log: proof of its state, its commits, and their durability. Through ``deltalake``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa

from strandline.errors import (
    Conflict,
    CorruptData,
    Diverged,
    Fenced,
    InvalidInput,
    NotFound,
    TransientStorageError,
)
from strandline.model.cursor import MILLISECOND, Cursor
from strandline.model.sink import DataFile
from strandline.storage.clock import CHANCE, CLOCK, Clock
from strandline.storage.disk import Disk, make_own_folder
from strandline.tables.delta.files import DeltaFiles, added, local_path
from strandline.tables.delta.handles import (
    LOG_PROPERTY,
    columns_of,
    data_files,
    deltalake_library,
    id_of,
)
from strandline.tables.delta.history import (
    COMMIT_KEY,
    CURSOR_KEY,
    NOBODY,
    REMEDY,
    TABLE_KEY,
    Application,
    KnownCommits,
    Observed,
    check_known,
    last_commit,
    parse_commit,
    restored_version,
)
from strandline.tables.delta.newest import NewestVersion
from strandline.tables.delta.place import refuse_file
from strandline.tables.delta.recorded_shape import (
    check_shape,
    needed_change,
    properties_of,
    recorded_start,
    refuse_append_only,
)
from strandline.tables.files.data_files import write_file
from strandline.tables.files.layout import file_name, is_closed, is_data_file, range_of
from strandline.tables.files.part import in_schema
from strandline.tables.rows.shape import DeadLetters, TableShape

if TYPE_CHECKING:
    from deltalake import DeltaTable

_CHECKPOINTS: Final = {"delta.checkpointInterval": "20"}
"""Opening a table reads all commits since the last checkpoint: with ``deltalake``'s 100 the last one costs four times
as much as the first."""
_DAMAGED_CHECKPOINT: Final = ("Invalid Checkpoint", "Invalid Parquet file")
_LOGGER: Final = logging.getLogger(__name__)


class FollowedDelta:
    """A Delta table as its follower sees it: which version has which cursor, and whether that is still in effect."""

    def __init__(
        self,
        url: str,
        shape: TableShape | DeadLetters,
        name: str,
        options: Mapping[str, str],
        disk: Disk,
        clock: Clock = CLOCK,
    ) -> None:
        self.url = url
        self.shape = shape
        self.files = DeltaFiles(url, options, disk)
        self.known: dict[UUID, KnownCommits] = {}
        """The last commit of this object, by log."""
        self._name = name
        self._options = dict(options)
        self._disk = disk
        self._clock = clock
        self._newest: NewestVersion | None = None

    def now(self) -> int:
        """Milliseconds since the epoch, for the table's history."""
        return self._clock.now() // MILLISECOND

    def open(self) -> DeltaTable | None:
        """A handle on the newest version, for reading and :meth:`commit`; None if there is no table."""
        newest = self._newest
        if newest is not None and newest.is_current(self.read_commit):
            return newest.table
        table = self.open_again()
        self._newest = None if table is None else NewestVersion.of(table, self.read_commit)
        return table

    def open_again(self) -> DeltaTable | None:
        """A handle of the caller's own, which it may change."""
        delta = deltalake_library()
        try:
            table: DeltaTable = delta.DeltaTable(self.url, storage_options=self._options or None)
        except delta.exceptions.TableNotFoundError:
            return None
        except (delta.exceptions.DeltaError, OSError) as error:
            if any(sign in str(error) for sign in _DAMAGED_CHECKPOINT):
                raise CorruptData(
                    f"The newest checkpoint of the table {self.url} is damaged or missing ({error}): remove it and "
                    "_last_checkpoint from _delta_log, if the commit files since the one before are still there."
                ) from error
            refuse_file(self.files)
            raise TransientStorageError(f"The table {self.url} could not be opened: {error}") from error
        return table

    def columns(self) -> pa.Schema | None:
        """The columns of the table now; None if there is none."""
        table = self.open()
        return None if table is None else columns_of(table)

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The cursor of the sink's last commit; None if there is no table. Safe beside a commit of another thread."""
        known = self.known.get(log_id)  # before the table is opened: what is committed meanwhile is newer
        table = self.open()
        if table is None:
            self.refuse_removed(known)
            return None
        return self._proved(table, log_id, known).cursor

    def last_commit(self, table: DeltaTable, log_id: UUID) -> KnownCommits:
        """The sink's last commit in the table, which is still in effect."""
        return self._proved(table, log_id, self.known.get(log_id))

    def _proved(self, table: DeltaTable, log_id: UUID, known: KnownCommits | None) -> KnownCommits:
        application = self.application(log_id)
        offset = self.next_in(table, log_id)
        check_shape(table, self.shape, self.url)
        table_id, version = id_of(table), table.version()
        if known is not None and (known.table_id, known.version) == (table_id, version):
            return known
        seen = Observed(table_id, version, offset, table.transaction_version(application.commit(table_id)))
        found = last_commit(seen, self.read_commit, application, self.url)
        check_known(known, found, self.url)
        # An earlier process may have died between its commit and its sync, and a slot will follow this cursor.
        with contextlib.suppress(NotFound):  # only a checkpoint is left of it, which is older than any sync
            self.make_durable(found.version)
        return found

    def next_in(self, table: DeltaTable, log_id: UUID) -> int:
        """The next offset, by the table's application transaction."""
        offset = table.transaction_version(self.application(log_id).cursor)
        if offset is not None:
            return int(offset)
        known = table.metadata().configuration.get(LOG_PROPERTY)
        raise Diverged(
            f"The table {self.url} does not follow log {log_id} as {self._name!r}, but "
            + (f"log {known}" if known else "no log at all")
            + ": give this log a table of its own, or remove that one to build it again."
        )

    def start(self, table: DeltaTable) -> int:
        """The offset at which the table's rows begin.

        That of its last rebuild from another start, else that of its first follower. If another writer has restored
        the table since, the start of the version whose rows it has again: Delta keeps transactions over a restore.
        Searches the whole transaction log: too dear for each commit.
        """
        log_id = table.metadata().configuration.get(LOG_PROPERTY)
        if log_id is None:
            return self.first_start(table)
        restored = restored_version(table.version(), self.read_commit, self.application(UUID(log_id)))
        delta = deltalake_library()
        if restored is not None:
            with contextlib.suppress(delta.exceptions.DeltaError, OSError):  # that version was cleaned up
                old = delta.DeltaTable(self.url, storage_options=self._options or None)
                old.load_as_version(restored)
                if old.version() < table.version():
                    return self.start(old)
        return self._stored_start(table)

    def _stored_start(self, table: DeltaTable) -> int:
        """The start by the table's transactions, which may be that of rows that a restore has undone."""
        log_id = table.metadata().configuration.get(LOG_PROPERTY)
        if log_id is None:
            return self.first_start(table)
        name = self.application(UUID(log_id)).start(id_of(table))
        try:
            moved = table.transaction_version(name)
        except deltalake_library().exceptions.DeltaError:  # the handle names commits that were cleaned up since
            fresh = self.open_again()
            moved = None if fresh is None else fresh.transaction_version(name)
        return self.first_start(table) if moved is None else int(moved)

    def first_start(self, table: DeltaTable) -> int:
        """The offset at which the table's first follower began, as recorded, or by its first commit."""
        recorded = recorded_start(table)
        if recorded is not None:
            return recorded
        log_id, first = table.metadata().configuration.get(LOG_PROPERTY), self.read_commit(0)
        if log_id is None or first is None:
            return 0
        cursor = parse_commit(0, first, self.application(UUID(log_id))).cursor
        return 0 if cursor is None else cursor.next

    def refuse_removed(self, known: KnownCommits | None) -> None:
        """A starting follower creates a removed table again; a running one never does."""
        if known is not None:
            raise Diverged(
                f"The table {self.url} was removed while it was followed, up to offset {known.cursor.next}: put it "
                "back, or start the follower again, which builds the table from the log's beginning."
            )

    def refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        """``Fenced`` if the cursor moved since it was seen at ``at``: another follower committed."""
        table = self.open()
        if at is None and log_id in self.known:
            at = self.known[log_id].cursor  # this sink created the table
        now = None if table is None else self.last_commit(table, log_id).cursor
        if now != at:
            raise Fenced(
                f"Another follower changed {self.url} at the same time; this one committed nothing and must stop. "
                "Keep one follower per table."
            )

    def evolved(self, table: DeltaTable, at: Cursor) -> DeltaTable:
        """The table with the columns that its values need now, at the same cursor; a commit of its own if they change.

        New columns are null in older rows. A column that becomes wider rewrites all files, in one commit.
        """
        change = needed_change(table, self.shape)
        if not change:
            return table
        _LOGGER.warning(
            "The table %s gets the columns %s; wider are %s.",
            self.url,
            [field.name for field in change.added],
            [field.name for field in change.widened],
        )
        schema = deltalake_library().Schema.from_arrow(change.schema)
        is_rewritten = bool(change.widened) or any("." in field.name for field in change.added)
        adds = []
        if is_rewritten:
            refuse_append_only(table, self.url, "its columns change so that all rows have to be written again")
            adds = [added(file, self.now()) for file in self._rewritten(table, change.schema)]
        known = KnownCommits(id_of(table), table.version() + 1, at)
        commit_id = str(CHANCE.uuid())
        properties = self._properties(at, (known.table_id, known.version), commit_id)
        with self._answered(known.version, commit_id):
            if is_rewritten:
                table.create_write_transaction(adds, mode="overwrite", schema=schema, commit_properties=properties)
            else:
                new = {field.name for field in change.added}
                fields = [field for field in schema.fields if field.name in new]
                table.alter.add_columns(fields, commit_properties=properties)
        self._settle(known)
        found = self.open()
        if found is None or found.version() != known.version:
            raise Conflict(f"Another job committed to the table {self.url} while its columns were changed.")
        return found

    def _rewritten(self, table: DeltaTable, schema: pa.Schema) -> Iterator[DataFile]:
        """All files of the table once more, with wider columns; a file keeps the range of hashes that it covers."""
        for path in data_files(table):
            rows = in_schema(self.files.read(path), schema)
            role = "closed" if is_closed(path) else "keys"
            job = f"{CHANCE.uuid()}-{CHANCE.uuid()}"
            name = file_name(role, range_of(path), job) if self.shape.is_keyed else f"part-{job}.parquet"
            yield write_file(self.files, name, rows)

    def create(self, since: Cursor) -> DeltaTable:
        """Create the table at a cursor. ``Conflict`` if another follower was first."""
        folder = local_path(self.url)
        if folder is not None:
            # Not left to deltalake: others could read it, and a power failure could remove the name of a table that a
            # slot says was stored.
            make_own_folder(folder, disk=self._disk)
        commit_id = str(CHANCE.uuid())
        created: DeltaTable | None = None
        with self._answered(0, commit_id):
            created = deltalake_library().DeltaTable.create(
                self.url,
                schema=self.shape.schema(),
                mode="error",
                configuration={**_CHECKPOINTS, **properties_of(self.shape, since)},
                storage_options=self._options or None,
                commit_properties=self._properties(since, None, commit_id),
                raise_if_key_not_exists=False,
            )
        table = created or self.open()
        if table is None:
            raise Diverged(f"The table {self.url} was removed as soon as it was created: start the follower again.")
        self._settle(KnownCommits(id_of(table), 0, since))
        if table.version() > 0:
            # The handle is as new as the table: a concurrent follower's commit was not checked.
            raise Conflict(f"Another follower committed to the table {self.url} as soon as it was created.")
        return table

    def remove_uncommitted(self, job: str) -> None:
        """Remove the data files of a job whose table was never created; nothing can refer to them.

        The folder stays: another follower may be creating the table in it at this moment.
        """
        folder = local_path(self.url)
        if folder is None or self.open() is not None:
            return
        for row in self._disk.scan(folder):
            if is_data_file(row.name) and job in row.name:
                self._disk.remove(f"{folder}/{row.name}")

    def commit(
        self,
        table: DeltaTable,
        actions: list[Any],
        upto: Cursor,
        *,
        replaces: pa.Schema | None = None,
        start: int | None = None,
    ) -> None:
        """Commit the actions with the cursor as the next version; ``Conflict`` if another commit was first.

        ``replaces``: all files that the table has now are removed, and it has these columns then. ``start``: its rows
        begin at this offset then.
        """
        # Without retries the commit takes the next version, or none.
        known = KnownCommits(id_of(table), table.version() + 1, upto)
        commit_id = str(CHANCE.uuid())
        moved = self._moved_start(table, start)
        properties = self._properties(upto, (known.table_id, known.version), commit_id, moved)
        schema = table.schema() if replaces is None else deltalake_library().Schema.from_arrow(replaces)
        mode: Literal["overwrite", "append"] = "append" if replaces is None else "overwrite"
        with self._answered(known.version, commit_id):
            table.create_write_transaction(actions, mode=mode, schema=schema, commit_properties=properties)
        self._settle(known)

    def restored(self, table: DeltaTable, version: int, cursor: Cursor) -> bool:
        """Whether the table is restored to a version; False if that is impossible, and nothing happened."""
        delta = deltalake_library()
        try:
            old = delta.DeltaTable(self.url, version=version, storage_options=self._options or None)
            known = KnownCommits(id_of(old), table.version() + 1, cursor)
            # Delta keeps transactions over a restore: that of the start has to go back, too.
            moved = self._moved_start(table, self.start(old))
            properties = self._properties(cursor, (known.table_id, known.version), str(CHANCE.uuid()), moved)
            table.restore(version, commit_properties=properties)
        except delta.exceptions.CommitFailedError as error:
            raise Fenced(
                f"Another job committed to {self.url} while it was being repaired; nothing was changed. Stop that "
                "first."
            ) from error
        except (delta.exceptions.DeltaError, OSError) as error:
            _LOGGER.warning("The table %s cannot go back to version %d: %s", self.url, version, error)
            return False
        self._settle(known)
        _LOGGER.warning("The table %s was restored to version %d, which is at %s.", self.url, version, cursor)
        return True

    @contextlib.contextmanager
    def _answered(self, version: int, commit_id: str) -> Iterator[None]:
        """Errors of a commit as this package names them; none if the commit landed all the same.

        A store may lose its answer: the library then repeats the request, and finds the version taken, by itself.
        """
        try:
            with self.named_errors():
                yield
        except (Conflict, TransientStorageError) as error:
            if not self._is_own(version, commit_id):
                raise
            _LOGGER.warning("Version %d of %s is committed, though its answer was lost: %s", version, self.url, error)

    def _is_own(self, version: int, commit_id: str) -> bool:
        """Whether a version is the commit with this number. Not if that cannot be known now."""
        try:
            data = self.read_commit(version)
            return data is not None and parse_commit(version, data, NOBODY).commit_id == commit_id
        except (TransientStorageError, CorruptData):
            return False

    def _settle(self, known: KnownCommits) -> None:
        """Prove that a commit landed in the intended table, and make that commit durable.

        A handle on a table that was removed and created again with as many versions commits into the new one.
        """
        table = self.open()
        if table is None or id_of(table) != known.table_id:
            raise Diverged(f"The table {self.url} was removed or replaced while it was committed to. {REMEDY}")
        self.make_durable(known.version)
        self.known[known.cursor.log_id] = known

    def make_durable(self, version: int) -> None:
        """Sync the files of a commit on a local disk: ``deltalake`` does not, and a slot may follow it."""
        root = local_path(self.url)
        if root is None:
            return
        commit = PurePath(root, "_delta_log", f"{version:020d}.json")
        paths = parse_commit(version, self._disk.read(str(commit)), NOBODY).data_files
        data = [PurePath(root, unquote(path)) for path in paths]
        for file in (*data, commit):
            self._disk.sync_file(str(file))
        with contextlib.suppress(NotFound):  # most commits have no checkpoint
            self._disk.sync_file(str(commit.with_suffix(".checkpoint.parquet")))
            self._disk.sync_file(str(commit.with_name("_last_checkpoint")))
        for folder in {file.parent for file in (*data, commit)} | {PurePath(root)}:
            self._disk.sync_folder(str(folder))

    def _moved_start(self, table: DeltaTable, start: int | None) -> int | None:
        """The start, if it is another one than the table has now."""
        return None if start is None or start == self._stored_start(table) else start

    def _properties(
        self, cursor: Cursor, commit: tuple[str, int] | None, commit_id: str, start: int | None = None
    ) -> Any:
        """The cursor, and to which version of which table it belongs; unknown for a table being created.

        No retries: the library would commit after any other commit without checking it, and a second creator
        would create the table again.
        """
        delta = deltalake_library()
        application = self.application(cursor.log_id)
        transactions = [delta.Transaction(application.cursor, cursor.next)]
        metadata = {CURSOR_KEY: str(cursor), COMMIT_KEY: commit_id}
        if commit is not None:
            table_id, version = commit
            transactions.append(delta.Transaction(application.commit(table_id), version))
            metadata[TABLE_KEY] = table_id
            if start is not None:
                transactions.append(delta.Transaction(application.start(table_id), start))
        return delta.CommitProperties(app_transactions=transactions, custom_metadata=metadata, max_commit_retries=0)

    def application(self, log_id: UUID) -> Application:
        """The names of the follower's transactions."""
        return Application(log_id, self._name)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Translate the errors of a commit; ``Conflict``: another commit was first."""
        errors = deltalake_library().exceptions
        try:
            yield
        except errors.CommitFailedError as error:
            if "Unsupported table features" in str(error):
                raise InvalidInput(
                    f"The table {self.url} has features that deltalake cannot write: turn them off. ({error})"
                ) from error
            raise Conflict(f"Another job committed to the table {self.url} first. ({error})") from error
        except (errors.DeltaError, OSError) as error:
            if "already exists" in str(error):
                raise Conflict(f"Another follower created the table {self.url} first. ({error})") from error
            raise TransientStorageError(
                f"The table {self.url} could not be committed, and stays at its cursor: {error}"
            ) from error

    def read_commit(self, version: int) -> bytes | None:
        """The commit file of a version; None if there is none."""
        from deltalake.fs import DeltaStorageHandler

        try:
            files = DeltaStorageHandler(self.url, self._options or None)
            return bytes(files.open_input_file(f"_delta_log/{version:020d}.json").read())
        except FileNotFoundError:
            return None
        except (deltalake_library().exceptions.DeltaError, OSError) as error:
            raise TransientStorageError(
                f"The commit file of version {version} of the table {self.url} could not be read: {error}"
            ) from error
