"""Read-ahead: fetches spans in parallel and yields them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from strandline.storage.fork_check import Origin

AHEAD_BYTES: Final = 64 << 20


class Fetchable(Protocol):
    """What can be fetched ahead: a span of a plan, or a batch of a queue."""

    @property
    def size(self) -> int:
        """The stored bytes that have to be read for it; 0 if that is not known."""

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        """Read it; may block."""


F = TypeVar("F", bound=Fetchable)


def fetch_in_order(
    spans: Iterable[F],
    *,
    columns: Sequence[str] | None = None,
    workers: int = 4,
    ahead: int = AHEAD_BYTES,
) -> Iterator[tuple[F, list[pa.RecordBatch]]]:
    """Each span with its batches, in order; up to ``workers`` are read at once, and about ``ahead`` bytes early.

    What counts is memory: how much stored bytes grow when they are decoded is learned from the spans before. Whoever
    empties a list of batches as it goes frees them early. Spans are taken as they are needed, and one by one.
    """
    origin = Origin("An iterator over batches")
    source = iter(spans)
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
                origin.check()  # its threads are the parent's
                done, future = waiting.popleft()
                batches = future.result()
                growth = max(growth, _growth(done, batches))
                del future  # it holds the batches, too
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
