"""The values of the cold tier: an inconsistent value is refused at its creation, with the reason."""

import dataclasses
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

ORDERS = TopicPartition("orders", UUID(int=0xCA), 7)
SEGMENT = SegmentId(ORDERS, UUID(int=0xFE))
METADATA = SegmentMetadata(
    segment=SEGMENT,
    start=0,
    end=99,
    broker=42,
    max_timestamp=100,
    event_timestamp=123,
    terms=((0, 0), (1, 50)),
    size=4096,
)
UPDATE = SegmentUpdate(segment=SEGMENT, broker=42, event_timestamp=456, state=SegmentState.COPY_FINISHED)
DELETE = PartitionDelete(partition=ORDERS, broker=42, event_timestamp=789, state=PartitionDeleteState.MARKED)


def test_topic_partitions_are_equal_and_hash_alike_without_regard_to_the_name():
    renamed = TopicPartition("bestellungen", ORDERS.topic_id, 7)
    assert renamed == ORDERS
    assert hash(renamed) == hash(ORDERS)
    assert SegmentId(renamed, SEGMENT.id) == SEGMENT
    assert {SEGMENT: 1}[SegmentId(renamed, SEGMENT.id)] == 1


def test_topic_partitions_of_another_topic_or_number_differ_under_the_same_name():
    assert TopicPartition("orders", UUID(int=1), 7) != ORDERS
    assert TopicPartition("orders", ORDERS.topic_id, 8) != ORDERS
    assert SegmentId(ORDERS, UUID(int=1)) != SEGMENT


@pytest.mark.parametrize("value", [ORDERS, SEGMENT, METADATA, UPDATE, DELETE], ids=lambda value: type(value).__name__)
def test_values_cannot_be_changed_and_can_be_keys(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)
    assert not hasattr(value, "__dict__")
    assert {value: 1}[dataclasses.replace(value)] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start": -1}, "offsets -1 to 99"),
        ({"start": 100}, "offsets 100 to 99"),
        ({"end": 1 << 63}, f"offsets 0 to {1 << 63}"),
        ({"size": -1}, "-1 bytes"),
        ({"size": 1 << 31}, "below 2 GiB"),
        ({"terms": ()}, "no terms"),
        ({"terms": ((1, 0), (0, 50))}, "term 0 after 1"),
        ({"terms": ((1, 0), (1, 50))}, "term 1 after 1"),
        ({"terms": ((-1, 0),)}, "term -1 after"),
        ({"terms": ((1 << 31, 0),)}, "below 2\\^31"),
        ({"terms": ((0, 50), (1, 49))}, "term 1 start at 49 and the one before it at 50"),
        ({"terms": ((0, -1),)}, "start at -1"),
        ({"terms": ((0, 1 << 63),)}, f"start at {1 << 63}"),
        ({"broker": 1 << 31}, f"broker {1 << 31}"),
        ({"broker": -(1 << 31) - 1}, "broker"),
        ({"max_timestamp": 1 << 63}, "maximum timestamp"),
        ({"event_timestamp": -(1 << 63) - 1}, "event timestamp"),
    ],
)
def test_metadata_that_cannot_be_is_refused_with_the_reason(changes, reason):
    with pytest.raises(InvalidInput, match=reason):
        dataclasses.replace(METADATA, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 99},
        {"end": (1 << 63) - 1},
        {"size": 0},
        {"size": (1 << 31) - 1},
        {"terms": (((1 << 31) - 1, (1 << 63) - 1),)},
        {"terms": ((3, 50), (9, 50))},
        {"max_timestamp": -1},
        {"custom_metadata": b""},
    ],
    ids=str,
)
def test_what_is_just_within_the_bounds_is_taken(changes):
    made = dataclasses.replace(METADATA, **changes)
    assert all(getattr(made, name) == value for name, value in changes.items())


@pytest.mark.parametrize("value", [UPDATE, DELETE], ids=["update", "partition delete"])
@pytest.mark.parametrize(("field", "bits"), [("broker", 32), ("event_timestamp", 64)])
def test_events_from_no_possible_broker_or_time_are_refused(value, field, bits):
    for limit in (1 << bits - 1, -(1 << bits - 1) - 1):
        with pytest.raises(InvalidInput, match=str(limit)):
            dataclasses.replace(value, **{field: limit})


@pytest.mark.parametrize(
    ("name", "partition", "reason"),
    [
        ("orders", -1, "no partition -1 of 'orders'"),
        ("orders", 1 << 31, "no partition"),
        ("ö" * 16384, 0, "32768 bytes"),
        ("\ud800", 0, "not valid Unicode"),
    ],
)
def test_a_topic_partition_that_cannot_be_is_refused_with_the_reason(name, partition, reason):
    with pytest.raises(InvalidInput, match=reason):
        TopicPartition(name, UUID(int=1), partition)


class Endless(bytes):
    """Bytes that claim to be longer than an event can record."""

    __slots__ = ()

    def __len__(self) -> int:
        return (1 << 31) - 1


@pytest.mark.parametrize("value", [METADATA, UPDATE], ids=["add", "update"])
def test_custom_metadata_that_no_length_can_tell_is_refused(value):
    with pytest.raises(InvalidInput, match="custom metadata"):
        dataclasses.replace(value, custom_metadata=Endless())


def test_a_long_or_broken_name_does_not_spoil_a_message():
    with pytest.raises(InvalidInput) as raised:
        dataclasses.replace(
            METADATA, segment=SegmentId(TopicPartition("a\n" * 9999, UUID(int=1), 0), UUID(int=2)), size=-1
        )
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_states_are_shown_in_words():
    assert [str(state) for state in SegmentState] == [
        "copy started",
        "copy finished",
        "delete started",
        "delete finished",
    ]
    assert [str(state) for state in PartitionDeleteState] == ["marked", "started", "finished"]
