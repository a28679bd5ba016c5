"""A primary's replicas: the registry, and a slot for each that pins the records it needs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, final

from strandline.errors import Fenced, NotFound, Overloaded, SlotInvalid
from strandline.log.contract import Slot
from strandline.log.wal.log import WalLog
from strandline.model.cursor import SECOND, Cursor
from strandline.model.node import Peer
from strandline.model.retention import SlotState
from strandline.node.lead import replica_registry as rules
from strandline.node.lead.replica_registry import ReplicaProgress, ReplicaRegistry
from strandline.storage.clock import Clock

_LOGGER = logging.getLogger(__name__)

MOST_REPLICAS: Final = 256
"""So many can be registered at a time."""


@final
class Replicas:
    """The registry, and a slot for each replica. Safe in threads.

    An acknowledgement counts at once; the slot is advanced later, and until then pins more than is needed.
    """

    def __init__(
        self, log: WalLog, peers: Iterable[Peer], changed: Callable[[ReplicaRegistry], object], *, clock: Clock
    ) -> None:
        """Begin with the stored peers, with a slot each; ``changed`` takes the registry when it has to be stored."""
        self._log = log
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        """Held to change the registry, and to move slots."""
        self.now = ReplicaRegistry()
        """The registry as of now, without the latest sent offsets."""
        self._sent: dict[str, int] = {}
        """Sent offsets that are not in the registry yet: every batch changes them, and few calls read them."""
        self._slots: dict[str, Slot] = {}
        self._acknowledged: dict[str, int] = {}
        """Acknowledged offsets to which the slots are not advanced yet."""
        for peer in peers:
            self.now = rules.register(
                self.now, peer.name, region=peer.region, now=self.time(), divergences=peer.divergences
            )
            if self.slot(peer.name) is None:
                log.create_slot(peer.name, log.bounds().first)  # its position comes with its first acknowledgement

    def time(self) -> int:
        """Microseconds on a clock that never jumps, which the registry goes by: who was heard in a future that a wall
        clock has left again would not be missed for as long.
        """
        return round(self._clock.monotonic() * SECOND)

    def with_sent(self) -> ReplicaRegistry:
        """The registry as of now."""
        with self._lock:
            while self._sent:
                name, upto = self._sent.popitem()
                if name in self.now.replicas:
                    self.now = rules.sent_upto(self.now, name, upto)
            return self.now

    def slot(self, name: str) -> SlotState | None:
        """A replica's slot, if it has one."""
        return next((slot for slot in self._log.slots() if slot.name == name), None)

    # --- membership ---------------------------------------------------------------------------------------------

    def register(self, name: str, *, region: str | None, at: int) -> int | None:
        """Know a replica, and pin the log for a new one; returns where its slot stands, or None if it is invalid.

        ``Overloaded`` for a new one if there are as many as there may be: names that somebody made up pin the log, too.
        """
        with self._lock:
            if name not in self.now.replicas and len(self.now.replicas) >= MOST_REPLICAS:
                raise Overloaded(
                    f"{len(self.now.replicas)} replicas are registered, and a primary keeps the log for no more than "
                    f"that: {name!r} was not added. Let the administrator unregister those that are gone."
                )
            state = self.slot(name)
            if state is None:
                state = self._log.create_slot(name, at)
            self._claimed(name)
            self.now = rules.register(self.now, name, region=region, now=self.time())
            self._changed(self.now)
        return state.position if state.invalid is None else None

    def unregister(self, name: str, *, keep_slot: bool) -> None:
        """Know it no longer; unknown is fine."""
        with self._lock:
            self.now = rules.unregister(self.now, name)
            self._forget_slot(name)
            self._changed(self.now)
            if not keep_slot and self.slot(name) is not None:
                self._log.drop_slot(name)

    def judge(self, *, poll_seconds: float) -> None:
        """Find out who was silent for too long."""
        with self._lock:
            self.now = rules.judge_health(self.now, poll_seconds=poll_seconds, now=self.time())

    # --- progress -----------------------------------------------------------------------------------------------

    def sent(self, name: str, upto: int) -> None:
        """Everything below was sent to it."""
        self._sent[name] = upto

    def acknowledge(self, name: str, progress: ReplicaProgress) -> str | None:
        """A replica says how far it is; returns why that does not count, if it does not."""
        end = self._log.bounds().next
        with self._lock:
            before = self.now
            after = rules.acknowledged(before, name, progress, end=end, now=self.time())
            pins = self._claimed(name).state().pins
            self.now = after if pins else rules.counted(before, name, progress, now=self.time())
            if self.now.replica(name).divergences > before.replica(name).divergences:
                self._changed(self.now)  # that must not be forgotten when this primary is gone
            if not pins:
                return self._move_slot(name)  # which tells why it cannot be
            self._acknowledged[name] = progress.durable
        return None

    def goes_on(self, name: str, at: int) -> None:
        """It follows from here on: its slot pins that, which may be behind what it had let go of."""
        with self._lock:
            self._acknowledged.pop(name, None)
            state = self.slot(name)
            if state is not None and state.position > at:
                self._reset(name, at)
            had = self.now.replica(name).durable
            if had is not None and had > at:
                _LOGGER.warning(
                    "Replica %s had acknowledged everything below %d, and goes on at %d: its folder was restored from "
                    "an older copy, or its disk has lost records. It counts for what it has now.", name, had, at,
                )  # fmt: skip
            self._sent.pop(name, None)
            self.now = rules.resumed(self.now, name, at)

    def bootstraps(self, name: str) -> None:
        """It builds its state anew: what it was sent, and has told of, it has no more."""
        with self._lock:
            self._sent.pop(name, None)
            self._acknowledged.pop(name, None)
            self.now = rules.bootstrapping(self.now, name, flag=True)

    def bootstrapped(self, name: str, at: int) -> None:
        """It has done so: its slot is valid again, and stands there."""
        with self._lock:
            self._reset(name, at)
            self.now = rules.bootstrapping(self.now, name, flag=False)

    # --- slots --------------------------------------------------------------------------------------------------

    def move_slot(self, name: str) -> str | None:
        """Let a slot stand where its replica has said that it is; or why it cannot."""
        with self._lock:
            return self._move_slot(name)

    def move_slots(self) -> None:
        """The same for all: before it is judged which of them are too far behind."""
        for name in list(self._acknowledged):
            with contextlib.suppress(Fenced, NotFound):  # it is somebody else's, or gone: its replica will be told
                self.move_slot(name)

    def _move_slot(self, name: str) -> str | None:
        slot, upto = self._slots.get(name), self._acknowledged.pop(name, 0)
        try:
            if slot is not None and upto > slot.state().position:
                slot.advance(Cursor(self._log.log_id, upto))
            elif slot is not None:
                slot.touch()
        except SlotInvalid as error:
            return str(error)
        return None

    def _claimed(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._log.claim_slot(name, name)
        return slot

    def _reset(self, name: str, position: int) -> None:
        self._forget_slot(name)  # first: if something fails from here on, it is claimed anew
        self._log.reset_slot(name, position)
        self._claimed(name)

    def _forget_slot(self, name: str) -> None:
        self._slots.pop(name, None)
        self._acknowledged.pop(name, None)
