"""The demo's result: samples, events, the comparison and the rates; and its summary as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strandline.cli.demo.changes import DemoWorkload
from strandline.cli.demo.comparison import Comparison
from strandline.cli.logs.lag import Lag
from strandline.cli.shared import output as show

_WINDOW: Final = 5.0
_STYLES: Final = {
    "kill": "bold red",
    "checkpoint": "bold magenta",
    "start": "green",
    "up": "green",
    "join": "cyan",
    "done": "bold",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The end of the log and the offset of each reader, ``at`` seconds; ``run`` is 0 while Spark is down."""

    at: float
    produced: int
    orders: int
    naive: int
    changes: int
    run: int


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """A step of the demo. ``kind`` is start, retry, up, kill, checkpoint, join or done."""

    at: float
    kind: str
    text: str


@dataclass(slots=True)
class DemoResult:
    """One demo from start to end."""

    workload: DemoWorkload
    samples: list[Sample] = field(default_factory=list)
    events: list[DemoEvent] = field(default_factory=list)
    seconds: float = 0.0
    lag: Lag = field(init=False)
    """At the end."""
    comparison: Comparison = field(init=False)

    def rates(self) -> dict[str, float]:
        """Records per second: produced, on average while there were producers, and applied by Spark, over the best 5 s.

        There is no average of Spark's: it waits for producers most of the time.
        """
        samples, last = self.samples, self.samples[-1]
        steps = [(a, b, b.at - a.at) for a, b in pairwise(samples)]
        producing = sum(time for a, b, time in steps if b.produced > a.produced)
        windows = [(a, b) for b in samples for a in samples if _WINDOW <= b.at - a.at < 2 * _WINDOW]
        return {
            "produced": last.produced / producing if producing else 0.0,
            "followed": max(((b.orders - a.orders) / (b.at - a.at) for a, b in windows), default=0.0),
        }

    def fields(self) -> dict[str, Any]:
        """The fields of ``--json``."""
        found = self.comparison
        return {
            "verdict": "EXACT" if found.exact else "WRONG",
            "naive_wrong": not found.naive_exact,
            "workload": asdict(self.workload),
            "seconds": round(self.seconds, 1),
            "results": asdict(found),
            "rates": {name: round(rate) for name, rate in self.rates().items()},
            "lag": self.lag.fields(),
            "events": [asdict(event) for event in self.events],
            "samples": [asdict(sample) for sample in self.samples],
        }


def event_line(event: DemoEvent) -> RenderableType:
    """One event with its time."""
    return show.labelled(Text(f"{event.at:6.1f} s", "dim"), Text(event.text, _STYLES.get(event.kind, "")))


def summary(result: DemoResult) -> RenderableType:
    """Lag, differences, rates and the result."""
    rates, found = result.rates(), result.comparison
    states = {"orders table": found.orders, "naive twin, as a view": found.naive_state}
    changes = {"all changes": found.changes, "naive twin": found.naive}
    records = f"{result.workload.records:,}"
    return Group(
        "\nLag at the end:",
        result.lag.rendered(),
        "",
        _differences("The latest value of each key, against the truth", states),
        "",
        _differences(f"All {records} changes, counted by offset", changes),
        "",
        f"Produced, paced:     {rates['produced']:>9,.0f} records/s",
        f"Followed, with Spark:{rates['followed']:>10,.0f} records/s, over the best 5 seconds",
        f"Started three times, killed twice, {show.seconds(result.seconds)} in all.\n",
        _verdict(found),
    )


def _differences(title: str, tables: Mapping[str, Any]) -> Table:
    """Counts of each table; all but the rows should be zero."""
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("table")
    for column in asdict(next(iter(tables.values()))):
        table.add_column(column, justify="right")
    for name, found in tables.items():
        rows, *wrong = asdict(found).values()
        table.add_row(name, f"{rows:,}", *(Text(f"{n:,}", "bold red" if n else "green") for n in wrong))
    return table


def twin_verdict(found: Comparison) -> str:
    """One sentence on the naive twin."""
    if found.naive_exact:
        return "The naive twin happens to be right this time."
    return f"The naive twin lost {found.naive.lost:,} changes and doubled {found.naive.doubled:,}."


def _verdict(found: Comparison) -> Text:
    twin = twin_verdict(found)
    if found.exact:
        return Text.assemble(("EXACT", "bold green"), f": all tables that follow the log equal the truth. {twin}")
    return Text.assemble(("WRONG", "bold red"), f": {found.orders}, {found.changes}. {twin}")
