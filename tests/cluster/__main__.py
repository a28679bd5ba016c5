"""Simulates one cluster after another, until one breaks, the time is over, or somebody stops it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter

from strandline.storage.clock import CLOCK
from tests.cluster.faults import Climate
from tests.cluster.forced_promotions import operate
from tests.cluster.history import Broken
from tests.cluster.simulated_cluster import play


def main(arguments: list[str] | None = None) -> int:
    """Exit with 1, after the story and the seed, if a history must not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--seed", type=int, help="where to begin; drawn from the time if not given")
    parser.add_argument("--once", action="store_true", help="play this seed only")
    parser.add_argument("--steps", type=int, default=0, help="how long each history is; mixed if not given")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--elections", action="store_true", help="only let nodes come and go")
    kind.add_argument("--operated", action="store_true", help="without a lease: replace primaries by force")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    seed = options.seed if options.seed is not None else CLOCK.now() % 10**9
    climate = Climate.of_elections() if options.elections else None
    until = CLOCK.monotonic() + options.seconds
    total: Counter[str] = Counter()
    steps = 0
    try:
        while CLOCK.monotonic() < until:
            # Many short ones find more than a long one, but not all.
            steps = options.steps or (5000 if seed % 50 == 0 and not options.operated else 500)
            told = operate(seed, steps) if options.operated else play(seed, steps, climate)
            total += told.counts + Counter(histories=1, steps=told.steps)
            _say(f"seed {seed}: {_summary(total)}", end="\r" if sys.stdout.isatty() else "\n" * (seed % 100 == 0))
            seed += 1
            if options.once:
                break
    except Broken as broken:
        _say(f"\n{broken}\n")
        kind_of = " --elections" if climate else " --operated" * options.operated
        again = f"--once --seed {seed} --steps {steps}{kind_of}"
        _say(f"To see it again: python -m tests.cluster {again}\n")
        return 1
    except KeyboardInterrupt:
        _say("\nStopped.")
    _say(f"\nAll is well: {_summary(total)}\n")
    return 0


def _summary(total: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(total.items()))


def _say(text: str, end: str = "") -> None:
    if end or text.startswith(("\n", "To")):
        sys.stdout.write(text + end)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
