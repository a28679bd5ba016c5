"""How many messages a body holds, judged by its bytes before anything is decoded. Pure.

A decoded message takes some hundred bytes however short it is: without a limit of their number a body of digits and
commas would take sixty times its size.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strandline.serve.http.protocol.content import JSON, media_type
from strandline.serve.http.protocol.records import LINES
from strandline.serve.http.requests import TooLarge

_WINDOW: Final = 1 << 20
_QUOTE, _COMMA = ord('"'), ord(",")
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def check_count(body: bytes, content_type: str, most: int) -> None:
    """``TooLarge`` for a body with more messages, or lines, than ``most``; costs a fraction of decoding it.

    >>> check_count(b'[1, [2, 3], "4, 5"]', "application/json", 3)
    >>> check_count(b'[1, [2, 3], "4, 5"]', "application/json", 2)
    Traceback (most recent call last):
    strandline.serve.http.requests.TooLarge: The body holds more than 2 messages, ...
    """
    kind = media_type(content_type)
    if kind == LINES:
        is_over = body.count(b"\n") > most
    else:
        is_over = (kind == JSON or kind.endswith("+json")) and _has_more(body, most)
    if is_over:
        raise TooLarge(
            f"The body holds more than {most:,} messages, which is the limit of this server; nothing was appended. "
            "Append it in parts."
        )


def _has_more(body: bytes, most: int) -> bool:
    """Whether the array in a body has more elements; False for another value.

    What is no JSON is judged as far as a decoder gets, which stops at the first wrong byte.
    """
    if body.count(b",") < most or body.lstrip()[:1] != b"[":
        return False
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    every = np.frombuffer(plain, np.uint8)
    found, depth, quotes = 1, 0, 0
    for start in range(0, len(every), _WINDOW):
        part = every[start : start + _WINDOW]
        before = np.cumsum(part == _QUOTE, dtype=np.int64) + quotes
        outside = (before & 1) == 0
        depths = np.cumsum(_STEPS[part] * outside, dtype=np.int64) + depth
        found += int(np.count_nonzero((part == _COMMA) & outside & (depths == 1)))
        if found > most:
            return True
        depth, quotes = int(depths[-1]), int(before[-1])
    return False
