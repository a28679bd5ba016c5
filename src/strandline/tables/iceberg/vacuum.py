"""Expires snapshots of an Iceberg table, and removes data files that no snapshot names: also those of failed jobs.

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
from strandline.tables.iceberg.history import ancestors, current_since
from strandline.tables.iceberg.table import FollowedIceberg, IcebergVersion, listed_files, table_updates

if TYPE_CHECKING:
    from pyiceberg.table import Table

_NUMBERED_FORMAT: Final = 2
"""Tables of older formats have no sequence numbers."""
_LOGGER: Final = logging.getLogger(__name__)


def expire(followed: FollowedIceberg, version: IcebergVersion, before: datetime) -> None:
    """Expire older snapshots, but none back to the follower's last commit, and none that was current since.

    Those may have readers who began before they were replaced. ``Conflict`` if a branch or a tag was moved since
    ``version`` was opened: catalogs drop a branch whose snapshot expires, and the current snapshot is that of one.
    """
    proof, table = followed.last_commit(version, followed.log_of(version)).version, version.table
    needed = set()
    for snapshot in ancestors(version.metadata):
        needed.add(snapshot.snapshot_id)
        if snapshot.snapshot_id == proof:
            break
    limit = int(before.timestamp() * 1000)
    needed |= current_since(table.metadata, limit) | {ref.snapshot_id for ref in table.metadata.refs.values()}
    old = [
        one.snapshot_id
        for one in table.metadata.snapshots
        if one.timestamp_ms < limit and one.snapshot_id not in needed
    ]
    if old:
        refs = {name: ref.snapshot_id for name, ref in table.metadata.refs.items()}
        followed.commit_updates(table, refs, table_updates().RemoveSnapshotsUpdate(snapshot_ids=old))


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
    # Of all branches and tags. The names are unique.
    named = {file.file_path.rpartition("/")[2] for file in listed_files(table, *table.snapshots())}
    reached = metadata.last_sequence_number
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
