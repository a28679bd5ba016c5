"""JSON files whose checksum is right and whose values are not: damage, whatever they hold, however large they are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from uuid import UUID

import pytest

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.json.checked import encode_checked
from strandline.formats.json.fields import Fields
from strandline.formats.json.slots import slot_fields
from strandline.formats.object.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.formats.segment.file import SegmentFacts
from strandline.formats.topic import decode_topic, encode_topic
from strandline.formats.wal.folder import (
    Rewinding,
    SlotsFile,
    WalIdentity,
    append_of,
    decode_rewinding,
    decode_slots_file,
    decode_wal_identity,
    encode_rewinding,
    encode_slots_file,
    encode_wal_identity,
    lead_of,
)
from strandline.model.json_values import LARGEST, MOST_VALUES, natural, parse_json, parse_object
from strandline.model.retention import Invalidation, InvalidReason, SlotState
from strandline.model.stamp import Stamped

INFINITE = float("inf")
FACTS = SegmentFacts(
    log_id=UUID(int=7), partition=3, segment=UUID(int=8), start=0, end=9, terms=((0, 0), (1, 5)), max_timestamp=7
)


_WAL = encode_wal_identity(WalIdentity(UUID(int=7)))


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(data), **fields}).encode()


def resealed(data: bytes, **fields: object) -> bytes:
    told = {**json.loads(data), **fields}
    del told["checksum"]
    return encode_checked(told.pop("kind"), told.pop("version"), told)


@pytest.mark.parametrize("wrong", [INFINITE, 1.5, "1", None, -1, 1 << 63, 10**300, [], True])
def test_a_number_that_is_none_is_damage_in_every_file(wrong: object) -> None:
    for decode, data in (
        (decode_wal_identity, changed(_WAL, min_reader=wrong)),
        (decode_rewinding, resealed(encode_rewinding(Rewinding(UUID(int=7), 5, 9, 1, 0, 100, 20, 5, "q")), size=wrong)),
        (SegmentFacts.decode, changed(FACTS.encode(), terms=[[wrong, 0]])),
        (SegmentFacts.decode, changed(FACTS.encode(), terms=[[0, wrong]])),
    ):
        with pytest.raises(CorruptData, match="it"):
            decode(data, "it")
    with pytest.raises(CorruptData, match="it is damaged"):
        decode_slots_file(resealed(encode_slots_file(SlotsFile(UUID(int=7), 3)), start=wrong), "it")


def test_all_of_a_slot_is_read_back() -> None:
    gone = Invalidation(InvalidReason.HORIZON, 8)
    slot = SlotState("b", 5, "b", 3, 7, gone, expires=9, dropped=True, born=2, hot=True, suspected=6, fingerprint=4)
    assert all(getattr(slot, field.name) != field.default for field in dataclasses.fields(slot))
    kept = SlotsFile(UUID(int=7), 3, (slot, SlotState("c", 5, None, 0, 7)))
    assert decode_slots_file(encode_slots_file(kept), "it") == kept


@pytest.mark.parametrize("terms", [[], [[1, 0], [0, 5]], [[0, 5], [1, 0]], [[0, 1]], [[0]], [[0, 0, 0]], 7, None])
def test_terms_that_no_segment_has_are_damage(terms: object) -> None:
    with pytest.raises(CorruptData, match="description in it"):
        SegmentFacts.decode(changed(FACTS.encode(), terms=terms), "it")


def test_a_segment_that_ends_before_it_begins_is_damage() -> None:
    with pytest.raises(CorruptData, match="out of order"):
        SegmentFacts.decode(changed(FACTS.encode(), start=10), "it")


@pytest.mark.parametrize(
    "row", [["0" * 32, INFINITE, 1, 1, 1, 1], ["0" * 32, 10**40, 1, 1, 1, 1], [7, 1, 1, 1, 1, 1], 7]
)
def test_a_lead_with_writers_that_there_cannot_be_is_damage(row: object) -> None:
    with pytest.raises(CorruptData, match="its beginning"):
        lead_of({b"log": str(UUID(int=7)).encode(), b"writers": json.dumps([row]).encode()}, "it")


@pytest.mark.parametrize("number", [b"-1", b"9" * 30, b"1.5", b"", b"\xff"])
def test_an_append_with_a_number_that_there_cannot_be_is_damage(number: bytes) -> None:
    with pytest.raises(CorruptData, match="its writer"):
        append_of({b"writer": b"0" * 32, b"number": number}, "it")


DECODERS: list[Callable[[bytes, str], object]] = [
    decode_identity,
    decode_topic,
    decode_wal_identity,
    decode_rewinding,
    SlotCodec("s").decode,
    decode_slots_file,
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b" " * (LARGEST + 1), b"[" + b"0," * MOST_VALUES + b"0]", b"9" * 5000]
)
def test_json_that_would_take_much_to_parse_is_damage(decode: Callable[[bytes, str], object], data: bytes) -> None:
    with pytest.raises(CorruptData, match="it is damaged"):
        decode(data, "it")


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_identity, changed(encode_identity(LogIdentity(UUID(int=7))), min_reader=3, retention="of the future")),
        (
            decode_wal_identity,
            changed(_WAL, min_reader=3, log_id="of the future"),
        ),
        (decode_topic, changed(encode_topic(3), min_reader=3, partition_count="of the future")),
    ],
)
def test_a_file_of_a_newer_version_is_called_that_and_not_damaged(
    decode: Callable[[bytes, str], object], data: bytes
) -> None:
    with pytest.raises(UnsupportedVersion, match="it needs a reader of version 3"):
        decode(data, "it")


def test_values_are_taken_for_nothing_but_what_they_are() -> None:
    fields = Fields({"whole": -5, "text": "é"}, "it")
    assert (natural(0), natural((1 << 63) - 1)) == (0, (1 << 63) - 1)
    assert (fields.whole("whole"), fields.text("text")) == (-5, "é")
    assert parse_json(b" [1] ") == [1]
    assert parse_object(b"{}") == {}
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match=r"."):
            natural(wrong)
    odd_ones = ((Fields.whole, b"true"), (Fields.whole, b"1.0"), (Fields.text, b"7"), (Fields.text, b'"\\ud800"'))
    for read, odd in odd_ones:
        with pytest.raises(CorruptData, match=r"."):
            read(Fields.parse(b'{"n": %b}' % odd, "it", wrong=CorruptData), "n")


ODD_SLOTS = {
    "a float": {"position": 7.0},
    "an offset of more than 63 bits": {"position": 1 << 63},
    "no holder": {"holder": ...},
    "no epoch": {"epoch": ...},
    "no time": {"last_seen": ...},
}


@pytest.mark.parametrize("odd", ODD_SLOTS.values(), ids=ODD_SLOTS)
def test_an_odd_slot_is_damage_in_a_cell_and_in_the_file_of_a_write_ahead_log(odd: dict[str, object]) -> None:
    slot = SlotState("search", 7, None, 0, 5)
    fields = {name: value for name, value in (slot_fields(slot) | odd).items() if value is not ...}
    with pytest.raises(CorruptData):
        decode_slots_file(resealed(encode_slots_file(SlotsFile(UUID(int=7), 3)), slots=[fields]), "it")
    with pytest.raises(CorruptData):
        SlotCodec("search").decode(json.dumps(fields | {"revision": 1, "recent": []}).encode(), "it")


def test_a_slot_that_was_seen_before_the_epoch_is_read_from_a_cell_and_from_the_file() -> None:
    slot = SlotState("search", 7, None, 0, -5)
    kept = SlotsFile(UUID(int=7), 3, (slot,))
    assert decode_slots_file(encode_slots_file(kept), "it") == kept
    assert SlotCodec("search").decode(SlotCodec("search").encode(Stamped(slot)), "it").value == slot
