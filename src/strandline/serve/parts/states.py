"""What a supervisor decides: when a part is tried again, when it stops, and what the parts say of the process. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from strandline.errors import (
    BadRecord,
    ConsumerClosed,
    CursorExpired,
    DiskFull,
    Diverged,
    Fenced,
    Gap,
    InvalidInput,
    MissingExtra,
    NotReady,
    OutOfOrder,
    Sealed,
    SlotInvalid,
    TooManyDeadLetters,
    TransformFailed,
    UnsupportedVersion,
    UsedAcrossFork,
    WriterExpired,
)
from strandline.serve.config.changes import PartName
from strandline.storage.retry import Backoff

BACKOFF: Final = Backoff(base=0.5, ceiling=60.0)
"""Pauses between the attempts of a part that fails; there is no last attempt."""

_WAITS: Final = 5.0
"""Longest pause while something is not ready yet, such as a log that is being recovered, or a disk has no room."""

_UNCHANGED: Final = (
    BadRecord,
    ConsumerClosed,
    CursorExpired,
    Diverged,
    Fenced,
    Gap,
    InvalidInput,
    MissingExtra,
    OutOfOrder,
    Sealed,
    SlotInvalid,
    TooManyDeadLetters,
    TransformFailed,
    UnsupportedVersion,
    UsedAcrossFork,
    WriterExpired,
)
"""Errors that the same attempt meets again until somebody acts."""


def what_next(error: BaseException, failures: int, jitter: float) -> float | None:
    """Seconds until a part that failed is tried again; None if it stops, since trying again does not help.

    ``failures`` in a row, this one included. Outages, damage that is repaired and room that is made heal a part; a log
    that is not there may be made. Errors of no known kind are tried again, too.

    >>> from strandline.errors import TransientStorageError
    >>> [what_next(TransientStorageError("x"), failures, 1.0) for failures in (1, 2, 3, 20)]
    [0.5, 1.0, 2.0, 60.0]
    >>> what_next(Fenced("a newer follower took over"), 1, 1.0) is None
    True
    """
    if isinstance(error, _UNCHANGED):
        return None
    pause = BACKOFF.pause(max(0, failures - 1), jitter)
    return min(pause, _WAITS) if isinstance(error, NotReady | DiskFull) else pause


class Status(StrEnum):
    """What a part does."""

    STARTING = "starting"
    RUNNING = "running"
    FAILING = "failing"
    """It is tried again."""
    STOPPED = "stopped"
    """By an error that trying again does not help; the others go on."""
    PAUSED = "paused"
    """By an operator, until it is resumed."""
    ENDED = "ended"
    """It has done all that there is to do."""


@dataclass(frozen=True, slots=True)
class PartState:
    """A part as it is now."""

    part: PartName
    status: Status = Status.STARTING
    since: int = 0
    """Since when (microseconds)."""
    error: str = ""
    """The sentence of its last error, if it has not worked since."""
    failures: int = 0
    """In a row."""
    position: int | None = None
    """Offsets below are done; None: unknown, or it has none."""

    def moved(self, status: Status, now: int, error: str = "") -> PartState:
        """The part in another status; what works has no failures."""
        failures = self.failures + 1 if error else 0 if status is Status.RUNNING else self.failures
        return replace(
            self, status=status, since=self.since if status is self.status else now, error=error, failures=failures
        )


def sentence(error: BaseException) -> str:
    """What is shown of an error: the sentence of ours, or what Python says of any other."""
    text = str(error)
    return text if text and not isinstance(error, (KeyError, AssertionError)) else repr(error)


def why_not_ready(states: Iterable[PartState]) -> str | None:
    """Why a process is not ready; None when the recovery of its logs is done, and one of them works, if it has any.

    A log that cannot be opened keeps no other from being served; other parts follow the logs, and are not waited for.

    >>> why_not_ready([PartState(PartName("logs", "a"))])
    'logs.a is starting'
    >>> why_not_ready([PartState(PartName("tables", "a"), Status.STOPPED)]) is None
    True
    """
    logs = [state for state in states if state.part.section == "logs"]
    waiting = [str(state.part) for state in logs if state.status is Status.STARTING]
    if waiting:
        more = f", and {len(waiting) - 1} more are" if len(waiting) > 1 else " is"
        return f"{waiting[0]}{more} starting"
    if logs and not any(state.status is Status.RUNNING for state in logs):
        return f"{logs[0].part} is {logs[0].status}: {logs[0].error}"
    return None
