"""The dead-letter table of a Delta table: records that could not become rows, each once, before the cursor passes them.

Delta has no transaction over two tables. So the letters of a range are committed first, keyed by offset like everything
else: after a crash in between, the range is applied again, and letters below the letters' own cursor are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from strandline.errors import Conflict
from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.tables.delta.files import added
from strandline.tables.delta.table import FollowedDelta

if TYPE_CHECKING:
    from deltalake import DeltaTable


@dataclass(slots=True)
class LetterBox:
    """The dead-letter table as it was when a range was begun."""

    followed: FollowedDelta
    table: DeltaTable | None
    at: Cursor | None

    @classmethod
    def opened(cls, followed: FollowedDelta, log_id: UUID) -> LetterBox:
        """The table now, proved like any other."""
        table = followed.open()
        if table is None:
            followed.refuse_removed(log_id)
            followed.check_place()
        return cls(followed, table, None if table is None else followed.last_commit(table, log_id).cursor)

    @property
    def floor(self) -> int:
        """Letters below are stored already."""
        return 0 if self.at is None else self.at.next

    def commit(self, files: Sequence[DataFile], since: Cursor, upto: Cursor) -> None:
        """Store the letters of a range. ``Fenced`` if another follower did at the same time."""
        if not files or upto.next <= self.floor:
            return
        try:
            table = self.followed.create(since) if self.table is None else self.table
            now = self.followed.now()
            self.followed.commit(table, [added(file, now) for file in files], upto)
        except Conflict:
            self.followed.refuse_another_follower(since.log_id, self.at)
            raise
