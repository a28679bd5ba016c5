"""Dead letters of an Iceberg table for a replay: both tables as they are now, and their commits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from strandline.errors import NotFound
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.tables.files.layout import job_name
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.iceberg.commits import IcebergCommits
from strandline.tables.iceberg.files import IcebergFiles
from strandline.tables.iceberg.history import start_in
from strandline.tables.iceberg.table import Begun, FollowedIceberg
from strandline.tables.rows.shape import TableShape


@dataclass(frozen=True, slots=True)
class IcebergState:
    """One state of an Iceberg table; see :class:`~strandline.tables.files.replay.FileTable`."""

    followed: FollowedIceberg
    begun: Begun
    at: Cursor

    @property
    def files(self) -> IcebergFiles:
        """Its data files."""
        return self.begun.files

    def columns(self) -> pa.Schema:
        """Its columns after the commit."""
        return self.begun.columns

    def sizes(self) -> Mapping[str, int]:
        """Its data files: path and bytes."""
        return {path: file.file_size_in_bytes for path, file in self.followed.data_files(self.begun).items()}

    def evolved(self) -> IcebergState:
        """The same: new columns are part of the commit."""
        return self

    def commit(self, added: Sequence[DataFile], removed: Sequence[str]) -> None:
        """Replace files, at the same cursor."""
        IcebergCommits(self.followed).commit(self.begun, added, removed, self.at)


@contextlib.contextmanager
def replayed_iceberg(
    followed: FollowedIceberg, letters: FollowedIceberg, shape: TableShape, log_id: UUID
) -> Iterator[ReplayedFiles | None]:
    """The table and its letters; None if there are none.

    ``NotFound`` without a table, ``Diverged`` if it is not the one of the log, or the letters are of another table.
    """
    nowhere = Cursor(log_id, 0)
    box = None if letters.open() is None else letters.begin(nowhere)  # before the table: see ReplayedFiles
    table = followed.open()
    if table is None:
        raise NotFound(f"There is no table {followed.identifier}.")
    begun = followed.begin(nowhere)
    if box is None:
        yield None
        return
    if begun.at is None or box.at is None:
        raise NotFound(f"The table {followed.identifier}, or its dead letters, were dropped meanwhile.")
    yield ReplayedFiles(
        shape,
        IcebergState(followed, begun, begun.at),
        IcebergState(letters, box, box.at),
        followed.identifier,
        start_in(table.metadata),
        begun.at,
        job_name(max(0, table.metadata.next_sequence_number() - 1), str(table.metadata.table_uuid)),
    )
