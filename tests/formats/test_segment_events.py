"""Segment events: the shared vectors by name, round trips, every kind of damage, and which partition they go to."""

import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.segment.events import decode_event, encode_event, metadata_partition
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from tests.formats.test_hostile_bytes import damage, survives
from tests.matrix_cases import examples

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "segment_events.json").read_text())
ORDERS = TopicPartition("orders", UUID(int=0xCA), 7)
SEGMENT = SegmentId(ORDERS, UUID(int=0xFE))
ADD = SegmentMetadata(
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
NAMED = {
    "add_no_custom": ADD,
    "add_with_custom_01020304": replace(ADD, custom_metadata=bytes([1, 2, 3, 4])),
    "update_finish_ts456": UPDATE,
    "partition_delete_marked_ts789": DELETE,
}
EVENTS = [
    *NAMED.values(),
    replace(ADD, no_transaction_index=True, custom_metadata=b"x" * 300),
    replace(ADD, segment=SegmentId(TopicPartition("é" * 100, UUID(int=1), 0), UUID(int=2))),
]
ID_SIZE = 3 + 7 + 16 + 4 + 1 + 16 + 1
"""Header and segment id of the events above."""


# --- the vectors -----------------------------------------------------------------------------------------------


def test_each_event_of_the_vectors_has_its_value_here():
    assert [case["name"] for case in VECTORS["events"]] == list(NAMED)


@pytest.mark.parametrize("case", VECTORS["events"], ids=lambda case: case["name"])
def test_an_event_of_the_vectors_is_written_and_read_byte_for_byte(case):
    data, event = bytes.fromhex(case["hex"]), NAMED[case["name"]]
    assert len(data) == case["bytes"]
    assert encode_event(event) == data
    assert decode_event(data, "it") == event
    assert decode_event(memoryview(data), "it") == event


@pytest.mark.parametrize("case", VECTORS["partition_of"], ids=lambda case: str(case["partition"]))
def test_a_topic_partition_of_the_vectors_goes_to_its_metadata_partition(case):
    assert metadata_partition(UUID(case["topic_id"]), case["partition"], case["count"]) == case["expect"]


def test_a_segment_without_transaction_index_adds_one_tagged_field():
    data = encode_event(ADD)
    without = encode_event(replace(ADD, no_transaction_index=True))
    assert without == data[:-1] + bytes.fromhex("01000101")
    assert decode_event(without, "it").no_transaction_index
    assert not decode_event(data[:-1] + bytes.fromhex("01000100"), "it").no_transaction_index


# --- round trips -----------------------------------------------------------------------------------------------

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
offsets = st.integers(0, (1 << 63) - 1)
natural32 = st.integers(0, (1 << 31) - 1)
custom = st.none() | st.binary(max_size=300)
partitions = st.builds(TopicPartition, st.text(max_size=200), st.uuids(), natural32)
segments = st.builds(SegmentId, partitions, st.uuids())


@st.composite
def terms(draw):
    found = sorted(draw(st.sets(natural32, min_size=1, max_size=130)))
    starts = sorted(draw(st.lists(offsets, min_size=len(found), max_size=len(found))))
    return tuple(zip(found, starts, strict=True))


@st.composite
def adds(draw):
    start, end = sorted((draw(offsets), draw(offsets)))
    return SegmentMetadata(
        segment=draw(segments),
        start=start,
        end=end,
        broker=draw(int32),
        max_timestamp=draw(int64),
        event_timestamp=draw(int64),
        terms=draw(terms()),
        size=draw(natural32),
        custom_metadata=draw(custom),
        state=draw(st.sampled_from(SegmentState)),
        no_transaction_index=draw(st.booleans()),
    )


updates = st.builds(
    SegmentUpdate,
    segment=segments,
    broker=int32,
    event_timestamp=int64,
    state=st.sampled_from(SegmentState),
    custom_metadata=custom,
)
deletes = st.builds(
    PartitionDelete,
    partition=partitions,
    broker=int32,
    event_timestamp=int64,
    state=st.sampled_from(PartitionDeleteState),
)


@settings(max_examples=examples(200), deadline=None)
@given(adds() | updates | deletes)
def test_any_event_comes_back_as_it_was(event):
    back = decode_event(encode_event(event), "it")
    assert back == event
    assert _name(back) == _name(event)


def _name(event):
    return (event.partition if isinstance(event, PartitionDelete) else event.segment.partition).name


# --- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_cut_at_any_byte_or_with_bytes_too_many_is_corrupt(event):
    data = encode_event(event)
    for length in range(len(data)):
        with pytest.raises(CorruptData, match="event 5 of partition 3"):
            decode_event(data[:length], "event 5 of partition 3")
    with pytest.raises(CorruptData, match="1 bytes too many"):
        decode_event(data + b"\x00", "it")


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_an_error_that_names_them(data):
    survives(decode_event, data)
    survives(decode_event, b"\x01\x00\x00" + data)


def test_damaged_events_give_a_value_or_an_error_that_names_them():
    dice = random.Random(7)
    originals = [encode_event(event) for event in EVENTS]
    values = sum(survives(decode_event, damage(dice.choice(originals), dice)) for _ in range(5000))
    assert 0 < values < 5000


@pytest.mark.parametrize("event", [ADD, UPDATE, DELETE], ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("version", ["01", "7f", "ffff01"])
def test_a_newer_version_of_a_known_event_asks_for_an_upgrade(event, version):
    data = encode_event(event)
    with pytest.raises(UnsupportedVersion, match=r"it is written in version \d+, .* upgrade"):
        decode_event(data[:2] + bytes.fromhex(version) + b"whatever it holds", "it")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("000000", "begins with 0"),
        ("020000", "begins with 2"),
        ("010300", "unknown key 3"),
        ("010301", "unknown key 3"),
        ("01808002" + "00", "unknown key 32768"),
        ("0100808002", "version 32768"),
        ("018000" + "00", "no whole number at byte 1"),
        ("01ffffffff1f00", "no whole number at byte 1"),
        ("01ffffffffff0100", "no whole number at byte 1"),
        ("0100", "no whole number at byte 2"),
    ],
)
def test_a_header_of_no_known_event_is_corrupt(header, reason):
    with pytest.raises(CorruptData, match=reason):
        decode_event(bytes.fromhex(header), "it")


@pytest.mark.parametrize(("event", "last"), [(ADD, 3), (UPDATE, 3), (DELETE, 2)], ids=["add", "update", "delete"])
def test_every_state_there_is_is_read_and_no_other(event, last):
    data = bytearray(encode_event(event))
    for state in range(256):
        data[-2] = state
        if state <= last:
            assert decode_event(bytes(data), "it").state.value == state
        else:
            with pytest.raises(CorruptData, match="unknown"):
                decode_event(bytes(data), "it")


LONGEST = "ffffffff0f"


@pytest.mark.parametrize(
    ("event", "at", "reason"),
    [
        (ADD, 3, "announces 4294967294 bytes at byte 8"),
        (ADD, 3 + 7 + 16 + 4, "tagged field"),
        (ADD, ID_SIZE - 1, "tagged field"),
        (ADD, ID_SIZE + 36, "announces 4294967294 items"),
        (ADD, -3, "announces 4294967294 bytes"),
        (ADD, -1, "no whole number"),
        (UPDATE, -3, "announces 4294967294 bytes"),
        (DELETE, 3, "announces 4294967294 bytes at byte 8"),
    ],
    ids=str,
)
def test_a_huge_length_is_corrupt_and_takes_no_memory(event, at, reason):
    data = bytearray(encode_event(event))
    at %= len(data)
    data[at : at + 1] = bytes.fromhex(LONGEST)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match=reason):
            decode_event(bytes(data), "it")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("at", "reason"), [(3, "no text at byte 3"), (ID_SIZE + 36, "no list")])
def test_a_null_name_or_term_list_is_corrupt(at, reason):
    data = bytearray(encode_event(ADD))
    data[at] = 0
    with pytest.raises(CorruptData, match=reason):
        decode_event(bytes(data), "it")


def test_text_that_is_none_is_corrupt():
    with pytest.raises(CorruptData, match="broken text"):
        decode_event(encode_event(ADD).replace(b"orders", b"order\xff"), "it")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((99).to_bytes(8, "big"), (-1).to_bytes(8, "big", signed=True)),
        ((4096).to_bytes(4, "big"), (-1).to_bytes(4, "big", signed=True)),
        ((7).to_bytes(4, "big"), (-7).to_bytes(4, "big", signed=True)),
        (b"\x00\x00\x00\x01" + (50).to_bytes(8, "big"), bytes(4) + (50).to_bytes(8, "big")),
        (b"\x00\x00\x00\x01" + (50).to_bytes(8, "big"), b"\xff" * 4 + (50).to_bytes(8, "big")),
    ],
    ids=["end below start", "negative size", "negative partition", "a term twice", "terms descend"],
)
def test_an_impossible_event_is_corrupt_with_the_reason(old, new):
    data = encode_event(ADD)
    assert data.count(old) == 1
    with pytest.raises(CorruptData, match="is impossible: "):
        decode_event(data.replace(old, new), "it")


def test_an_event_without_terms_is_corrupt():
    data = encode_event(ADD)
    at = ID_SIZE + 36
    with pytest.raises(CorruptData, match="has no terms"):
        decode_event(data[:at] + b"\x01" + data[at + 27 :], "it")


# --- tagged fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3 + 7 + 16 + 4, ID_SIZE - 1, ID_SIZE + 36 + 1 + 12, -1], ids=str)
def test_unknown_tagged_fields_are_ignored_wherever_they_are(at):
    data = bytearray(encode_event(ADD))
    at %= len(data)
    assert data[at] == 0
    data[at : at + 1] = bytes.fromhex("02" + "0502abcd" + "0900")
    assert decode_event(bytes(data), "it") == ADD


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ("0200010105010100", "bytes too many"),
        ("020001010001 01", "field 0 after 0"),
        ("0205000300", "field 3 after 5"),
        ("01000102", "neither true nor false"),
        ("010000", "neither true nor false"),
        ("0100020101", "neither true nor false"),
    ],
)
def test_tagged_fields_out_of_order_twice_or_of_no_meaning_are_corrupt(tags, reason):
    with pytest.raises(CorruptData, match=reason):
        decode_event(encode_event(ADD)[:-1] + bytes.fromhex(tags), "it")


# --- the metadata partition ------------------------------------------------------------------------------------


@given(st.uuids(), natural32, st.integers(1, 10_000))
def test_the_metadata_partition_is_always_one_that_there_is(topic_id, partition, count):
    assert 0 <= metadata_partition(topic_id, partition, count) < count


def test_topic_partitions_spread_over_all_metadata_partitions():
    assert {metadata_partition(UUID(int=9), partition, 50) for partition in range(1000)} == set(range(50))


@pytest.mark.parametrize(("partition", "count"), [(0, 0), (0, -1), (-1, 50), (1 << 31, 50)])
def test_no_metadata_partition_is_given_for_what_cannot_be(partition, count):
    with pytest.raises(InvalidInput):
        metadata_partition(UUID(int=9), partition, count)
