"""Checks of a write-ahead log: pure functions over frames and values; :mod:`.verify` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from strandline.errors import CorruptData
from strandline.formats.wal.folder import SlotsFile, append_of, lead_of
from strandline.formats.wal.frame import Ending, Frame, decode_frame
from strandline.formats.wal.index import Index, IndexEntry
from strandline.log.findings import Finding, FindingKind, Severity
from strandline.log.slots.trimming import retained_first
from strandline.log.wal.names import LEAD, salt_of
from strandline.log.wal.read.catalog import Located
from strandline.log.wal.recover.scan_tail import Hole
from strandline.log.wal.write.journal import INDEX_BYTES, INDEX_FRAMES
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


@dataclass(slots=True)
class FileFacts:
    """Facts about one file."""

    path: str
    first: int
    size: int
    next: int
    """One past the last offset found."""
    term: int
    is_begun: bool = False
    """Whether its first frame is valid."""
    frames: int = 0
    records: int = 0
    durable: int = 0
    """Everything below this offset was durable, according to its frames and its index."""
    written: int = 0
    """Time of the last frame found, in milliseconds; 0 if there is none."""
    problems: list[FileProblem] = field(default_factory=list)
    index: str | None = None
    """What is wrong with its index, or None."""


class FileCheck:
    """Checks the frames of a file in order: each must continue the one before. Pure."""

    def __init__(self, path: str, first: int, size: int, *, log_id: UUID, term: int, index: Index) -> None:
        self.facts = FileFacts(path, first, size, first, term)
        self._log_id = log_id
        self._salt = salt_of(log_id)
        self._index = IndexCheck(index)
        self._past_hole = False

    @property
    def has_too_many_problems(self) -> bool:
        """Whether the limit of reported problems is reached."""
        return len(self.facts.problems) >= MOST_PROBLEMS

    def take(self, found: Frame | Hole) -> None:
        """Check the next piece."""
        if isinstance(found, Hole):
            kind = FindingKind.VERSION if found.ending is Ending.UNSUPPORTED else FindingKind.FRAME
            self._add(found.at, found.upto, kind, found.why)
            self._index.lost(found.upto)
            self._past_hole = True
        elif found.start == 0:
            self._begin(found)
        else:
            self._follow(found)

    def _begin(self, frame: Frame) -> None:
        facts, info = self.facts, frame.info
        facts.is_begun = True
        try:
            owner, _ = lead_of(decode_frame(frame, facts.path).metadata, facts.path)
        except CorruptData as error:
            self._add(0, frame.end, FindingKind.FRAME, _reason(error), is_cut=False)
            return
        if owner != self._log_id or info.first != facts.first + 1 or info.flags != self._salt | LEAD or info.count:
            why = f"it is a file of log {owner} that begins at offset {info.first - 1}"
            self._add(0, frame.end, FindingKind.CONTINUITY, why, is_cut=False)
        self._pass(frame)
        self._index.begin(frame.end)

    def _follow(self, frame: Frame) -> None:
        facts, info = self.facts, frame.info
        if info.flags != self._salt or not info.count:
            self._add(
                frame.start, frame.end, FindingKind.CONTINUITY, "the frame there is not one of this log's records"
            )
            return
        first = info.first - 1
        past_hole, self._past_hole = self._past_hole, False
        if past_hole and first > facts.next:  # the missing offsets were in the hole: one problem, not two
            hole = facts.problems[-1]
            lost = f"offset {facts.next} is" if first == facts.next + 1 else f"offsets {facts.next} to {first - 1} are"
            facts.problems[-1] = hole._replace(why=f"{hole.why}; {lost} lost")
        elif first > facts.next:
            why = f"it continues at offset {first} instead of {facts.next}"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why)
        elif first < facts.next:
            why = f"offset {first} is there again, and {facts.next} should be there"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why)
        if info.durable > first:
            why = f"the frame of offset {first} says that everything below {info.durable} was durable before it"
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, why, is_cut=False)
        else:
            facts.durable = max(facts.durable, info.durable)
        writers: dict[WriterId, WriterState] = {}
        where = f"{facts.path} at byte {frame.start}"
        try:
            append = append_of(decode_frame(frame, where).metadata, where)
        except CorruptData as error:
            self._add(frame.start, frame.end, FindingKind.FRAME, _reason(error), is_cut=False)
        else:
            if append is not None:
                writer, number = remembered(*append)
                proof = proof_of(append[0])
                writers[writer] = WriterState(number, first, first, info.count, info.timestamp * 1000, proof)
        self._pass(frame)
        facts.next = max(facts.next, first + info.count)
        facts.frames += 1
        facts.written = info.timestamp
        facts.records += info.count
        size = frame.end - frame.start
        located = Located(facts.path, frame.start, size, first, first + info.count, info.term, info.timestamp)
        self._index.passed(located, writers)

    def _pass(self, frame: Frame) -> None:
        facts, term = self.facts, frame.info.term
        if term < facts.term:
            self._add(frame.start, frame.end, FindingKind.CONTINUITY, f"the term goes down from {facts.term} to {term}")
        facts.term = max(facts.term, term)

    def _add(self, at: int, upto: int, kind: FindingKind, why: str, *, is_cut: bool = True) -> None:
        self.facts.problems.append(FileProblem(at, upto, self.facts.next, kind, why, is_cut))

    def done(self, *, is_closed: bool, index_size: int | None) -> FileFacts:
        """The facts, after the whole file was read; ``index_size`` is None without an index."""
        facts = self.facts
        facts.index = self._index.judged(is_closed=is_closed, size=index_size)
        facts.durable = max(facts.durable, self._index.durable)
        return facts


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


def judge_closed(facts: FileFacts, following: int) -> Iterator[Finding]:
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


def judge_last(facts: FileFacts, durable: int, *, is_active: bool, may_be_written: bool) -> Iterator[Finding]:
    """Findings of the last file; everything below the offset ``durable`` was acknowledged.

    ``is_active``: the file is known to have been begun; ``may_be_written``: a writer may be writing it now.
    """
    if not facts.is_begun and durable <= facts.first and not is_active:
        if facts.problems and facts.problems[0].kind is FindingKind.VERSION:
            yield _damage(facts, facts.problems[0])
        else:
            why = facts.problems[0].why if facts.problems else "it is empty"
            yield _torn(facts, 0, f"it was never finished ({why})", may_be_written=may_be_written)
        return
    if not facts.is_begun and not facts.problems:
        yield _damage(facts, FileProblem(0, 0, facts.first, FindingKind.FRAME, "it is empty"))
        return
    for problem in facts.problems:
        if facts.is_begun and problem.is_cut and problem.kind is not FindingKind.VERSION and problem.offset >= durable:
            yield _torn(facts, problem.at, problem.why, may_be_written=may_be_written)
            return
        yield _damage(facts, problem)
    if facts.next < durable and not _ends_badly(facts):
        why = f"it ends at offset {facts.next}, and everything below {durable} was durable"
        yield _damage(facts, FileProblem(facts.size, facts.size, facts.next, FindingKind.CONTINUITY, why))


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


def _ends_badly(facts: FileFacts) -> bool:
    return any(problem.upto == facts.size > 0 for problem in facts.problems)


def _damage(facts: FileFacts, problem: FileProblem) -> Finding:
    what = (
        "Upgrade strandline"
        if problem.kind is FindingKind.VERSION
        else "Restore the file: acknowledged records are affected"
    )
    message = f"{facts.path} is damaged at byte {problem.at} (offset {problem.offset}): {problem.why}. {what}."
    if problem.kind is FindingKind.VERSION:
        message = f"{facts.path} cannot be read from byte {problem.at} on: {problem.why}. {what}."
    return Finding(Severity.DAMAGE, problem.kind, facts.path, message, problem.at)


def _note(facts: FileFacts, problem: FileProblem, what: str) -> Finding:
    message = f"{facts.path}, from byte {problem.at} on: {what} ({problem.why})."
    return Finding(Severity.NOTE, FindingKind.TAIL, facts.path, message, problem.at)


def _torn(facts: FileFacts, at: int, why: str, *, may_be_written: bool) -> Finding:
    what = "unless it is being written, opening cuts it" if may_be_written else "opening cuts it"
    message = (
        f"{facts.path} has a torn tail of {facts.size - at} bytes from byte {at} on: {why}. Nothing in it was "
        f"acknowledged; {what}, and sets it aside."
    )
    return Finding(Severity.NOTE, FindingKind.TAIL, facts.path, message, at)
