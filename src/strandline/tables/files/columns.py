"""Rows with the columns of their table: conformed, narrowed to it, and those of changes that are merged. Pure."""

from __future__ import annotations

import pyarrow as pa

from strandline.errors import SchemaRefused
from strandline.tables.rows.kinds import ColumnNames
from strandline.values.schema.evolution import conform_columns, is_wider


def in_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the columns of the table: in its order, null where they have none."""
    if rows.schema.equals(schema):
        return rows
    lost = [name for name in rows.column_names if name not in schema.names]
    if lost:
        raise SchemaRefused(
            f"The table has no column {lost[0]!r}: name it in the schema of the codec, which adds it, or leave it out."
        )
    return pa.Table.from_batches([conform_columns(batch, schema) for batch in rows.to_batches()], schema)


def narrowed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows of a wider schema than their table has, as far as the table can hold them: for a comparison with its rows.

    A table gets new and wider columns with its next commit. ``SchemaRefused`` if a row has a value for a column that
    the table lacks, or that is too narrow for it: the table was made with an earlier schema.
    """
    lost = []
    for name in rows.column_names:
        at, column = rows.column_names.index(name), rows.column(name)
        kind = schema.field(name).type if name in schema.names else None
        if kind is None and column.null_count == rows.num_rows:
            rows = rows.remove_column(at)
        elif kind is None:
            lost.append(f"{name} ({column.type})")
        elif column.type != kind and is_wider(column.type, kind):
            try:
                rows = rows.set_column(at, schema.field(name), column.cast(kind))
            except pa.ArrowInvalid:
                lost.append(f"{name} ({column.type}; the table has {kind})")
    if lost:
        raise SchemaRefused(
            f"The log has values of {', '.join(lost)}, for which the table has no columns: it was made with an earlier "
            "schema. Compare it with that one, or build its rows again with this one ('strandline table rebuild')."
        )
    return rows


def changes_schema(table: pa.Schema, found: pa.Schema, names: ColumnNames) -> pa.Schema:
    """The columns of changes with those that only the table has, and as wide as the table's."""
    made = {*names.valid, names.deleted, names.offset, names.timestamp}
    kept = [one for one in table if one.name not in made]
    return pa.schema([*kept, *[found.field(name) for name in (names.offset, names.timestamp, names.op)]])
