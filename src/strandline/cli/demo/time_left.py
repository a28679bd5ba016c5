"""The time that the demo still takes: planned stage by stage, corrected by how long the past stages took."""

from __future__ import annotations

from typing import Final

_STAGES: Final = (34.0, 11.0, 20.0, 6.0, 18.0, 8.0, 8.0)
"""Seconds of each stage of a million changes on two quiet cores: up, killed, up, killed, up, all applied, compared."""
_ROUNDED: Final = 5
_FASTEST: Final = 0.5
"""The least share of the planned time that the rest is expected to take."""


class TimeLeft:
    """Estimates the rest of the demo. Tell it when a stage has ended.

    >>> left = TimeLeft()
    >>> left.at(5.0)
    100.0
    >>> left.stage_ended(68.0)  # twice as slow as planned
    >>> left.at(78.0)
    132.0
    """

    def __init__(self) -> None:
        """At the start of the first stage."""
        self._ended = 0
        self._since = 0.0

    def stage_ended(self, at: float) -> None:
        """The current stage ended ``at`` seconds after the start."""
        self._ended += 1
        self._since = at

    def at(self, now: float) -> float:
        """The seconds that are left, ``now`` seconds after the start."""
        planned = sum(_STAGES[: self._ended])
        pace = max(_FASTEST, self._since / planned) if planned else 1.0
        current, later = sum(_STAGES[self._ended : self._ended + 1]), sum(_STAGES[self._ended + 1 :])
        return max(0.0, current * pace - (now - self._since)) + later * pace

    def text(self, now: float) -> str:
        """The estimate in words, rounded.

        >>> TimeLeft().text(4.0)
        '100 s left'
        """
        left = round(self.at(now) / _ROUNDED) * _ROUNDED
        return f"{max(_ROUNDED, left)} s left"
