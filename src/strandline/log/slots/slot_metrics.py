"""The metrics of a log's slots and floor, and the report of an invalidated slot, for the process that trims it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Final, NamedTuple, final

from strandline.model.cursor import Bounds
from strandline.model.retention import SlotState
from strandline.storage.metrics import (
    FIRST_OFFSET,
    FLOOR,
    INVALIDATIONS,
    NEXT_OFFSET,
    SLOT_LAG_BYTES,
    SLOT_LAG_RECORDS,
    SLOT_LAG_SECONDS,
    SLOT_PINS,
)

_OF_SLOTS: Final = (SLOT_LAG_RECORDS, SLOT_LAG_BYTES, SLOT_LAG_SECONDS, SLOT_PINS)
_OF_LOG: Final = (FIRST_OFFSET, NEXT_OFFSET, FLOOR)


def report_invalid(state: SlotState, where: str, why: int | str, logger: logging.Logger) -> None:
    """Count and log a slot that was invalidated; ``why`` is the reason as a phrase, or how many bytes are behind it."""
    reason = None if state.invalid is None else state.invalid.reason
    INVALIDATIONS.labels(str(reason)).inc()
    if isinstance(why, int):
        why = f"with {why} bytes behind it: records that it needs may be deleted"
    logger.warning(
        "Slot %r of %s was invalidated (%s) at offset %d, %s. Bootstrap its consumer again and reset the slot.",
        state.name, where, reason, state.position, why,
    )  # fmt: skip


class MeasuredSlot(NamedTuple):
    """What a slot has not passed, and whether it pins that."""

    records: int
    bytes: int
    seconds: float
    pins: bool


@final
class SlotMetrics:
    """Metrics of one log; those of slots that are gone are removed."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._names: frozenset[str] = frozenset()

    def measure(self, bounds: Bounds, floor: int | None, slots: Mapping[str, MeasuredSlot]) -> None:
        """Set the metrics of the log, its floor and these slots."""
        for metric, offset in zip(_OF_LOG, (bounds.first, bounds.next, floor), strict=True):
            metric.labels(self._log).set(math.nan if offset is None else offset)
        for name, slot in slots.items():
            for metric, number in zip(_OF_SLOTS, slot, strict=True):
                metric.labels(self._log, name).set(number)
        self._keep(frozenset(slots))

    def end(self) -> None:
        """Remove all of them: this process no longer measures."""
        self._keep(frozenset())
        for metric in _OF_LOG:
            with contextlib.suppress(KeyError):  # never set
                metric.remove(self._log)

    def _keep(self, names: frozenset[str]) -> None:
        for name in self._names - names:
            for metric in _OF_SLOTS:
                metric.remove(self._log, name)
        self._names = names
