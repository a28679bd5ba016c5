"""What a table should hold by its log, and how its rows differ from that. Pure functions on Arrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from strandline.tables.files.part import changes_schema, in_schema
from strandline.tables.rows.kinds import merge_history, merge_latest, taken_rows
from strandline.tables.rows.shape import TableShape


@dataclass(frozen=True, slots=True)
class RowDifferences:
    """Comparison of a table's rows with those that it should have."""

    rows: int
    """How many the table has."""
    missing: Sequence[str]
    extra: Sequence[str]


def folded(shape: TableShape, changes: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows of a table with these columns after all its changes, in the order of their offsets."""
    if shape.kind == "append":
        return in_schema(changes, schema)
    wide = in_schema(changes, changes_schema(schema, changes.schema, shape.names))
    if shape.kind == "latest":
        return merge_latest(schema.empty_table(), wide, shape.names, schema)
    merged = merge_history(schema.empty_table(), wide, shape.names, schema)
    return pa.concat_tables([merged.current, merged.closed])


def differences(expected: pa.Table, found: pa.Table) -> RowDifferences:
    """Rows of the one that are not in the other, as often as they are, and the reverse. Maps are not compared."""
    names = [field.name for field in expected.schema if not pa.types.is_map(field.type)]
    expected, found = expected.select(names), found.select(names)
    kinds = {field.name: field.type for field in expected.schema}
    numbers = [name for name, kind in kinds.items() if pa.types.is_integer(kind)]
    keys = [name for name, kind in kinds.items() if pa.types.is_binary(kind)]
    by = [(name, "ascending") for name in (*numbers, *keys)]
    if _sorted(expected, by).equals(_sorted(found.cast(expected.schema), by)):
        return RowDifferences(found.num_rows, [], [])
    ours, theirs = (Counter(str(row) for row in table.to_pylist()) for table in (expected, found))
    return RowDifferences(found.num_rows, sorted((ours - theirs).elements()), sorted((theirs - ours).elements()))


def _sorted(rows: pa.Table, by: Sequence[tuple[str, str]]) -> pa.Table:
    return taken_rows(rows, pc.sort_indices(rows.select([name for name, _ in by]), by))
