"""Dead letters of a Delta table for a replay: both tables as they are now, and their commits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa

from strandline.errors import Diverged, InvalidInput, NotFound
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import DeltaFiles, added, removed
from strandline.tables.delta.handles import columns_of, data_files, id_of
from strandline.tables.delta.letters import LettersOf, address_in_letters, check_letters, logs_of
from strandline.tables.delta.recorded_shape import is_transformed, refuse_append_only
from strandline.tables.delta.start import start_of
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.layout import job_name
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.rows.shape import TableShape, refuse_lost_transform

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(frozen=True, slots=True)
class DeltaVersion:
    """One version of a Delta table; see :class:`~strandline.tables.files.replay.FileTable`."""

    followed: FollowedDelta
    table: DeltaTable
    at: Cursor
    holder: str | None = None
    """The follower that holds the table, and goes on doing so."""

    @property
    def files(self) -> DeltaFiles:
        """Its data files."""
        return self.followed.files

    def columns(self) -> pa.Schema:
        """Its columns."""
        return columns_of(self.table)

    def sizes(self) -> Mapping[str, int]:
        """Its data files: path and bytes."""
        return {path: size for path, (_, size) in data_files(self.table).items()}

    def evolved(self) -> DeltaVersion:
        """The version with the columns that its values need now, which is a commit of its own."""
        table = DeltaCommits(self.followed, self.holder).evolved(self.table, self.at)
        return DeltaVersion(self.followed, table, self.at, self.holder)

    def commit(self, adds: Sequence[DataFile], gone: Sequence[str]) -> None:
        """Replace files, at the same cursor."""
        now, known = self.followed.now(), data_files(self.table)
        actions = [*[added(file, now) for file in adds], *[removed(*known[path], now) for path in gone]]
        DeltaCommits(self.followed, self.holder).commit(self.table, actions, self.at)


@contextlib.contextmanager
def replayed_delta(
    followed: FollowedDelta, letters_of: LettersOf, shape: TableShape, log_id: UUID
) -> Iterator[ReplayedFiles | None]:
    """The table and its letters; None if there are none.

    ``NotFound`` without a table, ``Diverged`` if it is not the one of the log, ``InvalidInput`` if the letters are of
    several logs.
    """
    box = letters_of("").open()  # before the table: see ReplayedFiles
    table = followed.open()
    if table is None:
        raise NotFound(f"There is no table at {followed.url}: check the address.")
    refuse_lost_transform(shape, followed.url, is_transformed=is_transformed(table))
    found = followed.last_commit(table, log_id)
    at = found.cursor
    letters = letters_of(id_of(table))
    if box is None:
        yield None
        return
    check_letters(letters, box)
    refuse_append_only(box, letters.url, "a replay removes letters")
    _check_logs(letters, box, log_id)
    try:
        known = letters.next_in(box, log_id)
    except Diverged:  # these letters are of an earlier table at this place
        known = at.next
    yield ReplayedFiles(
        shape,
        DeltaVersion(followed, table, at, found.holder),
        DeltaVersion(letters, box, Cursor(log_id, known)),
        address_in_letters(followed.url),
        start_of(followed, table),
        at,
        job_name(table.version(), id_of(table)),
    )


def _check_logs(letters: FollowedDelta, box: DeltaTable, log_id: UUID) -> None:
    """Letters carry offsets, and no log: they can be replayed only if all are of one log."""
    others = logs_of(letters, box) - {str(log_id)}
    if others:
        raise InvalidInput(
            f"The dead letters {letters.url} are of several logs, or of another one ({min(others)}): "
            "letters can be replayed if each log has a dead-letter table of its own."
        )
