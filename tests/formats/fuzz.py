"""Hostile bytes for every decoder, drawn from a seed.

``python -m tests.formats.fuzz 300 [seed]`` fuzzes for so many seconds in child processes: a crash of the interpreter
is reported with the seed that causes it.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID
from zlib import crc32

import pyarrow as pa

from strandline.formats.batch import decode_batch
from strandline.formats.block import Compression
from strandline.formats.head import decode_cut, decode_entries, decode_head, decode_references, encode_chunk, encode_cut
from strandline.formats.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.formats.legacy_frame import LegacyEnding, encode_record_frame
from strandline.formats.manifest import decode_snapshot, encode_snapshot
from strandline.formats.pointer import PointerCodec
from strandline.formats.queue import decode_manifest, decode_queue_batch, encode_manifest
from strandline.formats.spool import decode_slots, encode_slots, read_spool, runs
from strandline.model.artifacts import Artifact, Pointer, Superseded
from strandline.model.cursor import Cursor
from strandline.model.errors import CorruptData, UnsupportedVersion
from strandline.model.head import MetadataRange
from strandline.model.queue import QueueManifest
from strandline.model.records import RECORD_SCHEMA
from strandline.model.slots import Invalidation, InvalidReason, SlotState
from strandline.model.snapshot import Snapshot, SnapshotFile
from strandline.model.stamp import OpId, Stamped
from strandline.storage.lease import LeaseCodec, LeaseState
from tests.formats.forging import (
    CHECKSUM,
    FOOTER,
    TAIL,
    batch_bytes,
    head_bytes,
    manifest_bytes,
    queue_batch_bytes,
    reseal_batch,
    reseal_head,
    some_cut,
    some_entry,
    some_records,
    some_reference,
)

TRAILER = FOOTER + CHECKSUM + TAIL
WORDS = [0, 1, 2, 3, 4, 7, 8, 12, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
LONGS = [*WORDS, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - 8]


@dataclass(frozen=True)
class Target:
    """A decoder with good bytes for it, and how to make bad bytes look whole."""

    name: str
    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    reseal: Callable[[bytes], bytes]


def _decode_and_read(data: bytes) -> object:
    """What a reader does with a batch: whatever was let through must be safe to look at."""
    _, batches = decode_batch(data, "x")
    for batch in batches:
        assert batch.schema.equals(RECORD_SCHEMA)
        batch.set_column(0, "timestamp", batch.column(0).cast(pa.int64())).to_pylist()
    return batches


def _decode_and_read_queue(data: bytes) -> object:
    batch = decode_queue_batch(data, "x", metadata=(MetadataRange(3, 7, b""),))
    batch.validate(full=True)
    batch.column("value").to_pylist()
    return batch


def _same_tail(data: bytes) -> bytes:
    """A batch of version 1 whose tail is well, whatever became of the rest: its count is 40."""
    return data[:-7] + struct.pack("<BIH", data[-7] & 1, 40, 1) if len(data) >= 7 else data


def _read_all_of_a_spool(data: bytes) -> object:
    """What a migration does with a spool: the prefix that was let through must be all there is, and safe to look at."""
    view = memoryview(data)
    spool = read_spool(view)
    again = read_spool(view[: spool.valid_bytes])
    assert (again.records, again.stop.ending) == (spool.records, LegacyEnding.CLEAN)
    assert sum(len(run.payloads) for run in runs(spool.records, max_count=3, max_bytes=99)) == len(spool.records)
    for record in spool.records:
        b"".join(encode_record_frame(*record))
    if spool.stop.ending is not LegacyEnding.CLEAN:
        raise CorruptData(spool.stop.why)
    return spool


def sealed_spool(data: bytes) -> bytes:
    """Right checksums for all frames of versions 2 and 3, as far as their lengths lead."""
    sealed, at = bytearray(data), 0
    while header := {b"RDLW\x01": 21, b"RDLW\x02": 25, b"RDLW\x03": 33}.get(data[at : at + 5]):
        checksum = 0 if data[at + 4] == 1 else 4
        length = data[at + header - (4 if checksum else 8) : at + header]
        end = at + header + int.from_bytes(length, "little")
        if end + checksum > len(data):
            break
        if checksum:
            sealed[end : end + 4] = struct.pack("<I", crc32(sealed[at + 4 : end]))
        at = end + checksum
    return bytes(sealed)


def _unchanged(data: bytes) -> bytes:
    return data


_SLOTS = SlotCodec("billing")
_SLOT = Stamped(SlotState("billing", 17, "me", 4, 99, Invalidation(InvalidReason.HORIZON, 7)), 5, (OpId(UUID(int=9)),))
_CURSOR = Cursor(UUID(int=7), 42, 1)
_FILES = (SnapshotFile("state/all.log", 12, "0f" * 32), SnapshotFile("NOTE", 0, "a1" * 32))
_SNAPSHOT = Snapshot("/s", "append-log", 1, _CURSOR, 99, _FILES)
_PAYLOAD = f"payloads/{3:016d}/{42:020d}-1-{UUID(int=7).hex}-{'0f' * 32}"
_ARTIFACT = Artifact(_PAYLOAD, _CURSOR, "append-log", 1, 12, 8 << 20, "0f" * 32, 99)
_POINTER = Stamped(Pointer(4, 2, _ARTIFACT, (Superseded(_PAYLOAD, 7),)), 5, (OpId(UUID(int=9)),))
_LEASE = Stamped(LeaseState("me", UUID(int=3), 4, 17, 15.0), 5, (OpId(UUID(int=9)),))
_CHANGE = b'{"lsn":3,"timestamp":44,"operation":"delete","collection":"users","rid":9,"metadata":{"term":[8.50]}}'
_OLD_FRAMES = (
    b"RDLW\x01" + struct.pack("<QQ", 1, len(_CHANGE)) + _CHANGE,
    b"RDLW\x02" + struct.pack("<QQI", 2, 20, len(_CHANGE)) + _CHANGE + bytes(4),
    *(
        b"".join(encode_record_frame(7, 3, 30, payload))
        for payload in (b"", b"ccc", _CHANGE, b'{"term": 3,' + _CHANGE[1:])
    ),
)
_OLD_SLOT = {
    "id": "old",
    "restart_lsn": 7,
    "confirmed_lsn": 9,
    "last_seen_at_unix_ms": 5,
    "invalidation_reason": "horizon",
}

TARGETS = (
    *(
        Target(
            f"batch-{compression.name.lower()}",
            _decode_and_read,
            (
                batch_bytes(compression),
                batch_bytes(compression, some_records(1)),
                batch_bytes(compression, some_records(300)),
                batch_bytes(compression, some_records(9).slice(3)),
            ),
            reseal_batch,
        )
        for compression in Compression
    ),
    Target("head", lambda data: decode_head(data, "x"), (head_bytes(),), reseal_head),
    Target(
        "entries",
        lambda data: decode_entries(data, "x"),
        (encode_chunk((some_entry(0), some_entry(1), some_entry(3)), 0),),
        reseal_head,
    ),
    Target(
        "references",
        lambda data: decode_references(data, "x", 2),
        (encode_chunk((some_reference(0), some_reference(1)), 2),),
        reseal_head,
    ),
    Target("cut", lambda data: decode_cut(data, "x"), (encode_cut(some_cut()),), reseal_head),
    *(
        Target(
            f"queue-batch-{compression.name.lower()}",
            _decode_and_read_queue,
            (queue_batch_bytes(compression), queue_batch_bytes(compression, 1), queue_batch_bytes(compression, 300)),
            _same_tail,
        )
        for compression in (Compression.NONE, Compression.ZSTD)
    ),
    Target(
        "manifest",
        lambda data: decode_manifest(data, "x"),
        (manifest_bytes(), encode_manifest(QueueManifest((), 9, 4))),
        lambda data: data[:-2] + b"\x01\x00",
    ),
    Target(
        "spool",
        _read_all_of_a_spool,
        (sealed_spool(b"".join(_OLD_FRAMES)), b"".join(_OLD_FRAMES[2:])),
        sealed_spool,
    ),
    Target(
        "spool-slots",
        lambda data: decode_slots(data, "x", now=9),
        (encode_slots([_SLOT.value]), json.dumps({"slots": [_OLD_SLOT]}).encode()),
        _unchanged,
    ),
    Target("slot", lambda data: _SLOTS.decode(data, "x"), (_SLOTS.encode(_SLOT),), _unchanged),
    Target(
        "identity", lambda data: decode_identity(data, "x"), (encode_identity(LogIdentity(UUID(int=7))),), _unchanged
    ),
    Target("snapshot", lambda data: decode_snapshot(data, "x", "/s"), (encode_snapshot(_SNAPSHOT),), _unchanged),
    Target(
        "snapshot-pointer",
        lambda data: PointerCodec().decode(data, "x"),
        (PointerCodec().encode(_POINTER), PointerCodec().encode(Stamped(Pointer(), 1, ()))),
        _unchanged,
    ),
    Target("lease", lambda data: LeaseCodec().decode(data, "x"), (LeaseCodec().encode(_LEASE),), _unchanged),
)

JSON_PIECES = [
    b"null", b"true", b"-1", b"1e999", b"Infinity", b"NaN", b"1.5", b"[]", b"{}", b'""', b'"x"', b"[[[[", b"9" * 5000,
    b'"\\ud800"', b"[" * 3000, b'{"reason": 1}', b"-0", b"\xff", b"\x00", b'"' + b"f" * 32 + b'"',
]  # fmt: skip


def hostile(target: Target, chance: random.Random) -> bytes:
    """Bytes that were good once."""
    data = bytearray(chance.choice(target.seeds))
    end = b""
    if target.reseal is reseal_batch and chance.random() < 0.9:  # a damaged footer is noticed too early
        data, end = data[:-TRAILER], bytes(data[-TRAILER:])
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        _damage(data, chance, chance.choice(target.seeds), json=target.reseal is _unchanged)
    data += end
    resealed = target.reseal(bytes(data)) if chance.random() < 0.95 else bytes(data)
    return resealed if chance.random() < 0.99 else resealed[: chance.randrange(len(resealed) + 1)]


def _damage(data: bytearray, chance: random.Random, other: bytes, *, json: bool) -> None:
    at = chance.randrange(len(data)) if data else 0
    match chance.randrange(9):
        case 0 | 1 if data:
            data[at] ^= 1 << chance.randrange(8)
        case 2 if data:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        case 3:
            at -= at % 4
            data[at : at + 4] = struct.pack("<I", chance.choice(WORDS))
        case 4:
            at -= at % chance.choice([1, 4, 8])
            data[at : at + 8] = struct.pack("<Q", chance.choice(LONGS))
        case 5:
            del data[at : at + chance.choice([1, 4, 8, 64, len(data)])]
        case 6:
            data[at:at] = chance.randbytes(chance.choice([1, 4, 8, 64]))
        case 7:
            start = chance.randrange(len(other))
            data[at : at + 16] = other[start : start + 16]
        case _ if json:
            data[at : at + chance.choice([0, 1, 4])] = chance.choice(JSON_PIECES)
        case _:
            data += chance.randbytes(chance.choice([1, 8]))


def attempt(target: Target, seed: int) -> str:
    """Decode what this seed makes; "fine" or the name of the error, anything but the two allowed ones is raised."""
    data = hostile(target, random.Random(seed))
    try:
        target.decode(data)
    except (CorruptData, UnsupportedVersion) as error:
        return type(error).__name__
    return "fine"


def _child(name: str, first: int, seconds: float) -> None:
    target = next(target for target in TARGETS if target.name == name)
    seen: Counter[str] = Counter()
    seed, until = first, time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            sys.stderr.write(f"{seed}\n")
            sys.stderr.flush()
            seen[attempt(target, seed)] += 1
            seed += 1
    peak = pa.default_memory_pool().max_memory()
    print(f"{name}: {seed - first} inputs, {dict(seen)}, Arrow peak {peak:,} bytes")


def main(seconds: float, first: int) -> int:
    failures = 0
    for target in TARGETS:
        command = [
            sys.executable,
            "-m",
            "tests.formats.fuzz",
            "--child",
            target.name,
            str(first),
            str(seconds / len(TARGETS)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            failures += 1
            lines = done.stderr.splitlines()
            seeds = [line for line in lines if line.isdigit()]
            print(
                f"{target.name}: seed {seeds[-1]} ended with {done.returncode}:\n" + "\n".join(lines[-12:]), flush=True
            )
    return failures


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        _child(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
