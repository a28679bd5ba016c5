"""A primary's replicas: offsets and health of each, as a value with pure transitions; and a slot for each."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple, final

from strandline.errors import Diverged, Fenced, NotFound, Overloaded, SlotInvalid
from strandline.log.contract import Slot
from strandline.log.wal.log import WalLog
from strandline.model.addresses import check_replica_name
from strandline.model.cursor import SECOND, Cursor
from strandline.model.node import Peer
from strandline.model.retention import SlotState
from strandline.node.lead.policies import DurableOffsets, ReplicaPosition
from strandline.node.messages import Member, ReplicaProgress
from strandline.storage.env import Env

_LOGGER = logging.getLogger(__name__)

MOST_REPLICAS: Final = 256
"""Limit on registered replicas."""
SILENT_POLLS: Final = 3
SILENT_SECONDS: Final = 5
"""A replica is unhealthy after this many heartbeat intervals of silence, and not before these seconds."""


class ReplicaRegistry(NamedTuple):
    """All replicas of a log by name, and the epoch, which grows with each change of membership or health."""

    replicas: Mapping[str, Member] = MappingProxyType({})
    epoch: int = 0

    def replica(self, name: str) -> Member:
        """One replica; ``NotFound`` if it is not registered."""
        try:
            return self.replicas[name]
        except KeyError as error:
            raise NotFound(f"There is no replica {name!r}: it has to register first.") from error

    def durable_offsets(self, primary: str, durable: int, *, term_start: int = 0) -> DurableOffsets:
        """Durable offset of each replica, for commit policies.

        A replica that lacks records from before the primary's term does not count. Otherwise a record could be on
        enough replicas and yet be truncated by a later primary with a shorter log of a higher term.
        """
        positions = []
        for each in self.replicas.values():
            counts = each.durable is not None and each.durable >= term_start
            positions.append(ReplicaPosition(each.name, each.durable if counts else None, each.region))
        return DurableOffsets(primary, durable, tuple(positions))

    @property
    def lag(self) -> int:
        """Lag of the slowest replica behind the fastest one's sent offset. One without acknowledgement is at 0."""
        known = self.replicas.values()
        return max((each.sent for each in known), default=0) - min((each.applied or 0 for each in known), default=0)

    def behind(self, end: int) -> int:
        """Records that the slowest replica lacks, of those that answer and have a copy."""
        answering = (each for each in self.replicas.values() if each.healthy and not each.bootstrapping)
        return end - min((each.applied for each in answering if each.applied is not None), default=end)

    @property
    def safe_replay(self) -> int | None:
        """Everything below is durable on every replica; None without any."""
        return min((each.durable or 0 for each in self.replicas.values()), default=None)


def register(
    registry: ReplicaRegistry, name: str, *, region: str | None, now: int, divergences: int = 0
) -> ReplicaRegistry:
    """The registry with this replica; a replica that returns keeps its progress, and is no change of the topology.

    ``divergences``: how many a new replica is known to have reported before.
    """
    known = registry.replicas.get(check_replica_name(name))
    if known is None:
        new = Member(name, region, 0, None, None, 0, divergences, now, now, bootstrapping=False, healthy=True)
        return _with(registry, [new], is_change=True)
    region = known.region if region is None else region
    seen = replace(known, last_seen=max(known.last_seen, now), region=region, healthy=True)
    return _with(registry, [seen], is_change=not known.healthy)


def unregister(registry: ReplicaRegistry, name: str) -> ReplicaRegistry:
    """The registry without this replica; an unknown one changes nothing."""
    if check_replica_name(name) not in registry.replicas:
        return registry
    left = {known: each for known, each in registry.replicas.items() if known != name}
    return ReplicaRegistry(MappingProxyType(left), registry.epoch + 1)


def sent_upto(registry: ReplicaRegistry, name: str, offset: int) -> ReplicaRegistry:
    """The registry after everything below this offset was sent to a replica; never decreases."""
    known = registry.replica(name)
    return _with(registry, [replace(known, sent=max(known.sent, offset))], is_change=False)


def acknowledged(
    registry: ReplicaRegistry, name: str, progress: ReplicaProgress, *, end: int, now: int, counts: bool = True
) -> ReplicaRegistry:
    """The registry after an acknowledgement; offsets and numbers of errors never decrease.

    Unless it ``counts``, the offsets stay as they are: the replica has to bootstrap.
    ``NotFound`` for an unregistered replica, ``Diverged`` for one that has more than the log: neither changes anything.
    """
    known = registry.replica(name)
    if progress.applied > end:
        raise Diverged(
            f"Replica {name!r} acknowledges everything below {progress.applied}, but the log ends at {end}: "
            "it has records that this log never had, and has to bootstrap again."
        )
    after = replace(
        known,
        last_seen=max(known.last_seen, now),
        apply_errors=max(known.apply_errors, progress.apply_errors),
        divergences=max(known.divergences, progress.divergences),
        healthy=True,
    )
    if counts:
        after = replace(
            after,
            sent=max(known.sent, progress.applied),
            applied=max(known.applied or 0, progress.applied),
            durable=max(known.durable or 0, progress.durable),
        )
    return _with(registry, [after], is_change=not known.healthy)


def resumed(registry: ReplicaRegistry, name: str, at: int) -> ReplicaRegistry:
    """The registry after a replica resumed at this offset: it has no more than that, whatever it had before."""
    known = registry.replica(name)
    applied, durable = (None if had is None else min(had, at) for had in (known.applied, known.durable))
    after = replace(known, sent=min(known.sent, at), applied=applied, durable=durable, bootstrapping=False)
    return _with(registry, [after], is_change=known.bootstrapping)


def bootstrapping(registry: ReplicaRegistry, name: str, *, flag: bool) -> ReplicaRegistry:
    """The registry with a replica that begins or ends a bootstrap.

    A replica that begins has nothing any more: it counts again with its next acknowledgement.
    """
    known = registry.replica(name)
    after = replace(known, bootstrapping=flag)
    if flag:
        after = replace(after, sent=0, applied=None, durable=None)
    return _with(registry, [after], is_change=known.bootstrapping != flag)


def judge_health(registry: ReplicaRegistry, *, poll_seconds: float, now: int) -> ReplicaRegistry:
    """The registry with the silent replicas marked as unhealthy; all of them together are one change."""
    patience = int(max(SILENT_SECONDS, SILENT_POLLS * poll_seconds) * SECOND)
    silent = [each for each in registry.replicas.values() if each.healthy and now - each.last_seen > patience]
    return _with(registry, [replace(each, healthy=False) for each in silent], is_change=bool(silent))


def _with(registry: ReplicaRegistry, changed: Iterable[Member], *, is_change: bool) -> ReplicaRegistry:
    replicas = dict(registry.replicas)
    for each in changed:
        replicas[each.name] = each
    return ReplicaRegistry(MappingProxyType(replicas), registry.epoch + is_change)


# --- slots -----------------------------------------------------------------------------------------------------


@final
class Replicas:
    """The registry, and a slot for each replica. Safe in threads.

    An acknowledgement counts at once; the slot is advanced later, and until then pins more than is needed.
    """

    def __init__(
        self, log: WalLog, peers: Iterable[Peer], changed: Callable[[ReplicaRegistry], object], *, env: Env
    ) -> None:
        """Begin with the stored peers and a slot for each; ``changed`` is called when a registry must be stored."""
        self._log = log
        self._changed = changed
        self._clock = env.clock
        self._lock = threading.RLock()
        """Protects the registry and the slots."""
        self.now = ReplicaRegistry()
        """The registry as of now, without the latest sent offsets."""
        self._sent: dict[str, int] = {}
        """Sent offsets that are not in the registry yet: every batch changes them, and few calls read them."""
        self._slots: dict[str, Slot] = {}
        self._acknowledged: dict[str, int] = {}
        """Acknowledged offsets to which the slots are not advanced yet."""
        for peer in peers:
            self.now = register(self.now, peer.name, region=peer.region, now=self.time(), divergences=peer.divergences)
            if self.slot(peer.name) is None:
                # Its position comes with its first acknowledgement.
                log.slots.create(peer.name, log.bounds().first, hot=True)
            self._claimed(peer.name)

    def time(self) -> int:
        """Microseconds on a clock that never jumps: a wall clock that is set back would hide silent replicas."""
        return round(self._clock.monotonic() * SECOND)

    def with_sent(self) -> ReplicaRegistry:
        """The registry as of now."""
        with self._lock:
            while self._sent:
                name, upto = self._sent.popitem()
                if name in self.now.replicas:
                    self.now = sent_upto(self.now, name, upto)
            return self.now

    def members(self) -> tuple[Member, ...]:
        """All replicas as others see them: with the times of the wall clock."""
        jump = self._clock.now() - self.time()
        return tuple(
            replace(each, connected_at=each.connected_at + jump, last_seen=each.last_seen + jump)
            for each in self.with_sent().replicas.values()
        )

    def slot(self, name: str) -> SlotState | None:
        """A replica's slot, if it has one."""
        return next((slot for slot in self._log.slots.list() if slot.name == name), None)

    # --- membership ---------------------------------------------------------------------------------------------

    def register(self, name: str, *, region: str | None, at: int) -> int | None:
        """Register a replica, and pin the log for a new one; returns its slot's position, or None if that is invalid.

        ``Overloaded`` for a new one above the limit: invented names would pin the log, too.
        """
        with self._lock:
            if name not in self.now.replicas and len(self.now.replicas) >= MOST_REPLICAS:
                raise Overloaded(
                    f"{len(self.now.replicas)} replicas are registered, which is the limit of a primary: {name!r} was "
                    "not added. Let the administrator unregister those that are gone."
                )
            state = self.slot(name)
            if state is None:
                state = self._log.slots.create(name, at, hot=True)
            self._claimed(name)
            self.now = register(self.now, name, region=region, now=self.time())
            self._changed(self.now)
        return state.position if state.invalid is None else None

    def unregister(self, name: str, *, keep_slot: bool) -> None:
        """Unregister a replica; ``NotFound`` if it is neither registered nor has a slot to drop."""
        with self._lock:
            if check_replica_name(name) not in self.now.replicas and (keep_slot or self.slot(name) is None):
                known = ", ".join(self.now.replicas) or "none"
                raise NotFound(f"There is no replica {name!r}: nothing was changed. Registered: {known}.")
            self.now = unregister(self.now, name)
            self._forget_slot(name)
            self._changed(self.now)
            if not keep_slot and self.slot(name) is not None:
                self._log.slots.drop(name)

    def judge(self, *, poll_seconds: float) -> None:
        """Mark replicas that were silent for too long as unhealthy."""
        with self._lock:
            self.now = judge_health(self.now, poll_seconds=poll_seconds, now=self.time())

    def changed(self) -> None:
        """Something else about the topology has changed: replicas ask for it when the epoch grows."""
        with self._lock:
            self.now = self.now._replace(epoch=self.now.epoch + 1)
            self._changed(self.now)

    # --- progress -----------------------------------------------------------------------------------------------

    def sent(self, name: str, upto: int) -> None:
        """Everything below ``upto`` was sent to a replica."""
        self._sent[name] = upto

    def acknowledge(self, name: str, progress: ReplicaProgress) -> str | None:
        """Handle an acknowledgement; returns why it was rejected, or None."""
        end = self._log.bounds().extent
        with self._lock:
            before = self.now
            before.replica(name)  # raises for a stranger, which must not claim a slot
            pins = self._claimed(name).state().pins
            self.now = acknowledged(before, name, progress, end=end, now=self.time(), counts=pins)
            if self.now.replica(name).divergences > before.replica(name).divergences:
                self._changed(self.now)  # the next primary needs it
            if not pins:
                return self.move_slot(name)  # returns the reason
            self._acknowledged[name] = progress.durable
        return None

    def resume_at(self, name: str, at: int) -> None:
        """Note that a replica resumes at ``at``: its slot pins that, even below what the replica had acknowledged."""
        with self._lock:
            self._acknowledged.pop(name, None)
            state = self.slot(name)
            if state is not None and state.position > at:
                self._reset(name, at)
            had = self.now.replica(name).durable
            if had is not None and min(had, self._log.bounds().next) > at:
                _LOGGER.warning(
                    "Replica %s had acknowledged everything below %d, but resumes at %d: its folder was restored from "
                    "an older copy, or its disk has lost records. Only what it has now counts.", name, had, at,
                )  # fmt: skip
            self._sent.pop(name, None)
            self.now = resumed(self.now, name, at)

    def bootstraps(self, name: str) -> None:
        """A replica begins to bootstrap: its sent and acknowledged offsets do not count any more."""
        with self._lock:
            self._sent.pop(name, None)
            self._acknowledged.pop(name, None)
            self.now = bootstrapping(self.now, name, flag=True)

    def bootstrapped(self, name: str, at: int) -> None:
        """A replica has bootstrapped: its slot is valid again, at ``at``."""
        with self._lock:
            self._reset(name, at)
            self.now = bootstrapping(self.now, name, flag=False)

    # --- slots --------------------------------------------------------------------------------------------------

    def move_slot(self, name: str) -> str | None:
        """Advance a slot to the acknowledged offset of its replica; returns why that is impossible, or None."""
        with self._lock:
            slot, upto = self._slots.get(name), self._acknowledged.pop(name, 0)
            upto = min(upto, self._log.bounds().next)  # without the seal
            try:
                if slot is not None and upto > slot.state().position:
                    slot.advance(Cursor(self._log.log_id, upto))
                elif slot is not None:
                    slot.touch()
            except SlotInvalid as error:
                return str(error)
            return None

    def move_slots(self) -> None:
        """Advance the slots of all replicas, before the slot limits are applied."""
        for name in list(self._acknowledged):
            # Held by another, or dropped: the next acknowledgement is rejected.
            with contextlib.suppress(Fenced, NotFound):
                self.move_slot(name)

    def _claimed(self, name: str) -> Slot:
        slot = self._slots.get(name)
        if slot is None:
            # A replica copies the hot tier only: the cold tier is shared, and does not serve its feed.
            slot = self._slots[name] = self._log.slots.claim(name, name, hot=True)
        return slot

    def _reset(self, name: str, position: int) -> None:
        self._forget_slot(name)  # first: if a later step fails, it is claimed again
        self._log.slots.reset(name, position)
        self._claimed(name)

    def _forget_slot(self, name: str) -> None:
        self._slots.pop(name, None)
        self._acknowledged.pop(name, None)
