"""The clock of an object store: a second source of time beside the machine's."""

from __future__ import annotations

import logging
from typing import Final

from strandline.storage.clock import Clock
from strandline.storage.store import ObjectStore, Payload

_LOGGER: Final = logging.getLogger(__name__)
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


def cautious_now(store: ObjectStore, path: str, *, clock: Clock) -> int:
    """Microseconds since the epoch that both this machine's clock and the store's, if it has one, have reached.

    For who deletes by the age of objects: one clock that is ahead makes nothing old. ``path`` is written and deleted.
    """
    if not has_own_clock(store.url):
        return clock.now()
    skew = measure_skew(store, path, b"", clock=clock)
    store.delete(path)
    if skew is not None and skew > _SECOND:
        _LOGGER.warning(
            "This machine's clock is %d s ahead of that of %s: set whichever is wrong right. What goes by age "
            "goes when it is old by both clocks.",
            skew // _SECOND, store.url,
        )  # fmt: skip
    return clock.now() - max(0, skew or 0)
