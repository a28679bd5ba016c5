"""Result of a verification: findings, and the offsets that each tier and table holds."""

from __future__ import annotations

from dataclasses import dataclass

from strandline.log.findings import Verification
from strandline.tables.maintain.operations import TableCheck


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A tier or a table: the offsets that it holds, and those that are damaged or differ."""

    name: str
    first: int
    next: int
    damage: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LogAudit:
    """Result of :func:`~strandline.bulk.verifying.verify`: counts, findings, and the state of each tier and table."""

    first: int
    next: int
    """The offsets that were verified are from ``first`` up to ``next``."""
    verification: Verification
    rows: tuple[AuditRow, ...]
    tables: tuple[tuple[str, TableCheck], ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether there is no damage."""
        return self.verification.is_clean
