"""Commits to a Delta table that follows a log: each is one version with the cursor, durable before it counts.

The library's own retries are off: it would commit after any other commit without checking it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote

import pyarrow as pa

from strandline.errors import Conflict, CorruptData, Diverged, Fenced, NotFound, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.storage.clock import CHANCE
from strandline.storage.disk import make_own_folder
from strandline.tables.delta.files import added, table_folder
from strandline.tables.delta.handles import LOG_PROPERTY, data_files, deltalake_library, id_of, listed_files
from strandline.tables.delta.history import NOBODY, REMEDY, TABLE_KEY, KnownCommits, parse_commit
from strandline.tables.delta.recorded_shape import needed_change, properties_of, refuse_append_only
from strandline.tables.delta.start import start_of, stored_start
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.data_files import write_file
from strandline.tables.files.layout import file_name, is_closed, is_data_file, range_of
from strandline.tables.files.part import in_schema
from strandline.tables.files.recorded import (
    CHANGE_KEY,
    COMMIT_KEY,
    CURSOR_KEY,
    HOLDER_KEY,
    told_change,
    told_rebuild,
    warn_of_change,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

_CHECKPOINTS: Final = {"delta.checkpointInterval": "20"}
"""Opening a table reads all commits since the last checkpoint: with ``deltalake``'s 100 the last one costs four times
as much as the first."""
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeltaCommits:
    """Commits to a table on a handle on which its state was proved."""

    followed: FollowedDelta
    holder: str | None = None
    """The follower that holds the table since these commits; None for those of nobody."""

    @property
    def url(self) -> str:
        """The address of the table."""
        return self.followed.url

    def evolved(self, table: DeltaTable, at: Cursor) -> DeltaTable:
        """The table with the columns that its values need now, at the same cursor; a commit of its own if they change.

        New columns are null in older rows. A column that becomes wider rewrites all files, in one commit.
        """
        change = needed_change(table, self.followed.shape)
        if not change:
            return table
        warn_of_change(change, self.url)
        schema = deltalake_library().Schema.from_arrow(change.schema)
        is_rewritten = bool(change.widened) or any("." in field.name for field in change.added)
        adds = []
        if is_rewritten:
            refuse_append_only(table, self.url, "its columns change so that all rows have to be written again")
            adds = [added(file, self.followed.now()) for file in self._rewritten(table, change.schema)]
        known = KnownCommits(id_of(table), table.version() + 1, at, self.holder)
        commit_id = str(CHANCE.uuid())
        properties = self._properties(at, (known.table_id, known.version), commit_id, told=told_change(change))
        with self._answered(known.version, commit_id):
            if is_rewritten:
                table.create_write_transaction(adds, mode="overwrite", schema=schema, commit_properties=properties)
            else:
                new = {field.name for field in change.added}
                fields = [field for field in schema.fields if field.name in new]
                table.alter.add_columns(fields, commit_properties=properties)
        self._settle(known)
        found = self.followed.open()
        if found is None or found.version() != known.version:
            raise Conflict(f"Another job committed to the table {self.url} while its columns were changed.")
        return found

    def _rewritten(self, table: DeltaTable, schema: pa.Schema) -> Iterator[DataFile]:
        """All files of the table once more, with wider columns; a file keeps the range of hashes that it covers."""
        for path in data_files(table):
            rows = in_schema(self.followed.files.read(path), schema)
            role = "closed" if is_closed(path) else "keys"
            job = f"{CHANCE.uuid()}-{CHANCE.uuid()}"
            name = file_name(role, range_of(path), job) if self.followed.shape.is_keyed else f"part-{job}.parquet"
            yield write_file(self.followed.files, name, rows)

    def create(self, since: Cursor) -> DeltaTable:
        """Create the table at a cursor. ``Conflict`` if another follower was first."""
        folder = table_folder(self.url)
        if folder is not None:
            # Not left to deltalake: others could read it, and a power failure could remove the name of a table that a
            # slot says was stored.
            make_own_folder(folder, disk=self.followed.files.disk)
            make_own_folder(f"{folder}/_delta_log", disk=self.followed.files.disk)
        commit_id = str(CHANCE.uuid())
        created: DeltaTable | None = None
        with self._answered(0, commit_id):
            created = deltalake_library().DeltaTable.create(
                self.url,
                schema=self.followed.shape.schema(),
                mode="error",
                configuration={**_CHECKPOINTS, **properties_of(self.followed.shape, since)},
                storage_options=self.followed.storage_options,
                commit_properties=self._properties(since, None, commit_id),
                raise_if_key_not_exists=False,
            )
        table = created or self.followed.open()
        if table is None:
            raise Diverged(f"The table {self.url} was removed as soon as it was created: start the follower again.")
        self._settle(KnownCommits(id_of(table), 0, since, self.holder))
        if table.version() > 0:
            # The handle is as new as the table: a concurrent follower's commit was not checked.
            raise Conflict(f"Another follower committed to the table {self.url} as soon as it was created.")
        return table

    def remove_uncommitted(self, job: str) -> None:
        """Remove the data files of a job whose table was never created; nothing can refer to them.

        The folder stays: another follower may be creating the table in it at this moment.
        """
        folder = table_folder(self.url)
        if folder is None or self.followed.open() is not None:
            return
        for row in self.followed.files.disk.scan(folder):
            if is_data_file(row.name) and job in row.name:
                self.followed.files.disk.remove(f"{folder}/{row.name}")

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
        known = KnownCommits(id_of(table), table.version() + 1, upto, self.holder)
        commit_id = str(CHANCE.uuid())
        moved = self._moved_start(table, start)
        told = "" if replaces is None or start is None else told_rebuild(start, upto)
        properties = self._properties(upto, (known.table_id, known.version), commit_id, moved, told)
        schema = table.schema() if replaces is None else deltalake_library().Schema.from_arrow(replaces)
        mode: Literal["overwrite", "append"] = "append" if replaces is None else "overwrite"
        with self._answered(known.version, commit_id):
            table.create_write_transaction(actions, mode=mode, schema=schema, commit_properties=properties)
        newest = self._settle(known)
        if replaces is not None:
            self._refuse_left(newest, {unquote(action.path) for action in actions})

    def accept(self, table: DeltaTable, at: Cursor, start: int, *, told: str = "") -> None:
        """Commit that the table as it is has the state of a cursor, whose log it follows; ``Conflict`` as for a commit.

        ``start``: where its rows begin. ``told`` is what the history says of it.
        """
        known = KnownCommits(id_of(table), table.version() + 1, at, self.holder)
        commit_id = str(CHANCE.uuid())
        properties = self._properties(at, (known.table_id, known.version), commit_id, start, told)
        with self._answered(known.version, commit_id):
            table.alter.set_table_properties(
                {LOG_PROPERTY: str(at.log_id)}, raise_if_not_exists=False, commit_properties=properties
            )
        self._settle(known)

    def restored(self, table: DeltaTable, version: int, cursor: Cursor, present: AbstractSet[str]) -> bool:
        """Whether the table is restored to a version; False if that is impossible, and nothing happened.

        ``present``: the files that are there. The library looks only for those that it would add again.
        """
        try:
            old = self.followed.at_version(version)
            expected = listed_files(old).keys()
            if not expected <= present:
                return False
            known = KnownCommits(id_of(old), table.version() + 1, cursor, self.holder)
            # Delta keeps transactions over a restore: that of the start has to go back, too.
            moved, commit_id = self._moved_start(table, start_of(self.followed, old)), str(CHANCE.uuid())
            properties = self._properties(cursor, (known.table_id, known.version), commit_id, moved)
            with self._answered(known.version, commit_id):
                table.restore(version, commit_properties=properties)
        except Conflict as error:
            raise Fenced(
                f"Another job committed to {self.url} while it was being repaired; nothing was changed. Stop that "
                "first."
            ) from error
        except (NotFound, CorruptData) as error:
            _LOGGER.warning("The table %s cannot go back to version %d: %s", self.url, version, error)
            return False
        self._refuse_left(self._settle(known), expected)
        _LOGGER.warning("The table %s was restored to version %d, which is at %s.", self.url, version, cursor)
        return True

    @contextlib.contextmanager
    def _answered(self, version: int, commit_id: str) -> Iterator[None]:
        """Errors of a commit as this package names them; none if the commit landed all the same.

        A store may lose its answer: the library then repeats the request, and finds the version taken, by itself.
        """
        try:
            with self.followed.named_errors():
                yield
        except (Conflict, TransientStorageError) as error:
            if not self._is_own(version, commit_id):
                raise
            _LOGGER.warning("Version %d of %s is committed, though its answer was lost: %s", version, self.url, error)

    def _is_own(self, version: int, commit_id: str) -> bool:
        """Whether a version is the commit with this number. Not if that cannot be known now."""
        try:
            data = self.followed.read_commit(version)
            return data is not None and parse_commit(version, data, NOBODY).commit_id == commit_id
        except (TransientStorageError, CorruptData):
            return False

    def _settle(self, known: KnownCommits) -> DeltaTable:
        """Prove that a commit landed in the intended table, and make that commit durable.

        A handle on a table that was removed and created again with as many versions commits into the new one.
        """
        table = self.followed.open()
        if table is None or id_of(table) != known.table_id:
            raise Diverged(f"The table {self.url} was removed or replaced while it was committed to. {REMEDY}")
        self.followed.make_durable(known.version, is_own=True)
        self.followed.known[known.cursor.log_id] = known
        return table

    def _refuse_left(self, table: DeltaTable, expected: AbstractSet[str]) -> None:
        """``CorruptData`` if a commit that replaced all files has left others in the table.

        The library decodes a name that it removes, and cannot write an encoded slash again: nothing is removed then.
        """
        left = listed_files(table).keys() - expected
        if left:
            raise CorruptData(
                f"The data file {min(left)[:200]!r} of another writer is still in the table {self.url}: deltalake "
                "cannot remove a file of that name. Remove the table to build it again."
            )

    def _moved_start(self, table: DeltaTable, start: int | None) -> int | None:
        """The start, if it is another one than the table has now."""
        return None if start is None or start == stored_start(self.followed, table) else start

    def _properties(
        self, cursor: Cursor, commit: tuple[str, int] | None, commit_id: str, start: int | None = None, told: str = ""
    ) -> Any:
        """The cursor, and to which version of which table it belongs; unknown for a table being created.

        ``told`` is what the history says of the commit.

        No retries: the library would commit after any other commit without checking it, and a second creator
        would create the table again.
        """
        delta = deltalake_library()
        application = self.followed.application(cursor.log_id)
        transactions = [delta.Transaction(application.cursor, cursor.next)]
        metadata = {CURSOR_KEY: str(cursor), COMMIT_KEY: commit_id}
        if self.holder is not None:
            metadata[HOLDER_KEY] = self.holder
        if told:
            metadata[CHANGE_KEY] = told
        if commit is not None:
            table_id, version = commit
            transactions.append(delta.Transaction(application.commit(table_id), version))
            metadata[TABLE_KEY] = table_id
            if start is not None:
                transactions.append(delta.Transaction(application.start(table_id), start))
        return delta.CommitProperties(app_transactions=transactions, custom_metadata=metadata, max_commit_retries=0)
