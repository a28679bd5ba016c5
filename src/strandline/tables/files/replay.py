"""Replay of dead letters into a table of files: the table is committed first, then the letters are removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import StrandlineError
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile, LetterId, Written
from strandline.storage.clock import CHANCE
from strandline.tables.files.data_files import TableFiles, write_file
from strandline.tables.files.layout import WHOLE, KeptFile, is_for_later
from strandline.tables.files.part import TablePart, in_schema
from strandline.tables.maintain.replay import LetterChanges, OwnLetters, pairs_of
from strandline.tables.rows.bad_records import letter_ids
from strandline.tables.rows.kinds import KeyRewind
from strandline.tables.rows.shape import LETTER_SCHEMA, TableShape

_LOGGER: Final = logging.getLogger(__name__)

IsDone: TypeAlias = Callable[[pa.Table], pa.Array]
"""Which of some letters are to be removed."""


class FileTable(Protocol):
    """One state of a table of files; a commit on it is ``Conflict`` if another one was first."""

    @property
    def files(self) -> TableFiles:
        """Writes and reads its data files."""

    def columns(self) -> pa.Schema:
        """Its columns."""

    def sizes(self) -> Mapping[str, int]:
        """Its data files: path and bytes."""

    def evolved(self) -> FileTable:
        """The table with the columns that its values need now."""

    def commit(self, added: Sequence[DataFile], removed: Sequence[str]) -> None:
        """Replace files, at the same cursor."""


@dataclass(slots=True)
class ReplayedFiles:
    """See :class:`~strandline.tables.maintain.replay.ReplayedTable`.

    The letters were opened before the table. So a job that relies on letters, and commits to both, is seen in the
    table, or makes the removal of letters a ``Conflict``.
    """

    shape: TableShape
    table: FileTable
    box: FileTable
    """The dead-letter table."""
    address: str
    """The table, as its letters name it."""
    start: int
    cursor: Cursor
    job: str
    """The last commit of the table, as the names of its files have it."""

    def columns(self) -> pa.Schema:
        """The columns of the table."""
        return self.table.columns()

    def letters(self) -> OwnLetters:
        """The letters that name the table, apart from those of a rebuild that has not committed its rows yet."""
        files = [self._stored_letters(path) for path in self.box.sizes() if not is_for_later(path, self.job)]
        found = pa.concat_tables([LETTER_SCHEMA.empty_table(), *[one.cast(LETTER_SCHEMA) for one in files]])
        mine = found.filter(_is_of(found, self.address))
        return OwnLetters(mine, found.num_rows - mine.num_rows)

    def _stored_letters(self, path: str) -> pa.Table:
        return _stored_letters(self.box.files, path, self.box.columns())

    def pairs(self, offset: str, key: str | None, since: int) -> Iterator[pa.Table]:
        """Offset and key of the rows, file by file."""
        schema = self.table.columns()
        for path in self.table.sizes():
            found = pairs_of(in_schema(self.table.files.read(path), schema), offset, key)
            yield found.filter(pc.greater_equal(found.column("offset"), since))

    def apply(self, changes: LetterChanges | None, done: pa.Array) -> None:
        """Commit the changes, then remove the letters."""
        if changes is not None:
            self._commit(changes, self.table.evolved())
        self._remove(done)

    def _commit(self, changes: LetterChanges, table: FileTable) -> None:
        part = TablePart(self.shape, table.columns(), table.files, str(CHANCE.uuid()))
        if not self.shape.is_keyed:
            added, removed = part.appended(changes.rows), list[str]()
        else:
            old = tuple(KeptFile(path, size, is_shared=False) for path, size in table.sizes().items())
            rewind = KeyRewind(changes.since, changes.keys) if self.shape.kind == "history" else None
            added, removed = replace(part, share=WHOLE, old=old, rewind=rewind).merged([changes.rows])
        if added or removed:
            table.commit(added, removed)

    def _remove(self, done: pa.Array) -> None:
        """Remove the table's letters of these offsets, and no other table's."""
        paths = [path for path in self.box.sizes() if not is_for_later(path, self.job)]
        self._take_out(paths, lambda letters: pc.is_in(letters.column("offset"), value_set=done))

    def replace_letters(self, held: range, written: Collection[str], job: str) -> None:
        """Remove the letters of these offsets that are older than those which a rebuild, ``job``, has ``written``.

        Those of a later rebuild stay: it may have another codec, by which these records have no rows. Likewise all
        of them, if the table was committed to since: a follower may rely on them, for a replay to remove.
        """
        if self.job != job:
            return
        paths = [
            path for path in self.box.sizes() if path.rpartition("/")[2] not in written and not is_for_later(path, job)
        ]

        def is_replaced(letters: pa.Table) -> pa.ChunkedArray:
            offsets = letters.column("offset")
            return pc.and_(pc.greater_equal(offsets, held.start), pc.less(offsets, held.stop))

        self._take_out(paths, is_replaced)

    def _take_out(self, paths: Iterable[str], is_done: IsDone) -> None:
        added, removed = without_letters(self.box.files, paths, self.box.columns(), self.address, is_done)
        if removed:
            self.box.commit(added, removed)


def without_letters(
    files: TableFiles, paths: Iterable[str], columns: pa.Schema, address: str, is_done: IsDone
) -> tuple[list[DataFile], list[str]]:
    """Remove letters of one table from files of a dead-letter table: its new files, and those they replace."""
    added: list[DataFile] = []
    removed: list[str] = []
    for path in paths:
        rows = _stored_letters(files, path, columns)
        is_gone = pc.and_(_is_of(rows, address), is_done(rows))
        if not pc.any(is_gone).as_py():
            continue
        kept = rows.filter(pc.invert(is_gone))
        removed.append(path)
        if kept.num_rows:
            added.append(write_file(files, f"part-{CHANCE.uuid()}-{CHANCE.uuid()}.parquet", kept))
    return added, removed


class DiscardLetters(Protocol):
    """Removes letters of a table by its address, as far as they are there."""

    def __call__(self, letters: frozenset[LetterId], part: TablePart) -> None:
        """Remove these, apart from those that a later job has stored."""


def discard_outdated(
    parts: Sequence[TablePart], written: Sequence[Written], upto: int, discard: DiscardLetters
) -> None:
    """Remove stored letters of a committed range that are not its own. If that fails, a replay removes those of rows.

    An interrupted attempt has stored them, and the sink was corrected before the range was applied again; or they are
    of a history that the log has lost.
    """
    known = parts[0].known_letters
    if known is None:
        return
    again = {letter for one in written for letter in one.bad_again}
    outdated = frozenset(one for one in known if parts[0].floor <= one[0] < upto and one not in again)
    try:
        if outdated:
            discard(outdated, parts[0])
    except StrandlineError as error:
        _LOGGER.warning(
            "Dead letters of %s stay, though their records have rows, or the log has lost them: %s",
            parts[0].address, error,
        )  # fmt: skip


def known_letters(
    files: TableFiles, paths: Iterable[str], columns: pa.Schema, address: str, since: int = 0
) -> frozenset[LetterId]:
    """The letters of one table, from an offset on, in a dead-letter table with these files."""
    known: set[LetterId] = set()
    for path in paths:
        letters = _stored_letters(files, path, columns)
        is_wanted = pc.and_(_is_of(letters, address), pc.greater_equal(letters.column("offset"), since))
        known.update(letter_ids(letters.filter(is_wanted)))
    return frozenset(known)


def are_among(letters: pa.Table, chosen: frozenset[LetterId]) -> pa.Array:
    """Which letters are among the chosen ones."""
    offsets = pa.array({offset for offset, _ in chosen}, pa.int64())
    is_near = pc.is_in(letters.column("offset"), value_set=offsets)
    near = iter(letter_ids(letters.filter(is_near)))
    return pa.array([is_one and next(near) in chosen for is_one in is_near.to_pylist()], pa.bool_())


def _stored_letters(files: TableFiles, path: str, columns: pa.Schema) -> pa.Table:
    """The letters of a file with the types of their table: others may have written it with others."""
    return in_schema(files.read(path), columns).select(LETTER_SCHEMA.names)


def _is_of(letters: pa.Table, address: str) -> pa.ChunkedArray:
    return pc.equal(letters.column("of_table"), address)
