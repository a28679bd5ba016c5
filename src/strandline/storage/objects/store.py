"""The object-store contract: small, and the same on every backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol, runtime_checkable

from strandline.errors import CorruptData
from strandline.model.cursor import SECOND
from strandline.storage.clock import Clock

Version = NewType("Version", str)
"""An opaque token for one content of one object; equal tokens mean equal content."""

Payload = bytes | memoryview | Sequence[bytes | memoryview]
"""Content to put: one buffer, or several that are written one after another without joining them in memory."""


LARGEST_OBJECT: Final = (1 << 31) - 1
"""Largest object that is read whole; larger ones are refused unread."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Precondition: the object does not exist."""


@dataclass(frozen=True, slots=True)
class Match:
    """Precondition: the object still has this version."""

    version: Version


Precondition = Absent | Match
ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One row of a listing."""

    path: str
    size: int
    modified: int
    """When it was last written, in microseconds since the epoch by the store's clock; many know only whole seconds."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object's bytes; its version is computed on demand."""

    data: bytes | memoryview
    _version: Callable[[], Version] = field(repr=False)

    @property
    def version(self) -> Version:
        """The token to pass in a :class:`Match`."""
        return self._version()


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of objects. Every call may block, and may raise a ``StorageError``.

    After a ``TransientStorageError`` of a write its outcome is unknown. All stores can be pickled: the copy opens the
    same store in another process, unless it is in this process's memory.
    """

    @property
    def url(self) -> str:
        """The address of this store, for messages and for opening it again."""

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``; ``CorruptData`` for one of 2 GiB or more."""

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        """Exactly ``length`` bytes from ``start``; ``InvalidInput`` if the object is shorter, ``NotFound``."""

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing an existing object. Durable when it returns."""

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds, atomically; returns the new version once it is durable.

        ``AlreadyExists`` or ``Conflict`` if it does not hold.
        """

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose path starts with ``prefix``, after ``start_after``, in path order, fetched in pages."""

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""


def copy_object(store: ObjectStore, source: str, target: str) -> None:
    """Copy an object within a store, durably, replacing an existing one; or ``NotFound``.

    A store with a method ``copy`` does it by itself; otherwise the object is read and written here.
    """
    copy: Callable[[str, str], None] | None = getattr(store, "copy", None)
    if copy is None:
        store.put(target, store.get(source).data)
    else:
        copy(source, target)


def payload_parts(data: Payload) -> list[bytes | memoryview]:
    """The buffers of a payload, as byte views."""
    parts = [data] if isinstance(data, bytes | memoryview) else list(data)
    return [part.cast("B") if isinstance(part, memoryview) else part for part in parts]


def check_whole(size: int, url: str, path: str) -> None:
    """``CorruptData`` if an object is larger than any that is read whole."""
    if size > LARGEST_OBJECT:
        raise CorruptData(
            f"{url}/{path} has more than {LARGEST_OBJECT:,} bytes, more than any such object: another program "
            "wrote it. Restore the object."
        )


_LOGGER: Final = logging.getLogger(__name__)
_SERVERS: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")


def has_own_clock(url: str) -> bool:
    """Whether a store has a clock of its own, and does not use the writer's."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in _SERVERS


def measure_skew(store: ObjectStore, path: str, data: Payload, *, clock: Clock) -> int | None:
    """By at least how many microseconds this machine's clock is ahead of the store's (negative: behind).

    Writes an object and reads its modification time. 0: both may show the same time; None: the store does not list the
    object. ``path`` should be alone in its folder, which is listed.
    """
    before = clock.now()
    store.put(path, data)
    after = clock.now()
    written = next((item.modified for item in store.list(path) if item.path == path), None)
    if written is None:
        return None
    latest = written + (SECOND - 1 if written % SECOND == 0 else 0)  # many stores know only whole seconds
    if written > after:
        return after - written
    return max(0, before - latest)


def cautious_now(store: ObjectStore, path: str, *, clock: Clock) -> int:
    """The earlier of this machine's time and the store's, if it has a clock, in microseconds since the epoch.

    For deletions by age: a single clock that is ahead makes no object old. ``path`` is written and deleted.
    """
    if not has_own_clock(store.url):
        return clock.now()
    skew = measure_skew(store, path, b"", clock=clock)
    store.delete(path)
    if skew is not None and skew > SECOND:
        _LOGGER.warning(
            "This machine's clock is %d s ahead of that of %s: correct the wrong one. Records expire by age "
            "when they are old by both clocks.",
            skew // SECOND, store.url,
        )  # fmt: skip
    return clock.now() - max(0, skew or 0)
