"""The environment of a watch as one small value: a source with retention, a store, and the applied updates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any
from uuid import UUID

from strandline.model.cursor import Cursor
from strandline.model.keyed import Scope

Pairs = tuple[tuple[bytes, bytes], ...]
"""Keys and values, sorted."""

Change = tuple[bytes, bytes | None]
"""A key and its new value, or None for a delete. Its version is its place in its stream."""


def stream_id(number: int) -> UUID:
    return UUID(int=number + 1)


@lru_cache(maxsize=1 << 16)
def changed(pairs: Pairs, changes: tuple[Change, ...]) -> Pairs:
    state = dict(pairs)
    for key, value in changes:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return tuple(sorted(state.items()))


@lru_cache(maxsize=1 << 16)
def within(pairs: Pairs, scope: Scope) -> Pairs:
    return tuple(pair for pair in pairs if pair[0] in scope)


@dataclass(frozen=True, slots=True)
class Fold:
    """What the store holds. Immutable: each write makes a new one."""

    content: Pairs = ()
    cursor: Cursor | None = None
    resync: UUID | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A watch of the source: where it is, and what is left of the listing that it began with."""

    stream: int
    position: int
    current: tuple[tuple[int, bytes, bytes], ...] | None


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each thing may still happen."""

    writes: int = 0
    trims: int = 0
    recreations: int = 0
    failures: int = 0
    crashes: int = 0
    stops: int = 0
    exports: int = 0
    anew: int = 0


@dataclass(slots=True)
class World:
    """All state outside the memory of the watch. Its fields are immutable, so that a copy may be shallow."""

    budget: Budget
    streams: tuple[tuple[Change, ...], ...] = ((),)
    first: int = 0
    fold: Fold = Fold()
    before: Fold = Fold()
    applied: Pairs = ()
    subscribed: Subscribed | None = None
    mark: Cursor | None = None
    now: float = 0.0
    asked: int = 0
    reported: Cursor | None = None
    put_in_run: frozenset[bytes] = frozenset()
    listed: frozenset[bytes] | None = None
    memory: Cursor | None = None
    fate: str = "well"
    action: Any = None
    broken: str | None = None

    def copy(self) -> World:
        made = object.__new__(World)
        for name in _FIELDS:
            setattr(made, name, getattr(self, name))
        return made

    def spend(self, what: str) -> World:
        made = self.copy()
        made.budget = _spent(self.budget, what)
        return made

    def breaks(self, what: str) -> None:
        if self.broken is None:
            self.broken = what

    # --- the source --------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        return len(self.streams) - 1

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.streams[-1]

    def write(self, key: bytes, value: bytes | None) -> None:
        self.streams = (*self.streams[:-1], (*self.changes, (key, value)))

    def end(self) -> Cursor:
        return Cursor(stream_id(self.stream), len(self.changes))

    def state(self) -> Pairs:
        return changed((), self.changes)

    def state_at(self, cursor: Cursor) -> Pairs:
        return changed((), self.streams[cursor.log_id.int - 1][: cursor.next])

    def current(self, scope: Scope) -> tuple[tuple[int, bytes, bytes], ...]:
        """The current values in scope with their versions, in the order of those."""
        newest = {key: (version, key, value) for version, (key, value) in enumerate(self.changes) if key in scope}
        return tuple(sorted((version, key, value) for version, key, value in newest.values() if value is not None))

    def differs(self, pairs: Pairs, cursor: Cursor, scope: Scope) -> bool:
        """Whether pairs differ from the source's state at a cursor, within a scope.

        The first listing of a newcomer gives only the newest value of each key, in the order of their versions. Up to
        its end (``mark``) a key that is changed again further on may be absent; it is never there with another value.
        """
        then = within(self.state_at(cursor), scope)
        have = within(pairs, scope)
        if have == then:
            return False
        if self.mark is None or self.mark.log_id != cursor.log_id or cursor.next >= self.mark.next:
            return True
        later = {key for key, _ in self.streams[cursor.log_id.int - 1][cursor.next : self.mark.next]}
        missing = [pair for pair in then if pair not in have]
        return any(pair not in then for pair in have) or any(key not in later for key, _ in missing)


_FIELDS = tuple(field.name for field in fields(World))


@lru_cache(maxsize=1 << 12)
def _spent(budget: Budget, what: str) -> Budget:
    values = {field.name: getattr(budget, field.name) for field in fields(Budget)}
    values[what] -= 1
    return Budget(**values)
