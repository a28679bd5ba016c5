"""Watch of a key-value store in this process: its current values, then its changes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeAlias
from uuid import UUID

from strandline.errors import InvalidInput
from strandline.kv.contract import Ended, Listed
from strandline.model.arguments import Positive, Timeout, checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates
from strandline.model.records import Op
from strandline.storage.closing import Closing

CurrentValue: TypeAlias = tuple[int, bytes, bytes]
"""A version, a key and its value."""


@checked
class LocalSubscription(Closing):
    """The current values in version order, then :class:`Listed`, then what :meth:`_changes` gives."""

    def __init__(self, cursor: Cursor, current: list[CurrentValue] | None) -> None:
        """Begin at a cursor, with the current values there, or without any."""
        self._cursor = cursor
        self._current = None if current is None else sorted(current)
        self._given = 0
        self._closed = False

    @property
    def stream(self) -> UUID:
        """The identity of the stream, which its cursors carry."""
        return self._cursor.log_id

    def take(self, most: Positive, timeout: Timeout) -> Updates | Listed | Ended | None:
        """The next changes, up to ``most``; None if none arrived in time."""
        if self._closed:
            raise InvalidInput("This watch is closed: open another one.")
        if self._current is None:
            return self._changes(most, timeout)
        rows = self._current[self._given : self._given + most]
        if not rows:
            self._current = None
            return Listed(self._cursor)
        self._given += len(rows)
        versions, keys, values = zip(*rows, strict=True)
        return Updates([Op.PUT] * len(rows), keys, values, versions, Cursor(self.stream, versions[-1] + 1))

    @abstractmethod
    def _changes(self, most: int, timeout: float) -> Updates | Ended | None:
        """The next changes after the cursor, which moves past them."""

    def close(self) -> None:
        """Close the watch; the store stays open."""
        self._closed = True
