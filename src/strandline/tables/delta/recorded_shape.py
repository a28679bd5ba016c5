"""The shape of a Delta table, as its properties and columns record it, against that of its follower. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from strandline.errors import Diverged, InvalidInput
from strandline.model.cursor import Cursor
from strandline.tables.delta.handles import LOG_PROPERTY, columns_of, deltalake_library
from strandline.tables.delta.history import REMEDY
from strandline.tables.files.recorded import MODE_KEY, START_KEY, TRANSFORM_KEY, check_recorded, properties_at
from strandline.tables.rows.shape import DeadLetters, TableShape
from strandline.values.schema.evolution import Evolution

if TYPE_CHECKING:
    from deltalake import DeltaTable

_APPEND_ONLY: Final = "delta.appendOnly"


def properties_of(shape: TableShape | DeadLetters, since: Cursor) -> dict[str, str]:
    """The properties of a table that is created at a cursor."""
    return {LOG_PROPERTY: str(since.log_id), **properties_at(since, shape)}


def is_transformed(table: DeltaTable) -> bool:
    """Whether the rows of the table come from a transform, by its properties."""
    return TRANSFORM_KEY in table.metadata().configuration


def recorded_start(table: DeltaTable) -> int | None:
    """The offset at which the table began; None for a table that did not record it."""
    recorded = table.metadata().configuration.get(START_KEY)
    return int(recorded) if recorded is not None and recorded.isdecimal() else None


def check_shape(table: DeltaTable, shape: TableShape | DeadLetters, url: str, *, is_rebuilt: bool = False) -> None:
    """``InvalidInput``, ``Diverged`` or ``SchemaRefused`` if the table does not keep what its follower writes.

    ``is_rebuilt``: all rows are written again.
    """
    properties = table.metadata().configuration
    if MODE_KEY not in properties or LOG_PROPERTY not in properties:
        raise Diverged(f"The table {url} was replaced by another one at the same place. {REMEDY}")
    check_recorded(properties, shape, url)
    if shape.is_keyed:
        refuse_append_only(table, url, f"a table of mode {shape.kind!r} replaces rows")
    if needed_change(table, shape, is_rebuilt=is_rebuilt) is None and not _is_as_made(table, shape):
        raise Diverged(
            f"The columns of the table {url} were changed, so that its follower cannot write to it: change them back, "
            "repair it ('strandline table repair'), or follow into a new table."
        )


def refuse_append_only(table: DeltaTable, url: str, why: str) -> None:
    """``InvalidInput`` for a table that only takes new rows."""
    if str(table.metadata().configuration.get(_APPEND_ONLY)).lower() == "true":
        raise InvalidInput(
            f"The table {url} has the property {_APPEND_ONLY}, and {why}: unset the property, or follow into another "
            "table."
        )


def schema_for(table: DeltaTable, shape: TableShape | DeadLetters, *, is_rebuilt: bool = False) -> pa.Schema:
    """The columns that the table needs for the values as they are now."""
    change = needed_change(table, shape, is_rebuilt=is_rebuilt)
    return columns_of(table) if not change else change.schema


def needed_change(table: DeltaTable, shape: TableShape | DeadLetters, *, is_rebuilt: bool = False) -> Evolution | None:
    """The change that a typed table's columns need; None for a table without a codec, whose columns never change.

    ``SchemaRefused`` if the values no longer fit into the table.
    """
    if isinstance(shape, DeadLetters) or not shape.is_typed:
        return None
    # Both as Delta has them: it knows fewer types than Arrow.
    wanted = pa.schema(deltalake_library().Schema.from_arrow(shape.schema()).to_arrow())
    return shape.evolution(columns_of(table), wanted, is_rebuilt=is_rebuilt)


def _is_as_made(table: DeltaTable, shape: TableShape | DeadLetters) -> bool:
    return bool(table.schema() == deltalake_library().Schema.from_arrow(shape.schema()))
