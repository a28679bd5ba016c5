"""What the demo shows while it runs: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from strandline.cli import output as show
from strandline.cli.demo.generator import Shape
from strandline.cli.demo.story import Event, Sample

_EVERY: Final = 5.0
_STYLES: Final = {
    "kill": "bold red",
    "checkpoint": "bold magenta",
    "start": "green",
    "up": "green",
    "join": "cyan",
    "done": "bold",
}
_LINES: Final = {
    "produced": "produced",
    "orders": "orders table (Spark, strandline)",
    "naive": "naive twin   (Spark, checkpoint)",
    "history": "late history (no Spark)",
}


class Screen:
    """Progress and events. With ``quiet`` nothing goes to standard output, and bars only to a terminal."""

    def __init__(self, shape: Shape, *, quiet: bool) -> None:
        """Nothing is shown yet."""
        self._shape = shape
        self._quiet = quiet
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last = float("-inf")

    @property
    def _console(self) -> Console:
        return show.out() if self._bars is None else self._bars.console

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and (self._quiet or sys.stdout.isatty()):
            self._bars = Progress(
                TextColumn("{task.description:<34}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:>11,.0f}  {task.fields[note]}", markup=False),
                console=show.err(),
                transient=True,
            )
            for name, line in _LINES.items():
                self._tasks[name] = self._bars.add_task(line, total=self._shape.records, note="")
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, what: RenderableType = "") -> None:
        """Print something that stays."""
        if not self._quiet:
            self._console.print(what)

    def event(self, event: Event) -> None:
        """Print what happened."""
        self.say(Text.assemble((f"{event.at:6.1f} s  ", "dim"), (event.text, _STYLES.get(event.kind, ""))))

    def update(self, sample: Sample) -> None:
        """Show how far everybody is."""
        if self._bars is not None:
            for name, task in self._tasks.items():
                done = getattr(sample, name)
                self._bars.update(task, completed=done, note=_note(name, sample))
        elif not self._quiet and sample.at - self._last >= _EVERY:
            self._last = sample.at
            parts = [
                f"produced {sample.produced:>9,}",
                f"orders table {sample.orders:>9,}",
                f"naive twin {sample.naive:>9,}",
                f"late history {sample.history:>9,}",
            ]
            state = f"Spark run {sample.run}" if sample.run else "Spark is down or starting"
            print(f"{sample.at:6.1f} s    {'   '.join(parts)}   ({state})", flush=True)


def _note(name: str, sample: Sample) -> str:
    if name == "produced":
        return f"Spark run {sample.run}" if sample.run else "Spark is down or starting"
    if name == "history" and not sample.history:
        return "has not joined yet"
    behind = sample.produced - int(getattr(sample, name))
    return f"{behind:,} behind" if behind > 0 else ""
