"""Replay of dead letters into a table of files: the table is committed first, then the letters are removed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.files.columns import in_schema
from strandline.tables.files.followed import FollowedTable, LettersOf, TableVersion
from strandline.tables.files.layout import WHOLE, is_for_later, job_name
from strandline.tables.files.letters import IsDone, is_of, stored_letters, take_out
from strandline.tables.files.part import TablePart
from strandline.tables.maintain.contract import no_table
from strandline.tables.maintain.replay import LetterChanges, pairs_of
from strandline.tables.rows.shape import LETTER_SCHEMA, TableShape


@dataclass(slots=True)
class ReplayedFiles:
    """See :class:`~strandline.tables.maintain.replay.ReplayedTable`.

    The letters were opened before the table. So a job that relies on letters, and commits to both, is seen in the
    table, or makes the removal of letters a ``Conflict``.
    """

    shape: TableShape
    table: FollowedTable[Any]
    version: TableVersion
    box: FollowedTable[Any]
    """The dead-letter table."""
    letters_now: TableVersion
    letters_upto: Cursor
    start: int
    cursor: Cursor

    @property
    def job(self) -> str:
        """The last commit of the table, as the names of its files have it."""
        return job_name(self.version.number, self.version.id)

    def columns(self) -> pa.Schema:
        """The columns of the table."""
        return self.version.columns

    def letters(self) -> tuple[pa.Table, int]:
        """The letters that name the table, apart from those of a rebuild that has not committed its rows yet."""
        files = [stored_letters(self.letters_now.files, path, self.letters_now.columns) for path in self._stored()]
        found = pa.concat_tables([LETTER_SCHEMA.empty_table(), *[one.cast(LETTER_SCHEMA) for one in files]])
        mine = found.filter(is_of(found, self.table.address))
        return mine, found.num_rows - mine.num_rows

    def _stored(self) -> list[str]:
        return [path for path in self.box.sizes(self.letters_now) if not is_for_later(path, self.job)]

    def pairs(self, offset: str, key: str | None, since: int) -> Iterator[pa.Table]:
        """Offset and key of the rows, file by file."""
        for path in self.table.sizes(self.version):
            found = pairs_of(in_schema(self.version.readable.read(path), self.version.columns), offset, key)
            yield found.filter(pc.greater_equal(found.column("offset"), since))

    def apply(self, changes: LetterChanges | None, done: pa.Array) -> None:
        """Commit the changes, then remove the letters."""
        if changes is not None:
            self._commit(changes, self.table.evolved(self.version))
        self._remove(done)

    def _commit(self, changes: LetterChanges, version: TableVersion) -> None:
        part = TablePart(self.shape, version.columns, version.files, str(CHANCE.uuid()))
        if not self.shape.is_keyed:
            added, removed = part.appended([changes.rows]), list[str]()
        else:
            rewind = changes.rewind if self.shape.kind == "history" else None
            part = replace(part, share=WHOLE, old=tuple(self.table.sizes(version)), rewind=rewind)
            added, removed = part.merged([changes.rows])
        if added or removed:
            self.table.commit(version, added, removed, self.cursor)

    def _remove(self, done: pa.Array) -> None:
        """Remove the table's letters of these offsets, and no other table's."""
        self._take_out(self._stored(), lambda letters: pc.is_in(letters.column("offset"), value_set=done))

    def replace_letters(self, held: range, written: Collection[str], job: str) -> None:
        """Remove the letters of these offsets that are older than those which a rebuild, ``job``, has ``written``.

        Those of a later rebuild stay: it may have another codec, by which these records have no rows. Likewise all
        of them, if the table was committed to since: a follower may rely on them, for a replay to remove.
        """
        if self.job != job:
            return

        def is_replaced(letters: pa.Table) -> pa.ChunkedArray:
            offsets = letters.column("offset")
            return pc.and_(pc.greater_equal(offsets, held.start), pc.less(offsets, held.stop))

        self._take_out([path for path in self._stored() if path.rpartition("/")[2] not in written], is_replaced)

    def _take_out(self, paths: list[str], is_done: IsDone) -> None:
        take_out(self.box, self.letters_now, paths, self.table.address, self.letters_upto, is_done)


def replayed_files(
    followed: FollowedTable[Any], letters_of: LettersOf, shape: TableShape, log_id: UUID
) -> ReplayedFiles | None:
    """None without letters; ``NotFound`` without a table, ``Diverged`` or ``InvalidInput`` for those of other logs."""
    stored = letters_of("").open()  # before the table: see ReplayedFiles
    version = followed.open()
    if version is None:
        raise no_table(followed.where)
    followed.refuse_lost_transform(version)
    version = replace(version, found=followed.last_commit(version, log_id))
    if stored is None or version.at is None:
        return None
    box = letters_of(version.id)
    upto = box.letters_upto(stored, log_id)
    box.check_removal(stored)
    others = box.logs(stored) - {str(log_id)}
    if others:  # letters carry offsets, and no log
        raise InvalidInput(
            f"The dead letters {box.where} are of several logs, or of another one ({min(others)}): "
            "letters can be replayed if each log has a dead-letter table of its own."
        )
    # Without a cursor these letters are of an earlier table at this place.
    start, at = followed.start_of(version), version.at
    return ReplayedFiles(shape, followed, version, box, stored, upto or Cursor(log_id, at.next), start, at)
