"""``strandline ingest``: copy a log, a queue, a Kafka partition or a JetStream stream into a log, exactly once."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Annotated, Any, Final

import typer

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.any_log import LogPlace, open_shared
from strandline.cli.shared.common import (
    INTERRUPTED,
    Follow,
    QueueFormatOption,
    Workers,
    beginning,
    connecting,
    retention_option,
    stop_on_signal,
)
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.monitoring import Metrics
from strandline.cli.shared.options import argument, flag, option
from strandline.cli.shared.pools import is_on_spark, task_pool
from strandline.compat.v1.log import QueueFormat
from strandline.errors import InvalidInput
from strandline.ingestion.api import open_source
from strandline.ingestion.log_sink import LogSink
from strandline.ingestion.run import Ingested, IngestProgress
from strandline.ingestion.streams import MessageStream
from strandline.model.addresses import ParsedAddress
from strandline.storage.closing import Closing

_STREAMS: Final = ("kafka", "nats", "tls")
_PLACES: Final = "a folder, file://, s3://, gs://, az://, wal:///folder or grpc://host:port"


@connecting
def ingest(
    source: Annotated[
        str,
        argument(
            "SOURCE", f"What is copied: {_PLACES}, kafka://host:port/topic[/partition] or nats://host:port/stream."
        ),
    ],
    target: Annotated[str, argument("TARGET", f"The log to append to: {_PLACES}; made if there is none.")],
    *,
    follow: Follow = False,
    slot: Annotated[
        str | None, option("NAME", "The slot that pins the source between two runs; made if there is none.")
    ] = None,
    start: Annotated[
        Any, beginning("Where the first ingest of this source begins: beginning, retained, now, an offset or a time.")
    ] = "beginning",
    skip_trimmed: Annotated[
        bool, flag("Continue without records that the source deleted before they were ingested.", "--skip-trimmed")
    ] = False,
    format: QueueFormatOption = None,  # noqa: A002
    retention: Annotated[str | None, retention_option("What an object log that is made")] = None,
    workers: Workers = None,
    metrics: Metrics,
) -> None:
    """Append all records of a source to a log, each once, in order.

    Killed at any moment and started again it continues: the target holds the position in the source, in the same
    append as the records. Others may append to source and target meanwhile. A large backlog goes into an object log in
    parallel with --workers, or on a cluster with 'strandline spark ingest'; a later ingest with --follow continues it.

    Example: strandline ingest kafka://broker:9092/orders/0 s3://bucket/orders --follow
    """
    in_parallel = workers is not None or is_on_spark()
    if in_parallel and (follow or slot is not None):
        raise InvalidInput("An ingest by many workers ends at the source's end: then run one with --follow.")
    if metrics.metrics is not None and not follow:
        raise InvalidInput("--metrics is for an ingest that goes on: add --follow.")
    if follow:
        log_to_stderr(logging.INFO)
    with stop_on_signal() as stop, metrics.served() as health, ExitStack() as opened:
        copied: Any = _source(source, target, format)
        place = LogPlace(target, source)
        into: Any = place.open(writes=True, create=not place.is_node, retention=retention)
        for log in (copied, into):
            if isinstance(log, Closing):
                opened.enter_context(log)
        pool = task_pool(workers) if in_parallel else None
        work = opened.enter_context(show.meter("ingesting", total=None))
        known = LogSink(into).cursor(copied.log_id) if metrics.metrics is not None else None
        position = None if known is None else known.next
        moved = opened.enter_context(metrics.lag_of(copied, (source, target), position))
        health.ready()

        def on_progress(progress: IngestProgress) -> None:
            work.upto(progress.records)
            moved(progress.next)

        how: dict[str, Any] = {"start": start, "skip_trimmed": skip_trimmed, "on_progress": on_progress}
        if pool is not None:
            read = source if isinstance(copied, MessageStream) else copied
            done = sl.bulk.ingest(read, into, pool=pool, **how)
        else:
            done = sl.ingest(copied, into, follow=follow, slot=slot, stop=stop, **how)
        interrupted = stop.is_set() and not follow
        end = into.bounds().next
    seconds = work.seconds
    fields = {
        "records": done.records,
        "broken_headers": done.broken_headers,
        "next": done.source.next,
        "target_next": end,
        "seconds": round(seconds, 3),
        "finished": not interrupted,
    }
    show.answer(fields, sentence(done, end, seconds))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _source(source: str, target: str, form: QueueFormat | None) -> Any:
    if form is not None:
        return open_shared(source, form)
    if ParsedAddress.of(source).scheme in _STREAMS:
        return open_source(source)
    return LogPlace(source, target).open()


def sentence(done: Ingested, end: int, seconds: float) -> str:
    """One sentence about the ingest."""
    what = "There was nothing to ingest"
    if done.records:
        what = f"{show.counted(done.records, 'record')} ingested in {show.seconds(seconds)}"
    broken = f" Broken headers: {show.counted(done.broken_headers, 'message')}." if done.broken_headers else ""
    place = f"the target holds the source up to position {done.source.next:,}, and ends at offset {end:,}"
    return f"{what}: {place}.{broken}"
