"""A cell: one small object that is changed by compare-and-set only. No other module has such a loop.

Every write carries the operation that made it, and the object remembers the latest operations. So a writer whose
answer was lost reads the object again and finds out whether its write landed, even if others wrote since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from strandline.errors import (
    AlreadyExists,
    Conflict,
    Contended,
    CorruptData,
    NotFound,
    OutcomeUnknown,
    TransientStorageError,
)
from strandline.model.stamp import REMEMBERED, OpId, Stamped
from strandline.storage.env import SYSTEM, Env
from strandline.storage.metrics import Role, count_write
from strandline.storage.objects.store import ABSENT, Match, ObjectStore, Payload, Version
from strandline.storage.retry import Backoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A value as it was read, and the store's token for it."""

    value: T
    version: Version


class CellCodec(Protocol[T]):
    """Encodes a cell's state. Decoding invalid bytes raises ``CorruptData``."""

    def encode(self, state: Stamped[T]) -> Payload:
        """The bytes of a state."""

    def decode(self, data: bytes | memoryview, where: str) -> Stamped[T]:
        """The state in these bytes; ``where`` names the object in errors."""


class StoreCell(Generic[T]):
    """A cell in one object of a store. Caches the last state, so a single writer reads nothing."""

    def __init__(
        self,
        store: ObjectStore,
        path: str,
        codec: CellCodec[T],
        *,
        required_by: str | None = None,
        backoff: Backoff | None = None,
        env: Env = SYSTEM,
    ) -> None:
        """Use the object ``path``; nothing is read or written yet.

        ``required_by`` names what cannot exist without the object: that it is absent is damage then, not ``NotFound``.
        """
        self._required_by = required_by
        self._store = store
        self._path = path
        self._codec = codec
        self._backoff = backoff or Backoff(attempts=64, base=0.005, ceiling=1.0)
        self._env = env
        self._held: Versioned[Stamped[T]] | None = None
        # Operations whose last write got no answer, with its revision. Without them, an operation repeated after the
        # object has forgotten it would be applied twice.
        self._doubts: dict[OpId, int] = {}
        self.conflicts = 0
        """Races lost so far, for the conflict rate."""
        self.writes = 0
        """Writes that landed and were answered so far."""

    @property
    def where(self) -> str:
        """The object's full name, for messages."""
        return f"{self._store.url}/{self._path}"

    @property
    def held(self) -> T | None:
        """The value that this process read or wrote last, without I/O; None before the first read."""
        return None if self._held is None else self._held.value.value

    def read(self) -> Versioned[T]:
        """The value now, or ``NotFound``; ``CorruptData`` if something else requires it."""
        held = self._fetch()
        return Versioned(held.value.value, held.version)

    def _fetch(self) -> Versioned[Stamped[T]]:
        try:
            found = self._store.get(self._path)
        except NotFound as error:
            if self._required_by is None:
                raise
            raise CorruptData(
                f"{self.where} is missing although {self._required_by} exists: restore the object before anything else."
            ) from error
        version, known = found.version, self._held
        if known is None or known.version != version:
            known = Versioned(self._codec.decode(found.data, self.where), version)
            self._held = known
        return known

    def create(self, op: OpId, value: T, *, attempts: int | None = None) -> T:
        """Write the first value; ``AlreadyExists`` if another operation created the cell.

        ``attempts`` overrides the number of attempts of an update.
        """
        state = Stamped(value, 1, (op,))
        data = self._codec.encode(state)
        doubt = False
        for attempt in range(self._backoff.attempts if attempts is None else attempts):
            try:
                version = self._store.put_if(self._path, data, ABSENT)
            except (AlreadyExists, TransientStorageError) as error:
                doubt = doubt or isinstance(error, TransientStorageError)
                try:
                    held = self._fetch()
                except (NotFound, TransientStorageError):
                    self._pause(attempt)
                    continue
                if op in held.value.recent:
                    return held.value.value
                if doubt and held.value.revision > REMEMBERED:
                    break  # the object no longer remembers who created it
                raise AlreadyExists(f"{self.where} exists already.") from error
            self._held = Versioned(state, version)
            return value
        raise OutcomeUnknown(
            f"Whether {self.where} was created by this call is unknown: the store failed. Read it, or try again."
        )

    def update(self, op: OpId, edit: Callable[[T], T], *, role: Role | None = None) -> T:
        """Apply a pure edit and return a value in which ``op`` has been applied, by this call or an earlier one.

        The edit may run several times, on different values; an error that it raises on the current value is raised here
        and changes nothing. Returning its argument writes nothing. ``Contended`` after too many lost
        races, ``OutcomeUnknown`` if the store failed and the outcome could not be read back: repeating the call
        with the same ``op`` is safe in both cases. With ``role`` the writes are counted for Prometheus.
        """
        held, fresh, tries = self._held, False, 0
        while True:
            if held is None:
                held, fresh = self._fetch_after(op, tries), True
            state = held.value
            if op in state.recent:
                self._doubts.pop(op, None)
                return state.value
            self._settle(op, state)
            if tries >= self._backoff.attempts:
                raise self._too_often(op, tries)
            try:
                value = edit(state.value)
            except Exception:
                if fresh:
                    raise
                held = None  # the edit may have failed on an outdated value
                continue
            if value is not state.value:
                written = self._write(op, held, value, role)
                if written is not None:
                    self._held = written
                    return value
                self._pause(tries)
                tries += 1
            elif fresh:
                return value
            held = None

    def _write(
        self, op: OpId, held: Versioned[Stamped[T]], value: T, role: Role | None
    ) -> Versioned[Stamped[T]] | None:
        """Try once to replace ``held``; None if that failed or the answer was lost."""
        state = held.value.stamp(value, op)
        data = self._codec.encode(state)
        doubt = self._doubts.get(op)
        self._doubts[op] = max(state.revision, doubt or 0)  # until an answer comes, whatever ends the call
        try:
            version = self._store.put_if(self._path, data, Match(held.version))
        except TransientStorageError:
            return None
        except Conflict:
            # A conflict does not prove that the write failed: a proxy may have repeated it. So the object is read and
            # searched for the operation. If the object has forgotten the operation, the conflict counts: otherwise a
            # writer that was idle for long could never continue.
            self.conflicts += 1
            count_write(role, landed=False)
            if doubt is None:
                self._doubts.pop(op, None)
            return None
        self._doubts.pop(op, None)
        self.writes += 1
        count_write(role, landed=True)
        return Versioned(state, version)

    def _settle(self, op: OpId, state: Stamped[T]) -> None:
        """Resolve the outcome of an earlier write of ``op``, which is not in this state, or raise."""
        doubt = self._doubts.get(op)
        if doubt is None or state.revision < doubt:
            return  # no open write, or one that fails if this state is replaced first
        if state.revision - doubt >= REMEMBERED:
            raise OutcomeUnknown(
                f"{self.where} has changed {state.revision - doubt} times since a write whose answer was lost, and no "
                "longer remembers whether that landed. Do it as a new operation only if doing it twice is harmless."
            )
        del self._doubts[op]  # others wrote that revision: this write failed

    def _fetch_after(self, op: OpId, tries: int) -> Versioned[Stamped[T]]:
        try:
            return self._fetch()
        except TransientStorageError as error:
            if not tries and op not in self._doubts:
                raise
            raise OutcomeUnknown(
                f"Whether a write to {self.where} landed is unknown: the store failed and could not be read "
                "afterwards. Repeat the same operation when it is back."
            ) from error

    def _too_often(self, op: OpId, tries: int) -> OutcomeUnknown | Contended:
        if op in self._doubts:
            return OutcomeUnknown(
                f"{self.where} accepted none of {tries} writes so far, and the last may still land: the store kept "
                "failing. Repeat the same operation when it is back."
            )
        return Contended(
            f"{self.where} was changed by other writers at each of {tries} tries; nothing was changed. Try again."
        )

    def _pause(self, attempt: int) -> None:
        self._env.clock.sleep(self._backoff.pause(attempt, self._env.chance.jitter()))
