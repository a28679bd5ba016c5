"""``strandline segments verify``: compares every segment object with its event, its checksums and the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import pyarrow as pa
import typer

from strandline.cli import output as show
from strandline.cli.common import Debug, Json, guarded
from strandline.cli.findings import finish
from strandline.cli.tier.checks import check_known, differing, orphan, parted
from strandline.cli.tier.shared import AnyLog, Place, TierView, look_at, open_to_look
from strandline.errors import CorruptData, Diverged, Gap, NotFound, NotReady, UnsupportedVersion
from strandline.log.findings import Finding, FindingKind, Severity, Verification
from strandline.model.retention import TIER_SLOT
from strandline.model.segments import ColdTier, SegmentMetadata, SegmentState
from strandline.storage.store import ObjectStore
from strandline.storage.urls import open_store
from strandline.tier.copy.history import is_same_record, plan_cuts, read_history
from strandline.tier.copy.segment_files import (
    SegmentObject,
    examine_segment,
    forget_tails,
    list_segments,
    load_tail,
    segment_path,
)
from strandline.tier.metadata.manager import MetadataManager
from strandline.tier.opening import cold_tier, follow_events, partition_of


@guarded
def verify(
    log: Place,
    *,
    fast: Annotated[
        bool, typer.Option("--fast", help="Read no records: only sizes, and the ends of segments with their checksums.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="How many segments are read at once.")] = 4,
    json: Json = False,
    debug: Debug = False,  # noqa: ARG001 - guarded looks at it
) -> None:
    """Verify the cold tier: each segment there, of its size, with its checksums, and each record in it readable.

    Segments must follow each other and reach the hot tier, be of its history, and agree with their events, and slots
    must have what they need; objects that no event knows are told. Changes nothing, and tierers may run meanwhile.
    Findings are *damage* (something is lost or wrong), *waste* and *notes*. Ends with status 1 if there is damage.
    """
    opened = open_to_look(log)
    cold = cold_tier(opened)
    with follow_events(cold) as manager:
        url, found = look(opened, cold, manager, fast=fast, workers=workers, quiet=json)
    seen = found.examined
    looked = (
        f"{show.counted(seen['segments'], 'segment')} {'looked at' if fast else 'read'}, with "
        f"{show.counted(seen['records'], 'record')} ({show.size(seen['bytes'])})"
    )
    finish(found, looked, json=json, url=url, store=cold.store, fast=fast)


def look(
    log: AnyLog, cold: ColdTier, manager: MetadataManager, *, fast: bool, workers: int, quiet: bool = False
) -> tuple[str, Verification]:
    """Verify a log's cold tier, with a progress bar unless ``quiet``; returns the log's URL and the result."""
    store, partition = open_store(cold.store), partition_of(cold)
    # The objects before the events: a copy is told of before its object is put, so that what no event knows then was
    # deleted, or put by somebody slow.
    listed = {found.info.path: found for found in list_segments(store, partition.topic_id, partition.partition)}
    seen = look_at(log, cold, manager)
    found = Verification(cold.store, Counter(segments=0, records=0, bytes=0))
    found.take(check_known(seen))
    finished = [segment for segment in seen.segments if segment.state is SegmentState.COPY_FINISHED]
    forget_tails()  # what this process has read before proves nothing about the store

    def judge(segment: SegmentMetadata) -> tuple[SegmentMetadata, str | None]:
        return segment, examined(store, segment, listed.get(_path(segment)), fast=fast)

    what = "looking at segments" if fast else "reading bytes"
    total = len(finished) if fast else sum(segment.size for segment in finished)
    with show.meter(what, total=total, quiet=quiet) as advance, _pool(workers) as pool:
        for segment, wrong in pool.map(judge, finished):
            advance(1 if fast else segment.size)
            found.examined["segments"] += 1
            found.examined["records"] += segment.end - segment.start + 1
            found.examined["bytes"] += segment.size
            if wrong is not None and _is_finished(manager, segment):
                found.take([Finding(Severity.DAMAGE, FindingKind.SEGMENT, _path(segment), wrong)])
    found.take(_history(log, store, seen, finished, fast=fast))
    found.take(_orphans(store, listed.values(), seen))
    return seen.url, found


def examined(store: ObjectStore, segment: SegmentMetadata, found: SegmentObject | None, *, fast: bool) -> str | None:
    """What is wrong with a segment's object; None if nothing is."""
    try:
        if found is not None and found.info.size != segment.size:
            return (
                f"{store.url}/{_path(segment)} is damaged: it has {found.info.size} bytes, and {segment.size} by its "
                "events. Restore the object."
            )
        load_tail(store, segment)
        if not fast:
            # The tail is what its events sealed, and has the checksum of all that is before it.
            examine_segment(store, _path(segment), segment.size)
    except (NotFound, CorruptData, UnsupportedVersion) as error:
        return str(error)
    except pa.ArrowException as error:
        return f"{store.url}/{_path(segment)} cannot be decoded ({error}): restore the object."
    return None


def _path(segment: SegmentMetadata) -> str:
    return segment_path(segment.segment, segment.start)


def _is_finished(manager: MetadataManager, segment: SegmentMetadata) -> bool:
    """Whether it is still to be read: it may have expired since it was listed."""

    def ask(cache: Any) -> bool:
        known = cache.get(segment.segment)
        return known is not None and known.state is SegmentState.COPY_FINISHED

    return manager.current(segment.segment.partition, ask)


def _history(
    log: AnyLog, store: ObjectStore, seen: TierView, segments: Sequence[SegmentMetadata], *, fast: bool
) -> Iterator[Finding]:
    """Where segments are of another history than the log: by terms, and by batches and records that both have."""
    kept = [segment for segment in segments if segment.segment not in seen.spare]
    if not kept:
        return
    history = read_history(log, max(segment.end for segment in kept) + 1)
    try:
        cuts = plan_cuts(kept, history, partition_of(seen.cold))
    except (Diverged, NotReady, Gap) as error:
        yield Finding(Severity.DAMAGE, FindingKind.HISTORY, seen.cold.store, str(error))
        return
    yield from map(parted, cuts)
    parting = {cut.segment.segment for cut in cuts}
    shared = [segment for segment in kept if segment.end >= history.bounds.first and segment.segment not in parting]
    for segment in shared[-1:] if fast else shared:
        try:
            same = is_same_record(log, store, segment, segment.end)
        except (NotFound, CorruptData, UnsupportedVersion):
            continue  # told already, with what is wrong with it
        if not same:
            yield differing(segment)
            return
    slot = next((slot for slot in seen.slots if slot.name == TIER_SLOT and slot.pins), None)
    before = [segment for segment in kept if slot is not None and segment.end + 1 == slot.position]
    for segment in before:
        try:
            known = load_tail(store, segment).facts.fingerprint
        except (NotFound, CorruptData, UnsupportedVersion):
            continue
        if slot is not None and None not in (known, slot.fingerprint) and known != slot.fingerprint:
            yield differing(segment)


def _orphans(store: ObjectStore, listed: Iterable[SegmentObject], seen: TierView) -> Iterator[Finding]:
    known = {_path(segment) for segment in seen.segments}
    for found in listed:
        if found.info.path in known:
            continue
        # One whose deletion was finished after it was listed is gone by now.
        if any(info.path == found.info.path for info in store.list(found.info.path)):
            yield orphan(found.info.path, found.info.size)


@contextmanager
def _pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="strandline-segments")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C what has not begun does not begin
