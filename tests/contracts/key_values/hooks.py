"""Hooks that a backend implements for the suite, and helpers that take from a subscription."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import ClassVar, Final

import pytest

from strandline.kv.contract import Ended, KeyValue, KeyValueReader, KeyValueSubscription, KeyValueWriter, Listed
from strandline.model.cursor import Cursor
from strandline.model.keyed import EVERYTHING, Prefix, Scope, Update, Updates
from strandline.model.records import Op

SOON = 120.0
"""Real seconds as a generous time limit."""

KEYS: Final = (b"node.1", b"node.10", b"node.1.x", b"nope", b"other", b"route.a", b"node", b"a.b.c")
"""Keys that every backend accepts, in and out of each of the scopes below."""

SCOPES: Final = {
    "everything": EVERYTHING,
    "a prefix": Prefix("node."),
    "a prefix that ends within a word": Prefix("no"),
    "a prefix that is also a key": Prefix(b"node.1"),
    "several prefixes": Prefix("node.", "route.", "a.b."),
    "several prefixes that overlap": Prefix("node.1", "no", "node.", "route"),
}
IN_EVERY_SCOPE: Final = b"node.1"

in_every_scope = pytest.mark.parametrize("scope", [pytest.param(scope, id=name) for name, scope in SCOPES.items()])
STRANGE: Final = (b"\x00\xff", b"a b", b"x.*", b">", b".lead", b"trail.", b"two..dots", "ü".encode(), b"new\r\nline")
"""Keys that only a backend of arbitrary bytes accepts."""


class Collected:
    """What a subscription has returned so far, checked against the rules of every subscription."""

    def __init__(self, subscription: KeyValueSubscription) -> None:
        """Nothing yet."""
        self.subscription = subscription
        self.rows: list[Update] = []
        self.listed: Cursor | None = None
        self.listed_after = 0
        self.ended = False
        self.upto: Cursor | None = None

    def take(self, most: int = 256, timeout: float = SOON) -> bool:
        """Take once; whether something was returned."""
        given = self.subscription.take(most, timeout)
        match given:
            case None:
                return False
            case Listed(cursor):
                assert self.listed is None, "Listed came twice"
                self.listed, self.listed_after = cursor, len(self.rows)
                self._move(cursor)
            case Ended():
                self.ended = True
            case Updates():
                self._check(given, most)
        return True

    def _check(self, given: Updates, most: int) -> None:
        rows = list(given)
        assert len(rows) <= most, "more than was asked for"
        known = [row.version for row in rows if row.version is not None]
        before = [row.version for row in self.rows if row.version is not None]
        versions = before[-1:] + known
        assert all(one < two for one, two in pairwise(versions)), "out of the stream's order"
        assert given.upto is not None, "a stream's own changes have a cursor behind them"
        if known:
            assert given.upto.next > known[-1], "the cursor is not behind what was given"
        if rows and not known:
            assert self.upto in (None, given.upto), "an unknown version moved the cursor"
        self._move(given.upto)
        self.rows += rows

    def _move(self, cursor: Cursor) -> None:
        assert cursor.log_id == self.subscription.stream, "the cursor is of another stream"
        assert self.upto is None or cursor.next >= self.upto.next, "the cursor went backwards"
        self.upto = cursor

    def until(self, enough: Callable[[], object], most: int = 256) -> Collected:
        """Take until it is enough."""
        began = time.monotonic()
        while not enough():
            assert time.monotonic() - began < SOON, f"it did not come; given were {self.rows}"
            self.take(most, 1.0)
        return self

    def until_listed(self, most: int = 256) -> Collected:
        """Take until the initial values are given."""
        return self.until(lambda: self.listed is not None, most)

    def until_key(self, key: bytes, value: bytes | None, most: int = 256) -> Collected:
        """Take until this change is returned."""
        return self.until(lambda: any(row.key == key and row.value == value for row in self.rows), most)

    def since_listed(self) -> list[Update]:
        """The changes after the initial values."""
        return self.rows[self.listed_after :]

    def at(self) -> Cursor:
        """The cursor after everything returned."""
        assert self.upto is not None
        return self.upto


def fold(rows: Iterable[Update], state: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """The state after these changes."""
    state = {} if state is None else state
    for row in rows:
        if row.value is None:
            state.pop(row.key, None)
        else:
            state[row.key] = row.value
    return state


def brief(rows: Iterable[Update]) -> list[tuple[bytes, bytes | None]]:
    """Key and value of each change."""
    return [(row.key, row.value) for row in rows]


def current(kv: KeyValueReader) -> dict[bytes, bytes]:
    """All present keys and values."""
    return {entry.key: entry.value for entry in kv.scan()}


def fill(kv: KeyValueWriter, value: bytes = b"1", keys: Iterable[bytes] = KEYS) -> dict[bytes, int]:
    """Put every key once; returns their versions."""
    return {key: kv.put(key, value) for key in keys}


def churn(kv: KeyValueWriter, count: int, name: str = "churn") -> list[Update]:
    """Put fresh keys, alternately in and out of each scope; returns the changes in order."""
    made = []
    for number in range(count):
        for stem in (b"node.1", b"other", b"route.a", b"nope", b"a.b.c"):
            key = stem + f".{name}.{number}".encode()
            value = str(number).encode()
            made.append(Update(Op.PUT, key, value, kv.put(key, value)))
    return made


class KeyValueOwner(ABC):
    """Operations that the contract leaves to a key-value store's owner."""

    any_bytes: ClassVar[bool] = True
    """Whether every byte string is a key; if not, those of :data:`STRANGE` are refused as ``InvalidInput``."""

    rounds: ClassVar[int] = 200
    """Number of changes of the long histories; fewer where each costs a round trip."""

    @abstractmethod
    def recreate(self, kv: KeyValue) -> KeyValue:
        """Remove the key-value store with its content, and create an empty one of the same name; returns that."""

    @abstractmethod
    def expire(self, kv: KeyValue) -> None:
        """Let retention drop every change that is older than the current value of any key.

        Current values stay if the backend can drop one without the other.
        """

    @abstractmethod
    def overrun(self, kv: KeyValue, subscription: KeyValueSubscription) -> list[Update]:
        """Make changes with :func:`churn`, and let retention drop some before the subscription gets them.

        Returns the changes in order. The last of them is still retained.
        """

    def evict(self, kv: KeyValue, key: bytes) -> bool:
        """Evict a key as a limit would, without an event; False if the backend never does."""
        return False

    def failing_listings(self, kv: KeyValue) -> AbstractContextManager[object] | None:
        """While entered, no listing can be completed; None if that is impossible."""
        return None

    def cursor(self, kv: KeyValue, scope: Scope = EVERYTHING) -> Cursor:
        """The key-value store's end, from a full watch."""
        with kv.watch(scope) as subscription:
            return Collected(subscription).until_listed().at()
