"""Joining of small files, within partitions, and ordered over files by the table's layout. Safe beside a follower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from strandline.errors import Conflict
from strandline.model.cursor import Cursor
from strandline.storage.clock import CHANCE
from strandline.tables.files.columns import in_schema
from strandline.tables.files.data_files import write_file
from strandline.tables.files.followed import FollowedTable, TableVersion
from strandline.tables.files.layout import WHOLE, covering, file_name, is_closed, version_in
from strandline.tables.files.part import FILE_BYTES, FILE_ROWS, KEYED_BYTES, TablePart
from strandline.tables.rows.partitions import FileLayout, PartitionValues, divided
from strandline.tables.rows.shape import TableShape
from strandline.tables.written import DataFile

SMALL_FILE: Final = 64 << 20
"""Files with fewer bytes are joined."""
JOINED_FILE: Final = 128 << 20
"""Bytes of the files that they are joined into, about."""
_ORDERED: Final = 512 << 20
"""Bytes in memory of rows that are ordered together."""
_TRIES: Final = 16
"""Attempts to commit beside a follower."""


def join_small_files(followed: FollowedTable[Any], shape: TableShape) -> int:
    """Join the small files of a table of all changes, or those of a history's versions that never change again.

    Returns by how many files it has fewer. The rows stay the same, and so does the cursor: a follower that commits
    meanwhile goes on. ``Conflict`` if another job removed the files, or changed the columns; nothing was changed then.
    """
    version, _ = _found(followed)
    sizes = {path: size for path, size in followed.sizes(version).items() if size < SMALL_FILE}
    if shape.is_keyed:
        sizes = {path: size for path, size in sizes.items() if is_closed(path)}
    by_partition: dict[PartitionValues, list[str]] = {}
    values = followed.file_partitions(version)
    for path in sizes:
        by_partition.setdefault(values.get(path, ()), []).append(path)
    added: list[DataFile] = []
    removed: list[str] = []
    job = version.joining_job

    def name() -> str:
        unique = f"{job}-{CHANCE.uuid()}"
        return file_name("closed", WHOLE, unique) if shape.is_keyed else f"part-{unique}.parquet"

    for paths in by_partition.values():
        for few, rows in _read(version, paths, sizes, shape.layout):
            added += _written(version, name, rows, shape.layout, sum(sizes[path] for path in few))
            removed += few
    if removed:
        _commit(followed, version, added, removed)
    return len(removed) - len(added)


def _found(followed: FollowedTable[Any]) -> tuple[TableVersion, Cursor]:
    """The newest version with its proved commit, and the cursor there."""
    version: TableVersion | None = followed.open_again()
    if version is None:
        raise Conflict(f"The table {followed.where} was removed while its files were joined.")
    found = followed.commit_in_effect(version, followed.log_of(version))
    return replace(version, found=found, holder=found.holder, keeps_rows=True), found.cursor


def _read(
    version: TableVersion, paths: Sequence[str], sizes: dict[str, int], layout: FileLayout | None
) -> Iterator[tuple[list[str], pa.Table]]:
    """The rows of some files of a partition, as many as are ordered together, or fill a file; never of one file."""
    few: list[str] = []
    rows: list[pa.Table] = []
    is_ordered = layout is not None and bool(layout.cluster)
    for path in paths if len(paths) > 1 else ():
        few.append(path)
        rows.append(in_schema(version.readable.read(path), version.columns))
        is_full = not is_ordered and sum(sizes[one] for one in few) >= JOINED_FILE
        if is_full or sum(one.nbytes for one in rows) >= _ORDERED:
            yield few, pa.concat_tables(rows)
            few, rows = [], []
    if len(few) > 1:
        yield few, pa.concat_tables(rows)


def _written(
    version: TableVersion, name: Callable[[], str], rows: pa.Table, layout: FileLayout | None, stored: int
) -> Iterator[DataFile]:
    """Write the rows, in the order of the layout, as files of about the same size."""
    for partition, some in divided(layout, rows):
        step = -(-some.num_rows // max(1, stored // JOINED_FILE))
        for start in range(0, some.num_rows, step):
            yield write_file(version.files, name(), some.slice(start, step), partition)


def _commit(
    followed: FollowedTable[Any], read: TableVersion, added: Sequence[DataFile], removed: Sequence[str]
) -> None:
    """Replace the files in one commit, also of a later version of the table, if it still has them.

    New files whose names tell a version that the table has reached by now count as orphans, and may be gone.
    """
    for _ in range(_TRIES):
        version, cursor = _found(followed)
        if any((version_in(file.path) or version.number + 1) <= version.number for file in added):
            raise Conflict(
                f"The table {followed.where} got {version.number - read.number:,} other commits while its files were "
                "joined, and the joined ones may have been removed as orphans: try again."
            )
        if version.columns != read.columns or not followed.sizes(version).keys() >= {*removed}:
            break
        try:
            followed.commit(version, added, removed, cursor)
        except Conflict:
            continue
        return
    raise Conflict(f"The table {followed.where} was changed each time its files were to be joined: try again.")


def joined_files(part: TablePart, paths: Sequence[str]) -> list[DataFile]:
    """Write the rows of some files again, in their order; of a history those of versions that never change again.

    Commits nothing. As many rows are in memory as one new file may have, and those of one old file.
    """
    added: list[DataFile] = []
    few: list[str] = []
    taken: list[pa.Table] = []
    rows = size = 0
    for path in paths:
        few.append(path)
        taken.append(in_schema(part.files.read(path), part.schema))
        rows, size = rows + taken[-1].num_rows, size + taken[-1].nbytes
        if path == paths[-1] or rows >= FILE_ROWS or size >= (KEYED_BYTES if part.shape.is_keyed else FILE_BYTES):
            if part.shape.is_keyed:
                added += part.split("closed", covering(few), pa.concat_tables(taken))
            else:
                added += part.appended(taken)
            few, taken, rows, size = [], [], 0, 0
    return added
