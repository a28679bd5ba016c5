"""A slot that pins a log while a job runs: dropped at its end, or kept for the consumer that the job has built."""

from __future__ import annotations

import contextlib
import logging
from typing import Final, Self, final

from strandline.errors import AlreadyExists, StrandlineError
from strandline.log.contract import Log
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.cursor import Cursor
from strandline.model.retention import NEWCOMER_SECONDS, SlotState
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)


@final
class SlotPin:
    """A slot that pins the log while a job runs. Leaving the block drops it, unless :meth:`keep` was called.

    Only a slot that this object created is dropped: it is touched during the block, and expires if the process is
    killed meanwhile.
    """

    def __init__(self, log: Log, slot: str, env: Env) -> None:
        self._log = log
        self._slot = slot
        self._env = env
        self._created: SlotState | None = None
        self._epoch: int | None = None
        """The slot's, when it was last held."""
        self._alive = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._alive.close()
        try:
            if self.is_provisional:
                self._log.slots.drop(self._slot)
        except StrandlineError as trouble:
            _LOGGER.warning("Slot %r, which is not needed, could not be dropped: %s", self._slot, trouble)

    @property
    def is_provisional(self) -> bool:
        """Whether the slot was created here and not claimed, reset or kept since."""
        created = self._created
        state = None if created is None else self._state()
        return created is not None and state is not None and (state.epoch, state.holder) == (created.epoch, None)

    def _state(self) -> SlotState | None:
        return next((state for state in self._log.slots.list() if state.name == self._slot), None)

    def hold(self, cursor: Cursor, *, is_stored: bool = False) -> None:
        """Make the slot pin the records after a cursor; ``CursorExpired`` if they are not retained.

        A missing slot is created, for good if a consumer with that cursor ``is_stored``; an invalidated one, or one
        past the cursor, is reset; a valid one that pins them is not changed.
        """
        found = self._state()
        if found is None:
            with contextlib.suppress(AlreadyExists):  # another process was faster
                self._create(cursor.next, is_stored=is_stored)
                return
            found = self._state()
        if found is None or found.invalid is not None or found.position > cursor.next:
            found = self._log.slots.reset(self._slot, cursor.next)
        self._epoch = found.epoch

    def hold_again(self, cursor: Cursor) -> None:
        """As :meth:`hold`. A consumer that has claimed the slot since is fenced: it may be about to move it."""
        found = self._state()
        if found is not None and found.holder is not None and found.epoch != self._epoch:
            self._epoch = self._log.slots.reset(self._slot, cursor.next).epoch
        else:
            self.hold(cursor)

    def _create(self, position: int, *, is_stored: bool) -> None:
        if is_stored:
            self._log.slots.create(self._slot, position)
        else:
            self._created = self._log.slots.create(self._slot, position, lifetime=NEWCOMER_SECONDS)
            self._epoch = self._created.epoch
            self._alive.enter_context(SlotHeartbeat(self, self._log, env=self._env))

    def keep(self, holder: str) -> None:
        """Keep the slot for the consumer: one that was created here, or by an earlier run that was killed."""
        found = self._state()
        is_unclaimed = found is not None and found.holder is None and found.expires is not None
        if self._created is not None or is_unclaimed:
            self._alive.close()
            self._log.slots.claim(self._slot, holder)
            self._created = None

    def touch(self) -> None:
        """Send a heartbeat for the created slot."""
        if self._created is not None:
            self._log.slots.touch(self._slot, self._created.epoch)

    def advance(self, to: Cursor) -> None:
        """Do nothing: the slot pins the records that the consumer will need."""
