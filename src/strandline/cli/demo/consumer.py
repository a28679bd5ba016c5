"""A consumer process without Spark: ``python -m strandline.cli.demo.consumer URL TABLE MODE SLOT UNTIL``."""

from __future__ import annotations

import sys

import strandline as sl
from strandline.cli.demo.places import on_a_leash


def main(url: str, table: str, mode: str, slot: str, until: int) -> None:
    """Follow the log into a Delta table, from the beginning up to an offset."""
    on_a_leash()
    sink = sl.DeltaSink(table, mode="append" if mode == "append" else "latest")
    sl.follow(sl.open(url), sink, slot=slot, start="beginning", until=until)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
