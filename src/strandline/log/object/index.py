"""From an offset to the entries that hold it: a search over the head and its chunks, never a scan of the backlog."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, Protocol, TypeVar

from strandline.formats.head import decode_entries, decode_references
from strandline.model.errors import CorruptData, NotFound
from strandline.model.head import ChunkRef, Entry, Head
from strandline.storage.store import ObjectStore

K = TypeVar("K")

_NEXT = attrgetter("next")
_CACHED: Final = 512


def chunk_path(reference: ChunkRef, level: int) -> str:
    """Where a chunk is. Its name follows from what it holds, so that two writers of the same chunk write the same."""
    sequences = f"{reference.first_sequence:020d}-{reference.next_sequence:020d}"
    return f"chunks/{reference.generation:016d}/{level:02d}-{sequences}.chunk"


class Chunks(Protocol):
    """Reads chunks."""

    def entries(self, reference: ChunkRef) -> tuple[Entry, ...]:
        """The entries of a chunk of level 0."""

    def references(self, reference: ChunkRef, level: int) -> tuple[ChunkRef, ...]:
        """The references in a chunk of a level above 0."""


class StoredChunks:
    """Chunks in a store. They never change, so what was read once is kept, up to a bound."""

    def __init__(self, store: ObjectStore) -> None:
        """Read from ``store``."""
        self._store = store
        self._entries: dict[ChunkRef, tuple[Entry, ...]] = {}
        self._references: dict[ChunkRef, tuple[ChunkRef, ...]] = {}

    def entries(self, reference: ChunkRef) -> tuple[Entry, ...]:
        """The entries of a chunk of level 0."""
        found = self._entries.get(reference)
        if found is None:
            found = decode_entries(*self._load(reference, 0))
            _keep(self._entries, reference, found)
        return found

    def references(self, reference: ChunkRef, level: int) -> tuple[ChunkRef, ...]:
        """The references in a chunk of a level above 0."""
        found = self._references.get(reference)
        if found is None:
            found = decode_references(*self._load(reference, level), level)
            _keep(self._references, reference, found)
        return found

    def _load(self, reference: ChunkRef, level: int) -> tuple[bytes | memoryview, str]:
        path = chunk_path(reference, level)
        where = f"{self._store.url}/{path}"
        try:
            return self._store.get(path).data, where
        except NotFound as error:
            raise CorruptData(
                f"{where} is missing: it lists offsets {reference.first} to {reference.next - 1}. Restore the object."
            ) from error


def _keep(cache: dict[ChunkRef, K], reference: ChunkRef, found: K) -> None:
    if len(cache) >= _CACHED:
        cache.pop(next(iter(cache)), None)
    cache[reference] = found


def entries_from(head: Head, offset: int, chunks: Chunks) -> Iterator[Entry]:
    """The entries from the one that holds ``offset`` on, in order; chunks are read only as far as one goes."""
    for level in reversed(range(len(head.levels))):
        yield from _below(head.levels[level], level, offset, chunks)
    yield from head.tail[bisect_right(head.tail, offset, key=_NEXT) :]


def _below(references: tuple[ChunkRef, ...], level: int, offset: int, chunks: Chunks) -> Iterator[Entry]:
    for reference in references[bisect_right(references, offset, key=_NEXT) :]:
        if level:
            yield from _below(chunks.references(reference, level), level - 1, offset, chunks)
        else:
            entries = chunks.entries(reference)
            yield from entries[bisect_right(entries, offset, key=_NEXT) :]
