"""Base class of the Delta and Iceberg sinks: the log's codec, the cursor, transformed rows, replay of dead letters."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final, Protocol, Self
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, InvalidInput, StrandlineError, Unsupported
from strandline.log.contract import Log
from strandline.model.arguments import anything, checked
from strandline.model.cursor import Cursor
from strandline.model.sink import TableSink, Written
from strandline.storage.clock import CHANCE
from strandline.tables.apply import apply_records
from strandline.tables.claim import TableClaim
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.maintain.replay import LetterReplay, Replayed, repeated
from strandline.tables.rows.bad_records import BadCount
from strandline.tables.rows.logged import LoggedShape
from strandline.tables.rows.shape import DeadLetters, TableShape
from strandline.values.codecs.arrow import Kept, TableArrow

_MOST_OFFERED: Final = 10_000
_LOGGER: Final = logging.getLogger(__name__)


class Position(Protocol):
    """The last commit of a table's follower."""

    @property
    def cursor(self) -> Cursor:
        """The cursor that it stored."""

    @property
    def holder(self) -> str | None:
        """The follower that holds the table since; None if that is unknown."""


class FollowedTable(Protocol):
    """A table of files as its follower sees it."""

    shape: TableShape | DeadLetters
    known: Any
    """The last commit of this object, or the one from which its follower started, by log."""

    def position(self, log_id: UUID) -> Position | None:
        """The sink's last commit; None if there is no table."""

    def columns(self) -> pa.Schema | None:
        """The columns of the table now; None if there is none."""


@checked
class FileTableSink(ABC):
    """A sink whose table is made of data files. A subclass sets these fields, and has ``begin``."""

    _shape: TableShape
    _logged: LoggedShape
    _followed: FollowedTable
    _bad_count: BadCount

    @property
    def bad_records(self) -> int:
        """How many records this object has set aside as dead letters, in ranges that it committed."""
        return self._bad_count.records

    _claims: dict[UUID, TableClaim[str]]
    """The claim of a follower that uses this object, by log."""
    _offered: dict[bytes, None]
    """Schemas of self-describing values, which bring columns."""
    _kept: Kept
    """Columns as the table stores them."""
    _is_grown: bool = False
    """Whether the shape has a codec that was made for the table."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The table, in messages."""

    def meet(self, log: Annotated[Any, anything("a log")]) -> None:
        """Name the log that the table follows, whose codec decodes the values with ``value="log"``.

        Followers and the functions of ``sl.tables`` call it.
        """
        self._logged.meet(log)
        self._refresh()

    def _refresh(self) -> None:
        """Take over the codec that the log names now, and the columns of self-describing values."""
        if not self._logged.is_logged and not self._shape.is_self_describing and not self._is_grown:
            return
        shape = self._logged.resolved(self._followed.columns)
        self._is_grown = shape.is_self_describing
        if self._is_grown:
            shape = shape.for_table(self._followed.columns(), self._offered, self._kept)
        self._shape = self._followed.shape = shape

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

    def _started(self, found: Position | None) -> TableClaim[str]:
        own = str(CHANCE.uuid())
        return TableClaim(None, None, own) if found is None else TableClaim(found.holder, found.cursor.next, own)

    def _claimed(self, log_id: UUID, found: Position | None) -> TableClaim[str]:
        """The claim on a table whose last commit is ``found``; ``Fenced`` if another follower has taken it over."""
        claim = self._claims.setdefault(log_id, self._started(found))
        if found is not None:
            claim.check(found.holder, found.cursor.next, self.where)
        return claim

    def _forget(self, log_id: UUID) -> None:
        """Forget what this object has committed."""
        self._followed.known.pop(log_id, None)
        self._claims.pop(log_id, None)

    def apply(self: TableSink, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.model.sink.Sink`.

        Commits of other writers that changed no row, such as an OPTIMIZE, are allowed.
        """
        apply_records(self, records, since=since, upto=upto)

    def decoded_schema(self) -> pa.Schema:
        """The columns of decoded changes; see :class:`~strandline.model.sink.TransformableSink`."""
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

    def replay_letters(self, log: Log) -> Replayed:
        """Apply dead letters that can become rows by now: see :func:`strandline.tables.replay_letters`."""
        replay = self._letter_replay(log)
        if isinstance(self._shape.value, TableArrow):  # letters bring columns, as records do
            values = replay.stored().column("value")
            heads = {self._shape.value.offered(one) for chunk in values.chunks for one in chunk.to_pylist()}
            self._offered |= dict.fromkeys(head for head in heads if head is not None)
            replay = self._letter_replay(log)
        return replay.run()

    def stored_letters(self, log: Log) -> pa.Table:
        """The dead letters of what the table holds: see :func:`strandline.tables.letters`."""
        return self._letter_replay(log).stored()

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
        if opened is None:
            return
        with opened() as found:
            offsets = [] if found is None else found.letters().rows.column("offset").to_pylist()
            count = 0 if found is None else sum(found.start <= offset < at.next for offset in offsets)
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

    @abstractmethod
    def _replayed(self, log_id: UUID) -> Callable[[], AbstractContextManager[ReplayedFiles | None]] | None:
        """The table and its letters, for a replay; None if the sink has no place for letters."""
