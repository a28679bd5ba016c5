"""Verification of a write-ahead log: every byte of every file, against indexes, slots and mark."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from strandline.errors import CorruptData, NotALog, NotFound, WrongKind
from strandline.formats.wal.folder import SlotsFile, lead_of
from strandline.formats.wal.frame import HEADER_SIZE, FrameScanner, Stop, decode_frame, frame_head
from strandline.formats.wal.index import decode_index, new_chain
from strandline.formats.wal.mark import Mark
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.folders import FolderKind, contents, refuse_others
from strandline.log.wal import names
from strandline.log.wal.migrated_spool import MIGRATED
from strandline.log.wal.read.watermark import MARK_READS, read_mark
from strandline.log.wal.recover.checks import FileCheck, judge_closed, judge_last, judge_slots
from strandline.log.wal.recover.scan_tail import read_identity, read_slots_file
from strandline.log.wal.recover.walk import WINDOW, frames_of, walk
from strandline.model.cursor import SECOND, Bounds
from strandline.model.segments import COLD_FILE, COLD_FOLDER
from strandline.model.times import TOLERANCE
from strandline.storage.clock import Clock
from strandline.storage.disk import Disk, FolderRow
from strandline.storage.env import Env

_KNOWN: Final = frozenset(
    {names.IDENTITY, names.SLOTS_FILE, names.MARK, names.LOCK, names.REWIND, MIGRATED, COLD_FILE, COLD_FOLDER}
)
_OF_FILE: Final = re.compile(r"([0-9]{20})\..*")

OnProgress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(slots=True)
class WalVerification(Verification):
    """Result of verifying a write-ahead log."""

    indexes: tuple[int, ...] = ()
    """First offsets of the files whose index has to be rebuilt."""


def data_bytes(folder: str, *, disk: Disk) -> int:
    """The size of all data files of a write-ahead log, which is what verifying it reads."""
    rows = disk.scan(folder)
    return sum(row.size for row in rows if names.firsts_in([row]))


def verify(folder: str, *, env: Env, on_progress: OnProgress | None = None) -> WalVerification:
    """Verify a whole log. Changes nothing, takes no lock, needs little memory.

    Damage to acknowledged records is *damage*; what opening the log repairs by itself is a *note*. The log may
    be used meanwhile: only records that were durable at the start are judged, and files that are trimmed meanwhile are
    not missed. ``NotALog`` if the folder holds something else, or no log; ``UnsupportedVersion`` for a log of a newer
    version.
    """
    there = contents(folder, disk=env.disk)
    if FolderKind.WAL not in there.kinds and not there.is_free():
        refuse_others(there, FolderKind.WAL)
    return _Verifier(folder, env.disk, env.clock, on_progress or (lambda _: None)).run()


@dataclass(slots=True)
class _Verifier:
    _folder: str
    _disk: Disk
    _clock: Clock
    _on_progress: OnProgress
    _result: WalVerification = field(init=False)

    def run(self) -> WalVerification:
        self._result = WalVerification(self._folder, Counter(files=0, frames=0, records=0, bytes=0, slots=0))
        log_id = self._identity()
        kept = None if log_id is None else self._kept(log_id)
        # The mark before the names: all records below it are in existing files.
        mark = None if log_id is None else self._mark(log_id)
        rows = self._disk.scan(self._folder)
        firsts = names.firsts_in(rows)
        start = kept.start if kept is not None else firsts[0] if firsts else 0
        end = 0 if log_id is None else self._files(log_id, start, mark, firsts)
        if kept is not None:
            self._result.examined["slots"] = sum(not slot.dropped for slot in kept.slots)
            self._result.take(
                judge_slots(f"{self._folder}/{names.SLOTS_FILE}", kept, max(end, 0 if mark is None else mark.next))
            )
        self._others(rows, firsts)
        self._result.log_id = log_id
        self._result.bounds = Bounds(start, max(start, end))
        return self._result

    def _identity(self) -> UUID | None:
        """The identity of the log; if its own file is unreadable, by its slots or by the first frame of a file."""
        path = f"{self._folder}/{names.IDENTITY}"
        try:
            return read_identity(self._folder, disk=self._disk)
        except WrongKind as error:
            if not self._has_frames():
                raise
            self._damaged(FindingKind.IDENTITY, path, str(error))
        except NotALog:
            if not self._has_frames():
                raise
            self._damaged(FindingKind.IDENTITY, path, f"{path} is missing: restore the file.")
        except CorruptData as error:
            self._damaged(FindingKind.IDENTITY, path, str(error))
        return next(self._owners(), None)

    def _has_frames(self) -> bool:
        """Whether there is more than the leftovers of an interrupted creation."""
        firsts = names.firsts_in(self._disk.scan(self._folder))
        if firsts != [0]:
            return bool(firsts)
        data = memoryview(self._disk.read(f"{self._folder}/{names.data_name(0)}", 0, WINDOW))
        return any(not frame.info.flags & names.LEAD for frame in FrameScanner(data))

    def _owners(self) -> Iterator[UUID]:
        for first in names.firsts_in(self._disk.scan(self._folder)):
            path = f"{self._folder}/{names.data_name(first)}"
            try:
                head = frame_head(memoryview(self._disk.read(path, 0, HEADER_SIZE)))
                if isinstance(head, Stop):
                    continue
                for frame in FrameScanner(memoryview(self._disk.read(path, 0, head.end))):
                    yield lead_of(decode_frame(frame, path).metadata, path)[0]
            except (CorruptData, NotFound):
                continue

    def _kept(self, log_id: UUID) -> SlotsFile | None:
        try:
            return read_slots_file(self._folder, log_id, disk=self._disk)
        except CorruptData as error:
            self._damaged(FindingKind.SLOT, f"{self._folder}/{names.SLOTS_FILE}", str(error))
            return None

    def _mark(self, log_id: UUID) -> Mark | None:
        mark = read_mark(self._folder, log_id, disk=self._disk, tries=MARK_READS)
        if mark is None:
            path = f"{self._folder}/{names.MARK}"
            self._note(FindingKind.MARK, path, f"{path} is missing or cannot be read: opening the log rebuilds it.")
        return mark

    def _others(self, rows: list[FolderRow], firsts: list[int]) -> None:
        for row in rows:
            kind, path, of = FindingKind.STRANGER, f"{self._folder}/{row.name}", _OF_FILE.fullmatch(row.name)
            if row.name.endswith(names.TORN):
                kind = FindingKind.PIECE
                text = f"holds {row.size} bytes that were once cut as torn: remove it when it is not needed"
            elif row.name == names.REWIND:
                text = "records an interrupted rewind, which opening the log finishes: do that first"
            elif row.name in _KNOWN or (row.name.endswith(names.DATA) and of is not None):
                continue
            elif row.name.endswith(names.NEW) and (row.name.removesuffix(names.NEW) in _KNOWN or of is not None):
                text = "was left by an interrupted write: it is ignored"
            elif row.name.endswith(names.INDEX) and of is not None:
                if int(of[1]) in firsts:
                    continue
                kind, text = FindingKind.INDEX, "is the index of a file that does not exist: it is ignored"
            else:
                text = "does not belong to the log, which ignores it"
            self._note(kind, path, f"{path} {text}.")

    def _files(self, log_id: UUID, start: int, mark: Mark | None, firsts: list[int]) -> int:
        """Check all files of frames; returns the end of the log according to them."""
        if not firsts:
            if not self._is_trimmed(log_id, 0 if mark is None else mark.next):
                text = f"{self._folder} has no files of frames, although there is a log: restore them."
                self._damaged(FindingKind.CONTINUITY, self._folder, text)
            return 0
        if firsts[0] > start and not self._is_trimmed(log_id, firsts[0]):
            text = f"The log begins at offset {start}, and its first file at {firsts[0]}: restore the files before it."
            self._damaged(FindingKind.CONTINUITY, f"{self._folder}/{names.data_name(firsts[0])}", text)
        term, end = 0, 0
        for first, following in zip(firsts, [*firsts[1:], None], strict=True):
            path = f"{self._folder}/{names.data_name(first)}"
            if following is not None and following <= start:
                self._note(
                    FindingKind.TRIM, path, f"{path} holds nothing that is retained: opening or trimming removes it."
                )
                continue
            try:
                facts = self._check_file(log_id, path, first, term, is_closed=following is not None)
            except NotFound:
                if not self._may_be_gone(log_id, first, following, mark):
                    self._damaged(
                        FindingKind.CONTINUITY, path, f"{path} is gone, and was not trimmed: restore the file."
                    )
                continue
            term, end = facts.term, facts.next
            if following is not None:
                self._result.take(judge_closed(facts, following))
            else:
                end = self._last(log_id, facts, mark)
                self._times(facts)
        return end

    def _check_file(self, log_id: UUID, path: str, first: int, term: int, *, is_closed: bool) -> FileCheck:
        # The index before the size: its entries are in the file by then, even while a writer appends.
        try:
            data: bytes | None = self._disk.read(f"{self._folder}/{names.index_name(first)}")
        except NotFound:
            data = None
        size = self._disk.size(path)
        index = decode_index(data or b"", new_chain(log_id, first))
        check = FileCheck(path, first, size, log_id=log_id, term=term, index=index)
        for found in walk(path, size, is_own=frames_of(log_id), disk=self._disk):
            before = check.at
            check.take(found)
            self._on_progress(check.at - before)
            if check.has_too_many_problems:
                break
        check.done()
        wrong = check.index.judged(is_closed=is_closed, size=None if data is None else len(data))
        if wrong is not None:
            self._result.indexes = (*self._result.indexes, first)
            path = f"{self._folder}/{names.index_name(first)}"
            self._note(FindingKind.INDEX, path, f"{path} has to be rebuilt: {wrong}. Run 'strandline wal repair'.")
        self._result.examined["files"] += 1
        self._result.examined["frames"] += check.frames
        self._result.examined["records"] += check.records
        self._result.examined["bytes"] += check.at
        return check

    def _last(self, log_id: UUID, facts: FileCheck, mark: Mark | None) -> int:
        """Judge the last file by the mark at the start, or by a later one if nothing was written since."""
        durable = max(facts.first, 0 if mark is None else mark.next)
        now = read_mark(self._folder, log_id, disk=self._disk)
        if now == mark:
            # A process that opens the log publishes its mark before it appends anything.
            durable = max(durable, facts.durable)
        is_active = mark is not None and mark.active == facts.first
        findings = list(
            judge_last(facts, durable, is_active=is_active, may_be_written=mark is not None and not mark.clean)
        )
        self._result.take(findings)
        torn = next((finding.byte for finding in findings if finding.kind is FindingKind.TAIL), None)
        offsets = [problem.offset for problem in facts.problems if problem.at == torn]
        return offsets[0] if offsets else facts.next

    def _times(self, facts: FileCheck) -> None:
        """Report a last frame that is ahead of the present: one of two clocks is or was wrong."""
        ahead = facts.written * 1000 - self._clock.now()
        if ahead > TOLERANCE:
            text = (
                f"The last frame in {facts.path} is {ahead // SECOND:,} s ahead of this machine's clock, which was "
                "ahead when it was written, or is behind now: correct the clock. New frames have right times within a "
                "day."
            )
            self._note(FindingKind.TIMES, facts.path, text)

    def _may_be_gone(self, log_id: UUID, first: int, following: int | None, mark: Mark | None) -> bool:
        """Whether a file may have been removed meanwhile: trimmed, or never finished and removed on opening."""
        if following is not None:
            return self._is_trimmed(log_id, following)
        return mark is None or (mark.next <= first and mark.active != first) or self._is_trimmed(log_id, mark.next)

    def _is_trimmed(self, log_id: UUID, upto: int) -> bool:
        """Whether the log has been trimmed up to an offset by now."""
        try:
            kept = read_slots_file(self._folder, log_id, disk=self._disk)
        except CorruptData:
            return False
        return upto > 0 and kept.start >= upto

    def _damaged(self, kind: FindingKind, path: str, text: str) -> None:
        self._result.take([Finding(Severity.DAMAGE, kind, path, text)])

    def _note(self, kind: FindingKind, path: str, text: str) -> None:
        self._result.take([Finding(Severity.NOTE, kind, path, text)])
