"""The cursor row of a table in a SQL database, and the proof that the table still has that state. No I/O."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import CorruptData, Diverged, InvalidInput
from strandline.model.cursor import Cursor
from strandline.tables.maintain.contract import no_table
from strandline.tables.rows.logged import refuse_untyped
from strandline.tables.rows.shape import TableShape, refuse_lost_transform
from strandline.tables.sql.columns import CURSORS, TypeOf

REMEDY: Final = (
    "Put the table back, or drop it to build it again; if you know that it is right as it is, call adopt() on its sink."
)
"""What to do with a table that others changed."""


COLUMNS: Final = "name, cursor, next, epoch, identity, mode, columns, start, commit_id"
"""What is read of a cursor row."""


_KEY: Final = "strandline.key"
_TRANSFORM: Final = "strandline.transform"
_INFERRED: Final = "strandline.inferred"


@dataclass(frozen=True, slots=True)
class CursorRow:
    """The cursor row that each commit stores: table, log, next offset, and the follower that wrote it."""

    name: str
    cursor: Cursor
    epoch: int
    """Raised by each follower that begins; a follower with an older one is fenced."""
    identity: str
    """Of the table: it changes when the table is dropped and created again."""
    mode: str
    schema: pa.Schema
    """The table's columns, as the sink has made them."""
    start: int = 0
    """The offset at which the table began."""
    commit_id: str = ""
    """A number that no other commit has: by it a follower recognises a commit whose answer was lost."""
    key: str | None = None
    """The columns that identify a row, as JSON; None if a former release made the table."""
    is_transformed: bool = False
    """Whether the rows come from a transform."""
    inferred: str | None = None
    """The JSON Schema of the values, if it was inferred when the table was made."""

    @property
    def position(self) -> tuple[Cursor, int, str]:
        """The cursor of which follower in which table."""
        return self.cursor, self.epoch, self.identity


@dataclass(frozen=True, slots=True)
class SeenColumn:
    """A column that a table has: its type, and whether a row may leave it out."""

    kind: str
    is_optional: bool


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A table as it is in the database."""

    identity: str | None
    """None: there is no such table."""
    columns: Mapping[str, SeenColumn]
    row: CursorRow | None


@dataclass(frozen=True, slots=True)
class Expected:
    """The state that a sink expects of its table."""

    where: str
    name: str
    type_of: TypeOf
    shape: TableShape

    @property
    def key(self) -> str:
        """The columns that identify a row, as JSON; for a table that takes some records of a log, also which."""
        if self.shape.only is None:
            return json.dumps(self.shape.key)
        return json.dumps({"key": list(self.shape.key), "only": self.shape.only.recorded()})

    def proved(
        self, seen: SeenTable, log_id: UUID, held: CursorRow | None = None, unanswered: AbstractSet[str] = frozenset()
    ) -> CursorRow | None:
        """The cursor row of the table, which is the known one and has its columns; None if there is no table yet.

        ``held``: that of the last commit of a running follower; later ones had no answer, with the numbers
        ``unanswered``.
        ``Diverged`` if it is another table than the one that the row describes, or follows another log.
        """
        if seen.identity is None:
            if held is not None:
                raise self.dropped(held.cursor.next)
            return None
        row = seen.row
        if row is None or row.cursor.log_id != log_id or row.name != self.name:
            follows = "no log at all" if row is None else f"log {row.cursor.log_id} as {row.name!r}"
            raise Diverged(
                f"The table {self.where} does not follow log {log_id} as {self.name!r}, but {follows} (table "
                f"{CURSORS}): give this log a table of its own, or drop that one to build it again."
            )
        if row.identity != seen.identity:
            raise Diverged(f"The table {self.where} was dropped and created again by somebody else. {REMEDY}")
        if row.mode != self.shape.kind:
            raise InvalidInput(f"The table {self.where} was made with mode {row.mode!r}: open it with that.")
        refuse_untyped(row.schema, self.shape, self.where)
        if row.mode == "latest" and self.shape.soft_deletes != (self.shape.names.deleted in row.schema.names):
            made = "latest" if self.shape.soft_deletes else "marked"
            raise InvalidInput(f"The table {self.where} was made with mode {made!r}: open it with that.")
        if row.key not in (None, self.key):
            raise InvalidInput(
                f"The table {self.where} was made with the key {row.key}, and is opened with {self.key}: open it as it "
                "was made, or build a new one."
            )
        self._check_columns(seen, row)
        if held is not None:
            self._check_held(row, held, unanswered)
        return row

    def _check_columns(self, seen: SeenTable, row: CursorRow) -> None:
        for field in row.schema:
            found = seen.columns.get(field.name)
            if found is None or found.kind != self.type_of(field):
                now = "is gone" if found is None else f"is {found.kind} now, and was {self.type_of(field)}"
                raise Diverged(
                    f"The column {field.name!r} of the table {self.where} {now}, so that its follower cannot write to "
                    "it: change it back, or follow into a new table."
                )
        for name, column in seen.columns.items():
            if name not in row.schema.names and not column.is_optional:
                raise Diverged(
                    f"The column {name!r} was added to the table {self.where} and may not be null, so that its "
                    "follower cannot write to it: give the column a default, or drop it."
                )

    def existing(self, seen: SeenTable, log_id: UUID, *, is_moved: bool = False) -> CursorRow:
        """The cursor row of a table that is there, and whose rows the sink can make; ``NotFound`` if there is none."""
        row = self.proved(seen, log_id)
        if row is None:
            raise no_table(self.where)
        if not is_moved:
            refuse_lost_transform(self.shape, self.where, is_transformed=row.is_transformed)
        return row

    def _check_held(self, row: CursorRow, held: CursorRow, unanswered: AbstractSet[str]) -> None:
        is_own = row.cursor == held.cursor or row.commit_id in unanswered
        is_moved = not is_own if row.epoch == held.epoch else row.epoch < held.epoch
        if is_moved or row.cursor.next < held.cursor.next:
            raise Diverged(
                f"The cursor of the table {self.where} is {row.cursor.next}, and its follower had committed "
                f"{held.cursor.next}: an older copy was put in its place, or its row in {CURSORS} was changed. "
                "Start the follower again to continue from there, if the table is right."
            )

    def dropped(self, at: int) -> Diverged:
        """The error for a table that is gone, and was there up to this offset when its follower last looked."""
        return Diverged(
            f"The table {self.where} was dropped while it was followed, up to offset {at}: put it back, or start the "
            "follower again, which builds the table from the log's beginning."
        )


def encoded_columns(row: CursorRow) -> str:
    """The columns of a table as text for its cursor row: an Arrow schema, with the rest of the shape as metadata."""
    metadata = {} if row.key is None else {_KEY: row.key}
    if row.is_transformed:
        metadata[_TRANSFORM] = "true"
    if row.inferred is not None:
        metadata[_INFERRED] = row.inferred
    schema = row.schema.with_metadata(metadata) if metadata else row.schema
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decoded_row(values: Sequence[Any]) -> CursorRow:
    """A cursor row of the columns :data:`COLUMNS`; ``CorruptData`` if another program wrote something else there."""
    name, cursor, offset, epoch, identity, mode, schema, start, commit_id = values
    try:
        at = Cursor.parse(cursor)
        columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema, validate=True)))
    except (ValueError, TypeError, AttributeError, pa.ArrowInvalid, OSError) as error:
        raise _damaged(f"it cannot be read ({error})") from error
    if at.next != offset:
        raise _damaged(f"its offset {offset} is not that of its cursor {at}")
    metadata = columns.metadata or {}
    found = [metadata.get(one.encode()) for one in (_KEY, _INFERRED)]
    key, inferred = (None if text is None else text.decode(errors="replace") for text in found)
    described = (key, _TRANSFORM.encode() in metadata, inferred)
    return CursorRow(name, at, epoch, identity, mode, columns.remove_metadata(), start, commit_id, *described)


def _damaged(why: str) -> CorruptData:
    return CorruptData(
        f"A row of the table {CURSORS} was changed by another program, {why}: restore it from a copy, or drop the "
        "table that it belongs to and the row, to build the table again."
    )
