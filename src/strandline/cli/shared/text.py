"""Records and times as text, and back. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from strandline.errors import InvalidInput
from strandline.formats.json.records import InputRecord

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def readable(data: bytes | None) -> str:
    r"""Bytes for a terminal: text if they are UTF-8, with control characters escaped, else hexadecimal.

    >>> print(readable("größe\n".encode()), readable(b"\xff\x00"), readable(None))
    größe\n 0xff00 -
    """
    if data is None:
        return "-"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "0x" + data.hex()
    return escaped(text)


def escaped(text: str, keep: str = "") -> str:
    r"""Text with everything that is not printable escaped, except the characters in ``keep``.

    Names, regions, headers and errors may be untrusted. A control character in them could clear the screen, overwrite
    text, or change the direction of writing.

    >>> print(escaped("a\x1b[2Jb\u202ec\n"), escaped("größe"))
    a\x1b[2Jb\u202ec\n größe
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def moment(microseconds: int, form: str = "%Y-%m-%d %H:%M:%S.%f") -> str | None:
    """A time since the epoch in UTC; None if it is outside the calendar: records may have any time.

    >>> moment(1_700_000_000_123_456), moment(-(2**63)), moment(2**63 - 1)
    ('2023-11-14 22:13:20.123456', None, None)
    """
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).strftime(form)
    except OverflowError:
        return None


def parse_line(line: bytes, number: int, separator: bytes | None) -> InputRecord:
    r"""A record from a line of text: its value, or with a separator its key and value.

    >>> parse_line(b"a=1\n", 1, b"=")
    InputRecord(key=b'a', value=b'1', op=<Op.PUT: 0>, timestamp=None, headers=None)
    """
    content = line.removesuffix(b"\n").removesuffix(b"\r")
    if separator is None:
        return InputRecord(None, content)
    key, found, value = content.partition(separator)
    if not found:
        raise InvalidInput(f"Line {number} does not hold the key separator {separator.decode()!r}.")
    return InputRecord(key, value)
