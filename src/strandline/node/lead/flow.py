"""Flow control: writers are slowed, and at last refused, while replicas are too far behind. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from strandline.errors import InvalidInput
from strandline.model.arguments import checked


@checked
@dataclass(frozen=True, slots=True)
class FlowLimits:
    """How many records the slowest healthy replica may be behind; 0 switches it off.

    From ``slow_at`` on each append waits, the longer the further behind, up to ``longest`` seconds; at ``refuse_at``
    it is refused.
    """

    slow_at: int = 0
    refuse_at: int = 0
    longest: float = 0.1

    def __post_init__(self) -> None:
        if self.refuse_at and self.refuse_at < self.slow_at:
            raise InvalidInput(
                "FlowLimits: refuse_at is 0 or not below slow_at; writers are slowed before they are refused."
            )

    @property
    def is_on(self) -> bool:
        """Whether anybody is ever slowed or refused."""
        return bool(self.slow_at or self.refuse_at)


@dataclass(frozen=True, slots=True)
class Proceed:
    """Write, after so many seconds."""

    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not write: a replica is so many records behind."""

    lag: int


Flow: TypeAlias = Proceed | Refuse

NO_FLOW_LIMITS = FlowLimits()


def admit(lag: int, limits: FlowLimits) -> Flow:
    """What happens to a write while the slowest healthy replica is ``lag`` records behind.

    >>> limits = FlowLimits(slow_at=100, refuse_at=300, longest=0.1)
    >>> admit(99, limits), admit(200, limits), admit(300, limits)
    (Proceed(after=0.0), Proceed(after=0.05), Refuse(lag=300))
    """
    if limits.refuse_at and lag >= limits.refuse_at:
        return Refuse(lag)
    if not limits.slow_at or lag <= limits.slow_at:
        return Proceed()
    # Without a limit to refuse at, the longest wait is reached at twice the soft one.
    span = (limits.refuse_at or 2 * limits.slow_at) - limits.slow_at
    return Proceed(limits.longest * min(1.0, (lag - limits.slow_at) / max(1, span)))
