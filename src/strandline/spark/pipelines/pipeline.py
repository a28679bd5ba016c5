"""Spark pipelines: the driver plans spans and commits, executors fetch, decode, merge and write."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from pyspark.sql import SparkSession

from strandline.errors import InvalidInput, Unsupported
from strandline.followers.committer import begin
from strandline.followers.engine import GATHER, Engine
from strandline.followers.events import Batching
from strandline.followers.routes.progress import RouteOptions
from strandline.followers.run import Follower
from strandline.followers.table_route import pipeline_name
from strandline.log.contract import LogReading
from strandline.log.slots.heartbeat import SlotHeartbeat
from strandline.model.addresses import Address
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor, Limit, Start
from strandline.model.sink import Sink
from strandline.spark.executor_pool import executors
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.options import parse_options
from strandline.spark.pipelines.following import Following, Running
from strandline.spark.pipelines.progress import OnStep, ProgressCounter
from strandline.spark.pipelines.routed import RoutedPipeline
from strandline.spark.pipelines.single import SinglePipeline
from strandline.spark.pipelines.transform import FrameTransform
from strandline.spark.pipelines.workers import Place, SparkWorkers
from strandline.spark.trigger import Trigger, parse_trigger
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM
from strandline.storage.retry import Backoff
from strandline.tables.files.sink import FileTableSink
from strandline.tables.maintain.contract import MaintainedTable
from strandline.tables.maintain.rebuilding import rebuild_table
from strandline.tables.routes.route import Route, as_route

_MAX_BYTES: Final = 256 << 20
_STOP_SECONDS: Final = 120.0
_TRIGGER: Final = {"processingTime": "1 second"}
_WITHOUT_END: Final = 1 << 62
PATIENCE: Final = Backoff(attempts=40, base=0.25, ceiling=30.0)
"""Failed jobs and failed commits in a row that a pipeline survives: about a quarter of an hour."""
_LOGGER: Final = logging.getLogger(__name__)


@checked
def follow(
    spark: Any,
    log: SharedLog | Address,
    sink: Sink | Route | Sequence[Sink],
    *,
    slot: str | None = None,
    transform: Any = None,
    trigger: Mapping[str, Any] | None = None,
    start: Start = "beginning",
    repair: bool = False,
    place: Place = "auto",
    progress: bool = False,
    options: Mapping[str, str] | None = None,
    on_step: OnStep | None = None,
) -> Following:
    """Start a pipeline that keeps the sink exactly in step with the log; every record is applied once.

    The sink's own cursor is authoritative: the pipeline begins there, whatever happened to earlier runs, and each
    trigger is committed together with it, keyed by offset. There is no checkpoint. Executors fetch and write, the
    driver plans and commits; small triggers are written in the driver, which is quicker (``place`` forces either).
    Works with classic sessions and Spark Connect.

    ``sink`` may be a route into many tables: a list of table sinks with their conditions, or
    :func:`sl.tables.route <strandline.tables.route>` or :func:`sl.tables.by <strandline.tables.by>`. A trigger reads
    the log once for all of them; each has its own cursor and commits. A table that fails, is slow or is new falls
    behind alone and catches up from its own cursor. The slot follows the slowest.

    A sink without a cursor starts at ``start``: the ``"beginning"``, which is ``CursorExpired`` if it was trimmed, at
    what is ``"retained"``, at ``"now"``, an offset, a time or a cursor. ``slot`` is created if it is missing, claimed
    by a holder of this run, and advanced to the sink's stored cursor.
    ``transform`` is a function from a DataFrame of decoded changes to one of rows, or a query such as ``SELECT ... FROM
    changes``; executors run it on each range by itself. A keyed table needs the columns ``_key`` (or those that the
    sink's ``key`` names), ``_offset``, ``_timestamp`` and ``_op`` of each row's record, and at most one row per key and
    offset.
    ``trigger`` takes Spark's arguments: ``{"processingTime": "10 seconds"}`` runs for ever,
    ``{"availableNow": True}`` ends at the log's end as of now, ``{"once": True}`` does that in one commit.
    ``maxBytesPerTrigger`` among ``options`` (256 MiB) bounds what the records of a commit take in memory, by an
    estimate that is learned from those before; a range for which workers have too little memory is committed in smaller
    pieces. A table that takes long to rewrite is committed to less often: commits take at most half of the time, unless
    the pipeline is behind by more than one trigger.
    ``progress=True`` shows a progress bar on standard error, or in a notebook; plain lines where that is no terminal.
    ``options`` are those of the data source, such as ``storage.*``. If the log has a cold tier, cursor and slot may be
    in either tier.

    A failed job or commit is tried again from the sink's cursor, with pauses. A table that other writers have changed
    so that it no longer matches its cursor is ``Diverged``; ``repair=True`` restores the last version that does, and
    continues from there. A new follower that is refused before anything was stored leaves neither a table nor a slot
    behind.

    Raises ``CursorExpired`` or ``Diverged`` if the log cannot serve the sink. An error that ends the pipeline later,
    above all ``Fenced`` when a newer follower took over, is raised by :meth:`Following.await_termination`.
    """
    _check_session(spark)
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    _refuse(given)
    timing = parse_trigger(trigger or _TRIGGER)
    workers = SparkWorkers(spark, place)
    route = as_route(sink)
    steps = on_step or (lambda _: None)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(opened(log, given))
        read = parse_options({**given, "path": source.url})
        batching = _batching(timing, read.limit)
        upto = _upto(read.end, source.end().next if timing.is_bounded else None)
        holder = str(CHANCE.uuid())
        running: Running
        if route is not None:
            if transform is not None:
                raise InvalidInput("A route has no transform of Spark: give each of its sinks a transform.")
            name = f"{pipeline_name(source, None).partition(' ')[0]} → route"
            chosen = RouteOptions(start, repair, slot, holder, batching, upto)
            running = RoutedPipeline.opened(source, route, chosen, workers, steps, name)
        else:
            single = cast("Sink", sink)
            if transform is not None:
                single, workers = transforming(spark, source, single, transform, place)
            name = pipeline_name(source, single)
            committer = begin(source, single, slot, start=start, holder=holder, repair=repair)
            with committer.abandoned_on_error():
                position = None if slot is None else stack.enter_context(SlotHeartbeat(committer, source, env=SYSTEM))
                engine = Engine(batching, upto=upto, gather=GATHER, retries=PATIENCE, is_strict=True)
                labels = (source.url, str(getattr(single, "url", None) or getattr(single, "table", "")))
                counter = ProgressCounter(engine, timing, steps, SYSTEM, labels)
                follower = Follower(
                    engine, source, committer, position, SYSTEM, workers=workers, observer=counter, retries_errors=True
                )
                running = SinglePipeline(follower, committer, workers, counter)
        following = Following(running, stack.pop_all(), name if progress else None)
        following.start()
        return following


def transforming(
    spark: Any, log: LogReading, sink: Sink, transform: Any, place: Place, *, reruns: bool = False
) -> tuple[FileTableSink, SparkWorkers]:
    """The sink of transformed rows, and the workers that transform; ``InvalidInput`` if Spark cannot for this sink."""
    if log.counts_batches:
        raise InvalidInput("Offsets of a queue of version 1 count batches: Spark's transforms need a log.")
    if not isinstance(transform, str) and not callable(transform):
        raise InvalidInput(f"A transform is a function or a query as text, not {type(transform).__name__}.")
    if not isinstance(sink, FileTableSink):
        raise InvalidInput(f"Spark transforms rows of Delta and Iceberg tables, and {sink!r} is none: leave it out.")
    if place == "driver":
        raise InvalidInput("A transform runs on Spark's executors: leave place='driver' out.")
    sink.meet(log)
    frames = FrameTransform(spark, transform)
    columns = frames.columns(sink.decoded_schema())
    return sink.with_rows(columns), SparkWorkers(spark, "executors", transform=frames, columns=columns, reruns=reruns)


def _check_session(spark: Any) -> None:
    if isinstance(spark, SparkSession) or hasattr(spark, "interruptTag"):
        return
    raise InvalidInput(f"The first argument is a SparkSession, not {type(spark).__name__}.")


def _upto(end: Start, now: int | None) -> int | None:
    """The offset at which a pipeline ends: that of ``endingOffset``, and of the log's end if it is bounded by that."""
    named = end.next if isinstance(end, Cursor) else end if isinstance(end, int) else None
    return min((offset for offset in (named, now) if offset is not None), default=None)


def _batching(timing: Trigger, limit: Limit) -> Batching:
    if timing.is_single:
        return Batching(records=_WITHOUT_END, bytes=_WITHOUT_END, window=_WITHOUT_END)
    return Batching(
        records=limit.records or _WITHOUT_END,
        bytes=limit.bytes or _MAX_BYTES,
        window=timing.pace,
        batches=limit.batches,
    )


def _refuse(given: Mapping[str, str]) -> None:
    if given.get("failondataloss", "true").strip().lower() != "true":
        raise InvalidInput("A table that follows a log may not skip records: failOnDataLoss=false is refused here.")
    if "decode" in given:
        raise InvalidInput("A sink decodes by itself: give it a codec, or value='log'.")
    if "startingoffset" in given:
        raise InvalidInput("A sink resumes at its own cursor; pass start= for a new one.")


@checked
def rebuild(
    spark: Any,
    log: SharedLog | Address,
    sink: MaintainedTable,
    *,
    transform: Any = None,
    start: Start | None = None,
    upto: int | None = None,
    slot: str | None = None,
    verify: bool = True,
    place: Place = "auto",
    options: Mapping[str, str] | None = None,
) -> Cursor:
    """Build all rows of a table again from both tiers of its log, on executors; returns the table's cursor.

    As :func:`strandline.tables.rebuild`: executors write the new rows, and compare them with the log (``verify``), then
    one commit replaces the old rows, from where the table began, or from ``start`` on, up to ``upto``, or the end of
    the log now; ``slot`` is that of its follower. Afterwards :func:`~strandline.spark.follow` continues there.
    Interrupted at any moment it has changed nothing, and can be repeated. ``transform`` is that of
    :func:`~strandline.spark.follow`, of a table that is followed with one: its rows are not compared, since nothing but
    Spark can give them, so that it needs ``verify=False``. Delta and Iceberg; a table in a database is ``Unsupported``:
    ``sl.tables.rebuild`` builds it in one transaction.
    """
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    with opened(log, given) as source:
        workers, pool = SparkWorkers(spark, place, reruns=True), None if place == "driver" else executors(spark)
        if transform is not None and verify:
            raise Unsupported(
                "Rows of a transform that Spark runs cannot be compared with the log: rebuild the table without the "
                "comparison (verify=False)."
            )
        if transform is not None:
            sink, workers = transforming(spark, source, sink, transform, place, reruns=True)
        return rebuild_table(
            sink, source, start=start, upto=upto, slot=slot, workers=workers, pool=pool, is_verified=verify
        )
