"""Appends to a replicated log with a cold tier, beside one without: what tiering takes from the primary.

Both logs have a primary in this process and a replica in one of its own. The tierer copies whenever it has 32 MiB, and
each second; it comes to its end between the turns, so that it never runs in the other log's turn.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pyarrow as pa

from benchmarks.harness import Result, scratch, seconds
from benchmarks.replication import _batch, _children
from strandline.node import Primary, TierSettings

_ROUNDS = 5
_LARGE, _SMALL = 96, 1200
"""Appends per turn: of a mebibyte, and of ten records."""
_PATIENCE = 300.0


def _append(primary: Primary, batch: pa.RecordBatch, count: int) -> None:
    for _ in range(count):
        primary.append(batch).ensure()


def _settle(primary: Primary) -> None:
    """Wait until everything is copied, and trimmed."""
    deadline = time.monotonic() + _PATIENCE
    node = primary.node
    while node.log.bounds().first < node.log.bounds().next:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the tierer did not come to its end: {primary.status().tiering}")
        time.sleep(0.02)


def run() -> list[Result]:
    """Appends of a mebibyte and of ten records, with and without a cold tier."""
    large, small = _batch(1024, 1024), _batch(10, 100)
    found: list[Result] = []
    with scratch() as folder:
        tiering = TierSettings(pause=0.1, linger=1.0, target=32 << 20)
        cold = Path(folder, "cold").as_uri()
        with (
            Primary.open(f"{folder}/plain", name="plain", policy="local") as plain,
            Primary.open(f"{folder}/tiered", name="tiered", cold=cold, tiering=tiering, retention="consumed") as tiered,
            _children(
                ("replica", f"{folder}/plain-b", plain.url, "b"), ("replica", f"{folder}/tiered-b", tiered.url, "b")
            ) as replicas,
        ):
            for child in replicas:
                child.say("follow")
                child.hear("follows")
            for name, batch, count in (("1 MiB", large, _LARGE), ("10 records", small, _SMALL)):

                def on(primary: Primary, batch: pa.RecordBatch = batch, count: int = count) -> float:
                    return seconds(lambda: _append(primary, batch, count))

                times: list[list[float]] = [[], []]
                for _ in range(_ROUNDS):
                    times[0].append(on(plain))
                    times[1].append(on(tiered))
                    _settle(tiered)
                rates = [count / median(each) for each in times]
                found += [
                    Result(f"tiered_node_{name.replace(' ', '_')}_untiered", rates[0], "appends/s"),
                    Result(f"tiered_node_{name.replace(' ', '_')}_tiered", rates[1], "appends/s"),
                    Result(
                        f"tiered_node_{name.replace(' ', '_')}_ratio", rates[1] / rates[0], "", ">= 0.9",
                        "appends beside a tierer that copies 32 MiB, or each second",
                    ),
                ]  # fmt: skip
    return found
