"""One range on its way into an Iceberg table: its parts, and the snapshot that makes them visible with the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from strandline.errors import Conflict, CorruptData, StorageError
from strandline.model.cursor import Cursor
from strandline.model.sink import LetterId, Written, check_coverage
from strandline.tables.claim import TableClaim
from strandline.tables.files.layout import is_for_later
from strandline.tables.files.part import TablePart
from strandline.tables.files.recorded import looked_at_again
from strandline.tables.files.replay import are_among, discard_outdated, known_letters, without_letters
from strandline.tables.iceberg.commits import IcebergCommits
from strandline.tables.iceberg.table import Begun, FollowedIceberg
from strandline.tables.rows.bad_records import ANY_SHARE, BadCount, BadShare


@dataclass(slots=True)
class IcebergLetters:
    """The dead-letter table as it was when a range was begun.

    The letters of a range are committed before its rows. After a crash in between, the range is applied again, and
    letters that are stored already are dropped: below the cursor of the dead-letter table they are looked up.
    """

    followed: FollowedIceberg
    begun: Begun

    @property
    def floor(self) -> int:
        """Letters below were stored already, as far as their records had no row then."""
        return 0 if self.begun.at is None else self.begun.at.next

    def known(self, address: str, since: int) -> frozenset[LetterId] | None:
        """The letters of a table from an offset on; None if none were stored there."""
        if self.floor <= since:
            return None
        return known_letters(self.begun.files, self.followed.data_files(self.begun), self.begun.columns, address, since)

    def commit(self, written: Sequence[Written], upto: Cursor) -> None:
        """Store the letters of a range. ``Fenced`` if another follower did at the same time.

        Also if all of them are stored already: a replay that removes them at this moment is refused then.
        """
        files = [file for one in written for file in one.bad]
        if not files and not any(one.bad_again for one in written):
            return
        end = self.begun.at if self.begun.at is not None and upto.next <= self.floor else upto
        try:
            IcebergCommits(self.followed).commit(self.begun, files, (), end)
        except Conflict:
            self.followed.refuse_another_follower(upto.log_id, self.begun.at)
            raise

    def discard(self, letters: frozenset[LetterId], part: TablePart, at: Cursor) -> None:
        """Remove letters that the commit of their range has replaced."""
        begun = self.followed.begin(at)
        paths = [path for path in self.followed.data_files(begun) if not is_for_later(path, part.job)]
        is_done = partial(are_among, chosen=letters)
        kept, gone = without_letters(begun.files, paths, begun.columns, part.address, is_done)
        if gone and begun.at is not None:
            IcebergCommits(self.followed).commit(begun, kept, gone, begun.at)


@dataclass(slots=True)
class IcebergTransaction:
    """See :class:`~strandline.model.sink.TableTransaction`. It commits on the state on which the table was proved.

    A new table is created by the commit, so that a refused range leaves none behind.
    """

    followed: FollowedIceberg
    begun: Begun
    since: Cursor
    upto: Cursor
    parts: tuple[TablePart, ...]
    claim: TableClaim[str]
    letters: IcebergLetters | None = None
    bad_share: BadShare = ANY_SHARE
    bad_count: BadCount = field(default_factory=BadCount)
    take_columns: Callable[[Sequence[Written]], object] = tuple
    """Takes columns that values bring; ``Conflict`` if there are some."""

    def commit(self, written: Sequence[Written]) -> None:
        """Commit what the workers wrote with the cursor, in one snapshot of the table."""
        with looked_at_again(partial(self.followed.refuse_lost, self.since.log_id)):
            self._commit(written)

    def _commit(self, written: Sequence[Written]) -> None:
        check_coverage(written, self.parts, self.since.next, self.upto.next)
        try:
            self.take_columns(written)
        except Conflict as error:
            self.abandon(error)
            raise
        self.bad_share.check_written(written, self.upto.next - (self.begun.at or self.since).next)
        added = [file for one in written for file in one.added]
        removed = list(dict.fromkeys(path for one in written for path in one.removed))
        try:
            if self.letters is not None:
                self.letters.commit(written, self.upto)
            IcebergCommits(self.followed, self.claim.own).commit(self.begun, added, removed, self.upto)
        except Conflict:
            self.followed.refuse_another_follower(self.since.log_id, self.begun.at)
            raise
        self.claim.hold(self.claim.own)
        self.bad_count.add(written)
        if self.letters is not None:
            discard_outdated(self.parts, written, self.upto.next, partial(self.letters.discard, at=self.upto))

    def abandon(self, error: BaseException) -> None:
        """Leave what workers wrote: no snapshot lists it, and removing orphan files removes it.

        If they could not read a file: ``Diverged`` if the table was dropped, ``Conflict`` if it has newer files by now.
        """
        if self.begun.found is None or not isinstance(error, StorageError | CorruptData):
            return
        self.followed.refuse_lost(self.since.log_id)
        now, seen = self.followed.open(), self.begun.transaction.table_metadata.current_snapshot_id
        if now is not None and now.metadata.current_snapshot_id != seen:
            raise Conflict(f"The table {self.followed.identifier} was changed while workers read it.") from error
