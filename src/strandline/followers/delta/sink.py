"""The Delta table sink: follows a log exactly once, through ``deltalake``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, Contended, Diverged, Fenced, InvalidInput, MissingExtra, NotFound, StorageError
from strandline.followers.delta.history import (
    CURSOR_KEY,
    REMEDY,
    TABLE_KEY,
    Application,
    KnownCommits,
    Observed,
    check_known,
    last_commit,
    own_commits,
    parse_commit,
)
from strandline.log.folders import FIRST_BYTES, FolderKind, check_new, check_new_in_bucket
from strandline.model.addresses import Address, as_address, is_text, refuse_credentials, split_address
from strandline.model.arguments import Named, checked
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op
from strandline.model.sink import remaining, without_key
from strandline.storage.disk import DISK, Disk, make_own_folder

if TYPE_CHECKING:
    from deltalake import DeltaTable

Mode = Literal["latest", "append"]

LATEST_SCHEMA: Final = pa.schema(
    [READ_SCHEMA.field(name) for name in ("key", "value", "offset", "timestamp", "headers")]
)
"""The columns of a table with one row per key."""

_LOG_PROPERTY: Final = "strandline.log_id"
_MODE_PROPERTY: Final = "strandline.mode"
_ATTEMPTS: Final = 8
_NOBODY: Final = Application(UUID(int=0), "")
_LOGGER: Final = logging.getLogger(__name__)


def _deltalake() -> Any:
    try:
        import deltalake
    except ImportError as error:
        raise MissingExtra("Delta tables need the extra 'delta': pip install 'strandline[delta]'.") from error
    return deltalake


@checked
class DeltaSink:
    """A Delta table that follows a log: data and cursor are one commit, keyed by offset, so that nothing is duplicated.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it, a null value is a row,
    and a record without key is refused as ``NullKey``. ``mode="append"`` keeps every change.

    Two followers of one table cannot both commit: the table format refuses the second, which gets ``Fenced``. The
    cursor is the Delta application transaction ``strandline/<log id>/<name>``; its version is the next offset.

    Before each commit the table's own history proves that it is the followed table and still matches its
    cursor (:mod:`~strandline.followers.delta.history`): a table that was restored, overwritten, replaced or removed is
    ``Diverged``. Compaction, VACUUM, checkpoints, log cleanup and changed properties are allowed.
    """

    def __init__(
        self,
        url: Address,
        *,
        mode: Mode = "latest",
        name: Named = "default",
        options: Mapping[str, str] | None = None,
        disk: Disk = DISK,
    ) -> None:
        """The table at ``url``, which is created by the first apply; ``options`` are its storage options."""
        self.url = as_address(url)
        """The address of the table."""
        if not is_text(self.url):
            raise InvalidInput(f"{self.url!a} is not UTF-8, and a table's address has to be: name another folder.")
        refuse_credentials(self.url, "give them as storage options, or by the environment variables of the cloud")
        self.mode: Mode = mode
        """The mode of the table."""
        self._name = name
        self._options = dict(options or {})
        self._disk = disk
        self._known: dict[UUID, KnownCommits] = {}

    def __repr__(self) -> str:
        return f"DeltaSink({self.url!r}, mode={self.mode!r}, name={self._name!r})"

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log, proved by its history; None if there is no table yet.

        ``Diverged`` if it follows another log, if other writers changed its rows, or if it is not the table that this
        object has committed to; also if that was removed.
        """
        table = self._open()
        if table is not None:
            return self._last_commit(table, log_id).cursor
        self._refuse_removed(log_id)
        return None

    def resume(self, log_id: UUID) -> Cursor | None:
        """The same for a starting follower, which has only the table's own history."""
        self._known.pop(log_id, None)
        return self.cursor(log_id)

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.model.sink.Sink`.

        Commits of other writers that changed no row, such as a compaction, are allowed.
        """
        for _ in range(_ATTEMPTS):
            # One handle for the check and the commit: a commit of another writer in between makes this one fail.
            table = self._open()
            if table is None:
                self._refuse_removed(since.log_id)
            at = None if table is None else self._last_commit(table, since.log_id).cursor
            todo = remaining(records, since=since, upto=upto, at=at)
            if todo is None:
                return
            if self.mode == "latest":
                _refuse_null_keys(todo)
                todo = newest_per_key(todo)
            if self._stored(table, todo, since, upto):
                return
            self._refuse_another_follower(since.log_id, at)
        raise Contended(
            f"Other jobs committed to the table {self.url} at each of {_ATTEMPTS} tries; nothing was committed. Try "
            "again."
        )

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the table to the last version that is known to be right; returns the cursor there.

        That is the last commit of this sink whose files still exist and whose cursor the log still ``serves``. A
        table that needs no repair is not changed. Changes of other writers since then are undone, in one commit that
        carries the cursor. ``Diverged`` if there is no such version; None if there is no table.
        """
        table = self._open()
        if table is None:
            return self.resume(log_id)
        try:
            return self.resume(log_id)
        except Diverged as error:
            damage = error
        application = self._application(log_id)
        for commit in own_commits(table.version(), self._read_commit, application):
            if (
                commit.cursor is not None
                and serves(commit.cursor)
                and self._restored(table, commit.version, commit.cursor)
            ):
                return commit.cursor
        raise Diverged(
            f"The table {self.url} cannot be repaired: no version of it is left that is known to be right and "
            f"that the log can continue from. Remove it to build it again. ({damage})"
        ) from damage

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor: the caller knows that it is right.

        For a table that other writers changed on purpose, or whose history is lost. ``NotFound`` if there is no table,
        ``Conflict`` if another writer changes rows of it at the same time. Several concurrent calls all succeed.
        """
        table = self._open()
        if table is None:
            raise NotFound(f"There is no table at {self.url} to adopt.")
        cursor = Cursor(log_id, self._next_in(table, log_id))
        self._known.pop(log_id, None)
        try:
            self._commit(table, self._schema().empty_table(), cursor)
        except Conflict as error:
            with contextlib.suppress(Diverged):
                return self.cursor(log_id) or cursor  # another call adopted it
            raise Conflict(
                f"Another job changed {self.url} while it was being adopted; nothing was committed. Check the table "
                "again, and adopt it if it is right."
            ) from error
        return cursor

    def _stored(self, table: DeltaTable | None, todo: pa.Table, since: Cursor, upto: Cursor) -> bool:
        """Whether the range was committed; False if another commit was first, and nothing happened."""
        try:
            if table is None:
                table = self._create(since)
            if since != upto or todo.num_rows:
                self._commit(table, todo, upto)
        except Conflict:
            return False
        return True

    def _refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        table = self._open()
        if at is None and log_id in self._known:
            at = self._known[log_id].cursor  # this sink created the table
        now = None if table is None else self._last_commit(table, log_id).cursor
        if now != at:
            raise Fenced(
                f"Another follower changed {self.url} at the same time; this one committed nothing and must stop. "
                "Keep one follower per table."
            )

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Translate the errors of a commit; ``Conflict``: another commit was first."""
        errors = _deltalake().exceptions
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
            raise StorageError(
                f"The table {self.url} could not be committed, and stays at its cursor: {error}"
            ) from error

    def _properties(self, cursor: Cursor, commit: tuple[str, int] | None) -> Any:
        """The cursor, and to which version of which table it belongs; unknown for a table being created.

        No retries: the library would commit after any other commit without checking it, and a second creator
        would create the table again.
        """
        delta = _deltalake()
        application = self._application(cursor.log_id)
        transactions = [delta.Transaction(application.cursor, cursor.next)]
        metadata = {CURSOR_KEY: str(cursor)}
        if commit is not None:
            table_id, version = commit
            transactions.append(delta.Transaction(application.commit(table_id), version))
            metadata[TABLE_KEY] = table_id
        return delta.CommitProperties(app_transactions=transactions, custom_metadata=metadata, max_commit_retries=0)

    def _create(self, since: Cursor) -> DeltaTable:
        # VACUUM deletes all files in the table's folder that do not belong to it.
        folder = _local_path(self.url)
        if folder is not None:
            check_new(folder, FolderKind.DELTA_TABLE, disk=self._disk)
            # Not left to deltalake: others could read it, and a power failure could remove the name of a table that a
            # slot says was stored.
            make_own_folder(folder, disk=self._disk)
        else:
            check_new_in_bucket(self.url, FolderKind.DELTA_TABLE, self._first_bytes)
        with self._named_errors():
            table: DeltaTable = _deltalake().DeltaTable.create(
                self.url,
                schema=self._schema(),
                mode="error",
                configuration={_LOG_PROPERTY: str(since.log_id), _MODE_PROPERTY: self.mode},
                storage_options=self._options or None,
                commit_properties=self._properties(since, None),
                raise_if_key_not_exists=False,
            )
        self._settle(KnownCommits(_id_of(table), 0, since))
        if table.version() > 0:
            # The handle is as new as the table: a concurrent follower's commit was not checked.
            raise Conflict(f"Another follower committed to the table {self.url} as soon as it was created.")
        return table

    def _first_bytes(self, name: str) -> bytes | None:
        """First bytes of an object beside the table, by its own storage options; None if there is none of that name."""
        from deltalake.fs import DeltaStorageHandler

        with self._named_errors():
            try:
                with DeltaStorageHandler(self.url, self._options or None).open_input_file(name) as found:
                    return bytes(found.read(FIRST_BYTES))
            except FileNotFoundError:
                return None

    def _commit(self, table: DeltaTable, records: pa.Table, upto: Cursor) -> None:
        # Without retries the commit takes the next version, or none.
        known = KnownCommits(_id_of(table), table.version() + 1, upto)
        properties = self._properties(upto, (known.table_id, known.version))
        with self._named_errors():
            self._write(table, records, properties)
        self._settle(known)

    def _write(self, table: DeltaTable, records: pa.Table, properties: Any) -> None:
        before = table.version()
        if records.num_rows and self.mode == "append":
            _deltalake().write_deltalake(table, records, mode="append", commit_properties=properties)
        elif records.num_rows:
            values = {name: f"new.{name}" for name in LATEST_SCHEMA.names}
            (
                table.merge(
                    records,
                    predicate="old.key = new.key",
                    source_alias="new",
                    target_alias="old",
                    commit_properties=properties,
                )
                .when_matched_delete(f"new.op <> {Op.PUT:d}")
                .when_matched_update(values)
                .when_not_matched_insert(values, predicate=f"new.op = {Op.PUT:d}")
                .execute()
            )
        if table.version() == before:
            # Nothing to write, or a merge without changes, such as the delete of an absent key, which is not
            # committed: the cursor moves anyway. The handle is that of the merge, so that a concurrent
            # commit makes this fail.
            table.create_write_transaction([], mode="append", schema=table.schema(), commit_properties=properties)

    def _restored(self, table: DeltaTable, version: int, cursor: Cursor) -> bool:
        """Whether the table is restored to a version; False if that is impossible, and nothing happened."""
        delta = _deltalake()
        try:
            old = delta.DeltaTable(self.url, version=version, storage_options=self._options or None)
            known = KnownCommits(_id_of(old), table.version() + 1, cursor)
            properties = self._properties(cursor, (known.table_id, known.version))
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

    def _settle(self, known: KnownCommits) -> None:
        """Prove that a commit landed in the intended table, and make that commit durable.

        A handle on a table that was removed and created again with as many versions commits into the new one.
        """
        table = self._open()
        if table is None or _id_of(table) != known.table_id:
            raise Diverged(f"The table {self.url} was removed or replaced while it was committed to. {REMEDY}")
        self._make_durable(known.version)
        self._known[known.cursor.log_id] = known

    def _make_durable(self, version: int) -> None:
        """Sync the files of a commit on a local disk: ``deltalake`` does not, and a slot may follow it."""
        root = _local_path(self.url)
        if root is None:
            return
        commit = PurePath(root, "_delta_log", f"{version:020d}.json")
        added = parse_commit(version, self._disk.read(str(commit)), _NOBODY).data_files
        data = [PurePath(root, unquote(path)) for path in added]
        for file in (*data, commit):
            self._disk.sync_file(str(file))
        for folder in {file.parent for file in (*data, commit)} | {PurePath(root)}:
            self._disk.sync_folder(str(folder))

    def _open(self) -> DeltaTable | None:
        delta = _deltalake()
        try:
            table: DeltaTable = delta.DeltaTable(self.url, storage_options=self._options or None)
        except delta.exceptions.TableNotFoundError:
            return None
        except (delta.exceptions.DeltaError, OSError) as error:
            raise StorageError(f"The table {self.url} could not be opened: {error}") from error
        return table

    def _application(self, log_id: UUID) -> Application:
        return Application(log_id, self._name)

    def _last_commit(self, table: DeltaTable, log_id: UUID) -> KnownCommits:
        """The sink's last commit in the table, which is still in effect."""
        application, known = self._application(log_id), self._known.get(log_id)
        offset = self._next_in(table, log_id)
        self._check_shape(table)
        table_id, version = _id_of(table), table.version()
        if known is not None and (known.table_id, known.version) == (table_id, version):
            return known
        seen = Observed(table_id, version, offset, table.transaction_version(application.commit(table_id)))
        found = last_commit(seen, self._read_commit, application, self.url)
        check_known(known, found, self.url)
        return found

    def _next_in(self, table: DeltaTable, log_id: UUID) -> int:
        """The next offset, by the table's application transaction."""
        offset = table.transaction_version(self._application(log_id).cursor)
        if offset is not None:
            return int(offset)
        known = table.metadata().configuration.get(_LOG_PROPERTY)
        raise Diverged(
            f"The table {self.url} does not follow log {log_id} as {self._name!r}, but "
            + (f"log {known}" if known else "no log at all")
            + ": give this log a table of its own, or remove that one to build it again."
        )

    def _check_shape(self, table: DeltaTable) -> None:
        properties = table.metadata().configuration
        if _MODE_PROPERTY not in properties or _LOG_PROPERTY not in properties:
            raise Diverged(f"The table {self.url} was replaced by another one at the same place. {REMEDY}")
        mode = properties[_MODE_PROPERTY]
        if mode != self.mode:
            raise InvalidInput(f"The table {self.url} was made with mode={mode!r}; open it with that mode.")
        if table.schema() != _deltalake().Schema.from_arrow(self._schema()):
            raise Diverged(
                f"The columns of the table {self.url} were changed, so that its follower cannot write to it: change "
                "them back, follow with repair=True, or follow into a new table."
            )

    def _schema(self) -> pa.Schema:
        return LATEST_SCHEMA if self.mode == "latest" else READ_SCHEMA

    def _refuse_removed(self, log_id: UUID) -> None:
        """A starting follower creates a removed table again; a running one never does."""
        known = self._known.get(log_id)
        if known is not None:
            raise Diverged(
                f"The table {self.url} was removed while it was followed, up to offset {known.cursor.next}: put it "
                "back, or start the follower again, which builds the table from the log's beginning."
            )

    def _read_commit(self, version: int) -> bytes | None:
        from deltalake.fs import DeltaStorageHandler

        try:
            files = DeltaStorageHandler(self.url, self._options or None)
            return bytes(files.open_input_file(f"_delta_log/{version:020d}.json").read())
        except FileNotFoundError:
            return None
        except (_deltalake().exceptions.DeltaError, OSError) as error:
            raise StorageError(
                f"The commit file of version {version} of the table {self.url} could not be read: {error}"
            ) from error


def _id_of(table: DeltaTable) -> str:
    return str(table.metadata().id)


def newest_per_key(records: pa.Table) -> pa.Table:
    """The newest record of each key, by offset; deletes are among them."""
    newest = records.select(["key", "offset"]).group_by("key").aggregate([("offset", "max")])
    if newest.num_rows == records.num_rows:
        return records
    return records.filter(pc.is_in(records.column("offset"), value_set=newest.column("offset_max").combine_chunks()))


def _refuse_null_keys(records: pa.Table) -> None:
    keys = records.column("key")
    if keys.null_count:
        first = pc.min(pc.filter(records.column("offset"), pc.is_null(keys))).as_py()
        raise without_key(first)


def _local_path(url: str) -> str | None:
    if "://" not in url:
        return url
    parts = split_address(url)
    return unquote(parts.path) if parts.scheme == "file" else None
