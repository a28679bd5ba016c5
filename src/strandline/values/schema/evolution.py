"""Schema changes that keep every stored row valid: which are allowed, and columns cast to the result.

Allowed are new fields (null in older rows), missing fields (null in newer rows), another order, integers that become
wider and ``float32`` that becomes ``float64``; inside structs, lists and maps alike. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.contract import Columns


@dataclass(frozen=True, slots=True)
class Evolution:
    """Changes of a table's schema by a new one.

    Attributes:
        added: New fields. One inside a struct has a dotted name, ``address.zip``; of list items ``[]``, of map values
            ``{}`` is part of the name.
        widened: Fields with their new, wider type, named likewise.
        schema: The table's schema afterwards.
    """

    added: tuple[pa.Field, ...]
    widened: tuple[pa.Field, ...]
    schema: pa.Schema

    def __bool__(self) -> bool:
        """Whether anything changes."""
        return bool(self.added or self.widened)


def evolve(table: pa.Schema, new: pa.Schema) -> Evolution:
    """The table's schema after rows of the schema ``new`` are added to it; ``SchemaRefused`` if they cannot be.

    The table's fields keep their order; new ones follow. A field of ``new`` that is narrower than the table's is no
    change: the table is wide enough already.

    >>> evolution = evolve(
    ...     pa.schema({"id": pa.int32(), "note": pa.string()}), pa.schema({"id": pa.int64(), "vip": pa.bool_()})
    ... )
    >>> evolution.schema.names, [added.name for added in evolution.added], [wide.name for wide in evolution.widened]
    (['id', 'note', 'vip'], ['vip'], ['id'])
    """
    changes = _SchemaChanges()
    schema = pa.schema(changes.fields("", table, new))
    return Evolution(tuple(changes.added), tuple(changes.widened), schema)


@dataclass
class _SchemaChanges:
    added: list[pa.Field] = field(default_factory=list)
    widened: list[pa.Field] = field(default_factory=list)

    def fields(self, path: str, table: Iterable[pa.Field], new: Iterable[pa.Field]) -> list[pa.Field]:
        old = list(table)
        offered = {each.name: each for each in new}
        names = {each.name.casefold(): each.name for each in old}
        result = [self._field(path, each, offered.pop(each.name, None)) for each in old]
        for name, each in offered.items():
            twin = names.setdefault(name.casefold(), name)
            if twin != name:
                raise twins(path + name, path + twin)
            added = pa.field(name, each.type)
            self.added.append(pa.field(path + name, each.type))
            result.append(added)
        return result

    def _field(self, path: str, old: pa.Field, new: pa.Field | None) -> pa.Field:
        if new is not None:
            return old.with_type(self._type(path + old.name, old.type, new.type))
        if not old.nullable:
            raise SchemaRefused(
                f"The field '{path}{old.name}' ({old.type}) may not be null in the table and is missing from the new "
                "schema: add it there, or make the column nullable."
            )
        return old

    def _type(self, name: str, old: pa.DataType, new: pa.DataType) -> pa.DataType:
        if old == new or _fits(new, old):
            return old
        if _fits(old, new):
            self.widened.append(pa.field(name, new))
            return new
        if pt.is_struct(old) and pt.is_struct(new):
            return pa.struct(self.fields(f"{name}.", old, new))
        if is_list(old) and is_list(new):
            item = old.value_field.with_type(self._type(f"{name}[]", old.value_type, new.value_type))
            return pa.large_list(item) if pt.is_large_list(old) else pa.list_(item)
        if pt.is_map(old) and pt.is_map(new) and old.key_type == new.key_type:
            item = old.item_field.with_type(self._type(name + "{}", old.item_type, new.item_type))
            return pa.map_(old.key_field, item)
        raise two_types(name, old, new)


def twins(name: str, twin: str) -> SchemaRefused:
    """The error for two names of one column."""
    return SchemaRefused(
        f"The new field '{name}' differs from '{twin}' only in upper and lower case, which tables do not distinguish: "
        "rename one of them."
    )


def two_types(name: str, old: object, new: object) -> SchemaRefused:
    """The error for a field with another type than before."""
    return SchemaRefused(
        f"The field '{name}' is {old} in the table and {new} in the new schema, and rows of both cannot be in one "
        "column: keep the old type, give the field a new name, or build the table again."
    )


def wider_type(old: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """The type of two that has all values of both, if they are single values; None if neither has."""
    return old if old == new or _fits(new, old) else new if _fits(old, new) else None


def _fits(narrow: pa.DataType, wide: pa.DataType) -> bool:
    """Whether each value of one type is a value of the other: both numbers of a kind, or large and small offsets."""
    if pt.is_unsigned_integer(narrow) and pt.is_signed_integer(wide):
        return bool(narrow.bit_width < wide.bit_width)
    for kind in (pt.is_signed_integer, pt.is_unsigned_integer, _is_float):
        if kind(narrow) and kind(wide):
            return bool(narrow.bit_width <= wide.bit_width)
    return any(kind(narrow) and kind(wide) for kind in (_is_text, _is_bytes))


def is_wider(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether a type has all values of the other, and more."""
    return one != other and _fits(other, one)


def _is_float(kind: pa.DataType) -> bool:
    return bool(pt.is_float32(kind) or pt.is_float64(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether the type is a list of any length."""
    return bool(pt.is_list(kind) or pt.is_large_list(kind))


def conform_columns(columns: Columns, schema: pa.Schema) -> pa.RecordBatch:
    """The columns cast to an evolved schema: in its order, wide enough, with nulls for what is missing.

    ``SchemaRefused`` for a column that the schema does not have, or that does not fit: see :func:`evolve`.

    >>> narrow = pa.record_batch({"id": pa.array([1], pa.int32())})
    >>> conform_columns(narrow, pa.schema({"vip": pa.bool_(), "id": pa.int64()})).to_pylist()
    [{'vip': None, 'id': 1}]
    """
    batch = columns if isinstance(columns, pa.RecordBatch) else _one_batch(columns)
    if batch.schema.equals(schema):
        return batch
    arrays = _conform_fields("", schema, batch.schema, batch.columns, batch.num_rows)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _conform_fields(
    path: str, wanted: Iterable[pa.Field], given: Iterable[pa.Field], arrays: Iterable[pa.Array], count: int
) -> list[pa.Array]:
    by_name: dict[str, pa.Array] = {}
    for each, array in zip(given, arrays, strict=True):
        if each.name in by_name:
            raise SchemaRefused(f"The field '{path}{each.name}' is there twice: drop or rename one of them.")
        by_name[each.name] = array
    result = []
    for each in wanted:
        array = by_name.pop(each.name, None)
        result.append(pa.nulls(count, each.type) if array is None else _conform(path + each.name, array, each.type))
    if by_name:
        raise SchemaRefused(f"The field '{path}{next(iter(by_name))}' is not in the schema: add it there, or drop it.")
    return result


def _conform(name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    given = array.type
    if given == kind:
        return array
    if pt.is_null(given) or _fits(given, kind):
        return array.cast(kind)
    if pt.is_struct(given) and pt.is_struct(kind):
        children = _conform_fields(f"{name}.", kind, given, array.flatten(), len(array))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    if is_list(given) and pt.is_list(kind) == pt.is_list(given) and is_list(kind):
        return _with_child(array, kind, _conform(f"{name}[]", array.values, kind.value_type))
    if pt.is_map(given) and pt.is_map(kind) and given.key_type == kind.key_type:
        items = _conform(name + "{}", array.items, kind.item_type)
        entries = pa.StructArray.from_arrays([array.keys, items], fields=[kind.key_field, kind.item_field])
        return _with_child(array, kind, entries)
    raise SchemaRefused(
        f"The field '{name}' is {given}, which does not fit into {kind} without loss: cast it, or change the schema."
    )


def _with_child(array: pa.Array, kind: pa.DataType, child: pa.Array) -> pa.Array:
    buffers = array.buffers()[:2]
    return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, array.offset, children=[child])
