"""What an event makes of a segment or of a partition's deletion: pure, and the same on every node.

An exact retry of the last event changes nothing, so that whoever lost an answer may publish again. Whatever else is
not the next step is :class:`InvalidInput` that names both states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
)

_SEGMENT_STEPS: Final[dict[SegmentState, frozenset[SegmentState]]] = {
    SegmentState.COPY_STARTED: frozenset({SegmentState.COPY_FINISHED, SegmentState.DELETE_STARTED}),
    SegmentState.COPY_FINISHED: frozenset({SegmentState.DELETE_STARTED}),
    SegmentState.DELETE_STARTED: frozenset({SegmentState.DELETE_FINISHED}),
    SegmentState.DELETE_FINISHED: frozenset(),
}
_DELETION_STEPS: Final[dict[PartitionDeleteState | None, PartitionDeleteState | None]] = {
    None: PartitionDeleteState.MARKED,
    PartitionDeleteState.MARKED: PartitionDeleteState.STARTED,
    PartitionDeleteState.STARTED: PartitionDeleteState.FINISHED,
    PartitionDeleteState.FINISHED: None,
}


def add_segment(current: SegmentMetadata | None, event: SegmentMetadata) -> SegmentMetadata:
    """The segment after it was added; ``current`` itself if this add was the last event.

    Only a segment that is not known, in the state copy started, can be added.
    """
    if current is not None and event.segment != current.segment:
        raise _another(event.segment, current.segment)
    if event.state is SegmentState.COPY_STARTED and (current is None or event == current):
        return event if current is None else current
    state = None if current is None else current.state
    raise _refused(f"Segment {event.segment}", state, event.state, "add a segment once, when its copy starts")


def update_segment(current: SegmentMetadata | None, event: SegmentUpdate) -> SegmentMetadata:
    """The segment after the update; ``current`` itself if this update was the last event."""
    if current is None:
        raise _refused(f"Segment {event.segment}", None, event.state, "add it first")
    if event.segment != current.segment:
        raise _another(event.segment, current.segment)
    updated = replace(
        current,
        broker=event.broker,
        event_timestamp=event.event_timestamp,
        custom_metadata=event.custom_metadata,
        state=event.state,
    )
    if event.state in _SEGMENT_STEPS[current.state]:
        return updated
    # Only an add leads to copy started: an update to it is never the last event again, even if it changes nothing.
    if updated == current and event.state is not SegmentState.COPY_STARTED:
        return current
    raise _refused(f"Segment {event.segment}", current.state, event.state, "look up where it is now")


def advance_deletion(current: PartitionDelete | None, event: PartitionDelete) -> PartitionDelete:
    """The partition's deletion after the event; ``current`` itself if this was the last event."""
    if current is not None:
        if event.partition != current.partition:
            raise _another(event.partition, current.partition)
        if event == current:
            return current
    state = None if current is None else current.state
    if event.state is not _DELETION_STEPS[state]:
        raise _refused(f"The deletion of {event.partition}", state, event.state, "look up where it is now")
    return event


def _refused(what: str, state: object, wanted: object, advice: str) -> InvalidInput:
    return InvalidInput(f"{what} cannot go from {state or 'none'} to {wanted}: {advice}.")


def _another(told: object, current: object) -> InvalidInput:
    return InvalidInput(f"An event of {told} cannot change {current}: give each event to what it tells of.")
