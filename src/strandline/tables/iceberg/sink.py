"""The Iceberg table sink: follows a log exactly once, through ``pyiceberg``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.errors import Conflict, InvalidInput, TransientStorageError
from strandline.model.arguments import Named, checked, shown
from strandline.storage.clock import CHANCE
from strandline.storage.env import SYSTEM, Env
from strandline.tables.files.data_files import write_file
from strandline.tables.files.part import in_schema
from strandline.tables.files.sink import FileTableSink
from strandline.tables.iceberg.files import iceberg_library, kept_in_iceberg
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.iceberg.vacuum import expire, remove_orphans
from strandline.tables.rows.kinds import Mode
from strandline.tables.rows.logged import Value, shape_of
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.rows.tombstones import Tombstones

SMALL_FILE: Final = 64 << 20
"""Files with fewer bytes are joined by ``optimize``."""
_TRIES: Final = 8
"""Attempts to expire snapshots beside other commits."""


@checked
class IcebergSink(FileTableSink):
    """An Iceberg table that follows a log: data and cursor are one snapshot, keyed by offset.

    ``mode``, ``value``, ``key``, ``tombstones``, ``transform`` and ``max_bad_share`` are those of
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
        shape = shape_of(mode, value, key, tombstones, transform)
        found = _catalog(catalog)
        letters = None
        if dead_letters is not None:
            letters = FollowedIceberg(found, dead_letters, DeadLetters(), f"{name}/{table}/dead-letters", env)
        super().__init__(
            *(FollowedIceberg(found, table, shape, name, env), shape, value, kept_in_iceberg),
            None if letters is None else lambda _: letters,
            max_bad_share,
        )

    def _forget(self, log_id: UUID) -> None:
        super()._forget(log_id)
        if self._letters is not None:
            self._letters("").known.pop(log_id, None)

    def optimized(self) -> int:
        """Join small files at the cursor; ``Conflict`` if its follower commits now: nothing was changed then."""
        version = self._existing()
        found = self._followed.last_commit(version, self._followed.log_of(version))
        sizes = self._followed.sizes(version)
        small = [path for path, size in sizes.items() if size < SMALL_FILE]
        if len(small) <= 1:
            return 0
        added, few, size = [], list[pa.Table](), 0
        for path in small:
            few.append(in_schema(version.files.read(path), version.columns))
            size += sizes[path]
            if size >= SMALL_FILE or path == small[-1]:
                added.append(
                    write_file(version.files, f"part-{version.job}-{CHANCE.uuid()}.parquet", pa.concat_tables(few))
                )
                few, size = [], 0
        self._followed.commit(replace(version, holder=found.holder), added, small, found.cursor)
        return len(small) - len(added)

    def vacuumed(self, hours: int, *, env: Env = SYSTEM) -> int:
        """Expire snapshots, and remove unnamed files; see :func:`~strandline.tables.maintain.operations.vacuum`."""
        before = datetime.fromtimestamp(env.clock.now() / 1_000_000, UTC) - timedelta(hours=hours)
        self._expire(before)
        with self._followed.named_errors():
            return remove_orphans(self._existing().table, before)

    def _expire(self, before: datetime) -> None:
        """Expire snapshots of the table as it is, again if it is changed at the same moment."""
        for _ in range(_TRIES):
            version = self._existing()
            try:
                expire(self._followed, version, before)
            except (Conflict, TransientStorageError):
                if self._existing().table.metadata_location == version.table.metadata_location:
                    raise
            else:
                return
        raise Conflict(f"The table {self.table} was changed each time its snapshots were to expire: try again.")


def _catalog(given: Any) -> Any:
    library = iceberg_library()
    if isinstance(given, library.catalog.Catalog):
        return given
    if isinstance(given, str) and given:
        try:
            return library.catalog.load_catalog(given)
        except Exception as error:
            raise InvalidInput(f"The catalog {shown(given)} cannot be loaded: {error}.") from error
    raise InvalidInput(f"A catalog is one of pyiceberg, or its name, not {shown(given)}.")
