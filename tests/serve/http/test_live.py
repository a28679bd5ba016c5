"""Live readers: long polls and events, woken by appends, without a thread of their own."""

import asyncio
import contextlib
import json
import socket
import threading
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.model.head import WriterId
from strandline.serve.http.answers import PIECE, send_piece
from strandline.serve.http.app import LogEntry, StreamRoot, create_app
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.server import Guarded
from strandline.storage.env import SYSTEM, Env
from strandline.testing.clock import ManualClock
from tests.serve.http.client import JSON, TEXT, served

LIVE = HttpLimits(long_poll_seconds=30, events_seconds=60, poll_seconds=0.05)


@pytest.fixture(params=["file", "wal"])
def root(request, tmp_path):
    return f"{request.param}://{tmp_path}/streams"


def events_of(port, name, offset, upto):
    """The events of a stream until their text holds ``upto``, or they end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(f"GET /v1/stream/{name}?offset={offset}&live=sse HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        found = b""
        while upto not in found and (part := raw.recv(65536)):
            found += part
        return found


def comes_true(condition, pause=0.01):
    deadline = SYSTEM.clock.monotonic() + 60
    while not (found := condition()) and SYSTEM.clock.monotonic() < deadline:
        SYSTEM.clock.sleep(pause)
    return found


def test_a_long_poll_is_woken_by_an_append_and_by_the_end(root):
    with served(root, limits=LIVE) as http:
        offset = http.put("orders", b"a").next
        answers = []
        reader = threading.Thread(target=lambda: answers.append(http.get("orders", offset=offset, live="long-poll")))
        reader.start()
        http.post("orders", b"b")
        reader.join()
        assert (answers[0].status, answers[0].body) == (200, b"b")
        reader = threading.Thread(
            target=lambda: answers.append(http.get("orders", offset=answers[0].next, live="long-poll"))
        )
        reader.start()
        http.post("orders", None, Stream_Closed="true")
        reader.join()
        assert (answers[1].status, answers[1]["Stream-Closed"]) == (204, "true")


def test_a_long_poll_without_news_ends_with_where_to_go_on(root):
    with served(root) as http:
        offset = http.put("orders", b"a").next
        answer = http.get("orders", offset=offset, live="long-poll", cursor="999999999999")
        assert (answer.status, answer.next, answer["Stream-Up-To-Date"]) == (204, offset, "true")
        assert int(answer["Stream-Cursor"]) > 999999999999


def test_events_bring_what_another_server_appends(tmp_path):
    root = f"file://{tmp_path}/streams"
    with served(root, limits=LIVE) as one, served(root, limits=LIVE) as other:
        offset = one.put("orders", b"[1]", headers=JSON).next
        found = []
        reader = threading.Thread(target=lambda: found.append(events_of(one.port, "orders", offset, b"streamClosed")))
        reader.start()
        other.post("orders", b"[2, 3]", headers=JSON)
        other.post("orders", b"4", headers={**JSON, "Stream-Closed": "true"})
        reader.join()
        data = [json.loads(line[5:]) for line in found[0].split(b"\n") if line.startswith(b"data:[")]
        assert [number for part in data for number in part] == [2, 3, 4]


def test_events_bring_what_the_process_appends_by_itself(tmp_path):

    log = sl.open(f"wal://{tmp_path}/log", create=True)
    with log, served(logs={"orders": LogEntry(log, "text/plain")}, limits=LIVE) as http:
        found = []
        reader = threading.Thread(target=lambda: found.append(events_of(http.port, "orders", "now", b"hello")))
        reader.start()
        number = 0
        while reader.is_alive():  # whenever the reader has begun
            log.append(pa.table({"value": [b"hello"]}), writer=WriterId(UUID(int=7)), number=number).result()
            number += 1
            reader.join(0.05)
        assert b"hello" in found[0]


def test_live_readers_of_a_stream_that_is_deleted_are_told(root):
    with served(root, limits=LIVE) as http:
        offset = http.put("orders", b"a").next
        answers = []
        reader = threading.Thread(target=lambda: answers.append(http.get("orders", offset=offset, live="long-poll")))
        reader.start()
        assert http("DELETE", "orders").status == 204
        reader.join()
        assert answers[0].status == 404


def test_a_reader_that_waits_keeps_a_stream_alive_on_every_server_whatever_the_clock_does(tmp_path):
    clock, root = ManualClock(), f"file://{tmp_path}/streams"
    limits = HttpLimits(events_seconds=1e6, poll_seconds=0.05)
    with (
        served(root, limits=limits, env=Env(clock=clock)) as one,
        served(root, limits=limits, env=Env(clock=clock)) as other,
        socket.socket() as reader,
    ):
        one.put("session", b"a", headers={**TEXT, "Stream-TTL": "100"})
        reader.settimeout(60)
        reader.connect(("127.0.0.1", one.port))
        reader.sendall(b"GET /v1/stream/session?offset=now&live=sse HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"upToDate" not in reader.recv(65536):
            pass
        looks = StreamRoot(root, env=Env(clock=clock))
        for jump in (0, 10**12, -(10**12)):
            clock.set_wall(clock.now() + jump)
            for _ in range(4):
                before = looks.find("session").used
                clock.advance(60)
                assert comes_true(lambda before=before: looks.find("session").used > before)
        assert other.get("session").body == b"a"
        reader.close()

        def is_over():
            clock.advance(150)
            return one("HEAD", "session").status == 404  # a look keeps nothing alive

        assert comes_true(is_over, pause=0.3)
        assert [one.get("session").status, other.get("session").status] == [404, 404]


def test_hundreds_of_readers_take_no_thread_and_all_hear_of_an_append(tmp_path):
    count = 300

    async def read(port, started):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/stream/orders?offset=now&live=sse HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"upToDate")
        started.release()
        await reader.readuntil(b"news")
        writer.close()

    async def main(http, threads):
        started = asyncio.Semaphore(0)
        readers = [asyncio.create_task(read(http.port, started)) for _ in range(count)]
        for _ in range(count):
            await started.acquire()
        assert threading.active_count() - threads <= 20
        await asyncio.to_thread(http.post, "orders", b"news")
        await asyncio.wait_for(asyncio.gather(*readers), 60)

    with served(f"file://{tmp_path}/streams", limits=LIVE) as http:
        http.put("orders", b"a")
        asyncio.run(main(http, threading.active_count()))


def test_live_readers_beyond_the_limit_are_sent_away(root):
    with served(root, limits=HttpLimits(readers=1, long_poll_seconds=60)) as http:
        offset = http.put("orders", b"a").next

        def read():
            while http.get("orders", offset=offset, live="long-poll").status == 429:
                pass  # the other request was the one reader

        reader = threading.Thread(target=read)
        reader.start()
        while (refused := http.get("orders", offset="-1", live="long-poll")).status == 200:
            pass  # the reader has not begun
        assert (refused.status, refused["Retry-After"]) == (429, "1")
        http.post("orders", b"b")
        reader.join()


def test_an_answer_is_sent_in_small_pieces_and_ends_for_a_reader_that_stalls():
    sent = []

    async def send(message):
        sent.append(len(message["body"]))
        if len(sent) == 3:
            await asyncio.Event().wait()  # its buffers are full, and it reads nothing

    with pytest.raises(TimeoutError):
        asyncio.run(send_piece(send, bytes(PIECE * 10), 0.01, more=False))
    assert sent == [PIECE] * 3


def test_the_connection_of_a_reader_that_stalls_is_cut_with_what_was_to_be_sent(monkeypatch, root):
    cut = threading.Event()
    lost = Guarded.connection_lost

    def connection_lost(self, error):
        lost(self, error)
        if self.scope is not None and b"live=sse" in self.scope["query_string"]:
            cut.set()

    monkeypatch.setattr(Guarded, "connection_lost", connection_lost)
    with served(root, limits=HttpLimits(send_seconds=0.2)) as http, socket.socket() as reader:
        http.put("orders")
        for _ in range(8):
            http.post("orders", b"x" * (1 << 20))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", http.port))
        reader.sendall(b"GET /v1/stream/orders?offset=-1&live=sse HTTP/1.1\r\nHost: x\r\n\r\n")
        assert cut.wait(20)


def test_headers_behind_a_body_are_dropped(root):
    with served(root) as http:
        http.put("orders")
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as caller:
            caller.sendall(
                b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nStream-Closed: true\r\n\r\n"
            )
            assert caller.recv(1000).startswith(b"HTTP/1.1 204")
        assert http("HEAD", "orders")["Stream-Closed"] is None
        assert http.get("orders").body == b"abc"


def test_a_character_that_was_appended_in_parts_is_sent_whole(root):
    with served(root, limits=HttpLimits(chunk_bytes=1)) as http:
        http.put("orders")
        for part in (b"a\xe2", b"\x82", b"\xacb"):
            http.post("orders", part)
        http.post("orders", None, Stream_Closed="true")
        found = events_of(http.port, "orders", "-1", b"streamClosed").decode()
        assert "data:a\n" in found
        assert "data:\u20acb\n" in found
        assert "\ufffd" not in found


@pytest.mark.parametrize("query", [b"offset=-1", b"offset=-1&live=sse"])
def test_answers_for_slow_readers_are_bounded_together(query):
    async def call(app, method, query=b"", body=b"", is_sent=None):
        statuses, left = [], asyncio.Event()
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            if not messages:
                await left.wait()
            return messages.pop()

        async def send(message):
            statuses.append(message.get("status"))
            if is_sent is not None and message.get("body"):
                is_sent.set()
                await left.wait()  # this reader takes nothing

        path, headers = b"/v1/stream/orders", [(b"content-type", b"text/plain")]
        scope = {"type": "http", "method": method, "path": path.decode(), "raw_path": path, "headers": headers}
        await app({**scope, "query_string": query}, receive, send)
        return statuses[0]

    async def main():
        app = create_app({}, StreamRoot("memory://slow-readers"), limits=HttpLimits(memory_bytes=3000))
        await call(app, "PUT")
        await call(app, "POST", body=b"x" * 2000)
        is_sent = asyncio.Event()
        slow = asyncio.create_task(call(app, "GET", query, is_sent=is_sent))
        await is_sent.wait()
        refused = await call(app, "GET", b"offset=-1")
        slow.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slow
        answered = await call(app, "GET", b"offset=-1")
        await app.aclose()
        return refused, answered

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (429, 200)
