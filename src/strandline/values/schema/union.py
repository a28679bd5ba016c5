"""The schema of many values together, and their columns: time and memory of a value are those of its own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from strandline.errors import SchemaRefused
from strandline.values.schema.evolution import BYTES_EACH, SchemaNode


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
                f"(max_columns; bytes of a fixed width count once for each {BYTES_EACH}): use fewer fields, or allow "
                "more."
            )
        return more

    def uncovered(self, new: pa.Schema) -> str | None:
        """The first field, by its path, that is new or wider; None if there is none."""
        return self._root.uncovered("", pa.struct(list(new)))


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
