"""The dead-letter table of a Delta table: records that could not become rows, each once, before the cursor passes them.

Delta has no transaction over two tables. So the letters of a range are committed first, keyed by record and by the id
of the table that they belong to: after a crash in between, the range is applied again, and letters that are stored
already are dropped. If the sink was corrected meanwhile, letters of records that have rows are removed behind the
commit of these: before it, a second follower with the former sink could rely on them. Below the cursor that a table has
among its letters, these are looked up: a record that had a row may have none now. A rebuild relies on no earlier
letter: it stores its own, and removes the earlier ones behind its commit, but never those of a later job. Several
tables may share one dead-letter table: each letter names its table by its address, which a table that is built again
keeps. The first commit of such a table puts its cursor behind the letters of the earlier one, unless letters of several
logs are there: offsets alone would confuse them. Anybody may delete letters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.model.cursor import Cursor
from strandline.model.sink import LetterId, Written
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import added, removed, table_folder
from strandline.tables.delta.handles import columns_of, data_files, listed_files, log_of
from strandline.tables.delta.history import letter_logs
from strandline.tables.delta.place import check_place
from strandline.tables.delta.recorded_shape import check_shape, refuse_append_only
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.layout import is_for_later, job_in
from strandline.tables.files.part import TablePart
from strandline.tables.files.replay import are_among, known_letters, without_letters
from strandline.tables.rows.shape import BAD_SCHEMA

if TYPE_CHECKING:
    from deltalake import DeltaTable

LettersOf = Callable[[str], FollowedDelta]
"""The dead-letter table as the table with that id uses it."""


def address_in_letters(url: str) -> str:
    """The address of a table as its letters name it: the same for each spelling of a folder.

    >>> address_in_letters("/tables/x/../a b/"), address_in_letters("file:///tables/a%20b")
    ('/tables/a b', '/tables/a b')
    >>> address_in_letters("s3://bucket/a/")
    's3://bucket/a'
    """
    folder = table_folder(url)
    return url.rstrip("/") if folder is None else os.path.abspath(folder)  # noqa: PTH100 - no lookup, and no ".."


def check_letters(followed: FollowedDelta, table: DeltaTable) -> None:
    """``InvalidInput`` for letters that do not say whose they are; else as ``check_shape``."""
    if log_of(table) is not None and columns_of(table).names == BAD_SCHEMA.names:
        raise InvalidInput(
            f"The dead letters {followed.url} do not say of which table they are, so that one table could take those "
            "of another: name a new place for them, and rebuild the table ('strandline table rebuild')."
        )
    check_shape(table, followed.shape, followed.url)


def logs_of(followed: FollowedDelta, table: DeltaTable) -> set[str]:
    """The logs whose letters were stored, as far as commit files reach. Letters carry offsets, and no log."""
    commits = (followed.read_commit(version) for version in range(table.version() + 1))
    return {log for log in (log_of(table), *letter_logs(commits)) if log is not None}


@dataclass(slots=True)
class LetterBox:
    """The dead-letter table as it was when a range was begun."""

    letters_of: LettersOf
    table: DeltaTable | None
    floor: int
    """Letters below were stored already, as far as their records had no row then."""
    is_earlier: bool = False
    """Whether they are of an earlier table at the same address."""

    @classmethod
    def opened(cls, letters_of: LettersOf, log_id: UUID, table_id: str | None, address: str | None) -> LetterBox:
        """The dead-letter table now. A table that is not created yet has no letters.

        ``address`` is that of a table that has applied nothing yet, whose letters an earlier one may have stored.
        """
        followed = letters_of(table_id or "")
        table = followed.open()
        if table is None:
            check_place(followed.files)
            return cls(letters_of, None, 0)
        check_letters(followed, table)
        known = None if table_id is None else followed.transaction_in(table, followed.application(log_id).cursor)
        if known is not None:
            return cls(letters_of, table, known)
        floor = 0
        if address is not None and logs_of(followed, table) == {str(log_id)}:
            earlier = known_letters(followed.files, listed_files(table), columns_of(table), address)
            floor = max((offset + 1 for offset, _ in earlier), default=0)
        return cls(letters_of, table, floor, is_earlier=floor > 0)

    def known(self, address: str, since: int) -> frozenset[LetterId] | None:
        """The letters of a table from an offset on; None if none were stored there."""
        if self.table is None or self.floor <= since:
            return None
        if len(logs_of(self.letters_of(""), self.table)) > 1:
            return None  # an offset may be that of another log's letter: rather twice than not at all
        files, columns = self.letters_of("").files, columns_of(self.table)
        return known_letters(files, listed_files(self.table), columns, address, since)

    def commit(self, written: Sequence[Written], table_id: str, since: Cursor, upto: Cursor) -> None:
        """Store the letters of a range. ``Conflict`` if another job committed to the table first.

        Also if all of them are stored already: a replay that removes them at this moment is refused then.
        """
        files = [file for one in written for file in one.bad]
        if not files and not self.is_earlier and not any(one.bad_again for one in written):
            return
        followed = self.letters_of(table_id)
        commits = DeltaCommits(followed)
        table = commits.create(since) if self.table is None else self.table
        now = followed.now()
        end = upto if upto.next > self.floor else Cursor(upto.log_id, self.floor)
        commits.commit(table, [added(file, now) for file in files], end)

    def discard(self, letters: frozenset[LetterId], part: TablePart, table_id: str, log_id: UUID) -> None:
        """Remove letters that the commit of their range has replaced."""
        followed = self.letters_of(table_id)
        table = followed.open()
        if table is None:
            return
        refuse_append_only(table, followed.url, "letters of records that have rows now are removed")
        known, now = data_files(table), followed.now()
        job = job_in(table_id, part.job)
        paths = [path for path in known if not is_for_later(path, job)]
        is_done = partial(are_among, chosen=letters)
        new, gone = without_letters(followed.files, paths, columns_of(table), part.address, is_done)
        if gone:
            actions = [*[added(file, now) for file in new], *[removed(*known[path], now) for path in gone]]
            DeltaCommits(followed).commit(table, actions, Cursor(log_id, followed.next_in(table, log_id)))
