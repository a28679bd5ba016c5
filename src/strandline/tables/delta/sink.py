"""The Delta table sink: follows a log exactly once, through ``deltalake``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Conflict, CorruptData, Diverged, InvalidInput, NotFound
from strandline.model.addresses import Address, as_address, is_text, refuse_credentials
from strandline.model.arguments import Named, Positive, anything, checked
from strandline.model.cursor import Cursor
from strandline.model.sink import check_coverage, is_applied
from strandline.storage.clock import CHANCE
from strandline.storage.disk import DISK, Disk
from strandline.tables.apply import Work
from strandline.tables.claim import TableClaim
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import added
from strandline.tables.delta.handles import (
    check_folder,
    columns_of,
    data_files,
    id_of,
    listed_files,
    mode_of,
)
from strandline.tables.delta.history import own_commits
from strandline.tables.delta.letters import LetterBox, LettersOf, address_in_letters
from strandline.tables.delta.orphans import ORPHAN_HOURS, OrphanSweeper
from strandline.tables.delta.place import check_place, refuse_links, refuse_other_files
from strandline.tables.delta.recorded_shape import (
    check_shape,
    is_transformed,
    refuse_append_only,
    schema_for,
)
from strandline.tables.delta.replay import replayed_delta
from strandline.tables.delta.start import first_start, start_of
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.delta.transaction import DeltaTransaction
from strandline.tables.files.data_files import lost_file
from strandline.tables.files.layout import files_in, job_name, shares_of
from strandline.tables.files.part import FILE_ROWS, TablePart, in_schema
from strandline.tables.files.recorded import looked_at_again, told_move
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.files.sink import FileTableSink
from strandline.tables.maintain.comparison import ShareTask, share_tasks
from strandline.tables.maintain.contract import RecordedTable, TableSize, refuse_moved_on
from strandline.tables.maintain.rebuilding import rebuilt_files
from strandline.tables.rows.bad_records import BadCount, BadShare
from strandline.tables.rows.kinds import KINDS, Kind
from strandline.tables.rows.logged import LoggedShape, Value, fixed
from strandline.tables.rows.shape import DeadLetters, TableShape, key_columns, refuse_lost_transform
from strandline.tables.rows.tombstones import Tombstones
from strandline.tables.rows.types import storable
from strandline.tables.work import Rebuild

if TYPE_CHECKING:
    from deltalake import DeltaTable


@checked
class DeltaSink(FileTableSink):
    """A Delta table that follows a log: data and cursor are one commit, keyed by offset, so that nothing is duplicated.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it (``soft_deletes``: mark
    it), a null value is a row. ``mode="append"`` keeps every change. ``mode="history"`` keeps every version of every
    key, with the offsets and times at which it began and ended.

    ``value`` is the codec of the values, such as ``sl.values.Json(schema)``: the table then has their fields as
    columns, and ``_key``, ``_offset``, ``_timestamp`` and ``_op``. New fields become new columns, and numbers become
    wider; any other change of the schema is ``SchemaRefused``. ``value="log"`` is the codec that the log names
    (:meth:`meet`), in its newest version at each commit; a table that was made with the record's own columns keeps
    them.

    ``key`` names columns that identify a row instead of the record's key. ``tombstones`` then says how a delete without
    a value names its row by the record's key: ``"key"``, that is the text of the key column; ``"json"``, it is a JSON
    object with the key columns; a codec of it; or ``"dead-letters"``, such a delete is a bad record. Without
    ``tombstones`` the first one is ``BadRecord``, also with ``dead_letters``.

    ``transform`` is a function from an Arrow table of decoded changes to the rows to keep; it is called for parts of a
    range, in any cuts. A record that cannot become a row is ``BadRecord`` (``NullKey`` without a key), and nothing is
    applied; with ``dead_letters``, the address of a second table, it goes there with its offset and the reason. More
    than ``max_bad_share`` of a commit's records stop it all the same.

    Two followers of one table cannot both commit: the one whose first commit is later takes the table over
    (:mod:`strandline.tables.claim`), and the other is ``Fenced`` at its next, whatever slots they use. The cursor is
    the Delta application transaction ``strandline/<log id>/<name>``; its version is the next offset.

    Before each commit the table's own history proves that it is the followed table and still matches its
    cursor (:mod:`~strandline.tables.delta.history`): a table that was restored, overwritten, replaced or removed is
    ``Diverged``. OPTIMIZE, VACUUM, checkpoints, log cleanup and changed properties are allowed.
    """

    def __init__(
        self,
        url: Address,
        *,
        mode: Kind = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        tombstones: Tombstones | None = None,
        transform: Callable[[pa.Table], pa.Table] | None = None,
        soft_deletes: bool = False,
        dead_letters: Address | None = None,
        max_bad_share: Annotated[Any, anything("a share between 0 and 1")] = 1.0,
        orphan_hours: Positive | None = ORPHAN_HOURS,
        name: Named = "default",
        options: Mapping[str, str] | None = None,
        disk: Disk = DISK,
    ) -> None:
        """The table at ``url``, which is created by the first apply; ``options`` are its storage options.

        ``orphan_hours``: files of failed jobs that are older are removed now and then while the table is followed;
        None: they stay.
        """
        self.url = as_address(url)
        """The address of the table."""
        if not is_text(self.url):
            raise InvalidInput(f"{self.url!a} is not UTF-8, and a table's address has to be: name another folder.")
        refuse_credentials(self.url, "give them as storage options, or by the environment variables of the cloud")
        check_folder(self.url)
        self.mode: Kind = mode
        """The kind of the table."""
        self._shape = TableShape(
            mode, fixed(value), key_columns(key), transform, soft_deletes, has_plain_types=True, tombstones=tombstones
        )
        self._logged = LoggedShape(self._shape, value, self.url)
        self._kept, self._offered = storable, {}
        self._name = name
        self._followed: FollowedDelta = FollowedDelta(self.url, self._shape, name, options or {}, disk)
        self._claims = {}
        self._orphans = OrphanSweeper(self._followed, orphan_hours)
        self._letters: LettersOf | None = None
        if dead_letters is not None:
            letters = as_address(dead_letters)
            refuse_credentials(letters, "give them as storage options, or by the environment variables of the cloud")
            check_folder(letters)
            _refuse_nested(self.url, letters)
            self._letters = partial(_letters_of, letters, name, dict(options or {}), disk)
        self._bad_share = BadShare.of(max_bad_share)
        self._bad_count = BadCount()

    def __repr__(self) -> str:
        return f"DeltaSink({self.url!r}, mode={self.mode!r}, name={self._name!r})"

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> DeltaTransaction | None:
        """Prove the table and plan the parts of a range; see :class:`~strandline.model.sink.TableSink`."""
        with looked_at_again(partial(self._followed.refuse_lost, since.log_id)):
            return self._begun(since, upto, tasks)

    def _begun(self, since: Cursor, upto: Cursor, tasks: int) -> DeltaTransaction | None:
        self._refresh()
        # One handle for the check and the commit: a commit of another writer in between makes this one fail.
        table = self._followed.open()
        if table is None:
            self._followed.refuse_removed(self._followed.known.get(since.log_id))
            check_place(self._followed.files)
        found = None if table is None else self._followed.last_commit(table, since.log_id)
        at = None if found is None else found.cursor
        claim = self._claimed(since.log_id, found)
        if is_applied(since=since, upto=upto, at=at):
            if table is not None and at is not None and claim.is_disputed(at.next):
                DeltaCommits(self._followed, claim.own).commit(table, [], at)
                claim.hold(claim.own)
            return None
        if table is not None and found is not None:
            refuse_lost_transform(self._shape, self.where, is_transformed=is_transformed(table))
            table = DeltaCommits(self._followed, found.holder).evolved(table, found.cursor)
        is_new = table is None or at is None or at.next == first_start(self._followed, table)
        letters = self._opened_letters(table, since.log_id, is_new=is_new)
        floor = max(since.next, 0 if at is None else at.next)
        version = 1 if table is None else table.version() + 1  # a new table is created before its first range
        parts = tuple(replace(one, grows=True) for one in self._parts(table, version, floor, letters, tasks))
        self._orphans.remove_in_time(version)
        return DeltaTransaction(
            *(self._followed, table, since, upto, at, parts, claim, letters, self._bad_share, self._bad_count),
            take_columns=self._take_columns,
        )

    @property
    def where(self) -> str:
        """The address of the table."""
        return self.url

    def size(self) -> TableSize:
        """Its size; ``NotFound`` if there is no table."""
        table = self._existing()
        adds = pa.table(table.get_add_actions(flatten=True))
        rows, size = (pc.sum(adds.column(name)).as_py() or 0 for name in ("num_records", "size_bytes"))
        columns = tuple((field.name, str(field.type)) for field in columns_of(table))
        return TableSize(table.version(), rows, adds.num_rows, size, columns)

    def start(self) -> int:
        """The offset at which the table began to follow its log; ``NotFound`` if there is no table."""
        return start_of(self._followed, self._existing())

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""
        table = self._existing()
        mode = next((kind for kind in KINDS if kind == mode_of(table)), None)
        if mode is None:
            return None
        return RecordedTable(mode, columns_of(table), is_transformed=is_transformed(table))

    def rows(self) -> pa.Table:
        """All rows of the newest version, read file by file."""
        table = self._existing()
        schema = columns_of(table)
        parts = [in_schema(self._followed.files.read(path), schema) for path in data_files(table)]
        return pa.concat_tables(parts) if parts else schema.empty_table()

    def comparison(self, upto: int, most: Positive) -> list[ShareTask]:
        """The tasks that compare the newest version; see :func:`~strandline.tables.maintain.operations.verify`."""
        table = self._existing()
        refuse_lost_transform(self._shape, self.where, is_transformed=is_transformed(table))
        held, files = range(start_of(self._followed, table), upto), self._followed.files
        return share_tasks(self._shape, columns_of(table), files, data_files(table), held, most)

    def rebuilt(self, job: Rebuild) -> Cursor:
        """Build all rows again; see :func:`~strandline.tables.maintain.operations.rebuild`."""
        table = self._existing()  # before the range is planned
        return rebuilt_files(job, start_of(self._followed, table), partial(self._rebuild, table), self.where)

    def optimized(self) -> int:
        """Join small files; see :func:`~strandline.tables.maintain.operations.optimize`."""
        table = self._existing(is_moved=True)
        self._followed.files.refuse_links(data_files(table))  # the library reads them itself
        before, version = len(table.file_uris()), table.version()
        with self._followed.named_errors():
            table.optimize.compact()
        after = self._existing()
        for done in range(version + 1, after.version() + 1):
            with contextlib.suppress(NotFound):  # a checkpoint is left of it
                # The library does not: a power failure could take the joined files.
                self._followed.make_durable(done, is_own=True)
        return before - len(after.file_uris())

    def vacuumed(self, hours: int) -> int:
        """Remove unnamed files; see :func:`~strandline.tables.maintain.operations.vacuum`."""
        table = self._existing(is_moved=True)
        refuse_links(self._followed.files)  # the library would follow them, and delete what is there
        with self._followed.named_errors():
            # Young files, too: those of another table within this one are the next that would go.
            refuse_other_files(self.url, table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True))
            gone = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        return len(gone)

    def _rebuild(self, table: DeltaTable, beginning: Cursor, upto: Cursor, work: Work, tasks: int) -> None:
        """Replace all rows of a version by those that ``work`` writes, in one commit with start and cursor."""
        log_id = upto.log_id
        self._refresh()
        refuse_lost_transform(self._shape, self.where, is_transformed=is_transformed(table))
        self._followed.next_in(table, log_id)  # Diverged for a table of another log, or of none
        check_shape(table, self._followed.shape, self._followed.url, is_rebuilt=True)
        refuse_append_only(table, self._followed.url, "a rebuild replaces all rows")
        self._followed.known.pop(log_id, None)
        letters = self._opened_letters(table, log_id, is_new=True)
        schema = schema_for(table, self._followed.shape, is_rebuilt=True)
        planned = self._parts(None, table.version() + 1, 0, letters, tasks, schema)
        own = job_name(table.version() + 1, id_of(table))
        parts = tuple(replace(part, old=(), known_letters=None, job=own) for part in planned)
        written = work(parts)
        check_coverage(written, parts, beginning.next, upto.next)
        self._bad_share.check_written(written, upto.next - beginning.next)
        if letters is not None:
            letters.commit(written, id_of(table), beginning, upto)
        now = self._followed.now()
        actions = [added(file, now) for one in written for file in one.added]
        DeltaCommits(self._followed).commit(table, actions, upto, replaces=schema, start=beginning.next)
        self._replace_letters(beginning, upto, written, own)

    def _replayed(self, log_id: UUID) -> Callable[[], AbstractContextManager[ReplayedFiles | None]] | None:
        if self._letters is None:
            return None
        return partial(replayed_delta, self._followed, self._letters, self._shape, log_id)

    def _opened_letters(self, table: DeltaTable | None, log_id: UUID, *, is_new: bool) -> LetterBox | None:
        """``is_new``: the table has applied nothing yet, or is built again."""
        if self._letters is None:
            return None
        address = address_in_letters(self.url) if is_new else None
        return LetterBox.opened(self._letters, log_id, None if table is None else id_of(table), address)

    def _existing(self, *, is_moved: bool = False) -> DeltaTable:
        """``is_moved``: for an operation that moves the handle; another thread may commit on the remembered one."""
        table = self._followed.open_again() if is_moved else self._followed.open()
        if table is None:
            raise NotFound(f"There is no table at {self.url}: check the address, or let a follower make it.")
        return table

    def _parts(
        self,
        table: DeltaTable | None,
        version: int,
        floor: int,
        letters: LetterBox | None,
        tasks: int,
        schema: pa.Schema | None = None,
    ) -> Iterator[TablePart]:
        if schema is None:
            schema = self._shape.schema() if table is None else schema_for(table, self._followed.shape)
        part = TablePart(
            self._shape,
            schema,
            self._followed.files,
            job_name(version, str(CHANCE.uuid())),
            floor,
            dead=None if letters is None else letters.letters_of("").files,
            known_letters=None if letters is None else letters.known(address_in_letters(self.url), floor),
            address=address_in_letters(self.url),
            file_rows=FILE_ROWS,
        )
        if not self._shape.is_keyed:
            yield from [part] * max(1, tasks)
            return
        sizes = [] if table is None else [(path, size) for path, (_, size) in data_files(table).items()]
        for share in shares_of(tasks, sizes):
            yield replace(part, share=share, old=tuple(files_in(share, sizes)))

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the table to the last version that is known to be right; returns the cursor there.

        That is the last commit of this sink whose files still exist and whose cursor the log still ``serves``. A
        table that needs no repair is not changed. Changes of other writers since then are undone, in one commit that
        carries the cursor. ``Diverged`` if there is no such version; None if there is no table.
        """
        table = self._followed.open()
        if table is None:
            return self.resume(log_id)
        self._followed.refuse_another_log(table, log_id)
        present = self._followed.files.present()
        try:
            at = self.resume(log_id)
            _refuse_lost_files(table, present, self.url)
        except (Diverged, CorruptData) as error:
            damage = error
        else:
            return at
        application = self._followed.application(log_id)
        for commit in own_commits(table.version(), self._followed.read_commit, application):
            if (
                commit.cursor is not None
                and serves(commit.cursor)
                and DeltaCommits(self._followed).restored(table, commit.version, commit.cursor, present)
            ):
                self._claims[log_id] = TableClaim(None, commit.cursor.next, str(CHANCE.uuid()))
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
        table = self._followed.open_again()
        if table is None:
            raise NotFound(f"There is no table at {self.url} to adopt.")
        cursor = Cursor(log_id, self._followed.next_in(table, log_id))
        self._followed.known.pop(log_id, None)
        try:
            DeltaCommits(self._followed).accept(table, cursor, start_of(self._followed, table))
        except Conflict as error:
            with contextlib.suppress(Diverged):
                return self.cursor(log_id) or cursor  # another call adopted it
            raise Conflict(
                f"Another job changed {self.url} while it was being adopted; nothing was committed. Check the table "
                "again, and adopt it if it is right."
            ) from error
        return cursor

    def move(self, former: Cursor, to: Cursor) -> None:
        """Follow another log from now on; see :class:`~strandline.tables.maintain.contract.MaintainedTable`."""
        table = self._existing(is_moved=True)
        refuse_moved_on(former, self._followed.last_commit(table, former.log_id).cursor, self.url)
        self._refuse_letters(former)
        start, told = start_of(self._followed, table), told_move(former, to)
        DeltaCommits(self._followed).accept(table, to, start, told=told)
        self._forget(former.log_id)


def _letters_of(url: str, name: str, options: Mapping[str, str], disk: Disk, table_id: str) -> FollowedDelta:
    """The dead-letter table as the table with that id uses it: it has a cursor of its own there."""
    return FollowedDelta(url, DeadLetters(), f"{name}/dead-letters/{table_id}", options, disk)


def _refuse_lost_files(table: DeltaTable, present: AbstractSet[str], url: str) -> None:
    lost = sorted(listed_files(table).keys() - present)
    if lost:
        raise lost_file(lost[0], url)


def _refuse_nested(table: str, letters: str) -> None:
    ours, theirs = (f"{one.removeprefix('file://').rstrip('/')}/" for one in (table, letters))
    if ours.startswith(theirs) or theirs.startswith(ours):
        raise InvalidInput(
            f"The dead letters {letters} are within the table {table}, or the reverse, and a VACUUM would delete them: "
            "choose another path."
        )
