"""The end of a log with live readers: one coroutine looks at it, and wakes all that wait for records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, final

from strandline.errors import StrandlineError
from strandline.model.cursor import Bounds

_LOGGER: Final = logging.getLogger(__name__)
_KEPT: Final = 8
"""Number of recent reads at the end that readers share."""


@final
class LiveTail:
    """Wakes the readers of one log. Used on the event loop; without readers it costs nothing."""

    def __init__(self, look: Callable[[], Awaitable[Bounds]], pause: float) -> None:
        self._look = look
        self._pause = pause
        self.version = 0
        """Grows with each change that readers may see."""
        self._seen: Bounds | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._shared: dict[Any, asyncio.Task[Any]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether a reader waits."""
        return bool(self._waiting)

    def wake(self) -> None:
        """The log has changed: wake every reader."""
        self.version += 1
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, version: int, seconds: float, left: asyncio.Future[None]) -> None:
        """Wait until the log changes after a version, the time is over, or the reader has ``left``.

        Takes one future for each reader, and no task: there may be thousands.
        """
        if self.version != version or left.done():
            return
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.add(future)
        timer = loop.call_later(seconds, _settle, future)
        gone = partial(_settle, future)
        left.add_done_callback(gone)
        try:
            await future
        finally:
            timer.cancel()
            left.remove_done_callback(gone)
            self._waiting.discard(future)

    async def shared(self, key: Any, read: Callable[[], Awaitable[Any]]) -> Any:
        """What ``read`` gives, read once for all who ask with the same key at the same version."""
        key = (self.version, key)
        task = self._shared.get(key)
        if task is None:
            for old in [*self._shared][:-_KEPT]:
                del self._shared[old]
            task = self._shared[key] = asyncio.ensure_future(read())
            task.add_done_callback(lambda done: self._keep(key, done))
        return task.result() if task.done() else await asyncio.shield(task)

    def _keep(self, key: Any, done: asyncio.Task[Any]) -> None:
        if done.cancelled() or done.exception() is not None or (not self._waiting and self._watcher is None):
            self._shared.pop(key, None)

    async def _watch(self) -> None:
        """Look at the log while somebody waits; what other processes append is seen here."""
        try:
            while self._waiting:
                with suppress(TimeoutError):
                    await asyncio.sleep(self._pause)
                try:
                    found = await self._look()
                except StrandlineError as error:
                    _LOGGER.debug("A log with live readers cannot be looked at: %s", error)
                    self.wake()  # readers meet the error themselves
                    continue
                if found != self._seen:
                    self._seen = found
                    self.wake()
        finally:
            self._watcher = None
            self._shared.clear()
            if self._waiting:
                self.wake()


def _settle(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)
