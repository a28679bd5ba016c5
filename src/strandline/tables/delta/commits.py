"""Commits to a Delta table that follows a log: each is one version with the cursor, durable before it counts.

The library's own retries are off: it would commit after any other commit without checking it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import unquote
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, CorruptData, Diverged, Fenced, NotFound, TransientStorageError
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.storage.disk import make_own_folder
from strandline.tables.delta.files import added_file, removed_file, table_folder
from strandline.tables.delta.history import NOBODY, TABLE_KEY, commits, parse_commit
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.delta.version import LOG_PROPERTY, DeltaVersion, deltalake_library
from strandline.tables.files.columns import in_schema
from strandline.tables.files.data_files import write_files
from strandline.tables.files.followed import REMEDY, OwnCommit
from strandline.tables.files.layout import file_name, is_closed, is_data_file, range_of
from strandline.tables.files.recorded import (
    CHANGE_KEY,
    COMMIT_KEY,
    CURSOR_KEY,
    HOLDER_KEY,
    properties_at,
    told_change,
    told_rebuild,
)
from strandline.tables.written import DataFile

_CHECKPOINTS: Final = {"delta.checkpointInterval": "20"}
"""Opening a table reads all commits since the last checkpoint: with ``deltalake``'s 100 the last one costs four times
as much as the first."""
_LOGGER: Final = logging.getLogger(__name__)


class DeltaCommits(FollowedDelta):
    """A Delta table, and commits on versions of it whose state was proved."""

    def evolved(self, version: DeltaVersion, *, is_rebuilt: bool = False) -> DeltaVersion:
        """The columns change by a commit at the same cursor. Wider ones rewrite all files; new ones are null before."""
        change = None if version.is_new else version.needed_change(self.shape, is_rebuilt=is_rebuilt)
        if is_rebuilt:  # the columns change with the rows
            return replace(version, made=change.schema if change else version.columns, found=None)
        if not change or version.at is None:
            return version
        told = told_change(change, self.url)
        schema = deltalake_library().Schema.from_arrow(change.schema)
        is_rewritten = bool(change.widened) or any("." in field.name for field in change.added)
        adds = []
        if is_rewritten:
            version.refuse_append_only("its columns change so that all rows have to be written again")
            rewritten = self._rewritten(version, change.schema)
            adds = [added_file(file, self.now(), version.partition_columns) for file in rewritten]

        def change_columns(properties: Any) -> None:
            if is_rewritten:
                version.table.create_write_transaction(
                    *(adds, "overwrite", schema, version.partition_columns), commit_properties=properties
                )
            else:
                new = {field.name for field in change.added}
                fields = [field for field in schema.fields if field.name in new]
                version.table.alter.add_columns(fields, commit_properties=properties)

        found = self._commit_next(version, version.at, change_columns, told=told)
        if found.number != version.number + 1:
            raise Conflict(f"Another job committed to the table {self.url} while its columns were changed.")
        return found

    def _rewritten(self, version: DeltaVersion, schema: pa.Schema) -> Iterator[DataFile]:
        """All files of the table once more, with wider columns; a file keeps the range of hashes that it covers."""
        for path in self.sizes(version):
            rows = in_schema(version.readable.read(path), schema)
            yield from write_files(self.files, partial(self._new_name, path), rows, self.shape.layout)

    def _new_name(self, path: str) -> str:
        """A name for rows of a file that are written again."""
        role, job = "closed" if is_closed(path) else "keys", f"{CHANCE.uuid()}-{CHANCE.uuid()}"
        return file_name(role, range_of(path), job) if self.shape.is_keyed else f"part-{job}.parquet"

    def created(self, version: DeltaVersion) -> DeltaVersion:
        """The version, whose table is created if it is not there: a commit with the cursor at which it begins."""
        if not version.is_new or version.since is None:
            return version
        since, holder = version.since, version.holder
        folder = table_folder(self.url)
        if folder is not None:
            # Not left to deltalake: others could read it, and a power failure could remove the name of a table that a
            # slot says was stored.
            make_own_folder(folder, disk=self.env.disk)
            make_own_folder(f"{folder}/_delta_log", disk=self.env.disk)
        commit_id = str(CHANCE.uuid())
        made: DeltaVersion | None = None
        with self._answered(0, commit_id):
            table = deltalake_library().DeltaTable.create(
                self.url,
                schema=self.shape.schema(),
                mode="error",
                description=self.shape.description,
                partition_by=None if self.shape.layout is None else self.shape.layout.names,
                configuration={**_CHECKPOINTS, LOG_PROPERTY: str(since.log_id), **properties_at(since, self.shape)},
                storage_options=self.storage_options,
                commit_properties=self._properties(OwnCommit("", 0, since, holder), commit_id),
                raise_if_key_not_exists=False,
            )
            made = DeltaVersion.of(table, self.files)
        if made is None:
            made = self.open()
        if made is None:
            raise Diverged(f"The table {self.url} was removed as soon as it was created: start the follower again.")
        self._settle(OwnCommit(made.id, 0, since, holder))
        if made.number > 0:
            # The handle is as new as the table: a concurrent follower's commit was not checked.
            raise Conflict(f"Another follower committed to the table {self.url} as soon as it was created.")
        return replace(made, since=since, holder=holder)

    def remove_uncommitted(self, job: str) -> None:
        """Remove the job's files. The folder stays: another follower may be creating the table in it just now."""
        folder = table_folder(self.url)
        if folder is None or self.open() is not None:
            return
        for row in self.env.disk.scan(folder):
            if is_data_file(row.name) and job in row.name:
                self.env.disk.remove(f"{folder}/{row.name}")

    def commit(self, version: DeltaVersion, added: Sequence[DataFile], removed: Collection[str], upto: Cursor) -> None:
        """Commit files and cursor as the next version; the first one of a new table has its cursor already."""
        if version.since == upto and not added:
            return
        table, now = version.table, self.now()
        names, changes = version.partition_columns, not version.keeps_rows
        actions = [added_file(file, now, names, is_new=changes) for file in added]
        mode: Literal["overwrite", "append"] = "overwrite" if version.is_replaced else "append"
        if removed and not version.is_replaced:
            version.refuse_deletion_vectors()
            known_files = version.listed_files()
            values = version.partitions
            actions += [
                removed_file(*known_files[path], now, values.get(path, {}), is_gone=changes) for path in removed
            ]
        told = "" if version.start is None else told_rebuild(version.start, upto)
        schema = deltalake_library().Schema.from_arrow(version.columns) if version.is_replaced else table.schema()

        def write(properties: Any) -> None:
            table.create_write_transaction(*(actions, mode, schema, names), commit_properties=properties)

        newest = self._commit_next(version, upto, write, start=version.start, told=told, is_reset=version.is_replaced)
        if version.is_replaced:
            self._refuse_left(newest, {unquote(action.path) for action in actions})

    def accept(self, version: DeltaVersion, at: Cursor, told: str = "") -> None:
        """Commit that the table as it is has the state of a cursor."""

        def follow(properties: Any) -> None:
            version.table.alter.set_table_properties(
                {LOG_PROPERTY: str(at.log_id)}, raise_if_not_exists=False, commit_properties=properties
            )

        start = self.start_of(version)
        self._commit_next(version, at, follow, start=start, told=told, is_start_stored=True, is_reset=True)

    def floor_of(self, version: DeltaVersion, log_id: UUID) -> int:
        """The oldest version that upkeep has kept; files of earlier ones may be gone."""
        return self.transaction_in(version, self.application(log_id).floor(version.id)) or 0

    def reset_of(self, version: DeltaVersion, log_id: UUID) -> int:
        """The last version that may name files which an earlier one had removed: of a repair, or as it was adopted."""
        return self.transaction_in(version, self.application(log_id).reset(version.id)) or 0

    def raise_floor(self, version: DeltaVersion, at: Cursor, floor: int) -> None:
        """Commit that files of versions below the floor may be removed, so that no repair goes back to one of those."""

        def write(properties: Any) -> None:
            version.table.create_write_transaction(
                [], mode="append", schema=version.table.schema(), commit_properties=properties
            )

        self._commit_next(version, at, write, floor=floor)

    def keep_removed(self, version: DeltaVersion, at: Cursor, setting: Mapping[str, str]) -> DeltaVersion:
        """Commit properties of the table that say how long its history names removed files."""

        def write(properties: Any) -> None:
            version.table.alter.set_table_properties(
                dict(setting), raise_if_not_exists=False, commit_properties=properties
            )

        return self._commit_next(version, at, write)

    def restored(self, version: DeltaVersion, log_id: UUID, serves: Callable[[Cursor], bool]) -> bool:
        """Restore the last own version whose files are all there: the library looks only for those that it adds."""
        present = self.files.present()
        own = commits(version.number, self.read_commit, self.application(log_id))
        floor = self.floor_of(version, log_id)
        return any(
            commit.cursor is not None
            and commit.version >= floor
            and serves(commit.cursor)
            and self._is_restored(version, commit.version, commit.cursor, present)
            for commit in own
        )

    def _is_restored(self, version: DeltaVersion, number: int, cursor: Cursor, present: AbstractSet[str]) -> bool:
        try:
            old = self.at_version(number)
            expected = old.listed_files().keys()
            if not expected <= present:
                return False

            def restore(properties: Any) -> None:
                version.table.restore(number, commit_properties=properties)

            # Delta keeps transactions over a restore: that of the start has to go back, too.
            start = self.start_of(old)
            done = self._commit_next(version, cursor, restore, start=start, table_id=old.id, is_reset=True)
        except Conflict as error:
            raise Fenced(
                f"Another job committed to {self.url} while it was being repaired; nothing was changed. Stop that "
                "first."
            ) from error
        except (NotFound, CorruptData) as error:
            _LOGGER.warning("The table %s cannot go back to version %d: %s", self.url, number, error)
            return False
        self._refuse_left(done, expected)
        _LOGGER.warning("The table %s was restored to version %d, which is at %s.", self.url, number, cursor)
        return True

    def _commit_next(
        self,
        version: DeltaVersion,
        upto: Cursor,
        write: Callable[[Any], object],
        *,
        start: int | None = None,
        told: str = "",
        table_id: str | None = None,
        is_start_stored: bool = False,
        is_reset: bool = False,
        floor: int | None = None,
    ) -> DeltaVersion:
        """Let ``write`` commit the next version with the cursor: that one or, without retries, none.

        Returns the table's newest version. A ``start`` is stored if it is another one than the table has now, or
        ``is_start_stored``. ``is_reset``: it may name files that an earlier version had removed.
        """
        known, commit_id = (
            OwnCommit(table_id or version.id, version.number + 1, upto, version.held_by),
            str(CHANCE.uuid()),
        )
        if start is not None and not is_start_stored and start == self.stored_start(version):
            start = None
        with self._answered(known.version, commit_id):
            application = self.application(upto.log_id)
            marks = {application.reset(known.table_id): known.version} if is_reset else {}
            if floor is not None:
                marks[application.floor(known.table_id)] = floor
            if start is not None:
                marks[application.start(known.table_id)] = start
            write(self._properties(known, commit_id, marks, told))
        return replace(self._settle(known), found=known)

    @contextlib.contextmanager
    def _answered(self, number: int, commit_id: str) -> Iterator[None]:
        """Errors of a commit as this package names them; none if the commit landed all the same.

        A store may lose its answer: the library then repeats the request, and finds the version taken, by itself.
        """
        try:
            with self.named_errors():
                yield
        except (Conflict, TransientStorageError) as error:
            if not self._is_own(number, commit_id):
                raise
            _LOGGER.warning("Version %d of %s is committed, though its answer was lost: %s", number, self.url, error)

    def _is_own(self, number: int, commit_id: str) -> bool:
        """Whether a version is the commit with this number. Not if that cannot be known now."""
        try:
            data = self.read_commit(number)
            return data is not None and parse_commit(number, data, NOBODY).commit_id == commit_id
        except (TransientStorageError, CorruptData):
            return False

    def _settle(self, known: OwnCommit) -> DeltaVersion:
        """Prove that a commit landed in the intended table, and make that commit durable.

        A handle on a table that was removed and created again with as many versions commits into the new one.
        """
        version = self.open()
        if version is None or version.id != known.table_id:
            raise Diverged(f"The table {self.url} was removed or replaced while it was committed to. {REMEDY}")
        self.make_durable(version, known.version, is_own=True)
        self.known[known.cursor.log_id] = known
        return version

    def _refuse_left(self, version: DeltaVersion, expected: AbstractSet[str]) -> None:
        """``CorruptData`` if a commit that replaced all files has left others in the table.

        The library decodes a name that it removes, and cannot write an encoded slash again: nothing is removed then.
        """
        left = version.listed_files().keys() - expected
        if left:
            raise CorruptData(
                f"The data file {min(left)[:200]!r} of another writer is still in the table {self.url}: deltalake "
                "cannot remove a file of that name. Remove the table to build it again."
            )

    def _properties(
        self, commit: OwnCommit, commit_id: str, marks: Mapping[str, int] | None = None, told: str = ""
    ) -> Any:
        """The cursor, to which version of which table it belongs (unknown for a new one), and a word for the history.

        ``marks`` are further transactions.

        No retries: the library would commit after any other commit without checking it, and a second creator
        would create the table again.
        """
        delta = deltalake_library()
        cursor, table_id = commit.cursor, commit.table_id
        application = self.application(cursor.log_id)
        transactions = [delta.Transaction(application.cursor, cursor.next)]
        metadata = {CURSOR_KEY: str(cursor), COMMIT_KEY: commit_id}
        if commit.holder is not None:
            metadata[HOLDER_KEY] = commit.holder
        if told:
            metadata[CHANGE_KEY] = told
        if table_id:
            transactions.append(delta.Transaction(application.commit(table_id), commit.version))
            metadata[TABLE_KEY] = table_id
            transactions += [delta.Transaction(name, number) for name, number in (marks or {}).items()]
        return delta.CommitProperties(app_transactions=transactions, custom_metadata=metadata, max_commit_retries=0)
