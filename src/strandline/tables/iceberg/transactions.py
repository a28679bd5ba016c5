"""Transactions of ``pyiceberg`` that remember the metadata of their table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from strandline.tables.rows.partitions import CALENDAR

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction


def transaction_on(table: Table) -> Transaction:
    """A transaction on the state of a table. Nothing changes the metadata that it gives.

    The library's own copies the metadata, with all snapshots, each time that it is asked for it, seventeen times for a
    commit: with some hundred snapshots that were most of its time. Updates change no object, so that none needs a copy.
    """
    found: Transaction = _kind()(table)
    return found


def producer_on(transaction: Transaction, io: Any, summary: dict[str, str], *, is_replacing: bool) -> Any:
    """What makes the snapshot of a commit with this summary; ``is_replacing``: it removes files."""
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _OverwriteFiles

    if not is_replacing:
        return _told(transaction.update_snapshot(snapshot_properties=summary).merge_append())

    class Replacing(_OverwriteFiles):
        """Drops manifests that list deleted files only: the library keeps them for ever."""

        def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
            return [
                one
                for one in manifests
                if one.added_snapshot_id == self.snapshot_id or one.has_added_files() or one.has_existing_files()
            ]

    return _told(Replacing(Operation.OVERWRITE, transaction, io, snapshot_properties=summary))


def _told(producer: Any) -> Any:
    """Let a snapshot count its partitions also if their days or hours are of years that the library cannot write."""
    summed: Callable[[dict[str, str]], Any] = producer._summary  # noqa: SLF001 - it has no other name

    def summary(given: dict[str, str]) -> Any:
        files = [*producer._added_data_files, *producer._deleted_data_files]  # noqa: SLF001
        exact = [(file.partition, at, file.partition[at]) for file in files for at in range(len(file.partition))]
        fields = producer._transaction.table_metadata.spec().fields  # noqa: SLF001
        try:
            for record, at, value in exact:
                known = CALENDAR.get(str(fields[at].transform))
                if known is not None and value is not None:
                    record[at] = min(max(value, known.start), known.stop - 1)
            return summed(given)
        finally:
            for record, at, value in exact:
                record[at] = value

    producer._summary = summary  # noqa: SLF001
    return producer


@cache
def _kind() -> Any:
    from pyiceberg.table import Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import _apply_table_update, _TableMetadataUpdateContext

    def updated(metadata: TableMetadata, updates: tuple[Any, ...]) -> TableMetadata:
        context = _TableMetadataUpdateContext()
        for one in updates:
            metadata = _apply_table_update(one, metadata, context)
        return metadata

    class Remembering(Transaction):
        _seen: tuple[TableMetadata, tuple[Any, ...], TableMetadata] | None = None

        @property
        def table_metadata(self) -> TableMetadata:
            base, updates = self._table.metadata, self._updates
            if not updates:
                return base
            if self._seen is None or self._seen[0] is not base or self._seen[1] is not updates:
                self._seen = base, updates, updated(base, updates)
            return self._seen[2]

    return Remembering
