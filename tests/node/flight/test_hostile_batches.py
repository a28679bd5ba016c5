"""Arrow batches that lie about themselves: nobody looks at one before it is validated, and nobody dies of it."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import strandline as sl
from strandline.errors import CorruptData, InvalidInput
from strandline.formats.arrow.header import RECORD_BYTES, admit_batch, find_field, memory_of, read_number
from strandline.formats.node.wire import Flag, Note, encode_note
from strandline.model.node import NO_HEARTBEAT
from strandline.model.records import READ_SCHEMA, RECORD_SCHEMA, record_batch
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.wire.append_stream import collect
from strandline.node.flight.wire.protocol import FlightData, arrow_message, read_schema_message, write_flight_data
from strandline.node.flight.wire.streams import CHUNK_SCHEMA
from tests.node.flight.attacked_node import MIB, Victim
from tests.node.flight.cuttable_tcp import TcpProxy
from tests.node.flight.hostile_batches import ROWS, honest, hostile
from tests.node.flight.raw_grpc import RawGrpc, Refused, flight_data, message_of
from tests.node.processes import ROOT, Nest

LIES = hostile()
WAIT = 60.0


@pytest.fixture(scope="module")
def victim(nest: Nest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(nest, tmp_path_factory.mktemp("victim")) as victim:
        yield victim


def put(victim: Victim, schema: pa.Schema, *messages: tuple[bytes, bytes]) -> None:
    """An append of these messages, as bytes; waits until the node has dealt with it."""
    with RawGrpc(victim.url) as raw:
        stream = raw.call("DoPut")
        try:
            raw.send(stream, flight_data(message_of(schema)[0], command=b"{}"))
            for index, (header, body) in enumerate(messages, start=1):
                raw.send(stream, flight_data(header, body), last=index == len(messages))
            raw.result(stream)
        except Refused:
            return  # it did not want to hear the rest


def test_no_batch_that_lies_ends_the_node(victim: Victim) -> None:
    with victim.connect() as log:
        put(victim, RECORD_SCHEMA, message_of(honest()))
        assert log.bounds().next == ROWS, "what is honest arrives: the bytes are right"
        for lie in LIES.values():
            put(victim, RECORD_SCHEMA, lie)
        # Some do not matter: bytes of a key, or a buffer that begins where another one does. They can be read.
        assert sum(batch.num_rows for batch in log.read()) == log.bounds().next
        assert log.bounds().next < len(LIES) // 2 * ROWS
    print(f"{len(LIES)} lies: the node has {victim.peak() / MIB:.0f} MiB at most, and {victim.base / MIB:.0f} before")
    assert victim.peak() < 1024 * MIB
    victim.check_serves()


def test_no_schema_that_lies_ends_the_node(victim: Victim) -> None:
    words = pa.array([b"a", b"b"] * 8, pa.binary())
    dictionary = pa.record_batch({"value": words.dictionary_encode()})
    nothing = pa.record_batch({"value": pa.nulls(ROWS, pa.null())})
    header, body = message_of(nothing)
    rows = [header.replace(ROWS.to_bytes(8, "little"), (1 << power).to_bytes(8, "little")) for power in (31, 40, 62)]
    put(victim, dictionary.schema, message_of(dictionary))
    put(victim, RECORD_SCHEMA, message_of(dictionary))
    for many in rows:
        put(victim, nothing.schema, (many, body))
        put(victim, pa.schema([]), (many, body))
        put(victim, RECORD_SCHEMA, (many, body))
    put(victim, pa.schema([pa.field(f"c{number}", pa.binary()) for number in range(10_000)]), message_of(honest()))
    put(victim, pa.schema([pa.field("value", pa.binary())] * 4), message_of(honest()))
    print(f"schemas that lie: the node has {victim.peak() / MIB:.0f} MiB at most")
    assert victim.peak() < 1024 * MIB
    victim.check_serves()


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 6, 200])
def test_a_message_of_another_type_is_no_schema(kind: int) -> None:
    header = bytearray(message_of(RECORD_SCHEMA)[0])
    place = find_field(memoryview(header), read_number(memoryview(header), 0, "I"), 1)
    assert place is not None
    header[place] = kind
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_schema_message(arrow_message(bytes(header), b""))


@pytest.mark.parametrize("kind", [pa.binary(), pa.struct([("value", pa.binary())])])
def test_names_of_columns_that_are_no_text_are_refused(kind: pa.DataType) -> None:
    header = message_of(pa.schema([pa.field("value", kind)]))[0].replace(b"value", b"val\xffe")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_schema_message(arrow_message(header, b""))


def test_rows_without_bytes_are_counted_as_the_records_that_they_become() -> None:
    nothing = pa.record_batch({"value": pa.nulls(1 << 24, pa.null())})
    assert memory_of(nothing) == RECORD_BYTES << 24
    schema = FlightData(header=message_of(nothing.schema)[0])
    for rows, why in (
        (1 << 24, "announces 16,777,216 records, which take more than the limit"),
        (1 << 23, "announces 8,388,608 records in 96 bytes, and a record takes at least one"),
        (1000, "announces 1,000 records in 96 bytes"),
    ):
        left = [write_flight_data(nothing.slice(0, rows).serialize())]
        with pytest.raises(InvalidInput, match=why):
            collect(schema, lambda left=left: left.pop() if left else None, ServerLimits())
    few = [write_flight_data(nothing.slice(0, 5).serialize())]
    assert collect(schema, lambda: few.pop() if few else None, ServerLimits()).num_rows == 5


@pytest.mark.parametrize("kind", [pa.null(), pa.binary(0)])
def test_a_hundred_bytes_become_no_hundred_megabytes_on_the_disk_of_a_node(tmp_path: Path, kind: pa.DataType) -> None:
    buffers = [None] if kind == pa.null() else [None, pa.py_buffer(b"")]
    nothing = pa.record_batch({"value": pa.Array.from_buffers(kind, 8_500_000, buffers)})
    with sl.node.Primary.open(tmp_path / "a", name="a") as primary, RemoteLog(primary.url) as log:
        with pytest.raises(InvalidInput, match="a record takes at least one"):
            log.append(pa.table(nothing), timeout=WAIT)
        assert log.bounds().next == 0
        dense = pa.table({"key": pa.array([b""] * 1000, pa.binary()), "value": pa.nulls(1000)})
        assert log.append(dense, timeout=WAIT).ensure().count == 1000, "a column of nulls beside another is fine"


def test_an_object_that_is_no_batch_is_refused() -> None:
    with pytest.raises(CorruptData, match="has no Arrow batch"):
        admit_batch(None, "It")
    assert admit_batch(honest(), "It").num_rows == ROWS


# --- a server that lies ------------------------------------------------------------------------------------------


ENDS = struct.pack("<4i", 0, 3, 6, 9)
"""Where texts of three bytes end: on the way, the line makes that lead far out of them."""
WILD = struct.pack("<4i", 0x3FFFFFF0, 0x3FFFFFF3, 0x3FFFFFF6, 0x3FFFFFF9)


class Server(fl.FlightServerBase):  # type: ignore[misc]
    """Streams a batch to whoever asks, of which a line makes a lie."""

    def do_get(self, context: object, ticket: fl.Ticket) -> fl.GeneratorStream:
        offsets, keys = pa.array([0, 1, 2], pa.int64()), pa.array([b"abc"] * 3, pa.binary())
        if b"snapshot" in ticket.ticket:
            columns = [offsets, keys, pa.array([0, 0, 0], pa.uint32())]
            return fl.GeneratorStream(CHUNK_SCHEMA, iter([pa.RecordBatch.from_arrays(columns, schema=CHUNK_SCHEMA)]))
        batch = pa.RecordBatch.from_arrays([offsets, *three().columns], schema=READ_SCHEMA)
        note = encode_note(Note(Flag.READ | Flag.LAST, 0, 3, 0, 0, None, NO_HEARTBEAT, 1))
        return fl.GeneratorStream(READ_SCHEMA, iter([(batch, note)]))

    def do_exchange(self, context: object, descriptor: object, reader: object, writer: Any) -> None:
        writer.begin(RECORD_SCHEMA)
        note = encode_note(Note(Flag.LAST, 0, 3, 1, 0, None, NO_HEARTBEAT._replace(term=1), 1))
        writer.write_with_metadata(three(), note)


def three() -> pa.RecordBatch:
    return record_batch(
        timestamps=[1, 2, 3], ops=[0] * 3, keys=[b"k"] * 3, values=[b"v"] * 3, headers=[{"abc": b"1"}] * 3
    )


CLIENT = """
import sys
from uuid import UUID
from strandline.model.cursor import Cursor
from strandline.errors import CorruptData
from strandline.node.messages import Caller
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.client.remote_log import RemoteLog

def feed():
    feed = upstream.feed(Caller("a"), Cursor(UUID(int=0), 0))
    while True:
        feed.take(5)

with RemoteLog(sys.argv[1]) as log, FlightUpstream(sys.argv[1]) as upstream:
    file = lambda: list(upstream.chunks(Caller("a"), "s", "a", 0))
    calls = {"read": lambda: list(log.read()), "feed": feed, "file": file}
    for name, call in calls.items():
        try:
            call()
        except CorruptData as error:
            print(name, "is damaged" in str(error), flush=True)
"""


@pytest.mark.matrix
def test_a_server_that_lies_ends_no_client_and_no_replica() -> None:
    with Server("grpc://127.0.0.1:0") as server, TcpProxy() as line:
        line.lead_to(server.port)
        line.alter("down", lambda piece: piece.replace(ENDS, WILD))
        ran = subprocess.run(
            [sys.executable, "-c", CLIENT, f"grpc://127.0.0.1:{line.port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stdout.split("\n")) == (0, ["read True", "feed True", "file True", ""]), ran.stderr
