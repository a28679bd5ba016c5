"""Removes data files of an Iceberg table that no snapshot names: those of failed jobs and of expired snapshots.

A data file has the table's id in its name, and the sequence number as which its job was to be committed. Catalogs
refuse a commit whose number the table has reached, or whose table has another id. So a file whose number was reached,
and that no snapshot names, can never become part of the table, however slow its job is. Clocks decide only when it is
removed. Files of another table at the same location stay: a table that was renamed leaves its location to the next one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from strandline.errors import WrongKind
from strandline.storage.disk import is_linked
from strandline.tables.files.layout import job_name, version_in
from strandline.tables.iceberg.files import location_path

if TYPE_CHECKING:
    from pyiceberg.table import Table

_NUMBERED_FORMAT: Final = 2
"""Tables of older formats have no sequence numbers."""
_LOGGER: Final = logging.getLogger(__name__)


def remove_orphans(table: Table, before: datetime) -> int:
    """Remove unnamed data files that were written before a time; returns how many. ``table`` was loaded just now."""
    metadata: Any = table.metadata
    if metadata.format_version < _NUMBERED_FORMAT:
        return 0
    local = location_path(table.metadata.location.rstrip("/"))
    if local is not None and is_linked(local, "data"):
        raise WrongKind(
            f"The folder of data files at {table.metadata.location} is a symbolic link, which may lead anywhere: "
            "nothing was removed. Replace it by a folder."
        )
    reached, named = metadata.last_sequence_number, _named(table)
    gone = 0
    for found in _listed(table):
        number = version_in(found.base_name)
        is_old = found.mtime is not None and found.mtime < before
        if not is_old or number is None or number > reached or found.base_name in named:
            continue
        if job_name(number, str(metadata.table_uuid)) in found.base_name:
            with contextlib.suppress(FileNotFoundError):  # another vacuum was faster
                table.io.delete(f"{_folder(table)}/{found.base_name}")
                gone += 1
    return gone


def _folder(table: Table) -> str:
    return f"{table.metadata.location.rstrip('/')}/data"


def _named(table: Table) -> set[str]:
    """The names of the files that any snapshot has, of all branches and tags. They are unique."""
    manifests = {one.manifest_path: one for snapshot in table.snapshots() for one in snapshot.manifests(table.io)}
    entries = (one.fetch_manifest_entry(table.io, discard_deleted=True) for one in manifests.values())
    return {entry.data_file.file_path.rpartition("/")[2] for some in entries for entry in some}


def _listed(table: Table) -> Iterator[Any]:
    """The files in the folder of the follower's data files."""
    from pyiceberg.io.pyarrow import PyArrowFileIO

    if not isinstance(table.io, PyArrowFileIO):
        _LOGGER.warning(
            "Data files of %s that no snapshot names stay: %s cannot list them. Use the file access of pyarrow "
            "(py-io-impl=pyiceberg.io.pyarrow.PyArrowFileIO).",
            *(".".join(table.name()), type(table.io).__name__),
        )
        return
    scheme, netloc, path = table.io.parse_location(_folder(table), table.io.properties)
    store = table.io.fs_by_scheme(scheme, netloc)
    listed = store.get_file_info(fs.FileSelector(path, allow_not_found=True))
    yield from (one for one in listed if one.type == fs.FileType.File)
