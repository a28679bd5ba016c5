"""Opens the log of a driver call, with its cold tier, for the duration of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TypeAlias

from strandline.errors import InvalidInput
from strandline.log.object import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.addresses import Address
from strandline.node.api import Primary, Replica
from strandline.node.flight.remote_log import RemoteLog
from strandline.opening import open_url
from strandline.spark.options import STORAGE_PREFIX
from strandline.tier.opening import tiered
from strandline.tier.read.tiered_log import TieredLog

SharedLog: TypeAlias = ObjectLog | TieredLog | WalLog | WalReader | RemoteLog | Primary | Replica
"""A log that Spark's processes can open, too, by its address."""


@contextlib.contextmanager
def opened(log: SharedLog | Address, options: Mapping[str, str]) -> Iterator[SharedLog]:
    """The log with its cold tier, if it has one, within the block; ``options`` are the data source's, in lower case.

    Closes what it opens; a given log stays open. A write-ahead log by its address is opened for reading.
    ``InvalidInput`` for a log that only this process can read.
    """
    storage = {name[len(STORAGE_PREFIX) :]: text for name, text in options.items() if name.startswith(STORAGE_PREFIX)}
    if isinstance(log, TieredLog | RemoteLog | Primary | Replica):
        yield log
        return
    found: SharedLog
    if isinstance(log, str | PathLike):
        found = open_url(log, options=storage or None, read_only=str(log).startswith("wal:"))
    elif isinstance(log, ObjectLog | WalLog | WalReader):
        # Spark's processes read both tiers of the log at this address, and this process must see the same.
        found = tiered(log, options=storage or None)
    else:
        raise _unreadable(log)
    try:
        yield found
    finally:
        if isinstance(found, TieredLog):
            found.close()  # it is opened again when it is needed; a node's connection stays for the query's slot


def _unreadable(log: object) -> InvalidInput:
    return InvalidInput(f"Spark reads only logs that other processes can open, and {log!r} is not one.")
