"""The Iceberg table sink: follows a log exactly once, through ``pyiceberg``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, CorruptData, Diverged, InvalidInput, NotFound, TransientStorageError
from strandline.model.arguments import Named, Positive, anything, checked, shown
from strandline.model.cursor import Cursor
from strandline.model.sink import check_coverage, is_applied
from strandline.storage.clock import CHANCE, CLOCK, Clock
from strandline.storage.disk import DISK, Disk
from strandline.tables.apply import Work
from strandline.tables.files.data_files import write_file
from strandline.tables.files.layout import files_in, job_name, shares_of
from strandline.tables.files.part import TablePart, in_schema
from strandline.tables.files.recorded import COMMIT_KEY, MODE_KEY, TRANSFORM_KEY, looked_at_again, told_move
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.files.sink import FileTableSink
from strandline.tables.iceberg.columns import arrow_schema, iceberg_library, kept_in_iceberg
from strandline.tables.iceberg.commits import IcebergCommits
from strandline.tables.iceberg.history import LOG_KEY, start_in
from strandline.tables.iceberg.orphans import remove_orphans
from strandline.tables.iceberg.replay import replayed_iceberg
from strandline.tables.iceberg.table import Begun, FollowedIceberg
from strandline.tables.iceberg.transaction import IcebergLetters, IcebergTransaction
from strandline.tables.maintain.comparison import ShareTask, share_tasks
from strandline.tables.maintain.contract import RecordedTable, TableSize, refuse_moved_on
from strandline.tables.maintain.rebuilding import rebuilt_files
from strandline.tables.rows.bad_records import BadCount, BadShare
from strandline.tables.rows.kinds import KINDS, Kind
from strandline.tables.rows.logged import LoggedShape, Value, fixed
from strandline.tables.rows.shape import DeadLetters, TableShape, key_columns
from strandline.tables.rows.tombstones import Tombstones
from strandline.tables.work import Rebuild

if TYPE_CHECKING:
    from pyiceberg.table import Table

SMALL_FILE: Final = 64 << 20
"""Files with fewer bytes are joined by ``optimize``."""
_TRIES: Final = 8
"""Attempts to expire snapshots beside other commits."""


@checked
class IcebergSink(FileTableSink):
    """An Iceberg table that follows a log: data and cursor are one snapshot, keyed by offset.

    ``mode``, ``value``, ``key``, ``tombstones``, ``transform``, ``soft_deletes`` and ``max_bad_share`` are those of
    :class:`~strandline.tables.delta.sink.DeltaSink`. ``dead_letters`` names a second table for records that cannot
    become rows.

    The cursor is in the summary of each snapshot, and with the snapshot's id in a property of the table. Two followers
    of one table cannot both commit: one is ``Fenced``, as of a Delta table. A table that was rolled back, overwritten,
    changed by other writers, dropped or re-created is ``Diverged``; rewritten files (snapshots that replace files and
    keep all rows) and changed properties are allowed.
    """

    def __init__(
        self,
        catalog: Annotated[Any, anything("a catalog of pyiceberg, or its name")],
        table: Named,
        *,
        mode: Kind = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        tombstones: Tombstones | None = None,
        transform: Callable[[pa.Table], pa.Table] | None = None,
        soft_deletes: bool = False,
        dead_letters: str | None = None,
        max_bad_share: Annotated[Any, anything("a share between 0 and 1")] = 1.0,
        name: Named = "default",
        disk: Disk = DISK,
    ) -> None:
        """The table ``namespace.table`` in ``catalog``, created by the first apply.

        ``catalog`` is a catalog of pyiceberg, or a name that is configured for ``pyiceberg.catalog.load_catalog``.
        """
        for identifier in (table, dead_letters):
            if identifier is not None and not all(identifier.split(".")[-2:]):
                raise InvalidInput(f"{shown(identifier)} names no Iceberg table: write namespace.table.")
            if identifier is not None and not identifier.isprintable():
                raise InvalidInput(f"{shown(identifier)} names no Iceberg table: control characters are not allowed.")
            if identifier is not None and "." not in identifier:
                raise InvalidInput(f"{shown(identifier)} has no namespace: write namespace.table.")
        self.table = table
        """The identifier of the table."""
        self.mode: Kind = mode
        """The kind of the table."""
        self._name = name
        self._shape = TableShape(mode, fixed(value), key_columns(key), transform, soft_deletes, tombstones=tombstones)
        self._logged = LoggedShape(self._shape, value, table)
        self._kept, self._offered = kept_in_iceberg, {}
        found = _catalog(catalog)
        self._followed: FollowedIceberg = FollowedIceberg(found, table, self._shape, name, disk)
        self._letters: FollowedIceberg | None = None
        if dead_letters is not None:
            self._letters = FollowedIceberg(found, dead_letters, DeadLetters(), f"{name}/{table}/dead-letters", disk)
        self._bad_share = BadShare.of(max_bad_share)
        self._bad_count = BadCount()
        self._claims = {}

    def __repr__(self) -> str:
        return f"IcebergSink({self.table!r}, mode={self.mode!r}, name={self._name!r})"

    def _forget(self, log_id: UUID) -> None:
        super()._forget(log_id)
        if self._letters is not None:
            self._letters.known.pop(log_id, None)

    def _replayed(self, log_id: UUID) -> Callable[[], AbstractContextManager[ReplayedFiles | None]] | None:
        if self._letters is None:
            return None
        return partial(replayed_iceberg, self._followed, self._letters, self._shape, log_id)

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> IcebergTransaction | None:
        """Prove the table and plan the parts of a range; see :class:`~strandline.model.sink.TableSink`."""
        with looked_at_again(partial(self._followed.refuse_lost, since.log_id)):
            return self._begun(since, upto, tasks)

    def _begun(self, since: Cursor, upto: Cursor, tasks: int) -> IcebergTransaction | None:
        self._refresh()
        begun = self._followed.begin(since)
        claim = self._claimed(since.log_id, begun.found)
        if is_applied(since=since, upto=upto, at=begun.at):
            if begun.at is not None and claim.is_disputed(begun.at.next):
                IcebergCommits(self._followed, claim.own).commit(begun, (), (), begun.at)
                claim.hold(claim.own)
            return None
        letters = None if self._letters is None else IcebergLetters(self._letters, self._letters.begin(since))
        floor = max(since.next, 0 if begun.at is None else begun.at.next)
        parts = tuple(replace(one, grows=True) for one in self._parts(begun, floor, letters, tasks))
        return IcebergTransaction(
            *(self._followed, begun, since, upto, parts, claim, letters, self._bad_share, self._bad_count),
            take_columns=self._take_columns,
        )

    def _parts(self, begun: Begun, floor: int, letters: IcebergLetters | None, tasks: int) -> Iterator[TablePart]:
        part = TablePart(
            self._shape,
            begun.columns,
            begun.files,
            _job(begun),
            floor,
            dead=None if letters is None else letters.begun.files,
            known_letters=None if letters is None else letters.known(self._followed.identifier, floor),
            address=self._followed.identifier,
        )
        if not self._shape.is_keyed:
            yield from [part] * max(1, tasks)
            return
        sizes = [(path, file.file_size_in_bytes) for path, file in self._followed.data_files(begun).items()]
        for share in shares_of(tasks, sizes):
            yield replace(part, share=share, old=tuple(files_in(share, sizes)))

    @property
    def where(self) -> str:
        """The identifier of the table."""
        return self.table

    def _existing(self) -> Any:
        table = self._followed.open()
        if table is None:
            raise NotFound(f"There is no table {self.table}.")
        return table

    def start(self) -> int:
        """The offset at which the table began to follow its log; ``NotFound`` if there is no table."""
        return start_in(self._existing().metadata)

    def size(self) -> TableSize:
        """Its size; ``NotFound`` if there is no table."""
        table = self._existing()
        files = self._followed.data_files(self._followed.on(table)).values()
        rows, size = sum(file.record_count for file in files), sum(file.file_size_in_bytes for file in files)
        columns = tuple((field.name, str(field.type)) for field in arrow_schema(table.schema()))
        return TableSize(table.metadata.last_sequence_number, rows, len(files), size, columns)

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""
        table = self._existing()
        mode = next((kind for kind in KINDS if kind == table.metadata.properties.get(MODE_KEY)), None)
        if mode is None:
            return None
        is_transformed = TRANSFORM_KEY in table.metadata.properties
        return RecordedTable(mode, arrow_schema(table.schema()), is_transformed=is_transformed)

    def rows(self) -> pa.Table:
        """All rows of the newest snapshot, read file by file; ``NotFound`` if there is no table."""
        begun = self._followed.on(self._existing())
        parts = [in_schema(begun.files.read(path), begun.columns) for path in self._followed.data_files(begun)]
        return pa.concat_tables(parts) if parts else begun.columns.empty_table()

    def comparison(self, upto: int, most: Positive) -> list[ShareTask]:
        """The tasks that compare the newest snapshot; see :func:`~strandline.tables.maintain.operations.verify`."""
        table = self._existing()
        self._followed.refuse_lost_transform(table)
        begun = self._followed.on(table)
        held, paths = range(start_in(table.metadata), upto), self._followed.data_files(begun)
        return share_tasks(self._shape, begun.columns, begun.files, paths, held, most)

    def rebuilt(self, job: Rebuild) -> Cursor:
        """Build all rows again, as one snapshot; see :func:`~strandline.tables.maintain.operations.rebuild`."""
        table = self._existing()  # before the range is planned
        return rebuilt_files(job, start_in(table.metadata), partial(self._rebuild, table), self.where)

    def _rebuild(self, table: Table, beginning: Cursor, upto: Cursor, work: Work, tasks: int) -> None:
        log_id, start = upto.log_id, beginning.next
        self._refresh()  # the codec of the last record, or a newer one
        self._followed.refuse_lost_transform(table)
        self._followed.check_followed(table, log_id)
        self._followed.known.pop(log_id, None)
        begun = self._followed.rebuilding(table)
        letters = None
        if self._letters is not None:
            letters = IcebergLetters(self._letters, self._letters.begin(upto.at(start)))
        parts = tuple(replace(part, old=(), known_letters=None) for part in self._parts(begun, 0, letters, tasks))
        written = work(parts)
        check_coverage(written, parts, start, upto.next)
        self._bad_share.check_written(written, upto.next - start)
        if letters is not None:
            letters.commit(written, upto)
        added = [file for one in written for file in one.added]
        IcebergCommits(self._followed).commit(begun, added, list(self._followed.data_files(begun)), upto, start=start)
        self._replace_letters(beginning, upto, written, parts[0].job)

    def optimized(self) -> int:
        """Join small files, with the cursor as it is; see :func:`~strandline.tables.maintain.operations.optimize`.

        ``Conflict`` if its follower commits at the same moment: nothing was changed.
        """
        table = self._existing()
        found = self._followed.last_commit(table, self._followed.log_of(table))
        begun = self._followed.on(table)
        sizes = {path: file.file_size_in_bytes for path, file in self._followed.data_files(begun).items()}
        small = [path for path, size in sizes.items() if size < SMALL_FILE]
        if len(small) <= 1:
            return 0
        added, few, size = [], list[pa.Table](), 0
        for path in small:
            few.append(in_schema(begun.files.read(path), begun.columns))
            size += sizes[path]
            if size >= SMALL_FILE or path == small[-1]:
                name = f"part-{_job(begun)}-{CHANCE.uuid()}.parquet"
                added.append(write_file(begun.files, name, pa.concat_tables(few)))
                few, size = [], 0
        IcebergCommits(self._followed, found.holder).commit(begun, added, small, found.cursor)
        return len(small) - len(added)

    def vacuumed(self, hours: int, *, clock: Clock = CLOCK) -> int:
        """Expire snapshots, and remove unnamed files; see :func:`~strandline.tables.maintain.operations.vacuum`."""
        before = datetime.fromtimestamp(clock.now() / 1_000_000, UTC) - timedelta(hours=hours)
        self._expire(before)
        with self._followed.named_errors():
            return remove_orphans(self._existing(), before)

    def _expire(self, before: datetime) -> None:
        """Expire snapshots of the table as it is, again if it is changed at the same moment."""
        for _ in range(_TRIES):
            table = self._existing()
            try:
                IcebergCommits(self._followed).expire(table, self._followed.log_of(table), before)
            except (Conflict, TransientStorageError):
                if self._existing().metadata_location == table.metadata_location:
                    raise
            else:
                return
        raise Conflict(f"The table {self.table} was changed each time its snapshots were to expire: try again.")

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Go back to the last snapshot that is known to be right; returns the cursor there.

        That is the newest snapshot of this sink, of the current one and its ancestors, whose files still exist and
        whose cursor the log still ``serves``. A table that needs no repair is not changed. ``Diverged`` if there is
        none; None without a table.
        """
        table = self._followed.open()
        if table is None:
            return self.resume(log_id)
        self._followed.refuse_another_log(table, log_id)
        try:
            at = self.resume(log_id)
            if (lost := self._followed.damage_of(table, None)) is not None:
                raise lost
        except (Diverged, CorruptData) as error:
            damage = error
        else:
            return at
        for snapshot in self._followed.own_snapshots(table, log_id):
            if (
                snapshot.cursor is not None
                and serves(snapshot.cursor)
                and self._followed.damage_of(table, snapshot.snapshot_id) is None
            ):
                IcebergCommits(self._followed).reset(table, snapshot.snapshot_id, snapshot.cursor)
                return self.resume(log_id)
        raise Diverged(
            f"The table {self.table} cannot be repaired: no snapshot of it is left that is known to be right and that "
            f"the log can continue from. Drop it to build it again. ({damage})"
        ) from damage

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor: the caller knows that it is right.

        ``NotFound`` if there is no such table, ``Conflict`` if another writer changes it at the same time.
        """
        table = self._followed.open()
        mark = None if table is None else table.metadata.properties.get(COMMIT_KEY)
        if table is None or mark is None or table.metadata.properties.get(LOG_KEY) != str(log_id):
            raise NotFound(f"There is no table {self.table} with a cursor in log {log_id} to adopt.")
        offset = mark.partition("@")[0]
        if not offset.isdecimal():
            raise Conflict(f"The property {COMMIT_KEY} of the table {self.table} is {shown(mark)}, and no cursor.")
        self._followed.known.pop(log_id, None)
        cursor = Cursor(log_id, int(offset))
        IcebergCommits(self._followed).commit(self._followed.on(table), (), (), cursor)
        return cursor

    def move(self, former: Cursor, to: Cursor) -> None:
        """Follow another log from now on; see :class:`~strandline.tables.maintain.contract.MaintainedTable`."""
        table = self._existing()
        refuse_moved_on(former, self._followed.last_commit(table, former.log_id).cursor, self.table)
        self._refuse_letters(former)
        told = told_move(former, to)
        IcebergCommits(self._followed).commit(self._followed.on(table), (), (), to, moved=told)
        self._forget(former.log_id)


def _catalog(given: Any) -> Any:
    library = iceberg_library()
    if isinstance(given, library.catalog.Catalog):
        return given
    if isinstance(given, str) and given:
        try:
            return library.catalog.load_catalog(given)
        except Exception as error:
            raise InvalidInput(f"The catalog {shown(given)} cannot be loaded: {error}.") from error
    raise InvalidInput(f"A catalog is one of pyiceberg, or its name, not {shown(given)}.")


def _job(begun: Begun) -> str:
    """The name of a job that commits with the next sequence number of a table: both are in the names of its files."""
    metadata = begun.transaction.table_metadata
    return job_name(metadata.next_sequence_number(), str(metadata.table_uuid))
