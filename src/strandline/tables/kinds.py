"""The kinds of tables: which columns each has, and how changes are merged into its rows. Pure functions on Arrow.

========== ===========================================================================================
kind       keeps
========== ===========================================================================================
latest     one row per key, the newest by offset; a delete removes it, or marks it (``soft_deletes``)
append     every change, with its operation, offset and timestamp
history    every version of every key, with the offsets and times at which it began and ended
========== ===========================================================================================

A merge depends only on the rows and on the changes in the order of their offsets, never on how those were cut into
batches: merging two ranges one after the other gives the same rows as merging them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.model.records import READ_SCHEMA, TIMESTAMP, Op

Kind: TypeAlias = Literal["latest", "append", "history"]
"""What a table keeps."""

KINDS: Final[tuple[Kind, ...]] = ("latest", "append", "history")
_PUT: Final = pa.scalar(int(Op.PUT), pa.int8())
_PURGE: Final = pa.scalar(int(Op.PURGE), pa.int8())


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the columns that describe a change; typed tables put an underscore before each."""

    prefix: str = ""

    @property
    def key(self) -> str:
        """The key, which identifies a row."""
        return f"{self.prefix}key"

    @property
    def offset(self) -> str:
        """The offset of the change."""
        return f"{self.prefix}offset"

    @property
    def timestamp(self) -> str:
        """The timestamp of the change."""
        return f"{self.prefix}timestamp"

    @property
    def op(self) -> str:
        """The operation of the change."""
        return f"{self.prefix}op"

    @property
    def deleted(self) -> str:
        """Whether the row was deleted, in a table with soft deletes."""
        return f"{self.prefix}deleted"

    @property
    def valid(self) -> tuple[str, str, str, str]:
        """In a history: offset and time at which a version began, and at which it ended (null: it is current)."""
        p = self.prefix
        return f"{p}valid_from_offset", f"{p}valid_from", f"{p}valid_to_offset", f"{p}valid_to"

    @property
    def all(self) -> tuple[str, ...]:
        """The columns of each change besides its payload."""
        return self.key, self.offset, self.timestamp, self.op


RAW: Final = Names()
TYPED: Final = Names("_")


def table_schema(kind: Kind, changes: pa.Schema, names: Names, *, soft_deletes: bool = False) -> pa.Schema:
    """The columns of a table of that kind, given those of its changes (payload, key, offset, timestamp, operation)."""
    if kind == "append":
        return changes
    kept = [field for field in changes if field.name != names.op]
    if kind == "latest":
        if soft_deletes:
            kept.append(pa.field(names.deleted, pa.bool_(), nullable=False))
        return pa.schema(kept)
    since, began, until, ended = names.valid
    kept = [field for field in kept if field.name not in (names.offset, names.timestamp)]
    return pa.schema(
        [
            *kept,
            pa.field(since, pa.int64(), nullable=False),
            pa.field(began, TIMESTAMP, nullable=False),
            pa.field(until, pa.int64()),
            pa.field(ended, TIMESTAMP),
        ]
    )


RAW_LATEST: Final = pa.schema([READ_SCHEMA.field(name) for name in ("key", "value", "offset", "timestamp", "headers")])
"""The columns of a table of the latest values without a codec."""


def newest_per_key(changes: pa.Table, names: Names = RAW) -> pa.Table:
    """The newest change of each key, by offset; deletes are among them. Of several rows of one offset, the last."""
    is_last = _are_last(changes, names)
    return changes if is_last.all() else changes.filter(pa.array(is_last))  # take() fails beyond 2 GiB of values


def merge_latest(old: pa.Table, changes: pa.Table, names: Names, schema: pa.Schema) -> pa.Table:
    """The rows of a table of the latest values after some changes, in the order of their offsets."""
    newest = newest_per_key(changes, names)
    kept = old.filter(pc.invert(pc.is_in(old.column(names.key), value_set=_flat(newest.column(names.key)))))
    puts = newest.filter(pc.equal(newest.column(names.op), _PUT))
    if names.deleted in schema.names:
        puts = puts.append_column(schema.field(names.deleted), pa.repeat(pa.scalar(False), puts.num_rows))
        return pa.concat_tables(
            [kept, puts.select(schema.names).cast(schema), _marked(old, changes, newest, names, schema)]
        )
    return pa.concat_tables([kept, puts.select(schema.names).cast(schema)])


def _marked(old: pa.Table, changes: pa.Table, newest: pa.Table, names: Names, schema: pa.Schema) -> pa.Table:
    """The rows of deleted keys: their last values, with offset and time of the delete. A purge removes the values.

    A delete of a key that has no row leaves none.
    """
    deletes = newest.filter(pc.not_equal(newest.column(names.op), _PUT))
    if not deletes.num_rows:
        return schema.empty_table()
    keys = _flat(deletes.column(names.key))
    puts = changes.filter(
        pc.and_(pc.equal(changes.column(names.op), _PUT), pc.is_in(changes.column(names.key), value_set=keys))
    )
    puts = puts.append_column(schema.field(names.deleted), pa.repeat(pa.scalar(False), puts.num_rows))
    before = pa.concat_tables(
        [
            old.filter(pc.is_in(old.column(names.key), value_set=keys)),
            puts.select(schema.names).cast(schema),
        ]
    )
    before = newest_per_key(before, names)
    at = pc.index_in(before.column(names.key), value_set=keys)
    ended = deletes.take(at)
    is_purged = _purged_since(before, changes, names)
    columns = []
    for field in schema:
        if field.name in (names.offset, names.timestamp):
            columns.append(ended.column(field.name))
        elif field.name == names.deleted:
            columns.append(pa.chunked_array([pa.repeat(pa.scalar(True), before.num_rows)]))
        elif field.name == names.key:
            columns.append(before.column(field.name))
        else:
            columns.append(pc.if_else(is_purged, pa.scalar(None, field.type), before.column(field.name)))
    return pa.table(columns, schema=schema)


def _purged_since(rows: pa.Table, changes: pa.Table, names: Names) -> pa.ChunkedArray:
    """For each row, whether its key was purged after it."""
    purges = newest_per_key(changes.filter(pc.equal(changes.column(names.op), _PURGE)), names)
    at = pc.index_in(rows.column(names.key), value_set=_flat(purges.column(names.key)))
    return pc.fill_null(pc.greater(purges.column(names.offset).take(at), rows.column(names.offset)), False)


@dataclass(frozen=True, slots=True)
class MergedHistory:
    """Versions after a merge: those that are current, and those that ended and never change again."""

    current: pa.Table
    closed: pa.Table


def merge_history(old: pa.Table, changes: pa.Table, names: Names, schema: pa.Schema) -> MergedHistory:
    """The versions of a history after some changes, in the order of their offsets.

    Each put begins a version and ends the one before; a delete ends it. A purge ends it, too: versions that ended
    before are kept, until the table is compacted. Ended versions among ``old`` are passed on.
    """
    import numpy as np

    *_, until, ended = names.valid
    codes = _codes(changes.column(names.key))
    order = np.argsort(codes, kind="stable")  # by key, then by offset: changes are in that order
    codes, ordered = codes[order], changes.take(pa.array(order))
    is_last = np.append(codes[1:] != codes[:-1], True) if len(codes) else np.empty(0, bool)
    is_first = np.append(True, codes[1:] != codes[:-1]) if len(codes) else np.empty(0, bool)
    following = pa.array(np.minimum(np.arange(1, len(codes) + 1), max(0, len(codes) - 1)), mask=is_last)
    versions = pa.table(
        [_version_column(field.name, names, ordered, following) for field in schema],
        schema=schema,
    ).filter(pc.equal(ordered.column(names.op), _PUT))
    firsts = ordered.filter(pa.array(is_first))
    at = pc.index_in(old.column(names.key), value_set=_flat(firsts.column(names.key)))
    ends = pc.and_(pc.is_valid(at), pc.is_null(old.column(until)))
    stopped, at = old.filter(ends), at.filter(ends)
    stopped = stopped.set_column(
        schema.get_field_index(until), schema.field(until), firsts.column(names.offset).take(at)
    ).set_column(schema.get_field_index(ended), schema.field(ended), firsts.column(names.timestamp).take(at))
    rest = pa.concat_tables([old.filter(pc.invert(ends)), versions])
    is_current = pc.is_null(rest.column(until))
    return MergedHistory(
        rest.filter(is_current), pa.concat_tables([rest.filter(pc.invert(is_current)), stopped.cast(schema)])
    )


def _version_column(name: str, names: Names, ordered: pa.Table, following: pa.Array) -> pa.ChunkedArray:
    since, began, until, ended = names.valid
    if name == since:
        return ordered.column(names.offset)
    if name == began:
        return ordered.column(names.timestamp)
    if name == until:
        return ordered.column(names.offset).take(following)
    if name == ended:
        return ordered.column(names.timestamp).take(following)
    return ordered.column(name)


def _codes(keys: pa.ChunkedArray) -> Any:
    """A number for each key, equal for equal keys."""
    return _flat(keys).dictionary_encode().indices.to_numpy(zero_copy_only=False)


def _are_last(changes: pa.Table, names: Names) -> Any:
    """Which rows are the last of their key, among rows in the order of their offsets."""
    import numpy as np

    codes = _codes(changes.column(names.key))
    last = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    last[codes] = np.arange(len(codes))  # of several, numpy keeps the last
    found = np.zeros(len(codes), bool)
    found[last] = True
    return found


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """One array of a column; large binary if it is too long for one."""
    flat = column.combine_chunks()
    if not isinstance(flat, pa.ChunkedArray):
        return flat
    return pa.concat_arrays([chunk.cast(pa.large_binary()) for chunk in flat.chunks])


def in_offset_order(tables: Sequence[pa.Table], names: Names) -> pa.Table:
    """The rows of some tables in the order of their offsets; ties stay in order."""
    whole = pa.concat_tables(tables)
    offsets = whole.column(names.offset)
    if whole.num_rows < 2 or pc.all(pc.greater_equal(offsets[1:], offsets[:-1])).as_py():  # noqa: PLR2004
        return whole
    import numpy as np

    return whole.take(pa.array(np.argsort(offsets.to_numpy(), kind="stable")))
