"""Opens an object log or a version 1 queue, by format."""

from __future__ import annotations

from typing import Any, Literal

from strandline.compat.v1.log import QueueLog, open_queue
from strandline.log.object.log import ObjectLog, open_log
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.storage.store import ObjectStore


@checked(name="open")
def open_any(
    place: Address | ObjectStore,
    *,
    format: Literal["queue-v1"] | None = None,  # noqa: A002 - as in Spark
    **settings: Any,
) -> ObjectLog | QueueLog:
    """Open what is at an address, or in a store: an own log, or with ``format="queue-v1"`` a queue of version 1.

    An own log is made by ``create=True`` if there is none, with ``retention`` and ``limits``; see
    :func:`~strandline.log.object.log.open_log`. A queue needs no creating: ``manifest`` and ``data`` say where its
    parts are; see :func:`~strandline.compat.v1.log.open_queue`. It stays a queue of version 1 whatever is done with it.

    >>> open_any("memory://doctest-formats", format="queue-v1").bounds()
    Bounds(first=0, next=0)
    """
    return open_log(place, **settings) if format is None else open_queue(place, **settings)
