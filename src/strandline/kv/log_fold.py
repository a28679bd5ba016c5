"""In-memory state of a keyed log: the value of every key at one offset."""

from __future__ import annotations

import threading
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import Contended, CursorExpired, InvalidInput, NullKey
from strandline.log.contract import Log
from strandline.log.reading import read_spans
from strandline.model.cursor import Bounds, Cursor, Limit
from strandline.model.keyed import UNKNOWN, Scope
from strandline.model.records import Op
from strandline.model.sink import Store

Held: TypeAlias = tuple[bytes, int]
"""A value and its version; :data:`UNKNOWN` for values from the base."""

_COLUMNS: Final = ("offset", "op", "key", "value")
_LOOKS: Final = 3


class LogFold:
    """The state of every key at one offset of a log. Thread-safe; reads on demand.

    It starts at offset 0, or with a base at its cursor. If the next record is no longer retained, every call that needs
    it raises ``CursorExpired``: a partial state is never returned.
    """

    def __init__(self, log: Log, base: Store | None) -> None:
        """Fold ``log`` on top of ``base``, which has a cursor of that log."""
        self._log = log
        self._base = base
        self._held: dict[bytes, Held] = {}
        self._at: Cursor | None = None
        self._lock = threading.RLock()

    def catch_up(self) -> int:
        """Read to the current end of the log; returns the offset of the state."""
        with self._lock:
            bounds = self._log.bounds()
            at = self._begin(bounds) if self._at is None else self._at
            self._at = at = self._read(at, bounds)
            return at.next

    def get(self, key: bytes) -> Held | None:
        """The value and version of a key at the end of the log; None if absent."""
        with self._lock:
            self.catch_up()
            return self._held.get(key)

    def within(self, scope: Scope) -> tuple[int, list[tuple[bytes, Held]]]:
        """The end of the log, and all keys in scope there, unordered."""
        with self._lock:
            end = self.catch_up()
            if scope.everything:
                return end, list(self._held.items())
            return end, [item for item in self._held.items() if item[0] in scope]

    def look(self, keys: list[bytes]) -> tuple[int, dict[bytes, Held]]:
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

    # --- inside ------------------------------------------------------------------------------------------------

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
        for behind, batches in read_spans(self._log, at, bounds.next, _COLUMNS):
            for batch in batches:
                self._fold(batch)
            self._at = at = behind
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


def _loaded(base: Store, log: Log) -> tuple[Cursor, dict[bytes, Held]]:
    for _ in range(_LOOKS):
        before = base.cursor(log.log_id)
        if before is None:
            raise InvalidInput("The base of the key-value store has no cursor: import a snapshot of this log first.")
        held = {key: (value, UNKNOWN) for key, value in base.range()}
        # Values of a base that moves meanwhile would not belong to its cursor.
        if base.cursor(log.log_id) == before:
            return before, held
    raise Contended("The base of the key-value store is being written to: give a store at rest. Try again.")
