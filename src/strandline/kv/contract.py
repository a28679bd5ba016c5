"""What every bucket of keyed values promises. ``strandline.testing.key_values.KeyValueContract`` is its test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable
from uuid import UUID

from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Entry, Key, KeyVersion, Scope, Updates


@dataclass(frozen=True, slots=True)
class Listed:
    """A full watch has given all values that were current when it began; the stream goes on from this cursor."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream has ended in good order: nothing will ever come again."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys that are present, and those that are known to have been deleted rather than evicted.

    ``deleted`` is None if the backend cannot tell the one from the other.
    """

    live: frozenset[bytes]
    deleted: frozenset[bytes] | None = None


@runtime_checkable
class Reader(Protocol):
    """Reads what is current. Prefixes are byte prefixes. All calls may block and raise ``StorageError``.

    A listing is whole or an error, never a part.
    """

    def get(self, key: Key) -> bytes | None:
        """The value, which may be empty; None if the key is absent."""

    def entry(self, key: Key) -> Entry | None:
        """The value with its version; None if the key is absent."""

    def keys(self, prefix: Key = b"") -> list[bytes]:
        """The keys that are present and begin with the prefix, sorted."""

    def scan(self, prefix: Key = b"") -> Iterator[Entry]:
        """The entries that are present and whose keys begin with the prefix, sorted by key."""

    def listing(self, scope: Scope = EVERYTHING) -> Listing:
        """Which keys in scope are present now, and which are known to be deleted: what a resync goes by."""


@runtime_checkable
class Writer(Protocol):
    """Changes keys. Each call answers when its change is as durable as the backend makes it."""

    def put(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value, whatever was there; returns its version."""

    def delete(self, key: Key) -> None:
        """Make the key absent; absent is fine. Watchers are told."""

    def purge(self, key: Key) -> None:
        """Make the key absent and let its earlier values go. Watchers are told."""

    def create(self, key: Key, value: bytes) -> KeyVersion:
        """Set the value of an absent key; ``AlreadyExists`` if it is present, and then nothing is changed."""

    def update(self, key: Key, value: bytes, expected: KeyVersion) -> KeyVersion:
        """Set the value if the key is present at exactly this version, else ``Conflict``, and nothing is changed."""

    def delete_with_version(self, key: Key, expected: KeyVersion) -> None:
        """Make the key absent if it is present at exactly this version, else ``Conflict``; nothing is changed then."""


@runtime_checkable
class Subscription(Protocol):
    """A watch under way: changes in the order of the stream. A context manager; one thread takes from it."""

    @property
    def stream(self) -> UUID:
        """The identity of the stream; the cursors of its updates carry it."""

    def take(self, most: int, timeout: float) -> Updates | Listed | Ended | None:
        """The next changes, at most so many; None if none came in time.

        Changes of keys out of scope are never given, but the cursor moves over them. After the initial values of a
        full watch comes :class:`Listed`, once. ``Gap`` if changes were lost to retention before they were given:
        nothing past the gap is ever given. ``StorageError`` if the connection is lost for good.
        """

    def close(self) -> None:
        """Let go of the stream. Closing twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@runtime_checkable
class Watcher(Protocol):
    """Gives changes as they happen."""

    @property
    def stream(self) -> UUID:
        """The identity of the stream as it is now; may block."""

    def watch(self, scope: Scope = EVERYTHING) -> Subscription:
        """The current values in scope, in the order of their versions; then :class:`Listed`; then changes."""

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> Subscription:
        """Only what came at or after the cursor. No cursor means the full watch.

        ``CursorExpired`` if changes after it may no longer be retained, if it is of another stream (a bucket of the
        same name that was created anew), or past the stream's end.
        """


@runtime_checkable
class KeyValue(Reader, Writer, Watcher, Protocol):
    """All three in one."""
