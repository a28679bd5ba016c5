"""Version 1 of batch objects and of the manifest: the shared vectors, round trips, and hostile bytes."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.compat.v1.batch_format import decode_queue_batch, decode_values, encode_queue_batch, encode_values
from strandline.compat.v1.manifest_format import ManifestCodec, decode_manifest
from strandline.errors import CorruptData, InvalidInput, UnsupportedVersion
from strandline.formats.arrow.block import Compression
from strandline.model.head import MetadataRange, QueueEntry, QueueManifest
from strandline.model.records import MAX_BATCH_BYTES, RECORD_SCHEMA, Op
from strandline.model.stamp import Stamped
from tests.compat.v1.filled_queues import encode_manifest
from tests.formats.forging import manifest_bytes, queue_batch_bytes, some_manifest
from tests.formats.test_hostile_bytes import damage, survives
from tests.matrix_cases import examples

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "buffer_v1.json").read_text())
EXPECTED = (CorruptData, UnsupportedVersion)
WAYS = [Compression.NONE, Compression.ZSTD]
I64 = st.integers(-(2**63), 2**63 - 1)


def block_of(*values: bytes) -> bytes:
    """The simplest possible encoder of a block."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def sealed(block: bytes, count: int, compression: int = 0, version: int = 1) -> bytes:
    return block + struct.pack("<BIH", compression, count, version)


def named(vector):
    return vector["name"]


# --- the shared vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["batches"], ids=named)
def test_every_batch_vector_gives_its_entries_or_an_error_that_names_the_object(vector):
    data = bytes.fromhex(vector["hex"])
    if vector.get("error"):
        for decode in (decode_values, decode_queue_batch):
            with pytest.raises(EXPECTED, match=r"^ingest/x\.batch "):
                decode(data, "ingest/x.batch")
        return
    entries = [bytes.fromhex(entry) for entry in vector["entries"]]
    assert decode_values(data, "it").to_pylist() == entries
    assert decode_queue_batch(data, "it").column("value").to_pylist() == entries


@pytest.mark.parametrize("vector", VECTORS["manifests"], ids=named)
def test_every_manifest_vector_gives_its_manifest_or_an_error_that_names_the_object(vector):
    data = bytes.fromhex(vector["hex"])
    if vector.get("error"):
        with pytest.raises(EXPECTED, match=r"^ingest/manifest "):
            decode_manifest(data, "ingest/manifest")
        return
    manifest = decode_manifest(data, "it")
    assert (manifest.epoch, manifest.next_sequence) == (vector["epoch"], vector["next_sequence"])
    assert [
        {
            "sequence": entry.sequence,
            "location": entry.location,
            "metadata": [
                {
                    "start_index": item.start,
                    "ingestion_time_ms": item.ingested // 1000,
                    "payload": item.payload.hex(),
                }
                for item in entry.metadata
            ],
        }
        for entry in manifest.entries
    ] == vector["entries"]


@pytest.mark.parametrize("vector", [vector for vector in VECTORS["manifests"] if "error" not in vector], ids=named)
def test_a_manifest_is_written_byte_for_byte_as_others_write_it(vector):
    assert encode_manifest(decode_manifest(bytes.fromhex(vector["hex"]), "it")).hex() == vector["hex"]


@pytest.mark.parametrize("vector", [vector for vector in VECTORS["batches"] if "error" not in vector], ids=named)
def test_a_plain_batch_is_written_byte_for_byte_as_others_write_it(vector):
    entries = [bytes.fromhex(entry) for entry in vector["entries"]]
    block = encode_values(pa.array(entries, pa.binary()))
    assert bytes(block) == block_of(*entries)
    parts = encode_queue_batch([block], len(entries), Compression.NONE)
    assert b"".join(parts) == sealed(block_of(*entries), len(entries))
    assert vector["name"] == "zstd_block" or b"".join(parts).hex() == vector["hex"]


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", WAYS)
@settings(max_examples=examples(80), deadline=None)
@given(values=st.lists(st.binary(max_size=300), max_size=40), cut=st.integers(0, 40))
def test_values_survive_their_batch(compression, values, cut):
    array = pa.array(values, pa.binary())
    blocks = [encode_values(array[:cut]), encode_values(array[cut:])]
    data = b"".join(encode_queue_batch(blocks, len(values), compression))
    assert decode_values(data, "it").to_pylist() == values


def test_a_slice_of_an_array_takes_only_its_own_values():
    array = pa.array([b"%d" % number for number in range(1000)], pa.binary())
    assert bytes(encode_values(array.slice(500, 3))) == block_of(b"500", b"501", b"502")
    assert bytes(encode_values(array.slice(500, 0))) == b""


@pytest.mark.parametrize("count", [1, 2, 1024, 100_000])
def test_batches_of_every_size_come_back_as_one_array(count):
    array = pa.array([b"value %d" % number for number in range(count)], pa.binary())
    for compression in WAYS:
        found = decode_values(b"".join(encode_queue_batch([encode_values(array)], count, compression)), "it")
        assert found.equals(array)
        found.validate(full=True)


def test_an_empty_batch_is_no_records():
    for compression in WAYS:
        batch = decode_queue_batch(b"".join(encode_queue_batch([], 0, compression)), "it")
        assert (batch.num_rows, batch.schema) == (0, RECORD_SCHEMA)


def test_a_compressed_batch_is_one_frame_with_its_size():
    data = b"".join(encode_queue_batch([encode_values(pa.array([b"x" * 1000], pa.binary()))], 1, Compression.ZSTD))
    assert data[:4] == b"\x28\xb5\x2f\xfd"
    assert data[4] & 0xE0 == 0x60  # a single segment, its size in two bytes
    assert int.from_bytes(data[5:7], "little") + 256 == 1004


def test_blocks_compressed_by_other_implementations_are_read():
    values = [b"record %d" % number * 20 for number in range(300)]
    block = block_of(*values)
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as target:
        target.write(block)
    sizeless = stream.getvalue().to_pybytes()
    assert sizeless[4] & 0xE0 == 0, "this frame does not tell its size"
    codec = pa.Codec("zstd")
    frames = codec.compress(block[:5000], asbytes=True) + codec.compress(block[5000:], asbytes=True)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + codec.compress(block, asbytes=True)
    for compressed in (sizeless, frames, skippable):
        assert decode_values(sealed(compressed, 300, 1), "it").to_pylist() == values


def test_nulls_and_other_compressions_cannot_be_written():
    with pytest.raises(InvalidInput, match="stores values, and no nulls"):
        encode_values(pa.array([b"a", None], pa.binary()))
    with pytest.raises(InvalidInput, match="'zstd' or 'none', not 'lz4'"):
        encode_queue_batch([], 0, Compression.LZ4)


def test_more_than_a_batch_may_hold_cannot_be_written():
    block = memoryview(bytes(1 << 20))
    with pytest.raises(InvalidInput, match="over the limit"):
        encode_queue_batch([block] * 1025, 1, Compression.NONE)


ranges = st.lists(
    st.builds(
        MetadataRange,
        start=st.integers(0, 2**32 - 1),
        ingested=I64.map(lambda time: time * 1000),
        payload=st.binary(max_size=20),
    ),
    max_size=4,
).map(tuple)


@settings(max_examples=examples(150), deadline=None)
@given(
    listed=st.lists(st.tuples(st.text(max_size=30), ranges), max_size=5),
    first=st.integers(0, 2**62),
    epoch=st.integers(0, 2**64 - 1),
)
def test_a_manifest_survives_its_bytes_with_every_time_that_64_bits_can_hold(listed, first, epoch):
    entries = tuple(QueueEntry(first + place, where, metadata) for place, (where, metadata) in enumerate(listed))
    manifest = QueueManifest(entries, first + len(listed), epoch)
    assert decode_manifest(encode_manifest(manifest), "it") == manifest


@settings(max_examples=examples(100), deadline=None)
@given(time=I64)
def test_every_time_on_the_wire_is_written_back_as_it_was(time):
    data = struct.pack("<IQHIIqI", 8 + 2 + 4 + 16, 0, 0, 1, 0, time, 0) + struct.pack("<IQQH", 1, 1, 0, 1)
    assert encode_manifest(decode_manifest(data, "it")) == data


def test_ingestion_times_are_cut_to_the_millisecond_also_before_1970():
    entry = QueueEntry(0, "a", (MetadataRange(0, 1_999, b""), MetadataRange(1, -1, b"")))
    found = decode_manifest(encode_manifest(QueueManifest((entry,), 1)), "it").entries[0]
    assert [item.ingested for item in found.metadata] == [1_000, -1_000]


@pytest.mark.parametrize(
    "entry",
    [
        QueueEntry(0, "x" * 65_536),
        QueueEntry(0, "a", (MetadataRange(2**32, 0, b""),)),
        QueueEntry(0, "a", (MetadataRange(0, 2**63 * 1000, b""),)),
    ],
    ids=["location", "start", "time"],
)
def test_values_that_do_not_fit_the_manifest_are_refused(entry):
    with pytest.raises(InvalidInput, match="no room"):
        encode_manifest(QueueManifest((entry,), 1))


def test_a_cell_of_a_manifest_remembers_no_operations():
    codec = ManifestCodec()
    state = codec.decode(codec.encode(Stamped(some_manifest(), 7, ())), "it")
    assert state == Stamped(some_manifest(), 0, ())
    assert codec.encoded == 1


@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(st.sampled_from(["list", "list", "drop", "change", "begin anew", "copy"]), max_size=25))
def test_a_codec_that_remembers_entries_writes_what_one_without_memory_would(steps):
    codec, manifest = ManifestCodec(), some_manifest()
    for made, step in enumerate(steps, 1):
        entries = manifest.entries
        fresh = QueueEntry(manifest.next_sequence, f"new-{made}", (MetadataRange(0, made * 1000, b"x" * made),))
        match step:
            case "list":
                manifest = QueueManifest((*entries, fresh), manifest.next_sequence + 1, made)
            case "drop":
                manifest = QueueManifest(entries[1:], manifest.next_sequence, made)
            case "change" if entries:
                last = QueueEntry(entries[-1].sequence, f"other-{made}")
                manifest = QueueManifest((*entries[:-1], last), manifest.next_sequence, made)
            case "begin anew":
                manifest = QueueManifest((QueueEntry(0, f"first-{made}"),), 1, made)
            case "copy":
                manifest = decode_manifest(encode_manifest(manifest), "it")
        assert codec.encode(Stamped(manifest)) == encode_manifest(manifest)


# --- as records ------------------------------------------------------------------------------------------------------


def times_of(metadata, count, uncovered=0):
    data = sealed(block_of(*[b"x"] * count), count)
    batch = decode_queue_batch(data, "it", metadata=metadata, uncovered=uncovered)
    batch.validate(full=True)
    assert batch.schema == RECORD_SCHEMA
    assert set(batch.column("op").to_pylist()) <= {Op.PUT}
    assert batch.column("key").null_count == batch.column("headers").null_count == count
    return batch.column("timestamp").cast(pa.int64()).to_pylist()


def test_a_record_is_at_the_ingestion_time_of_the_range_that_covers_it():
    metadata = (MetadataRange(0, 10, b""), MetadataRange(2, 20, b""), MetadataRange(3, 30, b""))
    assert times_of(metadata, 5) == [10, 10, 20, 30, 30]


def test_a_record_that_no_range_covers_is_at_the_time_given_for_those():
    assert times_of((), 3, uncovered=7) == [7, 7, 7]
    assert times_of((MetadataRange(2, 20, b""),), 4, uncovered=7) == [7, 7, 20, 20]


def test_ranges_in_disorder_beyond_the_end_or_at_one_record_do_no_harm():
    metadata = (MetadataRange(2, 20, b""), MetadataRange(0, 10, b""), MetadataRange(9, 90, b""))
    assert times_of(metadata, 4) == [10, 10, 20, 20]
    assert times_of((MetadataRange(1, 1, b""), MetadataRange(1, 2, b"")), 3) == [0, 2, 2]
    assert times_of((MetadataRange(2**32 - 1, 5, b""),), 0) == []


def test_a_time_that_no_timestamp_can_hold_becomes_the_nearest_that_can():
    metadata = (MetadataRange(0, 2**63 * 1000, b""), MetadataRange(1, -(2**70), b""))
    assert times_of(metadata, 2) == [2**63 - 1, -(2**63)]


# --- hostile bytes ---------------------------------------------------------------------------------------------------


def fuzz_queues(seeds):
    originals = [
        (queue_batch_bytes(Compression.NONE), decode_queue_batch),
        (queue_batch_bytes(Compression.ZSTD), decode_queue_batch),
        (manifest_bytes(), decode_manifest),
    ]
    for seed in seeds:
        dice = random.Random(seed)
        data, decode = dice.choice(originals)
        tail = data[-7:]
        for _ in range(dice.randint(1, 3)):
            data = damage(data, dice) or b"x"
        survives(decode, data)
        if decode is decode_queue_batch:
            survives(decode, data + tail)


def test_damaged_queues_give_a_value_or_say_that_they_are_damaged():
    fuzz_queues(range(4000))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_damaged_queues():
    fuzz_queues(range(10_000, 110_000))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_value_or_corrupt(data):
    survives(decode_queue_batch, data)
    survives(decode_manifest, data)
    for compression in (0, 1):
        for count in (0, 1, 7):
            survives(decode_queue_batch, sealed(data, count, compression))
            survives(decode_queue_batch, sealed(b"\x28\xb5\x2f\xfd" + data, count, compression))
    survives(decode_manifest, data + struct.pack("<IQQH", len(data) % 5, 5, 0, 1))


def test_every_flipped_bit_of_a_length_or_of_the_tail_is_noticed():
    # The format has no checksum: what is flipped within a value cannot be seen. Everything else can, but for a
    # length that is wrong by what another one is wrong by, which takes two.
    values = [b"abc", b"", b"defgh"]
    data = sealed(block_of(*values), 3)
    inside = {4, 5, 6, *range(15, 20)}
    for at in range(len(data)):
        for bit in range(8):
            flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            assert survives(decode_queue_batch, flipped) == (at in inside), (at, bit)


def test_a_prefix_of_a_batch_or_of_a_manifest_is_not_one():
    for data, decode in (
        (queue_batch_bytes(Compression.NONE), decode_queue_batch),
        (manifest_bytes(), decode_manifest),
    ):
        for end in range(len(data)):
            assert not survives(decode, data[:end]), end


@pytest.mark.parametrize("announced", [2**31, 2**40, 2**62, 2**64 - 1, MAX_BATCH_BYTES + 1, MAX_BATCH_BYTES])
def test_a_frame_that_announces_more_than_it_can_hold_is_never_allocated_for(announced):
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", announced) + bytes(20)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="announce"):
        decode_values(sealed(frame, 1, 1), "it")
    assert pa.default_memory_pool().max_memory() - before < 64 << 20


def bomb(size: int) -> bytes:
    """A zstd frame without a content size that decompresses to ``size`` zeros."""
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as target:
        for _ in range(size >> 20):
            target.write(bytes(1 << 20))
    return stream.getvalue().to_pybytes()


@pytest.mark.matrix
def test_a_bomb_is_given_up_as_soon_as_it_is_larger_than_a_batch():
    frame = bomb(3 << 30)
    assert len(frame) < 1 << 20
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData, match="decompresses to more than"):
        decode_values(sealed(frame, 1, 1), "it")
    assert pa.default_memory_pool().max_memory() - before < 64 << 20


@pytest.mark.parametrize("count", [2, 1000, 2**31, 2**32 - 1])
def test_a_count_that_the_block_cannot_hold_allocates_nothing(count):
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(CorruptData):
        decode_values(sealed(block_of(b"a"), count), "it")
    assert pa.default_memory_pool().max_memory() - before < 1 << 20


@pytest.mark.parametrize("length", [4, 2**20, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1])
def test_a_length_past_the_end_of_the_block_is_corrupt(length):
    for block in (struct.pack("<I", length) + b"abc", block_of(b"x", b"y") + struct.pack("<I", length) + b"abc"):
        count = 1 if len(block) < 9 else 3
        with pytest.raises(CorruptData):
            decode_values(sealed(block, count), "it")


def test_a_compressed_batch_of_nothing_at_all_is_corrupt():
    with pytest.raises(CorruptData):
        decode_values(sealed(b"", 1, 1), "it")
    survives(decode_values, sealed(b"", 0, 1))


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        (QueueManifest((QueueEntry(5, "a"), QueueEntry(7, "b")), 8), "sequence 5 where 6"),
        (QueueManifest((QueueEntry(6, "a"), QueueEntry(5, "b")), 7), "sequence 6 where 5"),
        (QueueManifest((QueueEntry(5, "a"),), 9), "sequence 5 where 8"),
        (QueueManifest((QueueEntry(5, "a"),), 0), "1 entries, more than it can hold"),
        (QueueManifest((), 2**63), "9,223,372,036,854,775,808"),
    ],
    ids=["hole", "disorder", "end", "no room below", "beyond 64 bits"],
)
def test_a_manifest_whose_sequences_are_not_dense_up_to_its_end_is_corrupt(manifest, sentence):
    with pytest.raises(CorruptData, match=sentence):
        decode_manifest(encode_manifest(manifest), "it")


def test_bytes_left_over_within_an_entry_are_corrupt():
    body = struct.pack("<QH", 0, 1) + b"a" + struct.pack("<I", 0) + b"junk"
    data = struct.pack("<I", len(body)) + body + struct.pack("<IQQH", 1, 1, 0, 1)
    with pytest.raises(CorruptData, match="4 bytes too many"):
        decode_manifest(data, "it")


def test_a_newer_version_says_to_upgrade_and_an_older_one_does_not_exist():
    for version in (2, 3, 255):
        with pytest.raises(UnsupportedVersion, match=f"it is a batch of version {version}"):
            decode_values(sealed(block_of(b"a"), 1, version=version), "it")
        with pytest.raises(UnsupportedVersion, match=f"manifest of version {version}.*upgrade"):
            decode_manifest(manifest_bytes()[:-2] + version.to_bytes(2, "little"), "it")
    for version in (0, 256, 65_535):  # damage, most likely: there is no checksum that would tell
        with pytest.raises(CorruptData, match=f"no batch of version {version}"):
            decode_values(sealed(block_of(b"a"), 1, version=version), "it")
        with pytest.raises(CorruptData, match=f"no manifest of version {version}"):
            decode_manifest(manifest_bytes()[:-2] + version.to_bytes(2, "little"), "it")


def test_a_manifest_that_announces_billions_of_items_is_refused_at_once():
    data = manifest_bytes()
    for at in range(len(data) - 4):
        survives(decode_manifest, data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])


@pytest.mark.matrix
def test_decoding_hostile_queues_stays_within_a_gigabyte_and_a_half():
    """The whole fuzz again in a process that may not take more; a crash of Arrow's would show here too."""
    program = (
        "import resource\n"
        "import tests.formats.test_queue_v1 as hostile\n"
        "from tests.formats.test_hostile_bytes import used\n"
        "hostile.fuzz_queues(range(10))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used() + (1536 << 20),) * 2)\n"
        "hostile.fuzz_queues(range(5000, 7000))\n"
        "print('survived')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "survived", done.stderr[-2000:]
