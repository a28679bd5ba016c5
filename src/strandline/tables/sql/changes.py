"""Changes of a SQL table by a range of the log: rows to put, keys to delete, dead letters. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import BadRecord
from strandline.model.records import Op
from strandline.tables.files.columns import in_schema
from strandline.tables.rows.bad_records import BadShare, first_bad, refused
from strandline.tables.rows.kinds import RAW_LATEST, merge_latest, newest_per_key, table_schema, taken_rows
from strandline.tables.rows.shape import BAD_SCHEMA, ShapedRows, TableShape, bad_records
from strandline.tables.sql.database import Database, TableChanges


@dataclass(frozen=True, slots=True)
class ChangePlanner:
    """Plans the changes of ranges; pure."""

    shape: TableShape
    database: Database
    bad_share: BadShare
    has_dead_letters: bool

    def planned(self, records: pa.Table, before: pa.Schema | None, *, is_rebuilt: bool = False) -> TableChanges:
        """What records do to a table with these columns, or none yet. A rebuild counts bad ones of all its parts."""
        shaped = self.shaped(records)
        if shaped.bad.num_rows and not self.has_dead_letters:
            raise refused(shaped.bad)
        if not is_rebuilt:
            self.bad_share.check(shaped.bad.num_rows, records.num_rows, first_bad(shaped.bad))
        return self.of_rows(shaped, before, is_rebuilt=is_rebuilt)

    def of_rows(self, shaped: ShapedRows, before: pa.Schema | None, *, is_rebuilt: bool = False) -> TableChanges:
        """What rows do to a table; they are in the order of their offsets."""
        shape, names, rows = self.shape, self.shape.names, shaped.rows
        wanted = self._schema_of(rows)
        before = wanted if before is None else before
        schema = shape.evolution(before, wanted, is_rebuilt=is_rebuilt).schema
        self.database.check_schema(schema)
        changes = partial(TableChanges, before, schema, names, shaped.bad)
        if not shape.is_keyed:
            return changes(in_schema(rows, schema), primary=names.offset if shape.transform is None else None)
        newest = newest_per_key(rows, names)
        is_put = pc.equal(newest.column(names.op), int(Op.PUT))
        if shape.soft_deletes:
            # Rows of the range, deleted ones marked; and marks for the table's own rows of keys that it only deletes.
            puts = merge_latest(wanted.empty_table(), rows, names, wanted)
            marks = self._marks(rows, newest.filter(pc.invert(is_put)), puts.column(names.key).combine_chunks())
            return changes(in_schema(puts, schema), names.key, names.key, marks=marks)
        puts = newest.filter(is_put).select(wanted.names)
        deleted = newest.column(names.key).filter(pc.invert(is_put))
        return changes(in_schema(puts, schema), names.key, names.key, deleted if len(deleted) else None)

    def _marks(self, rows: pa.Table, deletes: pa.Table, known: pa.Array) -> pa.Table:
        """The deletes of keys that are not among the known ones."""
        names = self.shape.names
        marked = deletes.filter(pc.invert(pc.is_in(deletes.column(names.key), value_set=known)))
        purges = rows.filter(pc.equal(rows.column(names.op), int(Op.PURGE))).column(names.key).combine_chunks()
        marks = marked.select([names.key, names.offset, names.timestamp]).rename_columns(["key", "offset", "timestamp"])
        return marks.append_column("purged", pc.is_in(marks.column("key"), value_set=purges))

    def _schema_of(self, rows: pa.Table) -> pa.Schema:
        """The columns of a table with these changes: a codec may find more fields than it announced."""
        raw, shape = self.shape.schema(), self.shape
        if raw is RAW_LATEST:
            return raw
        return table_schema(shape.kind, rows.schema.remove_metadata(), shape.names, soft_deletes=shape.soft_deletes)

    def shaped(self, records: pa.Table) -> ShapedRows:
        """The rows of records; those that the database cannot store are bad ones."""
        shaped = self.shape.rows(records)
        offset = self.shape.names.offset
        key = self.shape.names.key if self.shape.is_keyed else None
        bad, dropped = [shaped.bad], [pa.array([], pa.int64())]
        for mask, reason in self.database.unfit(shaped.rows, key):
            if not pc.any(mask).as_py():
                continue
            if offset not in shaped.rows.column_names:
                raise BadRecord(f"A row that the transform made cannot be stored: {reason} Nothing was applied.")
            offsets = pc.unique(shaped.rows.column(offset).filter(mask))
            dropped.append(offsets)
            unfit = records.filter(pc.is_in(records.column("offset"), value_set=offsets))
            bad.append(bad_records(unfit, pa.repeat(reason, unfit.num_rows)))
        if len(dropped) == 1:
            return ShapedRows(shaped.rows, _once(shaped.bad))
        is_dropped = pc.is_in(shaped.rows.column(offset), value_set=pa.concat_arrays(dropped))
        return ShapedRows(shaped.rows.filter(pc.invert(is_dropped)), _once(pa.concat_tables(bad)))


def _once(bad: pa.Table) -> pa.Table:
    """Each bad record once, in the order of their offsets, with its first reason."""
    if not bad.num_rows:
        return bad
    ordered = bad.append_column("at", pa.array(range(bad.num_rows), pa.int64()))
    firsts = ordered.group_by("offset").aggregate([("at", "min")]).sort_by("offset").column("at_min")
    found = taken_rows(bad, firsts)
    reasons = pc.replace_substring(found.column("reason"), "\0", "\\0")  # PostgreSQL's texts cannot hold it
    return found.set_column(BAD_SCHEMA.get_field_index("reason"), BAD_SCHEMA.field("reason"), reasons)
