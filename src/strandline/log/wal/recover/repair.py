"""Creation and crash recovery: sets the torn tail aside and truncates it, rewrites frames that may be unsynced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Final
from uuid import UUID

from strandline.errors import CorruptData, NotFound
from strandline.formats.json.value_versions import ValueVersion
from strandline.formats.wal.folder import (
    SlotsFile,
    WalIdentity,
    decode_slots_file,
    encode_slots_file,
    encode_wal_identity,
)
from strandline.formats.wal.frame import FrameScanner
from strandline.formats.wal.index import Index, new_chain
from strandline.formats.wal.mark import Mark, encode_mark
from strandline.log.wal.names import (
    DATA,
    IDENTITY,
    INDEX,
    LEAD,
    MARK,
    NEW,
    SLOTS_FILE,
    TORN,
    data_name,
    firsts_in,
    index_name,
    torn_name,
)
from strandline.log.wal.read.catalog import damaged_file
from strandline.log.wal.recover.checks import FileCheck
from strandline.log.wal.recover.scan_tail import Examined, read_log_json
from strandline.log.wal.recover.walk import frames_of, walk
from strandline.log.wal.slots import write_slots_file
from strandline.log.wal.write.journal import IndexWriter, JournalPosition, encode_lead
from strandline.storage.disk import Disk, exists, replace_file
from strandline.storage.env import Env

_LOGGER: Final = logging.getLogger(__name__)
_READ_BYTES: Final = 8 << 20
"""Bytes copied at a time."""


def repair(folder: str, found: Examined, *, disk: Disk) -> None:
    """Truncate the torn tail, and make everything else durable. Can be interrupted and repeated."""
    for torn in found.torn:
        _LOGGER.warning(
            "%s/%s ends within a write that a crash interrupted (%s): %d bytes from byte %d on are set aside.",
            folder, data_name(torn.first), torn.why, torn.size, torn.at,
        )  # fmt: skip
        data = disk.read(f"{folder}/{data_name(torn.first)}", torn.at)
        if data:
            set_aside(folder, data, partial(torn_name, torn.first, torn.at), disk=disk)
    if found.torn:
        disk.sync_folder(folder)  # the pieces set aside, before anything is truncated
    for torn in found.torn:
        if torn.first != found.place.first:
            disk.remove(f"{folder}/{index_name(torn.first)}")
            disk.remove(f"{folder}/{data_name(torn.first)}")
    _settle(folder, found, disk=disk)
    drop_below(folder, found.firsts, found.kept.start, disk=disk)
    disk.remove(f"{folder}/{SLOTS_FILE}{NEW}")
    # Names too: of a file that was just begun, and of removed ones.
    disk.sync_folder(folder)


def set_aside(folder: str, data: bytes, name: Callable[[int], str], *, disk: Disk) -> None:
    """Set aside bytes that are about to be removed, for inspection, under the first name that is not taken."""
    for number in count():
        path = f"{folder}/{name(number)}"
        try:
            if disk.read(path) == data:  # an interrupted repair wrote it
                return
        except NotFound:
            disk.write_new(path, [data])
            return


def _settle(folder: str, found: Examined, *, disk: Disk) -> None:
    path, place = f"{folder}/{data_name(found.place.first)}", found.place
    file = disk.open_append(path)
    with contextlib.closing(file):
        if file.size() > place.size:
            file.cut(place.size)
        if found.sure < place.size:
            # A process whose sync failed, and that died, leaves bytes that can be read, but that a later sync skips:
            # Linux considers them written. Writing the same bytes again makes them dirty again. Nothing is truncated
            # for that, so that a crash in between loses nothing.
            file.rewrite(found.sure, [disk.read(path, found.sure, place.size - found.sure)])
        file.sync()


def drop_below(folder: str, firsts: list[int], start: int, *, disk: Disk) -> list[int]:
    """Remove the files without records from ``start`` on, oldest first; returns their first offsets."""
    dropped = [first for first, following in pairwise(firsts) if following <= start]
    if dropped:
        remove_files(folder, dropped, disk=disk)
    firsts[: len(dropped)] = []
    return dropped


def remove_files(folder: str, firsts: list[int], *, disk: Disk) -> None:
    """Remove files of frames, each with its index and its torn pieces."""
    beside: dict[str, list[str]] = {}
    for row in disk.scan(folder):
        if row.name.endswith((INDEX, TORN)):
            beside.setdefault(row.name.partition(".")[0], []).append(row.name)
    for first in firsts:
        for name in beside.get(data_name(first).removesuffix(DATA), ()):
            disk.remove(f"{folder}/{name}")
        disk.remove(f"{folder}/{data_name(first)}")


def rebuild_index(folder: str, log_id: UUID, first: int, *, disk: Disk) -> None:
    """Durably rebuild the index of the file that begins at ``first`` from its frames; the caller has the lock.

    If interrupted, it leaves a shorter index, which is valid, too. ``CorruptData`` if the file is damaged: its index is
    unchanged then.
    """
    path = f"{folder}/{data_name(first)}"
    size = disk.size(path)
    check = FileCheck(path, first, size, log_id=log_id)
    pieces = walk(path, size, is_own=frames_of(log_id), disk=disk)
    rows = [found for piece in pieces if (found := check.take(piece)) is not None]
    check.refuse()
    index = IndexWriter(folder, first, Index([], 0, new_chain(log_id, first)), check.begins, disk=disk)
    with contextlib.closing(index):
        for frame, writers in rows:
            index.passed(frame, writers)
        index.finish()
    disk.sync_folder(folder)


def create_if_absent(
    folder: str, values: Callable[[], Sequence[ValueVersion]], *, content_type: str | None = None, env: Env
) -> None:
    """Create an empty log in a folder that has none, with the value format ``values()``; the caller holds its lock.

    Leftovers of an interrupted creation are replaced. ``CorruptData`` if there is more: then this was a log.
    """
    if exists(f"{folder}/{IDENTITY}", disk=env.disk):
        return
    versions = values()  # which a new log may refuse: before anything is changed
    disk = env.disk
    if record_of_log(folder, disk=disk) is not None:
        raise CorruptData(
            f"{folder}/{IDENTITY} is missing, but there are records of a log beside it: restore the file."
        )
    remove_files(folder, firsts_in(disk.scan(folder)), disk=disk)
    begin(folder, SlotsFile(env.chance.uuid(), 0), versions, content_type=content_type, disk=disk)


def begin(
    folder: str, kept: SlotsFile, values: Sequence[ValueVersion], *, content_type: str | None = None, disk: Disk
) -> None:
    """Durably make a log without records, which begins at an offset."""
    write_slots_file(folder, kept, disk=disk)
    # Not the time of creation: the first record may be a copy of an older one, with its time.
    lead = encode_lead(kept.log_id, kept.start, JournalPosition(kept.start, 0, kept.start, 0, 0, {}))
    disk.write_new(f"{folder}/{data_name(kept.start)}", lead)
    disk.sync_folder(folder)
    write_identity(folder, WalIdentity(kept.log_id, tuple(values), content_type=content_type), disk=disk)


def write_identity(folder: str, identity: WalIdentity, *, disk: Disk) -> None:
    """Durably replace the identity file, as a whole."""
    path = f"{folder}/{IDENTITY}"
    replace_file(disk, path, encode_wal_identity(identity), temporary=f"{path}{NEW}")


def copy_range(
    source: str, start: int, end: int, target: str, *, lead: Sequence[bytes | memoryview] = (), disk: Disk
) -> None:
    """Durably write bytes of a file of frames to a new file, after the frame ``lead``."""
    with contextlib.closing(disk.open_append(target)) as file:
        file.write(lead)
        while start < end:
            piece = disk.read(source, start, min(_READ_BYTES, end - start))
            if not piece:
                raise damaged_file(source, start, f"it ends there, and was durable up to byte {end}")
            file.write([piece])
            start += len(piece)
        file.sync()


def take_back_seal(folder: str, *, disk: Disk) -> None:
    """Durably make a closed log one that was never sealed."""
    write_identity(folder, replace(read_log_json(folder, disk=disk), sealed=None), disk=disk)


def describe_copy(folder: str, mark: Mark, identity: WalIdentity, *, disk: Disk) -> None:
    """Turn copied files of frames in a folder into a log, without slots; the identity file is written last.

    The copy is sealed if the mark says that the log was when it was copied.

    The mark is of a clean end: a shorter log is recognised as incomplete.
    """
    disk.write_new(f"{folder}/{MARK}", [encode_mark(mark)])
    disk.write_new(f"{folder}/{SLOTS_FILE}", [encode_slots_file(SlotsFile(mark.log_id, mark.start))])
    copied = replace(identity, sealed=mark.next if mark.sealed else None)
    disk.write_new(f"{folder}/{IDENTITY}", [encode_wal_identity(copied)])


def record_of_log(folder: str, *, disk: Disk) -> str | None:
    """The name of a file that an interrupted creation of a log does not leave; None without any."""
    with contextlib.suppress(NotFound):
        kept = decode_slots_file(disk.read(f"{folder}/{SLOTS_FILE}"), f"{folder}/{SLOTS_FILE}")
        if kept.slots or kept.start:
            return SLOTS_FILE
    for first in firsts_in(disk.scan(folder)):
        frames = FrameScanner(memoryview(disk.read(f"{folder}/{data_name(first)}")))
        if first or any(not frame.info.flags & LEAD for frame in frames):
            return data_name(first)
    return None
