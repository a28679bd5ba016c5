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

Mode: TypeAlias = Literal["latest", "marked", "append", "history"]
"""The ``mode`` of a sink: a kind, or ``"marked"``, which is ``latest`` with soft deletes."""

KINDS: Final[tuple[Kind, ...]] = ("latest", "append", "history")
_PUT: Final = pa.scalar(int(Op.PUT), pa.int8())
_PURGE: Final = pa.scalar(int(Op.PURGE), pa.int8())
_MOST_TAKEN: Final = 1 << 30
"""Bytes of a table of which rows are taken at once: an array of bytes holds 2 GiB, and ``take`` makes one array."""
_PIECE: Final = 64 << 20
_LARGE_ROW: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """Names of the columns that describe a change."""

    key: str
    """The key, which identifies a row."""
    offset: str
    timestamp: str
    op: str
    deleted: str
    """Whether the row was deleted, in a table with soft deletes."""
    valid: tuple[str, str, str, str]
    """In a history: offset and time at which a version began, and at which it ended (null: it is current)."""

    @classmethod
    def behind(cls, p: str) -> ColumnNames:
        """The names behind a prefix."""
        valid = (f"{p}valid_from_offset", f"{p}valid_from", f"{p}valid_to_offset", f"{p}valid_to")
        return cls(f"{p}key", f"{p}offset", f"{p}timestamp", f"{p}op", f"{p}deleted", valid)

    @property
    def all(self) -> tuple[str, ...]:
        """The columns of each change besides its payload."""
        return self.key, self.offset, self.timestamp, self.op


TYPED_PREFIX: Final = "_"
"""Before the names in a table whose columns are the fields of values."""
RAW: Final = ColumnNames.behind("")
TYPED: Final = ColumnNames.behind(TYPED_PREFIX)


def table_schema(kind: Kind, changes: pa.Schema, names: ColumnNames, *, soft_deletes: bool = False) -> pa.Schema:
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


def newest_per_key(changes: pa.Table, names: ColumnNames = RAW) -> pa.Table:
    """The newest change of each key, by offset; deletes are among them. Of several rows of one offset, the last."""
    is_last = _are_last(changes, names)
    return kept_rows(changes, pa.chunked_array([pa.array(is_last)]))  # take() fails beyond 2 GiB of values


def merge_latest(old: pa.Table, changes: pa.Table, names: ColumnNames, schema: pa.Schema) -> pa.Table:
    """The rows of a table of the latest values after some changes, in the order of their offsets."""
    newest = newest_per_key(changes, names)
    kept = kept_rows(old, pc.invert(_is_among(old.column(names.key), newest.column(names.key))))
    puts = kept_rows(newest, pc.equal(newest.column(names.op), _PUT))
    parts = [kept, _as_rows(puts, names, schema)]
    if names.deleted in schema.names:
        parts.append(_marked(old, changes, newest, names, schema))
    return pa.concat_tables(parts)


def _as_rows(puts: pa.Table, names: ColumnNames, schema: pa.Schema) -> pa.Table:
    """Puts with the columns of the table."""
    if names.deleted in schema.names:
        puts = puts.append_column(schema.field(names.deleted), pa.repeat(pa.scalar(False), puts.num_rows))
    return puts.select(schema.names).cast(schema)


def _marked(old: pa.Table, changes: pa.Table, newest: pa.Table, names: ColumnNames, schema: pa.Schema) -> pa.Table:
    """Rows of deleted keys, if they had one: their last values, unless purged, with offset and time of the delete."""
    deletes = newest.filter(pc.not_equal(newest.column(names.op), _PUT))
    if not deletes.num_rows:
        return schema.empty_table()
    keys = deletes.column(names.key)
    is_put = pc.equal(changes.column(names.op), _PUT)
    puts = kept_rows(changes, pc.and_(is_put, _is_among(changes.column(names.key), keys)))
    kept = kept_rows(old, _is_among(old.column(names.key), keys))
    before = newest_per_key(pa.concat_tables([kept, _as_rows(puts, names, schema)]), names)
    ended = deletes.select([names.offset, names.timestamp]).take(_places(before.column(names.key), keys))
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


def _purged_since(rows: pa.Table, changes: pa.Table, names: ColumnNames) -> pa.ChunkedArray:
    """For each row, whether its key was purged after it."""
    purges = newest_per_key(changes.filter(pc.equal(changes.column(names.op), _PURGE)), names)
    at = _places(rows.column(names.key), purges.column(names.key))
    return pc.fill_null(pc.greater(purges.column(names.offset).take(at), rows.column(names.offset)), False)


@dataclass(frozen=True, slots=True)
class KeyRewind:
    """Takes some keys back to their state before an offset."""

    offset: int
    keys: pa.Array

    def history(self, old: pa.Table, names: ColumnNames, schema: pa.Schema) -> pa.Table:
        """The versions without what happened to the keys since: what began is gone, what ended is current."""
        since, _, until, ended = names.valid
        is_own = pc.is_in(old.column(names.key), value_set=self.keys)
        is_later = pc.and_(is_own, pc.greater_equal(old.column(since), self.offset))
        kept = old.filter(pc.invert(is_later))
        is_own = pc.is_in(kept.column(names.key), value_set=self.keys)
        ends = pc.and_(is_own, pc.fill_null(pc.greater_equal(kept.column(until), self.offset), False))
        for name in (until, ended):
            field = schema.field(name)
            open_again = pc.if_else(ends, pa.scalar(None, field.type), kept.column(name))
            kept = kept.set_column(kept.schema.get_field_index(name), field, open_again)
        return kept


def merge_history(old: pa.Table, changes: pa.Table, names: ColumnNames, schema: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """The current versions of a history after some changes in the order of their offsets, and those that ended.

    Each put begins a version and ends the one before; a delete ends it. A purge ends it, too: versions that ended
    before are kept, until the table is rebuilt. Ended versions among ``old`` are passed on.
    """
    import numpy as np

    *_, until, ended = names.valid
    codes = _codes(changes.column(names.key))
    order = np.argsort(codes, kind="stable")  # by key, then by offset: changes are in that order
    is_followed = codes[order[1:]] == codes[order[:-1]]
    following = np.full(len(codes), -1)
    following[order[:-1][is_followed]] = order[1:][is_followed]
    is_first = np.ones(len(codes), bool)
    is_first[order[1:][is_followed]] = False
    # Values stay where they are: take() fails beyond 2 GiB of them.
    place = pa.array(following, mask=following < 0)
    columns = [_version_column(field.name, names, changes, place) for field in schema]
    versions = kept_rows(pa.table(columns, schema=schema), pc.equal(changes.column(names.op), _PUT))
    firsts = changes.select([names.key, names.offset, names.timestamp]).filter(pa.array(is_first))
    at = _places(old.column(names.key), firsts.column(names.key))
    ends = pc.and_(pc.is_valid(at), pc.is_null(old.column(until)))
    stopped, at = kept_rows(old, ends), at.filter(ends)
    stopped = stopped.set_column(
        schema.get_field_index(until), schema.field(until), firsts.column(names.offset).take(at)
    ).set_column(schema.get_field_index(ended), schema.field(ended), firsts.column(names.timestamp).take(at))
    rest = pa.concat_tables([kept_rows(old, pc.invert(ends)), versions])
    is_current = pc.is_null(rest.column(until))
    closed = pa.concat_tables([kept_rows(rest, pc.invert(is_current)), stopped.cast(schema)])
    return kept_rows(rest, is_current), closed


def merged_rows(
    kind: Kind, old: pa.Table, changes: pa.Table, names: ColumnNames, schema: pa.Schema
) -> dict[str, pa.Table]:
    """The rows of a keyed table after some changes, by what may happen to them: ``closed`` ones never change again."""
    if kind == "latest":
        return {"keys": merge_latest(old, changes, names, schema)}
    current, closed = merge_history(old, changes, names, schema)
    return {"keys": current, "closed": closed}


def _version_column(name: str, names: ColumnNames, changes: pa.Table, following: pa.Array) -> pa.ChunkedArray:
    since, began, until, ended = names.valid
    if name == since:
        return changes.column(names.offset)
    if name == began:
        return changes.column(names.timestamp)
    if name == until:
        return changes.column(names.offset).take(following)
    if name == ended:
        return changes.column(names.timestamp).take(following)
    return changes.column(name)


def _codes(keys: pa.ChunkedArray) -> Any:
    """A number for each key, equal for equal keys."""
    return _flat(keys).dictionary_encode().indices.to_numpy(zero_copy_only=False)


def _are_last(changes: pa.Table, names: ColumnNames) -> Any:
    """Mask of the rows that are the last of their key; rows are in the order of their offsets."""
    import numpy as np

    codes = _codes(changes.column(names.key))
    last = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    last[codes] = np.arange(len(codes))  # of several, numpy keeps the last
    found = np.zeros(len(codes), bool)
    found[last] = True
    return found


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """One array of a column; large binary if it is too long for one."""
    if column.nbytes > _MOST_TAKEN:
        return pa.concat_arrays([chunk.cast(pa.large_binary()) for chunk in column.chunks])
    return column.combine_chunks()


def _places(keys: pa.ChunkedArray, among: pa.ChunkedArray) -> pa.ChunkedArray:
    """Where each key is among others; null if it is not."""
    flat = _flat(among)
    return pc.index_in(keys if keys.type == flat.type else keys.cast(flat.type), value_set=flat)


def _is_among(keys: pa.ChunkedArray, others: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.is_valid(_places(keys, others))


def kept_rows(rows: pa.Table, mask: pa.ChunkedArray) -> pa.Table:
    """The rows that a mask names; not copied if it names all, or if they are large."""
    if pc.all(mask, min_count=0).as_py():
        return rows
    if rows.nbytes <= _LARGE_ROW * rows.num_rows:
        return rows.filter(mask)
    import numpy as np

    is_kept = mask.to_numpy().astype(bool)
    edges = np.flatnonzero(np.diff(is_kept, prepend=False, append=False)).reshape(-1, 2)
    return pa.concat_tables([rows.slice(0, 0), *[rows.slice(low, high - low) for low, high in edges.tolist()]])


def taken_rows(rows: pa.Table, places: pa.Array) -> pa.Table:
    """The rows at some places, in that order. Also of more than 2 GiB, where ``take`` fails: those row by row."""
    if rows.nbytes <= _MOST_TAKEN:
        return rows.take(places)
    pieces: list[pa.Table] = []
    few: list[pa.Table] = []
    size = 0
    for place in places.to_pylist():
        few.append(rows.slice(place, 1))
        size += few[-1].nbytes
        if size >= _PIECE:
            pieces.append(pa.concat_tables(few).combine_chunks())
            few, size = [], 0
    return pa.concat_tables([*pieces, *few]) if pieces or few else rows.slice(0, 0)


def in_offset_order(tables: Sequence[pa.Table], names: ColumnNames) -> pa.Table:
    """The rows of some tables in the order of their offsets; ties stay in order."""
    whole = pa.concat_tables(tables)
    offsets = whole.column(names.offset)
    if whole.num_rows < 2 or pc.all(pc.greater_equal(offsets[1:], offsets[:-1])).as_py():  # noqa: PLR2004
        return whole
    import numpy as np

    return taken_rows(whole, pa.array(np.argsort(offsets.to_numpy(), kind="stable")))
