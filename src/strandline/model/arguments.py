"""Arguments of public calls: what can be written and never read again is refused before anything is written."""

from __future__ import annotations

from typing import Final

from strandline.errors import InvalidInput

LARGEST_NUMBER: Final = (1 << 63) - 1
_SHOWN: Final = 60


def whole_number(value: object, what: str, *, least: int = 0, most: int = LARGEST_NUMBER) -> int:
    """The value, if it is a whole number within these bounds; ``what`` begins the sentence that refuses it.

    >>> whole_number(True, "A position", most=9)
    Traceback (most recent call last):
    strandline.errors.InvalidInput: A position is a whole number from 0 up to 9, not True.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{what} is a whole number from {least} up to {most}, not {shown(value)}.")
    return value


def is_number(value: object, *, above: float, most: float) -> bool:
    """Whether it is a number above the one and up to the other: no truth value, and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most


def plain_text(value: object, what: str) -> str:
    """The value, if it is a text that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value or not _is_writable(value):
        raise InvalidInput(f"{what} is a text that is not empty, not {shown(value)}.")
    return value


def shown(value: object) -> str:
    """The value in a sentence: short, and without signs that a terminal would follow."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return f"one of the kind {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
