"""Reading of logs: plan, fetch ahead in parallel, and poll the end where a log sends no notifications."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from strandline.errors import CursorExpired, InvalidInput, NotFound, NotReady
from strandline.log.read.planning import cursor_after, joined
from strandline.model.cursor import Cursor, Limit, Start
from strandline.model.records import RECORD_SCHEMA
from strandline.storage.clock import Clock
from strandline.storage.fork_check import Origin

if TYPE_CHECKING:
    from strandline.log.contract import LogReading


AHEAD_BYTES: Final = 64 << 20


class Fetchable(Protocol):
    """Something to fetch ahead: a span of a plan, or a batch of a queue."""

    @property
    def size(self) -> int:
        """The stored bytes to read for it; 0 if unknown."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read it; may block."""


F = TypeVar("F", bound=Fetchable)


@runtime_checkable
class Divisible(Protocol):
    """A span that is too large to fetch at once, such as a whole segment of a very large plan."""

    def parts(self) -> Sequence[Any]:
        """The same as smaller spans, in order; may block."""


def divided_spans(spans: Iterable[F]) -> Iterator[F]:
    """The spans, and the parts of those that are divisible."""
    for span in spans:
        if isinstance(span, Divisible):
            yield from span.parts()
        else:
            yield span


def fetch_in_order(
    spans: Iterable[F],
    *,
    columns: Sequence[str] | None = None,
    workers: int = 4,
    ahead: int = AHEAD_BYTES,
) -> Iterator[tuple[F, list[pa.RecordBatch]]]:
    """Each span with its batches, in order; reads up to ``workers`` at once, and about ``ahead`` bytes early.

    The limit is on memory: the ratio of decoded to stored bytes is learned from earlier spans. Emptying a list of
    batches frees them early. Spans are taken one by one, when they are needed; a divisible one is given in parts.
    """
    origin = Origin("An iterator over batches")
    source = divided_spans(spans)
    if workers <= 1:
        for span in source:
            yield span, span.fetch(columns)
        return
    for span in source:
        first = span.fetch(columns)
        growth = _growth(span, first)
        yield span, first
        break
    else:
        return
    waiting: deque[tuple[F, Future[list[pa.RecordBatch]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="strandline-fetch")
    try:
        early = 0
        for span in source:
            while waiting and (len(waiting) >= workers or (early + span.size) * growth > ahead):
                origin.check()  # a forked child has no threads
                done, future = waiting.popleft()
                batches = future.result()
                growth = max(growth, _growth(done, batches))
                del future  # frees its reference to the batches
                yield done, batches
                early -= done.size
            waiting.append((span, pool.submit(span.fetch, columns)))
            early += span.size
        while waiting:
            origin.check()
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        if origin.is_here:
            pool.shutdown(wait=False, cancel_futures=True)


def _growth(span: Fetchable, batches: list[pa.RecordBatch]) -> float:
    decoded: int = sum(batch.nbytes for batch in batches)
    return max(1.0, decoded / max(1, span.size))


_FIRST_POLL: Final = 0.005
_LAST_POLL: Final = 0.25
_PLANNED: Final = 64


class HeadPoller(threading.local):
    """Polling interval of each thread for a log without notifications.

    A thread that waits in short turns, to notice a request to stop, keeps its interval: an idle follower
    polls four times a second, however short its turns are.
    """

    _past = -1
    _pause = _FIRST_POLL
    _poll_at = 0.0

    def wait(self, log: LogReading, past: Cursor, timeout: float, clock: Clock) -> bool:
        """Block until the log reaches past the cursor (True), or until the timeout (False), with growing pauses.

        Without a timeout, and for another cursor than before, it polls at once.
        """
        now = clock.monotonic()
        deadline = now + timeout
        if past.next != self._past or timeout <= 0:
            self._past, self._pause, self._poll_at = past.next, _FIRST_POLL, now
        while True:
            while now < (turn := min(deadline, self._poll_at)):
                clock.sleep(turn - now)
                now = clock.monotonic()
            if now < self._poll_at:
                return False
            if log.bounds().next > past.next:
                return True
            now = clock.monotonic()
            self._poll_at = now + self._pause
            self._pause = min(self._pause * 1.5, _LAST_POLL)
            if now >= deadline:
                return False


def pauses(timeout: float | None, clock: Clock) -> Iterator[float]:
    """Growing pauses between polls, until the timeout (None: never).

    The last pause ends at the timeout; the caller polls once more after it.
    """
    if timeout is not None and not timeout >= 0:
        raise InvalidInput(f"timeout={timeout!r} is no number of seconds: pass 0 or more, or None to wait for ever.")
    deadline = math.inf if timeout is None else clock.monotonic() + timeout
    pause = _FIRST_POLL
    while (left := deadline - clock.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, _LAST_POLL)
    yield 0.0


def read_between(
    log: LogReading, since: Start | None, upto: int | None, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Batches with offsets, in order, from a start (all that is retained) up to an offset (the end as of the call).

    ``NotReady`` if the log does not reach so far, ``CursorExpired`` if the start is not retained, or was trimmed while
    it was read.
    """
    cursor = log.start() if since is None else cursor_of(log, since)
    # Not by its bounds: where a cold tier begins may be unknown now.
    end = log.position_of("now") if upto is None else upto
    if cursor.next >= end:
        log.plan(cursor, Limit(batches=1))  # refuses a cursor past the end or of another log
    for _, batches in read_spans(log, cursor, end, columns):
        yield from batches


def cursor_of(log: LogReading, start: Start) -> Cursor:
    """The cursor of a reader that begins at an offset, a cursor, a time or a word."""
    return start if isinstance(start, Cursor) else log.cursor_at(log.position_of(start))


def read_spans(
    log: LogReading, cursor: Cursor, end: int, columns: Sequence[str] | None
) -> Iterator[tuple[Cursor, list[pa.RecordBatch]]]:
    """Spans after a cursor, up to an offset: the cursor after each, and its batches.

    Raises as :func:`read_between` does.
    """
    while cursor.next < end:
        spans = log.plan(cursor, Limit(batches=_PLANNED, upto=end))
        if not spans:
            raise NotReady(f"The log does not reach offset {end} yet; it ends at {cursor.next}.")
        try:
            for span, batches in fetch_in_order(joined(spans), columns=columns):
                cursor = cursor_after(cursor, span)
                yield cursor, batches
        except NotFound:
            # Raises if it was trimmed since it was planned; if it moved to another place, it is read there.
            again = log.plan(cursor, Limit(batches=1, upto=end))
            if not again or any(span == again[0] for span in spans):
                raise


def last_record(log: LogReading, upto: int) -> pa.RecordBatch | None:
    """The last record below an offset, without the offset; None if it is not retained."""
    try:
        spans = log.plan(Cursor(log.log_id, upto - 1), Limit(batches=1, upto=upto))
        batches = [batch for span in spans for batch in span.fetch() if batch.num_rows]
    except (CursorExpired, NotFound):
        return None
    return batches[-1].slice(batches[-1].num_rows - 1).select(RECORD_SCHEMA.names) if batches else None
