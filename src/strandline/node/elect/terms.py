"""Bounds on terms from other nodes: no further than elections can raise them."""

from __future__ import annotations

from typing import Final

from strandline.errors import Fenced

TERM_STEP: Final = 1 << 24
"""Largest step above the highest term seen: a year of elections, one every two seconds."""

HIGHEST_TERM: Final = 1 << 62
"""The highest term: a frame could not hold the next one."""


def check_rise(seen: int, told: int, who: str) -> int:
    """The term ``told``, if elections can have raised it there from ``seen``; ``Fenced`` otherwise.

    >>> check_rise(4, 6, "a")
    6
    """
    if told > min(seen + TERM_STEP, HIGHEST_TERM):
        raise Fenced(
            f"{who[:200]} tells of term {told}, and the highest that this node has seen is {seen}: no election raises "
            "it so far, and nothing was changed. Find out who says so."
        )
    return told


def plausible_term(in_log: int, *remembered: int) -> int:
    """The highest stored term that elections can have reached from the term of the last record.

    >>> plausible_term(4, 5, 1 << 60)
    5
    """
    return max(in_log, *(term for term in remembered if term <= in_log + TERM_STEP))
