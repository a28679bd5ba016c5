"""Commit policies and flow control: which replicas an append waits for, as pure functions over values.

A policy is evaluated to one number, its *watermark*: everything below it satisfies the policy. A write at an offset is
committed when the watermark has passed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from strandline.errors import InvalidInput, NotReady
from strandline.model.arguments import checked


@dataclass(frozen=True, slots=True)
class Local:
    """Durable on the primary is enough."""

    def __str__(self) -> str:
        return "local"


@dataclass(frozen=True, slots=True)
class AckN:
    """At least ``count`` replicas have the record durably, not counting the primary."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InvalidInput(f"ack_n waits for at least 1 replica, not {self.count}: use local to wait for none.")

    def __str__(self) -> str:
        return f"ack_n({self.count})"


@dataclass(frozen=True, slots=True)
class Quorum:
    """A majority of the configured voters has the record durably; the primary is one of them."""

    voters: frozenset[str]

    def __post_init__(self) -> None:
        if not self.voters:
            raise InvalidInput("A quorum needs voters: name the nodes that count, the primary among them.")

    @property
    def majority(self) -> int:
        """How many voters are more than half."""
        return len(self.voters) // 2 + 1

    def __str__(self) -> str:
        return f"quorum({','.join(sorted(self.voters))})"


@dataclass(frozen=True, slots=True)
class Regions:
    """In each of these regions, at least the given number of replicas have the record durably."""

    counts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.counts or any(count < 1 for _, count in self.counts):
            raise InvalidInput("regions waits for at least one replica in at least one region.")
        if len({region for region, _ in self.counts}) < len(self.counts):
            raise InvalidInput("regions names each region once.")

    def __str__(self) -> str:
        return f"regions({','.join(f'{region}={count}' for region, count in self.counts)})"


@dataclass(frozen=True, slots=True)
class Every:
    """All of these policies at once."""

    policies: tuple[CommitPolicy, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.policies))


@dataclass(frozen=True, slots=True)
class Among:
    """A policy that counts replicas of whatever name: only these nodes count."""

    policy: CommitPolicy
    names: frozenset[str]

    def __str__(self) -> str:
        return str(self.policy)


CommitPolicy: TypeAlias = Local | AckN | Quorum | Regions | Every | Among


def among(policy: CommitPolicy, names: frozenset[str]) -> CommitPolicy:
    """The policy for a log with these nodes."""
    match policy:
        case Local() | Quorum():
            return policy
        case Every(policies):
            return Every(tuple(among(each, names) for each in policies))
    return Among(policy, names)


class ReplicaPosition(NamedTuple):
    """Position of a replica: everything below ``durable`` is stored there; None before its first acknowledgement."""

    name: str
    durable: int | None = None
    region: str | None = None


class DurableOffsets(NamedTuple):
    """Durable offsets of the primary and its replicas, the input of a policy."""

    primary: str
    durable: int
    """The primary's own durable end."""
    replicas: tuple[ReplicaPosition, ...] = ()

    def among(self, names: frozenset[str]) -> DurableOffsets:
        """The same without the replicas of other names."""
        return self._replace(replicas=tuple(each for each in self.replicas if each.name in names))


def watermark(policy: CommitPolicy, offsets: DurableOffsets) -> int:
    """The offset up to which the policy is satisfied, never above the primary's durable end; 0 if nothing is."""
    match policy:
        case Local():
            return offsets.durable
        case AckN(count):
            return min(offsets.durable, nth_highest(_positions(offsets.replicas), count))
        case Quorum(voters):
            positions = _positions(replica for replica in offsets.replicas if replica.name in voters)
            if offsets.primary in voters:
                positions.append(offsets.durable)
            return min(offsets.durable, nth_highest(positions, policy.majority))
        case Regions(counts):
            there = {region: [each for each in offsets.replicas if each.region == region] for region, _ in counts}
            return min(offsets.durable, *(nth_highest(_positions(there[region]), count) for region, count in counts))
        case Every(policies):
            return min([offsets.durable, *(watermark(each, offsets) for each in policies)])
        case Among(inner, names):
            return watermark(inner, offsets.among(names))


def is_met_alone(policy: CommitPolicy, primary: str) -> bool:
    """Whether the policy is satisfied as soon as a record is durable on the primary."""
    match policy:
        case Local():
            return True
        case Quorum(voters):
            return primary in voters and policy.majority == 1
        case Every(policies):
            return all(is_met_alone(each, primary) for each in policies)
        case Among(inner):
            return is_met_alone(inner, primary)
        case _:
            return False


def nth_highest(positions: Iterable[int], count: int) -> int:
    """The position that ``count`` of these have reached; 0 if there are fewer."""
    ranked = sorted(positions, reverse=True)
    return ranked[count - 1] if len(ranked) >= count else 0


def _positions(replicas: Iterable[ReplicaPosition]) -> list[int]:
    return [replica.durable for replica in replicas if replica.durable is not None]


def check_possible(policy: CommitPolicy, offsets: DurableOffsets) -> None:
    """Refuse a policy that the registered replicas cannot satisfy, before anything is written.

    ``InvalidInput``, or ``NotReady`` if configured voters have not registered yet. Unreachable replicas count too: a
    policy that only waits may yet be satisfied.
    """
    match policy:
        case AckN(count) if len(offsets.replicas) < count:
            raise InvalidInput(
                f"{policy} cannot be reached with {len(offsets.replicas)} replicas: register more, or ask for fewer."
            )
        case Quorum(voters):
            if offsets.primary not in voters:
                raise InvalidInput(f"{policy} does not name the primary: add {offsets.primary} to the voters.")
            known = {offsets.primary, *(replica.name for replica in offsets.replicas)} & voters
            if len(known) < policy.majority:
                # Voters are configured, and will register: a primary that has just taken over waits for them.
                raise NotReady(
                    f"{policy} needs {policy.majority} voters, and only {len(known)} of them have registered yet: "
                    "nothing was written. Try again when more have registered."
                )
        case Regions(counts):
            for region, count in counts:
                there = sum(replica.region == region for replica in offsets.replicas)
                if there < count:
                    raise InvalidInput(
                        f"{policy} needs {count} replicas in region {region!r}, and {there} are registered there."
                    )
        case Every(policies):
            for each in policies:
                check_possible(each, offsets)
        case Among(inner, names):
            check_possible(inner, offsets.among(names))


def strengthened(policy: CommitPolicy, asked: CommitPolicy) -> CommitPolicy:
    """The policy for a request: the node's own and the requested one. A weaker request changes nothing."""
    match policy, asked:
        case (Local(), _):
            return asked
        case (_, Local()):
            return policy
        case (AckN(mine), AckN(theirs)):
            return policy if mine >= theirs else asked
    return policy if policy == asked else Every((policy, asked))


_SHAPE: Final = re.compile(r"(local|ack_n|quorum|regions)(?:\(([^()]*)\))?")
_COUNT: Final = re.compile(r"-?[0-9]{1,9}")


@checked
def parse_policy(text: str) -> CommitPolicy:
    """Parse a policy; ``InvalidInput`` for an unknown one.

    >>> parse_policy("ack_n(2)"), str(parse_policy("regions(eu=1, us=2)"))
    (AckN(count=2), 'regions(eu=1,us=2)')
    >>> str(parse_policy("ack_n(2) and regions(eu=1)"))
    'ack_n(2) and regions(eu=1)'
    """
    several = text.split(" and ")
    if len(several) > 1:
        return Every(tuple(map(parse_policy, several)))
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise _unknown(text)
    kind, words = found[1], [word.strip() for word in (found[2] or "").split(",") if word.strip()]
    try:
        match kind:
            case "local" if not words:
                return Local()
            case "ack_n" if len(words) == 1:
                return AckN(_count(words[0]))
            case "quorum":
                return Quorum(frozenset(words))
            case "regions":
                pairs = [word.partition("=") for word in words]
                return Regions(tuple(sorted((region.strip(), _count(count or "1")) for region, _, count in pairs)))
    except InvalidInput:
        raise
    except ValueError as error:
        raise _unknown(text) from error
    raise _unknown(text)


def _count(text: str) -> int:
    """A number of replicas; ``ValueError`` for what is none, or more than any log has."""
    if not _COUNT.fullmatch(text.strip()):
        raise ValueError("it is no number of replicas")
    return int(text)


def as_policy(asked: str | CommitPolicy | None) -> CommitPolicy | None:
    """The policy of a call, given as text or as a value."""
    return parse_policy(asked) if isinstance(asked, str) else asked


def _unknown(text: str) -> InvalidInput:
    return InvalidInput(
        f"{text[:200]!r} is no commit policy: use 'local', 'ack_n(2)', 'quorum(a,b,c)' or 'regions(eu=1,us=1)'."
    )


# --- flow control ----------------------------------------------------------------------------------------------


@checked
@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits on the lag of the slowest healthy replica, in records; 0 switches a limit off.

    From ``slow_at`` on each append waits, the longer the further behind, up to ``longest`` seconds; at ``refuse_at``
    it is refused.
    """

    slow_at: int = 0
    refuse_at: int = 0
    longest: float = 0.1

    def __post_init__(self) -> None:
        if self.refuse_at and self.refuse_at < self.slow_at:
            raise InvalidInput(
                "FlowLimits: refuse_at must be 0, or at least slow_at: writers are slowed before they are refused."
            )


NO_FLOW_LIMITS = FlowLimits()


def flow_delay(lag: int, limits: FlowLimits) -> float | None:
    """Seconds to delay a write while the slowest healthy replica is ``lag`` records behind; None to refuse it.

    >>> limits = FlowLimits(slow_at=100, refuse_at=300, longest=0.1)
    >>> flow_delay(99, limits), flow_delay(200, limits), flow_delay(300, limits)
    (0.0, 0.05, None)
    """
    if limits.refuse_at and lag >= limits.refuse_at:
        return None
    if not limits.slow_at or lag <= limits.slow_at:
        return 0.0
    # Without a hard limit, the longest delay is reached at twice the soft limit.
    span = (limits.refuse_at or 2 * limits.slow_at) - limits.slow_at
    return limits.longest * min(1.0, (lag - limits.slow_at) / max(1, span))
