"""Limits of a server: calls and memory, in total and per caller."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Final

from strandline.errors import InvalidInput, Overloaded
from strandline.storage.env import SYSTEM, Env

_FIRST_MESSAGE: Final = 0.5
"""Seconds during which a call without a message is not ended to make room for another one."""

_ARENAS: Final = 2
_ARENAS_OPTION: Final = -8
"""``M_ARENA_MAX`` of the GNU C library."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits that a node enforces. Each call and each stream takes one thread while it lasts."""

    calls: int = 256
    """Calls and streams at a time."""
    calls_each: int = 64
    """The same per caller name; per address, where callers have no names."""
    calls_reserved: int = 32
    """Calls that are reserved for replicas and administrators; at most a quarter of all."""
    feeds_each: int = 8
    """Streams of log batches for one replica."""
    waits: int = 64
    """Calls that wait for records at a time; beyond that, clients poll."""
    waits_each: int = 16
    """The same per caller."""
    wait_seconds: float = 10.0
    """Longest wait of one call; a client calls again."""
    message_bytes: int = 8 << 20
    """Largest message; a larger one is refused by its length. Clients send larger values in pieces."""
    append_bytes: int = 256 << 20
    """Size of all Arrow batches of one append."""
    append_batches: int = 4096
    """Number of batches, and of messages, of one append."""
    append_seconds: float = 600.0
    """Longest time for an append to arrive, and longest wait of an append or a seal for its policy."""
    memory_bytes: int = 384 << 20
    """Memory of all running appends."""
    memory_bytes_each: int = 256 << 20
    """The same per caller."""
    reading_bytes: int = 256 << 20
    """Memory for records that were read from the log and are being sent to readers; the same again for replicas.

    Sending takes up to three times as much: the records, the message, and gRPC's buffers.
    """
    reading_bytes_each: int = 128 << 20
    """The same per caller; a single batch of the log may be larger."""
    receive_bytes: int = 256 << 20
    """Memory for messages that are being received; per caller half of it.

    A quarter is reserved for replicas and administrators; where callers have no names, for small calls.
    """
    connections: int = 512
    connections_unknown: int = 128
    """Connections without an admitted call; the others are reserved for callers that have shown their credentials."""
    authenticate_seconds: float = 5.0
    """Longest time from a connection to its first admitted call."""
    connection_idle_seconds: float = 60.0
    """Longest time that a connection may stay without a call."""
    silent_seconds: float = 10.0
    """Longest time until the first message of a call."""
    idle_seconds: float = 60.0
    """Longest time that a call may keep the node waiting for its next message, or for reading an answer."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise InvalidInput(f"A limit of 0 or less would refuse everything: {field.name}.")

    @property
    def ordinary_calls(self) -> int:
        """Calls that clients may take."""
        return self.calls - min(self.calls_reserved, self.calls // 4)


@dataclass(slots=True, eq=False)
class ActiveCall:
    """One running call."""

    who: str | None
    since: float
    end: Callable[[], None]
    """Ends the call."""
    is_reserved: bool
    """Whether it may use one of the reserved places."""
    is_silent: bool = True
    """Whether none of its messages has arrived yet."""
    is_idle: bool = False
    """Whether it only waits for its client."""
    feeds: str | None = None
    """The replica that it feeds."""
    waits: str | None = None
    """The caller for whom it waits for records."""


class CallLimiter:
    """Counts running calls per caller, from the first byte on where credentials name the caller. Safe in threads."""

    def __init__(self, limits: ServerLimits, *, env: Env = SYSTEM) -> None:
        self._limits = limits
        self._clock = env.clock
        self._lock = threading.Lock()
        self._in: set[ActiveCall] = set()

    @property
    def inside(self) -> int:
        """Number of running calls and streams."""
        return len(self._in)

    @property
    def busy(self) -> bool:
        """Whether one of them does more than wait for its client."""
        with self._lock:
            return not all(place.is_idle for place in self._in)

    def enter(
        self, who: str | None = None, *, is_reserved: bool = False, end: Callable[[], None] = lambda: None
    ) -> ActiveCall:
        """Count a new call; ``Overloaded`` above a limit. ``who`` is None while its caller is unknown.

        Above the limit, the oldest call of an unknown caller that has sent no message is ended instead.
        """
        place = ActiveCall(who, self._clock.monotonic(), end, is_reserved)
        with contextlib.ExitStack() as unlocked, self._lock:
            dropped = self._give_way(who, is_reserved=is_reserved)
            if dropped is not None:
                unlocked.callback(dropped.end)  # also if the new one is refused: it counts no more
            if len(self._in) >= self._limits.calls:
                raise Overloaded(
                    f"The node is busy with {len(self._in)} calls and streams, which is its limit: ask again a little "
                    "later, or ask another node."
                )
            if not is_reserved:
                self._check_ordinary()
            if who is not None:
                self._check_each(who)
            self._in.add(place)
        return place

    def name(self, place: ActiveCall, who: str, *, is_reserved: bool) -> None:
        """Note that the first message of a call names its caller; ``Overloaded`` if that caller has too many calls."""
        with self._lock:
            place.is_silent = False
            if place not in self._in:
                raise Overloaded("The call sent no message in time, and its place was given to another call.")
            if place.who is not None:
                return
            self._check_each(who)
            if place.is_reserved and not is_reserved:
                self._check_ordinary()
            place.is_reserved, place.who = is_reserved, who

    def leave(self, place: ActiveCall) -> None:
        """The call has ended. Idempotent."""
        with self._lock:
            self._in.discard(place)

    def feed(self, place: ActiveCall, who: str) -> None:
        """Note that a call feeds a replica; ``Overloaded`` if that has too many feeds."""
        with self._lock:
            count = sum(each.feeds == who for each in self._in)
            if count >= self._limits.feeds_each:
                raise Overloaded(f"{who} has {count} feeds open, which is the limit: close some.")
            place.feeds = who

    def wait(self, place: ActiveCall, who: str) -> None:
        """Note that a call waits for records; ``Overloaded`` if too many do.

        Each of them blocks a thread: the limit leaves threads for other calls.
        """
        with self._lock:
            waiting = [each.waits for each in self._in if each.waits is not None]
            if len(waiting) >= self._limits.waits or waiting.count(who) >= self._limits.waits_each:
                raise Overloaded(
                    f"{len(waiting)} calls wait for records, {waiting.count(who)} of them of {who}, which is the "
                    "limit: look at the bounds from time to time instead, or wait a little later."
                )
            place.waits = who

    def end_silent(self) -> None:
        """End the calls that have sent no message for too long."""
        oldest = self._clock.monotonic() - self._limits.silent_seconds
        with self._lock:
            late = [place for place in self._in if place.is_silent and place.since <= oldest]
        for place in late:
            place.end()

    def _give_way(self, who: str | None, *, is_reserved: bool) -> ActiveCall | None:
        """If no place is free, remove the oldest call that has sent no message; returns it, for the caller to end."""
        silent = [place for place in self._in if place.is_silent and place.who is None]
        is_crowded = who is None and not is_reserved and 2 * len(silent) >= self._limits.ordinary_calls
        is_full = len(self._in) >= self._limits.calls
        if not is_crowded and not is_full and (is_reserved or self._ordinary() < self._limits.ordinary_calls):
            return None
        oldest = min(silent, key=lambda place: place.since, default=None)
        if oldest is not None and self._clock.monotonic() - oldest.since >= _FIRST_MESSAGE:
            self._in.discard(oldest)
            return oldest
        if is_crowded:
            raise Overloaded(
                "Too many calls have sent no message yet, and the node accepts no more of them: ask again a "
                "little later."
            )
        return None

    def _ordinary(self) -> int:
        """Calls outside the reserved places."""
        return sum(not place.is_reserved for place in self._in)

    def _check_ordinary(self) -> None:
        if (count := self._ordinary()) >= self._limits.ordinary_calls:
            raise Overloaded(
                f"The node is busy with {count} calls and streams of clients, and reserves the rest for "
                "replicas and administrators: ask again a little later, or ask another node."
            )

    def _check_each(self, who: str) -> None:
        count = sum(place.who == who for place in self._in)
        if count >= self._limits.calls_each:
            raise Overloaded(
                f"{who} has {count} calls and streams open, which is the limit: close some, or ask again a "
                "little later."
            )


class MemoryBudget:
    """Memory that callers hold in this process, per caller and in total. Safe in threads."""

    def __init__(self, what: str, most: int, most_each: int) -> None:
        """An unused budget; ``what`` names its purpose in errors."""
        self._what = what
        self._most = most
        self._most_each = most_each
        self._room = threading.Condition()
        self._all = 0
        self._each: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes held by all callers."""
        return self._all

    @contextlib.contextmanager
    def held_by(self, who: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that takes bytes; they are returned at the end of the block. ``Overloaded`` if too many."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            with self._room:
                if not self._fits(who, size):
                    raise self._full(who, size)
                self._add(who, size)
                taken += size

        try:
            yield take
        finally:
            with self._room:
                self._add(who, -taken)
                self._room.notify_all()

    @contextlib.contextmanager
    def waited_for(self, who: str, size: int, patience: float) -> Iterator[None]:
        """Hold ``size`` bytes during the block, waiting until they are free; ``Overloaded`` after ``patience`` seconds.

        While no caller holds any memory, every size is granted.
        """
        with self._room:
            if not self._room.wait_for(lambda: self._fits(who, size) or not self._all, patience):
                raise self._full(who, size)
            self._add(who, size)
        try:
            yield
        finally:
            with self._room:
                self._add(who, -size)
                self._room.notify_all()

    def _fits(self, who: str, size: int) -> bool:
        # A single holding may exceed the share of its caller, if it fits in total.
        mine = self._each[who]
        return self._all + size <= self._most and (not mine or mine + size <= self._most_each)

    def _add(self, who: str, size: int) -> None:
        self._all += size
        self._each[who] += size
        if not self._each[who]:
            del self._each[who]

    def _full(self, who: str, size: int) -> Overloaded:
        return Overloaded(
            f"The node has no memory for {size:,} more bytes of {self._what}: {who} holds {self._each[who]:,} and all "
            f"callers hold {self._all:,}. Try again when they are done."
        )


def share_heaps() -> None:
    """Let the threads of this process share two heaps of the C library, unless ``MALLOC_ARENA_MAX`` is set.

    By default each thread that serves a stream has its own heap, which keeps what was sent last: three replicas took a
    third more memory than one. Does nothing with another C library.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_ARENAS_OPTION, _ARENAS)
