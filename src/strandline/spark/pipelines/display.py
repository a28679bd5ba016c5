"""A progress bar for pipelines: with ``rich`` in terminals and notebooks, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO

from strandline.spark.pipelines.progress import PipelineProgress

_BAR_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 10.0


class ProgressDisplay:
    """Shows a pipeline's progress until it is closed, and then its last state. Its errors never end the pipeline."""

    def __init__(self, name: str, progress: Callable[[], PipelineProgress], out: TextIO | None = None) -> None:
        """``name`` describes the pipeline; ``out`` is standard error unless given."""
        self._name = name
        self._progress = progress
        self._out = out or sys.stderr
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show, name="strandline-progress", daemon=True)

    def start(self) -> None:
        """Begin to show it."""
        self._thread.start()

    def close(self) -> None:
        """Show the last state, and end."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_LINE_SECONDS)

    def _show(self) -> None:
        with self._shower() as (show, every):
            while True:
                is_last = self._closing.wait(every)
                with contextlib.suppress(Exception):  # the log may be closed, the terminal gone: the table matters
                    show(self._progress())
                if is_last:
                    return

    @contextlib.contextmanager
    def _shower(self) -> Iterator[tuple[Callable[[PipelineProgress], None], float]]:
        bar = _rich_bar(self._out)
        if bar is None:
            yield self._write_line, _LINE_SECONDS
            return
        with bar:
            task = bar.add_task(self._name, total=None, status="")

            def show(found: PipelineProgress) -> None:
                total = None if found.lag is None else found.records + found.lag
                bar.update(task, total=total, completed=found.records, status=found.line())

            yield show, _BAR_SECONDS

    def _write_line(self, found: PipelineProgress) -> None:
        self._out.write(f"{self._name}: {found.line()}\n")
        self._out.flush()


def _rich_bar(out: TextIO) -> Any:
    """A bar of ``rich``; None without the package, or if the output is neither a terminal nor a notebook."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    console = Console(file=out)
    if not console.is_terminal and not console.is_jupyter:
        return None
    return Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), console=console)
