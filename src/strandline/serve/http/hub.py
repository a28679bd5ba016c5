"""The streams of a server by name: configured logs, and those that clients created, which are opened when asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import pyarrow as pa

from strandline.errors import CorruptData, LogClosed, NotALog, NotFound, StrandlineError
from strandline.formats.json.streams import StreamDescription
from strandline.serve.http.calls import Calls
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol.content import DEFAULT_TYPE
from strandline.serve.http.stream import Stream, StreamLog
from strandline.serve.http.streams import StreamRoot, WantedStream
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0
"""How long the description of a stream is believed, if other servers may change it."""
_IDLE_SECONDS: Final = 15.0
"""How long the stream of a client stays open after its last request: an open write-ahead log has a thread."""
_ROUND_SECONDS: Final = 5.0
_SWEEP_ROUNDS: Final = 12

GONE: Final = (NotALog, NotFound, CorruptData, LogClosed)
"""What the log of a stream raises if another server has deleted it meanwhile."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A configured log: always there, and never deleted by a client."""

    log: StreamLog
    content_type: str | None = None
    """None: the one that the log names, else that of plain bytes."""


class Pinned(StrandlineError):
    """A consumer needs the records of the stream: it was not deleted."""


@final
class Hub:
    """Finds, makes and deletes streams. Used on one event loop."""

    def __init__(
        self, logs: Mapping[str, LogEntry], root: StreamRoot | None, calls: Calls, limits: HttpLimits, env: Env
    ) -> None:
        self._root = root
        self._logs = logs
        self._calls = calls
        self._limits = limits
        self._env = env
        self._open: dict[str, Stream] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._expired: dict[tuple[str, str], float] = {}
        """Streams of clients whose time was over at the last sweeps, and since when."""
        self._failed: set[str] = set()
        """Open streams whose log could not be opened again."""

    def is_configured(self, name: str) -> bool:
        """Whether a name is that of a configured log."""
        return name in self._logs

    @property
    def creates(self) -> bool:
        """Whether clients may create streams."""
        return self._root is not None

    async def find(self, name: str, *, again: bool = False) -> Stream | None:
        """The stream of a name, open and in use until :meth:`Stream.release`; None if there is none.

        ``again`` after its log could not be read: it may be another one now.
        """
        stream = self._open.get(name)
        if stream is None or again or not self._is_fresh(stream):
            async with self._turn(name):
                stream = self._open.get(name)
                if stream is not None and again:
                    stream.looked_at = float("-inf")
                stream = await self._find(name)
        return None if stream is None else stream.use()

    def _is_fresh(self, stream: Stream) -> bool:
        if stream.state is None:
            entry = self._logs.get(stream.name)
            return entry is not None and entry.log is stream.log
        assert self._root is not None  # noqa: S101 - only a root has streams with a description
        age = self._env.clock.monotonic() - stream.looked_at
        return self._root.is_alive(stream.state) and (not self._root.is_shared or age < _LOOK_SECONDS)

    async def _find(self, name: str) -> Stream | None:
        stream = self._open.get(name)
        if stream is not None and self._is_fresh(stream):
            return stream
        entry = self._logs.get(name)
        if stream is not None and stream.state is None:  # the settings have another log of this name, or none
            await self._forget(name, is_deleted=False)
            stream = None
        if entry is not None:
            kind = entry.content_type or entry.log.content_type or DEFAULT_TYPE
            return self._kept(await self._calls(self._opened, name, entry.log, kind, None))
        if self._root is None:
            return None
        looked_at = self._env.clock.monotonic()
        state = await self._calls(self._root.find, name)
        if state is None or (stream is not None and stream.state is not None and stream.state.folder != state.folder):
            await self._forget(name)
            stream = None
        if state is None:
            return None
        if stream is None:
            try:
                log = await self._calls(self._root.open, name, state)
            except GONE:
                if await self._calls(self._root.find, name) == state:
                    raise
                return None  # another server has deleted it just now
            stream = self._kept(await self._calls(self._opened, name, log, state.content_type, state))
        stream.state, stream.looked_at = state, looked_at
        return stream

    def _opened(self, name: str, log: StreamLog, content_type: str, state: StreamDescription | None) -> Stream:
        used = None if state is None or state.ttl is None else self.used
        return Stream(
            name, log, content_type, calls=self._calls, limits=self._limits, env=self._env, state=state, used=used
        )

    def _kept(self, stream: Stream) -> Stream:
        self._open[stream.name] = stream
        return stream

    async def create(self, name: str, wanted: WantedStream, records: pa.Table | None) -> tuple[Stream, bool]:
        """The stream of a name, in use, made now (True) or there already; only with a root."""
        assert self._root is not None  # noqa: S101 - checked by the caller
        async with self._turn(name):
            found = await self._find(name)
            if found is not None:
                return found.use(), False
            state, log = await self._calls(self._root.create, name, wanted, records)
            is_new = log is not None
            if log is None:
                log = await self._calls(self._root.open, name, state)
            stream = self._kept(await self._calls(self._opened, name, log, state.content_type, state))
            return stream.use(), is_new

    async def used(self, stream: Stream) -> None:
        """Note a read or a write: it keeps a stream with a lifetime alive."""
        if stream.state is not None and stream.state.ttl is not None and self._root is not None:
            state = await self._calls(self._root.use, stream.name, stream.state)
            if state.folder == stream.state.folder:
                stream.state = state

    async def delete(self, stream: Stream) -> bool:
        """Delete a stream of a client; False if it was deleted meanwhile."""
        assert self._root is not None  # noqa: S101 - checked by the caller
        assert stream.state is not None  # noqa: S101
        async with self._turn(stream.name):
            pinning = [slot.name for slot in await self._calls(stream.log.slots.list) if slot.pins]
            if pinning:
                raise Pinned(
                    f"The stream {stream.name!r} is pinned by the slot {pinning[0]!r} of a consumer, and was not "
                    "deleted: drop the slot first."
                )
            deleted = await self._calls(self._root.delete, stream.name, stream.state)
            if self._open.get(stream.name) is stream:
                await self._forget(stream.name)
            if deleted:
                await self._calls(self._root.discard, stream.name, stream.state.folder)
            return deleted

    async def _forget(self, name: str, *, is_deleted: bool = True) -> None:
        stream = self._open.pop(name, None)
        self._failed.discard(name)
        if stream is not None:
            stream.is_gone = is_deleted
            stream.tail.wake()
            with contextlib.suppress(StrandlineError):
                await self._calls(stream.close)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> Any:
        turn = self._turns.setdefault(name, asyncio.Lock())
        try:
            async with turn:
                yield
        finally:
            if not turn.locked() and not getattr(turn, "_waiters", None):
                self._turns.pop(name, None)

    # --- rounds: idle threads, expired streams ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin the rounds; the first request does."""
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._keep_going())

    async def _keep_going(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(_ROUND_SECONDS)
            count += 1
            try:
                await self._round(sweeps=count % _SWEEP_ROUNDS == 0)
            except StrandlineError as error:
                _LOGGER.warning("Expired streams could not be removed: %s", error)

    async def _round(self, *, sweeps: bool) -> None:
        for stream in list(self._open.values()):
            if stream.has_failed:
                await self._open_again(stream)
                continue
            await stream.rest()
            if stream.state is not None and stream.idle_seconds > _IDLE_SECONDS:
                async with self._turn(stream.name):
                    if stream.idle_seconds > _IDLE_SECONDS and self._open.get(stream.name) is stream:
                        await self._forget(stream.name, is_deleted=False)
        if sweeps and self._root is not None:
            await self.sweep()

    async def _open_again(self, stream: Stream) -> None:
        """Open the log of a client's stream again after a write failed; until there is room it is only read."""
        root, state = self._root, stream.state
        async with self._turn(stream.name):
            if root is None or state is None or self._open.get(stream.name) is not stream:
                return
            try:
                await stream.open_again(lambda: root.open(stream.name, state))
            except StrandlineError as error:
                if stream.name not in self._failed:
                    _LOGGER.warning("The stream %r failed, and is opened again and again: %s", stream.name, error)
                self._failed.add(stream.name)
            else:
                _LOGGER.info("The stream %r takes appends again.", stream.name)
                self._failed.discard(stream.name)

    async def sweep(self) -> None:
        """Delete the streams whose time was over at an earlier sweep, too, and which nobody has used since."""
        assert self._root is not None  # noqa: S101
        found = await self._calls(self._root.expired)
        before, self._expired = self._expired, {}
        for name, state in found:
            key = (name, f"{state.folder}/{state.used}")
            if key in before and await self._calls(self._root.delete_expired, name, state):
                async with self._turn(name):
                    await self._forget(name)
                    await self._calls(self._root.discard, name, state.folder)
            else:
                self._expired[key] = before.get(key, self._env.clock.monotonic())

    async def close(self) -> None:
        """End the rounds, and close what is open."""
        if self._rounds is not None:
            self._rounds.cancel()
        for name in list(self._open):
            stream = self._open.pop(name)
            with contextlib.suppress(StrandlineError):
                await self._calls(stream.close)
