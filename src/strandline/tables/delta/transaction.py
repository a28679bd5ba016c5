"""One range on its way into a Delta table: its parts, and the commit that makes them visible with the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from strandline.errors import Conflict, CorruptData, StorageError
from strandline.model.cursor import Cursor
from strandline.model.sink import Written, check_coverage
from strandline.tables.claim import TableClaim
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.files import added, removed
from strandline.tables.delta.handles import data_files, id_of
from strandline.tables.delta.letters import LetterBox
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.part import TablePart
from strandline.tables.files.recorded import looked_at_again
from strandline.tables.files.replay import discard_outdated
from strandline.tables.rows.bad_records import ANY_SHARE, BadCount, BadShare

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(slots=True)
class DeltaTransaction:
    """See :class:`~strandline.model.sink.TableTransaction`. It commits on the handle on which the table was proved.

    A new table is created by the commit, so that a refused range leaves none behind.
    """

    followed: FollowedDelta
    table: DeltaTable | None
    since: Cursor
    upto: Cursor
    at: Cursor | None
    parts: tuple[TablePart, ...]
    claim: TableClaim[str]
    letters: LetterBox | None = None
    bad_share: BadShare = ANY_SHARE
    bad_count: BadCount = field(default_factory=BadCount)
    take_columns: Callable[[Sequence[Written]], object] = tuple
    """Takes columns that values bring; ``Conflict`` if there are some."""

    def commit(self, written: Sequence[Written]) -> None:
        """Commit what the workers wrote with the cursor, in one version of the table."""
        with looked_at_again(partial(self.followed.refuse_lost, self.since.log_id)):
            self._commit(written)

    def _commit(self, written: Sequence[Written]) -> None:
        check_coverage(written, self.parts, self.since.next, self.upto.next)
        try:
            self.take_columns(written)
        except Conflict as error:
            self.abandon(error)
            raise
        self.bad_share.check_written(written, self.upto.next - (self.at or self.since).next)
        commits = DeltaCommits(self.followed, self.claim.own)
        try:
            table = commits.create(self.since) if self.table is None else self.table
            if self.letters is not None:
                self.letters.commit(written, id_of(table), self.since, self.upto)
            if self.table is not None or self.since != self.upto:  # else its first version has the cursor already
                commits.commit(table, self._actions(table, written), self.upto)
        except Conflict:
            self.followed.refuse_another_follower(self.since.log_id, self.at)
            raise
        self.claim.hold(self.claim.own)
        self.bad_count.add(written)
        if self.letters is not None:
            discard = partial(self.letters.discard, table_id=id_of(table), log_id=self.upto.log_id)
            discard_outdated(self.parts, written, self.upto.next, discard)

    def abandon(self, error: BaseException) -> None:
        """Remove what workers wrote for a table that was never created.

        If they could not read a file: ``Diverged`` if the table was removed, ``Conflict`` if it has newer files by now.
        """
        if self.table is None:
            DeltaCommits(self.followed).remove_uncommitted(self.parts[0].job)
        elif isinstance(error, StorageError | CorruptData):
            self.followed.refuse_lost(self.since.log_id)
            now = self.followed.open_again()
            if now is not None and now.version() != self.table.version():
                raise Conflict(f"The table {self.followed.url} was changed while workers read it.") from error

    def _actions(self, table: DeltaTable, written: Sequence[Written]) -> list[Any]:
        now = self.followed.now()
        adds = [added(file, now) for one in written for file in one.added]
        gone = dict.fromkeys(path for one in written for path in one.removed)
        known = data_files(table) if gone else {}
        return [*adds, *[removed(*known[path], now) for path in gone]]
