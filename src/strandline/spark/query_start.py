"""Starts streaming queries on busy machines, where the Python process of a source may start late."""

from __future__ import annotations

import logging
from typing import Any, Final

from strandline.model.arguments import Positive, checked
from strandline.storage.clock import Clock
from strandline.storage.env import SYSTEM, Env
from strandline.storage.retry import Backoff

_LOGGER: Final = logging.getLogger(__name__)
_LATE: Final = "Python worker failed to connect back"
_POLL: Final = 0.05


@checked
def start(
    writer: Any,
    path: str | None = None,
    *,
    attempts: Positive = 8,
    env: Env = SYSTEM,
) -> Any:
    """Start a streaming query, and again if the Python process of its source did not start within ten seconds.

    Spark does not change that time, and ends the query; no micro-batch has begun then. Returns the query when its
    sources are ready, or when it has ended for another reason, which ``awaitTermination`` raises as ever. ``writer`` is
    a ``DataStreamWriter`` and ``path`` what its ``start`` takes; works on classic sessions and on Spark Connect.
    """
    pauses = Backoff(attempts=attempts, base=0.5, ceiling=8.0)
    for attempt in range(attempts - 1):
        query = _started(writer, path, env.clock)
        error = query.exception()
        if error is None or _LATE not in str(error):
            return query
        _LOGGER.warning("The process of a source did not start in time (attempt %d of %d).", attempt + 1, attempts)
        env.clock.sleep(pauses.pause(attempt, env.chance.jitter()))
    return _started(writer, path, env.clock)


def _started(writer: Any, path: str | None, clock: Clock) -> Any:
    """A query whose sources are ready, or which has ended."""
    query = writer.start() if path is None else writer.start(path)
    while query.isActive and str(query.status["message"]).startswith("Initializing"):
        clock.sleep(_POLL)
    return query
