"""A listener for streams of the data source: lag and rates of each query, in the log and for Prometheus."""

from __future__ import annotations

import json
import logging
import math
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from strandline.errors import InvalidInput
from strandline.model.arguments import shown
from strandline.storage import metrics

_LOGGER: Final = logging.getLogger(__name__)
_GAUGES: Final = (metrics.STREAM_LAG_RECORDS, metrics.STREAM_INPUT_RATE, metrics.STREAM_PROCESSED_RATE)


def listen(spark: Any) -> StreamListener:
    """Report lag and rates of all streams of a session, in the log (level INFO) and for Prometheus.

    Returns the listener; ``spark.streams.removeListener`` ends it. Lag counts the records of all logs that a query
    reads, from the end of its last micro-batch to the log's end, and is unknown for queries that read no log.
    """
    if not isinstance(spark, SparkSession) and not hasattr(spark, "interruptTag"):
        raise InvalidInput(f"The argument is a SparkSession, not {shown(spark)}.")
    listener = StreamListener()
    spark.streams.addListener(listener)
    return listener


def records_behind(sources: Any) -> int | None:
    """The lag of a query in records, by its sources' offsets; None if no source is a log, or one has no offsets.

    >>> from types import SimpleNamespace as Source
    >>> log = Source(endOffset='{"log": "a", "next": 7, "term": 0}', latestOffset='{"log": "a", "next": 9, "term": 0}')
    >>> records_behind([log, log]), records_behind([Source(endOffset='{"shard": 1}', latestOffset=None)])
    (4, None)
    """
    offsets = [(_next(one.endOffset), _next(one.latestOffset)) for one in sources]
    found = [None if latest is None else max(0, latest - end) for end, latest in offsets if end is not None]
    known = [one for one in found if one is not None]
    return sum(known) if found and len(known) == len(found) else None


def _next(offset: Any) -> int | None:
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None
    return found["next"] if isinstance(found, dict) and "log" in found and isinstance(found.get("next"), int) else None


class StreamListener(StreamingQueryListener):
    """Reports each query's progress. Spark calls it; its errors end no query."""

    def __init__(self) -> None:
        """Use :func:`listen`."""
        super().__init__()
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """A query was started."""
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """A micro-batch ended."""
        found = event.progress
        name = found.name or str(found.id)
        self._names[str(found.id)] = name
        behind = records_behind(found.sources)
        values = (behind, found.inputRowsPerSecond, found.processedRowsPerSecond)
        for gauge, value in zip(_GAUGES, values, strict=True):
            gauge.labels(name).set(math.nan if value is None else value)
        metrics.STREAM_RECORDS.labels(name).inc(max(0, found.numInputRows))
        lag = "lag unknown" if behind is None else f"{behind:,} records behind"
        _LOGGER.info(
            "%s: micro-batch %d, %s rows, %.0f rows/s in, %.0f rows/s processed, %s",
            name, found.batchId, f"{found.numInputRows:,}", values[1] or 0.0, values[2] or 0.0, lag,
        )  # fmt: skip

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """A query waits for data."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """A query ended: its gauges are removed, so that an old lag is not shown for ever."""
        name = self._names.pop(str(event.id), str(event.id))
        for gauge in _GAUGES:
            try:
                gauge.remove(name)
            except KeyError:
                continue
        _LOGGER.info("%s: ended%s", name, f" by an error: {event.exception}" if event.exception else "")
