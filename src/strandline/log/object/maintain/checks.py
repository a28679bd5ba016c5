"""Checks of an object log's listing, and the inventory of its batch objects; :mod:`.verify` reads the values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Final

from strandline.log.findings import Severity
from strandline.log.object.head.edits import reference_to
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.log.writers.source import group_of, is_member, is_positioned, remembered
from strandline.model.head import ChunkRef, Entry, Head, MetadataRanges, WriterId, WriterState
from strandline.model.retention import SlotState
from strandline.storage.objects.store import ObjectInfo, ObjectStore

_BATCH: Final = re.compile(r"batches/([0-9]{16})/([0-9a-f]{32})\.batch")
_IN_A_GROUP: Final = -1
"""The number of a writer whose last batches were listed as a group: the position is only in the head."""
_FACTS: Final = {
    "sequences": attrgetter("first_sequence", "next_sequence"),
    "offsets": attrgetter("first", "next"),
    "bytes": attrgetter("size"),
    "listing times": attrgetter("listed_first", "listed_last"),
}
"""What a reference says of its chunk."""
_OLDER_WRITERS: Final = 1 << 16
"""Number of writers that are remembered beyond those in the head; older ones are not compared."""


def check_head(head: Head) -> Iterator[str]:
    """Faults of the head by itself."""
    if head.floor > head.next_offset:
        yield f"the log begins at offset {head.floor}, after its end at {head.next_offset}"
    if not head.swept_generation <= head.min_generation <= head.generation:
        yield (
            f"its generations are out of order: swept {head.swept_generation}, lowest {head.min_generation}, "
            f"now {head.generation}"
        )
    if head.floor == head.next_offset and (head.tail or any(head.levels)):
        yield "it lists batches although the log is empty"
    for writer, last in head.writers.items():
        if last.sequence >= head.next_sequence or last.first + last.count > head.next_offset:
            yield f"it remembers batch {last.number} of writer {writer} as sequence {last.sequence}, past the log's end"


def check_chunk(reference: ChunkRef, items: Sequence[Entry] | Sequence[ChunkRef]) -> Iterator[str]:
    """Differences between a chunk and its reference."""
    if not items:
        yield "is empty"
        return
    own = reference_to(items, reference.generation)
    for what, fact in _FACTS.items():
        if fact(own) != fact(reference):
            yield f"has the {what} {fact(own)}, but its reference says {fact(reference)}"
    for before, after in pairwise([item for item in items if isinstance(item, ChunkRef)]):
        if (before.next, before.next_sequence) != (after.first, after.first_sequence):
            yield f"refers to a chunk that ends at offset {before.next} and then to one that begins at {after.first}"


@dataclass(slots=True)
class ListingPosition:
    """Position in the listing, which the next entry has to continue. ``sequence`` None: not known yet."""

    offset: int
    sequence: int | None = None
    listed: int = 0
    generation: int = 0

    def skip(self, reference: ChunkRef) -> None:
        """Continue after a chunk that cannot be read."""
        self.offset, self.sequence = reference.next, reference.next_sequence
        self.listed = max(self.listed, reference.listed_last)

    def check(self, entry: Entry) -> Iterator[str]:
        """Faults of the next entry; moves the position past it."""
        if entry.first > self.offset:
            yield f"offsets {self.offset} to {entry.first - 1} are in no batch"
        elif entry.first < self.offset:
            yield f"offsets {entry.first} to {min(self.offset, entry.next) - 1} are in two batches"
        if self.sequence is not None and entry.sequence != self.sequence:
            yield f"the batch at offset {entry.first} has sequence {entry.sequence} and not {self.sequence}"
        if entry.count < 1:
            yield f"the batch at offset {entry.first} holds no record"
        if entry.listed < self.listed:
            yield f"the batch at offset {entry.first} was listed before the one that precedes it"
        if entry.oldest > entry.newest:
            yield f"the batch at offset {entry.first} has an oldest record that is younger than its newest"
        starts = MetadataRanges.of(entry.metadata).starts
        if starts != tuple(sorted(starts)) or (starts and starts[-1] >= entry.count):
            yield f"the batch at offset {entry.first} has metadata for records that it does not hold"
        yield from self._check_location(entry)
        self.offset, self.sequence = entry.next, entry.sequence + 1
        self.listed = max(self.listed, entry.listed)

    def _check_location(self, entry: Entry) -> Iterator[str]:
        name = batch_name(entry.location)
        if name is None:
            yield f"the batch at offset {entry.first} is at {entry.location!r}, where no batch of a log belongs"
        elif name[0] < self.generation - 1:
            # Only objects of the current generation and of the one before can be listed. The trimmer relies on it.
            yield (
                f"the batch at offset {entry.first} is of generation {name[0]}, and one before it of "
                f"{self.generation}: a trim may delete it"
            )
        else:
            self.generation = max(self.generation, name[0])


def batch_name(location: str) -> tuple[int, bytes] | None:
    """The generation and the identifier in a batch object's name; None for any other name."""
    name = _BATCH.fullmatch(location)
    return None if name is None else (int(name[1]), bytes.fromhex(name[2]))


@dataclass(slots=True)
class Writers:
    """Each writer's last batch, as far back as the head remembers and a little longer."""

    recent: dict[WriterId, WriterState] = field(default_factory=dict)
    older: dict[WriterId, WriterState] = field(default_factory=dict)

    def check(self, entry: Entry) -> Iterator[tuple[Severity, str]]:
        """Faults in the writer's number of the next entry."""
        if is_member(entry.writer):
            self._note(group_of(entry.writer), WriterState(_IN_A_GROUP, entry.sequence, 0, 0, entry.listed))
            return
        writer, number = remembered(entry.writer, entry.number)
        known = self.recent.pop(writer, None)
        forgotten = self.older.pop(writer, None)
        last = known or forgotten
        step = 0 if is_positioned(writer) else 1
        if last is not None and last.number != _IN_A_GROUP and entry.number != last.number + step:
            where = f"the batch at offset {entry.first}"
            # A log forgets silent producers by itself, and a source when it is told to.
            # A known source continues where it ended: only a forgotten one begins elsewhere, also further ahead. Were a
            # batch missing, offsets would be, too.
            begins_again = is_positioned(writer) or (known is None and entry.number == 0)
            if begins_again:
                yield Severity.NOTE, f"{where} begins writer {entry.writer} again, which the log had forgotten"
            else:
                what = f"{where} has number {entry.number} of writer {entry.writer}, whose last was {last.number}"
                yield Severity.DAMAGE, f"{what}: a batch is listed twice, or is missing"
        self._note(writer, WriterState(number, entry.sequence, entry.first, entry.count, entry.listed))

    def _note(self, writer: WriterId, last: WriterState) -> None:
        self.recent.pop(writer, None)  # it becomes the newest
        self.older.pop(writer, None)
        self.recent[writer] = last
        for memory, limit, next_one in ((self.recent, MAX_WRITERS, self.older), (self.older, _OLDER_WRITERS, None)):
            if len(memory) > limit:
                silent = next(iter(memory))
                state = memory.pop(silent)
                if next_one is not None:
                    next_one[silent] = state

    def compare(self, head: Head) -> Iterator[tuple[Severity, str]]:
        """Differences between the writers in the head and those of the listed batches."""
        for writer, problem in self._differences(head):
            if writer not in head.writers and is_positioned(writer):
                yield Severity.NOTE, f"has forgotten source {writer}: ingested again, its records are appended again"
            else:
                yield Severity.DAMAGE, f"is wrong: {problem}"

    def _differences(self, head: Head) -> Iterator[tuple[WriterId, str]]:
        for writer, last in self.recent.items():
            known = head.writers.get(writer)
            if known is None and last.number == _IN_A_GROUP:
                continue  # a job that the log remembers under another id, or not at all
            if known is None and last.sequence >= head.writers_floor:
                what = f"it does not know writer {writer}, which listed batch {last.number} at offset {last.first}"
                yield writer, what
            elif known is not None and last.number == _IN_A_GROUP:
                if known.sequence != last.sequence:
                    what = f"it remembers sequence {known.sequence} as the last of writer {writer}"
                    yield writer, f"{what}, but that is {last.sequence}"
            elif known is not None and known != last:
                what = f"it remembers number {known.number} as the last of writer {writer}"
                yield writer, f"{what}, but that is {last.number} at offset {last.first}"


def check_slot(state: SlotState, *, floor: int, end: int, pinned: bool) -> Iterator[tuple[Severity, str]]:
    """Faults of a slot of a log from ``floor`` to ``end``; ``pinned``: it is being moved."""
    if state.dropped:
        if state.expires is not None:
            yield Severity.NOTE, "belongs to a hold that is being released: the next trim finishes that"
        elif not pinned:
            yield Severity.DAMAGE, "says that the slot was dropped, but the head names it: drop it again"
    elif state.position > end:
        yield Severity.DAMAGE, f"is at offset {state.position}, past the log's end at {end}: reset the slot"
    elif state.invalid is not None:
        what = f"is invalid ({state.invalid.reason}): bootstrap its consumer again and reset it, or drop it"
        yield Severity.NOTE, what
    elif state.position < floor:
        what = f"needs offset {state.position}, but the log begins at {floor}. Bootstrap its consumer again"
        yield Severity.DAMAGE, what


@dataclass(slots=True)
class GenerationDifference:
    """Differences between listing and store in one generation.

    ``unlisted`` are paths of objects without an entry. The others are sequences of entries: ``absent`` ones have no
    object, ``resized`` ones have another size than listed, ``doubled`` ones share their object with an earlier entry.
    """

    generation: int
    unlisted: list[str] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    resized: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)


class Inventory:
    """Follows the store's listing of batch objects beside the log's own, one generation at a time."""

    def __init__(self, store: ObjectStore) -> None:
        self.strangers: list[str] = []
        """Names of objects that are not batch objects of the log."""
        self._listed: dict[int, dict[bytes, tuple[int, int]]] = {}
        """Size and sequence of each listed object, by generation and identifier."""
        self._differences: dict[int, GenerationDifference] = {}
        self._latest = 0
        self._stored = self._batches(store.list("batches/"))
        self._ahead = next(self._stored, None)

    def _batches(self, listing: Iterator[ObjectInfo]) -> Iterator[tuple[int, bytes, ObjectInfo]]:
        for info in listing:
            name = batch_name(info.path)
            if name is None:
                self.strangers.append(info.path)
            else:
                yield *name, info

    def add(self, location: str, size: int, sequence: int = -1) -> bool:
        """Add an object that an entry names, or (-1) that is to be deleted; False if it is no batch object."""
        name = batch_name(location)
        if name is None:
            return False
        generation, identifier = name
        self._latest = max(self._latest, generation)
        listed = self._listed.setdefault(generation, {})
        if identifier in listed and sequence >= 0:
            self._difference(generation).doubled.append(sequence)
        elif identifier not in listed:
            listed[identifier] = size, sequence
        return True

    def _difference(self, generation: int) -> GenerationDifference:
        return self._differences.setdefault(generation, GenerationDifference(generation))

    def compared(self, *, is_end: bool) -> Iterator[GenerationDifference]:
        """The generations that no further entry can belong to; at the end of the listing the rest."""
        end = None if is_end else self._latest - 1
        if end is not None and (not self._listed or min(self._listed) >= end):
            return
        while self._ahead is not None and (end is None or self._ahead[0] < end):
            generation, identifier, info = self._ahead
            size, sequence = self._listed.get(generation, {}).pop(identifier, (None, -1))
            if size is None:
                self._difference(generation).unlisted.append(info.path)
            elif size != info.size and sequence >= 0:
                self._difference(generation).resized.append(sequence)
            self._ahead = next(self._stored, None)
        for generation in [known for known in self._listed if end is None or known < end]:
            absent = [sequence for _, sequence in self._listed.pop(generation).values() if sequence >= 0]
            if absent:
                self._difference(generation).absent += absent
        for generation in sorted(known for known in self._differences if end is None or known < end):
            yield self._differences.pop(generation)
