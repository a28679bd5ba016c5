"""Findings of a verification, and its result: the same for every kind of log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from strandline.model.cursor import Bounds


class Severity(StrEnum):
    """Severity of a finding."""

    DAMAGE = "damage"
    """Acknowledged data is lost or wrong, a guarantee is broken, or the log cannot be opened."""
    WASTE = "waste"
    """An object or file takes up space and is not needed."""
    NOTE = "note"
    """Worth knowing; correct as it is, or corrected automatically."""


class FindingKind(StrEnum):
    """The subject of a finding."""

    IDENTITY = "identity"
    SLOT = "slot"
    TRIM = "trim"
    STRANGER = "stranger"
    ORPHAN = "orphan"
    # object logs
    HEAD = "head"
    CHUNK = "chunk"
    LISTING = "listing"
    WRITER = "writer"
    BATCH = "batch"
    DEAD_LETTER = "dead-letter"
    # write-ahead logs
    MARK = "mark"
    FRAME = "frame"
    VERSION = "version"
    CONTINUITY = "continuity"
    TAIL = "tail"
    INDEX = "index"
    PIECE = "piece"
    TIMES = "times"
    # cold tiers
    SEGMENT = "segment"
    HOLE = "hole"
    OVERLAP = "overlap"
    STATE = "state"
    HISTORY = "history"
    # several of them
    DIFFERENCE = "difference"
    TABLE = "table"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``message`` is one sentence: what is wrong with ``where``, and what to do."""

    severity: Severity
    kind: FindingKind
    where: str
    """The object, file or slot concerned."""
    message: str
    byte: int | None = None
    """The byte in the file at which it begins, if it is about a position in a file."""
    offsets: tuple[int, int] | None = None
    """The offsets concerned, from the first one up to the second, if it is about records."""


@dataclass(slots=True)
class Verification:
    """Result of a verification. Counts all findings, and keeps the first ``most`` of each severity and kind."""

    subject: str
    """The URL or folder that was verified."""
    examined: Counter[str] = field(default_factory=Counter)
    """How many batches, records, bytes and so on were examined."""
    most: int = 1000
    log_id: UUID | None = None
    """None if nothing that could be read names the log."""
    bounds: Bounds = Bounds(0, 0)  # noqa: RUF009 - immutable
    """The offsets that were verified."""
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[Severity, FindingKind]] = field(default_factory=Counter)

    def take(self, findings: Iterable[Finding]) -> None:
        """Add findings."""
        for finding in findings:
            group = (finding.severity, finding.kind)
            self.counts[group] += 1
            if self.counts[group] <= self.most:
                self.findings.append(finding)

    def count(self, severity: Severity) -> int:
        """Number of findings of a severity."""
        return sum(count for (found, _), count in self.counts.items() if found is severity)

    @property
    def damage(self) -> list[Finding]:
        """The findings that are damage."""
        return [finding for finding in self.findings if finding.severity is Severity.DAMAGE]

    @property
    def is_clean(self) -> bool:
        """Whether there is no damage."""
        return not self.count(Severity.DAMAGE)
