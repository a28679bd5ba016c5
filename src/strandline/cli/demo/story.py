"""What a demo run leaves behind, as values: samples, events and results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from strandline.cli.demo.generator import Shape
from strandline.cli.demo.truth import HistoryDifference, StateDifference
from strandline.cli.lag import Lag
from strandline.errors import NotReady


@dataclass(frozen=True, slots=True)
class Sample:
    """How far everybody was at a moment: offsets, in seconds since the start. ``run`` is 0 while Spark is down."""

    at: float
    produced: int
    orders: int
    naive: int
    history: int
    run: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. ``kind`` is start, up, kill, checkpoint, join or done."""

    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Results:
    """The tables against the truth. ``naive_state`` is what a view of the latest values over its rows would show."""

    keys: int
    orders: StateDifference
    history: HistoryDifference
    naive: HistoryDifference
    naive_state: StateDifference

    @property
    def exact(self) -> bool:
        """Whether both tables that follow the log are right."""
        return self.orders.exact and self.history.exact

    @property
    def naive_exact(self) -> bool:
        """Whether the naive twin happens to be right."""
        return self.naive.exact and self.naive_state.exact


@dataclass(frozen=True, slots=True)
class Rates:
    """Records per second: produced, and applied by the Spark pipeline: on average while it was up, and at best."""

    produced: float
    followed: float
    followed_best: float


@dataclass(slots=True)
class Story:
    """One demo from beginning to end."""

    shape: Shape
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    lag: Lag | None = None
    results: Results | None = None
    seconds: float = 0.0
    exposed: float | None = None
    """What part of its working time the naive twin had a batch written and not recorded."""

    @property
    def outcome(self) -> Results:
        """The results; only when it has ended."""
        if self.results is None:
            raise NotReady("The demo has not ended yet.")
        return self.results

    def rates(self) -> Rates:
        """How fast it went, from the samples."""
        growing = [pair for pair in zip(self.samples, self.samples[1:], strict=False) if pair[1].at > pair[0].at]
        producing = sum(b.at - a.at for a, b in growing if b.produced > a.produced)
        up = sum(b.at - a.at for a, b in growing if a.run and a.run == b.run and b.produced)
        applied = max((sample.orders for sample in self.samples), default=0)
        best = max((_speed(self.samples, index) for index in range(len(self.samples))), default=0.0)
        return Rates(
            produced=self.samples[-1].produced / producing if producing else 0.0,
            followed=applied / up if up else 0.0,
            followed_best=best,
        )

    def fields(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        results = self.outcome
        return {
            "verdict": "EXACT" if results.exact else "WRONG",
            "naive_wrong": not results.naive_exact,
            "shape": asdict(self.shape),
            "seconds": round(self.seconds, 1),
            "results": asdict(results),
            "rates": {name: round(rate) for name, rate in asdict(self.rates()).items()},
            "naive_exposed": self.exposed,
            "lag": None if self.lag is None else self.lag.fields(),
            "events": [asdict(event) for event in self.events],
            "samples": [asdict(sample) for sample in self.samples],
        }


_SPEED_OVER = 5.0


def _speed(samples: list[Sample], index: int) -> float:
    """Applied records per second over the five seconds before a sample."""
    now = samples[index]
    for earlier in reversed(samples[:index]):
        if now.at - earlier.at >= _SPEED_OVER:
            return (now.orders - earlier.orders) / (now.at - earlier.at)
    return 0.0
