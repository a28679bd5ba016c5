"""``ingest``: follows a source into a log, from the position that the target remembers.

There is no checkpoint: records and source position are in one append (:mod:`strandline.log.writers.source`), and an
append that does not begin at the position is refused. So a crash at any point, a lost answer, a second ingest or a
target that lost its end can neither double nor skip a record.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event as StopEvent
from typing import Any, Final, Self, cast, final
from uuid import UUID

import pyarrow as pa

from strandline.compat.v1.upgrade import refuse_upgraded
from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound, NotReady, StrandlineError, Unsupported
from strandline.followers.run import Batching, follow
from strandline.ingestion.history import check_history, proving_end
from strandline.ingestion.log_sink import TARGET, LogSink, TargetLog, may_be_repeated
from strandline.ingestion.streams import MessageStream
from strandline.ingestion.value_formats import FormatFollower
from strandline.log.contract import READING, Log, Slots, require
from strandline.log.object.log import ObjectLog
from strandline.log.object.sources import note_source
from strandline.log.slots.pin import SlotPin
from strandline.model.cursor import NO_LIMIT, Cursor, Limit, Span, Start
from strandline.node.api import Primary
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.storage.env import SYSTEM, Env
from strandline.storage.retry import Backoff
from strandline.tier.read.tiered_log import TieredLog

_LOGGER: Final = logging.getLogger(__name__)
_FIRST_COUNT: Final = 1024
"""Offsets of the first plan."""
_GROWTH: Final = 8
PATIENCE: Final = Backoff(attempts=40, base=0.25, ceiling=30.0)
"""Failures in a row that an ingest with ``follow`` survives: outages of about a quarter of an hour."""
_BATCHING: Final = Batching(records=1 << 20, bytes=32 << 20, window=0.1)


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """Progress of an ingest: the source is in the target up to ``next``, and ended at ``end`` when it began.

    ``records`` were appended by this run.
    """

    next: int
    end: int
    records: int


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of an ingest: the cursors behind the ingested records, in the source and in the target."""

    source: Cursor
    target: Cursor | None
    """None if nothing was ever ingested."""
    records: int
    """Number of records appended by this run. An append that two runs of ``sl.ingest`` make at once, and the target
    stores once, is counted by both."""
    broken_headers: int = 0
    """Messages of NATS whose headers cannot be read whole. Their records have the headers that can be."""


@final
class BoundedReads:
    """A source whose plans are bounded by the bytes of their records in memory, not by those in the store.

    A highly compressed batch may take a hundred times its stored bytes. So plans begin small, and grow as the records
    that arrive allow. All other attributes are those of the source.
    """

    def __init__(self, log: Log, most: int, ending: Cursor, prove_by: Callable[[Cursor], None]) -> None:
        """``ending`` is the end of the source as of now; ``prove_by`` gets it, and later ones that are needed."""
        self._log = log
        self._most = most
        self._ending = ending
        self._prove_by = prove_by
        prove_by(ending)
        self._count = 1 if log.counts_batches else _FIRST_COUNT

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._log, name)

    def __repr__(self) -> str:
        return repr(self._log)

    def plan(self, since: Cursor, limit: Limit = NO_LIMIT) -> Sequence[Span]:
        """The spans after a cursor, of as many offsets as fit into memory, or one span."""
        count = self._count if limit.records is None else min(limit.records, self._count)
        spans = self._log.plan(since, replace(limit, records=count))
        unproven = [span.next for span in spans if getattr(span, "fingerprint", None) is None]
        if not unproven or unproven[-1] <= self._ending.next or isinstance(self._log, MessageStream):
            return spans
        # The end before the plan: if the source is restored in between, the end refuses the records of the plan later.
        self._ending = proving_end(self._log)
        self._prove_by(self._ending)
        upto = self._ending.next if limit.upto is None else min(limit.upto, self._ending.next)
        return self._log.plan(since, replace(limit, records=count, upto=upto))

    def learn(self, size: int, count: int) -> None:
        """Adjust the size of plans: ``count`` offsets took ``size`` bytes in memory."""
        if size and count:
            self._count = max(1, min(self._most * count // size, self._count * _GROWTH))


@final
@dataclass(slots=True)
class WriteBehind:
    """A sink that appends one range while the next one is read. Its cursor is behind what is durable, never ahead.

    The first range, and those from ``end`` on, are appended at once: a slot is claimed only for what is stored, and a
    follower that is at the end reports its position without waiting for more.
    """

    sink: LogSink
    end: int
    report: Callable[[IngestProgress], None]
    learn: Callable[[int, int], None] = lambda _, __: None
    """Gets bytes in memory and number of positions of each range that arrives."""
    prepare: Callable[[], None] = lambda: None
    """Called before each append, after its records were read."""
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="strandline-ingest"), init=False
    )
    _under_way: tuple[Future[None], Cursor] | None = field(default=None, init=False)

    def cursor(self, log_id: UUID) -> Cursor | None:
        """The durable position in the source."""
        return self.sink.cursor(log_id)

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Append a range, or begin to; raises what kept the range before it from being appended."""
        self.learn(records.nbytes, upto.next - since.next)
        self.flush()
        work = self._pool.submit(self._append, records, since, upto)
        self._under_way = work, upto
        if upto.next >= self.end or not self.sink.has_stored:
            self.flush()

    def _append(self, records: pa.Table, since: Cursor, upto: Cursor) -> None:
        self.prepare()
        self.sink.apply(records, since=since, upto=upto)

    def flush(self) -> None:
        """Wait until everything is durable, or raise why it is not."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            work, upto = under_way
            work.result()
            self.report(IngestProgress(upto.next, self.end, self.sink.records))

    def begin_again(self) -> None:
        """After a failure: wait for what is under way, whatever becomes of it, and ask the target for the position."""
        with contextlib.suppress(StrandlineError):
            self.flush()
        self.sink.look_again()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is not None:
            self.sink.give_up()
        self._pool.shutdown(wait=True, cancel_futures=True)


def ingest_log(
    source: Log,
    target: TargetLog,
    *,
    slot: str | None = None,
    start: Start = "beginning",
    skip_trimmed: bool = False,
    keep_following: bool = False,
    stop: StopEvent | None = None,
    batching: Batching | None = None,
    on_progress: Callable[[IngestProgress], None] = lambda _: None,
    env: Env = SYSTEM,
) -> Ingested:
    """Append the records of one log to another; see :func:`~strandline.ingestion.api.ingest`."""
    require(source, "ingested", *READING)
    require(target, "the target of an ingest", *TARGET)
    if source.log_id == target.log_id:
        raise InvalidInput("A log cannot be ingested into itself: choose another target.")
    formats = FormatFollower(source, target)
    formats.match()
    sink = LogSink(target, whole=source.counts_batches, env=env)
    resume_ingest(source, target, sink, skip_trimmed=skip_trimmed)
    ending = proving_end(source)
    end = ending.next
    if slot is None and keep_following and not source.counts_batches and has_slots(source):
        slot = f"ingest-{target.log_id}"
    first = sink.cursor(source.log_id)
    with contextlib.ExitStack() as held:
        if slot is None and first is not None:
            held.enter_context(pinned(source, first.next, env=env))
        limits = batching or _BATCHING
        reads = BoundedReads(source, limits.bytes, ending, sink.prove_by)
        behind = held.enter_context(WriteBehind(sink, end, on_progress, reads.learn, formats.match))
        reached = _follow(
            reads,
            behind,
            slot,
            start=start,
            is_node=isinstance(source, (RemoteLog, Primary)),
            retries_outages=keep_following,
            upto=None if keep_following else end,
            stop=stop,
            batching=limits,
            env=env,
            resume=lambda: resume_ingest(source, target, sink, skip_trimmed=skip_trimmed),
        )
        behind.flush()
    last = sink.last_append(source.log_id)
    broken = source.broken_headers if isinstance(source, MessageStream) else 0
    return Ingested(reached, None if last is None else target.cursor_at(last.first + last.count), sink.records, broken)


def resume_ingest(source: Log, target: TargetLog, sink: LogSink, *, skip_trimmed: bool) -> None:
    """Find the position of an earlier ingest; refuses a source that cannot continue from there."""
    last = sink.last_append(source.log_id)
    cursor = sink.cursor(source.log_id)
    if last is None or cursor is None:
        hot = target.hot if isinstance(target, TieredLog) else target
        if isinstance(hot, ObjectLog):
            refuse_upgraded(source, hot)
            note_source(hot, source)
        return
    bounds = source.bounds()
    if bounds.first <= cursor.next <= bounds.next or _serves(source, cursor):
        check_history(source, target, last)
        return
    if bounds.next < cursor.next:
        raise Diverged(
            f"The source ends at offset {bounds.next}, and {target!r} holds it up to {cursor.next}: the source was "
            "restored from an older copy, or created again. Ingest it into another log."
        )
    with contextlib.suppress(CursorExpired):
        check_history(source, target, last)  # a stream that was created again has deleted nothing
    if not skip_trimmed:
        raise CursorExpired(
            f"The source begins at offset {bounds.first}, and {target!r} holds it up to {cursor.next}: the "
            f"{bounds.first - cursor.next:,} offsets between them were deleted before they were ingested, and are "
            "lost to the target. To continue without them, skip what was trimmed (--skip-trimmed)."
        )
    if bounds.first == bounds.next:
        _LOGGER.warning(
            "The source holds no record behind the deleted ones: %r stores the position %d with the next record. "
            "Until then, skip the deleted records again (--skip-trimmed).", target, bounds.first,
        )  # fmt: skip
    sink.skip_to(source.cursor_at(bounds.first))


def _serves(source: Log, cursor: Cursor) -> bool:
    """Whether a position outside of the bounds is served after all: these may be of a replica that lags.

    Its primary decides; ``NotReady`` if that cannot be asked.
    """
    try:
        source.plan(Cursor(cursor.log_id, cursor.next), Limit(batches=1))
    except (CursorExpired, Diverged):
        return False
    return True


def _follow(
    source: BoundedReads,
    behind: WriteBehind,
    slot: str | None,
    *,
    is_node: bool,
    retries_outages: bool,
    stop: StopEvent | None,
    env: Env,
    resume: Callable[[], None],
    **options: Any,
) -> Cursor:
    """Follow the source; ``retries_outages``: also over outages of source and target, from the position in the target.

    ``resume`` finds that position after an outage, and refuses a source that has another history since.
    """
    failures, stored, is_interrupted = 0, behind.sink.records, False
    while True:
        try:
            if is_interrupted:
                resume()
                is_interrupted = False
            return follow(cast("Log", source), behind, slot, stop=stop, env=env, **options)
        except NotFound:
            if slot is None or not is_node or any(state.name == slot for state in source.slots.list()):
                raise
            # Only the primary of a node has the slots of consumers, and they end with it. The target has the position:
            # if the new primary does not retain what follows, that is CursorExpired.
            _LOGGER.warning("The slot %r was lost with the primary of %r, and is created again.", slot, source)
            behind.flush()
        except StrandlineError as error:
            failures = (failures if behind.sink.records == stored else 0) + 1
            stored = behind.sink.records
            is_stopped = stop is not None and stop.is_set()
            if not retries_outages or is_stopped or failures >= PATIENCE.attempts or not may_be_repeated(error):
                raise
            _LOGGER.warning("The ingest of %r was interrupted, and is tried again: %s", source, error)
            behind.begin_again()
            is_interrupted = True
            env.clock.wait(stop or StopEvent(), PATIENCE.pause(failures - 1, env.chance.jitter()))


def has_slots(source: object) -> bool:
    """Whether the source has slots, so that it can be pinned."""
    try:
        return isinstance(getattr(source, "slots", None), Slots)
    except (NotReady, Unsupported):
        return False


@contextlib.contextmanager
def pinned(source: Log, position: int, *, env: Env) -> Iterator[None]:
    """Pin a source while it is read: by a slot that is dropped in the end, and expires if this process is killed.

    A source without slots, such as a replica, a queue of version 1 or the reader of a write-ahead log, is not pinned.
    """
    if source.counts_batches or not has_slots(source):
        yield
        return
    with SlotPin(source, f"ingest-{env.chance.uuid()}", env) as pin:
        with contextlib.suppress(NotReady, Unsupported):
            pin.hold(Cursor(source.log_id, position))
        yield
