"""Bootstrap snapshots: a sealed copy of the log for each bootstrapping replica, kept until it is done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from typing import Final, final

from strandline.errors import CorruptData, InvalidInput, NotFound, Overloaded
from strandline.formats.checksum import crc32c
from strandline.log.read.span_tasks import is_same_history
from strandline.log.wal.log import WalLog
from strandline.log.wal.snapshot import KIND
from strandline.model.addresses import BOOTSTRAP_SUFFIX
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotState
from strandline.model.snapshot import Snapshot
from strandline.node.messages import SnapshotChunk, SnapshotOffer
from strandline.node.node_folder import SNAPSHOTS, NodeFolder
from strandline.node.replicate.log_copy import export_log
from strandline.snapshots.sealed import DATA, MANIFEST, check_snapshot, next_number, snapshot_folder

CHUNK_BYTES: Final = 1 << 20

MOST_SNAPSHOTS: Final = 8
"""Limit on snapshots at a time: each is a whole copy of the log."""

PIN_SECONDS: Final = 3600.0
"""Time after the last call that used a snapshot at which it is removed, with its pin."""

_LOGGER = logging.getLogger(__name__)


@final
class BootstrapSnapshots:
    """Sealed snapshots by replica. A slot of its own pins the log from before the snapshot until the bootstrap is done.

    The records behind the snapshot are therefore still retained once it is copied, however long that takes. The
    replica's own slot stays as it is, perhaps invalid, until the bootstrap is complete. If the replica does not return,
    the pin expires, and the snapshot is removed with it.
    """

    def __init__(self, node_folder: NodeFolder, log: WalLog) -> None:
        self._node_folder = node_folder
        self._log = log
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.RLock()
        self._sealing: str | None = None
        """The replica whose snapshot is being taken."""

    def begin(self, replica: str, kind: str) -> SnapshotOffer:
        """The snapshot for a replica: the one it has begun, if that is still pinned, or a new one.

        ``Overloaded`` while the limit of snapshots is reached.
        """
        if kind != KIND:
            raise InvalidInput(f"This primary has no snapshots of kind {kind!r}, only {KIND}: bootstrap into that.")
        with self._lock:
            kept = self._snapshots.get(replica)
            if kept is None:
                kept = self._found(replica)
            if kept is None or not self._is_pinned(replica, kept.cursor):
                self._check_room(replica)
                self._sealing = replica
                try:
                    kept = self._seal(replica)
                finally:
                    self._sealing = None
            self._snapshots[replica] = kept
        manifest = self._node_folder.env.disk.read(f"{kept.folder}/{MANIFEST}")
        return SnapshotOffer(_name(kept), manifest)

    def _found(self, replica: str) -> Snapshot | None:
        """The snapshot that this primary took before it was restarted."""
        folder = self._node_folder.path(SNAPSHOTS, replica)
        number = next_number(folder, env=self._node_folder.env) - 1
        if not number:
            return None
        try:
            return check_snapshot(snapshot_folder(folder, number), env=self._node_folder.env)
        except (NotFound, CorruptData):
            return None

    def _is_pinned(self, replica: str, cursor: Cursor) -> bool:
        pin = self._pin(replica)
        is_held = pin is not None and pin.pins and pin.position <= cursor.next
        return is_held and is_same_history(self._log, cursor)

    def _pin(self, replica: str) -> SlotState | None:
        return next((slot for slot in self._log.slots.list() if slot.name == replica + BOOTSTRAP_SUFFIX), None)

    def _check_room(self, replica: str) -> None:
        others = [slot for slot in self._log.slots.list() if slot.pins and slot.name.endswith(BOOTSTRAP_SUFFIX)]
        count = sum(slot.name != replica + BOOTSTRAP_SUFFIX for slot in others)
        if count >= MOST_SNAPSHOTS:
            raise Overloaded(
                f"{count} replicas are bootstrapping, which is the limit of snapshots on this primary: try "
                "again when one of them is done. A replica that does not return is given up after "
                f"{PIN_SECONDS / 60:g} minutes, or when it is unregistered."
            )

    def _seal(self, replica: str) -> Snapshot:
        if self._pin(replica) is not None:
            self._log.slots.drop(replica + BOOTSTRAP_SUFFIX)
        self._log.slots.create(replica + BOOTSTRAP_SUFFIX, self._log.bounds().next, lifetime=PIN_SECONDS, hot=True)
        folder = self._node_folder.path(SNAPSHOTS, replica)
        self._node_folder.env.disk.make_folders(folder)
        sealed = snapshot_folder(folder, next_number(folder, env=self._node_folder.env))
        taken = export_log(self._log, sealed, node_folder=self._node_folder)
        for row in self._node_folder.env.disk.scan(folder):
            if row.is_folder and f"{folder}/{row.name}" != taken.folder:
                self._node_folder.env.disk.remove_folder(f"{folder}/{row.name}")
        return taken

    def chunks(self, replica: str, name: str, path: str, offset: int) -> Generator[SnapshotChunk, None, None]:
        """A file of the replica's snapshot from a byte on, in chunks with checksums."""
        kept = self._snapshots.get(replica)
        if kept is None or _name(kept) != name:
            raise NotFound(f"The snapshot {name!r} of replica {replica!r} has expired: begin another one.")
        if all(file.path != path for file in kept.files) or offset < 0:
            raise NotFound(f"The snapshot {name!r} has no file {path!r}: its manifest lists what it has.")
        while data := self._node_folder.env.disk.read(f"{kept.folder}/{DATA}/{path}", offset, CHUNK_BYTES):
            yield SnapshotChunk(offset, data, crc32c(data))
            offset += len(data)

    def touch(self, replica: str) -> None:
        """The bootstrap is in progress: renew the pin."""
        pin = self._pin(replica)
        if pin is not None and pin.pins:
            self._log.slots.touch(pin.name, pin.epoch)

    def end(self, replica: str) -> None:
        """Remove the snapshot and its pin: the bootstrap is done or was given up. Idempotent."""
        with self._lock:
            self._snapshots.pop(replica, None)
            self._node_folder.env.disk.remove_folder(self._node_folder.path(SNAPSHOTS, replica))
            if self._pin(replica) is not None:
                self._log.slots.drop(replica + BOOTSTRAP_SUFFIX)

    def expire(self) -> None:
        """Remove the snapshots whose pins have expired; renews the pin of one that is being taken. Never blocks."""
        sealing = self._sealing
        if sealing is not None:
            self.touch(sealing)
        if not self._lock.acquire(blocking=False):
            return
        try:
            for row in self._node_folder.env.disk.scan(self._node_folder.path(SNAPSHOTS)):
                pin = self._pin(row.name)
                if row.is_folder and (pin is None or not pin.pins):
                    _LOGGER.warning("The snapshot for replica %s expired, and is removed.", row.name)
                    self.end(row.name)
        finally:
            self._lock.release()


def _name(snapshot: Snapshot) -> str:
    return snapshot.folder.rpartition("/")[2]
