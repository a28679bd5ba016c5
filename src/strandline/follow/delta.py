"""A Delta table that follows a log, exactly once, through ``deltalake``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from strandline.follow.sink import remaining, without_key
from strandline.model.cursor import Cursor
from strandline.model.errors import (
    Diverged,
    Fenced,
    InvalidInput,
    MissingExtra,
    StorageError,
)
from strandline.model.records import READ_SCHEMA, Op
from strandline.storage.disk import DISK, Disk

if TYPE_CHECKING:
    from deltalake import DeltaTable

Mode = Literal["latest", "append"]

LATEST_SCHEMA: Final = pa.schema(
    [READ_SCHEMA.field(name) for name in ("key", "value", "offset", "timestamp", "headers")]
)
"""The columns of a table with one row per key."""

_LOG_PROPERTY: Final = "strandline.log_id"
_MODE_PROPERTY: Final = "strandline.mode"


def _deltalake() -> Any:
    try:
        import deltalake
    except ImportError as error:
        raise MissingExtra("Delta tables need the extra 'delta': pip install 'strandline[delta]'.") from error
    return deltalake


class DeltaSink:
    """A Delta table in step with a log: data and cursor are one commit, keyed by offset, so that nothing doubles.

    ``mode="latest"`` keeps one row per key, the newest by offset; deletes and purges remove it, a null value is a row,
    and a record without key is refused as ``NullKey``. ``mode="append"`` keeps every change.

    Two followers of one table cannot both commit: the table format refuses the second, which gets ``Fenced``. The
    cursor is the Delta application transaction ``strandline/<log id>/<name>``; its version is the next offset.
    """

    def __init__(
        self,
        url: str,
        *,
        mode: Mode = "latest",
        name: str = "default",
        options: Mapping[str, str] | None = None,
        disk: Disk = DISK,
    ) -> None:
        """The table at ``url``, which is created by the first apply; ``options`` are its storage options."""
        if mode not in ("latest", "append"):
            raise InvalidInput(f"A Delta sink's mode is 'latest' or 'append', not {mode!r}.")
        self._url = url
        self._mode = mode
        self._name = name
        self._options = dict(options or {})
        self._disk = disk

    def __repr__(self) -> str:
        return f"DeltaSink({self._url!r}, mode={self._mode!r}, name={self._name!r})"

    @property
    def mode(self) -> Mode:
        """What the table keeps."""
        return self._mode

    @property
    def url(self) -> str:
        """Where the table is."""
        return self._url

    def cursor(self, log_id: UUID) -> Cursor | None:
        """How far the table has applied that log; None if there is no table yet."""
        return self._cursor_in(self._open(), log_id)

    def apply(self, records: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        """Commit the range with its cursor, exactly once; see :class:`~strandline.follow.sink.Sink`."""
        # One handle for the look and the commit: what others commit in between makes the commit fail.
        table = self._open()
        at = self._cursor_in(table, since.log_id)
        todo = remaining(records, since=since, upto=upto, at=at)
        if todo is None or (at == upto and not todo.num_rows):
            return
        if self._mode == "latest":
            _refuse_null_keys(todo)
            todo = newest_per_key(todo)
        try:
            if table is None:
                table = self._create(since)
            self._commit(table, todo, upto)
        except _deltalake().exceptions.CommitFailedError as error:
            raise Fenced(
                f"Another follower changed {self._url} at the same time; this one committed nothing and must stop. "
                f"Keep one follower per table. ({error})"
            ) from error
        except (_deltalake().exceptions.DeltaError, OSError) as error:
            raise StorageError(
                f"The table {self._url} could not be committed, and stays at its cursor: {error}"
            ) from error
        self._make_durable(table)

    # --- the table ---------------------------------------------------------------------------------------------

    def _open(self) -> DeltaTable | None:
        delta = _deltalake()
        try:
            table: DeltaTable = delta.DeltaTable(self._url, storage_options=self._options or None)
        except delta.exceptions.TableNotFoundError:
            return None
        except (delta.exceptions.DeltaError, OSError) as error:
            raise StorageError(f"The table {self._url} could not be opened: {error}") from error
        return table

    def _application(self, log_id: UUID) -> str:
        return f"strandline/{log_id}/{self._name}"

    def _cursor_in(self, table: DeltaTable | None, log_id: UUID) -> Cursor | None:
        if table is None:
            return None
        version = table.transaction_version(self._application(log_id))
        if version is not None:
            self._check_mode(table)
            return Cursor(log_id, version)
        known = table.metadata().configuration.get(_LOG_PROPERTY)
        raise Diverged(
            f"The table {self._url} does not follow log {log_id} as {self._name!r}, but "
            + (f"log {known}" if known else "no log at all")
            + ": give this log a table of its own, or remove that one to build it again."
        )

    def _check_mode(self, table: DeltaTable) -> None:
        mode = table.metadata().configuration.get(_MODE_PROPERTY)
        if mode != self._mode:
            raise InvalidInput(f"The table {self._url} was made with mode={mode!r}; open it with that mode.")

    def _schema(self) -> pa.Schema:
        return LATEST_SCHEMA if self._mode == "latest" else READ_SCHEMA

    def _properties(self, cursor: Cursor) -> Any:
        delta = _deltalake()
        transaction = delta.Transaction(self._application(cursor.log_id), cursor.next)
        return delta.CommitProperties(
            app_transactions=[transaction], custom_metadata={"strandline.cursor": str(cursor)}
        )

    def _create(self, since: Cursor) -> DeltaTable:
        table: DeltaTable = _deltalake().DeltaTable.create(
            self._url,
            schema=self._schema(),
            mode="error",
            configuration={_LOG_PROPERTY: str(since.log_id), _MODE_PROPERTY: self._mode},
            storage_options=self._options or None,
            commit_properties=self._properties(since),
            raise_if_key_not_exists=False,
        )
        return table

    def _commit(self, table: DeltaTable, records: pa.Table, upto: Cursor) -> None:
        properties = self._properties(upto)
        if not records.num_rows:
            table.create_write_transaction([], mode="append", schema=table.schema(), commit_properties=properties)
        elif self._mode == "append":
            _deltalake().write_deltalake(table, records, mode="append", commit_properties=properties)
        else:
            values = {name: f"new.{name}" for name in LATEST_SCHEMA.names}
            (
                table.merge(
                    records,
                    predicate="old.key = new.key",
                    source_alias="new",
                    target_alias="old",
                    commit_properties=properties,
                )
                .when_matched_delete(f"new.op <> {Op.PUT:d}")
                .when_matched_update(values)
                .when_not_matched_insert(values, predicate=f"new.op = {Op.PUT:d}")
                .execute()
            )

    def _make_durable(self, table: DeltaTable) -> None:
        """Sync what a commit wrote, if it is on a local disk: ``deltalake`` does not, and a slot may follow it."""
        root = _local_path(self._url)
        if root is None:
            return
        table.update_incremental()
        commit = PurePath(root, "_delta_log", f"{table.version():020d}.json")
        lines = [json.loads(line) for line in self._disk.read(str(commit)).splitlines()]
        data = [PurePath(root, unquote(line["add"]["path"])) for line in lines if "add" in line]
        for file in (*data, commit):
            self._disk.sync_file(str(file))
        for folder in {file.parent for file in (*data, commit)} | {PurePath(root)}:
            self._disk.sync_folder(str(folder))


def newest_per_key(records: pa.Table) -> pa.Table:
    """The newest record of each key, by offset; deletes are among them."""
    newest = records.select(["key", "offset"]).group_by("key").aggregate([("offset", "max")])
    if newest.num_rows == records.num_rows:
        return records
    return records.filter(pc.is_in(records.column("offset"), value_set=newest.column("offset_max").combine_chunks()))


def _refuse_null_keys(records: pa.Table) -> None:
    keys = records.column("key")
    if keys.null_count:
        first = pc.min(pc.filter(records.column("offset"), pc.is_null(keys))).as_py()
        raise without_key(first)


def _local_path(url: str) -> str | None:
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else None
