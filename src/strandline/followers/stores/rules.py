"""Base class of stores: the exactly-once rule and the resync, over one abstract atomic write."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self
from uuid import UUID

import pyarrow as pa

from strandline.errors import Diverged, InvalidInput, NotReady
from strandline.model.arguments import checked
from strandline.model.cursor import Cursor
from strandline.model.keyed import Updates
from strandline.model.sink import StorePosition, remaining


@checked
class RuledStore(ABC):
    """The exactly-once rule and the resync of a :class:`~strandline.model.sink.Store`; one write at a time."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        """Held through a whole write."""

    @abstractmethod
    def standing(self) -> StorePosition:
        """How far it has got, in whichever stream."""

    @abstractmethod
    def _write(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Store records and standing, all or nothing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; what was written is kept. Closing twice is fine."""

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far it has applied that log; ``Diverged`` if it follows another, ``NotReady`` within a resync."""
        at = self._settled(self.standing()).cursor
        if at is not None and at.log_id != log_id:
            raise Diverged(
                f"{self!r} follows {at.log_id}, not {log_id}: give this log a store of its own, or resync that one."
            )
        return at

    def apply(self, records: pa.Table | Updates, *, since: Cursor, upto: Cursor) -> None:
        """Store the range and its cursor, exactly once; see :class:`~strandline.model.sink.Sink`.

        Updates are taken as they are: turning what a watch received into a table and back would double the work.
        """
        with self._writing:
            at = self.cursor(since.log_id)
            if isinstance(records, Updates) and (records.columnar or at not in (None, since)):
                records = records.table()
            todo = remaining(records, since=since, upto=upto, at=at)
            if todo is not None:
                self._write(todo, StorePosition(upto))

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark the state as being brought in step with a stream."""
        with self._writing:
            self._write(None, StorePosition(self.standing().cursor, stream))

    def resync(self, records: pa.Table | Updates) -> None:
        """Apply puts and removals outside the rule of offsets; the cursor stays."""
        with self._writing:
            self._write(records, self._unsettled())

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync at a cursor of the stream that it began with."""
        with self._writing:
            stream = self._unsettled().resync
            if cursor.log_id != stream:
                raise InvalidInput(
                    f"The resync of {self!r} began with {stream} and cannot end in {cursor.log_id}: begin it again."
                )
            self._write(None, StorePosition(cursor))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- refusals ----------------------------------------------------------------------------------------------

    def _settled(self, standing: StorePosition) -> StorePosition:
        """The standing, if it is outside a resync."""
        if standing.resync is not None:
            raise NotReady(
                f"{self!r} is being brought in step with {standing.resync}: its state counts again when the resync "
                "has been done to its end."
            )
        return standing

    def _unsettled(self) -> StorePosition:
        """The standing, within a resync."""
        standing = self.standing()
        if standing.resync is None:
            raise InvalidInput(f"No resync of {self!r} has begun: call begin_resync() first.")
        return standing

    def _exported_cursor(self, standing: StorePosition) -> Cursor:
        """The cursor that a snapshot of the state at this standing has."""
        cursor = self._settled(standing).cursor
        if cursor is None:
            raise NotReady(f"{self!r} has no cursor yet, from which nobody could follow on: let it follow first.")
        return cursor
