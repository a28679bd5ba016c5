"""Bounded retries with backoff and jitter, for transient failures of calls that are safe to repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from strandline.errors import StrandlineError, TransientStorageError
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import (
    Object,
    ObjectInfo,
    ObjectStore,
    Payload,
    Precondition,
    Version,
    copy_object,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Attempts and back-off: ``base`` seconds doubling up to ``ceiling``, with jitter."""

    attempts: int = 8
    base: float = 0.05
    ceiling: float = 2.0

    def pause(self, attempt: int, jitter: float) -> float:
        """Seconds to wait after the given failed attempt (counted from 0)."""
        longest: float = min(self.ceiling, self.base * 2.0 ** min(attempt, 30))
        return longest * (0.5 + 0.5 * jitter)

    def repeat(self, action: Callable[[], R], may_help: Callable[[StrandlineError], bool], env: Env) -> R:
        """Run an action; again after a pause, a bounded number of times, if that ``may_help`` against its error."""
        for attempt in range(self.attempts - 1):
            try:
                return action()
            except StrandlineError as error:
                if not may_help(error):
                    raise
            env.clock.sleep(self.pause(attempt, env.chance.jitter()))
        return action()


class RetryingStore:
    """A store that retries transient failures of repeatable calls.

    Conditional writes are not retried: a repeated one would mistake its own success for a conflict. Their caller
    (:class:`~strandline.storage.cell.StoreCell`) resolves a lost answer by reading.
    """

    def __init__(self, inner: ObjectStore, *, backoff: Backoff | None = None, env: Env = SYSTEM) -> None:
        self._inner = inner
        self._backoff = backoff or Backoff()
        self._env = env

    @property
    def url(self) -> str:
        """The address of the store."""
        return self._inner.url

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(RetryingStore, backoff=self._backoff), (self._inner,))

    def __repr__(self) -> str:
        return f"RetryingStore({self._inner!r})"

    def _retry(self, action: Callable[[], R]) -> R:
        return self._backoff.repeat(action, lambda error: isinstance(error, TransientStorageError), self._env)

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""
        return self._retry(lambda: self._inner.get(path))

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        """Exactly ``length`` bytes from ``start``."""
        return self._retry(lambda: self._inner.get_range(path, start, length))

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing an existing object; writing the same bytes again is harmless."""
        self._retry(lambda: self._inner.put(path, data))

    def copy(self, source: str, target: str) -> None:
        """Copy within the store; copying the same object again is harmless."""
        self._retry(lambda: copy_object(self._inner, source, target))

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds: tried once, never repeated here."""
        return self._inner.put_if(path, data, when)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below ``prefix``; after a failure the listing continues after the last returned row."""
        pages = self._inner.list(prefix, start_after=start_after)

        def advance() -> ObjectInfo | None:
            nonlocal pages
            try:
                return next(pages, None)
            except TransientStorageError:
                pages = self._inner.list(prefix, start_after=start_after)
                raise

        while (row := self._retry(advance)) is not None:
            start_after = row.path
            yield row

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""
        self._retry(lambda: self._inner.delete(path))
