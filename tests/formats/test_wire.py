"""Messages of nodes beside Arrow batches: any bytes give a value, or an error that names them."""

import contextlib
import random
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.errors import CorruptData, ExpectationFailed, Fenced, InvalidInput, NotFound, StrandlineError
from strandline.formats.arrow.block import Compression, encode_page, page_checksum
from strandline.formats.checksum import crc32c
from strandline.formats.json.fields import Fields, write_fields
from strandline.formats.node.ticket import (
    FeedTicket,
    FileTicket,
    ReadTicket,
    ReportTicket,
    decode_ticket,
    encode_ticket,
)
from strandline.formats.node.wire import (
    NOTE_SIZE,
    Advance,
    Flag,
    Note,
    content_checksum,
    cut,
    decode_advance,
    decode_answer,
    decode_error,
    decode_note,
    encode_advance,
    encode_answer,
    encode_error,
    encode_note,
)
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.node import Heartbeat
from strandline.model.records import record_batch
from strandline.node.messages import ElectionReport
from tests.formats.test_hostile_bytes import damage

WRITER = WriterId(UUID(int=99))
LAST = (1 << 63) - 1
HEARTBEAT = Heartbeat(1, 2, 3, LAST, 5)
NOTES = [
    Note(Flag.LAST | Flag.NUMBERED, 7, 3, 2, 1_700_000_000_000, (WRITER, 41), HEARTBEAT),
    Note(Flag.LAST, 0, LAST, 0, 0, None, HEARTBEAT),
    Note(Flag.HEARTBEAT, 0, 0, 0, 0, None, HEARTBEAT),
]
SINCE = Cursor(UUID(int=5), 12, 3)
TICKETS = [
    ReadTicket(),
    ReadTicket(SINCE, 99, follow=True, columns=("offset", "value")),
    FeedTicket("replique", 4, SINCE),
    ReportTicket("replique"),
    FileTicket("r", 4, "snapshot-1", "data/a b", 1 << 40, 64 << 20),
]


@pytest.mark.parametrize("note", NOTES, ids=str)
def test_a_note_comes_back_as_it_was(note):
    data = encode_note(note)
    assert len(data) == NOTE_SIZE
    assert decode_note(data, "a node") == note
    assert decode_note(memoryview(data), "a node") == note


def test_the_checksum_of_records_is_the_same_wherever_they_were_encoded():
    """From memory, cut out of others, put together, and after any number of trips."""
    dice = random.Random(5)
    for _ in range(300):
        count = dice.randint(1, 12)
        keys, values = (
            [None if dice.random() < 0.3 else dice.randbytes(dice.randint(0, 9)) for _ in range(count)] for _ in "kv"
        )
        headers = dice.choice([None, [[("a", b"x")] * dice.randint(0, 2) for _ in range(count)]])
        batch = record_batch(timestamps=[1] * count, ops=[0] * count, keys=keys, values=values, headers=headers)
        start = dice.randrange(count)
        for each in (batch, batch.slice(start), pa.concat_batches([batch, batch.slice(start)])):
            once = _sent(each)
            assert content_checksum(each) == content_checksum(once) == content_checksum(_sent(once))
        assert content_checksum(batch) != content_checksum(batch.slice(0, 0))


def _sent(batch):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


@pytest.mark.parametrize("size", [1, 1000, 1 << 16, 1 << 20])
def test_a_page_has_the_checksum_of_its_batch_in_however_many_pieces_it_is(size):
    batch = record_batch(timestamps=[1, 2], ops=[0, 1], keys=[b"k", None], values=[b"v" * size, b""])
    for each in (batch, batch.slice(1)):
        page = encode_page(each, Compression.NONE)
        assert page_checksum(page) == page_checksum([b"".join(page)]) == content_checksum(each)
        assert page_checksum(page) == page_checksum([b"".join(page)[:6], b"".join(page)[6:]])
    other = record_batch(timestamps=[1, 2], ops=[0, 1], keys=[b"k", None], values=[b"v" * (size - 1) + b"w", b""])
    assert content_checksum(other) != content_checksum(batch)


def test_a_report_with_unknown_flags_is_refused():
    report = bytearray(encode_advance(Advance(1, 20, 19, 3, 4)))
    report[1] = 2
    report[-4:] = crc32c(bytes(report[:-4])).to_bytes(4, "little")
    with pytest.raises(CorruptData, match="unknown flags"):
        decode_advance(bytes(report), "r")


def test_progress_and_its_answer_come_back_as_they_were():
    for is_answered in (True, False):
        advance = Advance(1, 20, 19, 3, 4, is_answered)
        assert decode_advance(encode_advance(advance), "r") == advance
    for refused in (None, "", "The slot is invalid."):
        assert decode_answer(encode_answer(HEARTBEAT, refused), "a node") == (HEARTBEAT, refused)


@pytest.mark.parametrize("ticket", TICKETS, ids=str)
def test_a_ticket_comes_back_as_it_was(ticket):
    assert decode_ticket(encode_ticket(ticket)) == ticket


def test_no_ticket_at_all_asks_for_the_whole_log():
    assert decode_ticket(b"") == decode_ticket(b"{}") == ReadTicket()


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_note, encode_note(NOTES[0])),
        (decode_advance, encode_advance(Advance(1, 20, 19, 3, 4))),
        (decode_answer, encode_answer(HEARTBEAT, "The slot is invalid.")),
    ],
    ids=["note", "advance", "answer"],
)
def test_a_damaged_byte_is_always_found(decode, data):
    for at in range(len(data)):
        for bit in range(8):
            hostile = bytearray(data)
            hostile[at] ^= 1 << bit
            with pytest.raises(CorruptData, match="a node"):
                decode(bytes(hostile), "a node")
    for size in (*range(len(data)), len(data) + 1, 1 << 20):
        with pytest.raises(CorruptData, match="a node"):
            decode(data[:size] if size <= len(data) else data + bytes(size - len(data)), "a node")
    with pytest.raises(CorruptData):
        decode(None, "a node")


@pytest.mark.parametrize(
    "note",
    [
        Note(Flag.LAST, LAST, 1, 0, 0, None, HEARTBEAT),
        Note(Flag.LAST, 1 << 63, 0, 0, 0, None, HEARTBEAT),
        Note(Flag.LAST, 0, 1, 1 << 63, 0, None, HEARTBEAT),
        Note(Flag.LAST, 0, 1, 0, 0, (WRITER, 1 << 63), HEARTBEAT),
        Note(Flag.LAST, 0, 1, 0, 0, None, HEARTBEAT._replace(epoch=(1 << 64) - 1)),
        Note(128, 0, 1, 0, 0, None, HEARTBEAT),
    ],
    ids=str,
)
def test_a_note_that_is_whole_and_makes_no_sense_is_damage_too(note):
    with pytest.raises(CorruptData):
        decode_note(encode_note(note), "a node")


def test_a_ticket_of_any_content_is_read_or_refused():
    dice = random.Random(6)
    for ticket in TICKETS:
        data = encode_ticket(ticket)
        for _ in range(1500):
            with contextlib.suppress(InvalidInput):
                decode_ticket(damage(data, dice))


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b"1" * 60_000, b'{"a":' * 10_000, b"\xff", b"null", b'"x"', b" " * (1 << 17), b'{"term": NaN}'],
    ids=lambda data: str(data[:8]),
)
def test_json_that_is_no_request_is_refused(data):
    with pytest.raises(InvalidInput):
        Fields.parse(data, "it").natural("term")


@pytest.mark.parametrize("value", ["true", "-1", "1.0", '"1"', "null", "[]", "9223372036854775808", "1" + "0" * 4000])
def test_a_number_is_a_whole_one_that_fits(value):
    with pytest.raises(InvalidInput, match="'n'"):
        Fields.parse(f'{{"n": {value}}}'.encode(), "it").natural("n")


@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity", "true", '"1"', "1" + "0" * 400, "1e999"])
def test_seconds_are_finite_and_not_negative(value):
    with pytest.raises(InvalidInput, match="'n'"):
        Fields.parse(f'{{"n": {value}}}'.encode(), "it").seconds("n")


def test_half_a_surrogate_is_no_text():
    with pytest.raises(InvalidInput, match="broken text"):
        Fields.parse(b'{"name": "\\ud800"}', "it").text("name")


HALF_A_SURROGATE = b"\xed\xa0\x80"
"""As WTF-8 has it, which is no UTF-8."""


@pytest.mark.parametrize(
    "data",
    [
        b'{"name": "' + HALF_A_SURROGATE + b'"}',
        b'{"' + HALF_A_SURROGATE + b'": 1}',
        '{"name": "a"}'.encode("utf-16"),
        '{"name": "a"}'.encode("utf-32"),
        '{"name": "a"}'.encode("utf-8-sig"),
    ],
)
def test_a_request_that_is_not_utf_8_is_refused(data):
    with pytest.raises(InvalidInput, match="it cannot be read"):
        Fields.parse(data, "it")


def test_texts_of_a_message_are_bounded():
    fields = {"name": "a", "term": 1, "adopted": 1, "durable": 5, "committed": 4, "unhealthy": "x" * (1 << 16)}
    assert Fields(fields, "it").record(ElectionReport).unhealthy == "x" * (1 << 16)
    with pytest.raises(InvalidInput, match="'unhealthy' has more than 65536 letters"):
        Fields(fields | {"unhealthy": "x" * (1 << 16) + "x"}, "it").record(ElectionReport)


def test_an_error_travels_as_its_class_and_its_sentence():
    error = decode_error(encode_error(NotFound("Where is «it»?")))
    assert (type(error), str(error)) == (NotFound, "Where is «it»?")
    failed = ExpectationFailed("It ended elsewhere.")
    failed.end = 7
    assert decode_error(encode_error(failed)).end == 7


def test_an_error_outside_the_tree_travels_as_what_it_derives_from():
    class Fenced2(Fenced):
        """Somebody else's."""

    class NotFound(StrandlineError):  # only the name is the tree's
        """Somebody else's."""

    assert type(decode_error(encode_error(Fenced2("no")))) is Fenced
    assert type(decode_error(encode_error(NotFound("no")))) is StrandlineError


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\xff",
        b"{}",
        b"[]",
        write_fields({"error": "OSError", "message": "x"}),
        write_fields({"error": "annotations", "message": "x"}),
        write_fields({"error": "NotFound", "message": 7}),
        write_fields({"error": "NotFound", "message": "x" * 70_000}),
        write_fields({"error": "ExpectationFailed", "message": "x", "end": "y"}),
    ],
    ids=lambda data: str(data)[:40],
)
def test_received_bytes_become_no_other_class_than_an_error_of_the_tree(data):
    assert decode_error(data) is None


@pytest.mark.parametrize("letter", ["x", "\N{SNOWMAN}", "\U0001f30a", "\ud800"])
def test_a_long_sentence_is_cut_to_what_travels(letter):
    short = cut("Well. " + letter * 5000)
    assert short.startswith("Well. ")
    assert short.endswith("...")
    assert len(short.encode()) <= 1000
    assert len(encode_error(NotFound(letter * 5000))) < 2000
