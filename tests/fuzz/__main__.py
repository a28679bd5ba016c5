"""``python -m tests.fuzz``: hostile input for whatever takes some, drawn from a seed, in bounded time and memory."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.child import try_input
from tests.fuzz.registry import GROUPS, find, group, named
from tests.fuzz.runner import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; by default the time, which is told")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default 60)")
    parser.add_argument("--cases", type=int, help="number of cases per target, if that is over sooner")
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="a target or a group; may repeat")
    parser.add_argument("--input", type=Path, help="try this file on the one target that --only names, in this process")
    parser.add_argument("--list", action="store_true", help="name the targets")
    options = parser.parse_args()
    if options.list:
        for name in GROUPS:
            print(f"{name}: {', '.join(target.name for target in group(name))}")
        return 0
    try:
        names = named(options.only)
    except LookupError as error:
        parser.error(str(error))
    if options.input is not None:
        if len(names) != 1:
            parser.error("--input needs --only with one target")
        return 0 if try_input(find(names[0]), options.input.read_bytes()) else 1
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"{len(names)} targets from seed {seed} on, for {options.seconds:g} s.", flush=True)
    report = fuzz(names, seed=seed, seconds=options.seconds, cases=options.cases)
    peak = max(report.peaks.values(), default=0)
    print(f"{len(report.finds)} finds; the most memory that a process had was {peak >> 20:,} MiB.")
    return 1 if report.finds else 0


if __name__ == "__main__":
    sys.exit(main())
