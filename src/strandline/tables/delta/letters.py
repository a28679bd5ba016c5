"""The dead-letter table of a Delta table: records that could not become rows, each once, before the cursor passes them.

Delta has no transaction over two tables. So the letters of a range are committed first, keyed by offset and by the id
of the table that they belong to: after a crash in between, the range is applied again, and letters below that table's
cursor among the letters are dropped. Several tables may share one dead-letter table, and anybody may delete letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from strandline.model.cursor import Cursor
from strandline.model.sink import DataFile
from strandline.tables.delta.files import added
from strandline.tables.delta.table import FollowedDelta

if TYPE_CHECKING:
    from deltalake import DeltaTable

LettersOf = Callable[[str], FollowedDelta]
"""The dead-letter table as the table with that id uses it."""


@dataclass(slots=True)
class LetterBox:
    """The dead-letter table as it was when a range was begun."""

    letters_of: LettersOf
    table: DeltaTable | None
    floor: int
    """Letters below are stored already."""

    @classmethod
    def opened(cls, letters_of: LettersOf, log_id: UUID, table_id: str | None) -> LetterBox:
        """The dead-letter table now. A table that is not created yet has no letters."""
        followed = letters_of(table_id or "")
        table = followed.open()
        if table is None:
            followed.check_place()
            return cls(letters_of, None, 0)
        followed.check_shape(table)
        known = None if table_id is None else table.transaction_version(followed.application(log_id).cursor)
        return cls(letters_of, table, 0 if known is None else int(known))

    def commit(self, files: Sequence[DataFile], table_id: str, since: Cursor, upto: Cursor) -> None:
        """Store the letters of a range. ``Conflict`` if another job committed to the table first."""
        if not files or upto.next <= self.floor:
            return
        followed = self.letters_of(table_id)
        table = followed.create(since) if self.table is None else self.table
        now = followed.now()
        followed.commit(table, [added(file, now) for file in files], upto)
