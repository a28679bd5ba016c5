"""Offsets as clients see them, and the cursors of live readers. Pure."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final
from uuid import UUID

from strandline.errors import CursorExpired, InvalidInput
from strandline.model.arguments import LARGEST_NUMBER, shown
from strandline.model.cursor import SECOND, Cursor

_TOKEN: Final = re.compile(r"([0-9]{19})_([0-9a-f]{12})(?:-([0-9a-f]{1,16})-([0-9a-f]{16}))?")
_DIGEST_BYTES: Final = 6

BEGINNING: Final = "-1"
NOW: Final = "now"

_INTERVAL: Final = 20
"""Seconds of a live cursor: caches answer readers with the same cursor together."""
_INTERVALS_FROM: Final = 1_728_432_000
"""2024-10-09T00:00:00Z in seconds, from where the intervals are counted."""
_JITTER: Final = 3600


def token_of(cursor: Cursor) -> str:
    """The offset token of a cursor: sorts as text in the order of the offsets, and names the log.

    With a term, as in a replicated log, it also holds term and fingerprint, so that another history is recognised.

    >>> token_of(Cursor(UUID(int=7), 42))
    '0000000000000000042_6ccd38369481'
    >>> token_of(Cursor(UUID(int=7), 42, 3, 255))
    '0000000000000000042_6ccd38369481-3-00000000000000ff'
    """
    text = f"{cursor.next:019d}_{_digest(cursor.log_id)}"
    return (
        text if not cursor.term or cursor.fingerprint is None else f"{text}-{cursor.term:x}-{cursor.fingerprint:016x}"
    )


def cursor_of_token(token: str, log_id: UUID) -> Cursor:
    """The inverse of :func:`token_of`. ``InvalidInput`` for no token, ``CursorExpired`` for one of another log.

    >>> cursor_of_token("0000000000000000042_6ccd38369481", UUID(int=7)).next
    42
    >>> cursor_of_token("0000000000000000042_6ccd38369481", UUID(int=8))
    Traceback (most recent call last):
    strandline.errors.CursorExpired: The offset is of another stream, ... begin again at offset -1.
    """
    found = _TOKEN.fullmatch(token)
    if found is None or int(found[1]) > LARGEST_NUMBER:
        raise InvalidInput(
            f"{shown(token)} is no offset: give -1, now, or the Stream-Next-Offset of an earlier answer, unchanged."
        )
    if found[2] != _digest(log_id):
        raise CursorExpired(
            "The offset is of another stream, or of one that was deleted and made again under this name: begin again "
            "at offset -1."
        )
    if found[3] is None:
        return Cursor(log_id, int(found[1]))
    return Cursor(log_id, int(found[1]), int(found[3], 16), int(found[4], 16))


def _digest(log_id: UUID) -> str:
    return blake2b(log_id.bytes, digest_size=_DIGEST_BYTES).hexdigest()


def live_cursor(given: str | None, now: int, jitter: float) -> str:
    """The cursor of a live answer at a time in microseconds; always above the one that the client gave.

    >>> live_cursor(None, 1_728_432_041 * SECOND, 0.5), live_cursor("2", 1_728_432_041 * SECOND, 0.5)
    ('2', '92')
    """
    current = (now // SECOND - _INTERVALS_FROM) // _INTERVAL
    if given is None or not given.isascii() or not given.isdecimal() or len(given) > len(str(LARGEST_NUMBER)) - 1:
        return str(current)
    if int(given) < current:
        return str(current)
    return str(int(given) + max(1, int(jitter * _JITTER) // _INTERVAL))
