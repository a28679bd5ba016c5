"""The lifecycle of a segment and of a partition's deletion: every state with every event, and exact retries."""

from dataclasses import replace
from itertools import product
from uuid import UUID

import pytest

from strandline.errors import InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata.lifecycle import add_segment, advance_deletion, update_segment

ORDERS = TopicPartition("orders", UUID(int=0xCA), 7)
RENAMED = TopicPartition("renamed", ORDERS.topic_id, 7)
STATES = [None, *SegmentState]
DELETIONS = [None, *PartitionDeleteState]

STEPS = {
    ("copy started", "copy finished"),
    ("copy started", "delete started"),
    ("copy finished", "delete started"),
    ("delete started", "delete finished"),
}
DELETION_STEPS = {("none", "marked"), ("marked", "started"), ("started", "finished")}


def segment(state, **changes):
    """A segment after the event that led to this state; None for one that nobody has told of."""
    if state is None:
        return None
    made = SegmentMetadata(
        segment=SegmentId(ORDERS, UUID(int=0xFE)),
        start=0,
        end=99,
        broker=42,
        max_timestamp=100,
        event_timestamp=123,
        terms=((0, 0), (1, 50)),
        size=4096,
        custom_metadata=b"place",
        state=state,
    )
    return replace(made, **changes)


def update(state, **changes):
    """The update that leads to ``segment(state)``."""
    of = SegmentId(ORDERS, UUID(int=0xFE))
    made = SegmentUpdate(segment=of, broker=42, event_timestamp=123, state=state, custom_metadata=b"place")
    return replace(made, **changes)


def deletion(state, **changes):
    if state is None:
        return None
    return replace(PartitionDelete(partition=ORDERS, broker=42, event_timestamp=789, state=state), **changes)


OTHERWISE = [{"broker": 43}, {"event_timestamp": 124}, {"custom_metadata": b"moved"}, {"custom_metadata": None}]
"""Ways in which an update differs from the one that led to the present state."""


def refusal(state, wanted):
    return f"cannot go from {state or 'none'} to {wanted}: "


# --- segments: every state, every event ------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "wanted"), list(product(STATES, SegmentState)), ids=str)
@pytest.mark.parametrize("changes", OTHERWISE, ids=str)
def test_an_update_goes_along_an_edge_and_along_nothing_else(state, wanted, changes):
    current, event = segment(state), update(wanted, **changes)
    if (str(state), str(wanted)) in STEPS:
        assert update_segment(current, event) == segment(wanted, **changes)
    else:
        with pytest.raises(InvalidInput, match=refusal(state, wanted)):
            update_segment(current, event)


@pytest.mark.parametrize("state", SegmentState, ids=str)
def test_an_exact_retry_of_the_last_update_is_a_no_op(state):
    current = segment(state)
    if state is SegmentState.COPY_STARTED:  # an add led here, so that no update can be a retry
        with pytest.raises(InvalidInput, match=refusal(state, state)):
            update_segment(current, update(state))
    else:
        assert update_segment(current, update(state)) is current
        assert update_segment(current, update(state, segment=SegmentId(RENAMED, UUID(int=0xFE)))) is current


@pytest.mark.parametrize(("state", "wanted"), list(product(STATES, SegmentState)), ids=str)
@pytest.mark.parametrize(
    "changes", [{}, *OTHERWISE, {"size": 1}, {"end": 98}, {"terms": ((0, 0),)}, {"no_transaction_index": True}], ids=str
)
def test_only_an_unknown_segment_is_added_and_only_as_copy_started(state, wanted, changes):
    current, event = segment(state), segment(wanted, **changes)
    if state is None and wanted is SegmentState.COPY_STARTED:
        assert add_segment(current, event) is event
    elif state is wanted is SegmentState.COPY_STARTED and not changes:
        assert add_segment(current, event) is current
    else:
        with pytest.raises(InvalidInput, match=refusal(state, wanted)):
            add_segment(current, event)


def test_an_update_changes_its_own_fields_and_leaves_the_rest():
    before = segment(SegmentState.COPY_STARTED)
    after = update_segment(
        before, update(SegmentState.COPY_FINISHED, broker=1, event_timestamp=2, custom_metadata=None)
    )
    assert (after.broker, after.event_timestamp, after.custom_metadata) == (1, 2, None)
    assert after.state is SegmentState.COPY_FINISHED
    told = {"broker": 42, "event_timestamp": 123, "custom_metadata": b"place", "state": SegmentState.COPY_STARTED}
    assert replace(after, **told) == before


def test_a_retry_of_an_event_before_the_last_one_is_refused():
    started = segment(SegmentState.COPY_STARTED)
    finish = update(SegmentState.COPY_FINISHED, event_timestamp=124)
    finished = update_segment(started, finish)
    deleting = update_segment(finished, update(SegmentState.DELETE_STARTED, event_timestamp=125))
    with pytest.raises(InvalidInput, match=refusal("copy finished", "copy started")):
        add_segment(finished, started)
    with pytest.raises(InvalidInput, match=refusal("delete started", "copy finished")):
        update_segment(deleting, finish)


# --- the deletion of a partition: every state, every event -----------------------------------------------------


@pytest.mark.parametrize(("state", "wanted"), list(product(DELETIONS, PartitionDeleteState)), ids=str)
@pytest.mark.parametrize("changes", [{"broker": 43}, {"event_timestamp": 790}], ids=str)
def test_a_deletion_goes_along_an_edge_and_along_nothing_else(state, wanted, changes):
    current, event = deletion(state), deletion(wanted, **changes)
    if (str(state).lower(), str(wanted)) in DELETION_STEPS:
        assert advance_deletion(current, event) is event
    else:
        with pytest.raises(InvalidInput, match=refusal(state, wanted)):
            advance_deletion(current, event)


@pytest.mark.parametrize("state", PartitionDeleteState, ids=str)
def test_an_exact_retry_of_the_last_deletion_event_is_a_no_op(state):
    current = deletion(state)
    assert advance_deletion(current, deletion(state)) is current
    assert advance_deletion(current, deletion(state, partition=RENAMED)) is current
