"""Messages of NATS whose headers another client has written: broken, repeated, or not UTF-8."""

from __future__ import annotations

import asyncio
import socket

import pytest

import strandline as sl
from strandline.cli.bulk.ingest import sentence
from strandline.kv.nats.connection import parse_headers
from strandline.log.memory import MemoryLog
from strandline.storage.metrics import NATS_BROKEN_HEADERS
from tests.ingestion.sources import content

nats = pytest.importorskip("nats")

BROKEN = [
    (b"NATS/1.0", None),
    (b"NATS/1.0\r\n", None),
    (b"NATS/1.0\r\n\r", None),
    (b"NATS/1.0 \xff\xfe\xfd\r\n\r\n", None),
    (b"NATS/1.0 shipped\r\na: 1\r\n\r\n", [("a", b"1")]),
    (b"\x00\x01\x02", None),
    (b"HTTP/1.1 200\r\na: 1\r\n\r\n", [("a", b"1")]),
    (b"NATS/1.0\r\nno colon\r\na: 1\r\n\r\n", [("a", b"1")]),
    (b"NATS/1.0\r\n\xff: 1\r\nb: 2\r\n\r\n", [("b", b"2")]),
    (b"NATS/1.0\r\na: 1", [("a", b"1")]),
]
WHOLE = [
    (b"NATS/1.0\r\n\r\n", None),
    (b"NATS/1.0\r\na: \xff\xfe\r\n\r\n", [("a", b"\xff\xfe")]),
    (b"NATS/1.0\r\na: 1\r\nA: 2\r\na: 3\r\n\r\n", [("a", b"1"), ("A", b"2"), ("a", b"3")]),
    ("NATS/1.0\r\nStraße:  weiß \r\n\r\n".encode(), [("Straße", "weiß".encode())]),
    (b"NATS/1.0\r\nempty:\r\n\r\n", [("empty", b"")]),
    (b"NATS/1.0 503\r\n\r\n", [("Status", b"503")]),
]


@pytest.mark.parametrize(("block", "lines"), [*BROKEN, *WHOLE])
def test_any_block_is_parsed_and_a_broken_one_is_known(block, lines):
    found = parse_headers(block)
    assert found.lines == (lines or [])
    assert found.is_broken == ((block, lines) in BROKEN)


def publish_raw(url, subject, blocks):
    """Publish messages with header blocks as they are, which no client library would write."""
    host, _, port = url.removeprefix("nats://").partition(":")
    with socket.create_connection((host, int(port)), 60) as connection, connection.makefile("rwb") as wire:
        wire.readline()
        wire.write(b'CONNECT {"headers":true,"verbose":false,"no_responders":true}\r\n')
        for number, block in enumerate(blocks):
            data = b"v%d" % number
            sizes = b"%d %d" % (len(block), len(block) + len(data))
            wire.write(b"HPUB %s.k%d %s\r\n%s%s\r\n" % (subject.encode(), number, sizes, block, data))
        wire.write(b"PING\r\n")
        wire.flush()
        assert wire.readline() == b"PONG\r\n"


@pytest.fixture
def stream(nats_url):
    async def create():
        client = await nats.connect(nats_url)
        await client.jetstream().add_stream(name="broken-headers", subjects=["broken-headers.>"])
        await client.close()

    asyncio.run(create())
    return "broken-headers"


def test_a_message_with_broken_headers_ends_no_ingest_and_is_counted(nats_url, stream):
    cases = [case for case in (*BROKEN, *WHOLE) if not case[0].startswith(b"NATS/1.0 ")]  # the server drops a status
    broken = sum(case in BROKEN for case in cases)
    publish_raw(nats_url, stream, [block for block, _ in cases])
    target, before = MemoryLog(), NATS_BROKEN_HEADERS._value.get()
    done = sl.ingest(f"{nats_url}/{stream}", target)
    rows = content(target).to_pylist()
    assert [row["value"] for row in rows] == [b"v%d" % number for number in range(len(cases))]
    assert [row["headers"] for row in rows] == [lines for _, lines in cases]
    assert (done.records, done.broken_headers) == (len(cases), broken)
    assert NATS_BROKEN_HEADERS._value.get() - before >= broken
    assert "Broken headers: 8 messages." in sentence(done, len(cases), 1.0)
    again = sl.ingest(f"{nats_url}/{stream}", target)
    assert (again.records, again.broken_headers) == (0, 0)
