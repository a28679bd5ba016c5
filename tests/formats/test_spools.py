"""Legacy spools: the shared vectors by name, each cut at every byte, whose term counts, hostile bytes, slots."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.compat.spool.format import (
    LegacyEnding,
    LegacyScanner,
    SpoolRecord,
    SpoolRun,
    decode_slots,
    encode_record_frame,
    legacy_frame_at,
    runs,
)
from strandline.errors import CorruptData, InvalidInput
from strandline.formats.wal.frame import MAX_PAYLOAD, FrameInfo, encode_frame
from strandline.model.retention import Invalidation, InvalidReason, SlotState
from tests.spools import RECORD_OVERHEAD, encode_slots, read_spool

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "wal_spool.json").read_text())["cases"]
}
ENDINGS = {
    "v3_one": LegacyEnding.CLEAN,
    "v2_without_term_defaults_to_1": LegacyEnding.CLEAN,
    "v1_no_checksum_no_timestamp": LegacyEnding.CLEAN,
    "mixed_versions_in_one_spool": LegacyEnding.CLEAN,
    "torn_tail_1_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_2_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_3_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_4_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_5_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_12_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_33_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_40_bytes_after_one_good_record": LegacyEnding.TORN,
    "torn_tail_46_bytes_after_one_good_record": LegacyEnding.TORN,
    "crc_mismatch_truncates": LegacyEnding.BAD_CHECKSUM,
    "bad_magic_truncates": LegacyEnding.BAD_MAGIC,
    "unknown_version_truncates": LegacyEnding.UNKNOWN_VERSION,
    "implausible_length_truncates_without_allocating": LegacyEnding.IMPLAUSIBLE_LENGTH,
    "empty_file": LegacyEnding.CLEAN,
}
CHANGE = b'{"lsn":3,"timestamp":44,"operation":"delete","collection":"users","rid":9,"kind":"row"}'
U64 = st.integers(0, 2**64 - 1)


def v1(lsn: int, payload: bytes) -> bytes:
    return b"RDLW\x01" + struct.pack("<QQ", lsn, len(payload)) + payload


def v2(lsn: int, timestamp: int, payload: bytes) -> bytes:
    covered = b"\x02" + struct.pack("<QQI", lsn, timestamp, len(payload)) + payload
    return b"RDLW" + covered + struct.pack("<I", crc32(covered))


def v3(term: int, lsn: int, timestamp: int, payload: bytes) -> bytes:
    return b"".join(encode_record_frame(term, lsn, timestamp, payload))


def read(data: bytes):
    return read_spool(memoryview(data))


def only(data: bytes) -> SpoolRecord:
    (record,) = read(data).records
    return record


# --- the vectors -----------------------------------------------------------------------------------------------


def test_each_case_of_the_vectors_has_its_ending_here():
    assert list(CASES) == list(ENDINGS)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_spool_of_the_vectors_gives_its_records_and_the_length_of_its_valid_prefix(name: str):
    case = CASES[name]
    spool = read(bytes.fromhex(case["hex"]))
    assert [
        {"term": term, "lsn": lsn, "timestamp_ms": timestamp, "payload": payload.hex()}
        for term, lsn, timestamp, payload in spool.records
    ] == case["records"]
    assert spool.valid_bytes == spool.stop.at == case["valid_bytes"]
    assert spool.stop.ending is ENDINGS[name]


@pytest.mark.parametrize("name", ENDINGS)
def test_a_spool_of_the_vectors_cut_at_any_byte_gives_the_frames_that_are_whole(name: str):
    case, data = CASES[name], bytes.fromhex(CASES[name]["hex"])
    whole = read(data).records
    ends = [0, *(frame.end for frame in LegacyScanner(memoryview(data)))]
    for size in range(len(data)):
        spool = read(data[:size])
        count = sum(end <= size for end in ends) - 1
        assert spool.records == whole[:count]
        assert spool.valid_bytes == ends[count]
        if size in ends:
            assert spool.stop.ending is LegacyEnding.CLEAN
        elif size < case["valid_bytes"]:
            assert spool.stop.ending is LegacyEnding.TORN
        else:
            assert spool.stop.ending in {LegacyEnding.TORN, ENDINGS[name]}


# --- where reading stops ---------------------------------------------------------------------------------------


def test_one_to_three_stray_bytes_are_a_torn_tail_whatever_they_are():
    good = v3(1, 1, 1, b"x")
    for stray in (b"X", b"\x00\x00", b"RDX", b"\xff\xff\xff"):
        for before in (b"", good):
            assert read(before + stray).stop[:2] == (LegacyEnding.TORN, len(before))
    assert read(good + b"RDX\x00").stop.ending is LegacyEnding.BAD_MAGIC


def test_a_torn_frame_says_how_many_bytes_are_needed():
    for frame, header in ((v1(1, b"abc"), 21), (v2(1, 2, b"abc"), 25), (v3(1, 2, 3, b"abc"), 33)):
        for size in range(1, len(frame)):
            stop = read(frame[:size]).stop
            assert stop.ending is LegacyEnding.TORN
            assert stop.needs == (5 if size < 5 else header if size < header else len(frame))


def test_every_other_version_stops_the_reading():
    good = v3(1, 1, 1, b"x")
    for version in (0, *range(4, 256)):
        stop = read(good + b"RDLW" + bytes([version]) + good[5:]).stop
        assert stop[:2] == (LegacyEnding.UNKNOWN_VERSION, len(good))
        assert str(version) in stop.why
    newer = b"".join(encode_frame(FrameInfo(1, 2, 0, 0, 0, pages=0), []))
    assert read(good + newer + good).stop[:2] == (LegacyEnding.UNKNOWN_VERSION, len(good))


@pytest.mark.parametrize("frame", [v2(2, 9, CHANGE), v3(7, 2, 9, b"payload")], ids=["v2", "v3"])
def test_a_flipped_bit_anywhere_is_noticed_where_its_frame_begins(frame: bytes):
    good = v3(7, 1, 9, b"first")
    for at in range(len(frame)):
        for bit in range(8):
            flipped = bytearray(frame)
            flipped[at] ^= 1 << bit
            if at == 4 and flipped[at] == 1:
                continue  # nothing in the format protects a version 3 that became a 1: that one has no checksum
            spool = read(good + bytes(flipped) + good)
            assert len(spool.records) == 1, f"byte {at}, bit {bit}"
            assert spool.valid_bytes == len(good)


def test_a_length_over_the_limit_is_damage_however_well_it_is_sealed_and_nothing_is_allocated_for_it():
    tracemalloc.start()
    for over in (1, MAX_PAYLOAD):
        length = MAX_PAYLOAD + over
        for header in (
            b"RDLW\x01" + struct.pack("<QQ", 1, length),
            b"RDLW\x02" + struct.pack("<QQI", 1, 2, length),
            b"RDLW\x03" + struct.pack("<QQQI", 1, 1, 2, length),
        ):
            assert read(header + bytes(100)).stop[:2] == (LegacyEnding.IMPLAUSIBLE_LENGTH, 0)
    assert read(b"RDLW\x01" + struct.pack("<QQ", 1, 2**64 - 1)).stop.ending is LegacyEnding.IMPLAUSIBLE_LENGTH
    largest = read(b"RDLW\x03" + struct.pack("<QQQI", 1, 1, 2, MAX_PAYLOAD)).stop
    assert (largest.ending, largest.needs) == (LegacyEnding.TORN, MAX_PAYLOAD + RECORD_OVERHEAD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_positions_count_from_where_the_bytes_begin():
    data = memoryview(b"??" + v3(1, 1, 1, b"x") + b"RD")
    frame = legacy_frame_at(data, 2)
    assert (frame.start, frame.end) == (2, 40)
    scanner = LegacyScanner(data[2:])
    assert [(found.start, found.end) for found in scanner] == [(0, 38)]
    assert scanner.stop[:2] == (LegacyEnding.TORN, 38)


def test_lsns_are_given_as_found():
    data = v3(1, 9, 1, b"a") + v3(1, 2, 1, b"b") + v1(0, b"c") + v2(2**64 - 1, 2**64 - 1, b"d")
    assert [record.lsn for record in LegacyScanner(memoryview(data))] == [9, 2, 0, 2**64 - 1]


# --- version 3 is written --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(U64, U64, U64, st.binary(max_size=60)), max_size=5))
def test_frames_of_version_3_come_back(records):
    data = b"".join(v3(*record) for record in records)
    scanner = LegacyScanner(memoryview(data))
    assert [(found.version, *found[1:4], bytes(found.payload)) for found in scanner] == [(3, *one) for one in records]
    assert scanner.stop[:2] == (LegacyEnding.CLEAN, len(data))
    assert len(data) == sum(RECORD_OVERHEAD + len(payload) for *_, payload in records)


def test_a_payload_over_256_mib_is_refused_on_write():
    with pytest.raises(InvalidInput, match="268,435,456"):
        encode_record_frame(1, 1, 1, bytes(MAX_PAYLOAD + 1))


def test_a_number_that_does_not_fit_is_refused_on_write():
    for numbers in ((-1, 1, 1), (1, 2**64, 1), (1, 1, -5)):
        with pytest.raises(InvalidInput, match="64 bits"):
            encode_record_frame(*numbers, b"")


def test_neither_writing_nor_reading_copies_a_payload():
    payload = bytes(1000)
    assert encode_record_frame(1, 1, 1, payload)[1] is payload
    data = v1(1, payload) + v2(2, 2, payload) + v3(3, 3, 3, payload) + v2(4, 4, CHANGE)
    assert all(record.payload.obj is data for record in read(data).records)


# --- whose term counts -----------------------------------------------------------------------------------------


def change(**fields: object) -> bytes:
    return json.dumps({"lsn": 3, "operation": "insert", "collection": "users"} | fields).encode()


def test_a_frame_without_a_term_has_that_of_the_change_record_in_it():
    for payload in (change(term=7), change(term=7.0), b" \n" + change(term=7), b'{"\\u0074erm":7,' + CHANGE[1:]):
        for frame in (v1(3, payload), v2(3, 44, payload)):
            assert only(frame).term == 7
            assert bytes(only(frame).payload) == payload


def test_a_term_in_what_is_no_change_record_does_not_count():
    others = [
        b'{"term":7,"lsn":3,"operation":"insert"}',
        b'{"term":7,"lsn":3,"collection":"users"}',
        b'{"term":7,"operation":"insert","collection":"users"}',
        change(term=7, lsn="3"),
        change(term=7, lsn=-3),
        change(term=7, lsn=True),
        change(term=7, operation=1),
        change(term=7, collection=None),
        b"[" + change(term=7) + b"]",
        change(term=7) + b"}",
        change(term=7) + b"\x00",
        change(term=7)[:-1],
        b"\xef\xbb\xbf" + change(term=7),
        change(term=7).decode().encode("utf-16"),
        change(term=7, note="?").replace(b"?", b"\xff"),
        change(term=7, note=float("nan")),
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"7",
        b"",
    ]
    for payload in others:
        for frame in (v1(3, payload), v2(3, 44, payload)):
            assert only(frame)[:2] == (1, 3), payload[:80]
        assert only(v3(9, 3, 44, payload)) == (9, 3, 44, payload)


def test_a_term_that_is_none_counts_as_the_first():
    for term in ("7", -7, 7.5, True, None, [7], 2**64, 1e300):
        payload = change(term=term)
        assert only(v2(3, 44, payload)) == (1, 3, 44, payload)


def test_a_change_record_of_another_term_than_its_frame_is_given_the_frames():
    for payload, expected in (
        (CHANGE, b'{"term":9,' + CHANGE[1:]),
        (b" {\n " + CHANGE[1:], b' {"term":9,\n ' + CHANGE[1:]),
        (b'{"term":1,' + CHANGE[1:], b'{"term":9,' + CHANGE[1:]),
        (CHANGE[:-1] + b' ,\t"term" :\n12 }', CHANGE[:-1] + b' ,\t"term" :\n9 }'),
        (CHANGE[:-1] + b',"term":"x"}', CHANGE[:-1] + b',"term":9}'),
        (CHANGE[:-1] + b',"t\\u0065rm":{"term":1}}', CHANGE[:-1] + b',"t\\u0065rm":9}'),
        (CHANGE[:-1] + b',"t\\u0065rm":2}', CHANGE[:-1] + b',"t\\u0065rm":9}'),
        (b'{"term":2,"term":3,' + CHANGE[1:], b'{"term":9,"term":9,' + CHANGE[1:]),
    ):
        assert bytes(only(v3(9, 3, 44, payload)).payload) == expected
        assert json.loads(expected) == json.loads(payload) | {"term": 9}


def test_nothing_but_the_term_of_a_change_record_is_changed():
    rest = '"m":{"term":1,"x":[1e3,0.10,-0,1E400]},"u":"\\ud800 \\"term\\":1 ü€😀","big":12345678901234567890123}'
    payload = CHANGE[:-1].decode() + ',"term":1,' + rest
    assert bytes(only(v3(9, 3, 44, payload.encode())).payload).decode() == payload.replace('"term":1,', '"term":9,', 1)
    without = CHANGE[:-1].decode() + "," + rest
    assert bytes(only(v3(9, 3, 44, without.encode())).payload).decode() == '{"term":9,' + without[1:]


def test_a_change_record_of_the_same_term_as_its_frame_stays_byte_for_byte():
    for payload, term in ((b' {"term" : 9.0,' + CHANGE[1:], 9), (CHANGE, 1), (change(term="x"), 1)):
        data = v3(term, 3, 44, payload)
        assert only(data).payload.obj is data


def test_the_frames_themselves_give_every_payload_as_it_was_written():
    data = v3(9, 3, 44, CHANGE) + v2(4, 45, change(term=7))
    assert [(found.term, bytes(found.payload)) for found in LegacyScanner(memoryview(data))] == [
        (9, CHANGE),
        (None, change(term=7)),
    ]


def test_a_payload_of_very_many_json_values_is_not_taken_apart():
    payload = b'{"term":7,"x":[' + b"[]," * 2_000_000 + b"0]," + CHANGE[1:]
    data = v2(3, 44, payload)
    tracemalloc.start()
    assert only(data).term == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * len(payload)


def test_a_large_change_record_of_few_values_is_read():
    payload = b'{"term":7,"entity_bytes_hex":"' + b"ab" * 2_000_000 + b'",' + CHANGE[1:]
    assert only(v1(3, payload)).term == 7


# --- as columns ------------------------------------------------------------------------------------------------


def some(term: int, *lsns: int, size: int = 10) -> list[SpoolRecord]:
    return [SpoolRecord(term, lsn, lsn * 10, memoryview(bytes(size))) for lsn in lsns]


def test_runs_hold_one_term_and_dense_lsns():
    records = [*some(1, 5, 6, 7), *some(2, 8), *some(2, 10, 11), *some(2, 11), *some(2, 3)]
    found = list(runs(records, max_count=100, max_bytes=1000))
    assert [(run.term, run.first, len(run.payloads)) for run in found] == [
        (1, 5, 3),
        (2, 8, 1),
        (2, 10, 2),
        (2, 11, 1),
        (2, 3, 1),
    ]
    assert found[0] == SpoolRun(1, 5, [50, 60, 70], [bytes(10)] * 3)


def test_runs_keep_to_their_bounds_and_a_record_over_the_bound_is_a_run_by_itself():
    records = [*some(1, 1, 2, 3, 4, 5), *some(1, 6, size=99), *some(1, 7)]
    assert [len(run.payloads) for run in runs(records, max_count=2, max_bytes=1000)] == [2, 2, 2, 1]
    assert [len(run.payloads) for run in runs(records, max_count=100, max_bytes=30)] == [3, 2, 1, 1]
    assert list(runs([], max_count=1, max_bytes=1)) == []


# --- slots -----------------------------------------------------------------------------------------------------

SLOTS = [
    SlotState("billing", 17, "me", 4, 99),
    SlotState("gone", 3, None, 0, 98, Invalidation(InvalidReason.WAL_REMOVED, 7)),
    SlotState("hold-ü", 2**64 - 1, None, 1, 97, expires=12, dropped=True, born=5),
]


def test_slots_come_back():
    assert decode_slots(encode_slots(SLOTS), "it", now=1) == SLOTS
    assert decode_slots(memoryview(encode_slots([])), "it", now=1) == []


def test_slots_are_written_as_these_bytes():
    assert json.loads(encode_slots(SLOTS[:2])) == {
        "slots": [
            {"id": "billing", "position": 17, "holder": "me", "epoch": 4, "last_seen": 99, "born": 0},
            {"id": "gone", "position": 3, "holder": None, "epoch": 0, "last_seen": 98, "born": 0,
             "invalid": {"reason": "wal-removed", "at": 7}},
        ]
    }  # fmt: skip


def test_slots_of_older_writers_are_read_with_their_times_in_milliseconds():
    data = json.dumps(
        {
            "slots": [
                {"id": "a", "restart_lsn": 7, "confirmed_lsn": 9.0, "last_seen_at_unix_ms": 1_700_000_000_123},
                {"id": "b", "restart_lsn": 8.0, "invalidation_reason": "idle-timeout", "invalidated_at_unix_ms": 6},
                {"id": "c", "restart_lsn": 0, "invalidation_reason": "horizon"},
            ]
        }
    ).encode()
    assert decode_slots(data, "it", now=55) == [
        SlotState("a", 7, None, 0, 1_700_000_000_123_000),
        SlotState("b", 8, None, 0, 55, Invalidation(InvalidReason.IDLE_TIMEOUT, 6000)),
        SlotState("c", 0, None, 0, 55, Invalidation(InvalidReason.HORIZON, 55)),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"slots": null}',
        b'{"slots": {}}',
        b'{"slots": [7]}',
        b'{"slots": [{}]}',
        b'{"slots": [{"id": "a"}]}',
        b'{"slots": [{"position": 7}]}',
        b'{"slots": [{"id": 7, "position": 7}]}',
        b'{"slots": [{"id": "\\ud800", "position": 7}]}',
        b'{"slots": [{"id": "a", "position": 7, "holder": "\\ud800"}]}',
        b'{"slots": [{"id": "a", "position": -1}]}',
        b'{"slots": [{"id": "a", "position": 7.5}]}',
        b'{"slots": [{"id": "a", "position": NaN}]}',
        b'{"slots": [{"id": "a", "position": 18446744073709551616}]}',
        b'{"slots": [{"id": "a", "position": null, "restart_lsn": 7}]}',
        b'{"slots": [{"id": "a", "position": 7, "holder": 7}]}',
        b'{"slots": [{"id": "a", "position": 7, "dropped": 1}]}',
        b'{"slots": [{"id": "a", "position": 7, "invalid": {"reason": "mood", "at": 7}}]}',
        b'{"slots": [{"id": "a", "position": 7, "invalid": []}]}',
        b'{"slots": [{"id": "a", "position": 7, "invalidation_reason": "mood"}]}',
        b'{"slots": [{"id": "a", "position": 7}, {"id": "a", "position": 8}]}',
        b'{"slots": [' + b"[" * 100_000,
        encode_slots(SLOTS)[:-3],
    ],
)
def test_a_damaged_file_of_slots_is_an_error_that_says_what_to_do_and_never_no_slots(data: bytes):
    with pytest.raises(CorruptData, match=r"^it is damaged: .* Restore the file"):
        decode_slots(data, "it", now=1)
