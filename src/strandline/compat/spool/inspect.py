"""Inspection of a spool (``NAME.logical.wal``): its frames by version, and how far it is valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from strandline.compat.spool.format import decode_slots
from strandline.compat.spool.legacy_frame import LegacyFrame, LegacyScanner
from strandline.compat.spool.migrate import SPOOL, SPOOL_SLOTS
from strandline.errors import CorruptData, NotFound
from strandline.storage.clock import CLOCK, Clock
from strandline.storage.disk import DISK, Disk


@dataclass(frozen=True, slots=True)
class SpoolFrame:
    """One frame of a spool; ``term`` is None where it does not say."""

    byte: int
    size: int
    version: int
    lsn: int
    term: int | None
    timestamp: int

    @classmethod
    def of(cls, frame: LegacyFrame) -> SpoolFrame:
        """A frame as it was found."""
        return cls(frame.start, frame.end - frame.start, frame.version, frame.lsn, frame.term, frame.timestamp)


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """A spool: its valid bytes, and why reading stops there."""

    spool: str
    size: int
    valid_bytes: int
    ending: str
    why: str
    versions: dict[str, int]
    """How many frames there are of each version."""
    first_lsn: int | None
    last_lsn: int | None
    slots: int | None
    """How many slots are beside it; None if there is no such file, or it cannot be read."""
    problems: tuple[str, ...] = ()


def inspect_spool(
    path: str, each: Callable[[SpoolFrame], None] | None = None, *, disk: Disk = DISK, clock: Clock = CLOCK
) -> SpoolFile:
    """Read a spool up to its first damage, as every reader of spools does; ``each`` is given its frames."""
    data = disk.read(path)
    scanner = LegacyScanner(memoryview(data))
    versions: Counter[str] = Counter()
    lsns: list[int] = []
    for frame in scanner:
        versions[str(frame.version)] += 1
        lsns = [lsns[0] if lsns else frame.lsn, frame.lsn]
        if each is not None:
            each(SpoolFrame.of(frame))
    slots, problems = None, []
    beside = path.removesuffix(SPOOL) + SPOOL_SLOTS
    try:
        slots = len(decode_slots(disk.read(beside), beside, now=clock.now()))
    except NotFound:
        pass
    except CorruptData as error:
        problems.append(str(error))
    stop = scanner.stop
    return SpoolFile(
        spool=path,
        size=len(data),
        valid_bytes=stop.at,
        ending=stop.ending.value,
        why=stop.why,
        versions=dict(sorted(versions.items())),
        first_lsn=lsns[0] if lsns else None,
        last_lsn=lsns[-1] if lsns else None,
        slots=slots,
        problems=tuple(problems),
    )
