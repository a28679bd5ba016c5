"""How much a node does at a time, for all and for each who asks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from strandline.model.errors import InvalidInput, Overloaded

_ARENAS: Final = 2
_ARENAS_OPTION: Final = -8
"""``M_ARENA_MAX`` of the GNU C library."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a node refuses to exceed. Each call and each stream takes one thread of it while it lasts."""

    calls: int = 256
    """Calls and streams at a time."""
    calls_each: int = 64
    """The same for one name; for one address, where callers have no names."""
    message_bytes: int = 64 << 20
    """One Arrow batch that is appended."""
    append_bytes: int = 256 << 20
    """All Arrow batches of one append."""
    append_batches: int = 4096
    append_seconds: float = 600.0
    """How long an append may ask to wait for its policy."""

    def __post_init__(self) -> None:
        if min(self.calls, self.calls_each, self.message_bytes, self.append_bytes, self.append_batches) < 1:
            raise InvalidInput(f"A limit below 1 would refuse everything: {self}.")


class Turnstile:
    """Counts who is in. Safe in threads."""

    def __init__(self, limits: ServerLimits) -> None:
        """Nobody is in."""
        self._limits = limits
        self._lock = threading.Lock()
        self._all = self._idle = 0
        self._each: Counter[str] = Counter()

    @property
    def inside(self) -> int:
        """How many calls and streams there are."""
        return self._all

    @property
    def busy(self) -> bool:
        """Whether one of them does more than wait for its client."""
        with self._lock:
            return self._all > self._idle

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """One more of them only waits for its client, within the block."""
        with self._lock:
            self._idle += 1
        try:
            yield
        finally:
            with self._lock:
                self._idle -= 1

    def enter(self) -> None:
        """One more; ``Overloaded`` if there are too many, and then it is not in."""
        with self._lock:
            if self._all >= self._limits.calls:
                raise Overloaded(
                    f"The node is busy with {self._all} calls and streams, which is its limit: ask again a little "
                    "later, or ask another node."
                )
            self._all += 1

    def name(self, who: str) -> None:
        """Say whose call it is that entered; ``Overloaded`` if too many are theirs."""
        with self._lock:
            if self._each[who] >= self._limits.calls_each:
                raise Overloaded(
                    f"{who} has {self._each[who]} calls and streams open, which is the limit: close some, or ask again "
                    "a little later."
                )
            self._each[who] += 1

    def leave(self, who: str | None) -> None:
        """One less."""
        with self._lock:
            self._all -= 1
            if who is not None:
                self._each[who] -= 1
                if not self._each[who]:
                    del self._each[who]


def share_heaps() -> None:
    """Let the threads of this process share two heaps of the C library, unless its environment says something else.

    It would give each of the threads that serve streams one of its own, and keep for each what was sent last: three
    replicas took a third more memory than one. Where there is no such C library, nothing is done.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_ARENAS_OPTION, _ARENAS)
