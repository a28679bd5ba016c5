"""Headers of NATS messages, parsed from any bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_VERSION: Final = b"NATS/1.0"
_END: Final = b"\r\n"


class MessageHeaders(dict[str, str]):
    """The headers of a message: the last value of each name; bytes that are not UTF-8 are surrogates (PEP 383)."""

    def __init__(self, lines: Sequence[tuple[str, bytes]], *, is_broken: bool) -> None:
        super().__init__((name, value.decode(errors="surrogateescape")) for name, value in lines)
        self.lines = list(lines)
        """All headers in their order, with the bytes of their values; a name may be there several times."""
        self.is_broken = is_broken
        """Whether something in the block is no header, and is missing here."""


def parse_headers(block: bytes) -> MessageHeaders:
    r"""The headers in a block; never an error, since any client may have written it.

    >>> parse_headers(b"NATS/1.0 404 No Messages\r\n\r\n")
    {'Status': '404', 'Description': 'No Messages'}
    >>> found = parse_headers(b"NATS/1.0\r\na: 1\r\nno header\r\na: \xff\r\n\r\n")
    >>> found.lines, found.is_broken
    ([('a', b'1'), ('a', b'\xff')], True)
    """
    first, _, rest = block.partition(_END)
    lines: list[tuple[str, bytes]] = []
    is_broken = not first.startswith(_VERSION) or not block.endswith(_END + _END)
    code, _, words = first.removeprefix(_VERSION).strip().partition(b" ")
    if code.isdigit():
        lines.append(("Status", code))
        if words.strip():
            lines.append(("Description", words.strip()))
    elif code:
        is_broken = True
    for line in rest.split(_END):
        name, colon, value = line.partition(b":")
        if parsed := _name(name) if colon else "":
            lines.append((parsed, value.strip(b" \t")))
        elif line:
            is_broken = True
    return MessageHeaders(lines, is_broken=is_broken)


def _name(name: bytes) -> str:
    """The name of a header; empty if it is none."""
    try:
        text = name.strip(b" \t").decode()
    except UnicodeDecodeError:
        return ""
    return "" if any(letter.isspace() for letter in text) else text
