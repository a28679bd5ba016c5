"""Streams of NATS JetStream as sources."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

import strandline as sl
from strandline.errors import CursorExpired, Diverged, InvalidInput, NotFound
from strandline.ingestion.jetstream import JetStreamSource
from strandline.kv.nats.feed import MessageFeed
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Limit
from strandline.model.records import Op
from tests.ingestion.sources import content, position

nats = pytest.importorskip("nats")
NAMES = itertools.count()
pytestmark = pytest.mark.matrix


def with_stream(url, work):
    async def run():
        client = await nats.connect(url)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.fixture
def stream(nats_url):
    name = f"ingested{next(NAMES)}"
    with_stream(nats_url, lambda js: js.add_stream(name=name, subjects=[f"{name}.>"]))
    return name


def publish(url, stream, count, first=0):
    async def work(js):
        for number in range(first, first + count):
            headers = {"trace": str(number)} if number % 2 else None
            await js.publish(f"{stream}.k{number}", b"v%d" % number, headers=headers)

    with_stream(url, work)


def ingest(url, stream, target, **options):
    return sl.ingest(f"{url}/{stream}", target, **options)


def test_messages_become_records_once_and_in_order_with_subject_headers_and_time(nats_url, stream):
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 0
    publish(nats_url, stream, 10)
    assert ingest(nats_url, stream, target).records == 10
    publish(nats_url, stream, 5, first=10)
    assert ingest(nats_url, stream, target).records == 5
    assert ingest(nats_url, stream, target).records == 0
    rows = content(target).to_pylist()
    assert [row["key"] for row in rows] == [b"%s.k%d" % (stream.encode(), number) for number in range(15)]
    assert [row["value"] for row in rows] == [b"v%d" % number for number in range(15)]
    assert rows[1]["headers"] == [("trace", b"1")]
    assert rows[2]["headers"] is None
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert times[0].year > 2020
    with JetStreamSource(f"{nats_url}/{stream}") as source:
        assert position(source, target) == 16


def test_deletions_of_a_bucket_are_deletes(nats_url):
    name = f"bucket{next(NAMES)}"

    async def work(js):
        bucket = await js.create_key_value(bucket=name, history=5)
        await bucket.put("a", b"1")
        await bucket.delete("a")
        await bucket.put("b", b"2")
        await bucket.purge("b")

    with_stream(nats_url, work)
    target = MemoryLog()
    ingest(nats_url, f"KV_{name}", target)
    rows = content(target).to_pylist()
    assert [(row["key"].rpartition(b".")[2], row["op"]) for row in rows] == [
        (b"a", Op.PUT),
        (b"a", Op.DELETE),
        (b"b", Op.PURGE),
    ]


def test_removals_that_a_server_marks_are_removals(nats_url, stream):
    """The server writes such a message for a key that has expired; it has no operation of a bucket."""

    async def work(js):
        await js.publish(f"{stream}.a", b"1")
        await js.publish(f"{stream}.a", b"", headers={"Nats-Marker-Reason": "MaxAge"})
        await js.publish(f"{stream}.b", b"", headers={"Nats-Marker-Reason": "Remove"})

    with_stream(nats_url, work)
    target = MemoryLog()
    ingest(nats_url, stream, target)
    assert [row["op"] for row in content(target).to_pylist()] == [Op.PUT, Op.PURGE, Op.DELETE]


def test_deleted_messages_leave_gaps_which_are_passed(nats_url, stream):
    target = MemoryLog()
    publish(nats_url, stream, 10)

    async def work(js):
        for sequence in (4, 5, 10):
            await js.delete_msg(stream, sequence)

    with_stream(nats_url, work)
    assert ingest(nats_url, stream, target).records == 7
    assert ingest(nats_url, stream, target).records == 0
    publish(nats_url, stream, 2, first=10)
    assert ingest(nats_url, stream, target).records == 2
    assert [row["value"] for row in content(target).to_pylist()] == [b"v%d" % n for n in (0, 1, 2, 5, 6, 7, 8, 10, 11)]


def test_messages_purged_before_they_were_ingested_are_skipped_only_if_that_is_said(nats_url, stream):
    target = MemoryLog()
    publish(nats_url, stream, 4)
    ingest(nats_url, stream, target)
    publish(nats_url, stream, 6, first=4)
    with_stream(nats_url, lambda js: js.purge_stream(stream, seq=8))
    with pytest.raises(CursorExpired, match=r"begins at offset 8, .* holds it up to 5"):
        ingest(nats_url, stream, target)
    assert ingest(nats_url, stream, target, skip_trimmed=True).records == 3


def test_a_stream_that_was_created_again_is_refused(nats_url, stream):
    target = MemoryLog()
    publish(nats_url, stream, 6)
    ingest(nats_url, stream, target)

    async def again(js):
        await js.delete_stream(stream)
        await js.add_stream(name=stream, subjects=[f"{stream}.>"])

    with_stream(nats_url, again)
    publish(nats_url, stream, 2, first=50)
    with pytest.raises(Diverged, match=r"ends at offset 3, and .* holds it up to 7"):
        ingest(nats_url, stream, target)
    publish(nats_url, stream, 8, first=60)
    with pytest.raises(Diverged, match=r"^The source has another history"):
        ingest(nats_url, stream, target)
    with_stream(nats_url, lambda js: js.delete_msg(stream, 6))
    with pytest.raises(Diverged, match=r"^The source has another history"):
        ingest(nats_url, stream, target)
    assert target.bounds().next == 6


def test_a_stream_whose_last_ingested_message_was_deleted_is_continued(nats_url, stream):
    target = MemoryLog()
    publish(nats_url, stream, 6)
    ingest(nats_url, stream, target)
    with_stream(nats_url, lambda js: js.delete_msg(stream, 6))
    publish(nats_url, stream, 2, first=6)
    assert ingest(nats_url, stream, target).records == 2


def test_a_wrong_address_is_one_sentence(nats_url):
    with pytest.raises(NotFound, match=r"^There is no stream nowhere"):
        ingest(nats_url, "nowhere", MemoryLog())
    with pytest.raises(InvalidInput, match="names no stream"):
        ingest(nats_url, "", MemoryLog())


def test_a_slow_server_is_waited_for_and_its_messages_are_not_taken_for_deleted(nats_url, stream, monkeypatch):
    publish(nats_url, stream, 5)
    fetched, slow = JetStreamSource._fetched, [1, 2, 3]
    monkeypatch.setattr(JetStreamSource, "_fetched", lambda self: [] if slow and slow.pop() else fetched(self))
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 5
    assert not slow


def test_a_message_with_a_header_that_the_server_uses_itself_is_a_message(nats_url, stream):
    statuses = ["404", "408", "409", "100", "503", "shipped"]

    async def work(js):
        for number, status in enumerate(statuses):
            await js.publish(f"{stream}.{number}", b"" if status == "100" else b"v", headers={"Status": status})
        await js.publish(f"{stream}.last", b"v")

    with_stream(nats_url, work)
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 7
    headers = content(target)["headers"].to_pylist()
    assert [each and each[0] for each in headers] == [*(("Status", status.encode()) for status in statuses), None]


def test_messages_that_are_lost_on_their_way_are_read_again(nats_url, stream, monkeypatch):
    """As those that a server has written into a connection which then broke."""
    publish(nats_url, stream, 20)
    receive, lost, arrived = MessageFeed._receive, [], itertools.count()

    async def losing(self, message):
        if next(arrived) in (3, 12):
            lost.append(message)
        else:
            await receive(self, message)

    monkeypatch.setattr(MessageFeed, "_receive", losing)
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 20
    assert len(lost) == 2
    assert content(target)["value"].to_pylist() == [b"v%d" % number for number in range(20)]


def test_a_consumer_that_the_server_has_removed_is_created_again(nats_url, stream):
    publish(nats_url, stream, 10)
    with JetStreamSource(f"{nats_url}/{stream}", timeout=60) as source:
        start = source.start()
        (first,) = source.plan(start, Limit(records=4, upto=5))
        assert first.batch.num_rows == 4

        async def remove(js):
            for consumer in await js.consumers_info(stream):
                await js.delete_consumer(stream, consumer.name)

        publish(nats_url, stream, 5, first=10)
        with_stream(nats_url, remove)
        values = []
        while spans := source.plan(start.at(first.next)):
            (first,) = spans
            values += first.batch.column("value").to_pylist()
        assert values == [b"v%d" % number for number in range(4, 15)]


def test_messages_larger_than_one_request_arrive(nats_url, stream, monkeypatch):
    monkeypatch.setattr("strandline.kv.nats.feed._WINDOW_BYTES", 1000)

    async def work(js):
        for number in range(6):
            await js.publish(f"{stream}.k", b"%d" % number * (5000 if number % 2 else 300))

    with_stream(nats_url, work)
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 6
    assert [value[:1] for value in content(target)["value"].to_pylist()] == [b"%d" % number for number in range(6)]


def publish_raw(url, subject, value):
    """Publish with a subject of any bytes, which the client's library would refuse."""
    host, port = url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answers:
        answers.readline()
        connection.sendall(b'CONNECT {"verbose":true}\r\nPUB %s %d\r\n%s\r\n' % (subject, len(value), value))
        assert [answers.readline() for _ in range(2)] == [b"+OK\r\n"] * 2


def test_a_subject_that_is_no_utf_8_is_a_key_as_it_is(nats_url, stream):
    subject = stream.encode() + b".\xff\xc3\x28"
    publish(nats_url, stream, 2)
    publish_raw(nats_url, subject, b"odd")
    publish(nats_url, stream, 2, first=2)
    target = MemoryLog()
    assert ingest(nats_url, stream, target).records == 5
    assert content(target).column("key").to_pylist()[2] == subject
    assert content(target).column("value").to_pylist() == [b"v0", b"v1", b"odd", b"v2", b"v3"]


def test_a_source_without_new_messages_is_waited_for(nats_url, stream):
    publish(nats_url, stream, 3)
    with JetStreamSource(f"{nats_url}/{stream}") as source:
        assert source.wait(source.start(), 10.0)
        assert not source.wait(source.cursor_at(source.bounds().next), 0.05)
