"""A table of files as its follower sees it: what a format proves and commits, and the checks that all formats share."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, Diverged, Fenced, NotFound, StorageError
from strandline.model.cursor import Cursor
from strandline.storage.env import Env
from strandline.tables.files.data_files import TableFiles
from strandline.tables.files.layout import job_name
from strandline.tables.files.recorded import TRANSFORM_KEY, check_recorded_files
from strandline.tables.rows.partitions import PartitionValues
from strandline.tables.rows.shape import TableShape, refuse_lost_transform
from strandline.tables.written import DataFile

MOST_BETWEEN: Final = 1000
"""Commits of others beside which files are joined at most: their names say when they can be committed no more."""
REMEDY: Final = (
    "Remove the table to build it again, or repair it ('strandline table repair'), which restores the last version "
    "that is known to be right and continues from its cursor; if you know that the table is right as it is, let its "
    "sink adopt it."
)
"""What to do with a table that other writers changed."""


@dataclass(frozen=True, slots=True)
class OwnCommit:
    """A follower's last commit: to which table, as which version (or snapshot) of it, and the cursor there."""

    table_id: str
    version: int
    cursor: Cursor
    holder: str | None = None
    """The follower that holds the table since; None if that is unknown."""


@dataclass(frozen=True, kw_only=True)
class TableVersion(ABC):
    """One version of a table. Of a table that is not there yet: what its first commit creates."""

    id: str
    """The table's own id; empty if it gets one when it is created."""
    number: int
    """The number of the table's newest commit; the next one is one higher."""
    properties: Mapping[str, str]
    """What the table records of itself."""
    is_new: bool = False
    """Whether there is no table yet."""
    found: OwnCommit | None = None
    """The follower's last commit, proved to be still in effect; None if it was not looked up, or there is none."""
    holder: str | None = None
    """The follower that holds the table from the next commit on; None: the one that held it before."""
    keeps_rows: bool = False
    """Whether the next commit only replaces files by others with the same rows."""
    start: int | None = None
    """If the next commit replaces all rows: the offset at which they begin then."""

    @property
    def held_by(self) -> str | None:
        """The follower that the next commit names."""
        return self.holder if self.holder is not None or self.found is None else self.found.holder

    @property
    def at(self) -> Cursor | None:
        """The proved cursor."""
        return None if self.found is None else self.found.cursor

    @property
    @abstractmethod
    def columns(self) -> pa.Schema:
        """The columns, as a commit on this version leaves them."""

    @property
    @abstractmethod
    def files(self) -> TableFiles:
        """Writes and reads data files of these columns."""

    @property
    def readable(self) -> TableFiles:
        """Likewise, and reads files of other writers, too, which may lack the columns of their partition."""
        return self.files

    @property
    def job(self) -> str:
        """The name of a job that makes the next commit: part of the names of its files."""
        return job_name(self.number + 1, self.id)

    @property
    def joining_job(self) -> str:
        """The name of a job that joins files, and may commit them behind some other commits."""
        return job_name(self.number + MOST_BETWEEN, self.id)

    @property
    def is_transformed(self) -> bool:
        """Whether the rows come from a transform."""
        return TRANSFORM_KEY in self.properties


V = TypeVar("V", bound=TableVersion)


class FollowedTable(ABC, Generic[V]):
    """One table in its format: proof of a version, and one commit on exactly that, or ``Conflict`` if one was first."""

    def __init__(self, where: str, address: str, shape: TableShape, name: str, env: Env) -> None:
        self.where = where
        """The table, in messages."""
        self.address = address
        """The table, as its dead letters name it."""
        self.shape = shape
        self.name = name
        self.env = env
        self.known: dict[UUID, OwnCommit] = {}
        """The last commit of this object, or the one from which its follower started, by log."""

    @abstractmethod
    def open(self) -> V | None:
        """The newest version; None if there is no table."""

    def open_again(self) -> V | None:
        """The newest version on a handle of the caller's own, which it may move."""
        return self.open()

    @abstractmethod
    def new(self, since: Cursor) -> V:
        """The version that the first commit of a table creates, whose rows begin at a cursor."""

    @abstractmethod
    def check_followed(self, version: V, log_id: UUID, *, is_rebuilt: bool = False) -> None:
        """``Diverged`` unless it follows the log; ``InvalidInput`` for another kind. ``is_rebuilt``: rows are new."""

    @abstractmethod
    def refuse_another_log(self, version: V, log_id: UUID) -> None:
        """``Diverged`` for a table that follows another log now."""

    @abstractmethod
    def proof(self, version: V, log_id: UUID, known: OwnCommit | None) -> OwnCommit:
        """The sink's last commit by the table's history, or the ``known`` one; ``Diverged`` if rows changed since."""

    def is_older(self, found: OwnCommit, known: OwnCommit) -> bool:
        """Whether a commit is of an earlier state of its table than the known one."""
        return found.cursor.next < known.cursor.next

    @abstractmethod
    def log_of(self, version: V) -> UUID:
        """The log that it follows; ``InvalidInput`` if it follows none."""

    @abstractmethod
    def committed(self, version: V, log_id: UUID) -> Iterator[tuple[int, int]]:
        """The offset of each own commit up to a version, with the number of a version that has its rows; newest first.

        As far as they are kept.
        """

    @abstractmethod
    def make_durable(self, version: V, number: int, *, is_own: bool = False) -> None:
        """Sync a commit on a local disk: libraries do not. ``is_own``: its files also get the rights of ours."""

    @abstractmethod
    def cursor_in(self, version: V, log_id: UUID) -> Cursor:
        """The cursor that a table has stored for a log, whether or not it still holds that."""

    @abstractmethod
    def start_of(self, version: V) -> int:
        """The offset at which the rows of a version begin: that of its last rebuild, else of its first follower."""

    def first_start(self, version: V) -> int:
        """The offset at which the table's first follower began, if letters of several tables may be in one place."""
        return self.start_of(version)

    @abstractmethod
    def sizes(self, version: V) -> dict[str, int]:
        """The data files of a version: path and bytes. ``InvalidInput`` if rows were deleted without a new file."""

    def file_partitions(self, version: V) -> Mapping[str, PartitionValues]:
        """The partition of each data file of a partitioned table, by its path: equal for files of one partition."""
        return {}

    @abstractmethod
    def size(self, version: V) -> tuple[int, int, int]:
        """Rows, files and bytes of a version."""

    @abstractmethod
    def damage(self, version: V) -> CorruptData | None:
        """The error for a lost file of a version, or one elsewhere; None if all are there."""

    @abstractmethod
    def evolved(self, version: V, *, is_rebuilt: bool = False) -> V:
        """The version with the columns that values need now, or ``SchemaRefused``. ``is_rebuilt``: all rows are new."""

    def created(self, version: V) -> V:
        """The version, whose table exists if this format has to create it before the first commit."""
        return version

    @abstractmethod
    def commit(self, version: V, added: Sequence[DataFile], removed: Collection[str], upto: Cursor) -> None:
        """Commit files and cursor in one step; ``Conflict`` if another commit was first."""

    @abstractmethod
    def accept(self, version: V, at: Cursor, told: str = "") -> None:
        """Commit that the table as it is has the state of a cursor, with a word for its history; or ``Conflict``."""

    @abstractmethod
    def restored(self, version: V, log_id: UUID, serves: Callable[[Cursor], bool]) -> bool:
        """Restore the last version of the sink whose files are there and whose cursor the log ``serves``, if any."""

    def remove_uncommitted(self, job: str) -> None:
        """Remove the files of a job whose table was never created, if nothing can refer to them."""

    @abstractmethod
    def letters_upto(self, version: V, log_id: UUID) -> Cursor | None:
        """The cursor among the letters; None if there is none. ``InvalidInput`` for a table without letters."""

    @abstractmethod
    def logs(self, version: V) -> set[str]:
        """The logs whose letters were ever stored, as far as the history reaches."""

    def check_removal(self, version: V) -> None:
        """``InvalidInput`` if files of the dead-letter table may not be removed."""

    def columns(self) -> pa.Schema | None:
        """The columns of the table now; None if there is none."""
        version = self.open()
        return None if version is None else version.columns

    def begin(self, since: Cursor) -> V:
        """The newest version with its proved commit; one that creates the table at ``since`` if there is none."""
        version = self.open()
        if version is None:
            self.refuse_removed(self.known.get(since.log_id))
            return self.new(since)
        return replace(version, found=self.last_commit(version, since.log_id))

    def position(self, log_id: UUID) -> OwnCommit | None:
        """The sink's last commit; None if there is no table. Safe beside a commit of another thread."""
        known = self.known.get(log_id)  # before the table is opened: what is committed meanwhile is newer
        with self.looked_at_again(log_id):
            version = self.open()
            if version is None:
                self.refuse_removed(known)
                return None
            return self._proved(version, log_id, known)

    def last_commit(self, version: V, log_id: UUID) -> OwnCommit:
        """The sink's last commit in a version, which is still in effect."""
        return self._proved(version, log_id, self.known.get(log_id))

    def _proved(self, version: V, log_id: UUID, known: OwnCommit | None) -> OwnCommit:
        self.check_followed(version, log_id)
        return self._in_effect(version, log_id, known)

    def commit_in_effect(self, version: V, log_id: UUID) -> OwnCommit:
        """The sink's last commit in a version, for a job that reads no values, so that the codec may be another."""
        check_recorded_files(version.properties, self.shape, self.where)
        return self._in_effect(version, log_id, self.known.get(log_id))

    def _in_effect(self, version: V, log_id: UUID, known: OwnCommit | None) -> OwnCommit:
        found = self.proof(version, log_id, known)
        if known is not None and found.table_id != known.table_id:
            raise self.replaced()
        if known is not None and self.is_older(found, known):
            raise Diverged(
                f"The last commit in the table {self.where} is at offset {found.cursor.next}, and its follower had "
                f"committed {known.cursor.next}: an older copy was put in its place. Start the follower again to "
                "continue from that copy."
            )
        if found != known:
            # An earlier process may have died between its commit and its sync, and a slot will follow this cursor.
            with contextlib.suppress(NotFound):  # only a checkpoint is left of it, which is older than any sync
                self.make_durable(version, found.version)
        return found

    def refuse_lost_transform(self, version: V) -> None:
        """``InvalidInput`` if the rows come from a transform, and the sink has none."""
        refuse_lost_transform(self.shape, self.where, is_transformed=version.is_transformed)

    def replaced(self) -> Diverged:
        """The error for another table at the place of the one that is followed."""
        return Diverged(f"The table {self.where} was replaced by another one while it was followed. {REMEDY}")

    def not_followed(self, log_id: UUID, found: str | None) -> Diverged:
        """The error for a table that does not follow a log; ``found``: the log that it follows."""
        return Diverged(
            f"The table {self.where} does not follow log {log_id} as {self.name!r}, but "
            + (f"log {found}" if found else "no log at all")
            + ": give this log a table of its own, or remove that one to build it again."
        )

    def refuse_removed(self, known: OwnCommit | None) -> None:
        """``Diverged`` for a table that is gone: a starting follower creates it again, a running one never does."""
        if known is not None:
            raise Diverged(
                f"The table {self.where} was removed while it was followed, up to offset {known.cursor.next}: put it "
                "back, or start the follower again, which builds the table from the log's beginning."
            )

    def refuse_lost(self, log_id: UUID) -> None:
        """``Diverged`` if the table was removed or replaced since its follower started."""
        version, known = self.open_again(), self.known.get(log_id)
        if version is None:
            self.refuse_removed(known)
        elif known is not None and version.id != known.table_id:
            raise self.replaced()

    @contextlib.contextmanager
    def looked_at_again(self, log_id: UUID) -> Iterator[None]:
        """``Diverged`` instead of another error of the store, if the table was removed or replaced meanwhile."""
        try:
            yield
        except (StorageError, CorruptData):
            with contextlib.suppress(StorageError, CorruptData):
                self.refuse_lost(log_id)
            raise

    def refuse_another_follower(self, log_id: UUID, at: Cursor | None) -> None:
        """``Fenced`` if the cursor moved since it was seen at ``at``: another follower committed."""
        version = self.open()
        if version is None:
            self.refuse_removed(self.known.get(log_id))
        if at is None and log_id in self.known:
            at = self.known[log_id].cursor  # this sink created the table
        if (None if version is None else self.last_commit(version, log_id).cursor) != at:
            raise Fenced(
                f"Another follower changed {self.where} at the same time; this one committed nothing and must stop. "
                "Keep one follower per table."
            )


LettersOf: TypeAlias = Callable[[str], FollowedTable[Any]]
"""The dead-letter table as the table with that id uses it."""
