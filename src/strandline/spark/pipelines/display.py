"""A progress bar for pipelines: with ``rich`` in terminals and notebooks, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TextIO

_BAR_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 10.0


class Shown(Protocol):
    """Progress that can be shown."""

    @property
    def records(self) -> int:
        """Records that were committed."""

    @property
    def lag(self) -> int | None:
        """Records that were not; None: unknown."""

    def line(self) -> str:
        """One line for operators."""


@contextlib.contextmanager
def displayed(name: str, progress: Callable[[], Shown], out: TextIO | None = None) -> Iterator[None]:
    """Show a pipeline's progress within the block, and then its last state. Its errors never end the pipeline."""
    closing = threading.Event()

    def run() -> None:
        with _shower(name, out or sys.stderr) as (show, every):
            while True:
                is_last = closing.wait(every)
                with contextlib.suppress(Exception):  # the log may be closed, the terminal gone: the table matters
                    show(progress())
                if is_last:
                    return

    thread = threading.Thread(target=run, name="strandline-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(_LINE_SECONDS)


@contextlib.contextmanager
def _shower(name: str, out: TextIO) -> Iterator[tuple[Callable[[Shown], object], float]]:
    bar = _rich_bar(out)
    if bar is None:
        yield lambda found: print(f"{name}: {found.line()}", file=out, flush=True), _LINE_SECONDS
        return
    with bar:
        task = bar.add_task(name, total=None, status="")

        def show(found: Shown) -> None:
            total = None if found.lag is None else found.records + found.lag
            bar.update(task, total=total, completed=found.records, status=found.line())

        yield show, _BAR_SECONDS


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
