"""The result of a demo, as values: samples, events, the comparison of the tables and the rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from strandline.cli.demo.generator import Shape
from strandline.cli.demo.truth import Comparison
from strandline.cli.lag import Lag
from strandline.errors import NotReady

_WINDOW: Final = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The end of the log and the offset of each reader, ``at`` seconds; ``run`` is 0 while Spark is down."""

    at: float
    produced: int
    orders: int
    naive: int
    history: int
    run: int


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """A step of the demo. ``kind`` is start, up, kill, checkpoint, join or done."""

    at: float
    kind: str
    text: str


@dataclass(slots=True)
class DemoResult:
    """One demo from start to end."""

    shape: Shape
    samples: list[Sample] = field(default_factory=list)
    events: list[DemoEvent] = field(default_factory=list)
    lag: Lag | None = None
    compared: Comparison | None = None
    seconds: float = 0.0
    exposed: float | None = None
    """The share of its working time in which the naive pipeline had a batch written and not recorded."""

    @property
    def comparison(self) -> Comparison:
        """The comparison; ``NotReady`` before the end."""
        if self.compared is None:
            raise NotReady("The demo has not ended yet.")
        return self.compared

    def rates(self) -> dict[str, float]:
        """Records per second: produced, and applied through Spark, on average while it was up and at best over 5 s."""
        samples, last = self.samples, self.samples[-1]
        steps = [(a, b, b.at - a.at) for a, b in pairwise(samples)]
        producing = sum(time for a, b, time in steps if b.produced > a.produced)
        up = sum(time for a, b, time in steps if a.run and a.run == b.run and b.produced)
        windows = [(a, b) for b in samples for a in samples if _WINDOW <= b.at - a.at < 2 * _WINDOW]
        return {
            "produced": last.produced / producing if producing else 0.0,
            "followed": last.orders / up if up else 0.0,
            "followed_best": max(((b.orders - a.orders) / (b.at - a.at) for a, b in windows), default=0.0),
        }

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        found = self.comparison
        return {
            "verdict": "EXACT" if found.exact else "WRONG",
            "naive_wrong": not found.naive_exact,
            "shape": asdict(self.shape),
            "seconds": round(self.seconds, 1),
            "results": asdict(found),
            "rates": {name: round(rate) for name, rate in self.rates().items()},
            "naive_exposed": self.exposed,
            "lag": None if self.lag is None else self.lag.fields(),
            "events": [asdict(event) for event in self.events],
            "samples": [asdict(sample) for sample in self.samples],
        }
