"""Fetching spans ahead, in parallel, and handing them out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from strandline.model.cursor import Span

AHEAD_BYTES: Final = 64 << 20


def fetch_in_order(
    spans: Sequence[Span],
    *,
    columns: Sequence[str] | None = None,
    workers: int = 4,
    ahead: int = AHEAD_BYTES,
) -> Iterator[tuple[Span, list[pa.RecordBatch]]]:
    """Each span with its batches, in order; up to ``workers`` are read at once, and about ``ahead`` bytes early.

    What counts is memory: how much stored bytes grow when they are decoded is learned from the spans before. Whoever
    empties a list of batches as it goes frees them early.
    """
    if len(spans) <= 1 or workers <= 1:
        for span in spans:
            yield span, span.fetch(columns)
        return
    first = spans[0].fetch(columns)
    growth = _growth(spans[0], first)
    yield spans[0], first
    waiting: deque[tuple[Span, Future[list[pa.RecordBatch]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="strandline-fetch")
    try:
        early = 0
        for span in spans[1:]:
            while waiting and (len(waiting) >= workers or (early + span.size) * growth > ahead):
                done, future = waiting.popleft()
                batches = future.result()
                growth = max(growth, _growth(done, batches))
                del future  # it holds the batches, too
                yield done, batches
                early -= done.size
            waiting.append((span, pool.submit(span.fetch, columns)))
            early += span.size
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _growth(span: Span, batches: list[pa.RecordBatch]) -> float:
    decoded: int = sum(batch.nbytes for batch in batches)
    return max(1.0, decoded / max(1, span.size))
