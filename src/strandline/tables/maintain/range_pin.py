"""Pins the records that a rebuild reads: a slot of its own, and the slot of the table's follower."""

from __future__ import annotations

import contextlib
import logging
from typing import Final, final

from strandline.errors import CursorExpired, Diverged, StrandlineError
from strandline.log.contract import Log
from strandline.log.slots.pin import SlotPin
from strandline.model.cursor import Cursor
from strandline.model.retention import HOLDS
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM, Env

_LOGGER: Final = logging.getLogger(__name__)


@final
class RebuildPin:
    """Keeps a range of a log from being trimmed while it is read.

    The job's own slot is dropped at its end, and expires if the process is killed. A log without slots, such as one
    that is only read here, is read unpinned, with a warning: if it is trimmed meanwhile, the rebuild is refused. The
    follower's slot is put where the new rows end *before* they are committed, so that no crash leaves a table whose
    next records nothing pins; and once more behind the commit, while the job's own slot still pins them: a follower
    that was started meanwhile has moved its slot up to the former cursor, or is about to, and is fenced.
    """

    def __init__(self, log: Log, slot: str | None, pins: contextlib.ExitStack, *, env: Env = SYSTEM) -> None:
        """``slot``: the follower's. ``pins`` ends the pins, but for a slot that is kept."""
        self._log = log
        own = SlotPin(log, f"{HOLDS}rebuild-{CHANCE.uuid().hex}", env)
        self._own: SlotPin | None = pins.enter_context(own)
        self._follower = None if slot is None else pins.enter_context(SlotPin(log, slot, env))
        self._end: Cursor | None = None

    def hold(self, beginning: Cursor) -> None:
        """Pin the records after a cursor ``CursorExpired`` if the log no longer has them."""
        try:
            if self._own is not None:
                self._own.hold(beginning)
        except (CursorExpired, Diverged):
            raise
        except StrandlineError as error:
            if error.retryable:
                raise
            self._own = None
            _LOGGER.warning("What a rebuild reads of %r is not pinned, and could be trimmed: %s", self._log, error)

    def hold_behind(self, end: Cursor) -> None:
        """Let the follower's slot pin the records after the new rows."""
        self._end = end
        if self._follower is not None:
            self._follower.hold(end)

    def keep(self) -> None:
        """Leave the follower's slot where the new rows end: they are committed."""
        if self._follower is not None and self._end is not None:
            self._follower.hold_again(self._end)
            self._follower.keep(str(CHANCE.uuid()))
