"""From records of a log to the rows of a table: decode, set bad rows aside, transform. Pure; picklable for workers."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import InvalidInput, SchemaRefused, StrandlineError, TransformFailed, printable
from strandline.model.records import READ_SCHEMA, TIMESTAMP, Op
from strandline.tables.rows.bad_records import NO_KEY
from strandline.tables.rows.conditions import Taken
from strandline.tables.rows.hashing import HASH_VERSION
from strandline.tables.rows.kinds import (
    RAW,
    RAW_LATEST,
    TYPED,
    TYPED_PREFIX,
    ColumnNames,
    Kind,
    kept_rows,
    table_schema,
)
from strandline.tables.rows.partitions import FileLayout
from strandline.tables.rows.tombstones import (
    TombstoneKeys,
    Tombstones,
    check_tombstones,
    refuse_tombstones,
)
from strandline.tables.rows.types import stored
from strandline.values.codecs.arrow import Arrow, Kept, TableArrow, table_codec
from strandline.values.contract import Codec, rounds_floats
from strandline.values.decoding import RECORD_FIELDS, value_fields
from strandline.values.schema.evolution import Evolution, evolve

ArrowTransform: TypeAlias = Callable[[pa.Table], pa.Table]
"""A function from the decoded changes of a range to the rows to keep, on an Arrow table."""


@dataclass(frozen=True, slots=True)
class TransformedElsewhere:
    """The place of a transform that another engine runs: only the columns of its rows are known here."""

    rows: pa.Schema

    def __call__(self, changes: pa.Table) -> pa.Table:
        """No rows, with the columns of the transform's."""
        if changes.num_rows:
            raise InvalidInput("The rows of this table are transformed by Spark: follow the log with spark.follow.")
        return self.rows.empty_table()


BAD_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", TIMESTAMP, nullable=False),
        pa.field("op", pa.int8(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", READ_SCHEMA.field("headers").type),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
"""The columns of a record without a row: the record as it was, and why it has none."""

LETTER_SCHEMA: Final = BAD_SCHEMA.append(pa.field("of_table", pa.string(), nullable=False))
"""The columns of a dead-letter table that several tables may share: also the address of the letter's table."""

_META: Final = {name: RECORD_FIELDS[name] for name in ("key", "offset", "timestamp", "op")}


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """Changes with the columns of a table's rows, in the order of their offsets; and records that have no row."""

    rows: pa.Table
    bad: pa.Table


@dataclass(frozen=True, slots=True)
class TableShape:
    """Settings that turn records into rows: the kind of table, codec, key, transform.

    Without a codec the rows have the record's own columns. With one they have the value's fields and ``_key``,
    ``_offset``, ``_timestamp`` and ``_op``. ``key`` names columns whose values identify a row instead of the record's
    key. ``transform`` gets the decoded changes and returns those to keep. ``tombstones`` says how a delete without a
    value names such a row.
    """

    kind: Kind
    value: Codec | None = None
    key: tuple[str, ...] = ()
    transform: ArrowTransform | None = None
    soft_deletes: bool = False
    has_plain_types: bool = False
    """Whether columns get the types that Delta stores (:mod:`~strandline.tables.rows.types`)."""
    tombstones: Tombstones | None = None
    """None: such a delete is refused."""
    only: Taken | None = None
    """Which records the table takes; None: all of its log."""
    layout: FileLayout | None = None
    """How rows are divided among files, apart from the keys of a keyed table."""
    inferred: str | None = None
    """The JSON Schema of the values, if it was inferred: a table that is created records it."""

    def __post_init__(self) -> None:
        check_tombstones(self.tombstones, self.key, pa.schema([]) if self.value is None else self.value.schema)

    @property
    def names(self) -> ColumnNames:
        """The names of the columns that describe a change."""
        return RAW if self.value is None and self.transform is None else TYPED

    @property
    def description(self) -> str | None:
        """What a new table says about itself, where tables have descriptions."""
        return None if self.inferred is None else str(json.loads(self.inferred).get("description"))

    @property
    def is_typed(self) -> bool:
        """Whether the columns come from the values, so that they may change."""
        return self.names is not RAW

    @property
    def has_record_keys(self) -> bool:
        """Whether a row has the key of its record: workers can then divide the records before they decode them."""
        return not self.key and self.transform is None

    @property
    def is_keyed(self) -> bool:
        """Whether rows are identified by their key, so that workers divide the keys and not the offsets."""
        return self.kind != "append"

    def transformed_elsewhere(self, rows: pa.Schema) -> TableShape:
        """The shape for rows that another engine transforms; ``InvalidInput`` if a needed column is missing."""
        if self.transform is not None:
            raise InvalidInput("The sink has a transform of its own: give either that one or Spark's, not both.")
        meta = {field.name: field for field in _META.values()} if self.is_keyed else {}  # never null there
        columns = pa.schema([meta.get(field.name, field) for field in rows])
        _check_zone(rows)
        shape = replace(self, transform=TransformedElsewhere(columns))
        shape.changes_schema()  # refuses rows that lack a column
        return shape

    def for_letters(self) -> TableShape:
        """The shape that replays letters: tombstones among them stay, if it does not say what they mean."""
        return replace(self, tombstones="dead-letters") if self.key and self.tombstones is None else self

    @property
    def is_self_describing(self) -> bool:
        """Whether values bring columns that the codec does not name."""
        return self.transform is None and isinstance(self.value, Arrow) and not isinstance(self.value, TableArrow)

    @property
    def _grows(self) -> bool:
        return self.transform is None and isinstance(self.value, Arrow)

    def for_table(self, columns: pa.Schema | None, values: Iterable[bytes | None], kept: Kept) -> TableShape:
        """The shape with a codec of the table's columns, if there is one, and of those that the values bring."""
        if not self.is_self_describing or not isinstance(self.value, Arrow):
            return self
        own = [] if columns is None else [field for field in columns if not field.name.startswith(TYPED_PREFIX)]
        return replace(self, value=table_codec(self.value, pa.schema(own), values, kept))

    def recorded(self) -> str:
        """The part of the shape that the table records; a later follower must have the same."""
        only = {} if self.only is None else {"only": self.only.recorded()}
        return json.dumps({"key": list(self.key), "soft_deletes": self.soft_deletes, "hash": HASH_VERSION, **only})

    def evolution(self, table: pa.Schema, wanted: pa.Schema, *, is_rebuilt: bool = False) -> Evolution:
        """How the columns of a table change for rows with the columns ``wanted``; see :func:`evolve`.

        ``SchemaRefused`` also for wider floats whose former values were rounded, unless all rows are built again: the
        table would differ from one that is made of the same log.
        """
        change = evolve(table, wanted)
        rounded = [field.name for field in change.widened if pa.types.is_floating(field.type)]
        if rounded and not is_rebuilt and self.value is not None and rounds_floats(self.value):
            raise SchemaRefused(
                f"The field '{rounded[0]}' becomes float64, and the rows that the table has were rounded to float32 "
                f"when their {self.value.name} values were decoded: build all rows again with the new schema "
                "('strandline table rebuild'), or keep float32."
            )
        return change

    def changes_schema(self) -> pa.Schema:
        """The columns of the changes that are merged into the table."""
        if self.names is RAW:
            return READ_SCHEMA
        return self._transformed(self.decoded_schema().empty_table()).schema

    def schema(self) -> pa.Schema:
        """The columns of the table."""
        if self.names is RAW and self.kind == "latest" and not self.soft_deletes:
            found = RAW_LATEST
        else:
            found = table_schema(self.kind, self.changes_schema(), self.names, soft_deletes=self.soft_deletes)
        return found if self.layout is None else self.layout.columns(found)

    def decoded_schema(self) -> pa.Schema:
        """The columns of decoded changes, which a transform is given."""
        fields = [READ_SCHEMA.field("value")] if self.value is None else value_fields(self.value)
        return pa.schema([*fields, *_META.values()])

    def selected(self, records: pa.Table) -> pa.Table:
        """Those of some records that the table takes."""
        return records if self.only is None else kept_rows(records, self.only.mask(records))

    def without_condition(self) -> TableShape:
        """The shape for records that were selected already."""
        return self if self.only is None else replace(self, only=None)

    def rows(self, records: pa.Table) -> ShapedRows:
        """The changes of the records that the table takes, in their order, and those without a row, with the reason."""
        if self.only is not None:
            return self.without_condition().rows(self.selected(records))
        if self.names is RAW:
            return self._checked_keys(records, records)
        decoded, bad = self.decoded(records)
        rows = self._transformed(decoded)
        if not self.is_keyed:
            return ShapedRows(rows, bad)
        kept = self._checked_keys(rows, records)
        return ShapedRows(kept.rows, kept.bad if not bad.num_rows else pa.concat_tables([bad, kept.bad]))

    def decoded(self, records: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The changes of some selected records with the columns of their values; and those that cannot be decoded."""
        columns = {name: records.column(name) for name in ("key", "offset", "timestamp", "op")}
        if self.value is None:
            return self._assembled(pa.table([records.column("value")], ["value"]), columns), BAD_SCHEMA.empty_table()
        pieces, bad = [], []
        for batch in records.to_batches():
            found = self.value.decode(batch.column("value"))
            meta = {name: batch.column(name) for name in columns}
            meta["op"] = found.operations(meta["op"])
            if self.tombstones not in (None, "dead-letters") and self.is_keyed:
                declared = pa.schema([]) if self._grows else self.value.schema
                found = TombstoneKeys(self.tombstones, self.key, declared).filled(found, batch, meta["op"])
            piece = self._assembled(pa.Table.from_batches([found.columns]), meta)
            if found.bad.num_rows:
                rows = found.bad.column("row")
                bad.append(bad_records(pa.Table.from_batches([batch]).take(rows), found.bad.column("reason")))
                piece = piece.filter(pc.invert(pc.is_in(pa.arange(0, batch.num_rows), value_set=rows.cast(pa.int64()))))
            pieces.append(piece)
        schema = self.decoded_schema()
        return (
            pa.concat_tables(pieces, promote_options="default") if pieces else schema.empty_table(),
            pa.concat_tables(bad) if bad else BAD_SCHEMA.empty_table(),
        )

    @staticmethod
    def _assembled(value: pa.Table, meta: dict[str, pa.ChunkedArray | pa.Array]) -> pa.Table:
        columns = [*value.columns, *[meta[name] for name in _META]]
        return pa.table(columns, schema=pa.schema([*value.schema, *_META.values()]))

    def _transformed(self, changes: pa.Table) -> pa.Table:
        rows = changes
        if self.transform is not None:
            rows = _called(self.transform, changes)
            if isinstance(rows, pa.RecordBatch):
                rows = pa.Table.from_batches([rows])
            if not isinstance(rows, pa.Table):
                raise InvalidInput(f"A transform returns a pyarrow Table, not {type(rows).__name__}.")
        return self.finished(rows)

    def finished(self, rows: pa.Table) -> pa.Table:
        """Transformed rows as the table stores them, with their keys; ``InvalidInput`` if a column is missing."""
        try:
            rows = stored(rows) if self.has_plain_types else rows
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException as error:
            raise InvalidInput(f"The columns of the changes cannot be stored: {error}") from error
        rows = _with_plain_meta(rows, [*_META.values()] if self.is_keyed else [_META["key"]])
        if not self.is_keyed and self.transform is None:
            return rows
        missing = [name for name in self._needed() if name not in rows.column_names]
        if missing and self._grows:
            return rows.set_column(  # no value has brought the field yet: these rows have no key
                rows.schema.get_field_index(TYPED.key), _META["key"], pa.nulls(rows.num_rows, pa.binary())
            )
        if missing and self.transform is None:
            raise InvalidInput(
                f"The values have no field {missing[0]!r}, which identifies a row: name it in the schema of their "
                "codec, or correct the key."
            )
        if missing:
            raise InvalidInput(
                f"The transform of a {self.kind} table has to keep the columns {', '.join(self._needed())}, and "
                f"{missing[0]!r} is missing."
            )
        return self._with_derived_keys(rows)

    def _needed(self) -> tuple[str, ...]:
        if not self.is_keyed:
            return ()
        return (*self.key, *[name for name in TYPED.all if not self.key or name != TYPED.key])

    def _with_derived_keys(self, rows: pa.Table) -> pa.Table:
        """Rows whose key is made of the named columns: equal values give equal bytes, whatever their width."""
        if not self.key:
            return rows
        keys = _joined_keys([rows.column(name) for name in self.key])
        field = _META["key"]
        at = rows.schema.get_field_index(field.name)
        return rows.append_column(field, keys) if at < 0 else rows.set_column(at, field, keys)

    def _checked_keys(self, rows: pa.Table, records: pa.Table) -> ShapedRows:
        keys = rows.column(self.names.key) if self.is_keyed else None
        if keys is None or not keys.null_count:
            return ShapedRows(rows, BAD_SCHEMA.empty_table())
        is_bad = pc.is_null(keys)
        offsets = rows.column(self.names.offset).filter(is_bad)
        bad = records.filter(pc.is_in(records.column("offset"), value_set=offsets.combine_chunks()))
        if self.key and self.tombstones is None:
            deletes = rows.filter(pc.and_(is_bad, pc.not_equal(rows.column(self.names.op), int(Op.PUT))))
            refuse_tombstones(bad, deletes.column(self.names.offset), self.key)
        return ShapedRows(rows.filter(pc.invert(is_bad)), bad_records(bad, pa.repeat(NO_KEY, bad.num_rows)))


@dataclass(frozen=True, slots=True)
class DeadLetters(TableShape):
    """The shape of a dead-letter table: a table of all changes, which keeps the reason of each, and whose it is."""

    kind: Kind = "append"

    def recorded(self) -> str:
        """What the table records of it."""
        return json.dumps({"dead_letters": True})

    def schema(self) -> pa.Schema:
        """Its columns."""
        return LETTER_SCHEMA


def refuse_lost_transform(shape: TableShape, where: str, *, is_transformed: bool) -> None:
    """``InvalidInput`` if a table whose rows come from a transform is written, or compared, without one."""
    if is_transformed and shape.transform is None:
        raise InvalidInput(
            f"The rows of the table {where} come from a transform, and without it they would be others: open the table "
            "in a program, with its transform, or follow into a new table."
        )


def _called(transform: ArrowTransform, changes: pa.Table) -> pa.Table:
    """What the user's function gives; ``TransformFailed`` with its traceback as a note, also from another process."""
    try:
        return transform(changes)
    except (StrandlineError, MemoryError):
        raise  # what does not fit into memory is tried again in smaller pieces
    except Exception as error:
        failed = TransformFailed(
            f"The transform raised {type(error).__name__} ({printable(str(error)[:200])}) on {changes.num_rows:,} "
            "changes, and nothing of them was applied: correct it, and start the follower again."
        )
        failed.add_note("".join(traceback.format_exception(error)))
        raise failed from error


def _check_zone(rows: pa.Schema) -> None:
    """``InvalidInput`` if the timestamp of changes has lost its time zone: it would be shifted silently."""
    name = _META["timestamp"].name
    at = rows.get_field_index(name)
    kind = None if at < 0 else rows.field(at).type
    if kind is not None and pa.types.is_timestamp(kind) and kind.tz is None:
        raise InvalidInput(f"The transform gives the column {name} without a time zone: leave it as it was given.")


def _with_plain_meta(rows: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Rows whose key, offset, timestamp and operation have the types of a record's, as far as the rows have them."""
    _check_zone(rows.schema)
    for field in fields:
        at = rows.schema.get_field_index(field.name)
        if at >= 0 and rows.schema.field(at).type != field.type:
            try:
                rows = rows.set_column(at, field.with_nullable(True), rows.column(at).cast(field.type))
            except pa.ArrowMemoryError:
                raise
            except pa.ArrowException as error:
                raise InvalidInput(f"The column {field.name} of changes is {field.type}: {error}") from error
    return rows


def bad_records(records: pa.Table, reasons: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Records without a row, each with its reason (:data:`BAD_SCHEMA`)."""
    columns = [*[records.column(name) for name in BAD_SCHEMA.names[:-1]], reasons]
    return pa.table(columns, schema=BAD_SCHEMA)


def _joined_keys(columns: Sequence[pa.ChunkedArray | pa.Array]) -> pa.ChunkedArray | pa.Array:
    """One binary key of several columns: each value as text, behind its length. Null if any of them is null."""
    parts = []
    for column in columns:
        kind = column.type
        if pa.types.is_nested(kind):
            raise InvalidInput(f"A row cannot be identified by a column of the type {kind}: name simple columns.")
        text = _key_text(column).cast(pa.binary())
        length = pc.binary_length(text).cast(pa.string()).cast(pa.binary())
        parts += [length, pa.scalar(b":"), text]
    if len(columns) == 1:
        return parts[2]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()), null_handling="emit_null")


def _key_text(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    r"""The text of each value of a key: equal values give equal texts, whatever the width of the column.

    So a widened column keeps its keys. Both zeros of a float are one key, and so are all NaNs.

    >>> _key_text(pa.array([0.0, -0.0, float("nan"), -float("nan"), 0.5], pa.float32())).to_pylist()
    ['0', '0', 'nan', 'nan', '0.5']
    >>> _key_text(pa.array([b"\xff"], pa.binary(1))).to_pylist()
    [b'\xff']
    """
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return column
    if not pa.types.is_floating(kind):
        return column.cast(pa.string())
    wide = pc.add(column.cast(pa.float64()), 0.0)  # -0.0 + 0.0 is 0.0
    return pc.if_else(pc.is_nan(wide), pa.scalar("nan"), wide.cast(pa.string()))
