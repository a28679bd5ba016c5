"""Proof of the state of a Delta table that follows a log: which version has which cursor, and that it is durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, CorruptData, InvalidInput, NotFound, TransientStorageError
from strandline.model.cursor import MILLISECOND, Cursor
from strandline.storage.disk import limit_rights
from strandline.storage.env import Env
from strandline.storage.objects.urls import store_settings
from strandline.tables.delta.files import DeltaFiles, address_in_letters, table_folder
from strandline.tables.delta.history import (
    NOBODY,
    Application,
    commits,
    last_commit,
    last_restore,
    letter_logs,
    parse_commit,
)
from strandline.tables.delta.place import check_place, refuse_file, refuse_linked_log
from strandline.tables.delta.version import DeltaVersion, deltalake_library
from strandline.tables.files.data_files import lost_file
from strandline.tables.files.followed import FollowedTable, OwnCommit
from strandline.tables.files.paths import is_inside, outside
from strandline.tables.files.recorded import START_KEY
from strandline.tables.rows.partitions import PartitionValues
from strandline.tables.rows.shape import BAD_SCHEMA, DeadLetters, TableShape

if TYPE_CHECKING:
    from deltalake import DeltaTable

_DAMAGED_CHECKPOINT: Final = ("Invalid Checkpoint", "Invalid Parquet file")
_UNKNOWN_STORE: Final = ("Unknown scheme", "Unable to recognise URL")
_DAMAGED_COMMIT: Final = "Json error"
_LOST_COMMITS: Final = ("Expected contiguous commit files", "No table metadata or protocol found")
_NO_VERSION: Final = (*_LOST_COMMITS, "No files in log segment", "LogSegment end version")


class FollowedDelta(FollowedTable[DeltaVersion]):
    """A Delta table as its follower sees it: which version has which cursor, and whether that is still in effect."""

    def __init__(
        self,
        url: str,
        shape: TableShape,
        name: str,
        options: Mapping[str, str],
        env: Env,
    ) -> None:
        super().__init__(url, address_in_letters(url), shape, name, env)
        self.url = url
        self.files = DeltaFiles(url, store_settings(options), env.disk)
        self._newest: tuple[DeltaTable, int, bytes] | None = None
        """The newest version and its commit file: opening a table reads all commits since its last checkpoint."""

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The options of the table's store, as the library takes them."""
        return dict(self.files.options) or None

    def now(self) -> int:
        """Milliseconds since the epoch, for the table's history."""
        return self.env.clock.now() // MILLISECOND

    def open(self) -> DeltaVersion | None:
        """The newest version, on a handle that is remembered while it is the newest."""
        refuse_linked_log(self.files)
        newest = self._newest  # another thread may open it, too
        if newest is not None and self._is_current(*newest):
            return DeltaVersion.of(newest[0], self.files)
        found = self.open_again()
        self._newest = None if found is None else self._remembered(found)
        return found

    def _remembered(self, version: DeltaVersion) -> tuple[DeltaTable, int, bytes] | None:
        """None if the commit file cannot be read, or does not say whose commit it is."""
        with contextlib.suppress(TransientStorageError, CorruptData):
            commit = self.read_commit(version.number)
            if commit is not None and parse_commit(version.number, commit, NOBODY).commit_id is not None:
                return version.table, version.number, commit
        return None

    def _is_current(self, table: DeltaTable, number: int, commit: bytes) -> bool:
        """Whether the table has the same commit at this version, and no later one.

        A commit of this package has a random id. So the same bytes are the same table, also if it was removed and
        created again.
        """
        if table.version() != number:
            return False  # an operation has moved the handle
        with contextlib.suppress(TransientStorageError):
            return self.read_commit(number + 1) is None and self.read_commit(number) == commit
        return False

    def open_again(self) -> DeltaVersion | None:
        """The newest version on a handle of the caller's own."""
        refuse_linked_log(self.files)
        try:
            table = self._opened()
        except CorruptData:  # the library looks twice, and another job may have cleaned up commits in between
            table = self._opened()
        return None if table is None else DeltaVersion.of(table, self.files)

    def new(self, since: Cursor) -> DeltaVersion:
        """The version before the first, of a table at whose place is nothing else."""
        check_place(self.files)
        # number 0: the table is created before its first range
        return DeltaVersion(
            *(None, self.files, self.shape.schema(), since), id="", number=0, properties={}, is_new=True
        )

    def _opened(self) -> DeltaTable | None:
        delta = deltalake_library()
        try:
            table: DeltaTable = delta.DeltaTable(self.url, storage_options=self.storage_options)
        except delta.exceptions.TableNotFoundError as error:
            self._refuse_unknown_store(error)
            return None
        except (delta.exceptions.DeltaError, OSError) as error:
            self._refuse_unknown_store(error)
            if any(sign in str(error) for sign in _DAMAGED_CHECKPOINT):
                raise CorruptData(
                    f"The newest checkpoint of the table {self.url} is damaged or missing ({error}): remove it and "
                    "_last_checkpoint from _delta_log, if the commit files since the one before are still there."
                ) from error
            refuse_file(self.files)
            raise self._unread(error) from error
        return table

    def _refuse_unknown_store(self, error: Exception) -> None:
        if any(sign in str(error) for sign in _UNKNOWN_STORE):
            raise InvalidInput(
                f"{self.url} is no address of a table: write a folder, the address of a bucket such as s3://, gs:// or "
                "az://, or iceberg://CATALOG/namespace.table, sqlite:FILE#TABLE or postgresql://host/database#table."
            ) from error

    def check_followed(self, version: DeltaVersion, log_id: UUID, *, is_rebuilt: bool = False) -> None:
        """``Diverged`` for a table of another log, or of none; ``InvalidInput`` for one of another kind."""
        self.cursor_in(version, log_id)
        version.check_shape(self.shape, is_rebuilt=is_rebuilt)
        if is_rebuilt:
            version.refuse_append_only("a rebuild replaces all rows")

    def refuse_another_log(self, version: DeltaVersion, log_id: UUID) -> None:
        """``Diverged`` for another log's table, also a moved one: Delta keeps transactions. Letters may be of many."""
        if version.log not in (None, str(log_id)) and not isinstance(self.shape, DeadLetters):
            raise self.not_followed(log_id, version.log)

    def cursor_in(self, version: DeltaVersion, log_id: UUID) -> Cursor:
        """The cursor by the table's application transaction."""
        self.refuse_another_log(version, log_id)
        offset = self.transaction_in(version, self.application(log_id).cursor)
        if offset is None:
            raise self.not_followed(log_id, version.log)
        return Cursor(log_id, offset)

    def log_of(self, version: DeltaVersion) -> UUID:
        """The log that it follows; ``InvalidInput`` if it follows none."""
        if version.log is None:
            raise InvalidInput(f"The table {self.url} follows no log: it was made by another program.")
        return UUID(version.log)

    def committed(self, version: DeltaVersion, log_id: UUID) -> Iterator[tuple[int, int]]:
        """The offset of each own commit up to a version, from the newest on, as far as they are kept.

        With each the number of the newest version that has its rows: files that were joined since may be all there is.
        """
        newest = version.number
        for one in commits(version.number, self.read_commit, self.application(log_id)):
            is_own = one.cursor is not None and one.table_id in (None, version.id)
            if one.cursor is not None and is_own:
                yield one.cursor.next, newest
            if is_own or one.changed_rows:
                newest = one.version - 1

    def proof(self, version: DeltaVersion, log_id: UUID, known: OwnCommit | None) -> OwnCommit:
        """The sink's last commit: no commit behind it has changed a row."""
        if known is not None and (known.table_id, known.version) == (version.id, version.number):
            return known
        application = self.application(log_id)
        committed = self.transaction_in(version, application.commit(version.id))
        seen = OwnCommit(version.id, version.number, self.cursor_in(version, log_id))
        return last_commit(seen, committed, self.read_commit, application, self.url)

    def is_older(self, found: OwnCommit, known: OwnCommit) -> bool:
        """Whether the last commit is an earlier version than the known one."""
        return found.version < known.version

    def sizes(self, version: DeltaVersion) -> dict[str, int]:
        """The data files; ``InvalidInput`` if rows of one are deleted by a deletion vector, but for letters."""
        if not version.is_replaced and not isinstance(self.shape, DeadLetters):
            version.refuse_deletion_vectors()
        return {path: size for path, (_, size) in version.listed_files().items()}

    def file_partitions(self, version: DeltaVersion) -> dict[str, PartitionValues]:
        """By the table's history."""
        return {path: tuple(one.as_py() for one in found.values()) for path, found in version.partitions.items()}

    def size(self, version: DeltaVersion) -> tuple[int, int, int]:
        """Rows, files and bytes, by the table's history."""
        adds = pa.table(version.table.get_add_actions(flatten=True))
        rows, size = (pc.sum(adds.column(name)).as_py() or 0 for name in ("num_records", "size_bytes"))
        return rows, adds.num_rows, size

    def damage(self, version: DeltaVersion) -> CorruptData | None:
        """The error for a lost file, or one elsewhere."""
        try:
            lost = sorted(version.listed_files().keys() - self.files.present())
        except CorruptData as error:
            return error
        return lost_file(lost[0], self.url) if lost else None

    def start_of(self, version: DeltaVersion) -> int:
        """The offset at which the rows begin.

        That of the last rebuild from another start, else that of the first follower. If another writer has restored
        the table since, the start of the version whose rows it has again: Delta keeps transactions over a restore.
        Searches the whole transaction log: too slow for each commit.
        """
        if version.log is None:
            return self.first_start(version)
        restore = last_restore(version.number, self.read_commit, self.application(UUID(version.log)))
        if restore is not None:
            with contextlib.suppress(NotFound):  # that version was cleaned up
                return self.start_of(self._restored_by(restore))
        return self.stored_start(version)

    def _restored_by(self, number: int) -> DeltaVersion:
        """The newest version with the files that a RESTORE has brought back; ``NotFound`` if none is left.

        It may have named a time: by which clock, and in which zone, only its writer knows.
        """
        files = self.at_version(number).listed_files().keys()
        while (version := self.at_version(number - 1)).listed_files().keys() != files:
            number -= 1
        return version

    def stored_start(self, version: DeltaVersion) -> int:
        """The start by the table's transactions, which may be that of rows that a restore has undone."""
        if version.log is None:
            return self.first_start(version)
        name = self.application(UUID(version.log)).start(version.id)
        try:
            moved = self.transaction_in(version, name)
        except TransientStorageError:  # the handle names commits that were cleaned up since
            fresh = self.open_again()
            moved = None if fresh is None else self.transaction_in(fresh, name)
        return self.first_start(version) if moved is None else moved

    def first_start(self, version: DeltaVersion) -> int:
        """The offset at which the first follower began, as recorded, or by its first commit."""
        recorded = version.properties.get(START_KEY)
        if recorded is not None and recorded.isdecimal():
            return int(recorded)
        first = self.read_commit(0)
        if version.log is None or first is None:
            return 0
        cursor = parse_commit(0, first, self.application(UUID(version.log))).cursor
        return 0 if cursor is None else cursor.next

    def letters_upto(self, version: DeltaVersion, log_id: UUID) -> Cursor | None:
        """The cursor among the letters; ``InvalidInput`` for letters that do not say whose they are."""
        if version.log is not None and version.columns.names == BAD_SCHEMA.names:
            raise InvalidInput(
                f"The dead letters {self.url} do not say of which table they are, so that one table could take those "
                "of another: name a new place for them, and rebuild the table ('strandline table rebuild')."
            )
        version.check_shape(self.shape)
        offset = self.transaction_in(version, self.application(log_id).cursor)
        return None if offset is None else Cursor(log_id, offset)

    def logs(self, version: DeltaVersion) -> set[str]:
        """The logs whose letters were stored, as far as commit files reach."""
        commits = (self.read_commit(number) for number in range(version.number + 1))
        return {log for log in (version.log, *letter_logs(commits)) if log is not None}

    def check_removal(self, version: DeltaVersion) -> None:
        """``InvalidInput`` if the table only takes new rows, or if rows are deleted by a deletion vector."""
        version.refuse_append_only("a replay removes letters")
        version.refuse_deletion_vectors()

    def transaction_in(self, version: DeltaVersion, name: str) -> int | None:
        """The version of an application transaction; None if there is none. The library reads it only now."""
        try:
            found = version.table.transaction_version(name)
        except (deltalake_library().exceptions.DeltaError, OSError) as error:
            raise self._unread(error) from error
        return None if found is None else int(found)

    def _unread(self, error: Exception) -> CorruptData | TransientStorageError:
        if _DAMAGED_COMMIT in str(error):
            return CorruptData(
                f"A commit file of the table {self.url} is damaged ({_first_line(error)}): restore it from a copy."
            )
        if any(sign in str(error) for sign in _LOST_COMMITS):
            return CorruptData(
                f"Commit files of the table {self.url} are gone from _delta_log, though later ones need them: restore "
                f"them from a copy, or remove the table to build it again. ({_first_line(error)[:200]})"
            )
        return TransientStorageError(f"The table {self.url} could not be read: {error}")

    def at_version(self, number: int) -> DeltaVersion:
        """An earlier version; ``NotFound`` if its commit files were cleaned up."""
        delta = deltalake_library()
        try:
            table: DeltaTable = delta.DeltaTable(self.url, version=number, storage_options=self.storage_options)
        except (delta.exceptions.DeltaError, OSError) as error:
            if any(sign in str(error) for sign in _NO_VERSION):
                raise NotFound(
                    f"The table {self.url} has no version {number} any more: {_first_line(error)}"
                ) from error
            raise self._unread(error) from error
        return DeltaVersion.of(table, self.files)

    def make_durable(self, _: DeltaVersion, number: int, *, is_own: bool = False) -> None:
        """Sync the files of a commit on a local disk; ``NotFound`` if only a checkpoint is left of it."""
        root = table_folder(self.url)
        if root is None:
            return
        commit = PurePath(root, "_delta_log", f"{number:020d}.json")
        paths = parse_commit(number, self.env.disk.read(str(commit)), NOBODY).data_files
        for path in paths:
            if not is_inside(path):
                raise outside(path, self.url)
        data = [PurePath(root, unquote(path)) for path in paths]
        checkpoint = (commit.with_suffix(".checkpoint.parquet"), commit.with_name("_last_checkpoint"))
        for file in (*data, commit, *checkpoint) if is_own else ():
            limit_rights(str(file))
        for file in (*data, commit):
            self.env.disk.sync_file(str(file))
        with contextlib.suppress(NotFound):  # most commits have no checkpoint
            for file in checkpoint:
                self.env.disk.sync_file(str(file))
        for folder in {file.parent for file in (*data, commit)} | {PurePath(root)}:
            self.env.disk.sync_folder(str(folder))

    def make_checkpoint_durable(self, number: int) -> None:
        """Sync the checkpoint of a version on a local disk, before commit files that it replaces are removed."""
        root = table_folder(self.url)
        if root is not None:
            self.env.disk.sync_file(f"{root}/_delta_log/{number:020d}.checkpoint.parquet")
            self.env.disk.sync_folder(f"{root}/_delta_log")

    def add_checkpoint(self) -> None:
        """Make a checkpoint of the newest version."""
        version = self.open_again()
        with self.named_errors():
            if version is not None:
                version.table.create_checkpoint()

    def application(self, log_id: UUID) -> Application:
        """The names of the follower's transactions."""
        return Application(log_id, self.name)

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
        try:
            return bytes(self.files.handler().open_input_file(f"_delta_log/{version:020d}.json").read())
        except FileNotFoundError:
            return None
        except (deltalake_library().exceptions.DeltaError, OSError) as error:
            raise TransientStorageError(
                f"The commit file of version {version} of the table {self.url} could not be read: {error}"
            ) from error


def _first_line(error: Exception) -> str:
    """What the library says, without the trace behind it."""
    return (str(error).splitlines() or [""])[0]
