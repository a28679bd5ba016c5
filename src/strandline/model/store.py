"""A fold: a sink that can be read, hands itself on as a snapshot, and can be brought back in step after a gap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from uuid import UUID

import pyarrow as pa

from strandline.model.addresses import Address
from strandline.model.cursor import Cursor
from strandline.model.sink import Sink
from strandline.model.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class StorePosition:
    """How far a store has got. While ``resync`` names a stream, the state is neither here nor there.

    The cursor then is the one from before; following can go on only when the resync has been done again to its end.
    """

    cursor: Cursor | None
    resync: UUID | None = None


@runtime_checkable
class Store(Sink, Protocol):
    """Keyed state on a disk or in memory, moved by one follower, read by any thread at any time.

    ``apply`` is the sink's: puts set, deletes and purges remove, a null value is the empty one, a record without key
    is ``NullKey``. Each write is atomic: a crash leaves all of it or nothing. Whether it is durable when the call
    returns is the store's stated choice (``sync``). While a resync is under way ``apply`` and ``cursor`` raise
    ``NotReady`` and ``export_to`` does so too.

    After a write failed, what the store holds is what :meth:`standing` says; the same write may be tried again.
    """

    def standing(self) -> StorePosition:
        """The cursor, of whichever stream, and whether a resync is under way. Never raises for another log."""

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, None if it is absent."""

    def range(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys that begin with the prefix, with their values, sorted by key; the state as of the call.

        Streams: it takes no more memory for a large range than a small one needs, beyond the keys.
        """

    def begin_resync(self, stream: UUID) -> None:
        """Durably mark the state as being brought in step with a stream. Again is fine, of another stream too."""

    def resync(self, records: pa.Table) -> None:
        """Apply puts and removals outside the rule of offsets; the cursor stays. ``InvalidInput`` without a begin."""

    def end_resync(self, cursor: Cursor) -> None:
        """Atomically end the resync at a cursor. ``InvalidInput`` without a begin, or of another stream than begun."""

    def export_to(self, folder: Address) -> Snapshot:
        """Seal the state as of the call as a snapshot in a folder that must be absent or empty.

        Its cursor is exactly what its data holds. ``AlreadyExists`` if the folder is occupied, ``NotReady`` for a
        store without cursor. Reads and writes go on meanwhile.
        """

    def close(self) -> None:
        """Let go of the files; what was written is kept. Closing twice is fine."""
