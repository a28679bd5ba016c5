"""Every decoder, with bytes that were good once; checksums are right again, so that damage is met behind them."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from uuid import UUID
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from strandline.compat.spool.format import LegacyEnding, decode_slots, encode_record_frame, runs
from strandline.compat.v1.batch_format import decode_queue_batch
from strandline.compat.v1.manifest_format import decode_manifest
from strandline.compat.v1.neighbours import decode_registration, encode_registration
from strandline.errors import CorruptData, ExpectationFailed, InvalidInput, UnsupportedVersion
from strandline.formats.arrow.block import Compression, encode_page
from strandline.formats.arrow.stream import StreamLayout, read_stream
from strandline.formats.checksum import crc32c
from strandline.formats.json.checked import encode_checked
from strandline.formats.json.fields import Fields, write_record
from strandline.formats.json.records import is_record, parse_record, record_fields, record_table, rows_of
from strandline.formats.json.streams import StreamCodec, StreamDescription
from strandline.formats.node.state import decode_node, encode_node
from strandline.formats.node.ticket import (
    FeedTicket,
    FileTicket,
    ReadTicket,
    ReportTicket,
    TicketKey,
    decode_keys,
    decode_ticket,
    encode_keys,
    encode_ticket,
)
from strandline.formats.node.wire import (
    Advance,
    Flag,
    Note,
    decode_advance,
    decode_answer,
    decode_error,
    decode_note,
    encode_advance,
    encode_answer,
    encode_error,
    encode_note,
)
from strandline.formats.object.batch import decode_batch
from strandline.formats.object.clock_note import decode_clock_note, encode_clock_note
from strandline.formats.object.head import (
    decode_cut,
    decode_entries,
    decode_head,
    decode_references,
    encode_chunk,
    encode_cut,
)
from strandline.formats.object.identity import LogIdentity, SlotCodec, decode_identity, encode_identity
from strandline.formats.segment.events import decode_event, encode_event
from strandline.formats.segment.file import Seal, SegmentFacts, footer_size
from strandline.formats.snapshot.manifest import PointerCodec, decode_snapshot, encode_snapshot
from strandline.formats.topic import decode_topic, encode_topic
from strandline.formats.wal.folder import (
    Rewinding,
    SlotsFile,
    WalIdentity,
    append_of,
    batch_metadata,
    decode_rewinding,
    decode_slots_file,
    decode_wal_identity,
    encode_rewinding,
    encode_slots_file,
    encode_wal_identity,
    lead_metadata,
    lead_of,
)
from strandline.formats.wal.frame import (
    HEADER_SIZE,
    TRAILER_SIZE,
    Ending,
    Frame,
    FrameInfo,
    FrameScanner,
    decode_frame,
    encode_frame,
)
from strandline.formats.wal.index import INDEX_LEAD, IndexEntry, decode_index, encode_entry, new_chain
from strandline.formats.wal.mark import Mark, decode_mark, encode_mark
from strandline.kv.nats.connection import parse_headers
from strandline.log.slots.resume import Cause, FullRebootstrap, PartialResync
from strandline.log.wal.migrated_spool import decode_migrated, encode_migrated
from strandline.log.wal.recover.walk import walk
from strandline.model.cursor import Cursor
from strandline.model.head import MetadataRange, QueueManifest, Receipt, SourceProof, WriterState, proven
from strandline.model.node import Heartbeat, Membership, NodeState, Peer, Trouble
from strandline.model.records import RECORD_SCHEMA, with_offsets
from strandline.model.retention import Invalidation, InvalidReason, SlotState
from strandline.model.segments import (
    ColdTier,
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.model.snapshot import Artifact, Pointer, Snapshot, SnapshotFile, Superseded
from strandline.model.stamp import OpId, Stamped
from strandline.model.times import Doubt
from strandline.node.flight.security import Tokens
from strandline.node.lead.policies import DurableOffsets, watermark
from strandline.node.members.rules import check_membership, may_lead, members_of, policy_of, urls
from strandline.node.message_json import (
    answer,
    read_commit,
    read_handover,
    read_resume,
    read_status,
    write_commit,
    write_handover,
    write_resume,
)
from strandline.node.messages import (
    Commit,
    ElectionReport,
    Handover,
    Member,
    NodeStatus,
    NotRequired,
    Reached,
    Registration,
    Rewind,
    TimedOut,
    Topology,
)
from strandline.storage.disk import Disk
from strandline.storage.lease import LeaseCodec, LeaseState
from strandline.tables.delta.history import Application, parse_commit
from strandline.tier.attachment import COLD_CODEC
from strandline.tier.claim import CLAIM_CODEC, TierClaim
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.cache_tables import SCHEMAS
from strandline.values import Avro, Debezium, Json, Protobuf
from strandline.values.recorded import as_version, codec_of
from tests.compat.v1.filled_queues import encode_manifest
from tests.disk_doubles import OneFile
from tests.formats.forging import (
    CHECKSUM,
    FOOTER,
    TAIL,
    WRITER,
    batch_bytes,
    head_bytes,
    manifest_bytes,
    queue_batch_bytes,
    read_segment,
    reseal_batch,
    reseal_head,
    reseal_tail,
    sealed_segment,
    segment_bytes,
    some_cut,
    some_entry,
    some_records,
    some_reference,
    tail_size,
)
from tests.fuzz.mutation import damage, in_place, mutated, times, unchanged
from tests.fuzz.targets import Target, decoding
from tests.spools import encode_slots, read_spool
from tests.values.messages import order_files

# --- batches and frames ----------------------------------------------------------------------------------------


def _look(batches: list[pa.RecordBatch]) -> None:
    """What a reader does with records: whatever was let through must be safe to look at."""
    for batch in batches:
        assert batch.schema.equals(RECORD_SCHEMA)
        batch.set_column(0, "timestamp", batch.column(0).cast(pa.int64())).to_pylist()


def _read_batch(data: bytes) -> None:
    _look(decode_batch(data, "x")[1])


def _read_queue_batch(data: bytes) -> None:
    batch = decode_queue_batch(data, "x", metadata=(MetadataRange(3, 7, b""),))
    batch.validate(full=True)
    batch.column("value").to_pylist()


def _same_tail(data: bytes) -> bytes:
    """A batch of version 1 whose tail is well, whatever became of the rest: its count is 40."""
    return data[:-7] + struct.pack("<BIH", data[-7] & 1, 40, 1) if len(data) >= 7 else data


_FRAMES = [
    b"".join(encode_frame(FrameInfo(1, 1, 5, 7, 0), [encode_page(some_records(5), Compression.NONE)])),
    b"".join(
        encode_frame(
            FrameInfo(1, 6, 9, 7, 5, pages=2),
            [encode_page(some_records(count), Compression.NONE) for count in (4, 5)],
            batch_metadata(WRITER, 3),
        )
    ),
    b"".join(
        encode_frame(
            FrameInfo(2, 15, 50, 7, 14, compression=Compression.ZSTD), [encode_page(some_records(50), Compression.ZSTD)]
        )
    ),
    b"".join(
        encode_frame(
            FrameInfo(2, 65, 0, 7, 64, flags=1, pages=0),
            [],
            lead_metadata(UUID(int=7), [(WRITER, WriterState(3, 4, 5, 6, 7))]),
        )
    ),
]


def sealed_frames(data: bytes) -> bytes:
    """Right checksums for all frames, as far as their lengths lead."""
    sealed, at = bytearray(data), 0
    while sealed[at : at + 5] == b"RDLW\x04" and at + HEADER_SIZE <= len(sealed):
        (length,) = struct.unpack_from("<I", sealed, at + HEADER_SIZE - 8)
        struct.pack_into("<I", sealed, at + HEADER_SIZE - 4, crc32c(bytes(sealed[at + 4 : at + HEADER_SIZE - 4])))
        end = at + HEADER_SIZE + length
        if end + TRAILER_SIZE > len(sealed):
            break
        struct.pack_into("<II", sealed, end, crc32c(bytes(sealed[at + 4 : end])), length)
        at = end + TRAILER_SIZE
    return bytes(sealed)


def _read_frames(data: bytes) -> None:
    scanner = FrameScanner(memoryview(data))
    for frame in scanner:
        block = decode_frame(frame, "x")
        _look(block.batches)
        append_of(block.metadata, "x")
        if frame.info.flags & 1:
            lead_of(block.metadata, "x")
    if scanner.stop.ending is not Ending.CLEAN:
        for piece in walk("x", len(data), is_own=lambda _: True, disk=cast("Disk", OneFile(data))):
            assert (piece.end if isinstance(piece, Frame) else piece.upto) <= len(data)
        raise CorruptData(scanner.stop.why)


# --- spools ----------------------------------------------------------------------------------------------------

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


def _read_spool(data: bytes) -> None:
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


# --- segments --------------------------------------------------------------------------------------------------

_SEGMENT = segment_bytes(60, 50, 40)
_SEGMENTS = (_SEGMENT, segment_bytes(5), segment_bytes(400, expected=1 << 20))


def _hostile_segment(chance: random.Random) -> bytes:
    """Damage to the columns, or to the tail; all checksums are right again."""
    good = chance.choice(_SEGMENTS)
    footer = good[len(good) - footer_size(good, "x") :]
    if chance.random() < 0.6:
        size = tail_size(good, "x")
        before = bytearray(good[: len(good) - size])
        for _ in range(times(chance)):
            in_place(before, chance)
        return sealed_segment(bytes(before), footer, pq.read_metadata(io.BytesIO(good)))
    data = bytearray(footer[:-8])
    for _ in range(times(chance)):
        damage(data, chance, footer)
    rest = good[: len(good) - len(footer)]
    return reseal_tail(rest + data + struct.pack("<I4s", len(data), b"PAR1"))


# --- the cache of segments --------------------------------------------------------------------------------------

_PARTITION = TopicPartition("orders", UUID(int=7), 3)


def _segment_event(number: int) -> SegmentMetadata:
    return SegmentMetadata(
        segment=SegmentId(_PARTITION, UUID(int=number)),
        start=100 * number,
        end=100 * number + 99,
        broker=1,
        max_timestamp=5,
        event_timestamp=6,
        terms=((1, 100 * number), (2, 100 * number + 50)),
        size=1000,
        custom_metadata=Seal(1000, 1, 200, 2).encode(),
        state=SegmentState.COPY_STARTED,
    )


def _finished(number: int) -> SegmentUpdate:
    return SegmentUpdate(
        segment=SegmentId(_PARTITION, UUID(int=number)),
        broker=1,
        event_timestamp=7,
        state=SegmentState.COPY_FINISHED,
        custom_metadata=None,
    )


_DELETION = PartitionDelete(partition=_PARTITION, broker=1, event_timestamp=9, state=PartitionDeleteState.MARKED)


def _tables() -> dict[str, pa.Table]:
    cache = SegmentCache()
    for number in range(1, 6):
        cache.apply(_segment_event(number))
        if number < 5:
            cache.apply(_finished(number))
    return cache.to_tables()


TABLES = _tables()


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


_STREAMS = {name: stream_of(table) for name, table in TABLES.items()}


def read_cache(data: bytes) -> None:
    """A table of segments, which takes its place among the others; then somebody looks something up."""
    found = read_stream(memoryview(data), StreamLayout.of(SCHEMAS["segments"]), "x")
    tables = {**TABLES, "segments": pa.Table.from_batches(found.batches, SCHEMAS["segments"])}
    cache = SegmentCache.from_tables(tables)
    for offset in (0, 150, 499):
        cache.segment_for(_PARTITION, 1, offset)
    cache.to_tables()


# --- values ----------------------------------------------------------------------------------------------------

_SLOTS = SlotCodec("billing")
_SLOT = Stamped(SlotState("billing", 17, "me", 4, 99, Invalidation(InvalidReason.HORIZON, 7)), 5, (OpId(UUID(int=9)),))
_STREAM = Stamped(StreamDescription("0f" * 16, "text/plain", 7, 9, ttl=60), 5, (OpId(UUID(int=9)),))
_CURSOR = Cursor(UUID(int=7), 42, 1)
_FILES = (SnapshotFile("state/all.log", 12, "0f" * 32), SnapshotFile("NOTE", 0, "a1" * 32))
_SNAPSHOT = Snapshot("/s", "append-log", 1, _CURSOR, 99, _FILES)
_PAYLOAD = f"payloads/{3:016d}/{42:020d}-1-{UUID(int=7).hex}-{'0f' * 32}"
_ARTIFACT = Artifact(_PAYLOAD, _CURSOR, "append-log", 1, 12, 8 << 20, "0f" * 32, 99)
_POINTER = Stamped(Pointer(4, 2, _ARTIFACT, (Superseded(_PAYLOAD, 7),)), 5, (OpId(UUID(int=9)),))
_LEASE = Stamped(LeaseState("me", UUID(int=3), 4, 17, 15.0), 5, (OpId(UUID(int=9)),))
_COLD = Stamped(ColdTier(UUID(int=7), "file:///s", "file:///e", 3, "orders", 5, 4, 6), 5, (OpId(UUID(int=9)),))
_CLAIM = Stamped(TierClaim(UUID(int=7), 3, "a", (UUID(int=11),)), 5, (OpId(UUID(int=9)),))
_MEMBERSHIP = Membership(
    2, 4, members_of({"a": "grpc://h:1", "b": ""}, "quorum(a)"), members_of({"a": "grpc://h:1"}, "ack_n(1) and local")
)
_NODE = NodeState(
    name="a",
    generation=1,
    seen=2,
    adopted=2,
    led=2,
    committed=7,
    primary="b",
    policy="quorum(a,b)",
    peers=(Peer("b", "north"), Peer("c", None)),
    trouble=Trouble("diverged", "why", 5),
    membership=_MEMBERSHIP,
)
_REWINDING = Rewinding(UUID(int=7), 5, 9, 1, 0, 100, 20, 5, "quarantine/1")
_KEPT = SlotsFile(UUID(int=7), 3, (_SLOT.value,))
_INDEX_CHAIN = new_chain(UUID(int=7), 3)


def _index() -> bytes:
    data, chain = INDEX_LEAD, _INDEX_CHAIN
    for number in range(5):
        entry = IndexEntry(number, 100 * number, 1, 5, {WRITER: WriterState(1, 2, 3, 4, 5)} if number % 2 else {})
        piece, chain = encode_entry(entry, chain)
        data += piece
    return data


def _read_index(data: bytes) -> None:
    found = decode_index(data, _INDEX_CHAIN)
    if found.size != len(data):
        raise CorruptData("it is not whole")


def _read_mark(data: bytes) -> None:
    if decode_mark(data) is None:
        raise CorruptData("it is no mark")


def sealed_checked(data: bytes) -> bytes:
    """A checked JSON file with a right checksum, if it is still JSON."""
    try:
        fields = json.loads(data)
        kind, version = fields.pop("kind"), fields.pop("version")
        fields.pop("checksum", None)
        return encode_checked(kind, version, fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data


def _refusing(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Of requests the refusal is the caller's mistake, which counts as damage here."""

    def attempt(data: bytes) -> object:
        try:
            return decode(data)
        except InvalidInput as error:
            raise CorruptData(str(error)) from error

    return attempt


def _read_error(data: bytes) -> None:
    if decode_error(data) is None:
        raise CorruptData("it is no error")


_VALUES = tuple(
    replace(as_version(codec), number=number)
    for number, codec in enumerate(
        (
            Json(pa.schema({"id": pa.int64(), "tags": pa.list_(pa.decimal128(5, 2)), "at": pa.timestamp("us", "UTC")})),
            Avro({"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}]}, registry={1: "{}"}),
            Protobuf(order_files(), "shop.Plain"),
            Debezium(Json(pa.schema({"m": pa.map_(pa.string(), pa.binary(3))}))),
        ),
        start=1,
    )
)


def _read_values(data: bytes) -> None:
    for version in decode_identity(data, "x").values:
        with suppress(UnsupportedVersion):
            codec_of(version, "x")


_BEAT = Heartbeat(1, 2, 3, 4, 5)
_NOTES = (
    encode_note(Note(Flag.LAST, 5, 7, 1, 99, (WRITER, 3), _BEAT, 77)),
    encode_note(Note(Flag.HEARTBEAT, 0, 0, 1, 99, None, _BEAT)),
    encode_note(Note(Flag.LAST, 5, 7, 1, 99, (proven(WRITER, SourceProof(9, 1, 1 << 63)), 3), _BEAT, 77)),
)
_FACTS = SegmentFacts(
    log_id=UUID(int=7), partition=3, segment=UUID(int=8), start=0, end=9, terms=((0, 0), (1, 5)), max_timestamp=7
)
_TICKETS = tuple(
    map(
        encode_ticket,
        (
            ReadTicket(_CURSOR, 9, follow=True, columns=("offset", "value")),
            ReadTicket(),
            FeedTicket("b", 3, _CURSOR),
            ReportTicket("b"),
            FileTicket("b", 3, "s", "data/x", 0, 100),
        ),
    )
)


_TOPOLOGY = Topology(
    UUID(int=7), "a", 3, 2, 9, "quorum(a,b)", 5, 4, (Member("b", "eu", 5, 5, None, 0, 1, 1, 2, True, False),), 1,
    membership=_MEMBERSHIP,
)  # fmt: skip


def _members(fields: Fields) -> Membership:
    """As a node takes a record of the members from another one; what it then computes of it is right, too."""
    try:
        found = check_membership(fields.record(Membership), term=1 << 62)
    except InvalidInput as error:
        raise CorruptData(str(error)) from error
    watermark(policy_of(found), DurableOffsets("a", 5))
    assert may_lead(found, "a") in (True, False)
    assert set(urls(found)) == {each.name for part in (found.members, found.former) if part for each in part.nodes}
    return found


def _reader(kind: type) -> Callable[[Fields], Any]:
    return lambda fields: fields.record(kind)


_ANSWERS: dict[str, tuple[Any, ...]] = {
    "topology": (_reader(Topology), write_record(_TOPOLOGY)),
    "handover": (
        read_handover,
        write_handover(Handover((_SLOT.value,), (TicketKey(b"k" * 32), TicketKey(b"l" * 32, 5)), _MEMBERSHIP)),
    ),
    "members": (_members, write_record(_MEMBERSHIP), write_record(replace(_MEMBERSHIP, former=None))),
    "registration": (_reader(Registration), write_record(Registration(_TOPOLOGY, 3))),
    "resume": (
        read_resume,
        *map(write_resume, (PartialResync(_CURSOR), Rewind(3, 1), FullRebootstrap(Cause.WAL_REMOVED))),
    ),
    "report": (
        _reader(ElectionReport),
        write_record(ElectionReport("a", 1, 1, 5, 4, "it is ill", membership=_MEMBERSHIP)),
    ),
    "status": (read_status, write_record(NodeStatus("a", "leading", None, 3, "a", _CURSOR, 5, divergences=2))),
    "commit": (
        read_commit,
        *(
            write_commit(Commit(Receipt(3, 2), outcome, _CURSOR))
            for outcome in (NotRequired(), Reached(5), TimedOut(4, "ack_n(1)", 2.5))
        ),
    ),
}
"""What a node answers to who asks: how it is read, and what it may be."""

_DELTA_COMMIT = json.dumps(
    [
        {"commitInfo": {"operation": "RESTORE", "operationParameters": {"version": 1}, "strandline.cursor": "x"}},
        {"txn": {"appId": Application(UUID(int=7), "default").cursor, "version": 5}},
        {"add": {"path": "part-0.parquet", "dataChange": True}},
        {"remove": {"path": "part-1.parquet", "dataChange": False}},
    ]
).encode()


_WRITTEN = [json.dumps(record_fields(row)).encode() for row in rows_of(with_offsets([some_records(9)], 5)[0])]


def _read_record(data: bytes) -> None:
    is_record(data)
    record_table([parse_record(data, "x")], now=9)


def _in_lines(data: bytes) -> bytes:
    """An array in JSON as a line for each of its values, as Delta has them."""
    try:
        return b"\n".join(json.dumps(action).encode() for action in json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return data


_TOKENS = b"# who\na replica correct-horse-battery\nops client,admin sha256:" + 64 * b"0" + b"\n"


def _text(name: str, decode: Callable[[bytes], object], *seeds: bytes) -> Target:
    return Target(name, mutated(seeds, is_text=True), decoding(decode))


def _checked(name: str, decode: Callable[[bytes], object], *seeds: bytes) -> Target:
    return Target(name, mutated(seeds, sealed_checked, is_text=True), decoding(decode))


def _binary(name: str, decode: Callable[[bytes], object], *seeds: bytes, sealed: bool = True) -> Target:
    return Target(name, mutated(seeds, reseal_head if sealed else unchanged), decoding(decode))


TARGETS = (
    *(
        Target(
            f"batch-{kind.name.lower()}",
            mutated(
                (
                    batch_bytes(kind),
                    batch_bytes(kind, some_records(1)),
                    batch_bytes(kind, some_records(300)),
                    batch_bytes(kind, some_records(9).slice(3)),
                ),
                reseal_batch,
                kept=FOOTER + CHECKSUM + TAIL,
            ),
            decoding(_read_batch),
        )
        for kind in Compression
    ),
    Target("frame", mutated((*_FRAMES, b"".join(_FRAMES)), sealed_frames), decoding(_read_frames)),
    *(
        Target(
            f"queue-batch-{kind.name.lower()}",
            mutated((queue_batch_bytes(kind), queue_batch_bytes(kind, 1), queue_batch_bytes(kind, 300)), _same_tail),
            decoding(_read_queue_batch),
        )
        for kind in (Compression.NONE, Compression.ZSTD)
    ),
    Target("segment", _hostile_segment, decoding(read_segment)),
    Target("segment-cache", mutated((_STREAMS["segments"],)), decoding(read_cache)),
    _binary("nats-headers", parse_headers, b"NATS/1.0 100 Idle\r\nA: 1\r\nb: c\r\n\r\n", sealed=False),
    _binary("head", lambda data: decode_head(data, "x"), head_bytes()),
    _binary(
        "entries",
        lambda data: decode_entries(data, "x"),
        encode_chunk((some_entry(0), some_entry(1), some_entry(3)), 0),
    ),
    _binary(
        "references",
        lambda data: decode_references(data, "x", 2),
        encode_chunk((some_reference(0), some_reference(1)), 2),
    ),
    _binary("cut", lambda data: decode_cut(data, "x"), encode_cut(some_cut())),
    Target(
        "manifest",
        mutated((manifest_bytes(), encode_manifest(QueueManifest((), 9, 4))), lambda data: data[:-2] + b"\x01\x00"),
        decoding(lambda data: decode_manifest(data, "x")),
    ),
    Target(
        "spool",
        mutated((sealed_spool(b"".join(_OLD_FRAMES)), b"".join(_OLD_FRAMES[2:])), sealed_spool),
        decoding(_read_spool),
    ),
    _text(
        "spool-slots",
        lambda data: decode_slots(data, "x", now=9),
        encode_slots([_SLOT.value]),
        json.dumps({"slots": [_OLD_SLOT]}).encode(),
    ),
    _binary(
        "segment-event",
        lambda data: decode_event(data, "x"),
        *map(encode_event, (_segment_event(1), _finished(1), _DELETION)),
        sealed=False,
    ),
    _binary("seal", lambda data: Seal.decode(data, "x"), Seal(1000, 1, 200, 2).encode(), sealed=False),
    _text("segment-facts", lambda data: SegmentFacts.decode(data, "x"), _FACTS.encode()),
    _binary("index", _read_index, _index(), sealed=False),
    _binary("mark", _read_mark, encode_mark(Mark(UUID(int=7), 0, 9, 3, 1, UUID(int=2), clean=True))),
    _binary("note", lambda data: decode_note(data, "x"), *_NOTES),
    _binary("progress", lambda data: decode_advance(data, "x"), encode_advance(Advance(1, 2, 3, 4, 5))),
    _binary("answer", lambda data: decode_answer(data, "x"), encode_answer(_BEAT, "no"), encode_answer(_BEAT, None)),
    _text("error", _read_error, encode_error(ExpectationFailed("it ends elsewhere"))),
    _text("ticket", _refusing(decode_ticket), *_TICKETS),
    _text("slot", lambda data: _SLOTS.decode(data, "x"), _SLOTS.encode(_SLOT)),
    _text(
        "identity",
        _read_values,
        encode_identity(LogIdentity(UUID(int=7))),
        encode_identity(LogIdentity(UUID(int=7), values=_VALUES)),
    ),
    _text(
        "wal-identity",
        lambda data: decode_wal_identity(data, "x"),
        encode_wal_identity(WalIdentity(UUID(int=7))),
        encode_wal_identity(WalIdentity(UUID(int=7), _VALUES, 9, "text/plain")),
    ),
    _text("stream", lambda data: StreamCodec().decode(data, "x"), StreamCodec().encode(_STREAM)),
    _text("topic", lambda data: decode_topic(data, "x"), encode_topic(3)),
    _text("snapshot-manifest", lambda data: decode_snapshot(data, "x", "/s"), encode_snapshot(_SNAPSHOT)),
    _text(
        "snapshot-pointer",
        lambda data: PointerCodec().decode(data, "x"),
        PointerCodec().encode(_POINTER),
        PointerCodec().encode(Stamped(Pointer(), 1, ())),
    ),
    _text("lease", lambda data: LeaseCodec().decode(data, "x"), LeaseCodec().encode(_LEASE)),
    _checked("queue-in-folder", lambda data: decode_registration(data, "x"), encode_registration("other/manifest")),
    _checked("migrated-spool", lambda data: decode_migrated(data, "x"), encode_migrated(80, 2)),
    _checked("wal-slots", lambda data: decode_slots_file(data, "x"), encode_slots_file(_KEPT)),
    _checked("rewind", lambda data: decode_rewinding(data, "x"), encode_rewinding(_REWINDING)),
    _checked("tierer", lambda data: CLAIM_CODEC.decode(data, "x"), CLAIM_CODEC.encode(_CLAIM)),
    _checked(
        "ticket-keys", lambda data: decode_keys(data, "x"), encode_keys([TicketKey(bytes(32)), TicketKey(b"k" * 32, 1)])
    ),
    _checked("cold", lambda data: COLD_CODEC.decode(data, "x"), COLD_CODEC.encode(_COLD)),
    _checked("node", lambda data: decode_node(data, "x"), encode_node(_NODE)),
    _text("json-record", _refusing(_read_record), *_WRITTEN),
    _text("clock-note", decode_clock_note, encode_clock_note(Doubt(5, None)), encode_clock_note(Doubt(None, 7))),
    *(
        _text(f"node-{name}", lambda data, read=read: read(answer(data, "x")), *told)
        for name, (read, *told) in _ANSWERS.items()
    ),
    Target(
        "delta-commit",
        mutated((_DELTA_COMMIT,), _in_lines, is_text=True),
        decoding(lambda data: parse_commit(3, data, Application(UUID(int=7), "default"))),
    ),
    Target(
        "tokens",
        mutated((_TOKENS,)),
        decoding(_refusing(lambda data: Tokens.parse(data.decode(errors="replace"), "x"))),
    ),
)
