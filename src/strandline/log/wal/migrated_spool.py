"""How much of a spool was migrated into a write-ahead log: records that it gets later are in no log."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from strandline.errors import Diverged, NotFound
from strandline.formats.json.checked import damage, decode_checked, encode_checked
from strandline.log.folders import SPOOL_SUFFIX
from strandline.model.json_values import natural
from strandline.storage.disk import Disk

MIGRATED: Final = "spool.json"
_KIND: Final = "strandline-migrated-spool"
_VERSION: Final = 1


def encode_migrated(size: int, end: int) -> bytes:
    """The note that a spool had ``size`` bytes, whose records are those below ``end``."""
    return encode_checked(_KIND, _VERSION, {"size": size, "next": end})


def decode_migrated(data: bytes, where: str) -> tuple[int, int]:
    """The size of the spool, and the offset after its records; ``CorruptData`` naming ``where``."""
    with damage(
        where,
        "It says how much of the spool beside the log was migrated: restore it, or move the spool away if nothing was "
        "written to that since.",
    ):
        fields = decode_checked(data, _KIND, _VERSION)
        return natural(fields["size"]), natural(fields["next"])


def note_migrated(folder: str, *, size: int, end: int, disk: Disk) -> None:
    """Note in the new log's folder how much of the spool it holds."""
    disk.write_new(f"{folder}/{MIGRATED}", [encode_migrated(size, end)])


def refuse_changed_spool(folder: str, *, disk: Disk) -> None:
    """``Diverged`` if the spool beside the log was written since it was migrated, as an older program does.

    Nothing is checked where the spool is gone, and for logs that an earlier release has migrated.
    """
    folder = str(PurePath(folder))  # 'orders/' has the spool of 'orders'
    path, spool = f"{folder}/{MIGRATED}", f"{folder}{SPOOL_SUFFIX}"
    try:
        data, size = disk.read(path), disk.size(spool)
    except NotFound:
        return
    migrated, end = decode_migrated(data, path)
    if size != migrated:
        raise Diverged(
            f"{spool} has {size:,} bytes, and had {migrated:,} when it was migrated: an older program has written to "
            "it since, and its new records are not in the log; nothing was opened. To take them over, stop that "
            f"program, rename the spool to COPY{SPOOL_SUFFIX}, then 'strandline wal migrate COPY' and 'strandline "
            f"ingest COPY {folder} --from {end}'. If they are not needed, move the spool away."
        )
