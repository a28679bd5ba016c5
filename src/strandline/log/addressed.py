"""A log or its address: a call that takes either opens an address for as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TypeVar, cast

from strandline.lazy_names import open_address
from strandline.model.addresses import Address, ParsedAddress
from strandline.storage.closing import Closing

L = TypeVar("L")


@contextmanager
def log_at(log: L | Address, *, changes_slots: bool = False) -> Iterator[L]:
    """The given log, which stays open; or the log at an address, with its cold tier, closed at the end of the block.

    A write-ahead log at an address is read beside the process that writes it, unless the call changes its slots.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-addressed", create=True)
    >>> with log_at("memory://doctest-addressed") as found, log_at(log) as same:
    ...     found.log_id == log.log_id, same is log
    (True, True)
    """
    if not isinstance(log, str | PathLike):
        yield log
        return
    beside = ParsedAddress.of(log).is_wal and not changes_slots
    found = open_address(log, read_only=True) if beside else open_address(log)
    try:
        yield cast("L", found)
    finally:
        if isinstance(found, Closing):
            found.close()
