"""Checks of a cold tier, pure; :mod:`.verify` reads the objects and events for them."""

from __future__ import annotations

from collections.abc import Iterator

from strandline.cli.tier.shared import TierView
from strandline.log.findings import Finding, FindingKind, Severity
from strandline.model.retention import TIER_SLOT
from strandline.model.segments import SegmentMetadata, SegmentState
from strandline.tier.copy.history import SegmentCut
from strandline.tier.copy.segment_files import segment_path


def check_known(seen: TierView) -> Iterator[Finding]:
    """What the events tell that should not be so, or that somebody may want to know; no object is looked at."""
    yield from _contiguity(seen)
    yield from _slots(seen)
    yield from _states(seen)


def _contiguity(seen: TierView) -> Iterator[Finding]:
    finished = seen.finished
    if not finished:
        return
    reached = finished[0].start
    for segment in finished:
        path = segment_path(segment.segment, segment.start)
        if segment.start > reached:
            yield _hole(path, reached, segment.start, "no segment has them")
        elif segment.start < reached:
            yield Finding(
                Severity.NOTE,
                FindingKind.OVERLAP,
                path,
                f"{path} begins at offset {segment.start}, and segments before it hold everything up to {reached - 1}: "
                "two primaries copied it, and the later term is read.",
            )
        reached = max(reached, segment.end + 1)
    if reached < seen.hot.first:
        yield _hole(seen.cold.store, reached, seen.hot.first, "neither tier has them")


def _hole(where: str, first: int, end: int, why: str) -> Finding:
    return Finding(
        Severity.DAMAGE,
        FindingKind.HOLE,
        where,
        f"There is a hole: offsets {first} to {end - 1} are lost, {why}. Restore what held them, or bootstrap "
        "consumers past them.",
    )


def _slots(seen: TierView) -> Iterator[Finding]:
    first = seen.hot.first
    for segment in reversed(seen.finished):
        # As readers do: what does not reach the log is not read.
        if segment.end + 1 < first:
            break
        first = min(first, segment.start)
    for slot in seen.slots:
        if slot.name != TIER_SLOT and slot.pins and slot.position < first:
            yield Finding(
                Severity.DAMAGE,
                FindingKind.SLOT,
                slot.name,
                f"Slot {slot.name!r} needs offset {slot.position}, and both tiers begin at {first} or later: what it "
                "pinned was removed. Bootstrap its consumer again, and reset the slot.",
            )


def _states(seen: TierView) -> Iterator[Finding]:
    for segment in seen.segments:
        path = segment_path(segment.segment, segment.start)
        offsets = f"(offsets {segment.start} to {segment.end})"
        match segment.state:
            case SegmentState.COPY_STARTED:
                told = "is being copied, or whoever did that died: the next round of a tierer removes it then."
                yield Finding(Severity.NOTE, FindingKind.STATE, path, f"{path} {offsets} {told}")
            case SegmentState.DELETE_STARTED:
                told = "is being deleted, or whoever did that died: the next round of a tierer goes on with it."
                yield Finding(Severity.NOTE, FindingKind.STATE, path, f"{path} {offsets} {told}")
            case SegmentState.COPY_FINISHED if segment.segment in seen.spare:
                told = "holds only what other segments hold: the next round of a tierer removes it."
                yield Finding(Severity.WASTE, FindingKind.STATE, path, f"{path} {offsets} {told}")
    if seen.deletion is not None:
        said = f"The whole cold tier is being deleted: {seen.deletion.state}."
        yield Finding(Severity.NOTE, FindingKind.STATE, seen.cold.store, said)


def orphan(path: str, size: int) -> Finding:
    """An object that no event knows."""
    return Finding(
        Severity.WASTE,
        FindingKind.ORPHAN,
        path,
        f"{path} ({size} bytes) is named as a segment, and no event knows it: a tierer removes it when it is a "
        "day old.",
    )


def parted(cut: SegmentCut) -> Finding:
    """A segment of a history that the log has given up."""
    path = segment_path(cut.segment.segment, cut.segment.start)
    return Finding(
        Severity.NOTE,
        FindingKind.HISTORY,
        path,
        f"{path} is of another history than the log from offset {cut.at} on, where the log went on in a later term: "
        "the next round of a tierer cuts it there.",
    )


def differing(segment: SegmentMetadata) -> Finding:
    """A segment with other records than the log has, or had, in the same terms."""
    path = segment_path(segment.segment, segment.start)
    return Finding(
        Severity.DAMAGE,
        FindingKind.HISTORY,
        path,
        f"{path} ends with another record, at offset {segment.end}, than the log has there in the same term: the log "
        "was restored from a copy and went on, or the cold tier was. Restore what belongs together; 'strandline tier "
        "run' says where the two part.",
    )
