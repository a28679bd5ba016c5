"""When the ranges of a pipeline are committed: a trigger in Spark's words."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import InvalidInput
from strandline.model.arguments import shown

_UNITS: Final = {"ms": 0.001, "millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
"""Seconds of each unit, which may also end with ``s``."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When ranges are committed: continuously with a pace in seconds, or up to the log's end as of the start."""

    pace: float = 1.0
    is_bounded: bool = False
    is_single: bool = False
    """Whether everything is one commit."""


def parse_trigger(trigger: Mapping[str, Any]) -> Trigger:
    """A trigger in Spark's words.

    >>> parse_trigger({"availableNow": True})
    Trigger(pace=0.0, is_bounded=True, is_single=False)
    >>> parse_trigger({"processingTime": "1 minute 30 seconds"}).pace
    90.0
    """
    if len(trigger) == 1:
        match dict(trigger):
            case {"processingTime": str() as text}:
                return Trigger(_interval(text))
            case {"availableNow": True}:
                return Trigger(0.0, is_bounded=True)
            case {"once": True}:
                return Trigger(0.0, is_bounded=True, is_single=True)
    raise InvalidInput(
        "trigger is one of {'processingTime': '10 seconds'}, {'availableNow': True} and {'once': True}, not "
        f"{shown(dict(trigger))}."
    )


def _interval(text: str) -> float:
    words = text.lower().removeprefix("interval").split()
    numbers, units = words[::2], [unit if unit in _UNITS else unit.removesuffix("s") for unit in words[1::2]]
    if words and len(numbers) == len(units) and all(unit in _UNITS for unit in units):
        with contextlib.suppress(ValueError):
            found = sum(float(number) * _UNITS[unit] for number, unit in zip(numbers, units, strict=True))
            if 0 <= found < 1 << 31:
                return found
    raise InvalidInput(f"processingTime is an interval as Spark writes it, such as '10 seconds', not {shown(text)}.")
