"""Tasks that build a snapshot: the newest record per key in a range, then the state of a share of the keys.

The first stage writes one scratch object per range: an index of lengths, then an Arrow stream for each share. The
second reads its share of all of them, in the order of offsets. A checksum is before each stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CorruptData
from strandline.followers.stores.append_log_file import PIECE_BYTES, PIECE_ROWS
from strandline.formats.checksum import crc32c
from strandline.log.read.span_tasks import records_between
from strandline.model.cursor import Span
from strandline.model.records import READ_SCHEMA, Op, halved
from strandline.model.sink import not_a_state
from strandline.storage.objects.store import ObjectStore
from strandline.tables.rows.hashing import HASH_BITS, key_hashes
from strandline.tables.rows.kinds import kept_rows, newest_per_key, taken_rows

CHANGES: Final = pa.schema([READ_SCHEMA.field(name) for name in ("offset", "op", "key", "value")])
"""The columns of a record from which a state is computed."""
_STATE: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_MANY_ROWS: Final = 1 << 19
_LENGTH: Final = 8
"""Bytes of a length in the index."""
_CHECKSUM: Final = 4
"""Bytes of a checksum."""


@dataclass(frozen=True, slots=True)
class ReduceTask:
    """Writes the newest record of each key among some offsets, deletes too, whole or not at all. Repeatable."""

    store: ObjectStore
    shares: int
    """How many shares of the keys there are: a power of two."""
    name: str
    first: int
    next: int
    spans: tuple[Span, ...]

    def __call__(self) -> int:
        """Reduce the range; returns how many keys it has. ``NullKey`` for a record without key."""
        rows = newest_records(records_between(self.spans, self.first, self.next, CHANGES.names))
        streams = [
            _checked(share.schema, share.to_batches(max_chunksize=PIECE_ROWS)) if share.num_rows else memoryview(b"")
            for share in _by_share(rows, self.shares)
        ]
        index = array("q", map(len, streams))
        self.store.put(self.name, [memoryview(index).cast("B"), *streams])
        return int(rows.num_rows)


def newest_records(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The newest record of each key, deletes too; ``NullKey`` for a record without key."""
    waiting, rows, limit = list[pa.RecordBatch](), 0, _MANY_ROWS
    for batch in batches:
        if batch.column("key").null_count:
            missing = batch.filter(pc.is_null(batch.column("key")))
            raise not_a_state(missing.column("offset")[0].as_py())
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= limit:  # it has grown to twice its size
            reduced = newest_per_key(pa.Table.from_batches(waiting, CHANGES))
            waiting, rows = reduced.to_batches(), reduced.num_rows
            limit = max(_MANY_ROWS, 2 * rows)
    return newest_per_key(pa.Table.from_batches(waiting, CHANGES))


def state_of(newest: pa.Table) -> pa.Table:
    """Keys and values after these records, which are the newest of their keys."""
    puts = kept_rows(newest, pc.equal(newest.column("op"), int(Op.PUT)))
    return pa.table([puts.column("key"), pc.fill_null(puts.column("value"), b"")], schema=_STATE)


def _by_share(rows: pa.Table, shares: int) -> Iterator[pa.Table]:
    """The rows of each share, by the first bits of their keys' hashes."""
    import numpy as np

    depth = shares.bit_length() - 1
    numbers = key_hashes(rows.column("key")).astype(np.uint64) >> np.uint64(HASH_BITS - depth)
    ordered = taken_rows(rows, pa.array(np.argsort(numbers, kind="stable")))
    at = 0
    for count in np.bincount(numbers.astype(np.int64), minlength=shares).tolist():
        yield ordered.slice(at, count)
        at += count


def _checked(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> memoryview:
    """Batches as an Arrow stream, with a checksum before it."""
    out = pa.BufferOutputStream()
    out.write(bytes(_CHECKSUM))
    with pa.ipc.new_stream(out, schema, options=_COMPRESSED) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = memoryview(bytearray(out.getvalue()))
    data[:_CHECKSUM] = crc32c(data[_CHECKSUM:]).to_bytes(_CHECKSUM, "little")
    return data


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Writes the state of one share of the keys, from the reduced ranges in the order of offsets. Repeatable."""

    store: ObjectStore
    sources: tuple[str, ...]
    upto: int
    """Where the snapshot ends."""
    shares: int
    number: int

    def __call__(self) -> str:
        """Merge the share; returns the name of its object, which says how many pieces and keys it has."""
        found = [CHANGES.empty_table(), *(self._read(name) for name in self.sources)]
        state = state_of(newest_per_key(pa.concat_tables(found)))
        # Within the limits of a piece; a row above them gets a batch of its own.
        batches = state.to_batches(max_chunksize=PIECE_ROWS)
        pieces = [piece for batch in batches for piece in halved(batch, PIECE_BYTES)]
        name = merged_name(self.upto, self.number, len(pieces), state.num_rows)
        self.store.put(name, _checked(_STATE, pieces))
        return name

    def _read(self, name: str) -> pa.Table:
        index = array("q", bytes(self.store.get_range(name, 0, _LENGTH * self.shares)))
        start, size = _LENGTH * self.shares + sum(index[: self.number]), index[self.number]
        if not size:
            return CHANGES.empty_table()
        return _opened(self.store.get_range(name, start, size), name).read_all()


def merged_prefix(upto: int) -> str:
    """How the names of the states at an offset begin: a task of an earlier build may still write its own."""
    return f"merged-{upto:020d}-"


def merged_name(upto: int, number: int, pieces: int, keys: int) -> str:
    """The name of a share's state.

    >>> counts_in(merged_name(100, 3, 2, 70_000))
    (3, 2, 70000)
    """
    return f"{merged_prefix(upto)}{number:05d}-{pieces:08d}-{keys:012d}.arrow"


def counts_in(name: str) -> tuple[int, int, int]:
    """Number, pieces and keys of a share, by the name of its state."""
    number, pieces, keys = name.removesuffix(".arrow").split("-")[2:]
    return int(number), int(pieces), int(keys)


def states(store: ObjectStore, names: Iterable[str]) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Keys and values of merged shares, piece by piece."""
    for name in names:
        for batch in _opened(store.get(name).data, name):
            yield batch.column(0), batch.column(1)


def _opened(data: bytes | memoryview, name: str) -> pa.RecordBatchStreamReader:
    """Reads a stream; ``CorruptData`` if it is not the one that was written."""
    stream = memoryview(data)[_CHECKSUM:]
    if crc32c(stream) != int.from_bytes(data[:_CHECKSUM], "little"):
        raise CorruptData(f"The scratch object {name} is damaged: delete the scratch, and begin again.")
    return pa.ipc.open_stream(pa.py_buffer(stream))
