"""Whatever the bytes say: a value or CorruptData, in bounded time and memory."""

import random
import resource
import struct

import pyarrow as pa
import pytest

from strandline.errors import CorruptData, UnsupportedVersion
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.object.batch import BatchInfo, decode_batch, encode_batch
from strandline.formats.object.head import decode_entries, decode_head
from strandline.formats.object.identity import SlotCodec, decode_identity
from strandline.model.records import RECORD_SCHEMA, record_batch
from tests.formats.forging import WRITER, batch_bytes, head_bytes, reseal_batch, reseal_head, some_records

EXPECTED = (CorruptData, UnsupportedVersion)


def damage(data: bytes, dice: random.Random) -> bytes:
    """Damage bytes in one of many ways, at random."""
    hostile = bytearray(data)
    match dice.randrange(6):
        case 0:
            for _ in range(dice.randint(1, 4)):
                hostile[dice.randrange(len(hostile))] ^= 1 << dice.randrange(8)
        case 1:
            del hostile[dice.randrange(len(hostile)) :]
        case 2:
            at = dice.randrange(len(hostile))
            hostile[at:at] = dice.randbytes(dice.randint(1, 40))
        case 3:
            at = dice.randrange(len(hostile))
            del hostile[at : at + dice.randint(1, 40)]
        case 4:  # a number of the size of a length, a count or an offset
            width = dice.choice([2, 4, 8])
            value = dice.choice([0, 1, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1])
            at = dice.randrange(max(1, len(hostile) - width))
            hostile[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        case 5:
            at, other = dice.randrange(len(hostile)), dice.randrange(len(hostile))
            hostile[at : at + 16] = hostile[other : other + 16]
    return bytes(hostile)


def survives(decode, data):
    """Decoding gives a value (True) or an expected error that names the object (False); all else fails the test."""
    try:
        decode(data, "it")
    except EXPECTED as error:
        return "it " not in str(error)
    return True


def test_random_bytes_are_corrupt():
    dice = random.Random(1)
    for _ in range(2000):
        data = dice.randbytes(dice.randint(0, 300))
        for decode in (decode_batch, decode_head, decode_entries, decode_identity, SlotCodec("s").decode):
            with pytest.raises(EXPECTED):
                decode(data, "it")


def test_every_single_flipped_bit_of_a_batch_is_noticed():
    data = batch_bytes(Compression.NONE, some_records(2))
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        assert not survives(decode_batch, flipped), f"byte {at}"


def test_every_single_flipped_bit_of_a_head_is_noticed():
    data = head_bytes()
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        assert not survives(decode_head, flipped), f"byte {at}"


@pytest.mark.parametrize("damaged", [b"[]", b"null", b"{}", b'{"id": 1}', b"[" * 100_000, b'{"position": -1}', b"\xff"])
def test_damaged_json_is_corrupt(damaged):
    for decode in (decode_identity, SlotCodec("s").decode):
        with pytest.raises(CorruptData):
            decode(damaged, "it")


# --- forged on purpose -----------------------------------------------------------------------------------------


def forged(page: bytes, compression=Compression.NONE, *, count=1, pages=1) -> bytes:
    return b"".join(encode_batch([[page]], BatchInfo(compression, count, pages, 0, 0, WRITER, 0)))


def bomb(announced: int) -> bytes:
    """A compressed page whose first compressed buffer announces ``announced`` bytes."""
    record = record_batch(timestamps=[1] * 500, ops=[0] * 500, keys=[b"k"] * 500, values=[bytes(100)] * 500)
    page = bytearray(b"".join(encode_page(record, Compression.ZSTD)))
    lengths = [struct.pack("<q", buffer.size) for column in record.columns for buffer in column.buffers() if buffer]
    for length in lengths:
        at = page.find(length + b"\x28\xb5\x2f\xfd")  # a length before the magic of a zstd frame
        if at >= 0:
            page[at : at + 8] = struct.pack("<q", announced)
            return forged(bytes(page), Compression.ZSTD, count=500)
    raise AssertionError("no compressed buffer found")


@pytest.mark.parametrize("announced", [2**31, 2**40, 2**62, -2, -(2**62)])
def test_a_buffer_that_announces_more_than_a_batch_may_hold_is_never_allocated(announced):
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match=r"announces?"):
        decode_batch(bomb(announced), "it")
    assert pa.default_memory_pool().max_memory() - before < 64 << 20


@pytest.mark.matrix
def test_many_pages_that_announce_a_lot_together_are_refused():
    record = record_batch(timestamps=[1], ops=[0], keys=[b"k"], values=[bytes(200 << 20)])
    page = encode_page(record, Compression.ZSTD)
    data = b"".join(encode_batch([page] * 7, BatchInfo(Compression.ZSTD, 7, 7, 0, 0, WRITER, 0)))
    assert len(data) < 1 << 20
    with pytest.raises(CorruptData, match="announce more than"):
        decode_batch(data, "it")


def test_compressed_pages_in_a_batch_marked_plain_are_refused():
    page = b"".join(encode_page(some_records(), Compression.LZ4))
    with pytest.raises(CorruptData, match="announced compression"):
        decode_batch(forged(page, Compression.NONE, count=5), "it")


def test_another_schema_than_that_of_records_is_refused():
    sink = pa.BufferOutputStream()
    table = pa.table({"x": [1, 2]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    block = sink.getvalue().to_pybytes()
    with pytest.raises(CorruptData, match=r"does not hold .* but \['x'\]"):
        decode_batch(reseal_batch(block + batch_bytes()[-(48 + 4 + 4 + 7) :]), "it")


def test_operations_and_nulls_that_no_record_has_are_refused():
    for column, value in (("op", [7]), ("op", [-1]), ("op", [None]), ("timestamp", [None])):
        columns = {name: some_records(1).column(name) for name in RECORD_SCHEMA.names}
        columns[column] = pa.array(value, RECORD_SCHEMA.field(column).type)
        record = pa.RecordBatch.from_arrays(list(columns.values()), schema=RECORD_SCHEMA)
        with pytest.raises(CorruptData):
            decode_batch(batch_bytes(Compression.NONE, record), "it")


def test_counts_that_differ_from_the_records_are_refused():
    page = encode_page(some_records(), Compression.NONE)
    for count, pages in ((4, 1), (6, 1), (5, 2), (2**32 - 1, 1)):
        info = BatchInfo(Compression.NONE, count, pages, 0, 0, WRITER, 0)
        with pytest.raises(CorruptData, match="its footer says"):
            decode_batch(b"".join(encode_batch([page], info)), "it")


def test_a_head_that_announces_billions_of_items_is_refused_at_once():
    data = head_bytes()
    for at in range(6, len(data) - 8):
        hostile = reseal_head(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
        survives(decode_head, hostile)


def used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
