"""How things look: numbers, errors and progress, on a terminal and without one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_KILO: Final = 1000
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400
_WIDE: Final = 240
_PLAIN_EVERY: Final = 2.0


def out() -> Console:
    """Standard output. In a pipe nothing is wrapped or cut to a width."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _WIDE)


def error(reason: BaseException | str) -> None:
    """One error, as one line on standard error."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    if sys.stderr.isatty():
        err().print(f"[bold red]error:[/] {_plain(text)}")
    else:
        print(f"error: {text}", file=sys.stderr, flush=True)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def document(value: Any) -> None:
    """One JSON value on one line of standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def size(count: float) -> str:
    """Bytes for people.

    >>> size(999), size(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < _KILO:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= _KILO
    return f"{count:.1f} PB"


def seconds(length: float) -> str:
    """A length of time for people.

    >>> seconds(0.04), seconds(75), seconds(90_000)
    ('0.0 s', '1 min 15 s', '1 d 1 h')
    """
    if length < _MINUTE:
        return f"{length:.1f} s"
    if length < _HOUR:
        return f"{length // _MINUTE:.0f} min {length % _MINUTE:.0f} s"
    if length < _DAY:
        return f"{length // _HOUR:.0f} h {length % _HOUR // _MINUTE:.0f} min"
    return f"{length // _DAY:.0f} d {length % _DAY // _HOUR:.0f} h"


@contextmanager
def meter(what: str, *, total: int | None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere; ``quiet`` keeps only the bar.

    Yields a function that is told how many more are done.
    """
    if sys.stderr.isatty():
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=err(),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda more: bar.advance(task, more)
        return
    began = last = time.monotonic()
    done = 0

    def advance(more: int) -> None:
        nonlocal done, last
        done += more
        now = time.monotonic()
        if not quiet and now - last >= _PLAIN_EVERY:
            last = now
            of = "" if total is None else f" of {total:,}"
            print(f"{what}: {done:,}{of}, {done / (now - began):,.0f}/s", file=sys.stderr, flush=True)

    yield advance
