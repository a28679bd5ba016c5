"""Segment files: round trips, reading with any Parquet reader, and damage, which is never taken for records."""

import io
import random
import struct
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.segment.batches import MOST_BATCHES, BatchRuns, SegmentBatches
from strandline.formats.segment.file import (
    LISTED,
    SEGMENT_SCHEMA,
    Seal,
    SegmentFacts,
    SegmentTail,
    decode_tail,
)
from strandline.formats.segment.records import decode_group
from strandline.formats.segment.writer import EncodedSegment, SegmentWriter
from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from tests.formats.forging import tail_size

LOG, SEGMENT = UUID(int=7), UUID(int=8)


def finish(writer: SegmentWriter) -> EncodedSegment:
    return writer.finish(log_id=LOG, partition=3, segment=SEGMENT)


def records(count: int, first: int = 0, *, value: int = 40) -> pa.RecordBatch:
    dice = random.Random(first)
    return record_batch(
        timestamps=[1_000_000 + first + n for n in range(count)],
        ops=[n % 3 for n in range(count)],
        keys=[None if n % 5 == 4 else b"k%d" % (n % 7) for n in range(count)],
        values=[None if n % 3 else dice.randbytes(value) for n in range(count)],
        headers=[[None, [], [("a", b"1"), ("b", None)]][n % 3] for n in range(count)],
    )


def encode(*counts: int, start: int = 0, expected: int = 256 << 20, value: int = 40) -> EncodedSegment:
    writer = SegmentWriter(start, expected=expected)
    for number, count in enumerate(counts):
        batches = with_offsets([records(count, writer.next, value=value)], writer.next)
        writer.add(batches, term=number // 2, listed=1_000 + 10 * number)
    return finish(writer)


def whole(encoded: EncodedSegment) -> bytes:
    return b"".join(encoded.parts)


def decode(data: bytes) -> pa.Table:
    """Everything in a file, by its own reader."""
    tail, _ = decode_tail(data[len(data) - tail_size(data, "it") :], "it")
    names = SEGMENT_SCHEMA.names
    batches = []
    for number in range(len(tail)):
        pieces = [(piece, data[piece.start : piece.next]) for piece in tail.ranges(number, names)]
        batches += decode_group(tail, number, names, pieces)
    return pa.Table.from_batches(batches, SEGMENT_SCHEMA)


def test_records_are_read_back_with_nulls_and_empty_headers_and_every_operation() -> None:
    batches = with_offsets([records(50), records(30, 50)], 12)
    writer = SegmentWriter(12)
    writer.add(batches, term=4, listed=99)
    encoded = finish(writer)
    found = decode(whole(encoded))
    assert found.select(READ_SCHEMA.names).equals(pa.Table.from_batches(batches))
    assert set(found["op"].to_pylist()) == {Op.PUT, Op.DELETE, Op.PURGE}
    assert found[LISTED].cast(pa.int64()).to_pylist() == [99] * 80
    assert encoded.facts == SegmentFacts(
        log_id=LOG, partition=3, segment=SEGMENT, start=12, end=91, terms=((4, 12),), max_timestamp=1000
    )


def test_a_plain_parquet_reader_reads_the_same() -> None:
    data = whole(encode(40, 30, 20, start=5))
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(SEGMENT_SCHEMA)
    assert table.equals(decode(data))
    assert table["offset"].to_pylist() == list(range(5, 95))


def test_offset_time_and_key_have_statistics_and_a_page_index_and_values_have_not() -> None:
    footer = pq.read_metadata(io.BytesIO(whole(encode(100))))
    columns = {footer.row_group(0).column(n).path_in_schema: footer.row_group(0).column(n) for n in range(8)}
    for name in ("offset", "timestamp", "key"):
        assert columns[name].statistics.has_min_max
        assert columns[name].has_column_index
        assert columns[name].has_offset_index
    assert columns["value"].statistics is None
    assert not columns["value"].has_column_index
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert [column.column_index for column in footer.row_group(0).sorting_columns] == [0]


def with_batches(listed: bytes) -> SegmentTail:
    """A segment whose list of batches is this one."""
    writer = SegmentWriter(10)
    writer.add(with_offsets([records(5)], 10), term=1, listed=0)
    writer._batches = SimpleNamespace(encode=lambda: listed)
    data = whole(finish(writer))
    return decode_tail(data[-tail_size(data, "it") :], "it")[0]


def test_a_segment_knows_the_batches_of_its_records_and_the_last_ones_of_very_many() -> None:
    runs = BatchRuns()
    runs.add([(1, 3), (1, 5), (3, 9)])
    tail = with_batches(runs.encode())
    assert [tail.fingerprint_at(offset) for offset in range(10, 14)] == [3, 5, 9, 9]
    runs.add((1, number) for number in range(1, MOST_BATCHES))
    many = SegmentBatches.decode(runs.encode(), 10, 13 + MOST_BATCHES)
    assert [many.fingerprint_at(offset) for offset in (11, 12, 15, 13 + MOST_BATCHES)] == [None, 9, 1, MOST_BATCHES - 1]
    assert with_batches(b"").fingerprint_at(12) is None


@pytest.mark.parametrize("listed", [b"?", b"AAAA", b64encode(bytes(12)), b64encode(b"\6" + bytes(11))])
def test_a_damaged_list_of_batches_is_found(listed: bytes) -> None:
    with pytest.raises(CorruptData, match=r"list of batches|base64|padding"):
        with_batches(listed).fingerprint_at(12)


def test_small_batches_become_one_group_that_remembers_when_each_was_listed() -> None:
    writer = SegmentWriter(0)
    for number in range(500):
        writer.add(with_offsets([records(2, 2 * number)], 2 * number), term=1, listed=number)
    data = whole(finish(writer))
    tail, _ = decode_tail(data[-tail_size(data, "it") :], "it")
    assert len(tail) == 1
    assert decode(data)[LISTED].cast(pa.int64()).to_pylist() == [n // 2 for n in range(1000)]


def test_a_large_batch_becomes_many_groups() -> None:
    encoded = encode(20_000, expected=1 << 20)
    tail, _ = decode_tail(encoded.parts[-1], "it")
    groups = [tail.group(number) for number in range(len(tail))]
    assert len(groups) > 10
    assert [group.first for group in groups[1:]] == [group.next for group in groups[:-1]]
    assert (groups[0].first, groups[-1].next) == (0, 20_000)
    assert decode(whole(encoded))["offset"].to_pylist() == list(range(20_000))


def test_a_group_has_one_term() -> None:
    encoded = encode(10, 10, 10, 10, 10, start=100)
    assert encoded.facts.terms == ((0, 100), (1, 120), (2, 140))
    tail, _ = decode_tail(encoded.parts[-1], "it")
    groups = [tail.group(number) for number in range(len(tail))]
    assert [(group.first, group.next, group.term) for group in groups] == [
        (100, 120, 0),
        (120, 140, 1),
        (140, 150, 2),
    ]


@pytest.mark.parametrize("first", [100, 105, 119, 120, 149])
@pytest.mark.parametrize("count", [1, 5, 50])
def test_the_groups_of_a_range_are_those_that_hold_some_of_it(first: int, count: int) -> None:
    tail, _ = decode_tail(encode(10, 10, 10, 10, 10, start=100).parts[-1], "it")
    groups = [tail.group(number) for number in range(len(tail))]
    held = [group.number for group in groups if group.first < first + count and first < group.next]
    assert list(tail.groups(first, first + count)) == held


def test_the_seal_has_size_and_checksums_and_survives_its_encoding() -> None:
    encoded = encode(100)
    data = whole(encoded)
    assert encoded.seal.size == len(data)
    assert encoded.seal.tail == len(encoded.parts[-1]) == tail_size(data, "it")
    assert Seal.decode(encoded.seal.encode(), "it") == encoded.seal
    assert tail_size(data[-40:], "it") <= encoded.seal.tail


@pytest.mark.parametrize("data", [None, b"", b"\x01", b"\0" * 17, b"\x01" + b"\0" * 16, b"\x01" + b"\xff" * 16])
def test_bytes_that_are_no_seal_are_refused(data: bytes | None) -> None:
    with pytest.raises(CorruptData, match="Segment 5"):
        Seal.decode(data, "Segment 5")


def test_a_newer_seal_and_a_newer_segment_ask_for_an_upgrade() -> None:
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        Seal.decode(b"\x02" + bytes(30), "it")
    data = bytearray(whole(encode(10)))
    data[len(data) - _footer(data) - 5] = 2
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        decode_tail(data[-2000:], "it")
    facts = encode(10).facts
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        SegmentFacts.decode(facts.encode().replace(b'"version":1', b'"version":2'), "it")


def _footer(data: bytes) -> int:
    return struct.unpack("<I", data[-8:-4])[0] + 8


def test_batches_must_follow_each_other() -> None:
    writer = SegmentWriter(10)
    writer.add(with_offsets([records(5)], 10), term=3, listed=0)
    for wrong in (0, 14, 16):
        with pytest.raises(InvalidInput, match="continues at 15"):
            writer.add(with_offsets([records(5)], wrong), term=3, listed=0)
    with pytest.raises(InvalidInput, match="term 2 after term 3"):
        writer.add(with_offsets([records(5)], 15), term=2, listed=0)
    with pytest.raises(InvalidInput, match="columns"):
        writer.add([records(5)], term=3, listed=0)
    writer.add(with_offsets([records(5)], 15), term=3, listed=0)
    assert decode(whole(finish(writer)))["offset"].to_pylist() == list(range(10, 20))


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        finish(SegmentWriter(4))


def test_listing_times_never_go_back() -> None:
    writer = SegmentWriter(0)
    for number, listed in enumerate([5, 9, 7, 12]):
        writer.add(with_offsets([records(1)], number), term=number, listed=listed)
    assert decode(whole(finish(writer)))[LISTED].cast(pa.int64()).to_pylist() == [5, 9, 9, 12]


def test_the_size_so_far_predicts_the_final_size() -> None:
    writer = SegmentWriter(0, expected=1 << 20)
    for number in range(20):
        writer.add(with_offsets([records(1000, number, value=300)], 1000 * number), term=0, listed=0)
    foretold = writer.size
    assert finish(writer).seal.size == pytest.approx(foretold, rel=0.1)


def test_records_of_any_size_are_written() -> None:
    values = [b"", b"x" * (9 << 20), b"", b"y" * 100, None]
    batch = record_batch(timestamps=[-5] * 5, ops=[0] * 5, keys=[b"z" * 5000] * 5, values=values)
    writer = SegmentWriter(0)
    writer.add(with_offsets([batch], 0), term=0, listed=0)
    encoded = finish(writer)
    assert decode(whole(encoded))["value"].to_pylist() == values
    assert encoded.facts.max_timestamp == -1


# --- damage ----------------------------------------------------------------------------------------------------

SOUND = whole(encode(60, 50, 40, value=10))
TRUTH = decode(SOUND)


def same_or_corrupt(data: bytes) -> None:
    try:
        found = decode(data)
    except (CorruptData, UnsupportedVersion) as error:
        assert "it " in str(error)  # noqa: PT017 - or the truth, which is as good
    else:
        assert found.equals(TRUTH)


def test_every_truncation_is_corrupt() -> None:
    for size in range(len(SOUND)):
        with pytest.raises(CorruptData, match="it is damaged"):
            decode(SOUND[:size])


@pytest.mark.matrix
def test_no_flipped_byte_gives_other_records() -> None:
    dice = random.Random(3)
    for at in range(len(SOUND)):
        data = bytearray(SOUND)
        data[at] ^= 1 << dice.randrange(8)
        same_or_corrupt(bytes(data))


@given(st.randoms(use_true_random=False))
def test_hostile_bytes_give_the_same_records_or_corrupt_data(dice: random.Random) -> None:
    data = bytearray(SOUND)
    for _ in range(dice.randint(1, 4)):
        at, end = dice.randrange(len(data)), dice.randrange(len(data))
        data[at : at + dice.randrange(40)] = data[end : end + dice.randrange(40)]
    same_or_corrupt(bytes(data))


def test_a_group_is_not_taken_from_bytes_of_another_place() -> None:
    encoded = encode(10, 10, 10)
    data = whole(encoded)
    tail, _ = decode_tail(encoded.parts[-1], "it")
    (first,), (second,) = tail.ranges(0, ["value"]), tail.ranges(1, ["value"])
    with pytest.raises(CorruptData, match="checksum"):
        decode_group(tail, 0, ["value"], [(first, data[second.start : second.next])])
    with pytest.raises(CorruptData, match="cannot be read"):  # even if the checksum says otherwise
        decode_group(tail, 0, ["key"], [(first, data[first.start : first.next])])


def test_facts_that_are_not_as_they_should_be_are_corrupt() -> None:
    told = encode(5).facts.encode()
    for wrong in (b"", b"[]", told[:-1], told.replace(b"terms", b"turns"), told.replace(b'"start":0', b'"start":-1')):
        with pytest.raises(CorruptData, match="description in it"):
            SegmentFacts.decode(wrong, "it")
    assert SegmentFacts.decode(told, "it") == replace(encode(5).facts)
