"""The state of a cold tier by its events, and its verification: every segment against its event and the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from strandline.errors import CorruptData, Diverged, Gap, NotFound, NotReady, StrandlineError, UnsupportedVersion
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.log.object.head.index import bytes_from
from strandline.log.object.log import ObjectLog
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Bounds
from strandline.model.retention import TIER_SLOT, SlotState
from strandline.model.segments import ColdTier, SegmentMetadata, SegmentState
from strandline.storage.env import SYSTEM, Env
from strandline.storage.objects.store import ObjectInfo, ObjectStore
from strandline.storage.task_pool import ThreadPool
from strandline.tier.copy.history import SegmentCut, is_same_record, plan_cuts, read_history
from strandline.tier.copy.ledger import known_segments
from strandline.tier.copy.planning import KnownSegments
from strandline.tier.copy.segment_files import forget_tails, list_segments, load_tail, segment_path
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import cold_tier, follow_events, log_address, partition_of
from strandline.tier.read.cold_reader import ColdReader

_READERS: Final = 8
"""Ends of segments that are read at once."""

HotLog = ObjectLog | WalReader | WalLog


@dataclass(frozen=True, slots=True)
class TierView:
    """A log and its cold tier, from all events that were published before."""

    url: str
    cold: ColdTier
    hot: Bounds
    """Offsets of the log itself, read first: the segments of its trimmed records were published before."""
    known: KnownSegments
    partition: int
    """The metadata partition of their events."""
    events: int
    """Number of its applied events."""
    slots: tuple[SlotState, ...]

    @property
    def tiered(self) -> int | None:
        """The offset after all readable records; None without any."""
        return max((segment.end + 1 for segment in self.known.answering), default=None)


def look_at(log: HotLog, cold: ColdTier, manager: MetadataManager) -> TierView:
    """The current state of a log's cold tier; ``NotReady`` if it is unknown."""
    partition = partition_of(cold)
    hot = log.bounds()
    known = known_segments(manager, partition)
    number = manager.metadata_partition(partition)
    return TierView(
        url=log_address(log),
        cold=cold,
        hot=hot,
        known=known,
        partition=number,
        events=manager.committed_offset(number) + 1,
        # Last: a slot that advances while segments expire is higher by now, and never below the remaining ones.
        slots=tuple(log.slots.list()),
    )


class Untiered(NamedTuple):
    """Records of the hot tier that are in no segment yet."""

    records: int
    size: int
    """Their bytes, as stored."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A log and its cold tier at one moment. Without ``seen``, ``why`` says why the segments are unknown."""

    url: str
    cold: ColdTier
    hot: Bounds
    slot: SlotState | None
    """The tierer's slot; None if no tierer has run."""
    seen: TierView | None
    why: str | None
    left: Untiered
    now: int
    """Microseconds."""


def tier_status(log: HotLog, *, env: Env = SYSTEM) -> TierStatus:
    """The current state of the log's cold tier; ``NotFound`` if it has none."""
    cold = cold_tier(log)
    seen, why = None, None
    try:
        with follow_events(cold) as manager:
            seen = look_at(log, cold, manager)
    except StrandlineError as error:
        why = str(error)
    slot, hot = _tierers_slot(log), log.bounds()
    position = _untiered_from(slot, hot) if seen is None or seen.tiered is None else seen.tiered
    return TierStatus(log_address(log), cold, hot, slot, seen, why, _from(log, position), env.clock.now())


def untiered(log: HotLog) -> Untiered:
    """The part of a log that is in no segment yet, by the tierer's slot."""
    return _from(log, _untiered_from(_tierers_slot(log), log.bounds()))


def segment_states(seen: TierView) -> Counter[SegmentState]:
    """Number of segments in each state."""
    return Counter(segment.state for segment in seen.known.segments)


def superseded(seen: TierView) -> int:
    """Number of finished segments that no lookup finds any more: the next round removes them."""
    return segment_states(seen)[SegmentState.COPY_FINISHED] - len(seen.known.answering)


def _tierers_slot(log: HotLog) -> SlotState | None:
    return next((state for state in log.slots.list() if state.name == TIER_SLOT), None)


def _untiered_from(slot: SlotState | None, hot: Bounds) -> int:
    return hot.first if slot is None else slot.position


def _from(log: HotLog, position: int) -> Untiered:
    end = log.bounds().next
    if position >= end:
        return Untiered(0, 0)
    if not isinstance(log, ObjectLog):
        return Untiered(end - position, log.bytes_behind(position))
    head = log.head()
    return Untiered(end - position, bytes_from(head, max(position, head.floor), log.chunks))


def check_tier(log: HotLog, cold: ColdTier, reader: ColdReader, *, quick: bool) -> Verification:
    """Check a log's cold tier by its events: segments contiguous, there, of their size and of the log's history.

    Of each segment only the end is read, which has the checksums of the rest. ``quick`` compares only the end of the
    last segment with the log. The result's bounds are those of all segments, also below a hole.
    """
    store, manager, partition = reader.store, reader.registry, reader.partition
    found = Verification(cold.store)
    # The objects before the events: a copy is published before its object is stored, so that an object without an
    # event was deleted, or stored late by a slow tierer.
    listed = {found.info.path: found.info for found in list_segments(store, partition.topic_id, partition.partition)}
    seen = look_at(log, cold, manager)
    found.take(check_known(seen))
    finished = seen.known.finished
    found.examined["segments"] = len(finished)
    start = min((segment.start for segment in finished), default=seen.hot.first)
    found.bounds = Bounds(start, seen.hot.next if seen.tiered is None else seen.tiered)
    forget_tails()  # cached tails prove nothing about the store
    checks = [partial(defect, store, segment, listed.get(_path(segment))) for segment in finished]
    for number, wrong in sorted(ThreadPool(_READERS).run(checks, "segments")):
        if wrong is not None and _is_finished(manager, finished[number]):
            found.take([Finding(Severity.DAMAGE, FindingKind.SEGMENT, _path(finished[number]), wrong)])
    found.take(_history(log, store, seen, every=not quick))
    found.take(_orphans(store, listed.values(), seen))
    return found


def defect(store: ObjectStore, segment: SegmentMetadata, listed: ObjectInfo | None) -> str | None:
    """What is wrong with the size or the end of a segment's object, or None."""
    try:
        if listed is not None and listed.size != segment.size:
            return (
                f"{store.url}/{_path(segment)} is damaged: it has {listed.size} bytes, but {segment.size} by its "
                "events. Restore the object."
            )
        load_tail(store, segment)
    except (NotFound, CorruptData, UnsupportedVersion) as error:
        return str(error)
    return None


def _path(segment: SegmentMetadata) -> str:
    return segment_path(segment.segment, segment.start)


def _is_finished(manager: MetadataManager, segment: SegmentMetadata) -> bool:
    """Whether it is still readable: it may have expired since it was listed."""
    known = manager.current(segment.segment.partition, lambda cache: cache.get(segment.segment))
    return known is not None and known.state is SegmentState.COPY_FINISHED


def _history(log: HotLog, store: ObjectStore, seen: TierView, *, every: bool) -> Iterator[Finding]:
    """Divergence of segments from the log: by terms, and by the record at the end of the last or of ``every`` one."""
    kept = seen.known.answering
    if not kept:
        return
    history = read_history(log, max(segment.end for segment in kept) + 1)
    try:
        cuts = plan_cuts(kept, history, partition_of(seen.cold))
    except (Diverged, NotReady, Gap) as error:
        yield Finding(Severity.DAMAGE, FindingKind.HISTORY, seen.cold.store, str(error))
        return
    yield from map(_abandoned, cuts)
    parting = {cut.segment.segment for cut in cuts}
    shared = [segment for segment in kept if segment.end >= history.bounds.first and segment.segment not in parting]
    for segment in shared if every else shared[-1:]:
        try:
            same = is_same_record(log, store, segment, segment.end)
        except (NotFound, CorruptData, UnsupportedVersion):
            continue  # already reported as damaged
        if not same:
            yield _differing(segment)
            return
    slot = next((slot for slot in seen.slots if slot.name == TIER_SLOT and slot.pins), None)
    before = [segment for segment in kept if slot is not None and segment.end + 1 == slot.position]
    for segment in before:
        try:
            known = load_tail(store, segment).facts.fingerprint
        except (NotFound, CorruptData, UnsupportedVersion):
            continue
        if slot is not None and None not in (known, slot.fingerprint) and known != slot.fingerprint:
            yield _differing(segment)


def _abandoned(cut: SegmentCut) -> Finding:
    """A segment of a history that the log has abandoned."""
    path = _path(cut.segment)
    message = (
        f"{path} diverges from the log at offset {cut.at}, where the log continued in a later term: "
        "the next round of a tierer cuts it there."
    )
    return Finding(Severity.NOTE, FindingKind.HISTORY, path, message)


def _differing(segment: SegmentMetadata) -> Finding:
    """A segment with other records than the log, in the same terms."""
    path = _path(segment)
    message = (
        f"{path} ends with another record, at offset {segment.end}, than the log has there in the same term: the log "
        "was restored from a copy and continued, or the cold tier was. Restore a log and a cold tier that belong "
        "together; 'strandline tier run' says where the two diverge."
    )
    return Finding(Severity.DAMAGE, FindingKind.HISTORY, path, message)


def _orphans(store: ObjectStore, listed: Iterable[ObjectInfo], seen: TierView) -> Iterator[Finding]:
    known = {_path(segment) for segment in seen.known.segments}
    for found in listed:
        if found.path in known:
            continue
        # A segment whose deletion finished after it was listed is gone by now.
        if any(info.path == found.path for info in store.list(found.path)):
            message = (
                f"{found.path} ({found.size} bytes) has the name of a segment, but no event: a tierer removes it when "
                "it is a day old."
            )
            yield Finding(Severity.WASTE, FindingKind.ORPHAN, found.path, message)


# --- checks of the events ---------------------------------------------------------------------------------------


def check_known(seen: TierView) -> Iterator[Finding]:
    """Findings from the events alone; reads no object."""
    yield from _contiguity(seen)
    yield from _slots(seen)
    yield from _states(seen)


def _contiguity(seen: TierView) -> Iterator[Finding]:
    finished = seen.known.answering
    if not finished:
        return
    reached = finished[0].start
    for segment in finished:
        path = _path(segment)
        if segment.start > reached:
            yield _hole(path, reached, segment.start, "no segment has them")
        elif segment.start < reached:
            message = (
                f"{path} begins at offset {segment.start}, but segments before it hold everything up to {reached - 1}: "
                "two primaries copied it, and the later term is read."
            )
            yield Finding(Severity.NOTE, FindingKind.OVERLAP, path, message)
        reached = max(reached, segment.end + 1)
    if reached < seen.hot.first:
        yield _hole(seen.cold.store, reached, seen.hot.first, "neither tier has them")


def _hole(where: str, first: int, end: int, why: str) -> Finding:
    message = (
        f"There is a hole: offsets {first} to {end - 1} are lost, {why}. Restore their objects, or bootstrap "
        "consumers past them."
    )
    return Finding(Severity.DAMAGE, FindingKind.HOLE, where, message, offsets=(first, end))


def _slots(seen: TierView) -> Iterator[Finding]:
    first = seen.hot.first
    for segment in reversed(seen.known.answering):
        # As readers do: segments that do not reach the log are not read.
        if segment.end + 1 < first:
            break
        first = min(first, segment.start)
    for slot in seen.slots:
        if slot.name != TIER_SLOT and slot.pins and slot.position < first:
            message = (
                f"Slot {slot.name!r} needs offset {slot.position}, but both tiers begin at {first} or later: its "
                "records were removed. Bootstrap its consumer again, and reset the slot."
            )
            yield Finding(Severity.DAMAGE, FindingKind.SLOT, slot.name, message)


_STATE_FINDINGS: Final = {
    SegmentState.COPY_STARTED: (
        Severity.NOTE,
        "is being copied, or its tierer died: then the next round of a tierer removes it.",
    ),
    SegmentState.DELETE_STARTED: (
        Severity.NOTE,
        "was replaced, or is being deleted: a round of a tierer deletes it, after the grace period if it was replaced.",
    ),
    SegmentState.COPY_FINISHED: (
        Severity.WASTE,
        "holds only records that other segments hold: the next round of a tierer removes it.",
    ),
}


def _states(seen: TierView) -> Iterator[Finding]:
    answering = {segment.segment for segment in seen.known.answering}
    for segment in seen.known.segments:
        if segment.state in _STATE_FINDINGS and segment.segment not in answering:
            (severity, meaning), path = _STATE_FINDINGS[segment.state], _path(segment)
            message = f"{path} (offsets {segment.start} to {segment.end}) {meaning}"
            yield Finding(severity, FindingKind.STATE, path, message)
    if seen.known.deletion is not None:
        message = f"The whole cold tier is being deleted: {seen.known.deletion.state}."
        yield Finding(Severity.NOTE, FindingKind.STATE, seen.cold.store, message)
