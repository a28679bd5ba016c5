"""Bootstrap of a replica: fetches a snapshot of the primary in checksummed chunks, beside the current copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from strandline.errors import CorruptData, NotFound
from strandline.formats.checksum import crc32c
from strandline.formats.snapshot.manifest import decode_snapshot
from strandline.log.wal.snapshot import KIND, KIND_VERSION, verify
from strandline.model.cursor import Cursor
from strandline.model.snapshot import Snapshot, SnapshotFile
from strandline.node.messages import Caller, SnapshotOffer, Upstream
from strandline.node.node_folder import INCOMING, NodeFolder
from strandline.snapshots.sealed import DATA, MANIFEST, check_kind, read_snapshot, unpack
from strandline.storage.clock import boot_id
from strandline.storage.disk import below, exists, replace_file

_SYNC_BYTES: Final = 8 << 20
"""Bytes after which a file is synced: a machine crash may damage at most these, which are fetched again."""
_BOOT: Final = "BOOT"
"""Holds the boot id of the machine that wrote the partial snapshot."""


def bootstrap(
    upstream: Upstream, caller: Caller, node_folder: NodeFolder, *, before_swap: Callable[[], object]
) -> Cursor:
    """Replace this node's copy by a snapshot of the primary's log; returns the snapshot's cursor.

    The caller opens the new copy, and then ends the bootstrap on the primary. ``before_swap`` is called when the new
    copy is complete and the old one is still current.

    After any interruption the node has its old copy or the new one, whole. Calling it again resumes, to the byte unless
    the machine went down meanwhile. ``CorruptData`` if a chunk does not match its checksum, or the whole does not match
    the manifest: the damaged part is discarded, so that a retry may help.
    """
    offer = upstream.begin_snapshot(caller, KIND)
    folder = node_folder.path(INCOMING)
    snapshot = _prepare(folder, offer, node_folder)
    check_kind(snapshot, KIND, KIND_VERSION)
    _truncate_unsynced(folder, snapshot, node_folder)
    for file in snapshot.files:
        _fetch_file(upstream, caller, offer.name, file, folder, node_folder)
    node_folder.env.disk.remove(f"{folder}/{_BOOT}")
    generation = node_folder.next_generation()
    try:
        unpack(
            folder,
            node_folder.data(generation),
            kind=KIND,
            kind_version=KIND_VERSION,
            verify=lambda data: verify(data, env=node_folder.env),
            env=node_folder.env,
        )
    except CorruptData:
        node_folder.env.disk.remove_folder(folder)
        raise
    before_swap()
    node_folder.remember(generation=generation, trouble=None)
    node_folder.env.disk.remove_folder(folder)
    return snapshot.cursor


def _prepare(folder: str, offer: SnapshotOffer, node_folder: NodeFolder) -> Snapshot:
    """Decode the manifest; removes a partial copy of another snapshot."""
    snapshot = decode_snapshot(offer.manifest, f"the manifest of snapshot {offer.name}", folder)
    with contextlib.suppress(NotFound, CorruptData):
        if read_snapshot(folder, env=node_folder.env) == snapshot:
            return snapshot
    node_folder.env.disk.remove_folder(folder)
    node_folder.env.disk.make_folders(f"{folder}/{DATA}")
    node_folder.env.disk.write_new(f"{folder}/{MANIFEST}", [offer.manifest])
    node_folder.env.disk.sync_folder(folder)
    return snapshot


def _truncate_unsynced(folder: str, snapshot: Snapshot, node_folder: NodeFolder) -> None:
    """Truncate the unsynced end of partial files if the machine went down since they were written.

    Bytes that a killed process wrote are kept, and so are those from before a lost connection: each connection resumes
    where the last one ended.
    """
    note, boot = f"{folder}/{_BOOT}", boot_id()
    with contextlib.suppress(NotFound):
        if boot.int and node_folder.env.disk.read(note) == boot.bytes:
            return
    for file in snapshot.files:
        path = below(f"{folder}/{DATA}", *file.path.split("/"))
        if not exists(path, disk=node_folder.env.disk) or node_folder.env.disk.size(path) >= file.size:
            continue
        out = node_folder.env.disk.open_append(path)
        try:
            out.cut(max(0, out.size() - _SYNC_BYTES))
        finally:
            out.close()
    replace_file(node_folder.env.disk, note, boot.bytes, temporary=f"{note}.new")


def _fetch_file(
    upstream: Upstream, caller: Caller, name: str, file: SnapshotFile, folder: str, node_folder: NodeFolder
) -> None:
    path = below(f"{folder}/{DATA}", *file.path.split("/"))
    if "/" in file.path:
        node_folder.env.disk.make_folders(path.rpartition("/")[0])
    out = node_folder.env.disk.open_append(path)
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
                        f"A piece of {file.path} of snapshot {name} does not match its checksum, at byte {size}: it "
                        "was discarded, and is fetched again."
                    )
                with _distrust_on_failure(folder, node_folder):
                    out.write([chunk.data])
                    size += len(chunk.data)
                    unsynced += len(chunk.data)
                    if unsynced >= _SYNC_BYTES:
                        out.sync()
                        unsynced = 0
        if size != file.size:
            raise CorruptData(
                f"{file.path} of snapshot {name} ended at byte {size} of {file.size}: it is fetched again."
            )
        with _distrust_on_failure(folder, node_folder):
            out.sync()
    finally:
        out.close()


@contextlib.contextmanager
def _distrust_on_failure(folder: str, node_folder: NodeFolder) -> Iterator[None]:
    """If a write or a sync fails, distrust all bytes since the last sync."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(NotFound):
            node_folder.env.disk.remove(f"{folder}/{_BOOT}")
        raise
