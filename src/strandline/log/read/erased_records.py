"""Records whose values were erased: a purge is left in the place of each. Pure functions on Arrow."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.model.records import Op

ERASED_COLUMNS: Final = ("value", "headers")
_PURGE: Final = Op.PURGE.value


def erased(batch: pa.RecordBatch, hits: pa.BooleanArray) -> pa.RecordBatch:
    """The batch with purges in place of some records: their values and headers are gone, the rest stays."""
    kept = pc.if_else(hits, None, pa.arange(0, batch.num_rows))
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns |= {name: columns[name].take(kept) for name in ERASED_COLUMNS}
    columns["op"] = pc.if_else(hits, pa.scalar(_PURGE, columns["op"].type), columns["op"])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def same_unless_erased(before: pa.Table, now: pa.Table) -> bool:
    """Whether both have the same records, apart from values that were erased in the second."""
    if before.equals(now):
        return True
    if before.num_rows != now.num_rows or not before.num_rows:
        return False
    (mine,), (other,) = before.combine_chunks().to_batches(), now.combine_chunks().to_batches()
    is_erased = pc.equal(other.column("op"), _PURGE)
    for name in ERASED_COLUMNS:  # a purge may have headers of its own
        is_erased = pc.and_(is_erased, pc.is_null(other.column(name)))
    return bool(erased(mine, is_erased).equals(other))
