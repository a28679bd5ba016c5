"""The sink of tables of data files, Delta and Iceberg alike: codec, cursor, transactions, rebuild, repair, letters."""

from __future__ import annotations

import contextlib
import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, CorruptData, Diverged, InvalidInput, StrandlineError, Unsupported
from strandline.log.contract import Log
from strandline.model.arguments import Positive, checked
from strandline.model.cursor import Cursor
from strandline.model.sink import is_applied
from strandline.storage.clock import CHANCE
from strandline.storage.task_pool import TaskPool
from strandline.tables.apply import apply_records
from strandline.tables.claim import TableClaim
from strandline.tables.files.columns import in_schema
from strandline.tables.files.followed import FollowedTable, LettersOf, OwnCommit, TableVersion
from strandline.tables.files.joining import joined_files
from strandline.tables.files.layout import is_closed, job_name, range_of, shares_of
from strandline.tables.files.letters import LetterBox, join_letters
from strandline.tables.files.part import TablePart
from strandline.tables.files.recorded import INFERRED_KEY, LAYOUT_KEY, MODE_KEY, SHAPE_KEY
from strandline.tables.files.replay import ReplayedFiles, replayed_files
from strandline.tables.files.transaction import FileTransaction
from strandline.tables.files.upkeep import TrimCounts, UpkeepDone, to_join
from strandline.tables.files.upkeep_rounds import UpkeepRounds
from strandline.tables.maintain.comparison import RowDifferences, ShareTask, compared_shares, share_tasks
from strandline.tables.maintain.contract import (
    MaintainedTable,
    RecordedTable,
    TableDescription,
    committed_meanwhile,
    no_table,
    refuse_moved_on,
)
from strandline.tables.maintain.rebuilding import written_again
from strandline.tables.maintain.replay import LetterReplay, Replayed, repeated
from strandline.tables.rows.conditions import recorded_condition
from strandline.tables.rows.kinds import KINDS
from strandline.tables.rows.logged import Value
from strandline.tables.rows.partitions import Layout, recorded_layout
from strandline.tables.rows.shape import TableShape
from strandline.tables.work import Rebuild
from strandline.tables.written import Written, check_coverage
from strandline.values.codecs.arrow import Kept, TableArrow

_MOST_OFFERED: Final = 10_000
_TRIES: Final = 8
"""Attempts to see a table's version and its cursor together."""
_LOGGER: Final = logging.getLogger(__name__)


@checked
class FileTableSink(MaintainedTable):
    """A sink whose table is made of data files, whatever the format: the format proves, and commits."""

    def __init__(
        self,
        followed: FollowedTable[Any],
        shape: TableShape,
        value: Value | None,
        kept: Kept,
        letters_of: LettersOf | None,
        max_bad_share: Any,
        *,
        layout: Layout | None,
    ) -> None:
        """``kept``: columns as the table stores them."""
        super().__init__(followed.where, followed.name, shape, value, max_bad_share)
        self._followed = followed
        self._letters = letters_of
        self._claims: dict[UUID, TableClaim[str]] = {}
        """The claim of a follower that uses this object, by log."""
        self._offered: dict[bytes, None] = {}
        """Schemas of self-describing values, which bring columns."""
        self._kept = kept
        self._is_grown = False
        """Whether the shape has a codec that was made for the table."""
        self._upkeep = UpkeepRounds(layout, followed.where)

    @property
    def upkeep(self) -> UpkeepDone:
        """What the upkeep of the table has done since this object was made."""
        return self._upkeep.done

    def _refresh(self) -> None:
        """Take over the codec that the log names now, and the columns of self-describing values."""
        if not self._logged.is_logged and not self._shape.is_self_describing and not self._is_grown:
            return
        shape = self._logged.resolved(self._followed.columns)
        self._is_grown = shape.is_self_describing
        if self._is_grown:
            shape = shape.for_table(self._followed.columns(), self._offered, self._kept)
        self._shape = self._followed.shape = shape

    def _reshape(self, shape: TableShape) -> None:
        super()._reshape(shape)
        self._followed.shape = shape

    def _take_columns(self, written: Sequence[Written]) -> None:
        """``Conflict`` if values bring columns: the range is written again, with those that the table can have."""
        offered = sorted({pair for one in written for pair in one.offered})
        if not offered:
            return
        if len(self._offered) > _MOST_OFFERED:
            self._offered.clear()  # those that the table has taken are its columns by now
        self._offered |= dict.fromkeys(head for _, head in offered)
        raise Conflict(f"Values bring columns to the table {self.where}: it takes those that it can have.")

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log, proved by its history; None if there is no table yet.

        ``Diverged`` if it follows another log, if other writers changed its rows, if it went back to an earlier state,
        or if it is not the table that this object has committed to; also if that was removed.
        """
        self._logged.check_met()
        found = self._followed.position(log_id)
        return None if found is None else found.cursor

    def resume(self, log_id: UUID) -> Cursor | None:
        """The cursor for a starting follower, proved by the table's history alone."""
        before = self._claims.get(log_id)
        self._forget(log_id)
        self._refresh()
        self._logged.check_met()
        found = self._followed.position(log_id)
        self._claims[log_id] = self._started(found).started_again(before)
        if found is None:
            return None
        self._followed.known[log_id] = found
        return found.cursor

    def _started(self, found: OwnCommit | None) -> TableClaim[str]:
        own = str(CHANCE.uuid())
        return TableClaim(None, None, own) if found is None else TableClaim(found.holder, found.cursor.next, own)

    def _claimed(self, log_id: UUID, found: OwnCommit | None) -> TableClaim[str]:
        """The claim on a table whose last commit is ``found``; ``Fenced`` if another follower has taken it over."""
        claim = self._claims.setdefault(log_id, self._started(found))
        if found is not None:
            claim.check(found.holder, found.cursor.next, self.where)
        return claim

    def _forget(self, log_id: UUID) -> None:
        """Forget what this object has committed."""
        self._followed.known.pop(log_id, None)
        self._claims.pop(log_id, None)

    def begin(self, *, since: Cursor, upto: Cursor, tasks: int) -> FileTransaction | None:
        """Prove the table and plan the parts of a range; see :class:`~strandline.tables.apply.TableSink`."""
        with self._followed.looked_at_again(since.log_id):
            self._refresh()
            # One version for the check and the commit: a commit of another writer in between makes this one fail.
            version = self._followed.begin(since)
            claim = self._claimed(since.log_id, version.found)
            if is_applied(since=since, upto=upto, at=version.at):
                if version.at is not None and claim.is_disputed(version.at.next):
                    self._followed.commit(replace(version, holder=claim.own), (), (), version.at)
                    claim.hold(claim.own)
                return None
            self._followed.refuse_lost_transform(version)
            version = replace(self._followed.evolved(version), holder=claim.own)
            letters = self._opened_letters(version, since)
            floor = max(since.next, 0 if version.at is None else version.at.next)
            parts = tuple(replace(one, grows=True) for one in self._parts(version, floor, letters, tasks))
        return FileTransaction(
            *(self._followed, version, since, upto, parts, claim, letters, self._bad_share, self._take_columns),
            upkeep=self._looked_after if self._upkeep.is_wanted else None,
        )

    def _looked_after(self, number: int, at: Cursor, claim: TableClaim[str], table: str, stored: int | None) -> None:
        """Do the upkeep that is due behind a commit of this follower."""
        self._upkeep.after_commit(number, partial(self._join, at, claim), partial(self._trim, at, claim))
        if self._letters is not None and stored is not None:
            told = at.log_id, job_name(number, table), self._followed.address
            self._upkeep.after_letters(stored, partial(join_letters, self._letters(table), *told))

    def _held(self, at: Cursor, claim: TableClaim[str]) -> Any:
        """The newest version if it is still at the cursor of this follower; None if another one has committed."""
        version = self._followed.begin(at)
        found = version.found
        if found is None or found.cursor.next != at.next or found.holder != claim.own:
            return None
        return replace(version, holder=claim.own)

    def _join(self, at: Cursor, claim: TableClaim[str], full: set[str]) -> int:
        """Join small files, if there are enough; returns how many. ``Conflict`` if another job commits meanwhile."""
        version = self._held(at, claim)
        if version is None:
            return 0
        few = to_join(self._followed.sizes(version), self.mode, full, self._followed.file_partitions(version))
        if not few:
            return 0
        added = joined_files(TablePart(self._shape, version.columns, version.readable, version.job), few)
        if 2 * len(added) > len(few):
            full.update((*few, *[file.path for file in added]))  # they would be written again and again
        self._followed.commit(replace(version, keeps_rows=True), added, few, at)
        return len(few)

    def _trim(self, at: Cursor, claim: TableClaim[str], seconds: float) -> TrimCounts:
        """Remove what no version needs that was current in the last seconds."""
        version = self._held(at, claim)
        return TrimCounts() if version is None else self._trimmed(version, at, seconds)

    @abstractmethod
    def _trimmed(self, version: Any, at: Cursor, seconds: float) -> TrimCounts:
        """Trim the history of a table that is proved to be at a cursor, and remove files that it names no more."""

    def _parts(self, version: TableVersion, floor: int, letters: LetterBox | None, tasks: int) -> Iterator[TablePart]:
        part = TablePart(
            self._shape,
            version.columns,
            version.files,
            version.job,
            floor,
            dead=None if letters is None else letters.version.files,
            known_letters=None if letters is None else letters.known(self._followed.address, floor),
            address=self._followed.address,
        )
        if not self._shape.is_keyed:
            yield from [part] * max(1, tasks)
            return
        sizes = self._followed.sizes(version)
        for share in shares_of(tasks, sum(sizes.values())):
            old = (path for path in sizes if not is_closed(path) and range_of(path).overlaps(share))
            yield replace(part, files=version.readable, share=share, old=tuple(old))

    def _opened_letters(self, version: TableVersion, since: Cursor) -> LetterBox | None:
        return None if self._letters is None else LetterBox.opened(self._letters, since, version, self._followed)

    def _existing(self, *, is_moved: bool = False) -> Any:
        """``is_moved``: for an operation that moves the handle; another thread may commit on the remembered one."""
        version = self._followed.open_again() if is_moved else self._followed.open()
        if version is None:
            raise no_table(self.where)
        return version

    def followed_log(self) -> UUID:
        """The log that the table follows; ``NotFound`` if there is no table, ``InvalidInput`` if it follows none."""
        return self._followed.log_of(self._existing())

    def committed_versions(self, log_id: UUID) -> Iterator[tuple[int, int]]:
        """The offset of each commit of its follower, with a version that has its rows; newest first, as far as kept."""
        return self._followed.committed(self._existing(), log_id)

    def start(self) -> int:
        """The offset at which the table began to follow its log; ``NotFound`` if there is no table."""
        return self._followed.start_of(self._existing())

    def size(self) -> TableDescription:
        """Its size and columns; ``NotFound`` if there is no table."""
        version = self._existing()
        columns = tuple((field.name, str(field.type)) for field in version.columns)
        return TableDescription(self.where, self.mode, version.number, *self._followed.size(version), columns)

    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""
        version = self._existing()
        mode = next((kind for kind in KINDS if kind == version.properties.get(MODE_KEY)), None)
        if mode is None:
            return None
        only = recorded_condition(version.properties.get(SHAPE_KEY, "{}"), self.where)
        layout = recorded_layout(version.properties.get(LAYOUT_KEY))
        inferred = version.properties.get(INFERRED_KEY)
        return RecordedTable(mode, version.columns, version.is_transformed, only, layout=layout, inferred=inferred)

    def rows(self) -> pa.Table:
        """All rows of the newest version, read file by file; ``NotFound`` if there is no table."""
        version = self._existing()
        parts = [in_schema(version.readable.read(path), version.columns) for path in self._followed.sizes(version)]
        return pa.concat_tables(parts) if parts else version.columns.empty_table()

    def compared(self, log: Log, pool: TaskPool) -> tuple[Cursor, RowDifferences]:
        """Compare the rows in shares; see :func:`~strandline.tables.maintain.operations.verify`."""
        for _ in range(_TRIES):
            cursor = self.cursor(log.log_id)
            if cursor is None:
                raise no_table(self.where)
            self.meet(log)  # the codec of the last record that the table has, or a newer one
            tasks = self.comparison(cursor.next, pool.count)
            if self.cursor(log.log_id) == cursor:  # otherwise rows and cursor may be of different versions
                return cursor, compared_shares(log, tasks, pool, f"verify {self.where}")
        raise committed_meanwhile(self.where)

    def comparison(self, upto: int, most: Positive) -> list[ShareTask]:
        """The tasks, ``most`` or fewer, that compare the newest version with the log up to an offset."""
        version = self._existing()
        self._followed.refuse_lost_transform(version)
        held, paths = range(self._followed.start_of(version), upto), self._followed.sizes(version)
        return share_tasks(self._shape, version.columns, version.readable, paths, held, most)

    def rebuilt(self, job: Rebuild) -> Cursor:
        """Replace all rows in one commit; see :func:`~strandline.tables.maintain.operations.rebuild`."""
        version = self._existing()  # before the range is planned
        beginning, spans, upto = job.planned(self._followed.start_of(version))
        log_id, start = upto.log_id, beginning.next
        self._refresh()  # the codec of the last record, or a newer one
        self._followed.refuse_lost_transform(version)
        self._followed.check_followed(version, log_id, is_rebuilt=True)
        self._followed.known.pop(log_id, None)
        version = self._followed.evolved(version, is_rebuilt=True)
        letters = self._opened_letters(version, upto.at(start))
        tasks = job.workers.tasks(spans)
        parts = tuple(replace(part, old=(), known_letters=None) for part in self._parts(version, 0, letters, tasks))
        written = written_again(job, parts, spans, range(start, upto.next), self.where)
        check_coverage(written, parts[0].takes, len(parts), start, upto.next)
        self._bad_share.check_written(written, upto.next - start)
        if letters is not None:
            letters.commit(written, version.id, beginning, upto)
        added = [file for one in written for file in one.added]
        self._followed.commit(replace(version, start=start), added, self._followed.sizes(version), upto)
        self._replace_letters(beginning, upto, written, parts[0].job)
        return upto

    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Restore the table to the last version that is known to be right; returns the cursor there.

        That is the last commit of this sink whose files still exist and whose cursor the log still ``serves``. A
        table that needs no repair is not changed. Changes of other writers since then are undone, in one commit that
        carries the cursor. ``Diverged`` if there is no such version; None if there is no table.
        """
        version = self._followed.open()
        if version is None:
            return self.resume(log_id)
        self._followed.refuse_another_log(version, log_id)
        try:
            at = self.resume(log_id)
            if (lost := self._followed.damage(version)) is not None:
                raise lost
        except (Diverged, CorruptData) as error:
            damage = error
        else:
            return at
        if self._followed.restored(version, log_id, serves):
            return self.resume(log_id)
        raise Diverged(
            f"The table {self.where} cannot be repaired: no version of it is left that is known to be right and "
            f"that the log can continue from. Remove it to build it again. ({damage})"
        ) from damage

    def adopt(self, log_id: UUID) -> Cursor:
        """Accept the table as it is now as the state of its cursor: the caller knows that it is right.

        For a table that other writers changed on purpose, or whose history is lost. ``NotFound`` if there is no table,
        ``Conflict`` if another writer changes rows of it at the same time. Several concurrent calls all succeed.
        """
        version = self._existing(is_moved=True)
        cursor = self._followed.cursor_in(version, log_id)
        self._followed.known.pop(log_id, None)
        try:
            self._followed.accept(version, cursor)
        except Conflict as error:
            with contextlib.suppress(Diverged):
                return self.cursor(log_id) or cursor  # another call adopted it
            raise Conflict(
                f"Another job changed {self.where} while it was being adopted; nothing was committed. Check the table "
                "again, and adopt it if it is right."
            ) from error
        return cursor

    def move(self, former: Cursor, to: Cursor) -> None:
        """Follow another log from now on; see :class:`~strandline.tables.maintain.contract.MaintainedTable`."""
        version = self._existing(is_moved=True)
        refuse_moved_on(former, self._followed.last_commit(version, former.log_id).cursor, self.where)
        self._refuse_letters(former)
        told = f"follows log {to.log_id} instead of {former.log_id}, from offset {to.next} on"
        self._followed.accept(version, to, told)
        self._forget(former.log_id)

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range exactly once, also beside commits that change no row; see ``strandline.model.sink``."""
        apply_records(self, records, since=since, upto=upto)

    def decoded_schema(self) -> pa.Schema:
        """The columns of decoded changes. ``InvalidInput`` if the sink has a transform of its own."""
        return self._decoding().decoded_schema()

    def _decoding(self) -> TableShape:
        """The shape with the log's codec, whatever columns a transform gives the table."""
        return self._logged.resolved(lambda: None)

    def with_rows(self, rows: pa.Schema) -> Self:
        """The same table, for workers that are given transformed rows with these columns."""
        twin = copy.copy(self)
        twin._shape = self._decoding().transformed_elsewhere(rows)  # noqa: SLF001 - a copy of this object
        twin._logged = self._logged.frozen(twin._shape)  # noqa: SLF001 - a copy of this object
        twin._followed = copy.copy(self._followed)  # noqa: SLF001 - a copy of this object
        twin._followed.shape = twin._shape  # noqa: SLF001 - a copy of this object
        return twin

    def replay_letters(self, log: Log, *, dry_run: bool = False) -> Replayed:
        """Apply dead letters that can become rows by now: see :func:`strandline.tables.replay_letters`."""
        replay = self._letter_replay(log)
        if isinstance(self._shape.value, TableArrow):  # letters bring columns, as records do
            values = replay.stored().column("value")
            heads = {self._shape.value.offered(one) for chunk in values.chunks for one in chunk.to_pylist()}
            self._offered |= dict.fromkeys(head for head in heads if head is not None)
            replay = self._letter_replay(log)
        return replay.run(dry_run=dry_run)

    def _letter_replay(self, log: Log) -> LetterReplay:
        self.meet(log)
        opened = self._replayed(log.log_id)
        if opened is None:
            raise InvalidInput(f"The sink of {self.where} has no dead letters: name their table.")
        shape = self._shape.for_letters()
        return LetterReplay(self.where, opened, shape, shape.rows, log)

    def _refuse_letters(self, at: Cursor) -> None:
        """``Unsupported`` if the table has dead letters: their own table knows the log that they are of."""
        opened = self._replayed(at.log_id)
        found = None if opened is None else opened()
        if found is None:
            return
        count = sum(found.start <= offset < at.next for offset in found.letters()[0].column("offset").to_pylist())
        if count:
            raise Unsupported(
                f"The table {self.where} has dead letters of log {at.log_id} ({count}), and could not replay them from "
                "another one; nothing was changed. Replay them first, with a corrected schema, or build the table "
                "again from the other log."
            )

    def _replace_letters(self, beginning: Cursor, upto: Cursor, written: Sequence[Written], job: str) -> None:
        """Remove the letters that a rebuild has replaced. If that fails, a replay removes those of rows."""
        opened = self._replayed(upto.log_id)
        if opened is None:
            return
        held = range(beginning.next, upto.next)
        names = {file.path.rpartition("/")[2] for one in written for file in one.bad}
        try:
            repeated(self.where, opened, lambda table: table.replace_letters(held, names, job), None)
        except StrandlineError as error:
            _LOGGER.warning("Dead letters of %s stay, though a rebuild has replaced them: %s", self.where, error)

    def _replayed(self, log_id: UUID) -> Callable[[], ReplayedFiles | None] | None:
        """The table and its letters, for a replay; None if the sink has no place for letters."""
        if self._letters is None:
            return None
        return partial(replayed_files, self._followed, self._letters, self._shape, log_id)
