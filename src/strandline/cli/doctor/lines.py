"""Lines of the doctor's report: one for each check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class CheckStatus(StrEnum):
    """How something is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at, how it is, and one sentence: what was found, and what to do if it is not well."""

    status: CheckStatus
    what: str
    said: str


ok = partial(Line, CheckStatus.OK)
"""It is well."""
warning = partial(Line, CheckStatus.WARNING)
"""It works, and somebody should look at it."""
problem = partial(Line, CheckStatus.PROBLEM)
"""It does not work, or cannot be relied on."""
