"""Lines of the doctor's report: one for each check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class CheckStatus(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Line:
    """One check, its result, and one sentence: what was found, and what to do if it failed."""

    status: CheckStatus
    what: str
    said: str


ok = partial(Line, CheckStatus.OK)
"""Works."""
warning = partial(Line, CheckStatus.WARNING)
"""Works, but needs attention."""
problem = partial(Line, CheckStatus.PROBLEM)
"""Does not work, or is unreliable."""
