"""The dead-letter table of a table of files: records without a row, each once, before the cursor passes them.

No format has a transaction over two tables. So the letters of a range are committed first, keyed by record and by the
table that they belong to: after a crash in between, the range is applied again, and letters that are stored already are
dropped. If the sink was corrected meanwhile, letters of records that have rows are removed behind the commit of these:
before it, a second follower with the former sink could rely on them. Below the cursor that a table has among its
letters, these are looked up: a record that had a row may have none now. A rebuild relies on no earlier letter: it
stores its own, and removes the earlier ones behind its commit, but never those of a later job. Several tables may share
one dead-letter table: each letter names its table by its address, which a table that is built again keeps. The first
commit of such a table puts its cursor behind the letters of the earlier one, unless letters of several logs are there:
offsets alone would confuse them. Anybody may delete letters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import StrandlineError
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.files.columns import in_schema
from strandline.tables.files.data_files import TableFiles, write_file
from strandline.tables.files.followed import FollowedTable, LettersOf, TableVersion
from strandline.tables.files.joining import joined_files
from strandline.tables.files.layout import is_for_later, job_in
from strandline.tables.files.part import TablePart
from strandline.tables.files.upkeep import to_join
from strandline.tables.rows.bad_records import letter_ids
from strandline.tables.rows.shape import LETTER_SCHEMA
from strandline.tables.written import DataFile, LetterId, Written

IsDone: TypeAlias = Callable[[pa.Table], pa.Array]
"""Which of some letters are to be removed."""
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class LetterBox:
    """The dead-letter table as it was when a range was begun."""

    letters_of: LettersOf
    version: TableVersion
    at: Cursor | None = None
    """Letters below were stored already, as far as their records had no row then; None: none were."""
    is_earlier: bool = False
    """Whether they are of an earlier table at the same address."""

    @classmethod
    def opened(
        cls, letters_of: LettersOf, since: Cursor, table: TableVersion, followed: FollowedTable[Any]
    ) -> LetterBox:
        """The dead-letter table of a version that was begun at ``since``."""
        letters = letters_of(table.id)
        version = letters.open()
        if version is None:
            letters.refuse_removed(letters.known.get(since.log_id))
            return cls(letters_of, letters.new(since))
        at = letters.letters_upto(version, since.log_id)
        is_first = table.at is None or table.at.next == followed.first_start(table)  # or it is built again
        if at is not None or not is_first or letters.logs(version) != {str(since.log_id)}:
            return cls(letters_of, version, at)
        earlier = known_letters(version, letters.sizes(version), followed.address)
        floor = max((offset + 1 for offset, _ in earlier), default=0)
        return cls(letters_of, version, Cursor(since.log_id, floor) if floor else None, is_earlier=floor > 0)

    def known(self, address: str, since: int) -> frozenset[LetterId] | None:
        """The letters of a table from an offset on; None if none were stored there."""
        letters = self.letters_of("")
        if self.at is None or self.at.next <= since or len(letters.logs(self.version)) > 1:
            return None  # among those of several logs an offset may be that of another: rather twice than not at all
        return known_letters(self.version, letters.sizes(self.version), address, since)

    def commit(self, written: Sequence[Written], table_id: str, since: Cursor, upto: Cursor) -> int | None:
        """Store the letters of a range. ``Conflict`` if another job committed to the table first.

        Also if all of them are stored already: a replay that removes them at this moment is refused then. Returns the
        number of that commit; None if there was nothing to store.
        """
        files = [file for one in written for file in one.bad]
        if not files and not self.is_earlier and not any(one.bad_again for one in written):
            return None
        letters = self.letters_of(table_id)
        end = upto if self.at is None or upto.next > self.at.next else self.at
        letters.commit(letters.created(self.version), files, (), end)
        return self.version.number + 1

    def discard_outdated(
        self, parts: Sequence[TablePart], written: Sequence[Written], table_id: str, upto: Cursor
    ) -> None:
        """Remove stored letters of a committed range that are not its own; a failure is left to a replay.

        An interrupted attempt has stored them, and the sink was corrected before the range was applied again; or they
        are of a history that the log has lost.
        """
        part, known = parts[0], parts[0].known_letters
        again = {letter for one in written for letter in one.bad_again}
        outdated = frozenset(one for one in known or () if part.floor <= one[0] < upto.next and one not in again)
        if not outdated:
            return
        letters, job = self.letters_of(table_id), job_in(table_id, part.job)
        try:
            version = letters.open()
            at = None if version is None else letters.letters_upto(version, upto.log_id)
            if version is not None and at is not None:  # those that a later job has stored stay
                paths = [path for path in letters.sizes(version) if not is_for_later(path, job)]
                take_out(letters, version, paths, part.address, at, partial(are_among, chosen=outdated))
        except StrandlineError as error:
            _LOGGER.warning(
                "Dead letters of %s stay, though their records have rows, or the log has lost them: %s",
                *(part.address, error),
            )


def take_out(
    letters: FollowedTable[Any], version: TableVersion, paths: Iterable[str], address: str, at: Cursor, is_done: IsDone
) -> None:
    """Remove letters of one table from files of a dead-letter table, whose cursor stays ``at``."""
    letters.check_removal(version)
    added: list[DataFile] = []
    removed: list[str] = []
    for path in paths:
        rows = stored_letters(version.files, path, version.columns)
        is_gone = pc.and_(is_of(rows, address), is_done(rows))
        if pc.any(is_gone).as_py():
            removed.append(path)
            kept = rows.filter(pc.invert(is_gone))
            if kept.num_rows:
                added.append(write_file(version.files, f"part-{CHANCE.uuid()}-{CHANCE.uuid()}.parquet", kept))
    if removed:
        letters.commit(version, added, removed, at)


def join_letters(letters: FollowedTable[Any], log_id: UUID, job: str, address: str, full: set[str]) -> int:
    """Join small files with letters of one table only, if there are enough; returns how many.

    Not those of a later job than ``job``, which is committed: by the name of a file a replay, and a follower that was
    replaced, know whether its letters count. ``Conflict`` if another job commits to the letters first.
    """
    version = letters.open()
    at = None if version is None else letters.letters_upto(version, log_id)
    if version is None or at is None:
        return 0
    sizes = {path: size for path, size in letters.sizes(version).items() if not is_for_later(path, job)}
    few = to_join(sizes, "append", full)
    others = {
        path for path in few if not pc.all(is_of(stored_letters(version.files, path, version.columns), address)).as_py()
    }
    full.update(others)
    few = [path for path in few if path not in others]
    if len(few) <= 1:
        return 0
    added = joined_files(TablePart(letters.shape, version.columns, version.files, job), few)
    if 2 * len(added) > len(few):
        full.update((*few, *[file.path for file in added]))
    letters.commit(replace(version, keeps_rows=True), added, few, at)
    return len(few)


def known_letters(version: TableVersion, paths: Iterable[str], address: str, since: int = 0) -> frozenset[LetterId]:
    """The letters of one table, from an offset on, in a dead-letter table with these files."""
    known: set[LetterId] = set()
    for path in paths:
        letters = stored_letters(version.files, path, version.columns)
        is_wanted = pc.and_(is_of(letters, address), pc.greater_equal(letters.column("offset"), since))
        known.update(letter_ids(letters.filter(is_wanted)))
    return frozenset(known)


def are_among(letters: pa.Table, chosen: frozenset[LetterId]) -> pa.Array:
    """Which letters are among the chosen ones."""
    offsets = pa.array({offset for offset, _ in chosen}, pa.int64())
    is_near = pc.is_in(letters.column("offset"), value_set=offsets)
    near = iter(letter_ids(letters.filter(is_near)))
    return pa.array([is_one and next(near) in chosen for is_one in is_near.to_pylist()], pa.bool_())


def stored_letters(files: TableFiles, path: str, columns: pa.Schema) -> pa.Table:
    """The letters of a file with the types of their table: others may have written it with others."""
    return in_schema(files.read(path), columns).select(LETTER_SCHEMA.names)


def is_of(letters: pa.Table, address: str) -> pa.ChunkedArray:
    """Which letters name a table."""
    return pc.equal(letters.column("of_table"), address)
