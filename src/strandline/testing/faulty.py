"""A store with injected faults: before a write, after it, late or permanent; by a seed or a script."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from strandline.errors import InvalidInput, StorageError, TransientStorageError
from strandline.storage.clock import Clock
from strandline.storage.objects.store import Object, ObjectInfo, ObjectStore, Payload, Precondition, Version
from strandline.testing.clock import ManualClock

R = TypeVar("R")

OperationName = Literal["get", "get_range", "put", "put_if", "list", "delete"]
Stage = Literal["before", "after"]
Fault = Literal["before", "after", "late", "throttled"]
Outcome = Literal["running", "answered", "before", "after", "late", "throttled", "down", "refused", "raised"]

WRITES: Final[tuple[OperationName, ...]] = ("put", "put_if", "delete")
ALL_OPERATIONS: Final[tuple[OperationName, ...]] = ("get", "get_range", "put", "put_if", "list", "delete")


class Crash(BaseException):
    """The process died here. No error handler may catch it; the test restarts from the stored state."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probability (0 to 1) of each fault of an operation; otherwise it succeeds."""

    before: float = 0.0
    """Fails before it reaches the store: nothing was done."""
    after: float = 0.0
    """Is done, but its answer is lost. A listing returns some of its rows first."""
    late: float = 0.0
    """A write fails first and is done later, before some other operation. Reads just fail."""
    throttled: float = 0.0
    """Is throttled: nothing was done."""
    latency: float = 0.0
    """Longest time that an operation takes, in seconds of the store's clock."""


CALM: Final = Faults()


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of a hook: the operation, its number from 0, and whether it is about to be done or is done."""

    number: int
    name: OperationName
    path: str
    stage: Stage


@dataclass(slots=True)
class Operation:
    """One row of the log; ``refused`` is an error of the store below, ``raised`` any other, as from a hook."""

    number: int
    name: OperationName
    path: str
    outcome: Outcome = "running"


@dataclass(slots=True)
class _Script:
    names: tuple[OperationName, ...]
    path_prefix: str
    fault: Fault
    times: int
    error: StorageError | None


class FaultyStore:
    """Another store with faults: from a seed (the same each run), from a script, or both.

    Scripted faults take precedence over random ones, an outage over both. Hooks run outside every lock, first before
    the operation reaches the store and again when it was done but not yet answered: there a test may run another
    writer, or raise :class:`Crash`.

    >>> from strandline.testing.plain import PlainStore
    >>> store = FaultyStore(PlainStore())
    >>> store.lose_answers(1)
    >>> store.put("a", b"1")
    Traceback (most recent call last):
    strandline.errors.TransientStorageError: The answer to put of plain://test/a was lost.
    >>> store.get("a").data
    b'1'
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        seed: int = 0,
        faults: Faults = CALM,
        per_operation: Mapping[OperationName, Faults] | None = None,
        stale_listing: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        """Wrap ``inner``: ``per_operation`` overrides ``faults``; new objects stay unlisted for ``stale_listing`` s."""
        self.faults = faults
        """The random faults of operations without rates of their own; may be changed at any time."""
        self.log: list[Operation] = []
        """Every operation in the order in which it began."""
        self._inner = inner
        self._per_operation = dict(per_operation or {})
        self._stale_listing = stale_listing
        self._clock = clock or ManualClock()
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._scripts: list[_Script] = []
        self._hooks: list[Callable[[Call], None]] = []
        self._late: list[Callable[[], object]] = []
        self._listed_from: dict[str, float] = {}
        self._down = False

    @property
    def url(self) -> str:
        """The address of the inner store."""
        return self._inner.url

    def __reduce__(self) -> tuple[object, ...]:
        raise InvalidInput("The faults of a FaultyStore are in this process's memory: pickle its inner store.")

    # --- the script -----------------------------------------------------------------------------------------

    def fail_next(
        self,
        *names: OperationName,
        path_prefix: str = "",
        after: bool = False,
        times: int = 1,
        error: StorageError | None = None,
    ) -> None:
        """Fail the next ``times`` operations of these names (any, if none is given) below ``path_prefix``.

        With ``after`` they are done first. ``error`` replaces the ``TransientStorageError``.
        """
        fault: Fault = "after" if after else "before"
        self._scripts.append(_Script(names or ALL_OPERATIONS, path_prefix, fault, times, error))

    def lose_answers(self, times: int, *, path_prefix: str = "") -> None:
        """Let the next ``times`` writes land and lose their answers."""
        self._scripts.append(_Script(WRITES, path_prefix, "after", times, None))

    def delay_next(self, *names: OperationName, path_prefix: str = "", times: int = 1) -> None:
        """Let the next ``times`` writes fail, and land only at :meth:`land_late`."""
        self._scripts.append(_Script(names or WRITES, path_prefix, "late", times, None))

    def throttle_next(self, *names: OperationName, path_prefix: str = "", times: int = 1) -> None:
        """Throttle the next ``times`` operations."""
        self._scripts.append(_Script(names or ALL_OPERATIONS, path_prefix, "throttled", times, None))

    def land_late(self) -> None:
        """Do the delayed writes; errors of their preconditions are ignored."""
        with self._lock:
            late, self._late = self._late, []
        for action in late:
            try:
                action()
            except StorageError:
                continue

    def turn_down(self) -> None:
        """Make every operation fail, without effect, until :meth:`turn_up`."""
        self._down = True

    def turn_up(self) -> None:
        """End :meth:`turn_down`."""
        self._down = False

    def heal(self) -> None:
        """End every fault, random or scripted, and an outage. Hooks and delayed writes stay."""
        self._scripts.clear()
        self._per_operation.clear()
        self.faults = CALM
        self._down = False

    @contextmanager
    def down(self) -> Iterator[None]:
        """An outage within a block."""
        self.turn_down()
        try:
            yield
        finally:
            self.turn_up()

    def hook(self, callback: Callable[[Call], None]) -> None:
        """Call back before and after each operation; an error of the callback is raised by the operation."""
        self._hooks.append(callback)

    def unhook(self) -> None:
        """Remove all hooks."""
        self._hooks.clear()

    def crash_at(self, number: int, *, after: bool = False) -> None:
        """Raise :class:`Crash` at the operation of this number, before it is done or ``after``."""
        stage: Stage = "after" if after else "before"

        def crash(call: Call) -> None:
            if call.number == number and call.stage == stage:
                raise Crash(f"at operation {number}, {call.name} of {call.path}, {stage} it was done")

        self.hook(crash)

    def named(self, *names: OperationName) -> tuple[Operation, ...]:
        """The log's rows of these names."""
        return tuple(row for row in self.log if row.name in names)

    # --- the store ------------------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        """The whole object, or ``NotFound``."""
        return self._perform("get", path, lambda: self._inner.get(path))

    def get_range(self, path: str, start: int, length: int) -> bytes | memoryview:
        """Exactly ``length`` bytes from ``start``."""
        return self._perform("get_range", path, lambda: self._inner.get_range(path, start, length))

    def put(self, path: str, data: Payload) -> None:
        """Write, replacing an existing object."""

        def action() -> None:
            self._inner.put(path, data)
            self._landed(path)

        self._perform("put", path, action)

    def put_if(self, path: str, data: Payload, when: Precondition) -> Version:
        """Write only if the precondition holds."""

        def action() -> Version:
            version = self._inner.put_if(path, data, when)
            self._landed(path)
            return version

        return self._perform("put_if", path, action)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below ``prefix``, without those that are too new; a failing listing may return some rows first."""
        rows: list[ObjectInfo] = []

        def action() -> None:
            now = self._clock.monotonic()
            rows.extend(
                row
                for row in self._inner.list(prefix, start_after=start_after)
                if self._listed_from.get(row.path, now) <= now
            )

        try:
            self._perform("list", prefix, action)
        except TransientStorageError:
            yield from rows[: self._random.randint(0, len(rows))]
            raise
        yield from rows

    def delete(self, path: str) -> None:
        """Remove the object; absent is fine."""

        def action() -> None:
            self._inner.delete(path)
            self._listed_from.pop(path, None)

        self._perform("delete", path, action)

    # --- inside ---------------------------------------------------------------------------------------------

    def _landed(self, path: str) -> None:
        # Only a new object can be missing from a listing: an existing one stays listed.
        if self._stale_listing:
            self._listed_from.setdefault(path, self._clock.monotonic() + self._stale_listing)

    def _perform(self, name: OperationName, path: str, action: Callable[[], R]) -> R:
        with self._lock:
            row = Operation(len(self.log), name, path)
            self.log.append(row)
        try:
            return self._attempt(row, action)
        except BaseException as error:
            if row.outcome == "running":
                row.outcome = "refused" if isinstance(error, StorageError) else "raised"
            raise

    def _attempt(self, row: Operation, action: Callable[[], R]) -> R:
        self._call_hooks(Call(row.number, row.name, row.path, "before"))
        fault, error, latency = self._decide(row.name, row.path)
        if latency:
            self._clock.sleep(latency)
        # Scripted delays end by script; random ones at any later operation.
        is_random = any(rates.late > 0 for rates in (self.faults, *self._per_operation.values()))
        if self._late and is_random and self._random.random() < 0.5:  # noqa: PLR2004
            self.land_late()
        if self._down:
            row.outcome = "down"
            raise TransientStorageError(f"{self.url} is down.")
        if fault == "late" and row.name in WRITES:
            self._late.append(action)
        if fault is None or fault == "after":
            answer = action()
            self._call_hooks(Call(row.number, row.name, row.path, "after"))
            if fault is None:
                row.outcome = "answered"
                return answer
        row.outcome = fault
        raise error or TransientStorageError(_FAILURES[fault].format(f"{row.name} of {self.url}/{row.path}"))

    def _call_hooks(self, call: Call) -> None:
        for hook in tuple(self._hooks):
            hook(call)

    def _decide(self, name: OperationName, path: str) -> tuple[Fault | None, StorageError | None, float]:
        with self._lock:
            rates = self._per_operation.get(name, self.faults)
            latency = rates.latency * self._random.random() if rates.latency else 0.0
            for script in self._scripts:
                if name in script.names and path.startswith(script.path_prefix):
                    script.times -= 1
                    if script.times <= 0:
                        self._scripts.remove(script)
                    return script.fault, script.error, latency
            draw = self._random.random()
            for fault in _FAILURES:
                chance = getattr(rates, fault)
                if draw < chance:
                    return fault, None, latency
                draw -= chance
            return None, None, latency


_FAILURES: Final[Mapping[Fault, str]] = {
    "before": "The store could not be reached for {}.",
    "after": "The answer to {} was lost.",
    "late": "No answer to {} arrived in time.",
    "throttled": "The store throttles (503 SlowDown) for {}.",
}
