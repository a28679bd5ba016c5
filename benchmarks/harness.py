"""What benchmarks are made of: results with goals, and sides that take turns."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True, slots=True)
class Result:
    """One number. ``goal`` is what the value must be at least ('>= x') or at most ('<= x'); empty for reports."""

    name: str
    value: float
    unit: str
    goal: str = ""
    beside: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if not self.goal:
            return None
        sign, bound = self.goal.split()
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


@contextmanager
def scratch() -> Iterator[str]:
    """A folder on a real disk, removed afterwards."""
    folder = tempfile.mkdtemp(prefix="strandline-bench-", dir=os.environ.get("STRANDLINE_BENCH_DIR"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_turns(sides: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each side, which take turns so that a slow spell of the machine hits all of them."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, action in enumerate(sides):
            times[side].append(seconds(action))
    return times


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How the middle of one side compares with the middle of the other."""
    return median(ours) / median(theirs)


def show(results: Sequence[Result]) -> None:
    """The table that people read."""
    width = max((len(result.name) for result in results), default=10)
    for result in results:
        mark = {None: " ", True: "✓", False: "✗"}[result.met]
        value = f"{result.value:,.0f}" if abs(result.value) >= 1000 else f"{result.value:.3g}"
        print(f"{mark} {result.name:<{width}}  {value:>12} {result.unit:<14} {result.goal:<12} {result.beside}")


def save(results: Sequence[Result]) -> None:
    """Merge into ``results.json``: name → value, unit, goal, what it was measured beside."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    for result in results:
        row = asdict(result)
        name = row.pop("name")
        row["value"] = float(f"{result.value:.4g}") if math.isfinite(result.value) else None
        known[name] = {**row, "met": result.met, "machine": machine}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
