"""Broken twins: cells and stores with a known fault, which the suites must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from strandline.errors import Conflict, Contended, TransientStorageError
from strandline.model.stamp import OpId
from strandline.storage.cell import CellCodec, Versioned
from strandline.storage.objects.store import Match, Object, ObjectInfo, ObjectStore, Payload, Precondition, Version

T = TypeVar("T")


class BlindRetryCell(Generic[T]):
    """Broken: after any error it reads and writes again, so that an edit with a lost answer is applied twice."""

    def __init__(self, store: ObjectStore, path: str, codec: CellCodec[T]) -> None:
        self._store = store
        self._path = path
        self._codec = codec

    def read(self) -> Versioned[T]:
        found = self._store.get(self._path)
        return Versioned(self._codec.decode(found.data, self._path).value, found.version)

    def update(self, op: OpId, edit: Callable[[T], T]) -> T:
        for _ in range(64):
            found = self._store.get(self._path)
            state = self._codec.decode(found.data, self._path)
            value = edit(state.value)
            if value is state.value:
                return value
            try:
                self._store.put_if(self._path, self._codec.encode(state.stamp(value, op)), Match(found.version))
            except (Conflict, TransientStorageError):
                continue
            return value
        raise Contended(self._path)


class LastWriterWinsCell(BlindRetryCell[T]):
    """Broken: puts without a condition, and so loses what others wrote meanwhile."""

    def update(self, op: OpId, edit: Callable[[T], T]) -> T:
        found = self._store.get(self._path)
        state = self._codec.decode(found.data, self._path)
        if op in state.recent:
            return state.value
        value = edit(state.value)
        self._store.put(self._path, self._codec.encode(state.stamp(value, op)))
        return value


class BlindRetryStore:
    """A store whose client repeats conditional writes, so that its own success is reported as a conflict."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, path: str) -> Object:
        return self._inner.get(path)

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        return self._inner.get_range(path, start, length)

    def put(self, path: str, data: Payload) -> None:
        self._inner.put(path, data)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        for _ in range(3):
            try:
                return self._inner.put_if(path, data, when)
            except TransientStorageError:
                continue
        return self._inner.put_if(path, data, when)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, start_after=start_after)

    def delete(self, path: str) -> None:
        self._inner.delete(path)
