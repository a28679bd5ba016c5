"""Comparison of a store with the log that it follows, at the store's cursor, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from strandline.bulk.snapshot_tasks import CHANGES, newest_records, state_of
from strandline.bulk.span_checks import short_bytes
from strandline.errors import Conflict, NotReady
from strandline.model.sink import Store

_FIRST: Final = 3


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """Comparison of a store with its log, up to the store's cursor."""

    next: int
    keys: int
    """How many the store has."""
    differences: int
    """Keys that only one side has, or that have different values."""
    first: tuple[str, ...]


def compared_store(log: Any, store: Store) -> StoreCheck:
    """Compare each key with what the log says, from offset 0 up to the store's cursor. Changes nothing.

    Takes the memory of the state that the log gives. ``CursorExpired`` if the log no longer has its first records,
    ``Conflict`` if a follower applies something meanwhile, ``NotReady`` for a store without a cursor.
    """
    cursor = store.cursor(log.log_id)
    if cursor is None:
        raise NotReady(f"{store!r} has no cursor yet, so that there is nothing to compare.")
    state = state_of(newest_records(log.read(0, upto=cursor.next, columns=CHANGES.names)))
    expected = dict(zip(*(state.column(name).to_pylist() for name in ("key", "value")), strict=True))
    keys, differences = 0, 0
    first: list[str] = []

    def compare(key: bytes, ours: bytes | None, theirs: bytes | None) -> None:
        nonlocal differences
        if ours != theirs:
            differences += 1
            if differences <= _FIRST:
                both = f"the log gives {short_bytes(ours)}, the store has {short_bytes(theirs)}"
                first.append(f"{short_bytes(key)}: {both}")

    for key, theirs in store.range():
        keys += 1
        compare(key, expected.pop(key, None), theirs)
    for key, ours in expected.items():
        compare(key, ours, None)
    if store.cursor(log.log_id) != cursor:
        raise Conflict(f"{store!r} was written while it was compared: stop its follower, or try again.")
    return StoreCheck(cursor.next, keys, differences, tuple(first))
