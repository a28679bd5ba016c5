"""JSON that came from elsewhere: parsed within bounds, and its values taken for nothing but what they are.

``ValueError`` says what is wrong; whoever knows the object's name makes it an error of ours.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

LARGEST: Final = 32 << 20
"""Nothing longer is parsed."""

MOST_VALUES: Final = 1 << 20
"""Each value takes up to a hundred bytes of memory, and may take two where it is written."""

LARGEST_NUMBER: Final = (1 << 63) - 1
"""Of offsets, terms, epochs, counts and times."""

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{16}")

_SIGNS: Final = (b",", b"[", b"{", b":")
"""Each value follows one of these, but for the first."""


def has_too_many_values(data: bytes | memoryview) -> bool:
    """Whether parsing this could take far more memory than it has bytes; signs within texts count too."""
    if len(data) <= MOST_VALUES:
        return False
    raw = bytes(data)
    return sum(map(raw.count, _SIGNS)) > MOST_VALUES


def parse_json(data: bytes | memoryview) -> Any:
    """The value in these bytes; ``ValueError`` if there is none, or more than is kept in JSON here."""
    if len(data) > LARGEST or has_too_many_values(data):
        raise ValueError(f"{len(data):,} bytes hold more than is kept in JSON")
    try:
        return json.loads(bytes(data))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def parse_object(data: bytes | memoryview) -> dict[str, Any]:
    """The object in these bytes; ``ValueError`` if they are none."""
    found = parse_json(data)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the bytes are wrong, not the program
    return found


def whole(value: object) -> int:
    """A whole number that fits 64 bits with its sign."""
    if type(value) is not int or not -LARGEST_NUMBER - 1 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{_shown(value)} is no whole number in range")
    return value


def natural(value: object, largest: int = LARGEST_NUMBER) -> int:
    """A whole number from 0 on."""
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{_shown(value)} is no whole number in range")
    return value


def text(value: object) -> str:
    """A text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no text")  # noqa: TRY004 - the bytes are wrong, not the program
    value.encode()  # half a surrogate is a ValueError
    return value


def flag(value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")  # noqa: TRY004 - the bytes are wrong, not the program
    return value


def _shown(value: object) -> str:
    """Enough of a value to find it: it may be as large as everything."""
    return type(value).__name__ if isinstance(value, dict | list) else str(value)[:80]


def fingerprint_text(fingerprint: int) -> str:
    """The fingerprint of a batch as text."""
    return f"{fingerprint:016x}"


def fingerprint_of(value: object) -> int | None:
    """The inverse; None for none, which is not known."""
    if value is None:
        return None
    if not isinstance(value, str) or not _FINGERPRINT.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no fingerprint")
    return int(value, 16)
