"""Reading of logs: plan, fetch ahead in parallel, and poll the end where a log sends no notifications."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Final, Protocol

import pyarrow as pa

from strandline.errors import InvalidInput, NotFound, NotReady
from strandline.log.read.decoded_sizes import DecodedSizes, F
from strandline.log.read.planning import cursor_after, divided_spans, joined
from strandline.model.cursor import Bounds, Cursor, Limit, Span
from strandline.storage.clock import Clock
from strandline.storage.fork_check import Origin

AHEAD_BYTES: Final = 64 << 20


def fetch_in_order(
    spans: Iterable[F],
    *,
    columns: Sequence[str] | None = None,
    workers: int = 4,
    ahead: int = AHEAD_BYTES,
    sizes: DecodedSizes | None = None,
) -> Generator[tuple[F, list[pa.RecordBatch]], None, None]:
    """Each span with its batches, in order; reads up to ``workers`` at once, and about ``ahead`` bytes early.

    The limit is on memory, by an estimate that is learned from earlier spans; ``sizes`` is one of earlier calls. Spans
    are taken one by one, when they are needed; a divisible one is given in parts, and small ones of a node together, up
    to half of ``ahead``. Emptying a list of batches frees them early.
    """
    origin = Origin("An iterator over batches")
    known = DecodedSizes() if sizes is None else sizes
    source = joined(divided_spans(spans), lambda *both: known.fit(both, ahead // 2))
    for span in source:
        yield known.fetched(span, span.fetch(columns))
        if workers > 1:
            break
    else:
        return
    waiting: deque[tuple[F, Future[list[pa.RecordBatch]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="strandline-fetch")

    def first() -> tuple[F, list[pa.RecordBatch]]:
        origin.check()  # a forked child has no threads
        span, future = waiting.popleft()
        return known.fetched(span, future.result())  # the reference of the future to the batches is freed here

    try:
        for span in source:
            while waiting and (
                len(waiting) >= workers or known.total([*[early for early, _ in waiting], span]) > ahead
            ):
                yield first()
            waiting.append((span, pool.submit(span.fetch, columns)))
        while waiting:
            yield first()
    finally:
        if origin.is_here:
            pool.shutdown(wait=False, cancel_futures=True)


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

    def wait(self, bounds: Callable[[], Bounds], past: Cursor, timeout: float, clock: Clock) -> bool:
        """Block until the bounds of a log are past the cursor (True), or until the timeout (False).

        False at once at the end of a sealed log. Pauses grow. Without a timeout, and for another cursor than before, it
        polls at once.
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
            found = bounds()
            if found.next > past.next or found.sealed:
                return found.next > past.next
            now = clock.monotonic()
            self._poll_at = now + self._pause
            self._pause = min(self._pause * 1.5, _LAST_POLL)
            if now >= deadline:
                return False


class Follows(Protocol):
    """A log that a follower waits for."""

    def wait(self, past: Cursor, timeout: float) -> bool:
        """Block until the log reaches past the cursor (True), or until the timeout (False)."""

    def ended(self, at: int) -> bool:
        """Whether the log was sealed at an offset or below."""


class Arrival(Enum):
    """What a wait for a log has found."""

    MORE = "records past the cursor"
    NOTHING = "nothing within the time"
    END = "the end of a sealed log"


def wait_for_more(log: Follows, past: Cursor, timeout: float) -> Arrival:
    """Wait for records past a cursor, and tell the end of a sealed log, which is not to be waited for again.

    Costs no more requests than waiting.
    """
    if log.wait(past, timeout):
        return Arrival.MORE
    return Arrival.END if log.ended(past.next) else Arrival.NOTHING


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


def read_spans(
    plan: Callable[[Cursor, Limit], Sequence[Span]], cursor: Cursor, end: int, columns: Sequence[str] | None
) -> Iterator[tuple[Cursor, list[pa.RecordBatch]]]:
    """Spans of a log after a cursor, up to an offset: the cursor after each, and its batches.

    ``NotReady`` if the log does not reach so far, ``CursorExpired`` if the cursor is not retained, or was trimmed while
    it was read.
    """
    sizes = DecodedSizes()
    while cursor.next < end:
        spans = plan(cursor, Limit(batches=_PLANNED, upto=end))
        if not spans:
            raise NotReady(f"The log does not reach offset {end} yet; it ends at {cursor.next}.")
        try:
            for span, batches in fetch_in_order(spans, columns=columns, sizes=sizes):
                cursor = cursor_after(cursor, span)
                yield cursor, batches
        except NotFound:
            # Raises if it was trimmed since it was planned; if it moved to another place, it is read there.
            again = plan(cursor, Limit(batches=1, upto=end))
            if not again or any(span == again[0] for span in spans):
                raise
