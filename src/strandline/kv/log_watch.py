"""A keyed log: the value of every key at one offset in memory, and watches that give changes as Arrow tables."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Contended, CursorExpired, Gap, InvalidInput, NotFound, NullKey, StrandlineError
from strandline.kv.contract import Ended
from strandline.kv.local_watch import CurrentValue, LocalSubscription
from strandline.log.contract import Log
from strandline.log.read.planning import cursor_after
from strandline.log.read.reading import Arrival, fetch_in_order, read_spans, wait_for_more
from strandline.model.cursor import Bounds, Cursor, Limit, Span
from strandline.model.keyed import UNKNOWN, Scope, Updates
from strandline.model.records import READ_SCHEMA, Op
from strandline.model.sink import Store
from strandline.storage.fork_check import Origin, bound_to_process

VersionedValue: TypeAlias = tuple[bytes, int]
"""A value and its version; :data:`UNKNOWN` for values from the base."""

_COLUMNS: Final = ("offset", "op", "key", "value")
_LOADS: Final = 3


class LogFold:
    """The state of every key at one offset of a log. Thread-safe; reads on demand.

    It starts at offset 0, or with a base at its cursor. If the next record is no longer retained, every call that needs
    it raises ``CursorExpired``: a partial state is never returned.
    """

    def __init__(self, log: Log, base: Store | None) -> None:
        """Fold ``log`` on top of ``base``, which has a cursor of that log."""
        self._log = log
        self._base = base
        self._held: dict[bytes, VersionedValue] = {}
        self._at: Cursor | None = None
        self._lock = threading.RLock()

    def catch_up(self) -> int:
        """Read to the current end of the log; returns the offset of the state."""
        with self._lock:
            bounds = self._log.bounds()
            at = self._begin(bounds) if self._at is None else self._at
            self._at = at = self._read(at, bounds)
            return at.next

    def within(self, scope: Scope) -> tuple[int, list[tuple[bytes, VersionedValue]]]:
        """The end of the log, and all keys in scope there, unordered."""
        with self._lock:
            end = self.catch_up()
            if scope.everything:
                return end, list(self._held.items())
            return end, [item for item in self._held.items() if item[0] in scope]

    def present(self, keys: list[bytes]) -> tuple[int, dict[bytes, VersionedValue]]:
        """The end of the log, and the given keys that are present there."""
        with self._lock:
            end = self.catch_up()
            return end, {key: self._held[key] for key in keys if key in self._held}

    def absorb(self, first: int, changes: list[tuple[Op, bytes, bytes | None]]) -> None:
        """Apply changes appended at offset ``first`` without reading them back, if they come next."""
        with self._lock:
            if self._at is None or self._at.next != first:
                return
            for version, (op, key, value) in enumerate(changes, first):
                self._set(op, key, value, version)
            self._at = self._at.at(first + len(changes))

    def _begin(self, bounds: Bounds) -> Cursor:
        if self._base is None:
            if bounds.first > 0:
                raise CursorExpired(
                    f"The log {self._log.log_id} begins at offset {bounds.first}, so not all of its keys are "
                    "known any more: give the key-value store a store made from a snapshot as its base."
                )
            return Cursor(self._log.log_id, 0)
        cursor, held = _loaded(self._base, self._log)
        if cursor.next < bounds.first:
            raise CursorExpired(
                f"The base is at offset {cursor.next} and the log begins at {bounds.first}: give the key-value store "
                "a store made from a newer snapshot as its base."
            )
        if cursor.next > bounds.next:
            raise CursorExpired(
                f"The base is at offset {cursor.next}, past the log's end at {bounds.next}: the log was restored or "
                "replaced. Give the key-value store a store that was made from this log."
            )
        self._log.plan(cursor, Limit(batches=1))  # Diverged for a cursor of another history
        self._held = held
        return cursor

    def _read(self, at: Cursor, bounds: Bounds) -> Cursor:
        """Read from a cursor to the end of the log; keeps what was read before an error."""
        if at.next >= bounds.next:
            return at
        if at.next < bounds.first:
            raise CursorExpired(
                f"The log {self._log.log_id} was trimmed to offset {bounds.first} while this key-value store had read "
                f"up to {at.next}: open it again, with a store made from a newer snapshot as its base."
            )
        for upto, batches in read_spans(self._log.plan, at, bounds.next, _COLUMNS):
            for batch in batches:
                self._fold(batch)
            self._at = at = upto
        return at

    def _fold(self, batch: pa.RecordBatch) -> None:
        """Apply one batch atomically."""
        offsets, ops, keys, values = batch.columns
        refuse_null_keys(offsets, keys)
        numbers, names, contents = offsets.to_pylist(), keys.to_pylist(), values.to_pylist()
        if not values.null_count and pc.max(ops).as_py() == Op.PUT:
            self._held.update(zip(names, zip(contents, numbers, strict=True), strict=True))
        else:
            for version, op, key, value in zip(numbers, ops.to_pylist(), names, contents, strict=True):
                self._set(op, key, value, version)

    def _set(self, op: int, key: bytes, value: bytes | None, version: int) -> None:
        if op == Op.PUT:
            self._held[key] = (value or b"", version)
        else:
            self._held.pop(key, None)


def refuse_null_keys(offsets: pa.Array, keys: pa.Array) -> None:
    """``NullKey`` if a record has no key: such a log holds no keyed values."""
    if keys.null_count:
        first = pc.min(pc.filter(offsets, pc.is_null(keys))).as_py()
        raise NullKey(
            f"The record at offset {first} has no key, so this log cannot be read as a key-value store: "
            "give the keyed values a log of their own, or stop producing records without key."
        )


def _loaded(base: Store, log: Log) -> tuple[Cursor, dict[bytes, VersionedValue]]:
    for _ in range(_LOADS):
        before = base.cursor(log.log_id)
        if before is None:
            raise InvalidInput("The base of the key-value store has no cursor: import a snapshot of this log first.")
        held = {key: (value, UNKNOWN) for key, value in base.range()}
        # Values of a base that moves meanwhile would not belong to its cursor.
        if base.cursor(log.log_id) == before:
            return before, held
    raise Contended(
        "The base of the key-value store is being written to: give a store that is not being written to. Try again."
    )


_AT_ONCE: Final = Limit(batches=64)
_AHEAD: Final = 32 << 20
"""Bytes to prefetch."""


class _WatchedChanges(NamedTuple):
    """The changes in scope of one span, and the cursor after the span."""

    table: pa.Table
    upto: Cursor


@bound_to_process()
class LogKeyValueSubscription(LocalSubscription):
    """A watch of a log. Arrow filters by scope; no row becomes a Python object here.

    For changes that are all out of scope, ``take`` returns empty :class:`Updates` with an advanced cursor.
    """

    def __init__(self, log: Log, scope: Scope, cursor: Cursor, current: list[CurrentValue] | None) -> None:
        """Use :meth:`~strandline.kv.log.LogKeyValue.watch`."""
        super().__init__(cursor, current)
        self._log = log
        self._scope = scope
        self._rest: _WatchedChanges | None = None
        self._fetching: Generator[tuple[Span, list[pa.RecordBatch]], None, None] | None = None
        self._at_end = False
        self._origin = Origin(f"A watch of {log!r}", self)

    def _changes(self, most: int, timeout: float) -> Updates | Ended | None:
        # After an empty take, wait for the log before planning: waiting backs off.
        taken = None if self._at_end and timeout > 0 else self._gather(most)
        if taken is None and timeout > 0:
            arrival = wait_for_more(self._log, self._cursor, timeout)
            if arrival is Arrival.END:
                return Ended()
            if arrival is Arrival.MORE and not self._closed:
                taken = self._gather(most)
        self._at_end = taken is None
        return taken

    def close(self) -> None:
        """Close the watch; the log stays open."""
        super().close()
        self._drop_plan()

    def _gather(self, most: int) -> Updates | None:
        """The available changes of one plan; the position advances past them, and stays if this raises."""
        tables: list[pa.Table] = []
        before, count = self._cursor, 0
        while count < most:
            try:
                piece = self._next_piece(fresh=self._cursor == before)
            except StrandlineError:
                if self._cursor == before:
                    raise
                break  # return the changes before the error; the next take raises it
            if piece is None:
                break
            room = most - count
            if piece.table.num_rows > room:
                self._rest = _WatchedChanges(piece.table.slice(room), piece.upto)
                last = piece.table.column("offset")[room - 1].as_py()
                piece = _WatchedChanges(piece.table.slice(0, room), piece.upto.within_batch(last + 1))
            tables.append(piece.table)
            count += piece.table.num_rows
            self._cursor = piece.upto
        if self._cursor == before:
            return None
        return Updates.of_table(tables[0] if len(tables) == 1 else pa.concat_tables(tables), self._cursor)

    def _next_piece(self, *, fresh: bool) -> _WatchedChanges | None:
        """The next piece; None at the end of the log, or at the end of the plan if not ``fresh``."""
        if self._rest is not None:
            piece, self._rest = self._rest, None
            return piece
        try:
            if self._fetching is None:
                if not fresh:
                    return None
                spans = self._log.plan(self._cursor, _AT_ONCE)
                if not spans:
                    return None
                self._fetching = fetch_in_order(spans, ahead=_AHEAD)
            found = next(self._fetching, None)
        except CursorExpired as error:
            raise self._gap() from error
        except NotFound as error:
            self._drop_plan()
            self._check_retained(error)
            raise
        except BaseException:
            self._drop_plan()
            raise
        if found is None:
            self._drop_plan()
            return self._next_piece(fresh=fresh)
        span, batches = found
        return _WatchedChanges(self._in_scope(batches), cursor_after(self._cursor, span))

    def _in_scope(self, batches: list[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(batches, READ_SCHEMA)
        try:
            refuse_null_keys(table.column("offset"), table.column("key"))
        except StrandlineError:
            self._drop_plan()
            raise
        if not self._scope.everything:
            table = table.filter(self._scope.mask(table.column("key")))
        return _with_plain_values(table)

    def _check_retained(self, cause: NotFound) -> None:
        """``Gap`` if the missing batch was trimmed, rather than lost to damage."""
        try:
            self._log.plan(self._cursor, Limit(batches=1))
        except CursorExpired:
            raise self._gap() from cause

    def _gap(self) -> Gap:
        return Gap(
            f"The log {self.stream} was trimmed to offset {self._log.bounds().first} before this watch had taken the "
            f"changes from {self._cursor.next} on: resume from the applied cursor, which resyncs the rest."
        )

    def _drop_plan(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            with suppress(ValueError):  # a taker is using it: it ends after that
                fetching.close()


def _with_plain_values(table: pa.Table) -> pa.Table:
    """Normalise values: never null for puts, always null for removals."""
    values = table.column("value")
    puts = pc.equal(table.column("op"), int(Op.PUT))
    if pc.all(pc.equal(pc.is_valid(values), puts), min_count=0).as_py():
        return table
    plain = pc.if_else(puts, pc.fill_null(values, b""), pa.scalar(None, pa.binary()))
    return table.set_column(table.schema.get_field_index("value"), READ_SCHEMA.field("value"), plain)
