"""Verification of an object log's listing: each listed object exists with its size, once; others are reported.

Reads no batches, and needs little memory: follows the listing chunk by chunk, and compares objects with the listing
generation by generation (see :mod:`.checks`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from strandline.errors import CorruptData, NotFound, UnsupportedVersion, WrongKind
from strandline.formats.object.head import decode_cut
from strandline.formats.object.identity import SlotCodec, decode_identity
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.head.index import (
    MissingChunk,
    chunk_path,
    entries_from_sequence,
    is_listed,
    objects_of,
    references_of,
)
from strandline.log.object.log import IDENTITY, ObjectLog
from strandline.log.object.maintain.checks import (
    GenerationDifference,
    Inventory,
    ListingPosition,
    Writers,
    check_chunk,
    check_head,
    check_slot,
)
from strandline.model.head import ChunkRef, Cut, Entry, Head
from strandline.model.retention import HOLDS, TIER_SLOT
from strandline.model.segments import COLD_FILE

_CHUNK: Final = re.compile(r"chunks/([0-9]{16})/([0-9]{2})-([0-9]{20})-[0-9]{20}\.chunk")
_CUT: Final = re.compile(r"trimmed/([0-9]{16})/[0-9a-f]{32}\.cut")
_SLOT: Final = re.compile(r"slots/([A-Za-z0-9][A-Za-z0-9_.-]{0,127})\.json")


def check_object_log(log: ObjectLog) -> Verification:
    """Check an object log's listing, slots and objects, without reading batches. Changes nothing.

    The log may be used meanwhile, by trimmers too. ``StorageError`` if the store fails: an object that cannot be read
    now is not known to be damaged.
    """
    examined = Counter(batches=0, records=0, bytes=0, chunks=0, slots=0, trims=0)
    found = Verification(log.url, examined)
    try:
        head = log.head()
    except CorruptData as error:
        found.take([Finding(Severity.DAMAGE, FindingKind.HEAD, "head", str(error))])
        return found
    _ObjectLogCheck(log, head, found).run()
    return found


class _ObjectLogCheck:
    def __init__(self, log: ObjectLog, head: Head, found: Verification) -> None:
        self._log = log
        self._head = head
        self._found = found
        self._store = log.store
        self._writers = Writers()
        self._chunks: set[str] = set()
        self._holes = False

    def run(self) -> None:
        """Check everything."""
        head, examined = self._head, self._found.examined
        self._identity(head)
        for problem in check_head(head):
            self._add(Severity.DAMAGE, FindingKind.HEAD, "head", f"is wrong: {problem}")
        inventory = Inventory(self._store)
        self._take_trimmed(list(self._cuts(head)), inventory)
        for entry in self._entries(head):
            examined.update(batches=1, records=entry.count, bytes=entry.size)
            inventory.add(entry.location, entry.size, entry.sequence)
            for compared in inventory.compared(is_end=False):
                self._compared(compared)
        for compared in inventory.compared(is_end=True):
            self._compared(compared)
        for path in inventory.strangers:
            self._stranger(path)
        self._others(head)
        self._slots(head)

    def _identity(self, head: Head) -> None:
        """Check ``log.json``, which the log may have read long ago."""
        try:
            found = decode_identity(self._store.get(IDENTITY).data, f"{self._store.url}/{IDENTITY}")
        except NotFound:
            what = "is missing: restore the object, or let 'strandline create' write it again"
            self._add(Severity.DAMAGE, FindingKind.IDENTITY, IDENTITY, what)
        except (CorruptData, WrongKind, UnsupportedVersion) as error:
            self._damaged(FindingKind.IDENTITY, IDENTITY, error)
        else:
            if found.log_id != head.log_id:
                what = f"is of log {found.log_id}, but the head is of log {head.log_id}: restore the object"
                self._add(Severity.DAMAGE, FindingKind.IDENTITY, IDENTITY, what)

    def _add(self, severity: Severity, kind: FindingKind, where: str, what: str) -> None:
        self._found.take([Finding(severity, kind, where, f"{self._store.url}/{where} {what}.")])

    def _damaged(self, kind: FindingKind, where: str, error: Exception) -> None:
        self._found.take([Finding(Severity.DAMAGE, kind, where, str(error))])

    def _cuts(self, head: Head) -> Iterator[Cut]:
        """The trims whose objects are still to be deleted: each begins where the one before ended, up to the floor."""
        upto: int | None = None
        for gone in head.trimmed:
            try:
                cut = decode_cut(self._store.get(gone.location).data, f"{self._store.url}/{gone.location}")
            except NotFound:
                upto = None  # a trimmer has finished it, but not recorded that yet
                continue
            except CorruptData as error:
                self._damaged(FindingKind.TRIM, gone.location, error)
                self._holes, upto = True, None
                continue
            if upto not in (None, cut.since) or cut.since >= cut.upto:
                what = f"trims from offset {cut.since} to {cut.upto}, but the trim before it ended at {upto}"
                self._add(Severity.DAMAGE, FindingKind.TRIM, gone.location, what)
            upto = cut.upto
            self._found.examined["trims"] += 1
            yield cut
        if upto not in (None, head.floor):
            what = f"has trims up to offset {upto}, but the log begins at {head.floor}"
            self._add(Severity.DAMAGE, FindingKind.TRIM, "head", what)

    def _take_trimmed(self, cuts: Sequence[Cut], inventory: Inventory) -> None:
        """Note the objects that trims will delete: they may exist or not."""
        for cut in cuts:
            try:
                for gone in chain.from_iterable(objects_of(cut, self._log.chunks)):
                    if not inventory.add(gone.path, gone.size):
                        self._chunks.add(gone.path)
            except CorruptData as error:
                self._damaged(FindingKind.CHUNK, "chunks", error)
                self._holes = True

    def _entries(self, head: Head) -> Iterator[Entry]:
        """Every entry from the floor on, with its position checked."""
        place = ListingPosition(head.floor)
        for entry in self._walk(head, place):
            for problem in place.check(entry):
                self._add(Severity.DAMAGE, FindingKind.LISTING, entry.location, f"is listed wrongly: {problem}")
            for severity, problem in self._writers.check(entry):
                self._add(severity, FindingKind.WRITER, entry.location, f"is listed, and {problem}")
            yield entry
        if (place.offset, place.sequence) not in ((head.next_offset, head.next_sequence), (head.next_offset, None)):
            what = f"ends at offset {head.next_offset}, sequence {head.next_sequence}, but lists up to offset"
            self._add(Severity.DAMAGE, FindingKind.LISTING, "head", f"{what} {place.offset}, sequence {place.sequence}")
        if not self._holes:
            for severity, problem in self._writers.compare(head):
                self._add(severity, FindingKind.WRITER, "head", problem)

    def _walk(self, head: Head, place: ListingPosition) -> Iterator[Entry]:
        for level, reference in references_of(head):
            yield from self._below(reference, level, head.floor, place)
        yield from head.tail

    def _below(self, reference: ChunkRef, level: int, floor: int, place: ListingPosition) -> Iterator[Entry]:
        if reference.next <= floor:
            return  # trimmed
        path = chunk_path(reference, level)
        self._chunks.add(path)
        try:
            items = self._log.chunks.read(reference, level)
        except CorruptData as error:
            if self._log.head().floor < reference.next:  # else it was trimmed meanwhile
                self._damaged(FindingKind.CHUNK, path, error)
            self._holes = True
            self._writers = Writers()  # its writers' numbers are unknown now
            place.skip(reference)
            return
        self._found.examined["chunks"] += 1
        for problem in check_chunk(reference, items):
            self._add(Severity.DAMAGE, FindingKind.CHUNK, path, problem)
        for item in items:
            if isinstance(item, ChunkRef):
                yield from self._below(item, level - 1, floor, place)
            elif item.next > floor:
                yield item

    def _compared(self, compared: GenerationDifference) -> None:
        self._unlisted(compared.unlisted, compared.generation, self._listed_since)
        for sequence in compared.doubled:
            entry = self._entry(sequence)
            what = f"is listed a second time, for offsets {entry.first} to {entry.next - 1}"
            self._add(Severity.DAMAGE, FindingKind.LISTING, entry.location, what)
        if not (compared.absent or compared.resized):
            return
        floor = self._log.head().floor
        for sequences, what in ((compared.absent, "is missing"), (compared.resized, "has another size than listed")):
            for entry in map(self._entry, sequences):
                if entry.next > floor:
                    held = f"it is listed as offsets {entry.first} to {entry.next - 1}: restore the object"
                    self._add(Severity.DAMAGE, FindingKind.BATCH, entry.location, f"{what}; {held}")

    def _entry(self, sequence: int) -> Entry:
        return next(entries_from_sequence(self._head, sequence, self._log.chunks))

    def _listed_since(self, paths: list[str]) -> list[str]:
        """Those of some batch objects that were listed during the verification."""
        began = self._head.next_sequence
        known = {entry.location for entry in entries_from_sequence(self._log.head(), began, self._log.chunks)}
        return [path for path in paths if path in known]

    def _unlisted(self, paths: list[str], generation: int, used_since: Callable[[list[str]], list[str]]) -> None:
        """Report objects of one generation that nothing named at the start of the verification."""
        head = self._head
        if generation > head.generation or self._holes or not paths:
            return  # newer than the head that was read; or listed in an unreadable part of the listing
        if generation < head.min_generation:
            what = "was never listed and can never be: the next trim deletes it"
            if generation < head.swept_generation:
                what = "was never listed, and arrived late: 'strandline trim --everything' deletes it"
            for path in paths:
                self._add(Severity.WASTE, FindingKind.ORPHAN, path, what)
            return
        which = "next trim" if generation < head.generation else "trim after the next"
        what = f"is not listed: its upload is under way, or was given up; then the {which} deletes it"
        used = frozenset(used_since(paths))  # read last, after all objects were listed
        for path in paths:
            if path not in used:
                self._add(Severity.NOTE, FindingKind.ORPHAN, path, what)

    def _others(self, head: Head) -> None:
        """Report chunks and trims without a reference, dead letters, and foreign objects."""
        trims = {gone.location for gone in head.trimmed}
        unknown: dict[int, list[str]] = {}
        for folder, pattern, known in (("chunks/", _CHUNK, self._chunks), ("trimmed/", _CUT, trims)):
            for item in self._store.list(folder):
                name = pattern.fullmatch(item.path)
                if name is None:
                    self._stranger(item.path)
                elif item.path not in known:
                    unknown.setdefault(int(name[1]), []).append(item.path)
        for generation, paths in unknown.items():
            self._unlisted(paths, generation, self._referred_since)
        letters = sum(item.path.endswith(".json") for item in self._store.list("dead-letter/"))
        if letters:
            what = f"holds {letters} unreadable batches that consumers have set aside: examine them"
            self._add(Severity.NOTE, FindingKind.DEAD_LETTER, "dead-letter", what)
        if self._holes:
            what = "has parts that cannot be read: unlisted objects were not searched for"
            self._add(Severity.NOTE, FindingKind.ORPHAN, "head", what)

    def _referred_since(self, paths: list[str]) -> list[str]:
        """Those of some chunks and trims that the head names now, directly or through other chunks."""
        head = self._log.head()
        references, trims = references_of(head), {gone.location for gone in head.trimmed}

        def is_used(path: str) -> bool:
            chunk = _CHUNK.fullmatch(path)
            if chunk is None:
                return path in trims
            try:
                return is_listed(path, int(chunk[2]), int(chunk[3]), references, self._log.chunks)
            except MissingChunk:
                return True  # trimmed since; unknown is not garbage

        return [path for path in paths if is_used(path)]

    def _stranger(self, path: str) -> None:
        self._add(Severity.NOTE, FindingKind.STRANGER, path, "does not belong to the log: no trim ever deletes it")

    def _slots(self, head: Head) -> None:
        first = _first_needed(head)
        if TIER_SLOT in head.slots and head.floor and not any(self._store.list(COLD_FILE)):
            what = f"is missing, so that records below offset {head.floor} cannot be read: restore the object"
            self._add(Severity.DAMAGE, FindingKind.SEGMENT, COLD_FILE, what)
        for name, pin in sorted(head.slots.items()):
            self._found.examined["slots"] += 1
            if pin is not None and not first <= pin.position <= head.next_offset:
                what = f"pins offset {pin.position} for slot {name!r}, outside the log"
                self._add(Severity.DAMAGE, FindingKind.SLOT, "head", what)
            self._slot(name, pinned=pin is not None)
        for item in self._store.list("slots/"):
            known = _SLOT.fullmatch(item.path)
            if known is None:
                self._stranger(item.path)
            elif known[1].startswith(HOLDS) and known[1] not in head.slots and known[1] not in self._log.head().slots:
                what = "is left of a hold that was released; it pins nothing and may be deleted"
                self._add(Severity.WASTE, FindingKind.SLOT, item.path, what)

    def _slot(self, name: str, *, pinned: bool) -> None:
        path = f"slots/{name}.json"
        try:
            state = SlotCodec(name).decode(self._store.get(path).data, f"{self._store.url}/{path}").value
        except NotFound:
            if not pinned and name in self._log.head().slots:  # else it is being created, or was dropped meanwhile
                what = "is missing although the head names the slot: restore the object"
                self._add(Severity.DAMAGE, FindingKind.SLOT, path, what)
            return
        except CorruptData as error:
            self._damaged(FindingKind.SLOT, path, error)
            return
        # The floor was read before the slot, the end and the membership after it.
        after = self._log.head()
        if name in after.slots:
            first = _first_needed(self._head)
            for severity, what in check_slot(state, floor=first, end=after.next_offset, pinned=pinned):
                self._add(severity, FindingKind.SLOT, path, what)


def _first_needed(head: Head) -> int:
    """The lowest valid position of a slot: records below the log's start may be in its cold tier."""
    return 0 if TIER_SLOT in head.slots else head.floor
