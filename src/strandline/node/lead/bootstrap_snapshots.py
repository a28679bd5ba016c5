"""Snapshots that a primary keeps for replicas that build their state again, each until its bootstrap is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, final

from strandline.errors import CorruptData, InvalidInput, NotFound, Overloaded
from strandline.formats.checksum import crc32c
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Cursor
from strandline.model.names import BOOTSTRAP_SUFFIX
from strandline.model.slots import SlotState
from strandline.model.snapshot import Snapshot
from strandline.node.messages import Chunk, SnapshotOffer
from strandline.node.node_folder import SNAPSHOTS, Home
from strandline.snapshots.sealed import DATA, MANIFEST, check_snapshot, next_number, numbered

CHUNK_BYTES: Final = 1 << 20

MOST_SNAPSHOTS: Final = 8
"""So many are kept at a time: each is a whole copy of the log."""

PIN_SECONDS: Final = 3600.0
"""After so many seconds without a call for it a snapshot is given up, with its pin."""

_LOGGER = logging.getLogger(__name__)

Export = Callable[[str], Snapshot]
"""Seals a snapshot in a folder that is absent or empty."""


@final
class Offers:
    """Sealed snapshots by replica. Each is pinned by a slot of its own, from before it was taken until it is over.

    So what follows a snapshot is still there when it has been brought over, however long that takes; the replica's own
    slot stays as it is, invalid if it was, until the bootstrap is complete. A replica that does not come back leaves
    nothing for good: the slot expires, and the snapshot goes with it.
    """

    def __init__(self, home: Home, log: WalLog, exports: Mapping[str, Export]) -> None:
        """Keep them in the node's folder; ``exports`` says how to take one of each kind."""
        self._home = home
        self._log = log
        self._exports = exports
        self._kept: dict[str, Snapshot] = {}
        self._lock = threading.Lock()
        self._sealing: str | None = None
        """The replica whose snapshot is being taken."""

    def begin(self, replica: str, kind: str) -> SnapshotOffer:
        """The snapshot for a replica: the one that it has begun, if that is still good, or a new one.

        ``Overloaded`` while as many others are kept as there may be.
        """
        if kind not in self._exports:
            raise InvalidInput(
                f"This primary has no snapshots of kind {kind!r}, only {', '.join(sorted(self._exports))}: bootstrap "
                "into one of those."
            )
        with self._lock:
            kept = self._kept.get(replica)
            if kept is None:
                kept = self._found(replica)
            if kept is None or kept.kind != kind or not self._is_pinned(replica, kept.cursor):
                self._check_room(replica)
                kept = self._take(replica, kind)
            self._kept[replica] = kept
        manifest = self._home.disk.read(f"{kept.folder}/{MANIFEST}")
        return SnapshotOffer(_name(kept), manifest)

    def _found(self, replica: str) -> Snapshot | None:
        """What a primary that stopped in between had taken."""
        folder = self._home.path(SNAPSHOTS, replica)
        number = next_number(folder, disk=self._home.disk) - 1
        if not number:
            return None
        try:
            return check_snapshot(numbered(folder, number), disk=self._home.disk)
        except (NotFound, CorruptData):
            return None

    def _is_pinned(self, replica: str, cursor: Cursor) -> bool:
        pin = self._pin(replica)
        return pin is not None and pin.pins and pin.position <= cursor.next and cursor.log_id == self._log.log_id

    def _pin(self, replica: str) -> SlotState | None:
        return next((slot for slot in self._log.slots() if slot.name == replica + BOOTSTRAP_SUFFIX), None)

    def _check_room(self, replica: str) -> None:
        others = [slot for slot in self._log.slots() if slot.pins and slot.name.endswith(BOOTSTRAP_SUFFIX)]
        count = sum(slot.name != replica + BOOTSTRAP_SUFFIX for slot in others)
        if count >= MOST_SNAPSHOTS:
            raise Overloaded(
                f"{count} replicas bootstrap at this moment, and this primary keeps no more snapshots than that: try "
                "again when one of them is done. One that does not come back is given up after "
                f"{PIN_SECONDS / 60:g} minutes, or when it is unregistered."
            )

    def _take(self, replica: str, kind: str) -> Snapshot:
        self._sealing = replica
        try:
            return self._seal(replica, kind)
        finally:
            self._sealing = None

    def _seal(self, replica: str, kind: str) -> Snapshot:
        if self._pin(replica) is not None:
            self._log.drop_slot(replica + BOOTSTRAP_SUFFIX)
        self._log.create_newcomer_slot(replica + BOOTSTRAP_SUFFIX, self._log.bounds().next, seconds=PIN_SECONDS)
        folder = self._home.path(SNAPSHOTS, replica)
        self._home.disk.make_folders(folder)
        taken = self._exports[kind](numbered(folder, next_number(folder, disk=self._home.disk)))
        for row in self._home.disk.scan(folder):
            if row.is_folder and f"{folder}/{row.name}" != taken.folder:
                self._home.disk.remove_folder(f"{folder}/{row.name}")
        return taken

    def chunks(self, replica: str, name: str, path: str, offset: int) -> Iterator[Chunk]:
        """A file of the replica's snapshot from a byte on, in pieces with checksums."""
        kept = self._kept.get(replica)
        if kept is None or _name(kept) != name:
            raise NotFound(f"The snapshot {name!r} of replica {replica!r} is not kept here: begin another one.")
        if all(file.path != path for file in kept.files) or offset < 0:
            raise NotFound(f"The snapshot {name!r} has no file {path!r}: its manifest lists what it has.")
        while data := self._home.disk.read(f"{kept.folder}/{DATA}/{path}", offset, CHUNK_BYTES):
            yield Chunk(offset, data, crc32c(data))
            offset += len(data)

    def touch(self, replica: str) -> None:
        """Its bootstrap is going on: keep the pin from being taken for one that nobody needs."""
        pin = self._pin(replica)
        if pin is not None and pin.pins:
            self._log.touch_slot(pin.name, pin.epoch)

    def end(self, replica: str) -> None:
        """The bootstrap is over, or given up; nothing kept is fine."""
        with self._lock:
            self._end(replica)

    def _end(self, replica: str) -> None:
        self._kept.pop(replica, None)
        self._home.disk.remove_folder(self._home.path(SNAPSHOTS, replica))
        if self._pin(replica) is not None:
            self._log.drop_slot(replica + BOOTSTRAP_SUFFIX)

    def sweep(self) -> None:
        """Give up the snapshots whose pins have expired; one that is being taken keeps its pin. Waits for nobody."""
        sealing = self._sealing
        if sealing is not None:
            self.touch(sealing)
        if not self._lock.acquire(blocking=False):
            return
        try:
            for row in self._home.disk.scan(self._home.path(SNAPSHOTS)):
                pin = self._pin(row.name)
                if row.is_folder and (pin is None or not pin.pins):
                    _LOGGER.warning("The snapshot for replica %s was not asked for any more, and is removed.", row.name)
                    self._end(row.name)
        finally:
            self._lock.release()


def _name(snapshot: Snapshot) -> str:
    return snapshot.folder.rpartition("/")[2]
