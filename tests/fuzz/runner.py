"""Starts children that try cases, and reports what they found: the smallest input there is, and how to repeat it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.registry import find
from tests.fuzz.targets import case

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = 300


@dataclass
class Find:
    """Something that should not have been."""

    target: str
    seed: int | None
    what: str
    trace: str
    data: bytes
    kept: Path

    def __str__(self) -> str:
        shown = self.data.hex() if len(self.data) <= _SHOWN else f"{len(self.data):,} bytes"
        again = f"python -m tests.fuzz --only {self.target}"
        by_seed = "" if self.seed is None else f"\n  repeat it:    {again} --seed {self.seed} --cases 1"
        return (
            f"{self.target}: {self.what}\n{self.trace.rstrip()}\n  input:        {shown}"
            f"{by_seed}\n  or from file: {again} --input {self.kept}"
        )


@dataclass
class Report:
    """What came of some targets."""

    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    finds: list[Find] = field(default_factory=list)


def fuzz(names: Sequence[str], *, seed: int, seconds: float, cases: int | None = None, quiet: bool = False) -> Report:
    """Try targets one after another, each from the same seed, for ``seconds`` in total or ``cases`` each."""
    report = Report()
    left = list(names)
    while left:
        # One child for all of them: a new one costs more than many cases do. It ends with the first find.
        done = _run_child(report, left, seed, seconds / len(names), cases, quiet=quiet)
        left = left[left.index(done) + 1 :] if done in left else []
    return report


def _run_child(
    report: Report, names: Sequence[str], seed: int, seconds: float, cases: int | None, *, quiet: bool
) -> str | None:
    """Let a child try targets; the name of the one that ended it, if one did."""
    order = json.dumps({"names": list(names), "seed": seed, "seconds": seconds, "cases": cases})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.child_main", order],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        )
        last: dict[str, Any] = {}
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if "outcomes" in told:
                report.outcomes[told["target"]] = told["outcomes"]
                report.peaks[told["target"]] = told["peak"]
                if not quiet:
                    print(f"{told['target']}: {told['cases']:,} cases, {told['outcomes']}", flush=True)
                last = {}
            else:
                last = told
        status = process.wait()
        errors.seek(0)
        trace = errors.read().decode(errors="replace")[-4000:]
    if not last and not status:
        return None
    find = _find(last, status, trace)
    report.finds.append(find)
    if not quiet:
        print(f"FOUND {find}", flush=True)
    return find.target


def _find(last: dict[str, Any], status: int, trace: str) -> Find:
    name, seed = last.get("target", "?"), last.get("seed")
    if "find" in last:
        what, trace, data = last["find"], last["trace"], bytes.fromhex(last["data"])
    else:
        ended = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        what = "it hung" if "Timeout (" in trace else f"the process ended {ended}"
        data = _made(name, seed)
    handle, path = tempfile.mkstemp(prefix=f"fuzz-{name}-{seed}-", suffix=".bin")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return Find(name, seed, what, trace, data, Path(path))


def _made(name: str, seed: int | None) -> bytes:
    """The case that a child died of."""
    return b"" if seed is None else case(find(name), seed)
