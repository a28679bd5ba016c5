"""Spark pipelines: executors fetch and compact, the sink commits by offset."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self, cast
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from strandline.errors import CorruptData, Fenced, InvalidInput
from strandline.followers.committer import SinkCommitter, begin
from strandline.log.heartbeat import SlotHeartbeat
from strandline.model.addresses import as_address
from strandline.model.arguments import anything, checked, shown
from strandline.model.cursor import Bounds, Cursor, Start
from strandline.model.records import READ_SCHEMA
from strandline.model.sink import Sink, without_key
from strandline.spark.failures import retried, unwrapped
from strandline.spark.opening import SharedLog, access_options, opened
from strandline.spark.options import checked_trigger, parse_options
from strandline.spark.planning import Remembered, agrees, decode_offset
from strandline.storage.clock import CHANCE, CLOCK, Chance, Clock

OnStep = Callable[[str], None]
"""Called in the driver at each stage of a micro-batch: ``planned``, ``fetched``, ``committed``, ``advanced``."""

_MAX_BYTES: Final = 128 << 20
_STOP_SECONDS: Final = 120.0
_TRIGGER: Final = {"processingTime": "1 second"}


@checked(name="spark.follow")
def follow(
    spark: Annotated[SparkSession, anything("a SparkSession")],
    log: SharedLog | str,
    sink: Sink,
    *,
    slot: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
    holder: str | None = None,
    start: Start = "beginning",
    repair: bool = False,
    max_bytes_per_trigger: int | None = _MAX_BYTES,
    options: Mapping[str, str] | None = None,
    on_step: OnStep | None = None,
    clock: Clock = CLOCK,
    chance: Chance = CHANCE,
) -> Following:
    """Start a streaming query that keeps the sink exactly in step with the log; every record is applied once.

    The sink's own cursor is authoritative: the query begins there, whatever happened to earlier runs, and each
    micro-batch is committed together with it, keyed by offset. So the checkpoint is disposable: by default each run
    has a temporary one; a given ``checkpoint`` is reused if it agrees with the sink, else set aside.

    A sink without a cursor starts at ``start``: the ``"beginning"``, which is ``CursorExpired`` if it was trimmed, at
    what is ``"retained"``, at ``"now"``, an offset, a time or a cursor. ``slot`` is created if it is missing, claimed
    by ``holder`` (fresh per run unless given), and advanced to the sink's stored cursor.
    ``trigger`` takes Spark's arguments: ``{"availableNow": True}``, ``{"processingTime": "10 seconds"}``. The records
    of a micro-batch, newest per key if the sink keeps those, pass through the driver: ``max_bytes_per_trigger`` bounds
    them. ``options`` are further options of the data source, such as ``partitions`` and ``storage.*``. If the log
    has a cold tier, cursor and slot may be in either tier.

    A table that other writers have changed so that it no longer matches its cursor is ``Diverged``; ``repair=True``
    restores the last version that does, and continues from there. A new follower that is refused before anything was
    stored leaves neither a table nor a slot behind.

    Raises ``CursorExpired`` or ``Diverged`` if the log cannot serve the sink. An error that ends the query later, above
    all ``Fenced`` when a newer follower took over, is raised by :meth:`Following.await_termination`.
    """
    if not isinstance(spark, SparkSession):
        raise InvalidInput("Following needs a classic Spark session in the driver, not Spark Connect.")
    given = access_options(log, {name.lower(): value for name, value in (options or {}).items()})
    _refuse(given)
    timing = checked_trigger(trigger or _TRIGGER)
    if checkpoint is not None:
        as_address(checkpoint)
    cores = spark.sparkContext.defaultParallelism
    read = {
        "partitions": str(cores),
        **({"maxbytespertrigger": str(max_bytes_per_trigger)} if max_bytes_per_trigger else {}),
        **given,
    }
    with opened(log, given) as source:
        url = source.url
        parse_options({**read, "path": url})  # raises here, not in one of Spark's processes
        committer = begin(source, sink, slot, start=start, holder=holder or str(chance.uuid()), repair=repair)
        with committer.abandoned_on_error():
            step = on_step or (lambda _: None)
            batches = _Batches(source.log_id, committer, cores, source.cursor_at, step, _keeps_latest(sink))
            stream = (
                spark.readStream.format("strandline").options(**read, startingoffset=str(committer.start)).load(url)
            )
            writer = _timed(stream.writeStream.foreachBatch(batches), timing)
            if checkpoint is not None:
                place = usable_checkpoint(spark, checkpoint, committer.start, source.bounds(), chance=chance)
                writer = writer.option("checkpointLocation", place)
            query = writer.start()
        if slot is None:
            return Following(query, batches)
        # Also while there is nothing to do, or a micro-batch takes long.
        heartbeat = SlotHeartbeat(committer, source, clock=clock, is_alive=lambda: _is_active(query))
        return Following(query, batches, heartbeat.start())


def _is_active(query: StreamingQuery) -> bool:
    """Whether a query runs; not if its session was stopped under it."""
    try:
        return bool(query.isActive)
    except (Py4JError, OSError):
        return False


def _keeps_latest(sink: Sink) -> bool:
    return getattr(sink, "mode", "append") == "latest"


def _refuse(given: Mapping[str, str]) -> None:
    if given.get("failondataloss", "true").strip().lower() != "true":
        raise InvalidInput("A table that follows a log may not skip records: failOnDataLoss=false is refused here.")
    if "startingoffset" in given:
        raise InvalidInput("A sink resumes at its own cursor; pass start= for a new one.")


def _timed(writer: DataStreamWriter, timing: Mapping[str, Any]) -> DataStreamWriter:
    try:
        return writer.trigger(**timing)
    except (IllegalArgumentException, ValueError) as error:
        raise InvalidInput(
            f"processingTime is an interval as Spark writes it, such as '10 seconds', not "
            f"{shown(timing.get('processingTime'))}."
        ) from error


class Following:
    """A running pipeline. Leaving its ``with`` block stops it; it can be started again at any time."""

    def __init__(self, query: StreamingQuery, batches: _Batches, heartbeat: SlotHeartbeat | None = None) -> None:
        """Use :func:`follow`."""
        self._query = query
        self._batches = batches
        self._heartbeat = heartbeat

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def query(self) -> StreamingQuery:
        """Spark's own handle, for progress and status."""
        return self._query

    @property
    def active(self) -> bool:
        """Whether it is still running."""
        return bool(self._query.isActive)

    def cursor(self) -> Cursor | None:
        """The sink's stored cursor."""
        return self._batches.stored()

    @checked
    def await_termination(self, timeout: float | None = None) -> bool:
        """Block until the pipeline has ended (True), or until the timeout (False); raises the error that ended it."""
        try:
            ended = self._query.awaitTermination(timeout)  # type: ignore[arg-type]  # Spark accepts fractions
        except PySparkException as error:
            raise self._reason(error) from error
        return True if ended is None else ended

    def exception(self) -> BaseException | None:
        """The error that ended the pipeline (``Fenced``, ``Gap``, ``CorruptData``…), or None."""
        error = self._query.exception()
        return None if error is None else self._reason(error)

    def _reason(self, error: BaseException) -> BaseException:
        self._batches.abandon()
        return unwrapped(self._batches.failure or error)

    def stop(self) -> None:
        """Stop, and return only when no micro-batch of this pipeline is running any more."""
        self._batches.stopping.set()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._query.stop()
        # Spark interrupts its own thread, not the Python function that it called.
        if not self._batches.running.acquire(timeout=_STOP_SECONDS):
            raise TimeoutError(f"A micro-batch did not end within {_STOP_SECONDS:.0f} seconds of being stopped.")
        self._batches.running.release()
        self._batches.abandon()


@dataclass(slots=True, eq=False)
class _Batches:
    """Callback of Spark per micro-batch: compact, apply, and only then advance."""

    log_id: UUID
    committer: SinkCommitter
    cores: int
    cursor_at: Callable[[int], Cursor]
    on_step: OnStep
    latest: bool
    failure: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    running: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        # The batch id means nothing here: it restarts with each checkpoint. Only offsets count.
        with self.running:
            try:
                self._apply(frame)
            except BaseException as error:
                self.failure = self.failure or error
                self.committer.abandon()
                raise

    def abandon(self) -> None:
        """The query has ended: if nothing was stored, leave nothing behind."""
        with self.running:
            self.committer.abandon()

    def stored(self) -> Cursor | None:
        return self.committer.cursor(self.log_id)

    def _apply(self, frame: DataFrame) -> None:
        self._check_holder()
        self.on_step("planned")
        # Spark turns adaptive execution off in a stream: a shuffle would have 200 tasks by default,
        # however little data there is. The query runs in a copy of the user's session: this stays within it.
        frame.sparkSession.conf.set("spark.sql.shuffle.partitions", str(self.cores))
        records, first, end = newest_of(frame) if self.latest else all_of(frame)
        self.on_step("fetched")
        if records.num_rows:
            self._commit(records, Cursor(self.log_id, first), retried(lambda: self.cursor_at(end)))

    def _commit(self, records: pa.Table, since: Cursor, upto: Cursor) -> None:
        if self.stopping.is_set():
            raise Fenced("The pipeline is being stopped; this micro-batch was not applied.")
        self._check_holder()
        retried(lambda: self.committer.apply(records, since=since, upto=upto))
        self.on_step("committed")
        self._advance()
        self.on_step("advanced")

    def _advance(self) -> None:
        stored = self.stored()  # stored, not only sent to it
        if stored is not None:
            retried(lambda: self.committer.advance(stored))

    def _check_holder(self) -> None:
        # The table refuses a second committer by itself. This check saves a replaced driver
        # a useless commit.
        retried(self.committer.check_holder)


def newest_of(frame: DataFrame) -> tuple[pa.Table, int, int]:
    """The newest record of each key in a micro-batch, and the offsets that the micro-batch covers without a gap."""
    fields = [name for name in READ_SCHEMA.names if name != "key"]
    table = (
        frame.groupBy("key")
        .agg(
            sql.max_by(sql.struct(*fields), "offset").alias("newest"),
            sql.count("*").alias("count"),
            sql.min("offset").alias("first"),
        )
        .select(*[name if name == "key" else f"newest.{name}" for name in READ_SCHEMA.names], "count", "first")
        .toArrow()
    )
    if not table.num_rows:
        return READ_SCHEMA.empty_table(), 0, 0
    keys = table.column("key")
    if keys.null_count:
        offset = pc.min(pc.filter(table.column("first"), pc.is_null(keys))).as_py()
        raise without_key(offset)
    first, end = _covered(table.column("first"), table.column("offset"), pc.sum(table.column("count")).as_py())
    return table.select(READ_SCHEMA.names).cast(READ_SCHEMA), first, end


def all_of(frame: DataFrame) -> tuple[pa.Table, int, int]:
    """All records of a micro-batch in log order, and the offsets that it covers without a gap."""
    table = frame.select(*READ_SCHEMA.names).toArrow()
    if not table.num_rows:
        return READ_SCHEMA.empty_table(), 0, 0
    offsets = table.column("offset")
    first, end = _covered(offsets, offsets, table.num_rows)
    return table.cast(READ_SCHEMA).sort_by("offset"), first, end


def _covered(lows: pa.ChunkedArray, highs: pa.ChunkedArray, count: int) -> tuple[int, int]:
    first, last = pc.min(lows).as_py(), pc.max(highs).as_py()
    if count != last - first + 1:
        raise CorruptData(
            f"A micro-batch holds {count} records between offsets {first} and {last}, where {last - first + 1} are "
            "expected: records were lost or duplicated. Nothing was applied; start the pipeline again."
        )
    return int(first), int(last) + 1


_LOGGER: Final = logging.getLogger(__name__)


def usable_checkpoint(
    spark: SparkSession, location: str, table: Cursor, bounds: Bounds, *, chance: Chance = CHANCE
) -> str:
    """The location, with either no checkpoint or one that continues exactly at the table's cursor.

    A checkpoint that is ahead of the table, of another log, or unreadable is moved to ``location.aside-…`` first.
    """
    folder = _Folder(spark, location)
    try:
        remembered = _remembered(folder)
    except (InvalidInput, ValueError, Py4JError, PySparkException) as error:
        reason = f"it cannot be read ({str(error).splitlines()[0][:200]})"
    else:
        if remembered is None or agrees(remembered, table, bounds):
            return location
        reason = f"it is at {remembered.upto} and the table at {table}"
    aside = f"{location.rstrip('/')}.aside-{chance.uuid()}"
    folder.move(aside)
    _LOGGER.warning(
        "The checkpoint %s was set aside as %s: %s. The table's own cursor is authoritative.", location, aside, reason
    )
    return location


def _remembered(folder: _Folder) -> Remembered | None:
    offsets, commits = folder.numbers("offsets"), folder.numbers("commits")
    if not offsets:
        # Without the offsets, Spark renumbers batches and fails on existing commits.
        if commits:
            raise InvalidInput("it holds commits and no offsets")
        return None
    last = max(offsets)
    before = _end_of(folder, last - 1) if last - 1 in offsets else None
    if before is None and last > 0:
        raise InvalidInput(f"the offsets of batch {last - 1} are missing")
    return Remembered(before, _end_of(folder, last), last in commits)


def _end_of(folder: _Folder, number: int) -> Cursor:
    version, _, *sources = folder.text(f"offsets/{number}").splitlines()
    if version != "v1" or len(sources) != 1:
        raise InvalidInput(f"the offsets of batch {number} are not of one log")
    return decode_offset(json.loads(sources[0]))


class _Folder:
    """A folder on the file system of Spark's checkpoints."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        session, self._jvm = cast("Any", spark), cast("Any", spark._jvm)  # noqa: SLF001 - the way to Hadoop's files
        self._path: Any = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files: Any = self._path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001

    def _child(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)

    def numbers(self, name: str) -> set[int]:
        folder = self._child(name)
        if not self._files.exists(folder):
            return set()
        names = [str(status.getPath().getName()) for status in self._files.listStatus(folder)]
        return {int(name) for name in names if name.isdecimal()}

    def text(self, name: str) -> str:
        stream = self._files.open(self._child(name))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def move(self, target: str) -> None:
        if not self._files.rename(self._path, self._jvm.org.apache.hadoop.fs.Path(target)):
            raise InvalidInput(f"The stale checkpoint {self._path} could not be moved to {target}: remove it.")
