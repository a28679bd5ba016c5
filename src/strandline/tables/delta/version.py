"""One version of a Delta table, read from a handle of ``deltalake``; and its shape against that of its follower."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from strandline.errors import Diverged, InvalidInput, MissingExtra
from strandline.model.addresses import split_address
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.delta.files import DeltaFiles, table_folder
from strandline.tables.files.followed import REMEDY, TableVersion
from strandline.tables.files.layout import is_data_file, job_name
from strandline.tables.files.paths import is_inside, outside
from strandline.tables.files.recorded import MODE_KEY, check_recorded
from strandline.tables.rows.logged import refuse_untyped
from strandline.tables.rows.shape import TableShape
from strandline.values.schema.evolution import Evolution

if TYPE_CHECKING:
    from deltalake import DeltaTable

LOG_PROPERTY: Final = "strandline.log_id"
_APPEND_ONLY: Final = "delta.appendOnly"
_DELETION_VECTORS: Final = "deletionVectors"
_CONFUSED: Final = re.compile(r"%[0-9A-Fa-f]{2}|\\|[\x00-\x1f\x7f]")
"""``deltalake`` decodes paths twice, so that ``a%20b`` is the folder ``a b``, and takes a backslash for a slash."""


@dataclass(frozen=True)
class DeltaVersion(TableVersion):
    """See :class:`~strandline.tables.files.followed.TableVersion`."""

    handle: DeltaTable | None
    store: DeltaFiles
    made: pa.Schema | None = None
    """The columns of a table that is created, or of one whose rows are all replaced."""
    since: Cursor | None = None
    """Where the rows of a table begin that is not there yet, or that was created for this commit."""

    @classmethod
    def of(cls, table: DeltaTable, store: DeltaFiles) -> DeltaVersion:
        """The version that a handle is at now: operations move it."""
        metadata, number = table.metadata(), table.version()
        return cls(id=str(metadata.id), number=number, properties=metadata.configuration, handle=table, store=store)

    @property
    def table(self) -> DeltaTable:
        """The handle, of a table that is there."""
        if self.handle is None:
            raise AssertionError("there is no table yet")
        return self.handle

    @property
    def is_replaced(self) -> bool:
        """Whether a commit on it replaces all rows."""
        return self.made is not None and self.since is None

    @property
    def columns(self) -> pa.Schema:
        """The columns, as Arrow has them."""
        return pa.schema(self.table.schema().to_arrow()) if self.made is None else self.made

    @property
    def files(self) -> DeltaFiles:
        """The data files."""
        return self.store

    @property
    def readable(self) -> DeltaFiles:
        """The data files, and how those of other writers are partitioned."""
        others = {path: found for path, found in self.partitions.items() if not is_data_file(path)}
        return replace(self.store, partitions=others) if others else self.store

    @cached_property
    def partitions(self) -> dict[str, dict[str, pa.Scalar]]:
        """The values of each file's partition, by its path; nothing for a table without partitions."""
        if self.handle is None or not self.partition_columns:
            return {}
        adds = pa.table(self.handle.get_add_actions(flatten=True))
        columns = [adds.column(f"partition.{name}") for name in self.partition_columns]
        rows = zip(adds.column("path").to_pylist(), *columns, strict=True)
        return {unquote(path): dict(zip(self.partition_columns, found, strict=True)) for path, *found in rows}

    @property
    def partition_columns(self) -> list[str]:
        """The columns by which the table is partitioned."""
        return [] if self.handle is None else list(self.handle.metadata().partition_columns)

    @property
    def job(self) -> str:
        """A name of its own, but for a rebuild: letters of a later rebuild are told by it."""
        return super().job if self.is_replaced else job_name(self.number + 1, str(CHANCE.uuid()))

    @property
    def joining_job(self) -> str:
        """A name without a version: only VACUUM removes such files, since earlier versions may need them."""
        return str(CHANCE.uuid())

    @property
    def log(self) -> str | None:
        """The log that the table follows, or that of its first letters; None for a table of another program."""
        return self.properties.get(LOG_PROPERTY)

    def listed_files(self) -> dict[str, tuple[str, int]]:
        """Path to its form in the history, and size; ``CorruptData`` for a file that is not within the folder."""
        if self.handle is None:
            return {}
        adds = pa.table(self.handle.get_add_actions(flatten=True))
        paths, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
        for path in paths:
            if not is_inside(path):
                raise outside(path, self.handle.table_uri)
        return {unquote(path): (path, size) for path, size in zip(paths, sizes, strict=True)}

    def refuse_deletion_vectors(self) -> None:
        """``InvalidInput`` if another writer has deleted rows without writing their file again."""
        if self.handle is None or _DELETION_VECTORS not in (self.handle.protocol().reader_features or ()):
            return
        files = pa.table(self.handle.deletion_vectors()).num_rows
        if files:
            raise InvalidInput(
                f"Another writer deleted rows of the table {self.handle.table_uri} with deletion vectors, in "
                f"{files} of its files, and a follower that writes those again would bring the rows back: remove the "
                "vectors with REORG TABLE … APPLY (PURGE), or build the table again."
            )

    def check_shape(self, shape: TableShape, *, is_rebuilt: bool = False) -> None:
        """``InvalidInput``, ``Diverged`` or ``SchemaRefused`` if it does not keep what its follower writes."""
        url = self.store.url
        if MODE_KEY not in self.properties or LOG_PROPERTY not in self.properties:
            raise Diverged(f"The table {url} was replaced by another one at the same place. {REMEDY}")
        check_recorded(self.properties, shape, url)
        if shape.is_keyed:
            self.refuse_append_only(f"a table of mode {shape.kind!r} replaces rows")
        library = deltalake_library().Schema
        if self.needed_change(shape, is_rebuilt=is_rebuilt) is None and (
            self.table.schema() != library.from_arrow(shape.schema())
            or self.partition_columns != ([] if shape.layout is None else shape.layout.names)
        ):
            refuse_untyped(self.columns, shape, url)
            raise Diverged(
                f"The columns of the table {url} were changed, so that its follower cannot write to it: change them "
                "back, repair it ('strandline table repair'), or follow into a new table."
            )

    def refuse_append_only(self, why: str) -> None:
        """``InvalidInput`` for a table that only takes new rows."""
        if str(self.properties.get(_APPEND_ONLY)).lower() == "true":
            raise InvalidInput(
                f"The table {self.store.url} has the property {_APPEND_ONLY}, and {why}: unset the property, or follow "
                "into another table."
            )

    def needed_change(self, shape: TableShape, *, is_rebuilt: bool = False) -> Evolution | None:
        """The change of a typed table's columns, if any; ``SchemaRefused`` if the values no longer fit into it."""
        if not shape.is_typed:
            return None
        # Both as Delta has them: it knows fewer types than Arrow.
        wanted = pa.schema(deltalake_library().Schema.from_arrow(shape.schema()).to_arrow())
        return shape.evolution(self.columns, wanted, is_rebuilt=is_rebuilt)


def deltalake_library() -> Any:
    """The library, or ``MissingExtra``."""
    try:
        import deltalake
    except ImportError as error:
        raise MissingExtra("Delta tables need the extra 'delta': pip install 'strandline[delta]'.") from error
    return deltalake


def check_folder(url: str) -> None:
    """``InvalidInput`` for a folder on another host, or one that ``deltalake`` would confuse with another one."""
    folder = table_folder(url)
    if folder is None:
        return
    host = split_address(url).netloc if "://" in url else ""
    if host:
        raise InvalidInput(f"{url} names the host {host}, and a folder is on this machine: write file:///path.")
    found = _CONFUSED.search(os.path.abspath(folder))  # noqa: PTH100 - text, as everywhere
    if found:
        raise InvalidInput(
            f"The path {folder!r} has {found[0]!r} in it, which deltalake takes for another character: name another "
            "folder."
        )
