"""Batches, writers and reads for the suite of logs."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa

from strandline.log.contract import Log
from strandline.model.cursor import NO_LIMIT, Cursor, Limit, Span
from strandline.model.head import WriterId
from strandline.model.records import READ_SCHEMA, Op, record_batch
from tests.contracts.slots import append

SOON = 120.0
"""Real seconds as a generous time limit."""


def records(*values: bytes | None) -> pa.RecordBatch:
    """A batch of puts with these values."""
    count = len(values)
    return record_batch(timestamps=range(count), ops=[Op.PUT] * count, keys=[None] * count, values=values)


def headers_named(*names: bytes) -> pa.MapArray:
    """Headers of one record with these names, which need not be text: Arrow looks at none."""
    values = pa.array([b"1"] * len(names), pa.binary())
    ends = pa.array([0, len(names)], pa.int32())
    return pa.MapArray.from_arrays(ends, pa.array(names, pa.binary()).view(pa.string()), values)


def writer_named(number: int) -> WriterId:
    """A writer's identity, the same for the same number."""
    return WriterId(UUID(int=number))


def fetched(spans: Sequence[Span], columns: Sequence[str] | None = None) -> pa.Table:
    """All records of these spans, as one table."""
    batches = [batch for span in spans for batch in span.fetch(columns)]
    schema = READ_SCHEMA if columns is None else pa.schema([READ_SCHEMA.field(name) for name in columns])
    return pa.Table.from_batches(batches, schema)


def content(log: Log, since: Cursor | None = None, limit: Limit = NO_LIMIT) -> list[tuple[int, bytes | None]]:
    """Offset and value of every record of a plan."""
    table = fetched(log.plan(log.start() if since is None else since, limit))
    return list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True))


__all__ = ["SOON", "append", "content", "fetched", "headers_named", "records", "writer_named"]
