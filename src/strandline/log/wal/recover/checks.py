"""Checks of a write-ahead log: pure functions over frames and values; :mod:`.verify` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import CorruptData
from strandline.formats.arrow.block import read_metadata
from strandline.formats.wal.folder import SlotsFile, append_of, lead_of
from strandline.formats.wal.frame import Ending, Frame, decode_frame
from strandline.formats.wal.index import Index, IndexEntry
from strandline.log.findings import Finding, FindingKind, Severity
from strandline.log.slots.trimming import retained_first
from strandline.log.wal.names import LEAD, salt_of
from strandline.log.wal.read.catalog import Located, damaged_file
from strandline.log.wal.recover.walk import Hole
from strandline.log.wal.write.journal import INDEX_BYTES, INDEX_FRAMES, JournalPosition
from strandline.log.writers.source import remembered
from strandline.model.head import WriterId, WriterState, proof_of

MOST_PROBLEMS: Final = 100
"""Most problems that are reported of one file: with more, it has to be restored anyway."""


class FileProblem(NamedTuple):
    """A range of unexpected bytes in a file of the log."""

    at: int
    upto: int
    offset: int
    """The offset that should be there."""
    kind: FindingKind
    why: str
    is_cut: bool = True
    """Whether opening cuts the file there, if nothing from there on was acknowledged."""


class FileCheck:
    """Checks the frames of a file in order: each must continue the one before. Pure.

    Everything up to the first problem is valid: ``place`` is the end of that.
    """

    def __init__(
        self, path: str, first: int, size: int, *, log_id: UUID, term: int = 0, index: Index | None = None
    ) -> None:
        """With an ``index`` that is compared, the records of each frame are decoded, too."""
        self.path = path
        self.first = first
        self.size = size
        self.place = JournalPosition(first, 0, first, term, 0, {})
        self.at = 0
        """The byte after the last piece."""
        self.next = first
        """One past the last offset found."""
        self.term = term
        self.is_begun = False
        """Whether its first frame is valid."""
        self.begins = 0
        """The byte of the first frame with records."""
        self.frames = self.records = 0
        self.durable = 0
        """Everything below this offset was durable, according to its frames and its index."""
        self.written = 0
        """Time of the last frame found, in milliseconds; 0 if there is none."""
        self.problems: list[FileProblem] = []
        self._log_id = log_id
        self._salt = salt_of(log_id)
        self.index = IndexCheck(index or Index([], 0, 0))
        """Compares its index, if one was given."""
        self._decodes = index is not None
        self._past_hole = False

    @property
    def has_too_many_problems(self) -> bool:
        """Whether the limit of reported problems is reached."""
        return len(self.problems) >= MOST_PROBLEMS

    def take(self, found: Frame | Hole) -> tuple[Located, Mapping[WriterId, WriterState]] | None:
        """Check the next piece; returns the frame and its writer, if it has records and continues the valid part."""
        if isinstance(found, Hole):
            kind = FindingKind.VERSION if found.ending is Ending.UNSUPPORTED else FindingKind.FRAME
            self._add(found.at, found.upto, kind, found.why)
            self._past_hole = True
            self.index.lost(found.upto)
            self.at = found.upto
            return None
        self.at = found.end
        if found.start:
            return self._follow(found)
        self._begin(found)
        return None

    def skip(self, entries: Sequence[IndexEntry]) -> None:
        """Continue after the last entry of the file's index: everything before it was durable, and is not read."""
        entry, place = entries[-1], self.place
        for known in entries:
            place.writers.update(known.writers)
        place.size, place.next, place.term, place.timestamp = entry.position, entry.offset, entry.term, entry.timestamp
        self.at, self.next, self.term, self.durable = entry.position, entry.offset, entry.term, entry.offset

    def _begin(self, frame: Frame) -> None:
        info, place = frame.info, self.place
        self.is_begun = True
        try:
            owner, writers = lead_of(decode_frame(frame, self.path).metadata, self.path)
        except CorruptData as error:
            self._add(0, frame.end, FindingKind.FRAME, _reason(error), is_cut=False)
            return
        if owner != self._log_id or info.first != self.first + 1 or info.flags != self._salt | LEAD or info.count:
            why = f"it is a file of log {owner} that begins at offset {info.first - 1}, and does not belong here"
            self._add(0, frame.end, FindingKind.CONTINUITY, why, is_cut=False)
        self._pass(frame)
        self.begins = place.size = frame.end
        place.term, place.timestamp, place.writers = info.term, info.timestamp, writers
        self.index.begin(frame.end)

    def _follow(self, frame: Frame) -> tuple[Located, Mapping[WriterId, WriterState]] | None:
        info = frame.info
        if info.flags != self._salt or not info.count:
            self._add(
                frame.start, frame.end, FindingKind.CONTINUITY, "the frame there is not one of this log's records"
            )
            return None
        first = info.first - 1
        past_hole, self._past_hole = self._past_hole, False
        if past_hole and first > self.next:  # the missing offsets were in the hole: one problem, not two
            hole = self.problems[-1]
            lost = f"offset {self.next} is" if first == self.next + 1 else f"offsets {self.next} to {first - 1} are"
            self.problems[-1] = hole._replace(why=f"{hole.why}; {lost} lost")
        elif first > self.next:
            why = f"it continues at offset {first} instead of {self.next}"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why)
        elif first < self.next:
            why = f"offset {first} is there again, and {self.next} should be there"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why)
        if info.durable > first:
            why = f"the frame of offset {first} says that everything below {info.durable} was durable before it"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why, is_cut=False)
        else:
            self.durable = max(self.durable, info.durable)
        writers = self._writers(frame)
        self._pass(frame)
        self.next = max(self.next, first + info.count)
        self.frames += 1
        self.written = info.timestamp
        self.records += info.count
        size = frame.end - frame.start
        located = Located(self.path, frame.start, size, first, first + info.count, info.term, info.timestamp)
        self.index.passed(located, writers)
        if self.problems:
            return None
        place = self.place
        place.writers.update(writers)
        place.size, place.next, place.term, place.timestamp = frame.end, located.next, info.term, info.timestamp
        return located, writers

    def _writers(self, frame: Frame) -> dict[WriterId, WriterState]:
        info, where = frame.info, f"{self.path} at byte {frame.start}"
        try:
            read = decode_frame(frame, where).metadata if self._decodes else read_metadata(frame.block, where)
            append = append_of(read, where)
        except CorruptData as error:
            self._add(frame.start, frame.end, FindingKind.FRAME, _reason(error), is_cut=False)
            return {}
        if append is None:
            return {}
        writer, number = remembered(*append)
        first, written = info.first - 1, info.timestamp * 1000
        return {writer: WriterState(number, first, first, info.count, written, proof_of(append[0]))}

    def _pass(self, frame: Frame) -> None:
        term = frame.info.term
        if term < self.term:
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, f"the term goes down from {self.term} to {term}")
        self.term = max(self.term, term)

    def _add(self, at: int, upto: int, kind: FindingKind, why: str, *, is_cut: bool = True) -> None:
        self.problems.append(FileProblem(at, upto, self.next, kind, why, is_cut))

    def done(self) -> None:
        """Called after the last piece: a file without any is damaged."""
        if not self.is_begun and not self.problems:
            self._add(0, 0, FindingKind.FRAME, "it is empty")
        self.durable = max(self.durable, self.index.durable)

    def refuse(self) -> None:
        """``CorruptData`` for the first problem."""
        for problem in self.problems:
            raise damaged_file(self.path, problem.at, problem.why)


class IndexCheck:
    """Compares the entries of an index with the frames of its file. Pure."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._at = 0
        self._wrong: str | None = None
        self._short = False
        self._lost = False
        self._last = 0
        self._frames = 0
        self._writers: dict[WriterId, WriterState] = {}

    def begin(self, position: int) -> None:
        """Set the position of the first frame with records."""
        self._last = position

    def lost(self, upto: int) -> None:
        """Damage up to a byte: the expected entries are unknown until the next frame."""
        self._lost = True
        while (entry := self._entry()) is not None and entry.position <= upto:
            self._at += 1

    def passed(self, frame: Located, writers: Mapping[WriterId, WriterState]) -> None:
        """Check a found frame."""
        self._frames += 1
        self._writers.update(writers)
        end = frame.position + frame.size
        entry = self._entry()
        if entry is not None and entry.position <= end:
            self._compare(entry, frame, end)
            self._at += 1
            self._last, self._frames, self._writers, self._lost = end, 0, {}, False
        elif self._frames >= INDEX_FRAMES or end - self._last >= INDEX_BYTES:
            self._short = self._short or not self._lost

    def _entry(self) -> IndexEntry | None:
        return self._index.entries[self._at] if self._at < len(self._index.entries) else None

    def _compare(self, entry: IndexEntry, frame: Located, end: int) -> None:
        indexed = entry.offset, entry.position, entry.term, entry.timestamp
        if indexed != (frame.next, end, frame.term, frame.timestamp):
            self._wrong = self._wrong or f"it puts offset {entry.offset} at byte {entry.position}, where it is not"
        elif not self._lost and entry.writers != self._writers:
            self._wrong = self._wrong or f"its writers are wrong before offset {entry.offset}"

    @property
    def durable(self) -> int:
        """The durable offset of the file according to the index, unless that is wrong."""
        return self._index.entries[-1].offset if self._index.entries and self._wrong is None else 0

    def judged(self, *, is_closed: bool, size: int | None) -> str | None:
        """The defect of an index, or None. The index of the active file may be behind."""
        if self._wrong is not None:
            return self._wrong
        if is_closed and size is None:
            return "it is missing"
        if size is not None and size > self._index.size:
            return f"only {self._index.size} of its {size} bytes are whole"
        return "checkpoints are missing in it" if is_closed and self._short else None


def _reason(error: CorruptData) -> str:
    """The reason, without the place, which the finding names itself."""
    return str(error).partition(" is damaged: ")[2].rstrip(".") or str(error).rstrip(".")


def judge_closed(facts: FileCheck, following: int) -> Iterator[Finding]:
    """Findings of a file that another one follows: all of it was durable before that began."""
    for problem in facts.problems:
        if problem.offset >= following and problem.is_cut:
            yield _note(facts, problem, f"after its last record there are {facts.size - problem.at} unused bytes")
            return
        yield _damage(facts, problem)
    if facts.next < following and not _ends_badly(facts):
        why = f"it ends at offset {facts.next}, and the next file begins at {following}"
        yield _damage(facts, FileProblem(facts.size, facts.size, facts.next, FindingKind.CONTINUITY, why))
    elif facts.next > following:
        why = f"it reaches offset {facts.next}, but the next file begins at {following}"
        yield _damage(facts, FileProblem(facts.size, facts.size, facts.next, FindingKind.CONTINUITY, why))


def tail_problems(facts: FileCheck, durable: int, *, is_active: bool) -> Iterator[tuple[FileProblem, bool]]:
    """The problems of the last file, up to a torn tail: the last one is True then, and nothing from there on counts.

    Everything below the offset ``durable`` was acknowledged. ``is_active``: the file is known to have been begun.
    """
    if not facts.is_begun and durable <= facts.first and not is_active:
        problem = facts.problems[0]
        is_torn = problem.kind is not FindingKind.VERSION
        yield (problem._replace(at=0, why=f"it was never finished ({problem.why})") if is_torn else problem), is_torn
        return
    for problem in facts.problems:
        if facts.is_begun and problem.is_cut and problem.kind is not FindingKind.VERSION and problem.offset >= durable:
            yield problem, True
            return
        yield problem, False
    if facts.next < durable and not _ends_badly(facts):
        why = f"it ends at offset {facts.next}, and everything below {durable} was durable"
        yield FileProblem(facts.size, facts.size, facts.next, FindingKind.CONTINUITY, why), False


def judge_last(facts: FileCheck, durable: int, *, is_active: bool, may_be_written: bool) -> Iterator[Finding]:
    """Findings of the last file, as :func:`tail_problems`; ``may_be_written``: a writer may be writing it now."""
    for problem, is_torn in tail_problems(facts, durable, is_active=is_active):
        if is_torn:
            yield _torn(facts, problem.at, problem.why, may_be_written=may_be_written)
        else:
            yield _damage(facts, problem)


def judge_slots(path: str, kept: SlotsFile, end: int) -> Iterator[Finding]:
    """Findings of the slots of a log that ends at ``end``."""
    first = retained_first(kept.slots, kept.start)
    for slot in kept.slots:
        if slot.pins and slot.position < first:
            why = f"slot {slot.name!r} needs offset {slot.position}, and the log begins at {kept.start}"
        elif not slot.dropped and slot.position > max(end, kept.start):
            why = f"slot {slot.name!r} is at offset {slot.position}, and the log ends at {end}"
        else:
            continue
        yield Finding(
            Severity.DAMAGE, FindingKind.SLOT, path, f"{path} is wrong: {why}. Reset the slot, or restore the log."
        )


def _ends_badly(facts: FileCheck) -> bool:
    return any(problem.upto == facts.size for problem in facts.problems)


def _damage(facts: FileCheck, problem: FileProblem) -> Finding:
    if problem.kind is FindingKind.VERSION:
        message = f"{facts.path} cannot be read from byte {problem.at} on: {problem.why}. Upgrade strandline."
    else:
        where = f"{facts.path} is damaged at byte {problem.at} (offset {problem.offset})"
        message = f"{where}: {problem.why}. Restore the file: acknowledged records are affected."
    return Finding(Severity.DAMAGE, problem.kind, facts.path, message, problem.at)


def _note(facts: FileCheck, problem: FileProblem, what: str) -> Finding:
    message = f"{facts.path}, from byte {problem.at} on: {what} ({problem.why})."
    return Finding(Severity.NOTE, FindingKind.TAIL, facts.path, message, problem.at)


def _torn(facts: FileCheck, at: int, why: str, *, may_be_written: bool) -> Finding:
    what = "unless it is being written, opening cuts it" if may_be_written else "opening cuts it"
    message = (
        f"{facts.path} has a torn tail of {facts.size - at} bytes from byte {at} on: {why}. Nothing in it was "
        f"acknowledged; {what}, and sets it aside."
    )
    return Finding(Severity.NOTE, FindingKind.TAIL, facts.path, message, at)
