"""Creation of a write-ahead log. The identity is written last: a log with an identity is whole."""

from __future__ import annotations

from strandline.errors import CorruptData, NotFound
from strandline.formats.wal.folder import Kept, decode_kept, encode_kept, encode_wal_identity
from strandline.formats.wal.frame import FrameScanner
from strandline.formats.wal.mark import Mark, encode_mark
from strandline.log.wal.names import IDENTITY, KEPT, LEAD, MARK, NEW, data_name, firsts_in
from strandline.log.wal.recover.repair import remove_files
from strandline.log.wal.slots import write_kept
from strandline.log.wal.write.journal import JournalPosition, encode_lead
from strandline.storage.clock import Chance, Clock
from strandline.storage.disk import Disk, exists, replace_file


def create_if_absent(folder: str, *, disk: Disk, clock: Clock, chance: Chance) -> None:
    """Create an empty log in a folder that has none; the caller holds its lock.

    What a creation that was interrupted has left is replaced. ``CorruptData`` if there is more: then this was a log.
    """
    if exists(f"{folder}/{IDENTITY}", disk=disk):
        return
    _clear(folder, disk=disk, clock=clock)
    log_id = chance.uuid()
    write_kept(folder, Kept(log_id, 0), disk=disk)
    # Not when it was created: the first record may be a copy of one that was written long before, and says so.
    lead = encode_lead(log_id, 0, JournalPosition(0, 0, 0, 0, 0, {}))
    disk.write_new(f"{folder}/{data_name(0)}", lead)
    disk.sync_folder(folder)
    identity = f"{folder}/{IDENTITY}"
    replace_file(disk, identity, encode_wal_identity(log_id), temporary=f"{identity}{NEW}")


def describe_copy(folder: str, mark: Mark, *, disk: Disk) -> None:
    """Make a log of the files of frames in a folder that are copies, without slots; the identity last, as ever.

    The mark is of a clean end: whoever finds less than it says knows that something is missing.
    """
    disk.write_new(f"{folder}/{MARK}", [encode_mark(mark)])
    disk.write_new(f"{folder}/{KEPT}", [encode_kept(Kept(mark.log_id, mark.start))])
    disk.write_new(f"{folder}/{IDENTITY}", [encode_wal_identity(mark.log_id)])


def _clear(folder: str, *, disk: Disk, clock: Clock) -> None:
    """Remove what a creation has left that was interrupted, and refuse anything else."""
    missing = f"{folder}/{IDENTITY} is missing, and there are records of a log beside it: restore the file."
    try:
        kept = decode_kept(disk.read(f"{folder}/{KEPT}"), folder, now=clock.now())
    except NotFound:
        pass
    else:
        if kept.slots or kept.start:
            raise CorruptData(missing)
    for first in firsts_in(disk.scan(folder)):
        path = f"{folder}/{data_name(first)}"
        if first or any(not frame.info.flags & LEAD for frame in FrameScanner(memoryview(disk.read(path)))):
            raise CorruptData(missing)
        remove_files(folder, [first], disk=disk)
