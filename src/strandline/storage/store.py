"""The object-store contract: small, and the same on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol, runtime_checkable

from strandline.errors import CorruptData

Version = NewType("Version", str)
"""An opaque token for one content of one object; equal tokens mean equal content."""

Payload = bytes | memoryview | Sequence[bytes | memoryview]
"""What can be put: one buffer, or several that are written one after another without joining them in memory."""


LARGEST_OBJECT: Final = (1 << 31) - 1
"""No object that is read whole is larger: what is there instead is refused unread."""


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
    """An object's bytes; its version is worked out only when asked for."""

    data: bytes | memoryview
    _version: Callable[[], Version] = field(repr=False)

    @property
    def version(self) -> Version:
        """The token to pass in a :class:`Match`."""
        return self._version()


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of objects. Every call may block, and may raise a ``StorageError``.

    ``TransientStorageError`` from a write means that it may or may not have landed. All stores can be pickled:
    the copy opens the same place in another process, unless the place lives in this process's memory.
    """

    @property
    def url(self) -> str:
        """Where this store is, for messages and for opening it again."""

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``; ``CorruptData`` for one of 2 GiB or more."""

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        """Exactly ``length`` bytes from ``start``; ``InvalidInput`` if the object is shorter, ``NotFound``."""

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing what is there. Returned means durable."""

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds, atomically; returns the new version once it is durable.

        ``AlreadyExists`` or ``Conflict`` if it does not hold.
        """

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose path starts with ``prefix``, after ``start_after``, in path order, fetched in pages."""

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""


def payload_parts(data: Payload) -> list[bytes | memoryview]:
    """The buffers of a payload, as byte views."""
    parts = [data] if isinstance(data, bytes | memoryview) else list(data)
    return [part.cast("B") if isinstance(part, memoryview) else part for part in parts]


def check_whole(size: int, url: str, path: str) -> None:
    """``CorruptData`` if an object is larger than any that is read whole."""
    if size > LARGEST_OBJECT:
        raise CorruptData(
            f"{url}/{path} has more than {LARGEST_OBJECT:,} bytes, which no object has that is read whole: somebody "
            "else put it there. Restore the object."
        )
