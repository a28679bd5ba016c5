"""Blocking calls of logs in a bounded number of threads, for coroutines that must not block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.requests import Busy

R = TypeVar("R")


class Calls:
    """Runs blocking calls in threads; beyond the limit of waiting calls it is ``Busy``."""

    def __init__(self, limits: HttpLimits) -> None:
        self._pool = ThreadPoolExecutor(limits.threads, "strandline-http")
        self._most = limits.threads + limits.waiting
        self._under_way = 0

    async def __call__(self, call: Callable[..., R], *args: Any, **options: Any) -> R:
        """The result of a call, or what it raised. It runs to its end also if the waiting coroutine is cancelled."""
        if self._under_way >= self._most:
            raise Busy("The server has as many calls to do as it may; nothing was changed. Try again.")
        self._under_way += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **options))
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._under_way -= 1
        if not future.cancelled():
            future.exception()  # a caller that left never asks for it

    def close(self) -> None:
        """End the threads when their calls are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)
