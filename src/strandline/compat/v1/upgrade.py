"""Upgrade of a version 1 queue to an object log: copies each batch exactly once, however often it is restarted."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

import pyarrow as pa

from strandline.compat.v1 import edits
from strandline.compat.v1.log import QueueLog
from strandline.compat.v1.reading import QueueSpan
from strandline.errors import (
    Contended,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
)
from strandline.formats.arrow.block import Compression
from strandline.log.object.head.index import StoredChunks, entries_from
from strandline.log.object.log import ObjectLog
from strandline.log.object.upload import Lister, ObjectShipper
from strandline.log.read.reading import fetch_in_order
from strandline.log.read.span_tasks import last_record
from strandline.log.writers.source import is_member, is_source, source_writer
from strandline.model.cursor import Limit
from strandline.model.head import Head, MetadataRanges, QueueManifest, WriterId
from strandline.model.records import RECORD_SCHEMA

_AHEAD: Final = 64
"""Number of batches planned at a time."""

_TRIES: Final = 64
"""How often a batch is retried because other writers have appended to the target meanwhile."""

_SEQUENCES: Final = (1 << 62) - 1
_VARIANT: Final = 1 << 63
_VERSION: Final = 0x80
_MAX_TIME: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class UpgradeProgress:
    """Progress of a copy: ``next`` of ``end`` is the next batch of the queue.

    ``copied`` and ``records`` were appended by this run. ``missed`` batches were acknowledged by the queue's consumer
    before they could be copied; ``empty`` ones held no record.
    """

    next: int
    end: int
    copied: int = 0
    records: int = 0
    missed: int = 0
    empty: int = 0


def upgrade(
    queue: QueueLog,
    target: ObjectLog,
    *,
    acknowledge: bool = False,
    compression: str = "lz4",
    on_progress: Callable[[UpgradeProgress], None] = lambda _: None,
) -> UpgradeProgress:
    """Copy every batch that the queue lists now into the target, each once and in order, with its metadata.

    A batch of the queue becomes one of the target. Killed at any moment and started again, it continues after the last
    batch in the target; concurrent copies and other writers of the target do no harm. The progress is in the target
    only. Batches that the queue's consumer acknowledged before they were copied are lost, and counted.

    Nothing is claimed or acknowledged on the queue, unless ``acknowledge`` is set: then, when all is durable in
    the target, the queue is claimed, which fences its consumer, and the copied batches are acknowledged.

    ``CorruptData`` or ``NotFound`` naming an unreadable batch: it ends there. ``Diverged`` if the target has
    batches that the queue never had, ``OutcomeUnknown`` if it no longer knows the progress of an earlier copy,
    ``InvalidInput`` if an ingest has copied the queue into the target.
    """
    if target.last_append(source_writer(str(queue.log_id))) is not None:
        raise InvalidInput(
            f"{target.url} holds records of {queue.url} by an ingest, which would be there twice: go on with "
            "'strandline ingest', or copy the queue into another log."
        )
    copy = _QueueCopy(queue, target, Compression.named(compression))
    bounds = queue.bounds()
    done = copy.position(target.head())
    if done is None:
        refuse_other_address(queue, target)
    if done is not None and done >= bounds.next:
        raise Diverged(
            f"{target.url} holds copies through batch {done}, and {queue.url} ends at {bounds.next}: the queue was "
            "replaced. Copy it into another log."
        )
    progress = UpgradeProgress(bounds.first if done is None else done + 1, bounds.next)
    while progress.next < progress.end:
        progress = _round(queue, copy, progress, on_progress)
    if acknowledge and progress.end:
        queue.new_cell().update(lambda manifest: _acknowledged(manifest, progress.end - 1))
    return progress


def refuse_upgraded(queue: object, target: ObjectLog) -> None:
    """``InvalidInput`` if an upgrade has copied this queue into the target: an ingest would append its batches again.

    Any other source is fine.
    """
    if not isinstance(queue, QueueLog):
        return
    with contextlib.suppress(OutcomeUnknown):  # the target has forgotten its oldest writers: it may be any queue's
        done = _QueueCopy(queue, target, Compression.LZ4).position(target.head())
        if done is not None:
            raise InvalidInput(
                f"{target.url} holds {queue.url} through batch {done} by an upgrade, and would hold its records twice: "
                "go on with 'strandline upgrade', or ingest the queue into another log."
            )
    refuse_other_address(queue, target)


def refuse_other_address(queue: QueueLog, target: ObjectLog) -> None:
    """``InvalidInput`` if the target holds this queue, copied from another address: its records would be there twice.

    A queue has no identity but its address. But the last record that came from it is in both: its value and time are
    compared at the position that the target remembers.
    """
    bounds = queue.bounds()
    for writer, last in target.head().writers.items():
        position = _position_of(writer, last.number)
        if position is None or not bounds.first < position <= bounds.next:
            continue
        there = last_record(target, last.first + last.count)
        if there is not None and there.equals(last_record(queue, position)):
            raise InvalidInput(
                f"{target.url} holds the records of {queue.url} before batch {position:,}, copied from another address "
                "of the same queue (a link, or another spelling), or from a copy of it, and would hold them twice: go "
                "on with that address, or choose another log."
            )


def _position_of(writer: WriterId, number: int) -> int | None:
    """The position in a source, or in a queue that was upgraded; None for other writers."""
    if is_source(writer):
        return number
    is_upgrade = writer.bytes[6] >> 4 == _VERSION >> 4 and not is_member(writer)
    return (int.from_bytes(writer.bytes[8:], "big") & _SEQUENCES) + number + 1 if is_upgrade else None


def _round(
    queue: QueueLog, copy: _QueueCopy, progress: UpgradeProgress, on_progress: Callable[[UpgradeProgress], None]
) -> UpgradeProgress:
    first = queue.bounds().first
    if first > progress.next:
        here = min(first, progress.end)
        return replace(progress, next=here, missed=progress.missed + here - progress.next)
    try:
        spans = queue.plan(queue.start().at(progress.next), Limit(batches=_AHEAD, upto=progress.end))
        for span, batches in fetch_in_order(spans):
            appended = copy.append(span, batches)
            progress = replace(
                progress,
                next=span.next,
                copied=progress.copied + appended,
                records=progress.records + (sum(batch.num_rows for batch in batches) if appended else 0),
                empty=progress.empty + (not batches),
            )
            on_progress(progress)
    except CursorExpired:
        return progress  # acknowledged meanwhile: the next round counts it as missed
    except NotFound:
        if queue.bounds().first <= progress.next:
            raise
    return progress


def _acknowledged(manifest: QueueManifest, through: int) -> QueueManifest:
    return manifest if edits.first_listed(manifest) > through else edits.claim(manifest, through)


class _QueueCopy:
    """The appending side. Writer and number of each append identify the queue and its batch.

    The writer's id holds the sequence of its number 0; a gap in the sequences begins a new writer. And
    each append expects the target to end where it ended when its last batch was looked up: so two concurrent copies
    that have seen different gaps cannot both append one batch.
    """

    def __init__(self, queue: QueueLog, target: ObjectLog, compression: Compression) -> None:
        self._target = target
        self._compression = compression
        self._lister = Lister(target.store, target.log_id, env=target.env)
        digest = bytearray(hashlib.blake2b(queue.log_id.bytes + target.log_id.bytes, digest_size=8).digest())
        digest[6] = _VERSION | digest[6] & 0x0F  # no random id has this version
        self._mark = bytes(digest)

    def _writer(self, first: int) -> WriterId:
        return WriterId(UUID(bytes=self._mark + (_VARIANT | first).to_bytes(8, "big")))

    def _sequence(self, writer: WriterId, number: int) -> int | None:
        """The sequence of the queue's batch; None if it is not of this queue."""
        if writer.bytes[:8] != self._mark:
            return None
        return (int.from_bytes(writer.bytes[8:], "big") & _SEQUENCES) + number

    def position(self, head: Head) -> int | None:
        """The last batch of the queue in the target; None if there is none."""
        known = [self._sequence(writer, last.number) for writer, last in head.writers.items()]
        if not any(sequence is not None for sequence in known) and head.writers_floor:
            # The head has forgotten some writers, perhaps this one: then the listing is searched.
            entries = entries_from(head, head.floor, StoredChunks(self._target.store))
            known = [self._sequence(entry.writer, entry.number) for entry in entries]
            if not any(sequence is not None for sequence in known) and head.floor:
                raise OutcomeUnknown(
                    f"{self._target.url} has forgotten its oldest writers and its oldest batches: whether the queue "
                    "was copied into it before cannot be known. Copy it into another log."
                )
        return max((sequence for sequence in known if sequence is not None), default=None)

    def append(self, span: QueueSpan, batches: list[pa.RecordBatch]) -> bool:
        """Append one batch of the queue, unless it is in the target; returns whether it was appended."""
        if not batches:
            return False
        sequence = span.entry.sequence
        records = [batch.select(RECORD_SCHEMA.names) for batch in batches]
        for _ in range(_TRIES):
            head = self._target.head()
            last = self.position(head)
            if last is not None and sequence <= last:
                return False
            writer, number = self._next(head, sequence)
            shipper = ObjectShipper(self._lister, writer=writer, born=head.next_sequence, compression=self._compression)
            draft = shipper.new_draft()
            draft.add(records)
            ranges = MetadataRanges.of(span.entry.metadata)
            times = tuple(max(-_MAX_TIME - 1, min(time, _MAX_TIME)) for time in ranges.times)
            draft.attach(replace(ranges, times=times))
            try:
                shipper.enlist([shipper.upload(shipper.seal(draft, number=number, expect=head.next_offset))])
            except ExpectationFailed:
                continue
            return True
        raise Contended(f"{self._target.url} was appended to by others at each of {_TRIES} tries. Try again.")

    def _next(self, head: Head, sequence: int) -> tuple[WriterId, int]:
        for writer, last in head.writers.items():
            if self._sequence(writer, last.number) == sequence - 1:
                return writer, last.number + 1
        return self._writer(sequence), 0
