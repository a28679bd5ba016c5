"""Proof of the state of a Delta table that follows a log: which version has which cursor, and that it is durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, CorruptData, InvalidInput, NotFound, TransientStorageError
from strandline.model.cursor import MILLISECOND, Cursor
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.disk import Disk, limit_rights
from strandline.storage.objects.settings import store_settings
from strandline.tables.delta.files import DeltaFiles, table_folder
from strandline.tables.delta.handles import columns_of, deltalake_library, id_of, log_of
from strandline.tables.delta.history import (
    NOBODY,
    Application,
    KnownCommits,
    Observed,
    last_commit,
    parse_commit,
    refuse_replaced,
    replaced_by_another,
)
from strandline.tables.delta.newest import NewestVersion
from strandline.tables.delta.place import refuse_file, refuse_linked_log
from strandline.tables.delta.recorded_shape import check_shape
from strandline.tables.files.paths import is_inside, outside
from strandline.tables.files.recorded import looked_at_again, not_followed, refuse_another_follower, refuse_removed
from strandline.tables.rows.shape import DeadLetters, TableShape

if TYPE_CHECKING:
    from deltalake import DeltaTable

_DAMAGED_CHECKPOINT: Final = ("Invalid Checkpoint", "Invalid Parquet file")
_UNKNOWN_STORE: Final = ("Unknown scheme", "Unable to recognise URL")
_DAMAGED_COMMIT: Final = "Json error"
_LOST_COMMITS: Final = ("Expected contiguous commit files", "No table metadata or protocol found")
_NO_VERSION: Final = (*_LOST_COMMITS, "No files in log segment", "LogSegment end version")


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
        self.files = DeltaFiles(url, store_settings(options), disk)
        self.known: dict[UUID, KnownCommits] = {}
        """The last commit of this object, by log."""
        self._name = name
        self._clock = clock
        self._newest: NewestVersion | None = None

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The options of the table's store, as the library takes them."""
        return dict(self.files.options) or None

    def now(self) -> int:
        """Milliseconds since the epoch, for the table's history."""
        return self._clock.now() // MILLISECOND

    def open(self) -> DeltaTable | None:
        """A handle on the newest version, for reading and for a commit; None if there is no table."""
        refuse_linked_log(self.files)
        newest = self._newest
        if newest is not None and newest.is_current(self.read_commit):
            return newest.table
        table = self.open_again()
        self._newest = None if table is None else NewestVersion.of(table, self.read_commit)
        return table

    def open_again(self) -> DeltaTable | None:
        """A handle of the caller's own, which it may change."""
        refuse_linked_log(self.files)
        try:
            return self._opened()
        except CorruptData:  # the library looks twice, and another job may have cleaned up commits in between
            return self._opened()

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

    def columns(self) -> pa.Schema | None:
        """The columns of the table now; None if there is none."""
        table = self.open()
        return None if table is None else columns_of(table)

    def position(self, log_id: UUID) -> KnownCommits | None:
        """The sink's last commit; None if there is no table. Safe beside a commit of another thread."""
        known = self.known.get(log_id)  # before the table is opened: what is committed meanwhile is newer
        with looked_at_again(partial(self.refuse_lost, log_id)):
            table = self.open()
            if table is None:
                self.refuse_removed(known)
                return None
            return self._proved(table, log_id, known)

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
        seen = Observed(table_id, version, offset, self.transaction_in(table, application.commit(table_id)))
        found = last_commit(seen, self.read_commit, application, self.url)
        refuse_replaced(known, found, self.url)
        # An earlier process may have died between its commit and its sync, and a slot will follow this cursor.
        with contextlib.suppress(NotFound):  # only a checkpoint is left of it, which is older than any sync
            self.make_durable(found.version)
        return found

    def next_in(self, table: DeltaTable, log_id: UUID) -> int:
        """The next offset, by the table's application transaction; ``Diverged`` if the table follows another log."""
        self.refuse_another_log(table, log_id)
        offset = self.transaction_in(table, self.application(log_id).cursor)
        if offset is not None:
            return offset
        raise not_followed(self.url, log_id, self._name, log_of(table))

    def refuse_another_log(self, table: DeltaTable, log_id: UUID) -> None:
        """``Diverged`` if the table follows another log, also if it was moved there: Delta keeps all transactions.

        Dead letters may be those of several logs.
        """
        owner = log_of(table)
        if owner not in (None, str(log_id)) and not isinstance(self.shape, DeadLetters):
            raise not_followed(self.url, log_id, self._name, owner)

    def transaction_in(self, table: DeltaTable, name: str) -> int | None:
        """The version of an application transaction; None if there is none. The library reads it only now."""
        try:
            found = table.transaction_version(name)
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

    def at_version(self, version: int) -> DeltaTable:
        """A handle on an earlier version; ``NotFound`` if its commit files were cleaned up."""
        delta = deltalake_library()
        try:
            table: DeltaTable = delta.DeltaTable(self.url, version=version, storage_options=self.storage_options)
        except (delta.exceptions.DeltaError, OSError) as error:
            if any(sign in str(error) for sign in _NO_VERSION):
                raise NotFound(
                    f"The table {self.url} has no version {version} any more: {_first_line(error)}"
                ) from error
            raise self._unread(error) from error
        return table

    def refuse_removed(self, known: KnownCommits | None) -> None:
        """A starting follower creates a removed table again; a running one never does."""
        refuse_removed(None if known is None else known.cursor, self.url)

    def refuse_lost(self, log_id: UUID) -> None:
        """``Diverged`` if the table was removed or replaced since its follower started."""
        table, known = self.open_again(), self.known.get(log_id)
        if table is None:
            self.refuse_removed(known)
        elif known is not None and id_of(table) != known.table_id:
            raise replaced_by_another(self.url)

    def refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        """``Fenced`` if the cursor moved since it was seen at ``at``: another follower committed."""
        table = self.open()
        if table is None:
            self.refuse_removed(self.known.get(log_id))
        if at is None and log_id in self.known:
            at = self.known[log_id].cursor  # this sink created the table
        now = None if table is None else self.last_commit(table, log_id).cursor
        refuse_another_follower(at, now, self.url)

    def make_durable(self, version: int, *, is_own: bool = False) -> None:
        """Sync the files of a commit on a local disk: ``deltalake`` does not, and a slot may follow it.

        ``is_own``: this process has just committed it, and the library's files get the rights of ours, too.
        """
        root = table_folder(self.url)
        if root is None:
            return
        commit = PurePath(root, "_delta_log", f"{version:020d}.json")
        paths = parse_commit(version, self.files.disk.read(str(commit)), NOBODY).data_files
        for path in paths:
            if not is_inside(path):
                raise outside(path, self.url)
        data = [PurePath(root, unquote(path)) for path in paths]
        checkpoint = (commit.with_suffix(".checkpoint.parquet"), commit.with_name("_last_checkpoint"))
        for file in (*data, commit, *checkpoint) if is_own else ():
            limit_rights(str(file))
        for file in (*data, commit):
            self.files.disk.sync_file(str(file))
        with contextlib.suppress(NotFound):  # most commits have no checkpoint
            for file in checkpoint:
                self.files.disk.sync_file(str(file))
        for folder in {file.parent for file in (*data, commit)} | {PurePath(root)}:
            self.files.disk.sync_folder(str(folder))

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
            files = DeltaStorageHandler(self.url, self.storage_options)
            return bytes(files.open_input_file(f"_delta_log/{version:020d}.json").read())
        except FileNotFoundError:
            return None
        except (deltalake_library().exceptions.DeltaError, OSError) as error:
            raise TransientStorageError(
                f"The commit file of version {version} of the table {self.url} could not be read: {error}"
            ) from error


def _first_line(error: Exception) -> str:
    """What the library says, without the trace behind it."""
    return (str(error).splitlines() or [""])[0]
