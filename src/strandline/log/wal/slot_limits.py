"""The slots of an open log: those that break a limit lose their pin, durably and loudly, before anything goes."""

from __future__ import annotations

import logging
from typing import Final

from strandline.log.contract import Slot
from strandline.log.retention import judge
from strandline.log.slots import retained_first
from strandline.log.wal.read.reading import WalReading
from strandline.log.wal.slots import WalSlots
from strandline.model.cursor import SECOND
from strandline.model.retention import NO_LIMITS, SlotLimits
from strandline.model.slots import NEWCOMER_SECONDS, InvalidReason, SlotState
from strandline.storage.clock import Clock
from strandline.storage.metrics import INVALIDATIONS

_LOGGER: Final = logging.getLogger(__name__)


class WalKeeping(WalReading):
    """What a log that is open for writing does with its slots. Safe in threads."""

    _slots: WalSlots
    _clock: Clock

    def create_slot(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Durably create a slot that pins everything from ``position`` on.

        ``retained_from`` is where the log's cold tier begins, if it has one: a slot may stand there, too.
        """
        return self._slots.create(name, position, retained_from)

    def create_newcomer_slot(
        self, name: str, position: int, *, retained_from: int | None = None, seconds: float = NEWCOMER_SECONDS
    ) -> SlotState:
        """The same for a consumer that has stored nothing yet: unless it is claimed or touched, it goes after a while.

        A newcomer that is killed before it has stored something leaves no slot behind that pins the log for good.
        """
        return self._slots.create(name, position, retained_from, lifetime=seconds)

    def claim_slot(self, name: str, holder: str) -> Slot:
        """Durably become the slot's holder."""
        return self._slots.claim(name, holder)

    def touch_slot(self, name: str, epoch: int) -> None:
        """Say that a slot is needed which nobody has claimed yet; raises as a claimed one's ``touch`` does."""
        self._slots.touch(name, epoch)

    def reset_slot(self, name: str, position: int, *, retained_from: int | None = None) -> SlotState:
        """Durably put a slot elsewhere, back or ahead, and make it valid again; see :meth:`create_slot`."""
        return self._slots.reset(name, position, retained_from)

    def drop_slot(self, name: str) -> None:
        """Durably remove a slot."""
        self._slots.drop(name)

    def invalidate_slot(self, name: str, reason: InvalidReason) -> SlotState:
        """Durably take a slot's pin away, with a reason; its consumer has to bootstrap again."""
        return self._slots.invalidate(name, reason)

    def flush_slots(self) -> None:
        """Durably write the positions that were only noted."""
        self._slots.flush()

    def slots(self) -> list[SlotState]:
        """All slots, by name."""
        return self._slots.listed()

    def floor(self) -> int | None:
        """The lowest position that a valid slot still needs; None without any."""
        return self._slots.floor()

    def enforce(self, limits: SlotLimits) -> list[SlotState]:
        """Durably invalidate the slots that break a limit, loudly; returns them. Those that expired are dropped.

        A slot is idle since it was last seen, or since the log was opened: nobody could be seen before. That is
        counted on a clock that never jumps, whatever the wall clock does, and that stands still with the machine.
        """
        for state in self._slots.expire_silent():
            _LOGGER.warning(
                "Slot %r of %s was dropped: its consumer has not claimed it, and was not seen for %g minutes.",
                state.name, self.folder, ((state.expires or 0) - state.last_seen) / SECOND / 60,
            )  # fmt: skip
        return _enforce(self, self._slots, limits)


def _enforce(log: WalReading, slots: WalSlots, limits: SlotLimits) -> list[SlotState]:
    """Durably invalidate the slots that break a limit, and tell of each; returns them.

    A slot that moves meanwhile is left alone.
    """
    if limits == NO_LIMITS:
        return []
    first = retained_first(slots.proven(), log.bounds().first)
    judged: list[tuple[SlotState, InvalidReason]] = []
    behind: dict[str, int] = {}
    for state in slots.listed():
        behind[state.name] = log.bytes_behind(state.position) if limits.lag_bytes and state.pins else 0
        is_idle = slots.silence(state.name) > limits.idle_seconds
        reason = judge(state, first=first, behind=behind[state.name], limits=limits, is_idle=is_idle)
        if reason is not None:
            judged.append((state, reason))
    invalidated = slots.invalidate_judged(judged) if judged else []
    for state in invalidated:
        reason = None if state.invalid is None else state.invalid.reason
        INVALIDATIONS.labels(str(reason)).inc()
        _LOGGER.warning(
            "Slot %r of %s was invalidated (%s) at offset %d, with %d bytes behind it: what it needs may be gone. "
            "Bootstrap its consumer again and reset the slot.",
            state.name, log.folder, reason, state.position, behind[state.name],
        )  # fmt: skip
    return invalidated
