"""What the doctor says: one line for each thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


def ok(what: str, said: str) -> Line:
    """It is well."""
    return Line(CheckStatus.OK, what, said)


def warning(what: str, said: str) -> Line:
    """It works, and somebody should look at it."""
    return Line(CheckStatus.WARNING, what, said)


def problem(what: str, said: str) -> Line:
    """It does not work, or cannot be relied on."""
    return Line(CheckStatus.PROBLEM, what, said)
