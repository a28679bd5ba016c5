"""Write-ahead frames of version 4: golden bytes, scans of torn and damaged frames, hostile bytes."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.block import (
    END,
    Compression,
    encode_page,
    frame_pages,
    read_block,
)
from strandline.formats.checksum import crc32c
from strandline.formats.wal.frame import (
    HEADER_SIZE,
    MAX_PAYLOAD,
    TRAILER_SIZE,
    Ending,
    Frame,
    FrameInfo,
    FrameScanner,
    Stop,
    decode_frame,
    encode_frame,
    frame_head,
)
from strandline.log.wal.recover.walk import walk
from strandline.model.records import RECORD_SCHEMA, record_batch
from tests.disk_doubles import OneFile
from tests.formats.forging import some_records

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "frames.json").read_text())
TOLD = {"strandline.cursor": "x/0/42", "strandline.resync": "y" * 36}
INFO = FrameInfo(term=3, first=41, count=2, timestamp=1_700_000_000_123, durable=40, flags=2)
GOLDEN_HEADER = (
    "52444c57" "04" "0300000000000000" "2900000000000000" "02000000" "7b68e5cf8b010000" "2800000000000000" "0200"
    "00" "01000000"
)  # fmt: skip


def two_records() -> pa.RecordBatch:
    return record_batch(timestamps=[1, 2], ops=[0, 1], keys=[b"a", b"b"], values=[b"1", None])


def frame(info: FrameInfo = INFO, *batches: pa.RecordBatch, compression=Compression.NONE, metadata=None) -> bytes:
    pages = [encode_page(batch, compression) for batch in batches or (two_records(),)]
    return b"".join(encode_frame(info, pages, metadata))


def empty_frame(number: int, durable: int = 0) -> bytes:
    return b"".join(encode_frame(FrameInfo(1, number, 0, 0, durable, pages=0), []))


def scan(data: bytes, origin: int = 0):
    scanner = FrameScanner(memoryview(data), origin=origin)
    return list(scanner), scanner.stop


def reseal(data: bytes) -> bytes:
    """The bytes of one frame with right lengths and checksums, whatever its other bytes are."""
    if len(data) < HEADER_SIZE + TRAILER_SIZE:
        return data
    payload = data[HEADER_SIZE:-TRAILER_SIZE]
    header = data[: HEADER_SIZE - 8] + struct.pack("<I", len(payload))
    header += struct.pack("<I", crc32c(header[4:]))
    return header + payload + struct.pack("<II", crc32c((header + payload)[4:]), len(payload))


# --- what is written -------------------------------------------------------------------------------------------


def test_a_frame_is_these_bytes():
    data = frame(metadata={"strandline.cursor": "x/0/42"})
    block = b"".join(frame_pages([encode_page(two_records(), Compression.NONE)], {"strandline.cursor": "x/0/42"}))
    header = bytes.fromhex(GOLDEN_HEADER) + struct.pack("<I", len(block))
    assert data[:52] == header
    assert data[52:56] == struct.pack("<I", crc32c(header[4:]))
    assert data[56:-8] == block
    assert data[-8:] == struct.pack("<II", crc32c(data[4:-8]), len(block))


def test_frames_that_were_written_once_are_read_for_ever():
    data = bytes.fromhex(VECTORS["frame"])
    (found,), stop = scan(data)
    assert (found.info, stop.ending) == (INFO, Ending.CLEAN)
    assert decode_frame(found, "it")[:2] == ([two_records()], {b"strandline.cursor": b"x/0/42"})


def test_a_frame_comes_back():
    data = frame(metadata={"strandline.cursor": "x/0/42", "other": "ü"})
    (found,), stop = scan(data)
    assert (found.info, found.start, found.end) == (INFO, 0, len(data))
    assert stop[:2] == (Ending.CLEAN, len(data))
    block = decode_frame(found, "it")
    assert block.batches == [two_records()]
    assert block.metadata == {b"strandline.cursor": b"x/0/42", b"other": "ü".encode()}


@pytest.mark.parametrize("compression", Compression)
def test_frames_of_every_compression_and_of_several_pages_come_back(compression):
    batches = [some_records(5), some_records(300), some_records(9).slice(3)]
    info = FrameInfo(1, 1, 311, 0, 0, pages=3, compression=compression)
    (found,), _ = scan(frame(info, *batches, compression=compression))
    assert decode_frame(found, "it").batches == batches


def test_a_frame_without_records_comes_back():
    (found,), _ = scan(empty_frame(7))
    assert decode_frame(found, "it") == ([], {}, [])


def test_reading_copies_nothing_and_every_payload_begins_at_a_multiple_of_eight():
    data = frame() + frame() + empty_frame(3) + frame(INFO, some_records(7), some_records(2))
    view = memoryview(data)
    for found in FrameScanner(view):
        assert (found.start + HEADER_SIZE) % 8 == 0
        assert found.block.obj is data
    first = decode_frame(next(iter(FrameScanner(view))), "it").batches[0]
    assert first.column(2).buffers()[2].address - pa.py_buffer(data).address in range(len(data))


def test_positions_count_from_the_beginning_of_the_file():
    found, stop = scan(frame() + frame()[:30], origin=800)
    assert found[0].start == 800
    assert (stop.ending, stop.at) == (Ending.TORN, found[0].end)


def test_a_payload_over_256_mib_is_refused_on_write():
    large = [memoryview(bytes(MAX_PAYLOAD // 8))] * 8
    with pytest.raises(InvalidInput, match="268,435,456"):
        encode_frame(INFO, [large])


def test_a_small_plain_page_has_the_bytes_that_a_large_one_would_have(monkeypatch):
    batches = [some_records(5), some_records(300).slice(7, 90), some_records(0), two_records()]
    quick = [b"".join(encode_page(batch, Compression.NONE)) for batch in batches]
    monkeypatch.setattr("strandline.formats.arrow.block._SMALL", -1)
    assert quick == [b"".join(encode_page(batch, Compression.NONE)) for batch in batches]


def test_a_batch_that_does_not_hold_records_cannot_become_a_page():
    for rows in (1, 100_000):
        with pytest.raises(pa.ArrowInvalid):
            encode_page(pa.RecordBatch.from_pydict({"x": [1] * rows}), Compression.NONE)


def test_a_block_without_metadata_has_the_bytes_that_it_always_had():
    page = encode_page(two_records(), Compression.NONE)
    plain = b"".join(frame_pages([page]))
    assert plain == RECORD_SCHEMA.serialize().to_pybytes() + b"".join(page) + END
    assert b"".join(frame_pages([page], {})) == plain


# --- where reading stops ---------------------------------------------------------------------------------------


def test_no_bytes_are_a_clean_end():
    assert scan(b"")[1][:2] == (Ending.CLEAN, 0)


def test_a_frame_cut_at_any_byte_is_torn_and_says_how_many_bytes_are_needed():
    whole, last = frame(), frame(INFO, some_records(3))
    for size in range(1, len(last)):
        found, stop = scan(whole + last[:size])
        assert len(found) == 1
        assert (stop.ending, stop.at) == (Ending.TORN, len(whole))
        assert stop.needs == (HEADER_SIZE if size < HEADER_SIZE else len(last))


def test_a_flipped_bit_anywhere_is_noticed_where_its_frame_begins():
    whole, last = frame(), frame(FrameInfo(1, 2, 1, 0, 0), some_records(1))
    for at in range(len(last)):
        for bit in (0, 7):
            flipped = bytearray(last)
            flipped[at] ^= 1 << bit
            found, stop = scan(whole + bytes(flipped) + whole)
            assert len(found) == 1, f"byte {at}"
            assert stop.at == len(whole)
            assert stop.ending is (Ending.UNSUPPORTED if at == 4 else Ending.DAMAGED)


def test_a_frame_of_another_version_is_distinguished_from_damage():
    for version in (1, 2, 3, 5, 255):
        data = bytearray(frame())
        data[4] = version
        _, stop = scan(bytes(data))
        assert (stop.ending, stop.at) == (Ending.UNSUPPORTED, 0)
        assert str(version) in stop.why


def test_zeros_are_damage():
    assert scan(frame() + bytes(100))[1][:2] == (Ending.DAMAGED, len(frame()))
    assert scan(frame()[:4] + bytes(100))[1].ending is Ending.DAMAGED


def test_a_length_over_the_limit_is_damage_however_well_it_is_sealed():
    data = bytearray(frame())
    data[48:52] = struct.pack("<I", MAX_PAYLOAD + 1)
    data[52:56] = struct.pack("<I", crc32c(bytes(data[4:52])))
    _, stop = scan(bytes(data))
    assert (stop.ending, stop.at, stop.needs) == (Ending.DAMAGED, 0, 0)
    assert isinstance(frame_head(memoryview(data)), Stop)


def test_an_unknown_compression_is_damage():
    data = bytearray(frame())
    data[43] = 9
    assert scan(reseal(bytes(data)))[1].ending is Ending.DAMAGED


def test_a_header_can_be_read_before_its_payload():
    assert frame_head(memoryview(frame()[:HEADER_SIZE]))[0] == INFO
    assert isinstance(frame_head(memoryview(frame()[: HEADER_SIZE - 1])), Stop)
    assert isinstance(frame_head(memoryview(b"")), Stop)


# --- past the damage -------------------------------------------------------------------------------------------


def frames_beyond(data):
    """All frames in bytes that begin with damage."""
    pieces = walk("it", len(data), is_own=lambda info: info.durable < info.first, disk=OneFile(data))
    return [piece for piece in pieces if isinstance(piece, Frame)]


def test_frames_past_the_damage_are_found_wherever_they_begin():
    later = [frame(FrameInfo(1, number, 2, 0, 0)) for number in (5, 6)]
    for damage in (b"x", b"RDLW", b"RDLW\x04", bytes(1000), frame()[:-1], frame()[:HEADER_SIZE], frame()[9:]):
        found = frames_beyond(damage + later[0] + b"?" + later[1])
        assert [(one.info.first, one.start) for one in found] == [
            (5, len(damage)),
            (6, 1 + len(damage) + len(later[0])),
        ]


def test_a_frame_with_a_damaged_payload_is_passed_by_its_own_length():
    # What it holds as a value looks like a frame, and is none.
    inner = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[frame(FrameInfo(1, 99, 2, 0, 98))])
    outer = bytearray(frame(FrameInfo(1, 4, 1, 0, 3), inner))
    outer[HEADER_SIZE + 100] ^= 1
    found = frames_beyond(bytes(outer) + empty_frame(5))
    assert [one.info.first for one in found] == [5]


def test_searching_past_damage_takes_time_proportional_to_the_bytes(monkeypatch):
    # Each header is sound, and the length at the end of its frame is right: adding up each of them never ends.
    count = 2000
    length = count * HEADER_SIZE
    header = bytearray(empty_frame(1)[:HEADER_SIZE])
    header[48:52] = struct.pack("<I", length)
    header[52:] = struct.pack("<I", crc32c(bytes(header[4:52])))
    data = memoryview(bytes(header) * count + struct.pack("<I", length) * (length // 4 + 2))
    looked_at = []

    def counting(part, value=0):
        looked_at.append(len(part))
        return crc32c(part, value)

    monkeypatch.setattr("strandline.formats.wal.frame.crc32c", counting)
    assert frames_beyond(data) == []
    assert sum(looked_at) < 10 * len(data)


# --- hostile bytes ---------------------------------------------------------------------------------------------


def decode_all(data: bytes) -> object:
    """Decode all frames as a reader does: every accepted frame must be safe to read."""
    scanner = FrameScanner(memoryview(data))
    blocks = [decode_frame(found, "it") for found in scanner]
    frames_beyond(data[scanner.stop.at :])
    for block in blocks:
        for batch in block.batches:
            assert batch.schema.equals(RECORD_SCHEMA)
            batch.set_column(0, "timestamp", batch.column(0).cast(pa.int64())).to_pylist()
        assert all(isinstance(item, bytes) for pair in block.metadata.items() for item in pair)
    if scanner.stop.ending is not Ending.CLEAN:
        raise CorruptData(scanner.stop.why)
    return blocks


def test_hostile_metadata_gives_a_value_or_corrupt_data():
    chance = random.Random(7)
    good = frame(metadata={"strandline.cursor": "x/0/42", "strandline.resync": "y" * 36})
    schema = len(
        RECORD_SCHEMA.with_metadata({"strandline.cursor": "x/0/42", "strandline.resync": "y" * 36}).serialize()
    )
    outcomes = set()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.choice([1, 2, 4])):
            at = HEADER_SIZE + chance.randrange(schema)
            data[at] = chance.choice([0, 1, 0x7F, 0xFF, data[at] ^ 1 << chance.randrange(8)])
        try:
            decode_all(reseal(bytes(data)))
            outcomes.add("fine")
        except CorruptData:
            outcomes.add("corrupt")
    assert outcomes == {"fine", "corrupt"}


def test_metadata_may_be_any_bytes_and_is_given_as_found():
    schema = RECORD_SCHEMA.with_metadata({b"\xff\x00": b"\xfe"}).serialize().to_pybytes()
    assert read_block(memoryview(schema + END), "it", Compression.NONE).metadata == {b"\xff\x00": b"\xfe"}


def test_counts_that_differ_from_the_records_are_refused():
    for count, pages in ((1, 1), (3, 1), (2, 2), (2**32 - 1, 1)):
        (found,), _ = scan(frame(FrameInfo(1, 1, count, 0, 0, pages=pages)))
        with pytest.raises(CorruptData, match="its header says"):
            decode_frame(found, "it")
