"""One range on its way into a table of files: its parts, and the commit that makes them visible with the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strandline.errors import Conflict, CorruptData, StorageError
from strandline.model.cursor import Cursor
from strandline.tables.claim import TableClaim
from strandline.tables.files.followed import FollowedTable, TableVersion
from strandline.tables.files.letters import LetterBox
from strandline.tables.files.part import TablePart
from strandline.tables.rows.bad_records import BadShare
from strandline.tables.written import Written, check_coverage


@dataclass(slots=True)
class FileTransaction:
    """Workers write its parts; one commit on the proved version shows them, and creates a new table not earlier."""

    followed: FollowedTable[Any]
    version: TableVersion
    since: Cursor
    upto: Cursor
    parts: tuple[TablePart, ...]
    claim: TableClaim[str]
    letters: LetterBox | None = None
    bad_share: BadShare = field(default_factory=BadShare)
    take_columns: Callable[[Sequence[Written]], object] = tuple
    """Takes columns that values bring; ``Conflict`` if there are some."""
    upkeep: Callable[[int, Cursor, TableClaim[str], str, int | None], object] | None = None
    """Looks after the table behind a commit. Raises nothing.

    Takes the commit's number and cursor, who made it, the table's id, and the number of the commit that stored letters.
    """

    def commit(self, written: Sequence[Written]) -> None:
        """Commit what the workers wrote with the cursor, in one version of the table.

        ``CorruptData`` if they did not see each record exactly once. ``Conflict`` if the table changed since, so that
        the parts have to be written again; ``Fenced`` if another follower changed it. Nothing was committed then.
        """
        with self.followed.looked_at_again(self.since.log_id):
            check_coverage(written, self.parts[0].takes, len(self.parts), self.since.next, self.upto.next)
            try:
                self.take_columns(written)
            except Conflict as error:
                self.abandon(error)
                raise
            self.bad_share.check_written(written, self.upto.next - (self.version.at or self.since).next)
            added = [file for one in written for file in one.added]
            removed = dict.fromkeys(path for one in written for path in one.removed)
            stored: int | None = None
            try:
                version = self.followed.created(self.version)
                if self.letters is not None:
                    stored = self.letters.commit(written, version.id, self.since, self.upto)
                self.followed.commit(version, added, removed, self.upto)
            except Conflict:
                self.followed.refuse_another_follower(self.since.log_id, self.version.at)
                raise
            self.claim.hold(self.claim.own)
            self.bad_share.found += sum(one.bad_records for one in written)
            if self.letters is not None:
                self.letters.discard_outdated(self.parts, written, version.id, self.upto)
        if self.upkeep is not None:
            self.upkeep(self.version.number + 1, self.upto, self.claim, version.id, stored)

    def abandon(self, error: BaseException) -> None:
        """Remove the files of a table never created; after unread files ``Diverged``, or ``Conflict`` if newer."""
        if self.version.is_new:
            self.followed.remove_uncommitted(self.parts[0].job)
        elif isinstance(error, StorageError | CorruptData):
            self.followed.refuse_lost(self.since.log_id)
            now = self.followed.open_again()
            if now is not None and now.number != self.version.number:
                raise Conflict(f"The table {self.followed.where} was changed while workers read it.") from error
