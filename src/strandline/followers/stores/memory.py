"""A store in memory: not durable."""

from __future__ import annotations

from typing import final

import pyarrow as pa

from strandline.errors import InvalidInput
from strandline.followers.stores.state import KeyedStore
from strandline.model.addresses import Address, as_folder
from strandline.model.arguments import checked
from strandline.model.keyed import Updates
from strandline.model.sink import StorePosition
from strandline.model.snapshot import Snapshot
from strandline.storage.fork_check import Origin, bound_to_process


@bound_to_process()
@final
@checked
class MemoryStore(KeyedStore):
    """Everything that a :class:`~strandline.model.sink.Store` promises, but nothing survives the process.

    It cannot be exported: there are no files to seal.

    >>> from uuid import UUID
    >>> from strandline.model.cursor import Cursor
    >>> from strandline.model.keyed import Update, Updates
    >>> from strandline.model.records import Op
    >>> start = Cursor(UUID(int=1), 0)
    >>> updates = Updates.of([Update(Op.PUT, b"b", b"2", 0), Update(Op.PUT, b"a", b"1", 1)], start)
    >>> store = MemoryStore()
    >>> store.apply(updates.table(), since=start, upto=updates.upto)
    >>> list(store.range()), store.get(b"c"), store.standing().cursor.next
    ([(b'a', b'1'), (b'b', b'2')], None, 2)
    """

    def __init__(self) -> None:
        """An empty store."""
        super().__init__()
        self._origin = Origin("A store in memory", self)

    def __repr__(self) -> str:
        return "MemoryStore()"

    def _keep(self, records: pa.Table | Updates | None, after: StorePosition) -> None:
        """Nothing outlives the process."""

    def export_to(self, folder: Address) -> Snapshot:
        """Refused: ``InvalidInput``, or ``NotReady`` as any store within a resync."""
        self._settled(self._standing)
        folder = as_folder(folder)
        raise InvalidInput(
            f"A store in memory has no files to seal in {folder}: use AppendLogStore or RocksStore to export."
        )
