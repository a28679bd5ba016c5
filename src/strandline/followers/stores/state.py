"""Stores: the exactly-once rule, the base class of stores with their state in memory, and the memory store."""

from __future__ import annotations

import threading
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Diverged, InvalidInput, NotReady
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates, as_bytes
from strandline.model.records import READ_SCHEMA, Op
from strandline.model.sink import StorePosition, not_a_state, remaining
from strandline.model.snapshot import Snapshot
from strandline.storage.closing import Closing
from strandline.storage.fork_check import Origin, bound_to_process


@checked
class RuledStore(Closing):
    """The exactly-once rule and the resync of a :class:`~strandline.model.sink.Store`; one write at a time."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        """Held during a whole write."""
        self._closed = False

    @abstractmethod
    def position(self) -> StorePosition:
        """The position in the stream that it follows."""

    @abstractmethod
    def _write(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Store records and position, all or nothing."""

    @abstractmethod
    def close(self) -> None:
        """Close the store; stored data stays. Idempotent."""

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidInput(f"{self!r} is closed: open it again.")

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The cursor in that log; ``Diverged`` if the store follows another log, ``NotReady`` during a resync."""
        at = self._settled(self.position()).cursor
        if at is not None and at.log_id != log_id:
            raise Diverged(
                f"{self!r} follows {at.log_id}, not {log_id}: give this log a store of its own, or resync that one."
            )
        return at

    def apply(self, records: pa.Table | Updates, *, since: Cursor, upto: Cursor) -> None:
        """Store the range and its cursor, exactly once; see :class:`~strandline.model.sink.Sink`.

        Updates are not converted to a table and back: that would double the work.
        """
        with self._writing:
            at = self.cursor(since.log_id)
            if isinstance(records, Updates) and (records.columnar or at not in (None, since)):
                records = records.table()
            todo = remaining(records, since=since, upto=upto, at=at)
            if todo is not None:
                self._write(todo, StorePosition(upto))

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark that a resync with a stream is running."""
        with self._writing:
            self._write(None, StorePosition(self.position().cursor, stream))

    def resync(self, records: pa.Table | Updates) -> None:
        """Apply puts and deletes without the rule of offsets; the cursor stays."""
        with self._writing:
            self._write(records, self._unsettled())

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync, at a cursor of its stream."""
        with self._writing:
            stream = self._unsettled().resync
            if cursor.log_id != stream:
                raise InvalidInput(
                    f"The resync of {self!r} began with {stream} and cannot end in {cursor.log_id}: begin it again."
                )
            self._write(None, StorePosition(cursor))

    def _settled(self, position: StorePosition) -> StorePosition:
        """The position; ``NotReady`` during a resync."""
        if position.resync is not None:
            raise NotReady(
                f"{self!r} is in a resync with {position.resync}: its state is valid again when the resync has ended."
            )
        return position

    def _unsettled(self) -> StorePosition:
        """The position during a resync; ``InvalidInput`` without one."""
        position = self.position()
        if position.resync is None:
            raise InvalidInput(f"No resync of {self!r} has begun: call begin_resync() first.")
        return position

    def _exported_cursor(self, position: StorePosition) -> Cursor:
        """The cursor of a snapshot of this state; ``NotReady`` without one."""
        cursor = self._settled(position).cursor
        if cursor is None:
            raise NotReady(f"{self!r} has no cursor yet to continue from: let it follow first.")
        return cursor


_PLACES: Final = tuple(READ_SCHEMA.get_field_index(name) for name in ("op", "key", "value"))
_ONE_BY_ONE: Final = 64
"""Up to this many new keys are inserted one by one into the sorted keys; more are appended and sorted."""


class KeyChange(NamedTuple):
    """Records as Python objects: keys, values, and operations (None if all are puts)."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    ops: bytes | None


def change_of(records: pa.Table | pa.RecordBatch | Updates) -> KeyChange:
    """The change of keyed state by records. A null value is empty; a record without key is ``NullKey``."""
    if isinstance(records, Updates):
        return _change_of_updates(records)
    # Access to a column by number is faster, and most tables have the schema of a log.
    op, key, value = _PLACES if records.schema.equals(READ_SCHEMA) else ("op", "key", "value")
    keys, values = records.column(key), records.column(value)
    if keys.null_count:
        raise not_a_state(_first_without_key(records))
    listed = values.to_pylist()
    if values.null_count:
        listed = [value or b"" for value in listed]
    return KeyChange(keys.to_pylist(), listed, _operations(records.column(op)))


def _change_of_updates(updates: Updates) -> KeyChange:
    ops, keys, values, _ = updates.columns
    if None in keys:
        raise not_a_state(updates.columns[3][list(keys).index(None)])
    if None in values:
        values = [value or b"" for value in values]
    return KeyChange(keys, values, _unless_puts(bytes(ops)))


def _operations(ops: pa.ChunkedArray | pa.Array) -> bytes | None:
    """The operations as bytes, or None if all of them are puts."""
    chunks = ops.chunks if isinstance(ops, pa.ChunkedArray) else [ops]
    # An int8 column without nulls is its bytes: no cost per record.
    plain = b"".join(memoryview(chunk.buffers()[1])[chunk.offset :][: len(chunk)] for chunk in chunks if len(chunk))
    return _unless_puts(plain)


def _unless_puts(ops: bytes) -> bytes | None:
    return ops if ops.count(Op.PUT) != len(ops) else None


def _first_without_key(records: pa.Table | pa.RecordBatch) -> int:
    if "offset" not in records.schema.names:
        return -1
    return int(pc.min(records.filter(pc.is_null(records.column("key"))).column("offset")).as_py())


@final
class KeyedState:
    """Keys and values, and the sorted keys, which are computed on first use and then maintained. Not thread-safe."""

    __slots__ = ("_order", "_stale", "live")

    def __init__(self) -> None:
        self.live: dict[bytes, bytes] = {}
        self._order: list[bytes] | None = None
        self._stale: set[bytes] = set()  # keys that may have been added or deleted since the last sort

    def take(self, change: KeyChange) -> None:
        """Apply a change; without a Python loop if all are puts."""
        keys, values, ops = change
        before = len(self.live)
        if ops is None:
            self.live.update(zip(keys, values, strict=True))
            if len(self.live) == before:
                return  # no new keys: the order is unchanged
        else:
            live = self.live
            for op, key, value in zip(ops, keys, values, strict=True):
                if op == Op.PUT:
                    live[key] = value
                else:
                    live.pop(key, None)
        if self._order is not None:
            self._stale.update(keys)
            if len(self._stale) > len(self._order):
                self._order = None
                self._stale.clear()

    def size(self) -> int:
        """Total bytes of all keys and values; linear in their number."""
        return sum(map(len, self.live)) + sum(map(len, self.live.values()))

    def view(self, prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """The current keys with the prefix, sorted, and their values: references, not copies."""
        order = self._sorted()
        length = len(prefix)
        first = bisect_left(order, prefix)
        end = bisect_right(order, prefix, lo=first, key=lambda key: key[:length])
        keys = order[first:end]
        return keys, list(map(self.live.__getitem__, keys))

    def _sorted(self) -> list[bytes]:
        if self._order is None:
            self._order = sorted(self.live)
        elif self._stale:
            self._refresh(self._order)
        return self._order

    def _refresh(self, order: list[bytes]) -> None:
        came, went = [], set()
        for key in self._stale:
            at = bisect_left(order, key)
            known = at < len(order) and order[at] == key
            if known and key not in self.live:
                went.add(key)
            elif not known and key in self.live:
                came.append(key)
        self._stale.clear()
        if len(went) > _ONE_BY_ONE:
            order[:] = [key for key in order if key not in went]
        else:
            for key in went:
                del order[bisect_left(order, key)]
        if len(came) > _ONE_BY_ONE:
            order.extend(came)
            order.sort()  # sorted runs are merged, not sorted again
        else:
            for key in came:
                insort(order, key)


@checked(own=("get",))
class KeyedStore(RuledStore):
    """A store with its state in memory: everything of :class:`~strandline.model.sink.Store` except exports.

    A subclass makes a write durable before the state changes (:meth:`_keep`). One write at a time; readers wait for
    the change in memory, never for the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = KeyedState()
        self._position = StorePosition(None)
        self._reading = threading.Lock()
        """Held while the state changes or is read. Acquired after the writers' lock."""

    @abstractmethod
    def _keep(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Store records and position atomically; the state changes only if this returns."""

    def _after_write(self) -> None:
        """Called after each write: for occasional work such as compaction."""

    def position(self) -> StorePosition:
        """The position in the stream that it follows."""
        return self._position

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""
        name = as_bytes(key)
        with self._reading:
            return self._state.live.get(name)

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call."""
        start = as_bytes(prefix)
        with self._reading:
            keys, values = self._state.view(start)
        return zip(keys, values, strict=True)

    def _write(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        self._refuse_closed()
        change = None if records is None or not len(records) else change_of(records)
        self._keep(records if change else None, after)
        with self._reading:
            if change:
                self._state.take(change)
            self._position = after
        self._after_write()

    def close(self) -> None:
        """Close the store; it can still be read. Idempotent."""
        with self._writing:
            self._closed = True


@bound_to_process()
@final
@checked
class MemoryStore(KeyedStore):
    """A :class:`~strandline.model.sink.Store` with all its guarantees, except that it ends with the process.

    It cannot be exported: there are no files to seal.

    >>> from uuid import UUID
    >>> from strandline.model.cursor import Cursor
    >>> from strandline.model.keyed import Update, Updates
    >>> from strandline.model.records import Op
    >>> start = Cursor(UUID(int=1), 0)
    >>> updates = Updates.of([Update(Op.PUT, b"b", b"2", 0), Update(Op.PUT, b"a", b"1", 1)], start)
    >>> store = MemoryStore()
    >>> store.apply(updates.table(), since=start, upto=updates.upto)
    >>> list(store.range()), store.get(b"c"), store.position().cursor.next
    ([(b'a', b'1'), (b'b', b'2')], None, 2)
    """

    def __init__(self) -> None:
        """An empty store."""
        super().__init__()
        self._origin = Origin("A store in memory", self)

    def __repr__(self) -> str:
        return "MemoryStore()"

    def _keep(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Do nothing: the state ends with the process."""

    def export_to(self, folder: Address) -> Snapshot:
        """Refused: ``InvalidInput``, or ``NotReady`` during a resync."""
        self._settled(self._position)
        folder = as_folder(folder)
        raise InvalidInput(
            f"A store in memory has no files to seal in {folder}: use AppendLogStore or RocksStore to export."
        )
