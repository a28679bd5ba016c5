"""The object-store contract in a dictionary: the reference that other backends are compared with."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator

from strandline.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.objects.store import Absent, Object, ObjectInfo, Payload, Precondition, Version, payload_parts


class PlainStore:
    """Objects in this process's memory; every call is atomic. Cannot be pickled, and ends with the process.

    >>> store = PlainStore()
    >>> store.put("a/b", [b"one ", b"two"])
    >>> store.get("a/b").data
    b'one two'
    """

    def __init__(self, url: str = "plain://test", *, clock: Clock = CLOCK) -> None:
        """An empty store; ``url`` is only its name, and ``clock`` the source of modification times."""
        self._url = url
        self._clock = clock
        self._objects: dict[str, tuple[bytes, Version, int]] = {}
        self._writes = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its name."""
        return self._url

    def __reduce__(self) -> tuple[object, ...]:
        raise InvalidInput(f"{self._url} is in this process's memory and cannot be sent to another one.")

    def __repr__(self) -> str:
        return f"PlainStore({self._url!r})"

    def _find(self, path: str) -> tuple[bytes, Version, int]:
        found = self._objects.get(path)
        if found is None:
            raise NotFound(f"There is no object {self._url}/{path}.")
        return found

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""
        data, version, _ = self._find(path)
        return Object(data, lambda: version)

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        """Exactly ``length`` bytes from ``start``."""
        data = self._find(path)[0]
        if start < 0 or length < 0 or start + length > len(data):
            raise InvalidInput(f"{self._url}/{path} ends before byte {start + length}.")
        return memoryview(data)[start : start + length]

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing an existing object."""
        content = b"".join(payload_parts(data))
        with self._lock:
            self._set(path, content)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds."""
        content = b"".join(payload_parts(data))
        with self._lock:
            found = self._objects.get(path)
            if isinstance(when, Absent):
                if found is not None:
                    raise AlreadyExists(f"{self._url}/{path} exists already.")
            elif found is None or found[1] != when.version:
                raise Conflict(f"{self._url}/{path} is gone or was changed by another writer; read it again.")
            return self._set(path, content)

    def _set(self, path: str, content: bytes) -> Version:
        pieces = path.split("/")
        if "\0" in path or not all(pieces) or "." in pieces or ".." in pieces:
            raise InvalidInput(f"{path!r} cannot be the path of an object: its parts must be plain names.")
        self._writes += 1
        version = Version(str(self._writes))
        self._objects[path] = (content, version, self._clock.now())
        return version

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose path starts with ``prefix``, as of the start of the listing."""
        with self._lock:
            rows = sorted(
                (path, len(data), modified)
                for path, (data, _, modified) in self._objects.items()
                if path.startswith(prefix)
            )
        for row in rows[bisect_right(rows, start_after, key=lambda row: row[0]) :]:
            yield ObjectInfo(*row)

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""
        with self._lock:
            self._objects.pop(path, None)
