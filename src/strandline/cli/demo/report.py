"""The demo's result: samples, events, the comparison and the rates; and its summary as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from strandline.errors import NotReady

_WINDOW: Final = 5.0
_WIDE: Final = 140
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_BESIDE: Final = len("orders table   at most 1,000,000")
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
    lag: Lag | None = None
    compared: Comparison | None = None
    seconds: float = 0.0

    @property
    def comparison(self) -> Comparison:
        """The comparison; ``NotReady`` before the end."""
        if self.compared is None:
            raise NotReady("The demo has not ended yet.")
        return self.compared

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
            "lag": None if self.lag is None else self.lag.fields(),
            "events": [asdict(event) for event in self.events],
            "samples": [asdict(sample) for sample in self.samples],
        }


def event_line(event: DemoEvent) -> RenderableType:
    """One event with its time."""
    return show.labelled(Text(f"{event.at:6.1f} s", "dim"), Text(event.text, _STYLES.get(event.kind, "")))


def summary(result: DemoResult, width: int = _WIDE) -> RenderableType:
    """Lag, differences, rates and the result, in ``width`` columns."""
    rates, found = result.rates(), result.comparison
    states = {"orders table": found.orders, "naive twin, as a view": found.naive_state}
    changes = {"all changes": found.changes, "naive twin": found.naive}
    records = f"{result.workload.records:,}"
    parts: list[RenderableType] = []
    if result.lag is not None:
        parts += ["\nLag at the end:", result.lag.rendered()]
    parts += [
        "\nRecords behind the end of the log, over time:",
        *(f"{name:<14}{sparkline(lags, min(80, width - _BESIDE))}" for name, lags in _lags(result.samples).items()),
        "",
        _differences("The latest value of each key, against the truth", states),
        "",
        _differences(f"All {records} changes, counted by offset", changes),
        "",
        f"Produced, paced:     {rates['produced']:>9,.0f} records/s",
        f"Followed, with Spark:{rates['followed']:>10,.0f} records/s, over the best 5 seconds",
    ]
    parts += [f"Started three times, killed twice, {show.seconds(result.seconds)} in all.\n", _verdict(found)]
    return Group(*parts)


def _lags(samples: Sequence[Sample]) -> dict[str, list[int]]:
    readers = {"orders table": "orders", "naive twin": "naive", "all changes": "changes"}
    return {
        title: [max(0, sample.produced - getattr(sample, name)) for sample in samples]
        for title, name in readers.items()
    }


def sparkline(values: Sequence[int], width: int = 80) -> str:
    """Values as a line of blocks, and the largest of them as a number.

    >>> sparkline([0, 10, 70, 35])
    '▁▂█▄ at most 70'
    """
    top, size = max(values, default=0), -(-len(values) // width) or 1
    peaks = [max(values[at : at + size]) for at in range(0, len(values), size)]
    blocks = "".join(_BLOCKS[peak * (len(_BLOCKS) - 1) // max(1, top)] for peak in peaks)
    return f"{blocks} at most {top:,}"


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
