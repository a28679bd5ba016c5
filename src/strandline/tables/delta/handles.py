"""Identity, columns and data files of one version of a Delta table, read from a handle of ``deltalake``."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from strandline.errors import InvalidInput, MissingExtra
from strandline.model.addresses import split_address
from strandline.tables.delta.files import table_folder
from strandline.tables.files.paths import is_inside, outside
from strandline.tables.files.recorded import MODE_KEY

if TYPE_CHECKING:
    from deltalake import DeltaTable

LOG_PROPERTY: Final = "strandline.log_id"
_DELETION_VECTORS: Final = "deletionVectors"
_CONFUSED: Final = re.compile(r"%[0-9A-Fa-f]{2}|\\|[\x00-\x1f\x7f]")
"""``deltalake`` decodes paths twice, so that ``a%20b`` is the folder ``a b``, and takes a backslash for a slash."""


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


def mode_of(table: DeltaTable) -> str | None:
    """The mode of a table, as its follower recorded it; None for a table that follows no log."""
    mode = table.metadata().configuration.get(MODE_KEY)
    return None if mode is None else str(mode)


def log_of(table: DeltaTable) -> str | None:
    """The id of the log that a table follows; None for a table of another program.

    Of dead letters: the one for which their table was created.
    """
    found = table.metadata().configuration.get(LOG_PROPERTY)
    return None if found is None else str(found)


def data_files(table: DeltaTable) -> dict[str, tuple[str, int]]:
    """The data files of a version: path to the path as the table's history has it, and size.

    For workers, which read whole files: ``InvalidInput`` if rows of one are deleted by a deletion vector.
    """
    refuse_deletion_vectors(table)
    return listed_files(table)


def listed_files(table: DeltaTable) -> dict[str, tuple[str, int]]:
    """The same, also of files with deletion vectors. ``CorruptData`` if one is not within the table's folder."""
    adds = pa.table(table.get_add_actions(flatten=True))
    paths, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
    for path in paths:
        if not is_inside(path):
            raise outside(path, table.table_uri)
    return {unquote(path): (path, size) for path, size in zip(paths, sizes, strict=True)}


def refuse_deletion_vectors(table: DeltaTable) -> None:
    """``InvalidInput`` if another writer has deleted rows without writing their file again."""
    if _DELETION_VECTORS not in (table.protocol().reader_features or ()):
        return
    files = pa.table(table.deletion_vectors()).num_rows
    if files:
        raise InvalidInput(
            f"Another writer deleted rows of the table {table.table_uri} with deletion vectors, in "
            f"{files} of its files, and a follower that writes those again would bring the rows back: remove the "
            "vectors with REORG TABLE … APPLY (PURGE), or build the table again."
        )


def columns_of(table: DeltaTable) -> pa.Schema:
    """The columns of a table, as Arrow has them."""
    return pa.schema(table.schema().to_arrow())


def id_of(table: DeltaTable) -> str:
    """The table's own id."""
    return str(table.metadata().id)
