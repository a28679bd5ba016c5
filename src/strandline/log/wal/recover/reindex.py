"""Rebuilds the index of a file from its frames."""

from __future__ import annotations

import contextlib
from uuid import UUID

from strandline.formats.arrow.block import read_metadata
from strandline.formats.wal.folder import append_of
from strandline.formats.wal.index import Index, new_chain
from strandline.log.wal.names import data_name, salt_of
from strandline.log.wal.read.catalog import Located, damaged
from strandline.log.wal.read.scan import Hole, walk
from strandline.log.wal.write.journal import IndexWriter
from strandline.model.head import WriterId, WriterState
from strandline.storage.disk import Disk


def rebuild_index(folder: str, log_id: UUID, first: int, *, disk: Disk) -> None:
    """Durably replace the index of the file that begins at ``first`` by what its frames tell; the caller has the lock.

    Interrupted, it leaves a shorter index, which is no less right. ``CorruptData`` if the file is damaged: its index is
    then as it was.
    """
    path = f"{folder}/{data_name(first)}"
    rows: list[tuple[Located, dict[WriterId, WriterState]]] = []
    position = 0
    for found in walk(path, disk.size(path), salt=salt_of(log_id), disk=disk):
        if isinstance(found, Hole):
            raise damaged(path, found.at, found.why)
        info = found.info
        if not info.count:
            position = found.end
            continue
        offset = info.first - 1
        where = f"{path} at byte {found.start}"
        append = append_of(read_metadata(found.block, where), where)
        writers: dict[WriterId, WriterState] = {}
        if append is not None:
            writers[append[0]] = WriterState(append[1], offset, offset, info.count, info.timestamp * 1000)
        size = found.end - found.start
        rows.append((Located(path, found.start, size, offset, offset + info.count, info.term, info.timestamp), writers))
    index = IndexWriter(folder, first, Index([], 0, new_chain(log_id, first)), position, disk=disk)
    with contextlib.closing(index):
        for frame, appends in rows:
            for writer, state in appends.items():
                index.saw(writer, state)
            index.passed(frame)
        index.finish()
    disk.sync_folder(folder)
