"""Callers who send without end, do not read, or say nothing: what a node holds is bounded, and it serves others."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import Overloaded, TransientStorageError
from strandline.model.records import RECORD_SCHEMA, record_batch
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from strandline.node.messages import Caller
from tests.node.flight.attacked_node import MIB, ONE, Victim
from tests.node.flight.raw_grpc import RawGrpc, Refused, action, field, flight_data, message_of
from tests.node.processes import Nest

TOKENS = """
app client token-of-the-app-1
other client token-of-the-other
replica-1 replica token-of-replica-1
ops admin token-of-the-admin
"""
APP, OTHER, REPLICA, OPS = "token-of-the-app-1", "token-of-the-other", "token-of-replica-1", "token-of-the-admin"
SMALL = {
    "memory_bytes": 24 * MIB, "memory_bytes_each": 16 * MIB, "append_bytes": 12 * MIB, "message_bytes": 8 * MIB,
    "reading_bytes": 24 * MIB, "reading_bytes_each": 16 * MIB, "receive_bytes": 32 * MIB, "silent_seconds": 1.0,
    "idle_seconds": 4.0, "connection_idle_seconds": 2.0,
}  # fmt: skip
PIECE = bytes(MIB)


@pytest.fixture(scope="module")
def victim(nest: Nest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A node with tokens, and limits so small that an attack is quick."""
    folder = tmp_path_factory.mktemp("victim")
    with Victim(nest, folder, token=OTHER, tokens=TOKENS, server_limits=SMALL) as victim:
        yield victim


@pytest.fixture
def bare(nest: Nest, tmp_path: Path) -> Iterator[Victim]:
    """A node without credentials, and with the same limits."""
    with Victim(nest, tmp_path, server_limits=SMALL) as victim:
        yield victim


@pytest.fixture
def usual(nest: Nest, tmp_path: Path) -> Iterator[Victim]:
    """A node with tokens, and the limits that a node has by default."""
    with Victim(nest, tmp_path, token=OTHER, tokens=TOKENS) as victim:
        yield victim


def told(victim: Victim, what: str, most: int) -> None:
    """Print the most memory that the node had, and check it."""
    print(f"{what}: {victim.peak() / MIB:.0f} MiB at most, {victim.base / MIB:.0f} before")
    assert victim.peak() < most
    victim.check_serves()


def flood(raw: RawGrpc, stream: int, size: int) -> int:
    """Send a message of this size, as far as the node takes it; returns how much that was."""
    sent = 0
    with suppress(Refused, TimeoutError):
        raw.send(stream, announce=size)
        while sent < size:
            raw.more(stream, PIECE)
            sent += len(PIECE)
    return sent


def records(size: int) -> pa.RecordBatch:
    return record_batch(timestamps=[1], ops=[0], keys=[None], values=[bytes(size)])


# --- before anybody knows who calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["DoAction", "DoGet", "DoPut", "DoExchange", "GetFlightInfo", "Handshake"])
def test_an_endless_message_is_cut_off_before_its_caller_is_authenticated(victim: Victim, method: str) -> None:
    for token in (None, "token-of-a-stranger"):
        with RawGrpc(victim.url) as raw:
            sent = flood(raw, raw.call(method, token=token), 512 * MIB)
        assert sent < 256 * MIB
    told(victim, f"{method} without a token", 512 * MIB)


@pytest.mark.slow
def test_messages_of_512_mb_without_a_token_do_not_fill_the_memory(usual: Victim) -> None:
    with ExitStack() as opened:
        raws = [opened.enter_context(RawGrpc(usual.url)) for _ in range(8)]
        for raw in raws:
            assert flood(raw, raw.call("DoAction"), 512 * MIB) < 256 * MIB
    told(usual, "8 times 512 MiB without a token", 1024 * MIB)


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(512 * MIB), compresslevel=1)


@pytest.mark.parametrize(
    ("method", "token"),
    [("DoAction", None), pytest.param("DoAction", OPS, marks=pytest.mark.matrix), ("DoPut", APP)],
)
def test_a_compressed_message_is_refused_and_never_unpacked(victim: Victim, method: str, token: str | None) -> None:
    packed = bomb()
    with RawGrpc(victim.url) as raw, suppress(Refused):
        stream = raw.call(method, token=token, grpc_encoding="gzip")
        raw.send(stream, packed, last=True, is_compressed=True)
        raw.result(stream)
    told(victim, f"{method} of {len(packed):,} bytes that unpack to 512 MiB", 256 * MIB)


def test_a_compressed_message_that_does_not_say_how_is_refused(victim: Victim) -> None:
    with RawGrpc(victim.url) as raw, suppress(Refused):
        stream = raw.call("DoAction", token=OPS)
        raw.send(stream, gzip.compress(bytes(64 * MIB)), last=True, is_compressed=True)
        raw.result(stream)
    told(victim, "a message that only its flag calls compressed", 256 * MIB)


@pytest.mark.parametrize("codec", [pytest.param("zstd", marks=pytest.mark.matrix), "lz4"])
@pytest.mark.matrix
def test_a_compressed_batch_of_an_append_is_refused_and_never_unpacked(victim: Victim, codec: str) -> None:
    batch = pa.record_batch({"value": pa.array([bytes(MIB)] * 600, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    source = pa.BufferReader(sink.getvalue())
    schema, message = pa.ipc.read_message(source), pa.ipc.read_message(source)
    size = len(message.body)
    with RawGrpc(victim.url) as raw:
        stream = raw.call("DoPut", token=APP)
        raw.send(stream, flight_data(schema.metadata.to_pybytes(), command=b"{}"))
        raw.send(stream, flight_data(message.metadata.to_pybytes(), message.body.to_pybytes()), last=True)
        assert b"is compressed" in raw.result(stream)
    told(victim, f"{codec} of {size:,} bytes that unpack to 600 MiB", 512 * MIB)


def test_batches_of_columns_that_take_nothing_are_refused_by_their_rows(victim: Victim) -> None:
    many = 80_000_000
    for column in (pa.nulls(many), pa.Array.from_buffers(pa.binary(0), many, [None, pa.py_buffer(b"")])):
        batch = pa.record_batch({"value": column})
        with RawGrpc(victim.url) as raw:
            stream = raw.call("DoPut", token=APP)
            raw.send(stream, flight_data(message_of(batch.schema)[0], command=b"{}"))
            raw.send(stream, flight_data(*message_of(batch)), last=True)
            assert b"announces 80,000,000 records" in raw.result(stream)
    told(victim, "80 million records in no bytes", 512 * MIB)


def test_connections_that_say_nothing_are_ended(victim: Victim) -> None:
    with ExitStack() as opened:
        raws = [opened.enter_context(RawGrpc(victim.url)) for _ in range(40)]
        victim.check_serves()
        for raw in raws:
            raw.wait_closed()
    victim.check_serves()


# --- who is known --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["DoAction", "DoGet", "DoExchange", "GetFlightInfo"])
def test_an_endless_message_is_cut_off_even_from_a_caller_with_a_token(victim: Victim, method: str) -> None:
    with RawGrpc(victim.url) as raw:
        asked = raw.call("DoAction", token=REPLICA)
        raw.send(asked, action("status", b"{}"), last=True)
        raw.result(asked)  # the connection is a known one
        assert flood(raw, raw.call(method, token=REPLICA), 512 * MIB) < 256 * MIB
    told(victim, f"{method} of a replica", 512 * MIB)


def test_a_report_without_end_is_cut_off(victim: Victim) -> None:
    with RawGrpc(victim.url) as raw:
        stream = raw.call("DoExchange", token=REPLICA)
        raw.send(stream, flight_data(b"", command=b'{"replica": "replica-1"}'))
        assert flood(raw, stream, 512 * MIB) < 256 * MIB
    told(victim, "a report of 512 MiB", 512 * MIB)


def unfinished(victim: Victim, opened: ExitStack, size: int, *, part: int, token: str) -> RawGrpc:
    """An append of ``size`` bytes, in parts, that does not end."""
    raw = opened.enter_context(RawGrpc(victim.url))
    stream = raw.call("DoPut", token=token)
    message = flight_data(*message_of(records(part)))
    with suppress(Refused, TimeoutError):
        raw.send(stream, flight_data(message_of(RECORD_SCHEMA)[0], command=b"{}"))
        for _ in range(size // part):
            raw.send(stream, message)
    return raw


def test_appends_that_do_not_end_hold_a_bounded_share_and_not_for_long(victim: Victim) -> None:
    with ExitStack() as opened:
        raws = [unfinished(victim, opened, 10 * MIB, part=MIB, token=APP) for _ in range(8)]
        victim.check_serves()  # somebody else's
        for raw in raws:
            raw.wait_ended()
        large = pa.table({"value": pa.array([bytes(8 * MIB - 4096)], pa.binary())})
        victim.until(lambda: takes_an_append(victim, OTHER, large), "there is room for others again")
    told(victim, "8 unfinished appends of 10 MiB", 512 * MIB)


@pytest.mark.slow
def test_unfinished_appends_of_240_mb_do_not_fill_the_memory(usual: Victim) -> None:
    with ExitStack() as opened:
        for number in range(8):
            unfinished(usual, opened, 240 * MIB, part=6 * MIB, token=(APP, OPS)[number % 2])
        told(usual, "8 unfinished appends of 240 MiB", 1024 * MIB)


def stuck_readers(victim: Victim, opened: ExitStack, count: int, token: str | None) -> list[RawGrpc]:
    """Who asks for the whole log, and reads nothing of it."""
    raws = []
    for _ in range(count):
        raw = opened.enter_context(RawGrpc(victim.url, receive=65535))
        raw.send(raw.call("DoGet", token=token), field(1, b"{}"), last=True)
        raws.append(raw)
    return raws


def fill(victim: Victim, size: int, count: int) -> None:
    with victim.connect(timeout=60) as log:
        for _ in range(count):
            log.append(pa.table({"value": pa.array([bytes(size)], pa.binary())}), timeout=60).ensure()


def test_readers_that_do_not_read_hold_a_bounded_share_and_not_for_long(nest: Nest, tmp_path: Path) -> None:
    with Victim(nest, tmp_path, token=OTHER, tokens=TOKENS, server_limits=SMALL) as victim, ExitStack() as opened:
        fill(victim, 7 * MIB, 6)
        raws = stuck_readers(victim, opened, 20, APP)
        with victim.connect(timeout=30) as log:
            assert sum(batch.num_rows for batch in log.read()) == 6
        for raw in raws:
            raw.wait_ended()
        told(victim, "20 readers that do not read 7 MiB", 512 * MIB)


@pytest.mark.slow
def test_sixty_readers_that_do_not_read_do_not_fill_the_memory(usual: Victim) -> None:
    fill(usual, 46 * MIB, 5)
    with ExitStack() as opened:
        stuck_readers(usual, opened, 60, APP)
        with usual.connect(timeout=60) as log:
            assert sum(batch.num_rows for batch in log.read()) == 5
        told(usual, "60 readers that do not read 46 MiB", 1024 * MIB)


# --- who says nothing ----------------------------------------------------------------------------------------------


def silent_calls(victim: Victim, opened: ExitStack, count: int, token: str | None) -> RawGrpc:
    """Calls that were begun, and say nothing more; on one connection, which is a known one."""
    raw = opened.enter_context(RawGrpc(victim.url))
    asked = raw.call("DoAction", token=token)
    raw.send(asked, action("status", b"{}"), last=True)
    raw.result(asked)
    for number in range(count):
        raw.call(("DoPut", "DoExchange")[number % 2], token=token)
    asked = raw.call("ListActions", token=token)
    raw.send(asked, b"", last=True)
    with suppress(Refused):
        raw.result(asked)  # by then all before it have come
    return raw


def test_one_token_with_256_silent_calls_locks_nobody_out(usual: Victim) -> None:
    with ExitStack() as opened:
        silent_calls(usual, opened, 256, APP)
        usual.check_serves()
        with FlightUpstream(usual.url, security=ClientSecurity(token=REPLICA), timeout=10) as replica:
            replica.register(Caller("replica-1"), region=None)
            replica.topology(Caller("replica-1"))
        usual.act("status", {}, token=OPS)
        log = opened.enter_context(RemoteLog(usual.url, security=ClientSecurity(token=APP)))
        with pytest.raises(Overloaded, match=r"app (has 64 calls|holds [0-9,]+ and all callers)"):
            log.append(ONE)


def test_silent_calls_end_after_a_while(victim: Victim) -> None:
    with ExitStack() as opened:
        raw = silent_calls(victim, opened, 256, APP)
        victim.check_serves()
        raw.wait_closed()
        victim.until(lambda: takes_an_append(victim, APP), "the app may call again")


@pytest.mark.matrix
def test_without_credentials_silent_calls_keep_nobody_from_looking_and_go_away(bare: Victim) -> None:
    with ExitStack() as opened:
        raw = silent_calls(bare, opened, 256, None)
        with bare.connect() as log:
            assert log.status().condition == "leading"
            assert log.bounds().next == 0
        raw.wait_closed()
        bare.until(lambda: takes_an_append(bare, None), "it takes appends again")


def takes_an_append(victim: Victim, token: str | None, table: pa.Table = ONE) -> bool:
    security = None if token is None else ClientSecurity(token=token)
    with RemoteLog(victim.url, security=security, timeout=10) as log, suppress(Overloaded, TransientStorageError):
        log.append(table).ensure()
        return True
    return False
