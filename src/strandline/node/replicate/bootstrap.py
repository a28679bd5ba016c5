"""Bringing a snapshot over from a primary: in pieces with checksums, going on after a cut, beside the living copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final
from uuid import UUID

from strandline.errors import CorruptData, NotFound
from strandline.formats.checksum import crc32c
from strandline.formats.snapshot.manifest import decode_snapshot
from strandline.log.wal.snapshot import KIND, KIND_VERSION, verify
from strandline.model.cursor import Cursor
from strandline.model.snapshot import Snapshot, SnapshotFile
from strandline.node.messages import Caller, SnapshotOffer, Upstream
from strandline.node.node_folder import INCOMING, Home
from strandline.snapshots.sealed import DATA, MANIFEST, check_kind, read_snapshot, unpack
from strandline.storage.clock import Chance, boot_id
from strandline.storage.files import below, exists, replace_file

_SYNC_BYTES: Final = 8 << 20
"""A crash of the machine may spoil so many of the last bytes of a file, which are brought over again."""
_BOOT: Final = "BOOT"
"""Which run of the machine has written what is there, beside the manifest while a snapshot is brought over."""


def bring_over(upstream: Upstream, caller: Caller, home: Home, *, chance: Chance, boot: UUID | None = None) -> Cursor:
    """Put a snapshot of the primary's log in place of this node's copy; returns the cursor that it holds.

    The caller opens the new copy, and then tells the primary that the bootstrap is complete.

    Whatever interrupts it, the node has its old copy or the new one, whole; calling it again goes on where it was,
    to the byte unless the machine went down meanwhile (``boot`` tells its runs apart).
    ``CorruptData`` if a piece is not what its checksum says, or the whole is not what the manifest says: what is wrong
    is thrown away, so that trying again may help.
    """
    offer = upstream.begin_snapshot(caller, KIND)
    folder = home.path(INCOMING)
    snapshot = _prepare(folder, offer, home)
    check_kind(snapshot, KIND, KIND_VERSION)
    _distrust_tails(folder, snapshot, home, boot_id() if boot is None else boot)
    for file in snapshot.files:
        _bring_file(upstream, caller, offer.name, file, folder, home)
    home.disk.remove(f"{folder}/{_BOOT}")
    generation = home.next_generation()
    try:
        unpack(
            folder,
            home.data(generation),
            kind=KIND,
            kind_version=KIND_VERSION,
            verify=lambda data: verify(data, disk=home.disk),
            disk=home.disk,
            chance=chance,
        )
    except CorruptData:
        home.disk.remove_folder(folder)
        raise
    home.remember(generation=generation, trouble=None)
    home.disk.remove_folder(folder)
    return snapshot.cursor


def _prepare(folder: str, offer: SnapshotOffer, home: Home) -> Snapshot:
    """What is to be brought over; what there is of another snapshot goes."""
    snapshot = decode_snapshot(offer.manifest, f"the manifest of snapshot {offer.name}", folder)
    with contextlib.suppress(NotFound, CorruptData):
        if read_snapshot(folder, disk=home.disk) == snapshot:
            return snapshot
    home.disk.remove_folder(folder)
    home.disk.make_folders(f"{folder}/{DATA}")
    home.disk.write_new(f"{folder}/{MANIFEST}", [offer.manifest])
    home.disk.sync_folder(folder)
    return snapshot


def _distrust_tails(folder: str, snapshot: Snapshot, home: Home, boot: UUID) -> None:
    """Cut the last bytes of files that are not whole, if the machine went down since they were written.

    What a process that was killed has written is there all the same. So is what came before the line broke: however
    often it does, each connection goes on where the one before ended.
    """
    note = f"{folder}/{_BOOT}"
    with contextlib.suppress(NotFound):
        if boot.int and home.disk.read(note) == boot.bytes:
            return
    for file in snapshot.files:
        path = below(f"{folder}/{DATA}", *file.path.split("/"))
        if not exists(path, disk=home.disk) or home.disk.size(path) >= file.size:
            continue
        out = home.disk.open_append(path)
        try:
            out.cut(max(0, out.size() - _SYNC_BYTES))
        finally:
            out.close()
    replace_file(home.disk, note, boot.bytes, temporary=f"{note}.new")


def _bring_file(upstream: Upstream, caller: Caller, name: str, file: SnapshotFile, folder: str, home: Home) -> None:
    path = below(f"{folder}/{DATA}", *file.path.split("/"))
    if "/" in file.path:
        home.disk.make_folders(path.rpartition("/")[0])
    out = home.disk.open_append(path)
    try:
        size = out.size()
        if size > file.size:
            size = 0
            out.cut(size)
        unsynced = 0
        if size < file.size:
            for chunk in upstream.chunks(caller, name, file.path, size):
                if crc32c(chunk.data) != chunk.checksum or chunk.offset != size or size + len(chunk.data) > file.size:
                    raise CorruptData(
                        f"A piece of {file.path} of snapshot {name} did not arrive as it was sent, at byte {size}: it "
                        "was not kept, and is asked for again."
                    )
                with _doubting(folder, home):
                    out.write([chunk.data])
                    size += len(chunk.data)
                    unsynced += len(chunk.data)
                    if unsynced >= _SYNC_BYTES:
                        out.sync()
                        unsynced = 0
        if size != file.size:
            raise CorruptData(f"{file.path} of snapshot {name} ended at byte {size} of {file.size}: it is asked again.")
        with _doubting(folder, home):
            out.sync()
    finally:
        out.close()


@contextlib.contextmanager
def _doubting(folder: str, home: Home) -> Iterator[None]:
    """Trust nothing that was written since the last sync if a write or a sync fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(NotFound):
            home.disk.remove(f"{folder}/{_BOOT}")
        raise
