"""Expires snapshots of an Iceberg table, and removes data files that no snapshot names: also those of failed jobs.

A data file has the table's id in its name, and the sequence number as which its job was to be committed. Catalogs
refuse a commit whose number the table has reached, or whose table has another id. So a file whose number was reached,
and that no snapshot names, can never become part of the table, however slow its job is. Clocks decide only when it is
removed. Files of another table at the same location stay: a table that was renamed leaves its location to the next one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from strandline.errors import WrongKind
from strandline.storage.disk import is_linked
from strandline.tables.files.layout import job_name, version_in
from strandline.tables.iceberg.files import location_path
from strandline.tables.iceberg.history import ancestors, current_since
from strandline.tables.iceberg.table import FollowedIceberg, IcebergVersion, table_updates

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table

_NUMBERED_FORMAT: Final = 2
"""Tables of older formats have no sequence numbers."""
_LOGGER: Final = logging.getLogger(__name__)


def expire(followed: FollowedIceberg, version: IcebergVersion, before: datetime, dense: datetime | None = None) -> int:
    """Expire older snapshots, but none back to the follower's last commit, and none that was current since.

    Returns how many. Those may have readers who began before they were replaced. Of snapshots that were replaced before
    ``dense`` only one a minute stays: each commit reads and writes the list of all. ``Conflict`` if a branch or a tag
    was moved since ``version`` was opened: catalogs drop a branch whose snapshot expires, and the current snapshot is
    that of one.
    """
    proof, table = followed.last_commit(version, followed.log_of(version)).version, version.table
    needed = set()
    for snapshot in ancestors(version.metadata):
        needed.add(snapshot.snapshot_id)
        if snapshot.snapshot_id == proof:
            break
    limit, thin = (int((time or before).timestamp() * 1000) for time in (before, dense))
    needed |= current_since(table.metadata, limit, thin) | {ref.snapshot_id for ref in table.metadata.refs.values()}
    old = [
        one.snapshot_id for one in table.metadata.snapshots if one.timestamp_ms < thin and one.snapshot_id not in needed
    ]
    if old:
        refs = {name: ref.snapshot_id for name, ref in table.metadata.refs.items()}
        followed.commit_updates(table, refs, table_updates().RemoveSnapshotsUpdate(snapshot_ids=old))
    return len(old)


class NamedFiles:
    """The files that the snapshots of a table name. What a round has read, the next one knows: they never change."""

    def __init__(self) -> None:
        self._lists: dict[str, frozenset[str]] = {}
        """The manifests of each list, by their addresses."""
        self._manifests: dict[str, frozenset[str]] = {}
        """The names of the data files of each manifest."""

    def read(self, table: Table) -> None:
        """Read what the snapshots of a table name now, of all branches and tags; forget all others."""
        found: dict[str, ManifestFile] = {}
        lists: dict[str, frozenset[str]] = {}
        for snapshot in table.snapshots():
            known = self._lists.get(snapshot.manifest_list)
            if known is None:
                manifests = {one.manifest_path: one for one in snapshot.manifests(table.io)}
                found |= manifests
                known = frozenset(manifests)
            lists[snapshot.manifest_list] = known
        known_names = self._manifests
        self._manifests = {
            path: known_names[path] if path in known_names else _file_names(found[path], table)
            for path in frozenset().union(*lists.values())
        }
        self._lists = lists  # not before: the manifests of each known list are known

    @property
    def data(self) -> set[str]:
        """The names of data files, which are unique."""
        return set().union(*self._manifests.values())

    @property
    def metadata(self) -> set[str]:
        """The addresses of manifests and their lists."""
        return {*self._lists, *self._manifests}


def _file_names(manifest: ManifestFile, table: Table) -> frozenset[str]:
    entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    return frozenset(one.data_file.file_path.rpartition("/")[2] for one in entries)


def remove_orphans(table: Table, before: datetime, named: AbstractSet[str]) -> int:
    """Remove data files that are not ``named`` and were written before a time; returns how many.

    ``named`` are those of the snapshots of ``table``, which was loaded just now.
    """
    metadata: Any = table.metadata
    if metadata.format_version < _NUMBERED_FORMAT:
        return 0
    local = location_path(table.metadata.location.rstrip("/"))
    if local is not None and is_linked(local, "data"):
        raise WrongKind(
            f"The folder of data files at {table.metadata.location} is a symbolic link, which may lead anywhere: "
            "nothing was removed. Replace it by a folder."
        )
    reached = metadata.last_sequence_number
    gone = 0
    for found in _listed(table, "data"):
        number = version_in(found.base_name)
        is_old = found.mtime is not None and found.mtime < before
        if not is_old or number is None or number > reached or found.base_name in named:
            continue
        if job_name(number, str(metadata.table_uuid)) in found.base_name:
            with contextlib.suppress(FileNotFoundError):  # another vacuum was faster
                table.io.delete(f"{_folder(table, 'data')}/{found.base_name}")
                gone += 1
    return gone


def old_metadata(table: Table, before: datetime) -> list[str]:
    """Manifests, their lists and metadata files that were written before a time."""
    found = (one for one in _listed(table, "metadata") if one.mtime is not None and one.mtime < before)
    return [one.base_name for one in found if one.base_name.endswith((".avro", ".metadata.json"))]


def remove_metadata(table: Table, names: Sequence[str], named: AbstractSet[str]) -> int:
    """Remove those of some manifests, lists and metadata files that the table names no more; returns how many.

    ``named`` are those of its snapshots. ``table`` was loaded just now, and its follower has committed to it after they
    were listed: so the commit of a job that had written one of them is refused, whatever the clocks say, as its branch
    has moved. With branches besides the main one nothing is removed.
    """
    metadata = table.metadata
    if any(ref.snapshot_ref_type == "branch" for name, ref in metadata.refs.items() if name != "main"):
        return 0
    needed = {table.metadata_location, *named, *[one.metadata_file for one in metadata.metadata_log]}
    needed |= {one.statistics_path for one in (*metadata.statistics, *metadata.partition_statistics)}
    gone = {*names} - {path.rpartition("/")[2] for path in needed if path}
    for name in gone:
        with contextlib.suppress(FileNotFoundError):
            table.io.delete(f"{_folder(table, 'metadata')}/{name}")
    return len(gone)


def _folder(table: Table, name: str) -> str:
    return f"{table.metadata.location.rstrip('/')}/{name}"


def _listed(table: Table, name: str) -> Iterator[Any]:
    """The files in the folder of the follower's data files, or of the table's metadata."""
    from pyiceberg.io.pyarrow import PyArrowFileIO

    if not isinstance(table.io, PyArrowFileIO):
        _LOGGER.warning(
            "Data files of %s that no snapshot names stay: %s cannot list them. Use the file access of pyarrow "
            "(py-io-impl=pyiceberg.io.pyarrow.PyArrowFileIO).",
            *(".".join(table.name()), type(table.io).__name__),
        )
        return
    scheme, netloc, path = table.io.parse_location(_folder(table, name), table.io.properties)
    store = table.io.fs_by_scheme(scheme, netloc)
    listed = store.get_file_info(fs.FileSelector(path, allow_not_found=True))
    yield from (one for one in listed if one.type == fs.FileType.File)
