"""Content types: what the values of a log are, for clients that read them over HTTP."""

from __future__ import annotations

import re
from typing import Final

from strandline.errors import InvalidInput

_LONGEST: Final = 256
_WORD: Final = r"[A-Za-z0-9!#$&^_.+-]+"
_QUOTED: Final = r'"[\x20\x21\x23-\x5b\x5d-\x7e]*"'
_MEDIA_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}( ?; ?{_WORD}=({_WORD}|{_QUOTED}))*")


def check_content_type(text: str) -> str:
    """The content type as it is recorded; ``InvalidInput`` unless it is a media type of up to 256 letters.

    >>> check_content_type("application/json"), check_content_type("text/plain; charset=utf-8")
    ('application/json', 'text/plain; charset=utf-8')
    """
    if len(text) > _LONGEST or _MEDIA_TYPE.fullmatch(text) is None:
        raise InvalidInput(
            f"{text[:80]!r} is no content type: give a media type of up to {_LONGEST} letters, such as "
            "application/json."
        )
    return text


def check_same(recorded: str | None, given: str | None, where: str) -> None:
    """``InvalidInput`` if a log that exists was created with another content type than the given one."""
    if given is not None and recorded != given:
        created = "without a content type" if recorded is None else f"as {recorded}"
        raise InvalidInput(
            f"The log at {where} was created {created}, and not as {given}; that never changes: open it without a "
            "content type, or create another log."
        )
