"""Rules of numbered writers, as pure functions: the same for every log that remembers them."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from strandline.errors import InvalidInput, OutOfOrder, WriterExpired
from strandline.model.arguments import shown, whole
from strandline.model.head import WriterId, WriterState

MAX_WRITERS: Final = 512
"""How many writers a log remembers; the ones that were silent the longest are forgotten first."""


def numbered(writer: WriterId | None, number: int | None) -> tuple[WriterId, int] | None:
    """Who appends, and which of its appends it is; None for an append that is not numbered. One alone is refused.

    >>> numbered(None, None) is None
    True
    >>> numbered(None, 7)
    Traceback (most recent call last):
    strandline.errors.InvalidInput: A numbered append has a writer and a number: pass both, or neither.
    """
    if (writer is None) != (number is None):
        raise InvalidInput("A numbered append has a writer and a number: pass both, or neither.")
    if writer is None or number is None:
        return None
    if not isinstance(writer, UUID):
        raise InvalidInput(f"A writer is a WriterId, which is a UUID, not {shown(writer)}.")
    return writer, int(whole().check(number, "The number of an append"))


def check_number(writer: WriterId, number: int, last: WriterState | None, *, forgotten: bool = False) -> None:
    """Refuse a number that does not follow the writer's last one, and an unknown writer that is not new.

    ``forgotten`` says that the log may have known this writer, even if it now begins with its first number.
    """
    if last is None:
        if number > 0 or forgotten:
            raise WriterExpired(
                f"The log does not know writer {writer} (number {number}): it was silent for too long, and "
                "what became of its last append is unknown. Check the log's end, then go on with a new producer."
            )
    elif number != last.number + 1:
        raise OutOfOrder(
            f"Writer {writer} asks to list number {number}, and its last listed number is {last.number}: "
            f"append number {last.number + 1} first."
        )


def forget_silent(writers: dict[WriterId, WriterState]) -> int:
    """Forget writers beyond the bound; returns one past the last sequence of any that was forgotten, else 0."""
    floor = 0
    while len(writers) > MAX_WRITERS:
        silent = min(writers, key=lambda known: writers[known].sequence)
        floor = max(floor, writers.pop(silent).sequence + 1)
    return floor
