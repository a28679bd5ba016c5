"""The slot of a streaming query: it pins what the query still needs, and moves behind what Spark has committed."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

from strandline.errors import AlreadyExists, NotFound, SlotInvalid
from strandline.log.contract import Log, Slot, require
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotState
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM

_LOGGER: Final = logging.getLogger(__name__)


class StreamSlot:
    """A slot that the process of one query's source holds, for as long as it lives.

    A thread touches it, so that it stays valid while the query is idle or a micro-batch takes long. It is never ahead
    of what Spark has committed, and usually one micro-batch behind that, because Spark reports a commit with the next
    micro-batch. If another query claims it, this one ends with ``Fenced``.
    """

    def __init__(self, name: str, *, resets: bool) -> None:
        """Nothing is claimed yet. ``resets``: an invalidated slot is made valid again."""
        self._name = name
        self._resets = resets
        self._held: SlotHeartbeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}  # tasks get a copy, and hold nothing

    def hold(self, log: Log, since: Cursor) -> None:
        """Claim the slot and pin everything from a cursor on, unless that is done; creates it if there is none.

        ``SlotInvalid`` if it was invalidated: records that the query needs may be deleted.
        """
        if self._held is not None:
            return
        require(log, "read by a stream with a slot", slots=True)
        slot = self._claimed(log, since)
        self._held = SlotHeartbeat(slot, log, env=SYSTEM).start()

    def _claimed(self, log: Log, since: Cursor) -> Slot:
        state = self._state(log)
        if state is None:
            with contextlib.suppress(AlreadyExists):
                log.slots.create(self._name, since.next)
        elif state.invalid is not None and not self._resets:
            raise SlotInvalid(
                f"Slot {self._name!r} was invalidated ({state.invalid.reason}): records from {since.next} on may be "
                "deleted. If the log or its cold tier still has them, add the option resetSlot=true; if not, start "
                "with a new checkpoint, or with failOnDataLoss=false."
            )
        elif state.invalid is not None or state.position > since.next:
            _LOGGER.warning("Slot %r is moved from offset %d to %d.", self._name, state.position, since.next)
            log.slots.reset(self._name, since.next)
        return log.slots.claim(self._name, f"spark-{CHANCE.uuid()}")

    def _state(self, log: Log) -> SlotState | None:
        with contextlib.suppress(NotFound):
            return log.slots.get(self._name)
        return None

    def check(self) -> None:
        """``Fenced`` or ``SlotInvalid`` if the slot was lost."""
        if self._held is not None and self._held.is_over:
            self._held.touch()

    def advance(self, to: Cursor) -> None:
        """Move the slot behind what is committed."""
        if self._held is not None:
            self._held.advance(to)
