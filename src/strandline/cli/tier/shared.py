"""Shared parts of the tier commands: the log, and the state of its cold tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

import strandline as sl
from strandline.cli.common import open_log
from strandline.cli.targets import is_free, local_folder, need
from strandline.cli.targets import look as look_into
from strandline.log.folders import FolderKind
from strandline.log.object.head.index import bytes_from
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds
from strandline.model.retention import SlotState
from strandline.model.segments import ColdTier, PartitionDelete, SegmentId, SegmentMetadata, SegmentState
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import cold_tier, follow_events, log_address, partition_of

AnyLog = sl.log.ObjectLog | sl.log.WalReader | WalLog

Place = Annotated[
    str,
    typer.Argument(
        metavar="LOG",
        help="The log: its address (file://, s3://, gs://, az:// or a folder), or the folder of a write-ahead log.",
        show_default=False,
    ),
]


# --- which log -------------------------------------------------------------------------------------------------


def wal_folder(place: str) -> str | None:
    """The folder, if that is where a write-ahead log is; None for an address of an object log."""
    folder = local_folder(place)
    if folder is None:
        return None
    there = look_into(str(folder))
    if not is_free(there):
        need(there, FolderKind.OBJECT_LOG, FolderKind.WAL)
    return str(folder) if FolderKind.WAL in there.kinds else None


def open_to_look(place: str) -> sl.log.ObjectLog | sl.log.WalReader:
    """The log at a place, without a lock: somebody else may be writing it."""
    folder = wal_folder(place)
    return open_log(place) if folder is None else sl.log.WalReader(folder)


@contextmanager
def open_to_tier(place: str) -> Iterator[sl.log.ObjectLog | WalLog]:
    """The log at a place; a write-ahead log is opened for writing, which only one process at a time can."""
    folder = wal_folder(place)
    if folder is None:
        yield open_log(place)
        return
    with WalLog.open(folder, create=False) as log:
        yield log


def bytes_behind(log: AnyLog, position: int) -> int:
    """How many bytes the log itself has from a position on."""
    if isinstance(log, sl.log.ObjectLog):
        head = log.head()
        return bytes_from(head, max(position, head.floor), log.chunks)
    return log.bytes_behind(position)


# --- its cold tier ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierView:
    """A log and its cold tier, from all events that were published before the look."""

    url: str
    cold: ColdTier
    hot: Bounds
    """What the log itself has. It was looked at first: what it had forgotten by then was told of before."""
    segments: tuple[SegmentMetadata, ...]
    """All, in whichever state, by their first offset."""
    spare: frozenset[SegmentId]
    """Those that no lookup finds."""
    deletion: PartitionDelete | None
    partition: int
    """Which partition of the events tells of them."""
    events: int
    """How many of its events were applied, or were there before."""
    slots: tuple[SlotState, ...]

    @property
    def finished(self) -> list[SegmentMetadata]:
        """The segments that can be read: those whose place others have taken are not among them."""
        return [
            segment
            for segment in self.segments
            if segment.state is SegmentState.COPY_FINISHED and segment.segment not in self.spare
        ]

    @property
    def tiered(self) -> int | None:
        """The offset behind all that can be read; None if nothing can."""
        return max((segment.end + 1 for segment in self.finished), default=None)


def look(place: str) -> TierView:
    """What is known of a log's cold tier now; ``NotFound`` if it has none, ``NotReady`` if that cannot be known."""
    log = open_to_look(place)
    cold = cold_tier(log)
    with follow_events(cold) as manager:
        return look_at(log, cold, manager)


def look_at(log: AnyLog, cold: ColdTier, manager: MetadataManager) -> TierView:
    """The same, with what is open already."""
    partition = partition_of(cold)
    hot = log.bounds()

    def ask(cache: SegmentCache) -> tuple[tuple[SegmentMetadata, ...], frozenset[SegmentId], PartitionDelete | None]:
        spare = frozenset(segment.segment for segment in cache.unreferenced(partition))
        return tuple(cache.segments(partition)), spare, cache.deletion(partition)

    segments, spare, deletion = manager.current(partition, ask)
    number = manager.metadata_partition(partition)
    return TierView(
        url=log_address(log),
        cold=cold,
        hot=hot,
        segments=segments,
        spare=spare,
        deletion=deletion,
        partition=number,
        events=manager.committed_offset(number) + 1,
        # Last: a slot that moves on while segments expire stands higher by now, and never below what there is.
        slots=tuple(log.slots()),
    )
