"""Inventory of batch objects: compares listed with stored ones, generation by generation.

Only objects of the current generation and of the one before can be listed. So along the listing an entry of generation
``g`` ends all generations below ``g - 1``, and the store's own listing, whose names sort by generation, can be followed
beside it. What is held are 64 bytes for each object of the generations that are not ended, and about twice that while
one is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from strandline.log.object.maintain.checks import batch_name
from strandline.storage.store import ObjectInfo, ObjectStore


@dataclass(slots=True)
class Names:
    """Batch objects of one generation in columns."""

    generation: int
    names: bytearray = field(default_factory=bytearray)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    sequences: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, name: bytes, size: int, sequence: int = -1) -> None:
        """One more object."""
        self.names += name
        self.sizes.append(size)
        self.sequences.append(sequence)

    def columns(self) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Names, sizes and sequences for Arrow; nothing can be added any more."""
        rows = len(self)
        return (
            pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(self.names)]),
            pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(self.sizes)]),
            pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(self.sequences)]),
        )

    def path(self, index: int) -> str:
        """The whole name of one."""
        return f"batches/{self.generation:016d}/{self.names[16 * index : 16 * index + 16].hex()}.batch"


@dataclass(frozen=True, slots=True)
class GenerationDifference:
    """What does not fit in one generation.

    ``unlisted`` are paths of objects that no entry names. The others are sequences of entries: ``absent`` ones have no
    object, ``resized`` ones have another size than listed, ``doubled`` ones share their object with an earlier entry.
    """

    generation: int
    unlisted: list[str]
    absent: list[int]
    resized: list[int]
    doubled: list[int]


def compare(listed: Names, stored: Names) -> GenerationDifference:
    """Hold what is listed against what is stored. Listed names with the sequence -1 need not be there."""
    ours, sizes, sequences = listed.columns()
    theirs, stored_sizes, _ = stored.columns()
    needed = pc.greater_equal(sequences, 0)
    found = pc.index_in(ours, theirs)
    resized = pc.not_equal(sizes, pc.take(stored_sizes, found))  # null where there is none
    unlisted = pc.indices_nonzero(pc.is_null(pc.index_in(theirs, ours))).to_pylist()
    return GenerationDifference(
        generation=listed.generation,
        unlisted=[stored.path(index) for index in unlisted],
        absent=sequences.filter(pc.and_(needed, pc.is_null(found))).to_pylist(),
        resized=sequences.filter(pc.and_(needed, resized)).to_pylist(),
        doubled=_doubled(ours, sequences),
    )


def _doubled(names: pa.Array, sequences: pa.Array) -> list[int]:
    if pc.count_distinct(names).as_py() == len(names):
        return []
    first = pc.index_in(names, names).to_pylist()
    rows = zip(first, sequences.to_pylist(), strict=True)
    return [sequence for index, (earlier, sequence) in enumerate(rows) if index != earlier and sequence >= 0]


class Inventory:
    """Follows the store's listing of batch objects beside the log's own."""

    def __init__(self, store: ObjectStore) -> None:
        """Take stock of a log's batch objects; nothing is read yet."""
        self.strangers: list[str] = []
        """Names of objects that are not batch objects of the log."""
        self._store = store
        self._listed: dict[int, Names] = {}
        self._latest = 0
        self._stored: Iterator[ObjectInfo] | None = None
        self._ahead: ObjectInfo | None = None

    def add(self, location: str, size: int, sequence: int = -1) -> bool:
        """Note an object that an entry names, or (-1) that is about to be deleted; False if it is no batch object."""
        name = batch_name(location)
        if name is None:
            return False
        generation, identifier = name
        self._latest = max(self._latest, generation)
        if generation not in self._listed:
            self._listed[generation] = Names(generation)
        self._listed[generation].add(identifier, size, sequence)
        return True

    def ended(self) -> Iterator[GenerationDifference]:
        """The generations that no further entry can be of."""
        if self._listed and min(self._listed) < self._latest - 1:
            yield from self._below(self._latest - 1)

    def rest(self) -> Iterator[GenerationDifference]:
        """All that are left."""
        yield from self._below(None)

    def _below(self, end: int | None) -> Iterator[GenerationDifference]:
        for stored in self._generations(end):
            yield from self._alone(stored.generation)
            yield compare(self._listed.pop(stored.generation, Names(stored.generation)), stored)
        yield from self._alone(end)

    def _alone(self, end: int | None) -> Iterator[GenerationDifference]:
        """The generations below ``end`` of which entries are listed, and nothing is stored."""
        for generation in sorted(self._listed):
            if end is None or generation < end:
                yield compare(self._listed.pop(generation), Names(generation))

    def _generations(self, end: int | None) -> Iterator[Names]:
        """What is stored of each generation below ``end``, in order; the listing goes on from there the next time."""
        if self._stored is None:
            self._stored = self._store.list("batches/")
            self._ahead = next(self._stored, None)
        names: Names | None = None
        while self._ahead is not None:
            name = batch_name(self._ahead.path)
            if name is None:
                self.strangers.append(self._ahead.path)
            else:
                generation, identifier = name
                if end is not None and generation >= end:
                    break
                if names is not None and names.generation != generation:
                    yield names
                    names = None
                names = names or Names(generation)
                names.add(identifier, self._ahead.size)
            self._ahead = next(self._stored, None)
        if names is not None:
            yield names
