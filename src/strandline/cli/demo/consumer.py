"""A consumer process without Spark: ``python -m strandline.cli.demo.consumer URL TABLE MODE SLOT UNTIL``."""

from __future__ import annotations

import sys

import strandline as sl
from strandline.cli.demo.folder import exit_with_parent


def main(url: str, table: str, mode: str, slot: str, until: int) -> None:
    """Follow the log from its beginning into a Delta table, up to an offset."""
    exit_with_parent()
    sink = sl.DeltaSink(table, mode="append" if mode == "append" else "latest")
    sl.follow(sl.open(url), sink, slot=slot, start="beginning", until=until)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
