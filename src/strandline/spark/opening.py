"""Opens the log of a driver call, with its cold tier, for the duration of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike

from strandline.errors import InvalidInput
from strandline.log.object import ObjectLog
from strandline.model.addresses import Address
from strandline.spark.options import STORAGE_PREFIX
from strandline.tier.opening import open_tiered, tiered
from strandline.tier.read.tiered_log import TieredLog


@contextlib.contextmanager
def opened(log: ObjectLog | TieredLog | Address, options: Mapping[str, str]) -> Iterator[ObjectLog | TieredLog]:
    """The log with its cold tier, if it has one, within the block; ``options`` are the data source's, in lower case.

    Closes what it opens; a given tiered log stays open. ``InvalidInput`` for a log that only
    this process can read.
    """
    storage = {name[len(STORAGE_PREFIX) :]: text for name, text in options.items() if name.startswith(STORAGE_PREFIX)}
    if isinstance(log, TieredLog):
        if not isinstance(log.hot, ObjectLog):
            raise _unreadable(log)
        yield log
        return
    if isinstance(log, str | PathLike):
        found = open_tiered(log, options=storage or None)
    elif isinstance(log, ObjectLog):
        # Spark's processes read both tiers of the log at this address, and this process must see the same.
        found = tiered(log, options=storage or None)
    else:
        raise _unreadable(log)
    try:
        yield found
    finally:
        if isinstance(found, TieredLog):
            found.close()


def _unreadable(log: object) -> InvalidInput:
    return InvalidInput(f"Spark reads only logs that other processes can open, and {log!r} is not one.")
