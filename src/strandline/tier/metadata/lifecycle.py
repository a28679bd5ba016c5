"""State transitions of segments and of partition deletions: pure, and the same on every node.

An exact retry of the last event changes nothing, so a publisher that lost the answer may publish again. Any other event
that is not the next step is :class:`InvalidInput`, which names both states. The caller looks up the state by the event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
)

UPDATE_STEPS: Final = frozenset(
    {
        (SegmentState.COPY_STARTED.value, SegmentState.COPY_FINISHED),
        (SegmentState.COPY_STARTED.value, SegmentState.DELETE_STARTED),
        (SegmentState.COPY_FINISHED.value, SegmentState.DELETE_STARTED),
        (SegmentState.DELETE_STARTED.value, SegmentState.DELETE_FINISHED),
    }
)
"""The valid updates: the number of the state before, and the state after. The cache checks most events against it, and
builds no :class:`SegmentMetadata` for them."""
_DELETION_STEPS: Final[dict[PartitionDeleteState | None, PartitionDeleteState | None]] = {
    None: PartitionDeleteState.MARKED,
    PartitionDeleteState.MARKED: PartitionDeleteState.STARTED,
    PartitionDeleteState.STARTED: PartitionDeleteState.FINISHED,
    PartitionDeleteState.FINISHED: None,
}
_ONCE: Final = "add a segment once, when its copy starts"
_LOOK: Final = "look up where it is now"


def add_segment(current: SegmentMetadata | None, event: SegmentMetadata) -> SegmentMetadata:
    """The segment after it was added; ``current`` itself if this add was the last event.

    Only a segment that is not known, in the state copy started, can be added.
    """
    if event.state is SegmentState.COPY_STARTED and (current is None or event == current):
        return event if current is None else current
    state = None if current is None else current.state
    raise _refused(f"Segment {event.segment}", state, event.state, _ONCE)


def update_segment(current: SegmentMetadata | None, event: SegmentUpdate) -> SegmentMetadata:
    """The segment after the update; ``current`` itself if this update was the last event."""
    if current is None:
        raise _refused(f"Segment {event.segment}", None, event.state, "add it first")
    updated = replace(
        current,
        broker=event.broker,
        event_timestamp=event.event_timestamp,
        custom_metadata=event.custom_metadata,
        state=event.state,
    )
    if (current.state.value, event.state) in UPDATE_STEPS:
        return updated
    # Only an add leads to copy started: an update to it is never the last event again, even if it changes nothing.
    if updated == current and event.state is not SegmentState.COPY_STARTED:
        return current
    raise _refused(f"Segment {event.segment}", current.state, event.state, _LOOK)


def advance_deletion(current: PartitionDelete | None, event: PartitionDelete) -> PartitionDelete:
    """The partition's deletion after the event; ``current`` itself if this was the last event."""
    if current is not None and event == current:
        return current
    state = None if current is None else current.state
    if event.state is not _DELETION_STEPS[state]:
        raise _refused(f"The deletion of {event.partition}", state, event.state, _LOOK)
    return event


def _refused(what: str, state: object, wanted: object, advice: str) -> InvalidInput:
    return InvalidInput(f"{what} cannot go from {state or 'none'} to {wanted}: {advice}.")


@dataclass(frozen=True, slots=True)
class Removed:
    """The last event of a removed segment, as far as a retry of it must be recognised."""

    broker: int
    event_timestamp: int
    custom_digest: bytes | None

    @classmethod
    def by(cls, event: SegmentUpdate) -> Removed:
        """The record of the event that removed the segment."""
        custom = event.custom_metadata
        digest = None if custom is None else blake2b(custom, digest_size=16).digest()
        return cls(event.broker, event.event_timestamp, digest)


def check_removed(last: Removed | None, event: SegmentMetadata | SegmentUpdate) -> None:
    """Refuse an event of a segment that is not there, unless it adds a new one or is the one that removed it."""
    if last is None:
        add_segment(None, event) if isinstance(event, SegmentMetadata) else update_segment(None, event)
    elif isinstance(event, SegmentMetadata):
        raise _refused(f"Segment {event.segment}", SegmentState.DELETE_FINISHED, event.state, _ONCE)
    elif event.state is not SegmentState.DELETE_FINISHED or Removed.by(event) != last:
        raise _refused(f"Segment {event.segment}", SegmentState.DELETE_FINISHED, event.state, _LOOK)
