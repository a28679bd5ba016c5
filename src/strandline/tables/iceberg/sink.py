"""The Iceberg table sink: follows a log exactly once, through ``pyiceberg``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, InvalidInput, TransientStorageError
from strandline.model.arguments import Named, checked, shown
from strandline.model.cursor import Cursor
from strandline.storage.env import SYSTEM, Env
from strandline.tables.files.joining import join_small_files
from strandline.tables.files.sink import FileTableSink
from strandline.tables.files.upkeep import TrimCounts
from strandline.tables.iceberg.files import iceberg_library, kept_in_iceberg
from strandline.tables.iceberg.history import MINUTE
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.iceberg.vacuum import NamedFiles, expire, old_metadata, remove_metadata, remove_orphans
from strandline.tables.rows.kinds import Mode
from strandline.tables.rows.logged import Value, shape_of
from strandline.tables.rows.partitions import Layout
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.rows.tombstones import Tombstones

_DENSE: Final = timedelta(minutes=2)
"""For how long upkeep keeps each snapshot, and not only one a minute."""
_FEW_METADATA: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
_TRIES: Final = 8
"""Attempts to expire snapshots beside other commits."""


@checked
class IcebergSink(FileTableSink):
    """An Iceberg table that follows a log: data and cursor are one snapshot, keyed by offset.

    ``mode``, ``value``, ``key``, ``tombstones``, ``transform``, ``max_bad_share`` and ``layout`` are those of
    :class:`~strandline.tables.delta.sink.DeltaSink`. ``dead_letters`` names a second table for records that cannot
    become rows.

    The cursor is in the summary of each snapshot, and with the snapshot's id in a property of the table. Two followers
    of one table cannot both commit: one is ``Fenced``, as of a Delta table. A table that was rolled back, overwritten,
    changed by other writers, dropped or re-created is ``Diverged``; rewritten files (snapshots that replace files and
    keep all rows) and changed properties are allowed.
    """

    _followed: FollowedIceberg

    def __init__(
        self,
        catalog: Any,
        table: Named,
        *,
        mode: Mode = "latest",
        value: Value | None = None,
        key: str | Sequence[str] = (),
        tombstones: Tombstones | None = None,
        transform: Callable[[pa.Table], pa.Table] | None = None,
        dead_letters: str | None = None,
        max_bad_share: Any = 1.0,
        layout: Layout | None = None,
        name: Named = "default",
        env: Env = SYSTEM,
    ) -> None:
        """The table ``namespace.table`` in ``catalog``, created by the first apply.

        ``catalog`` is a catalog of pyiceberg, or a name that is configured for ``pyiceberg.catalog.load_catalog``.
        """
        for identifier in (table, dead_letters):
            if identifier is not None and not all(identifier.split(".")[-2:]):
                raise InvalidInput(f"{shown(identifier)} names no Iceberg table: write namespace.table.")
            if identifier is not None and not identifier.isprintable():
                raise InvalidInput(f"{shown(identifier)} names no Iceberg table: control characters are not allowed.")
            if identifier is not None and "." not in identifier:
                raise InvalidInput(f"{shown(identifier)} has no namespace: write namespace.table.")
        self.table = table
        """The identifier of the table."""
        shape = shape_of(mode, value, key, tombstones, transform, layout=layout)
        found = _catalog(catalog)
        letters = None
        if dead_letters is not None:
            letters = FollowedIceberg(found, dead_letters, DeadLetters(), f"{name}/{table}/dead-letters", env)
        super().__init__(
            *(FollowedIceberg(found, table, shape, name, env), shape, value, kept_in_iceberg),
            None if letters is None else lambda _: letters,
            max_bad_share,
            layout=layout,
        )
        if self._upkeep.is_wanted:
            self._followed.settings = _FEW_METADATA
        self._named = NamedFiles()

    def _forget(self, log_id: UUID) -> None:
        super()._forget(log_id)
        if self._letters is not None:
            self._letters("").known.pop(log_id, None)

    def _trimmed(self, version: Any, at: Cursor, seconds: float) -> TrimCounts:
        """Expire snapshots, then remove what was replaced before any that is kept, or may have readers."""
        now = datetime.fromtimestamp(self._followed.env.clock.now() / 1_000_000, UTC)
        before = now - timedelta(seconds=seconds)
        # What was written and replaced between two snapshots a minute apart may have readers, too.
        limit = before - 2 * timedelta(milliseconds=MINUTE) if seconds else before
        with self._followed.named_errors():
            old = old_metadata(version.table, limit)
        if old:  # by a wrong clock also those of a job that is about to commit: the branch moves, and it is refused
            self._followed.accept(version, at)
        self._expire(before, max(before, now - _DENSE))
        with self._followed.named_errors():
            table = self._existing().table
            self._named.read(table)
            orphans = remove_orphans(table, limit, self._named.data)
            return TrimCounts(orphans, remove_metadata(table, old, self._named.metadata))

    def optimized(self) -> int:
        """Join small files; see :func:`~strandline.tables.maintain.operations.optimize`."""
        self._existing()
        return join_small_files(self._followed, self._shape)

    def vacuumed(self, hours: int, *, env: Env = SYSTEM) -> int:
        """Expire snapshots, and remove unnamed files; see :func:`~strandline.tables.maintain.operations.vacuum`."""
        before = datetime.fromtimestamp(env.clock.now() / 1_000_000, UTC) - timedelta(hours=hours)
        self._expire(before)
        with self._followed.named_errors():
            table, named = self._existing().table, NamedFiles()
            named.read(table)
            return remove_orphans(table, before, named.data)

    def _expire(self, before: datetime, dense: datetime | None = None) -> None:
        """Expire snapshots of the table as it is, again if it is changed at the same moment."""
        for _ in range(_TRIES):
            version = self._existing()
            try:
                expire(self._followed, version, before, dense)
            except (Conflict, TransientStorageError):
                if self._existing().table.metadata_location == version.table.metadata_location:
                    raise
            else:
                return
        raise Conflict(f"The table {self.table} was changed each time its snapshots were to expire: try again.")


def _catalog(given: Any) -> Any:
    library = iceberg_library()
    if isinstance(given, library.catalog.Catalog):
        return _for_threads(given)
    if isinstance(given, str) and given:
        try:
            return _for_threads(library.catalog.load_catalog(given))
        except Exception as error:
            raise InvalidInput(f"The catalog {shown(given)} cannot be loaded: {error}.") from error
    raise InvalidInput(f"A catalog is one of pyiceberg, or its name, not {shown(given)}.")


class _ClientPerThread(threading.local):
    """The library's client of Hive, one for each thread: it has one connection, and answers carry no names."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._client = connect()  # in each thread that uses it

    def __enter__(self) -> Any:
        return self._client.__enter__()

    def __exit__(self, *raised: object) -> Any:
        return self._client.__exit__(*raised)


def _for_threads(catalog: Any) -> Any:
    """The catalog, which threads may use beside each other: a route commits several tables at once."""
    connect = getattr(catalog, "_create_hive_client", None)
    if connect is not None and not isinstance(catalog._client, _ClientPerThread):  # noqa: SLF001 - there is no other way
        catalog._client = _ClientPerThread(lambda: connect(catalog.properties))  # noqa: SLF001
    return catalog
