"""The contract of key-value stores. ``tests/contracts/key_values`` tests it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable
from uuid import UUID

from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Key, KeyValueEntry, KeyVersion, Scope, Updates


@dataclass(frozen=True, slots=True)
class Listed:
    """End of the initial values of a full watch; the stream continues at this cursor."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream has ended: no further change follows."""


@dataclass(frozen=True, slots=True)
class KeyListing:
    """The keys that are present, and those known to be deleted rather than evicted.

    ``deleted`` is None if the backend cannot distinguish the two.
    """

    live: frozenset[bytes]
    deleted: frozenset[bytes] | None = None


@runtime_checkable
class KeyValueReader(Protocol):
    """Reads current values. Prefixes are byte prefixes. All calls may block and raise ``StorageError``.

    A listing is complete or an error, never partial.
    """

    def get(self, key: Key) -> bytes | None:
        """The value, which may be empty; None if the key is absent."""

    def entry(self, key: Key) -> KeyValueEntry | None:
        """The value with its version; None if the key is absent."""

    def keys(self, prefix: Key = b"") -> list[bytes]:
        """The present keys with the prefix, sorted."""

    def scan(self, prefix: Key = b"") -> Iterator[KeyValueEntry]:
        """The present entries whose keys have the prefix, sorted by key."""

    def listing(self, scope: Scope = EVERYTHING) -> KeyListing:
        """The present keys in scope, and those known to be deleted; a resync uses it."""


@runtime_checkable
class KeyValueWriter(Protocol):
    """Changes keys. Each call returns when its change is as durable as the backend makes it."""

    def put(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value unconditionally; returns its version."""

    def delete(self, key: Key) -> None:
        """Delete the key, if present. Watchers get the change."""

    def purge(self, key: Key) -> None:
        """Delete the key and its history. Watchers get the change."""

    def create(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value of an absent key; ``AlreadyExists``, and no change, if it is present."""

    def update(self, key: Key, value: bytes, expected: KeyVersion) -> KeyVersion:
        """Set the value if the key is present at exactly this version; otherwise ``Conflict``, and no change."""

    def delete_with_version(self, key: Key, expected: KeyVersion) -> None:
        """Delete the key if it is present at exactly this version; otherwise ``Conflict``, and no change."""


@runtime_checkable
class KeyValueSubscription(Protocol):
    """A running watch: changes in stream order. A context manager; one thread takes from it."""

    @property
    def stream(self) -> UUID:
        """The identity of the stream, which its cursors carry."""

    def take(self, most: int, timeout: float) -> Updates | Listed | Ended | None:
        """The next changes, up to ``most``; None if none arrived within ``timeout`` seconds.

        Changes of keys out of scope are left out, but the cursor moves past them. After the initial values of a full
        watch comes :class:`Listed`, once. ``Gap`` if retention removed changes before they were taken: nothing past the
        gap is ever returned. ``CursorExpired``, as ``watch_from``, if a watcher finds out only now that its cursor
        has expired. ``StorageError`` if the connection is lost for good.
        """

    def close(self) -> None:
        """Close the watch. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class Watcher(Protocol):
    """Watches changes."""

    @property
    def stream(self) -> UUID:
        """The current identity of the stream; may block."""

    def watch(self, scope: Scope = EVERYTHING) -> KeyValueSubscription:
        """A full watch: the current values in scope in version order, then :class:`Listed`, then changes."""

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> KeyValueSubscription:
        """Changes at or after the cursor. Without a cursor, a full watch.

        ``CursorExpired`` if changes after it may no longer be retained, if it is of another stream (the key-value
        store was deleted and created again), or past the end of the stream.
        """


@runtime_checkable
class KeyValue(KeyValueReader, KeyValueWriter, Watcher, Protocol):
    """A key-value store: reads, writes and watches."""
