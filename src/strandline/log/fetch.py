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
    """Each span with its batches, in order; up to ``workers`` are read at once, and at most ``ahead`` bytes early."""
    if len(spans) <= 1 or workers <= 1:
        for span in spans:
            yield span, span.fetch(columns)
        return
    waiting: deque[tuple[Span, Future[list[pa.RecordBatch]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="strandline-fetch")
    try:
        early = 0
        for span in spans:
            while waiting and (len(waiting) >= workers or early + span.size > ahead):
                done, future = waiting.popleft()
                yield done, future.result()
                early -= done.size
            waiting.append((span, pool.submit(span.fetch, columns)))
            early += span.size
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
