"""The check which logs can have a cold tier, shared by every function that takes a log."""

from __future__ import annotations

from pathlib import Path

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import Unsupported
from strandline.log.contract import READING, SLOTS, require
from strandline.log.folders import FolderKind, contents
from strandline.log.object.log import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reader import WalReader
from strandline.log.wal.read.reading import WalReading
from strandline.tier.read.tiered_log import TieredLog

_STATE = "node.json"


def hot_log(log: object) -> ObjectLog | WalLog | WalReader:
    """The hot log behind a tiered log or an lsn API; ``Unsupported`` for logs that cannot have a cold tier."""
    if isinstance(log, WriteAheadLog):
        log = log.log
    if isinstance(log, TieredLog):
        log = log.hot
    if not isinstance(log, ObjectLog | WalLog | WalReader):
        raise Unsupported(
            f"A {type(log).__name__} cannot have a cold tier: only object logs can, and write-ahead logs on their own."
        )
    check_own(log)
    return log


def check_tierable(log: object) -> None:
    """``Unsupported`` for a log that a tierer cannot or must not copy."""
    require(log, "tiered", *READING, *SLOTS)
    if isinstance(log, WalReader):
        raise Unsupported(
            f"{log!r} was opened for reading, and tiering moves a slot: the process that writes the log tiers it."
        )
    check_own(log)


def check_own(log: object) -> None:
    """``Unsupported`` for a node's copy of a log: after a failover another copy is authoritative."""
    if not isinstance(log, WalReading):
        return
    folder = Path(log.folder).absolute()
    names = contents(folder.parent, disk=log.disk).found.get(FolderKind.NODE, ())
    if _STATE in names and folder.name in names:
        raise Unsupported(
            f"The log in {folder} belongs to the node in {folder.parent}, and the log of a primary and its replicas "
            "cannot have a cold tier yet: only object logs can, and write-ahead logs on their own."
        )
