"""A key-value store in memory, for tests and for state within one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from uuid import UUID

from strandline.errors import AlreadyExists, Conflict, CursorExpired, Gap
from strandline.kv.contract import Ended, KeyListing
from strandline.kv.local_watch import CurrentValue, LocalSubscription
from strandline.model.arguments import Positive, Timeout, checked, shown
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Key, KeyValueEntry, KeyVersion, Scope, Updates, as_bytes, as_key
from strandline.model.records import Op
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process

_FILTERED: Final = 4096
"""Most changes that one take filters by scope."""


class _RetainedChanges(NamedTuple):
    """The retained changes as columns, from version ``first`` on."""

    first: int
    ops: list[int]
    keys: list[bytes]
    values: list[bytes | None]


@bound_to_process()
@checked
class MemoryKeyValue:
    """Keyed values in memory. Satisfies :class:`~strandline.kv.contract.KeyValue`; thread-safe.

    At least the last ``history`` changes are retained for late and slow watchers.

    >>> kv = MemoryKeyValue()
    >>> version = kv.put("node.1", b"up")
    >>> kv.get("node.1"), kv.keys("node.")
    (b'up', [b'node.1'])
    >>> with kv.watch() as watch:
    ...     [update.value for update in watch.take(10, timeout=0)]
    [b'up']
    """

    def __init__(self, *, history: Positive = 1 << 20, env: Env = SYSTEM) -> None:
        """An empty key-value store with a fresh identity."""
        self._history = history
        self._stream = env.chance.uuid()
        # Watchers read retained changes without the lock: the lists only grow, and a change is visible once `_next`,
        # which is set last, is past it. Every other edit replaces the lists by copies.
        self._kept = _RetainedChanges(0, [], [], [])
        self._next = 0
        self._state: dict[bytes, tuple[bytes, int]] = {}
        self._gone: set[bytes] = set()
        self._ended = False
        self._waiting = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._origin = Origin("A key-value store in memory", self)

    @property
    def stream(self) -> UUID:
        """The identity that cursors carry."""
        return self._stream

    def put(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value unconditionally."""
        if type(key) is not bytes or type(value) is not bytes:
            key, value = as_key(key), as_bytes(value)
        with self._lock:
            return self._write(Op.PUT, key, value)

    def delete(self, key: Key) -> None:
        """Delete the key, if present."""
        with self._lock:
            self._write(Op.DELETE, as_key(key), None)

    def purge(self, key: Key) -> None:
        """Delete the key and its values in the history."""
        name = as_key(key)
        with self._lock:
            first, ops, keys, values = self._kept
            gone = [index for index, key in enumerate(keys) if key == name and ops[index] == Op.PUT]
            if gone:
                ops, values = list(ops), list(values)
                for index in gone:
                    ops[index], values[index] = Op.PURGE, None
                self._kept = _RetainedChanges(first, ops, keys, values)
            self._write(Op.PURGE, name, None)

    def create(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value of an absent key, else ``AlreadyExists``."""
        name, value = as_key(key), as_bytes(value)
        with self._lock:
            if name in self._state:
                raise AlreadyExists(f"The key {shown(name)} is present; use update, or put to replace it.")
            return self._write(Op.PUT, name, value)

    def update(self, key: Key, value: bytes, expected: KeyVersion) -> KeyVersion:
        """Set the value if the key is at this version, else ``Conflict``."""
        name, value = as_key(key), as_bytes(value)
        with self._lock:
            self._expect(name, expected)
            return self._write(Op.PUT, name, value)

    def delete_with_version(self, key: Key, expected: KeyVersion) -> None:
        """Delete the key if it is at this version, else ``Conflict``."""
        name = as_key(key)
        with self._lock:
            self._expect(name, expected)
            self._write(Op.DELETE, name, None)

    def _expect(self, key: bytes, expected: KeyVersion) -> None:
        found = self._state.get(key)
        if found is None or found[1] != expected:
            now = "absent" if found is None else f"at version {found[1]}"
            raise Conflict(
                f"The key {shown(key)} is {now}, not at version {expected}: read it again. Nothing was changed."
            )

    def _write(self, op: int, key: bytes, value: bytes | None) -> int:
        version = self._next
        _, ops, keys, values = self._kept
        ops.append(op)
        keys.append(key)
        values.append(value)
        self._next = version + 1
        if value is not None:
            self._state[key] = (value, version)
            if self._gone:
                self._gone.discard(key)
        else:
            self._state.pop(key, None)
            self._gone.add(key)
        if len(keys) > 2 * self._history:
            self._forget(self._next - self._history)
        if self._waiting:
            self._changed.notify_all()
        return version

    def trim(self, below: int) -> None:
        """Drop the changes below a version, but no current value. Cursors below it expire."""
        with self._lock:
            self._forget(min(below, self._next))
            self._changed.notify_all()

    def evict(self, key: Key) -> None:
        """Evict a key as a store with limits does: without a change event, and with all changes up to now."""
        with self._lock:
            self._state.pop(as_key(key), None)
            self._forget(self._next)

    def end(self) -> None:
        """End the stream: watches get the remaining changes, then :class:`Ended`."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()

    def _forget(self, below: int) -> None:
        first, ops, keys, values = self._kept
        count = max(0, below - first)
        self._kept = _RetainedChanges(first + count, ops[count:], keys[count:], values[count:])

    def get(self, key: Key) -> bytes | None:
        """The value, None if the key is absent."""
        found = self._state.get(as_key(key))
        return None if found is None else found[0]

    def entry(self, key: Key) -> KeyValueEntry | None:
        """The value with its version, None if the key is absent."""
        name = as_key(key)
        found = self._state.get(name)
        return None if found is None else KeyValueEntry(name, *found)

    def keys(self, prefix: Key = b"") -> list[bytes]:
        """The present keys with the prefix, sorted."""
        wanted = as_key(prefix)
        with self._lock:
            return sorted(key for key in self._state if key.startswith(wanted))

    def scan(self, prefix: Key = b"") -> Iterator[KeyValueEntry]:
        """The entries whose keys have the prefix, sorted, as of the call."""
        wanted = as_key(prefix)
        with self._lock:
            found = [KeyValueEntry(key, *held) for key, held in self._state.items() if key.startswith(wanted)]
        return iter(sorted(found))

    def listing(self, scope: Scope = EVERYTHING) -> KeyListing:
        """The present keys in scope, and the deleted ones."""
        with self._lock:
            live = frozenset(key for key in self._state if key in scope)
            return KeyListing(live, frozenset(key for key in self._gone if key in scope))

    def watch(self, scope: Scope = EVERYTHING) -> MemoryKeyValueSubscription:
        """The current values in scope, then changes."""
        with self._lock:
            found = [(version, key, value) for key, (value, version) in self._state.items() if key in scope]
            return MemoryKeyValueSubscription(self, scope, Cursor(self._stream, self._next), found)

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> MemoryKeyValueSubscription:
        """Changes at or after the cursor."""
        if cursor is None:
            return self.watch(scope)
        with self._lock:
            if cursor.log_id != self._stream:
                raise CursorExpired(
                    f"The cursor {cursor} is of another key-value store than {self._stream}: start a full watch."
                )
            first = self._kept.first
            if not first <= cursor.next <= self._next:
                raise CursorExpired(
                    f"The cursor is at {cursor.next}, and the key-value store holds changes {first} up to "
                    f"{self._next}: start a full watch."
                )
            return MemoryKeyValueSubscription(self, scope, cursor, None)

    def changes(self, scope: Scope, position: int, most: Positive, timeout: Timeout) -> Updates | Ended | None:
        """The changes from a position on; for subscriptions."""
        if position == self._next and timeout > 0:
            with self._lock:
                if position == self._next and not self._ended:
                    self._waiting += 1
                    self._changed.wait(timeout)
                    self._waiting -= 1
        ended, end = self._ended, self._next  # in this order, before the changes: no change follows the end
        first, ops, keys, values = self._kept
        if position < first:
            raise Gap(
                f"Changes {position} up to {first} were trimmed before this watch took them: resume from the applied "
                "cursor, which resyncs the rest."
            )
        if position == end:
            return Ended() if ended else None
        chosen = slice(position - first, min(end, position + (most if scope.everything else _FILTERED)) - first)
        ops, keys, values = ops[chosen], keys[chosen], values[chosen]
        if scope.everything:
            upto = position + len(keys)
            return Updates(ops, keys, values, range(position, upto), Cursor(self._stream, upto))
        hits = [index for index, key in enumerate(keys) if key in scope]
        upto = position + (len(keys) if len(hits) <= most else hits[most])
        hits = hits[:most]
        columns: list[list[Any]] = [[column[index] for index in hits] for column in (ops, keys, values)]
        versions = [position + index for index in hits]
        return Updates(columns[0], columns[1], columns[2], versions, Cursor(self._stream, upto))


@bound_to_process()
@checked
class MemoryKeyValueSubscription(LocalSubscription):
    """A watch of a key-value store in memory."""

    def __init__(self, kv: MemoryKeyValue, scope: Scope, cursor: Cursor, current: list[CurrentValue] | None) -> None:
        """Use :meth:`MemoryKeyValue.watch`."""
        super().__init__(cursor, current)
        self._kv = kv
        self._scope = scope
        self._origin = Origin("A watch of a key-value store in memory", self)

    def _changes(self, most: int, timeout: float) -> Updates | Ended | None:
        taken = self._kv.changes(self._scope, self._cursor.next, most, timeout)
        if isinstance(taken, Updates) and taken.upto is not None:
            self._cursor = taken.upto
        return taken
