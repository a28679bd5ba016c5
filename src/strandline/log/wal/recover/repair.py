"""Crash recovery: keeps the torn tail aside and truncates it, rewrites frames that may be unsynced."""

from __future__ import annotations

import contextlib
import logging
from itertools import pairwise
from typing import Final
from uuid import UUID

from strandline.errors import NotFound
from strandline.formats.wal.index import Index, new_chain
from strandline.log.wal.names import DATA, INDEX, KEPT, NEW, TORN, data_name, index_name, salt_of, torn_name
from strandline.log.wal.read.catalog import Located, damaged
from strandline.log.wal.read.scan import Hole, located, walk
from strandline.log.wal.recover.scan_tail import Examined, Torn
from strandline.log.wal.write.journal import IndexWriter
from strandline.model.head import WriterId, WriterState
from strandline.storage.disk import Disk

_LOGGER: Final = logging.getLogger(__name__)


def repair(folder: str, found: Examined, *, disk: Disk) -> None:
    """Cut what is torn, and make durable what is about to be served. Whatever interrupts it, it can be done again."""
    for torn in found.torn:
        _LOGGER.warning(
            "%s/%s ends within a write that a crash cut short (%s): %d bytes from byte %d on are kept aside.",
            folder, data_name(torn.first), torn.why, torn.size, torn.at,
        )  # fmt: skip
        _set_aside(folder, torn, disk=disk)
    if found.torn:
        disk.sync_folder(folder)  # the pieces that are kept, before anything is cut
    for torn in found.torn:
        if torn.first != found.place.first:
            disk.remove(f"{folder}/{index_name(torn.first)}")
            disk.remove(f"{folder}/{data_name(torn.first)}")
    _settle(folder, found, disk=disk)
    drop_below(folder, found.firsts, found.kept.start, disk=disk)
    disk.remove(f"{folder}/{KEPT}{NEW}")
    # Names too: of a file that was just begun, and of those that are gone.
    disk.sync_folder(folder)


def _set_aside(folder: str, torn: Torn, *, disk: Disk) -> None:
    """Keep what is about to be cut, for whoever wants to know what it was."""
    data = disk.read(f"{folder}/{data_name(torn.first)}", torn.at)
    number = 0
    while data:
        path = f"{folder}/{torn_name(torn.first, torn.at, number)}"
        try:
            if disk.read(path) == data:  # by a repair that was interrupted
                return
        except NotFound:
            disk.write_new(path, [data])
            return
        number += 1


def _settle(folder: str, found: Examined, *, disk: Disk) -> None:
    path, place = f"{folder}/{data_name(found.place.first)}", found.place
    file = disk.open_append(path)
    with contextlib.closing(file):
        if file.size() > place.size:
            file.cut(place.size)
        if found.sure < place.size:
            # A process whose sync failed, and that died, leaves bytes that can be read, and that a sync passes over:
            # on Linux they count as written. The same bytes written again are dirty again. Nothing is cut for it, so
            # that a crash in between loses nothing.
            file.rewrite(found.sure, [disk.read(path, found.sure, place.size - found.sure)])
        file.sync()


def drop_below(folder: str, firsts: list[int], start: int, *, disk: Disk) -> list[int]:
    """Remove the files that hold nothing from ``start`` on, oldest first; returns their first offsets."""
    dropped = [first for first, following in pairwise(firsts) if following <= start]
    if dropped:
        remove_files(folder, dropped, disk=disk)
    firsts[: len(dropped)] = []
    return dropped


def remove_files(folder: str, firsts: list[int], *, disk: Disk) -> None:
    """Remove files of frames, each with its index and with what was once cut off it."""
    beside: dict[str, list[str]] = {}
    for row in disk.scan(folder):
        if row.name.endswith((INDEX, TORN)):
            beside.setdefault(row.name.partition(".")[0], []).append(row.name)
    for first in firsts:
        for name in beside.get(data_name(first).removesuffix(DATA), ()):
            disk.remove(f"{folder}/{name}")
        disk.remove(f"{folder}/{data_name(first)}")


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
        if found.info.count:
            rows.append(located(path, found))
        else:
            position = found.end
    index = IndexWriter(folder, first, Index([], 0, new_chain(log_id, first)), position, disk=disk)
    with contextlib.closing(index):
        for frame, appends in rows:
            for writer, state in appends.items():
                index.saw(writer, state)
            index.passed(frame)
        index.finish()
    disk.sync_folder(folder)
