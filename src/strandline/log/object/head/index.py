"""Search in the head and its chunks: from an offset, sequence or time to the entries, without a scan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from strandline.errors import CorruptData, NotFound
from strandline.formats.object.head import decode_entries, decode_references
from strandline.model.head import ChunkRef, Cut, Entry, Head
from strandline.storage.objects.store import ObjectStore

_CACHED: Final = 1024

Listed = Sequence[tuple[int, ChunkRef]]
"""References with their levels, oldest first."""


def chunk_path(reference: ChunkRef, level: int) -> str:
    """The path of a chunk. Its name follows from its content: two writers of the same chunk write the same object."""
    sequences = f"{reference.first_sequence:020d}-{reference.next_sequence:020d}"
    return f"chunks/{reference.generation:016d}/{level:02d}-{sequences}.chunk"


class Chunks(Protocol):
    """Reads chunks."""

    def read(self, reference: ChunkRef, level: int) -> tuple[Any, ...]:
        """The entries of a chunk of level 0, or the references in one of a level above."""


class StoredChunks:
    """Chunks in a store. They never change, so they are cached, up to a limit."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._items: dict[tuple[int, ChunkRef], tuple[Any, ...]] = {}

    def read(self, reference: ChunkRef, level: int) -> tuple[Any, ...]:
        """The entries of a chunk of level 0, or the references in one of a level above."""
        found = self._items.get((level, reference))
        if found is None:
            path = chunk_path(reference, level)
            where = f"{self._store.url}/{path}"
            try:
                data = self._store.get(path).data
            except NotFound as error:
                what = f"it lists offsets {reference.first} to {reference.next - 1}. Restore the object."
                raise MissingChunk(f"{where} is missing: {what}") from error
            if level:
                found = tuple(_within(child, reference) for child in decode_references(data, where, level))
            else:
                found = tuple(_no_later(entry, reference) for entry in decode_entries(data, where))
            if len(self._items) >= _CACHED:
                self._items.pop(next(iter(self._items)), None)
            self._items[level, reference] = found
        return found


def _no_later(entry: Entry, reference: ChunkRef) -> Entry:
    """An entry with the listing time that its reference allows: times in the future are corrected only there."""
    return entry if entry.listed <= reference.listed_last else replace(entry, listed=reference.listed_last)


def _within(child: ChunkRef, reference: ChunkRef) -> ChunkRef:
    last = reference.listed_last
    if child.listed_last <= last:
        return child
    return replace(child, listed_first=min(child.listed_first, last), listed_last=last)


class MissingChunk(CorruptData):
    """A chunk that is still needed is missing."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A value that grows along the log: of an entry, and of the last entry below a reference."""

    entry: Callable[[Entry], int]
    reference: Callable[[ChunkRef], int]


_OFFSET = _Order(lambda entry: entry.next - 1, lambda reference: reference.next - 1)
_SEQUENCE = _Order(lambda entry: entry.sequence, lambda reference: reference.next_sequence - 1)
_LISTED = _Order(lambda entry: entry.listed, lambda reference: reference.listed_last)


def references_of(head: Head) -> list[tuple[int, ChunkRef]]:
    """The references in the head with their levels, oldest first."""
    return [(level, reference) for level in reversed(range(len(head.levels))) for reference in head.levels[level]]


def entries_from(head: Head, offset: int, chunks: Chunks) -> Iterator[Entry]:
    """The entries from the one that holds ``offset`` on, in order; chunks are read only when they are needed."""
    return _from(head, offset, _OFFSET, chunks)


def entries_from_sequence(head: Head, sequence: int, chunks: Chunks) -> Iterator[Entry]:
    """The entries from the one with this sequence on."""
    return _from(head, sequence, _SEQUENCE, chunks)


def entries_listed_since(head: Head, time: int, chunks: Chunks) -> Iterator[Entry]:
    """The entries from the first one on that was listed at ``time`` (microseconds) or later."""
    return _from(head, time, _LISTED, chunks)


def _from(head: Head, value: int, order: _Order, chunks: Chunks) -> Iterator[Entry]:
    for level in reversed(range(len(head.levels))):
        yield from _below(head.levels[level], level, value, order, chunks)
    yield from head.tail[bisect_left(head.tail, value, key=order.entry) :]


def _below(references: tuple[ChunkRef, ...], level: int, value: int, order: _Order, chunks: Chunks) -> Iterator[Entry]:
    for reference in references[bisect_left(references, value, key=order.reference) :]:
        items = chunks.read(reference, level)
        if level:
            yield from _below(items, level - 1, value, order, chunks)
        else:
            yield from items[bisect_left(items, value, key=order.entry) :]


def bytes_from(head: Head, offset: int, chunks: Chunks) -> int:
    """How many bytes are listed from the entry that holds ``offset`` on; reads one chunk of each level at most."""
    size = sum(entry.size for entry in head.tail if entry.next > offset)
    for level, references in enumerate(head.levels):
        size += _size_from(references, level, offset, chunks)
    return size


def _size_from(references: tuple[ChunkRef, ...], level: int, offset: int, chunks: Chunks) -> int:
    size = 0
    for reference in references:
        if reference.first >= offset:
            size += reference.size
        elif reference.next > offset and level:
            size += _size_from(chunks.read(reference, level), level - 1, offset, chunks)
        elif reference.next > offset:
            size += sum(entry.size for entry in chunks.read(reference, 0) if entry.next > offset)
    return size


def start_of_newest(head: Head, size: int, chunks: Chunks) -> int:
    """The first offset of the newest entries that together take at most ``size`` bytes; a search, no scan."""
    start = head.next_offset
    for entry in reversed(head.tail):
        size -= entry.size
        if size < 0:
            return start
        start = entry.first
    for level, references in enumerate(head.levels):
        for reference in reversed(references):
            if reference.size > size:
                return _start_within(reference, level, size, chunks)
            size -= reference.size
            start = reference.first
    return max(start, head.floor)


def _start_within(reference: ChunkRef, level: int, size: int, chunks: Chunks) -> int:
    start = reference.next
    for item in reversed(chunks.read(reference, level)):
        if item.size > size:
            return _start_within(item, level - 1, size, chunks) if isinstance(item, ChunkRef) else start
        size -= item.size
        start = item.first
    return start


def newest_first(references: Listed, entries: Iterable[Entry], since: int, chunks: Chunks) -> Iterator[Entry]:
    """The entries from offset ``since`` on, in ``entries`` and below ``references``, from the newest back.

    Chunks below ``since`` may be deleted already, and are not read.
    """
    yield from (entry for entry in reversed(tuple(entries)) if entry.next > since)
    for level, reference in reversed(references):
        if reference.next <= since:
            return
        if level:
            children = [(level - 1, child) for child in chunks.read(reference, level)]
            yield from newest_first(children, (), since, chunks)
        else:
            yield from newest_first((), chunks.read(reference, 0), since, chunks)


def is_listed(chunk: str, level: int, sequence: int, references: Listed, chunks: Chunks) -> bool:
    """Whether the chunk of this path, of a level and with a first sequence, is one of the references or below one."""
    for above, reference in references:
        if above < level or not reference.first_sequence <= sequence < reference.next_sequence:
            continue
        if chunk_path(reference, above) == chunk:
            return True
        if above > level:
            children = [(above - 1, child) for child in chunks.read(reference, above)]
            return is_listed(chunk, level, sequence, children, chunks)
    return False


@dataclass(frozen=True, slots=True)
class DeletedObject:
    """An object to be deleted. ``records`` counts those of a batch object, and is 0 for any other object."""

    path: str
    records: int
    size: int


def objects_of(cut: Cut, chunks: Chunks) -> Iterator[list[DeletedObject]]:
    """The objects that a cut took out of the listing, in groups, each to be deleted before the next.

    A chunk follows the objects that are found through it: after an interruption the rest is found again. A
    missing chunk was handled before.
    """
    for level, reference in cut.chunks:
        yield from _cut_below(reference, level, cut, chunks)
    yield [_gone(entry) for entry in cut.entries]


def _cut_below(reference: ChunkRef, level: int, cut: Cut, chunks: Chunks) -> Iterator[list[DeletedObject]]:
    try:
        if level:
            for child in chunks.read(reference, level):
                if child.next > cut.since and child.first < cut.upto:
                    yield from _cut_below(child, level - 1, cut, chunks)
        else:
            entries = chunks.read(reference, 0)
            yield [_gone(entry) for entry in entries if entry.first >= cut.since and entry.next <= cut.upto]
    except MissingChunk:
        return
    if reference.next <= cut.upto:
        yield [DeletedObject(chunk_path(reference, level), 0, 0)]


def _gone(entry: Entry) -> DeletedObject:
    return DeletedObject(entry.location, entry.count, entry.size)
