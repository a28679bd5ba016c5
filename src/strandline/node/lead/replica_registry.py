"""Replica registry: offsets and health of each replica, as a value with pure transitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from strandline.errors import Diverged, InvalidInput, NotFound
from strandline.model.addresses import check_replica_name
from strandline.model.cursor import SECOND
from strandline.node.lead.policies import DurableOffsets, ReplicaPosition

SILENT_POLLS: Final = 3
SILENT_SECONDS: Final = 5
"""A replica is unhealthy after so many missed heartbeat intervals, and at least so many seconds."""


class ReplicaState(NamedTuple):
    """State of one replica on its primary. Positions are next offsets; times are microseconds."""

    name: str
    connected_at: int
    last_seen: int
    region: str | None = None
    sent: int = 0
    applied: int | None = None
    """None before its first acknowledgement: until then it counts for nothing."""
    durable: int | None = None
    apply_errors: int = 0
    divergences: int = 0
    """Both are the highest that it has reported."""
    bootstrapping: bool = False
    """Whether it bootstraps, and serves no reads after a bookmark."""
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """The content of an acknowledgement: a replica's offsets and error counts."""

    applied: int
    durable: int
    apply_errors: int = 0
    divergences: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.durable <= self.applied:
            raise InvalidInput(f"A replica cannot have made {self.durable} durable and applied {self.applied}.")


class ReplicaRegistry(NamedTuple):
    """All replicas of a log by name, and the epoch, which grows with each change of membership or health."""

    replicas: Mapping[str, ReplicaState] = MappingProxyType({})
    epoch: int = 0

    def replica(self, name: str) -> ReplicaState:
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
        """Lag of the slowest replica behind what was sent to the fastest; without an acknowledgement it is at 0."""
        known = self.replicas.values()
        return max((each.sent for each in known), default=0) - min((each.applied or 0 for each in known), default=0)

    @property
    def safe_replay(self) -> int | None:
        """Everything below is durable on every replica; None without any."""
        return min((each.durable or 0 for each in self.replicas.values()), default=None)


def register(
    registry: ReplicaRegistry, name: str, *, region: str | None, now: int, divergences: int = 0
) -> ReplicaRegistry:
    """The registry with this replica; one that comes back keeps its progress, and is no change of the topology.

    ``divergences`` are those that a new one is known to have reported before.
    """
    known = registry.replicas.get(check_replica_name(name))
    if known is None:
        return _with(registry, [ReplicaState(name, now, now, region, divergences=divergences)], is_change=True)
    seen = known._replace(last_seen=max(known.last_seen, now), region=known.region if region is None else region)
    return _with(registry, [seen._replace(healthy=True)], is_change=not known.healthy)


def unregister(registry: ReplicaRegistry, name: str) -> ReplicaRegistry:
    """The registry without this replica; one that is not known changes nothing."""
    if check_replica_name(name) not in registry.replicas:
        return registry
    left = {known: each for known, each in registry.replicas.items() if known != name}
    return ReplicaRegistry(MappingProxyType(left), registry.epoch + 1)


def sent_upto(registry: ReplicaRegistry, name: str, offset: int) -> ReplicaRegistry:
    """Everything below this offset was sent to a replica; never back."""
    known = registry.replica(name)
    return _with(registry, [known._replace(sent=max(known.sent, offset))], is_change=False)


def acknowledged(
    registry: ReplicaRegistry, name: str, progress: ReplicaProgress, *, end: int, now: int
) -> ReplicaRegistry:
    """The registry after a replica reported; positions and counts only go forward.

    ``NotFound`` for one that is not registered, ``Diverged`` for one that has more than the log: both change nothing.
    """
    known = registry.replica(name)
    if progress.applied > end:
        raise Diverged(
            f"Replica {name!r} says that it has applied all below {progress.applied}, and the log ends at {end}: "
            "it has records that this log never had, and has to bootstrap again."
        )
    after = ReplicaState(
        name=known.name,
        connected_at=known.connected_at,
        last_seen=max(known.last_seen, now),
        region=known.region,
        sent=max(known.sent, progress.applied),
        applied=max(known.applied or 0, progress.applied),
        durable=max(known.durable or 0, progress.durable),
        apply_errors=max(known.apply_errors, progress.apply_errors),
        divergences=max(known.divergences, progress.divergences),
        bootstrapping=known.bootstrapping,
        healthy=True,
    )
    return _with(registry, [after], is_change=not known.healthy)


def resumed(registry: ReplicaRegistry, name: str, at: int) -> ReplicaRegistry:
    """The registry with a replica that goes on at this offset: it has no more than that, whatever it had before."""
    known = registry.replica(name)
    applied, durable = (None if had is None else min(had, at) for had in (known.applied, known.durable))
    after = known._replace(sent=min(known.sent, at), applied=applied, durable=durable, bootstrapping=False)
    return _with(registry, [after], is_change=known.bootstrapping)


def counted(registry: ReplicaRegistry, name: str, progress: ReplicaProgress, *, now: int) -> ReplicaRegistry:
    """The registry after a replica reported whose position does not count: only what it has found does."""
    known = registry.replica(name)
    after = known._replace(
        last_seen=max(known.last_seen, now),
        apply_errors=max(known.apply_errors, progress.apply_errors),
        divergences=max(known.divergences, progress.divergences),
        healthy=True,
    )
    return _with(registry, [after], is_change=not known.healthy)


def bootstrapping(registry: ReplicaRegistry, name: str, *, flag: bool) -> ReplicaRegistry:
    """The registry with a replica that begins to build its state again, or has done so.

    One that begins has nothing any more, whatever it had: it counts again with its next acknowledgement.
    """
    known = registry.replica(name)
    after = known._replace(bootstrapping=flag)
    if flag:
        after = after._replace(sent=0, applied=None, durable=None)
    return _with(registry, [after], is_change=known.bootstrapping != flag)


def judge_health(registry: ReplicaRegistry, *, poll_seconds: float, now: int) -> ReplicaRegistry:
    """The registry after a look at who was silent for too long; all who are found so at once are one change."""
    patience = int(max(SILENT_SECONDS, SILENT_POLLS * poll_seconds) * SECOND)
    silent = [each for each in registry.replicas.values() if each.healthy and now - each.last_seen > patience]
    return _with(registry, [each._replace(healthy=False) for each in silent], is_change=bool(silent))


def _with(registry: ReplicaRegistry, changed: Iterable[ReplicaState], *, is_change: bool) -> ReplicaRegistry:
    replicas = dict(registry.replicas)
    for each in changed:
        replicas[each.name] = each
    return ReplicaRegistry(MappingProxyType(replicas), registry.epoch + is_change)
