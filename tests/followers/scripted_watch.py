"""A watch with a scripted stream, clock and failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from uuid import UUID

from strandline.errors import CursorExpired, TransientStorageError
from strandline.followers.events import Batching
from strandline.followers.watch.api import watch_applied
from strandline.kv.contract import Ended, Listed
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import Scope, Update, Updates
from strandline.model.records import Op
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Crash

STREAM = UUID(int=1)
AT = Cursor(STREAM, 0)
WINDOW = 1.0

Thing = Updates | Listed | Ended | BaseException | float | None | Callable[[], Any]
"""What one take gives. A number is how much time goes by without anything, None as much as there is patience for; an
error is raised; what can be called is called, and gives in its turn."""

Fault = Literal["well", "before", "after"]


def at(offset: int) -> Cursor:
    return AT.at(offset)


def put(version: int | None, key: bytes, value: bytes = b"v") -> Update:
    return Update(Op.PUT, key, value, version)


def delete(version: int | None, key: bytes) -> Update:
    return Update(Op.DELETE, key, None, version)


def given(*rows: Update, since: int = 0) -> Updates:
    return Updates.of(rows, at(since))


def numbered(first: int, count: int) -> Updates:
    """``count`` puts of different keys, at versions from ``first`` on."""
    return given(*(put(version, b"k%d" % version, b"%d" % version) for version in range(first, first + count)))


class Stage:
    """A watcher that plays a script as its streams, and records what the watch does. The end of the script stops it.

    Its clock moves only by the script and by the pauses of the watch.
    """

    def __init__(self, *script: Thing, expired: bool = False, **options: Any) -> None:
        self.script = iter(script)
        self.expired = expired
        self.clock = ManualClock()
        self.stop = threading.Event()
        self.options = options
        self.batches: list[list[Any]] = []
        self.reports: list[int] = []
        self.opened: list[Cursor | None] = []
        self.limits: list[tuple[int, float]] = []
        self.closed = 0
        self.log: list[str] = []

    # --- the watch's side --------------------------------------------------------------------------------------

    def apply(self, batch: Sequence[Any]) -> None:
        self.log.append("apply")
        self.batches.append(list(batch))

    def report(self, cursor: Cursor) -> None:
        self.log.append("report")
        self.reports.append(cursor.next)

    def run(self, apply: Callable[[Sequence[Any]], object] | None = None, **options: Any) -> Cursor | None:
        defaults = {"batching": Batching(records=100, window=WINDOW), "on_applied": self.report}
        return watch_applied(
            self,
            apply or self.apply,
            stop=self.stop,
            env=Env(clock=self.clock),
            **{**defaults, **self.options, **options},
        )

    @property
    def keys(self) -> list[list[bytes]]:
        return [[update.key for update in batch] for batch in self.batches]

    # --- the watcher's side ------------------------------------------------------------------------------------

    @property
    def stream(self) -> UUID:
        return STREAM

    def watch(self, scope: Scope) -> Stage:
        return self.watch_from(scope, None)

    def watch_from(self, scope: Scope, cursor: Cursor | None) -> Stage:
        self.log.append("open")
        self.opened.append(cursor)
        if self.expired and cursor is not None:
            raise CursorExpired("It is gone.")
        return self

    def take(self, most: int, timeout: float) -> Updates | Listed | Ended | None:
        self.limits.append((most, timeout))
        try:
            thing = next(self.script)
        except StopIteration:
            self.stop.set()
            return None
        while callable(thing):
            thing = thing()
        if thing is None or isinstance(thing, float):
            self.clock.advance(timeout if thing is None else thing)
            return None
        if isinstance(thing, BaseException):
            raise thing
        return thing

    def close(self) -> None:
        self.closed += 1


class Flaky:
    """A store whose writes have the outcomes of a list, one after the other, and succeed after its end."""

    def __init__(self, inner: Any, *faults: Fault, stage: Stage | None = None) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.writes: list[str] = []
        self.times: list[float] = []
        self.stage = stage

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("apply", "begin_resync", "resync", "end_resync"):
            return found

        def write(*args: Any, **options: Any) -> None:
            fault = self.faults.pop(0) if self.faults else "well"
            self.writes.append(f"{name} {fault}")
            if self.stage is not None:
                self.stage.log.append(f"store {fault}")
                self.times.append(self.stage.clock.monotonic())
            if fault != "before":
                found(*args, **options)
            if fault != "well":
                raise TransientStorageError(f"The store failed {fault} it wrote.")

        return write


class Mortal:
    """Any part of a watch, whose every named call is a place to die: before it, and after it was done."""

    def __init__(self, inner: Any, fuse: Iterator[bool], *names: str) -> None:
        self._inner = inner
        self._fuse = fuse
        self._names = names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*args: Any, **options: Any) -> Any:
            if next(self._fuse):
                raise Crash(f"before {name}")
            answer = found(*args, **options)
            if next(self._fuse):
                raise Crash(f"after {name}")
            return Mortal(answer, self._fuse, "take") if name == "watch_from" else answer

        return call


def burning(at_call: int) -> Iterator[bool]:
    """A function that raises once, at the given place."""
    yield from (False for _ in range(at_call))
    yield True
    while True:
        yield False


def held(store: Any, prefix: bytes = b"") -> dict[bytes, bytes]:
    return dict(store.range(prefix))


def current(kv: MemoryKeyValue, prefix: bytes = b"") -> dict[bytes, bytes]:
    return {entry.key: entry.value for entry in kv.scan(prefix)}


def follow(kv: MemoryKeyValue, store: Any, **options: Any) -> Cursor | None:
    """Apply everything in a key-value store to a store: the stream ends, and so does the watch."""
    kv.end()
    try:
        return watch_applied(kv, lambda _: None, store=store, **{"reader": kv, **options})
    finally:
        kv._ended = False
