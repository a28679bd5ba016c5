"""How far a term may rise by what others say: as elections raise it, and no further."""

from __future__ import annotations

from typing import Final

from strandline.errors import Fenced

TERM_STEP: Final = 1 << 24
"""How far a term may be above the highest that was seen: a year of elections, one every two seconds."""

HIGHEST_TERM: Final = 1 << 62
"""No election gets there; above it there would be no next term that a frame can hold."""


def check_rise(seen: int, told: int, who: str) -> int:
    """The term that was told, if elections can have raised it there from ``seen``; ``Fenced`` otherwise.

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
    """The highest of the terms that a node remembers to which elections can have led from that of its last record.

    >>> plausible_term(4, 5, 1 << 60)
    5
    """
    return max(in_log, *(term for term in remembered if term <= in_log + TERM_STEP))
