"""``strandline wal verify``: verify every byte of a write-ahead log."""

from __future__ import annotations

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.findings import finish
from strandline.cli.wal.shared import Folder, data_bytes, need_wal
from strandline.log.wal.recover.verify import verify as verify_wal
from strandline.storage.clock import CLOCK
from strandline.storage.disk import DISK


@guarded
def verify(
    folder: Folder,
    *,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Verify a log: each frame's checksums and records, each offset once and in order, terms, indexes, slots, the mark.

    Reads every byte, changes nothing and takes no lock; the log may be used meanwhile. Findings are *damage* (something
    acknowledged is lost or wrong) and *notes* (opening puts it right). Ends with status 1 if there is damage.
    """
    need_wal(folder)
    with show.meter("reading bytes", total=data_bytes(folder), quiet=json) as advance:
        found = verify_wal(folder, disk=DISK, clock=CLOCK, told=advance)
    seen = found.examined
    looked = (
        f"{show.counted(seen['files'], 'file')} read, with {show.counted(seen['records'], 'record')} in "
        f"{show.counted(seen['frames'], 'frame')} ({show.size(seen['bytes'])}), and "
        f"{show.counted(seen['slots'], 'slot')}"
    )
    log_id = None if found.log_id is None else str(found.log_id)
    finish(found, looked, json=json, folder=folder, log_id=log_id, start=found.bounds.first, next=found.bounds.next)
