"""Schema changes that keep every stored row valid: which are allowed, and columns cast to the result.

Allowed are new fields (null in older rows), missing fields (null in newer rows), another order, integers that become
wider and ``float32`` that becomes ``float64``; inside structs, lists and maps alike. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.contract import Columns

_BYTES_EACH: Final = 32
"""The widest of types of a fixed width; bytes of more count as several fields."""


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
    root, added, widened = SchemaNode.of(table), list[pa.Field](), list[pa.Field]()
    kind = pa.struct(list(new))
    root.more("", kind)
    root.merge("", kind, added, widened)
    return Evolution(tuple(added), tuple(widened), pa.schema(list(root.made())))


class SchemaNode:
    """A type whose inner fields can grow: of a struct those of its names, of a list or map the type of its items."""

    __slots__ = ("_inner", "_names", "_needed", "field")

    def __init__(self, field: pa.Field) -> None:
        self.field = field
        self._inner = {name: SchemaNode(inner) for name, inner in _inner(field.type)}
        self._names = {name.casefold(): name for name in self._inner}
        needed = list(field.type) if pt.is_struct(field.type) else []
        self._needed = {each.name for each in needed if not each.nullable}

    @classmethod
    def of(cls, schema: pa.Schema) -> SchemaNode:
        """All fields of a schema."""
        return cls(pa.field("", pa.struct(list(schema))))

    def count(self) -> int:
        """The fields of the type, this one included. Null or not, bytes of a fixed width take it in each row."""
        width = self.field.type.byte_width if pt.is_fixed_size_binary(self.field.type) else 0
        return max(1, -(-width // _BYTES_EACH)) + sum(node.count() for node in self._inner.values())

    def more(self, path: str, new: pa.DataType) -> int:
        """How many fields a type would add; ``SchemaRefused`` if it cannot be merged."""
        old, family = self.field.type, _family(self.field.type)
        keys_differ = family == _family(new) == "map" and old.key_type != new.key_type
        if family != _family(new) or keys_differ or (not family and wider_type(old, new) is None):
            raise SchemaRefused(
                f"The field '{path}' is {old!s:.200} in the table and {new!s:.200} in the new schema, and rows of both "
                "cannot be in one column: keep the old type, give the field a new name, or build the table again."
            )
        more, seen = 0, dict[str, str]()
        for name, inner in _inner(new):
            inside = _below(path, name, new)
            twin = self._names.get(name.casefold()) or seen.setdefault(name.casefold(), name)
            if twin != name:
                raise SchemaRefused(
                    f"The new field '{inside}' differs from '{_below(path, twin, new)}' only in upper and lower case, "
                    "which tables do not distinguish: rename one of them."
                )
            node = self._inner.get(name)
            more += SchemaNode(inner).count() if node is None else node.more(inside, inner.type)
        lacking = self._needed.difference(name for name, _ in _inner(new)) if self._needed else ()
        for name in lacking:
            raise SchemaRefused(
                f"The field '{_below(path, name, old)}' ({self._inner[name].field.type}) may not be null in the table "
                "and is missing from the new schema: add it there, or make the column nullable."
            )
        return more

    def uncovered(self, path: str, new: pa.DataType) -> str | None:
        """The first field of a type that this one does not include."""
        family = _family(self.field.type)
        if family != _family(new) or (not family and wider_type(self.field.type, new) != self.field.type):
            return path
        for name, inner in _inner(new):
            inside, node = _below(path, name, new), self._inner.get(name)
            found = inside if node is None else node.uncovered(inside, inner.type)
            if found is not None:
                return found
        return None

    def merge(self, path: str, new: pa.DataType, added: list[pa.Field], widened: list[pa.Field]) -> None:
        """Add the fields of a type, and widen others; these fields are noted by their paths."""
        if not _family(self.field.type):
            wide = wider_type(self.field.type, new)
            if wide != self.field.type:
                widened.append(pa.field(path, wide))
                self.field = self.field.with_type(wide)
        for name, inner in _inner(new):
            inside = _below(path, name, new)
            if name in self._inner:
                self._inner[name].merge(inside, inner.type, added, widened)
            else:
                self._inner[name] = SchemaNode(pa.field(name, inner.type))
                self._names[name.casefold()] = name
                added.append(pa.field(inside, inner.type))

    def made(self) -> pa.DataType:
        """The type now."""
        kind = self.field.type
        fields = [node.field.with_type(node.made()) for node in self._inner.values()]
        if pt.is_struct(kind):
            return pa.struct(fields)
        if pt.is_map(kind):
            return pa.map_(kind.key_field, fields[0])
        return (pa.large_list if pt.is_large_list(kind) else pa.list_)(fields[0]) if fields else kind


class SchemaUnion:
    """Fields of many schemas, merged as :func:`~strandline.values.evolve` does.

    Args:
        schema: The fields to begin with.
        most: Limit on fields, those inside of others included. Fields to begin with are never too many.
    """

    def __init__(self, schema: pa.Schema, most: int) -> None:
        self._root = SchemaNode.of(schema)
        self._most = most
        self._count = self._root.count() - 1

    @property
    def schema(self) -> pa.Schema:
        """The fields so far."""
        return pa.schema(list(self._root.made()))

    def add(self, new: pa.Schema) -> None:
        """Merge the fields of one more schema; ``SchemaRefused`` if they cannot be, and then none of them is."""
        self._count += self.check(new)
        self._root.merge("", pa.struct(list(new)), [], [])

    def check(self, new: pa.Schema) -> int:
        """How many fields a schema brings; ``SchemaRefused`` if they cannot be merged."""
        more = self._root.more("", pa.struct(list(new)))
        if more and self._count + more > self._most:
            raise SchemaRefused(
                f"It brings {more:,} new fields to {self._count:,} others, and {self._most:,} are allowed in all "
                f"(max_columns; bytes of a fixed width count once for each {_BYTES_EACH}): use fewer fields, or allow "
                "more."
            )
        return more

    def uncovered(self, new: pa.Schema) -> str | None:
        """The first field, by its path, that is new or wider; None if there is none."""
        return self._root.uncovered("", pa.struct(list(new)))


def _below(path: str, name: str, kind: pa.DataType) -> str:
    return name if not path else f"{path}.{name}" if pt.is_struct(kind) else path + name


def _inner(kind: pa.DataType) -> list[tuple[str, pa.Field]]:
    if pt.is_struct(kind):
        return [(field.name, field) for field in kind]
    if pt.is_map(kind):
        return [("{}", kind.item_field)]
    return [("[]", kind.value_field)] if is_list(kind) else []


def _family(kind: pa.DataType) -> str:
    return "map" if pt.is_map(kind) else "list" if is_list(kind) else "struct" if pt.is_struct(kind) else ""


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
    return any(kind(narrow) and kind(wide) for kind in (is_text, _is_bytes))


def is_wider(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether a type has all values of the other, and more."""
    return one != other and _fits(other, one)


def _is_float(kind: pa.DataType) -> bool:
    return bool(pt.is_float32(kind) or pt.is_float64(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether the type is text of any length."""
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
    batch = columns if isinstance(columns, pa.RecordBatch) else one_batch(columns)
    if batch.schema.equals(schema):
        return batch
    arrays = _conform_fields("", schema, batch.schema, batch.columns, batch.num_rows)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows of a table in one batch."""
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


def union_array(kind: pa.DataType, arrays: Sequence[pa.Array]) -> pa.Array:
    """One array of the arrays one after another, whose types the type includes; what an array lacks is null."""
    if all(array.type == kind for array in arrays):
        return pa.concat_arrays(arrays) if arrays else pa.array([], kind)
    if not pt.is_nested(kind):
        return pa.concat_arrays([array.cast(kind) for array in arrays])
    nulls = pa.concat_arrays([array.is_null() for array in arrays])
    if pt.is_struct(kind):
        names = [[field.name for field in array.type] for array in arrays]
        parts = [dict(zip(some, array.flatten(), strict=True)) for some, array in zip(names, arrays, strict=True)]
        return pa.StructArray.from_arrays(placed(kind, parts, len(nulls)), fields=list(kind), mask=nulls)
    offsets = _offsets(arrays, is_large=pt.is_large_list(kind))
    if pt.is_map(kind):
        entries = [_entries(array) for array in arrays]
        keys = union_array(kind.key_type, [each.field(0) for each in entries])
        items = union_array(kind.item_type, [each.field(1) for each in entries])
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=nulls)
    items = union_array(kind.value_type, [array.flatten() for array in arrays])
    make = pa.LargeListArray if pt.is_large_list(kind) else pa.ListArray
    return make.from_arrays(offsets, items, type=kind, mask=nulls)


def placed(fields: Any, parts: Sequence[dict[str, pa.Array]], count: int) -> list[pa.Array]:
    """The columns of parts one after another, each of which has some of the fields; ``count`` rows in all."""
    import numpy as np

    starts, at = [], 0
    having: dict[str, list[int]] = {field.name: [] for field in fields}
    for number, part in enumerate(parts):
        starts.append(at)
        at += len(next(iter(part.values())))
        for name in part:
            having[name].append(number)
    columns = []
    for field in fields:
        numbers = having[field.name]
        arrays = [parts[number][field.name] for number in numbers]
        found = union_array(field.type, arrays)
        if len(found) < count:
            rows = np.full(count, -1, np.int64)
            if numbers:
                rows[np.concatenate([np.arange(starts[n], starts[n] + len(parts[n][field.name])) for n in numbers])] = (
                    np.arange(len(found))
                )
            found = found.take(pa.array(rows, mask=rows < 0)) if len(found) else pa.nulls(count, field.type)
        columns.append(found)
    return columns


def _entries(array: pa.Array) -> pa.Array:
    """The pairs of all maps, without those of nulls."""
    pairs = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    offsets = array.offsets
    return pa.ListArray.from_arrays(offsets, pairs, mask=array.is_null() if array.null_count else None).flatten()


def _offsets(arrays: Sequence[pa.Array], *, is_large: bool) -> pa.Array:
    """Where the items of each list begin and end among the items of all of them; a null has none."""
    import numpy as np

    lengths = [np.zeros(1, np.int64)]
    for array in arrays:
        sizes = np.diff(array.offsets.to_numpy())
        lengths.append(np.where(array.is_valid().to_numpy(zero_copy_only=False), sizes, 0))
    ends = np.cumsum(np.concatenate(lengths))
    return pa.array(ends, pa.int64() if is_large else pa.int32())
