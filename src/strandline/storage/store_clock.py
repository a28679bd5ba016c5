"""The clock of an object store: a second witness of the time, beside this machine's own."""

from __future__ import annotations

from typing import Final

from strandline.storage.ambient import Clock
from strandline.storage.store import ObjectStore, Payload

_SECOND: Final = 1_000_000
_SERVERS: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")


def has_own_clock(url: str) -> bool:
    """Whether a store stamps its objects by a clock of its own, and not by that of whoever writes."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in _SERVERS


def measure_skew(store: ObjectStore, path: str, data: Payload, *, clock: Clock) -> int | None:
    """By how many microseconds this machine's clock is ahead of the store's (negative: behind), at least.

    Writes an object and looks at when the store says that it did. 0 means that both may show the same time; None that
    the store does not list what it was just given. ``path`` should be alone in its folder: that is what is listed.
    """
    before = clock.now()
    store.put(path, data)
    after = clock.now()
    written = next((item.modified for item in store.list(path) if item.path == path), None)
    if written is None:
        return None
    latest = written + (_SECOND - 1 if written % _SECOND == 0 else 0)  # many stores know only whole seconds
    if written > after:
        return after - written
    return max(0, before - latest)
