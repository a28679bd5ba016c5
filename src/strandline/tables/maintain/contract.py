"""The contract of a table that can be maintained: what each kind of sink has for the functions of ``sl.tables``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, InvalidInput, NotFound
from strandline.log.contract import Log
from strandline.model.arguments import Prose, checked
from strandline.model.cursor import Cursor
from strandline.model.sink import Sink
from strandline.storage.task_pool import TaskPool
from strandline.tables.maintain.comparison import RowDifferences
from strandline.tables.maintain.replay import LetterReplay, Replayed
from strandline.tables.rows.bad_records import BadShare
from strandline.tables.rows.conditions import RowCondition, Taken
from strandline.tables.rows.kinds import RAW, TYPED, Kind, Mode
from strandline.tables.rows.logged import LoggedShape, Value, is_raw
from strandline.tables.rows.partitions import Layout
from strandline.tables.rows.shape import TableShape
from strandline.tables.work import Rebuild


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table as it is now."""

    url: str
    kind: Kind
    version: int
    rows: int
    files: int
    """SQL databases count none."""
    bytes: int
    columns: tuple[tuple[str, str], ...]
    """Name and type of each."""
    cursor: Cursor | None = None
    """The follower's cursor, proved by the table's history; None if it has none for the given log."""
    start: int | None = None
    """The offset at which its rows begin: of its first follower, or of its last rebuild. None without a log."""


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """Mode and columns, as the table records them."""

    mode: Kind
    columns: pa.Schema
    is_transformed: bool = False
    """Whether its rows come from a transform."""
    only: RowCondition | None = None
    """Which records of the log it takes; None: all of them."""
    has_letters: bool = False
    """Whether its database has a table of its dead letters; tables of files do not record where theirs are."""
    layout: Layout | None = None
    """How its files are laid out for queries, apart from their keys."""
    inferred: str | None = None
    """The JSON Schema of its values, if that was inferred when the table was made."""

    @property
    def opened_as(self) -> Mode:
        """The mode of its sink: whether deleted rows are marked is seen by the columns."""
        names = RAW if is_raw(self.columns) else TYPED
        return "marked" if self.mode == "latest" and names.deleted in self.columns.names else self.mode


class MaintainedTable(Sink, ABC):
    """A table sink that can be described, verified, rebuilt, repaired and optimized."""

    _lock: AbstractContextManager[Any] = nullcontext()
    """Held while the table is read or written, if calls may not run beside each other."""

    def __init__(self, where: str, name: str, shape: TableShape, value: Value | None, max_bad_share: Any) -> None:
        """``shape`` has the codec, unless ``value`` is ``"log"``."""
        self.where = where
        """The table, in messages."""
        self.mode: Kind = shape.kind
        """The kind of the table."""
        self._name = name
        self._shape = shape
        self._logged = LoggedShape(shape, value, where)
        self._bad_share = BadShare.of(max_bad_share)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r}, mode={self.mode!r}, name={self._name!r})"

    @property
    def bad_records(self) -> int:
        """How many records this object has set aside as dead letters, in ranges that it committed."""
        return self._bad_share.found

    def meet(self, log: Any) -> None:
        """Name the log, whose codec is that of ``value="log"``. Followers and functions of ``sl.tables`` do."""
        self._logged.meet(log)
        with self._lock:
            self._refresh()

    @property
    def takes(self) -> Taken | None:
        """Which records of the log the table takes; None: all of them."""
        return self._shape.only

    @checked
    def taking(self, only: Taken) -> Self:
        """The sink, whose table takes only some records of a log: ``sink.taking(sl.tables.where(field=…, equals=…))``.

        The table records the condition, and is not continued with another one. Whatever reads the log for the table,
        such as a rebuild or a verification, selects its records by it.
        """
        if self._shape.only is not None:
            raise InvalidInput(f"The sink of {self.where} takes records already of which {self._shape.only}.")
        return self._with(only=only)

    @checked
    def with_inferred(self, schema: Prose) -> Self:
        """The sink, whose table records when it is created that the JSON Schema of its values was inferred.

        The schema is in :attr:`RecordedTable.inferred` then, and its ``description`` is that of the table, where tables
        have one. A table that is there stays as it is.
        """
        return self._with(inferred=schema)

    def _with(self, **changes: Any) -> Self:
        """Change fields of the shape, before the table is followed."""
        self._logged.reshaped(**changes)
        self._reshape(replace(self._shape, **changes))
        return self

    def _reshape(self, shape: TableShape) -> None:
        """Take another shape, before the table is followed."""
        self._shape = shape

    @abstractmethod
    def _refresh(self) -> None:
        """Take over the codec that the log names now."""

    @abstractmethod
    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log; None if there is no table."""

    def followed_log(self) -> UUID:
        """The log that the table follows; ``NotFound`` if there is no table, ``InvalidInput`` if it follows none."""
        raise InvalidInput(f"The database keeps no earlier versions of the table {self.where}: no cut has them.")

    @checked
    def committed_versions(self, log_id: UUID) -> Iterator[tuple[int, int]]:
        """The offset of each commit of its follower, with a version that has its rows; newest first, as far as kept."""
        return iter(())

    @abstractmethod
    def start(self) -> int:
        """The offset at which the table began; ``NotFound`` if there is no table."""

    @abstractmethod
    def size(self) -> TableDescription:
        """Its size and columns; ``NotFound`` if there is no table."""

    @abstractmethod
    def recorded(self) -> RecordedTable | None:
        """What the table records; None for a table of another program. ``NotFound`` if there is none."""

    @abstractmethod
    def compared(self, log: Log, pool: TaskPool) -> tuple[Cursor, RowDifferences]:
        """Compare the rows with the log up to the cursor, which is returned; ``Conflict`` beside steady commits."""

    @abstractmethod
    def rebuilt(self, job: Rebuild) -> Cursor:
        """Replace all rows by those of the log in one commit, which also records the start; returns the cursor."""

    @abstractmethod
    def optimized(self) -> int:
        """Join small files; returns by how many the table has fewer. ``InvalidInput`` if the format needs none."""

    @abstractmethod
    def vacuumed(self, hours: int) -> int:
        """Remove what no version of the last hours needs. ``InvalidInput`` if the format keeps none."""

    @checked
    def replay_letters(self, log: Log, *, dry_run: bool = False) -> Replayed:
        """Apply dead letters that can become rows by now, and remove them; ``dry_run`` only says how many those are."""
        replay = self._letter_replay(log)
        with self._lock:
            return replay.run(dry_run=dry_run)

    def stored_letters(self, log: Log) -> pa.Table:
        """The dead letters of the offsets that the table holds."""
        replay = self._letter_replay(log)
        with self._lock:
            return replay.stored()

    @abstractmethod
    def _letter_replay(self, log: Log) -> LetterReplay:
        """The replay of its letters; ``InvalidInput`` if the sink has no place for them."""

    @abstractmethod
    def repair(self, log_id: UUID, serves: Callable[[Cursor], bool]) -> Cursor | None:
        """Go back to the last state that is known to be right, if needed."""

    @abstractmethod
    def move(self, former: Cursor, to: Cursor) -> None:
        """Follow the log of the cursor ``to`` from now on, in one commit that changes no row.

        The caller vouches that both logs have the same records at the offsets that the table holds. The table is proved
        to be at ``former``: ``Conflict`` if it was committed to since, ``Diverged`` if it follows another log.
        Followers of the former log are ``Diverged`` from then on. ``Unsupported`` if there are dead letters that would
        be lost with that log.
        """


def refuse_moved_on(former: Cursor, now: Cursor, where: str) -> None:
    """``Conflict`` if a table that is to follow another log was committed to since its cursor was translated."""
    if now.next != former.next:
        raise Conflict(
            f"The table {where} was committed to, up to offset {now.next}, while it was being moved to another log; "
            "nothing was changed. Stop its follower, and try again."
        )


def no_table(where: str) -> NotFound:
    """The error for a table that is not there."""
    return NotFound(f"There is no table {where}: check the address, or let a follower make it.")


def committed_meanwhile(where: str) -> Conflict:
    """The error for a comparison beside which a follower commits."""
    return Conflict(f"The table {where} was committed to while it was compared: stop its follower, or try again.")
