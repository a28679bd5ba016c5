"""Streams over HTTP: what a request changes, what a reader gets, and what is refused."""

import json
import socket
import threading
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.model.head import WriterId
from strandline.serve.http.access import Access, Denied
from strandline.serve.http.app import LogEntry
from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.methods import _address
from strandline.serve.http.requests import Request
from strandline.serve.http.streams import StreamRoot
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock
from tests.serve.http.client import JSON, TEXT, served

POST = b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"


@pytest.fixture(params=["file", pytest.param("memory", marks=pytest.mark.matrix), "wal"])
def root(request, tmp_path):
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"{request.param}://{tmp_path}/streams"


def test_what_was_appended_is_read_from_any_offset(root):
    with served(root) as http:
        created = http.put("orders", b"a")
        assert (created.status, created["Location"]) == (201, f"http://127.0.0.1:{http.port}/v1/stream/orders")
        offsets = [created.next, *(http.post("orders", text.encode()).next for text in "bcd")]
        assert offsets == sorted(set(offsets))
        assert http.get("orders").body == b"abcd"
        assert [http.get("orders", offset=offset).body for offset in offsets] == [b"bcd", b"cd", b"d", b""]
        last = http.get("orders", offset=offsets[0])
        assert (last.next, last["Stream-Up-To-Date"], last["Content-Type"]) == (offsets[-1], "true", "text/plain")


def test_a_stream_outlives_its_server(root):
    with served(root) as http:
        http.put("orders", b'[{"id": 1}]', headers=JSON)
        offset = http.post("orders", b'[{"id": 2}, {"id": 3}]', headers=JSON).next
    with served(root) as http:
        assert json.loads(http.get("orders").body) == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert http.get("orders", offset=offset).body == b"[]"
        assert http.put("orders", headers=JSON).status == 200
        assert http.put("orders", headers=TEXT).status == 409


def test_a_long_answer_comes_in_chunks_that_join_without_a_gap(root):
    with served(root, limits=HttpLimits(chunk_bytes=100)) as http:
        http.put("numbers", headers=JSON)
        http.post("numbers", json.dumps(list(range(1000))).encode(), headers=JSON)
        found, offset, chunks = [], "-1", 0
        while True:
            answer = http.get("numbers", offset=offset)
            found += json.loads(answer.body)
            offset, chunks = answer.next, chunks + 1
            if answer["Stream-Up-To-Date"]:
                break
        assert found == list(range(1000))
        assert chunks > 10


def test_an_answer_that_the_reader_has_is_not_sent_again(root):
    with served(root) as http:
        http.put("orders", b"a")
        tag = http.get("orders")["ETag"]
        assert http.get("orders", headers={"If-None-Match": tag}).status == 304
        http.post("orders", b"b")
        assert http.get("orders", headers={"If-None-Match": tag}).body == b"ab"


def test_a_stream_that_was_deleted_and_made_again_refuses_offsets_of_the_old_one(root):
    with served(root) as http:
        http.put("orders", b"old")
        old = http.post("orders", b"older").next
        assert http("DELETE", "orders").status == 204
        assert [http("HEAD", "orders").status, http.get("orders").status, http.post("orders", b"x").status] == [404] * 3
        assert http("DELETE", "orders").status == 404
        assert http.put("orders", b"new").status == 201
        assert http.get("orders").body == b"new"
        refused = http.get("orders", offset=old)
        assert refused.status == 410
        assert b"made again" in refused.body


def test_a_stream_that_a_consumer_needs_is_not_deleted(tmp_path):
    with served(f"file://{tmp_path}/streams") as http:
        http.put("orders", b"a")
        (folder,) = (tmp_path / "streams/orders").iterdir()
        with sl.open(f"file://{folder}") as log:
            assert log.content_type == "text/plain"
            log.slots.create("billing", 0)
            refused = http("DELETE", "orders")
            assert refused.status == 409
            assert b"billing" in refused.body
            log.slots.drop("billing")
        assert http("DELETE", "orders").status == 204
        assert not folder.exists() or not list(folder.rglob("*.batch"))


def test_an_offset_below_retention_is_gone_and_the_beginning_is_what_is_retained(tmp_path):
    with (
        sl.open(f"wal://{tmp_path}/log", create=True) as log,
        served(logs={"orders": LogEntry(log, "text/plain")}) as http,
    ):
        first = http.post("orders", b"a").next
        http.post("orders", b"b")
        http.post("orders", b"c")
        log.trim(2)
        assert http.get("orders", offset=first).status == 410
        assert http.get("orders").body == b"c"


def test_an_offset_past_the_end_is_refused(root):
    with served(root) as http:
        token = http.put("orders", b"a").next
        past = str(int(token[:19]) + 7).zfill(19) + token[19:]
        assert http.get("orders", offset=past).status == 410


@pytest.mark.parametrize("offset", ["0", "-2", "a,b", "1_0", "now ", "9" * 19 + "_000000000000", "0" * 500])
def test_what_is_no_offset_is_refused(offset, tmp_path):
    with served(f"memory://{tmp_path.name}-offsets") as http:
        http.put("orders", b"a")
        assert http.get("orders", offset=offset).status in (400, 410)


def test_a_stream_sequence_has_to_grow_also_over_servers_and_appends_without_one(root):
    with served(root) as http:
        http.put("orders")
        assert http.post("orders", b"a", Stream_Seq="09").status == 204
        for _ in range(3):
            assert http.post("orders", b"-").status == 204
    with served(root) as http:
        assert http.post("orders", b"x", Stream_Seq="09").status == 409
        assert http.post("orders", b"x", Stream_Seq="08").status == 409
        assert http.post("orders", b"b", Stream_Seq="10").status == 204
        assert http.post("orders", b"x", Stream_Seq="10").status == 409
        assert http.get("orders").body == b"a---b"


def test_forks_are_refused_with_a_sentence(root):
    with served(root) as http:
        http.put("orders")
        answer = http.put("fork", headers={**TEXT, "Stream-Forked-From": "orders"})
        assert (answer.status, answer["Content-Type"]) == (501, "application/problem+json")
        assert "no forks" in json.loads(answer.body)["detail"]


# --- lifetimes ------------------------------------------------------------------------------------------------------


def test_a_read_keeps_a_stream_for_its_whole_lifetime_and_a_look_does_not(root):
    clock = ManualClock()
    with served(root, env=Env(clock=clock)) as http:
        http.put("session", b"a", headers={**TEXT, "Stream-TTL": "100"})
        clock.advance(99)
        assert http.get("session").body == b"a"
        clock.advance(99)
        assert http("HEAD", "session")["Stream-TTL"] == "100"
        clock.advance(15)
        assert http("HEAD", "session").status == 404
        assert http.post("session", b"b").status == 404
        assert http.put("session", b"new", headers=JSON | {"Stream-TTL": "5"}).status in (201, 400)


def test_another_server_knows_of_the_last_use(tmp_path):
    clock = ManualClock()
    root = f"file://{tmp_path}/streams"
    with served(root, env=Env(clock=clock)) as one, served(root, env=Env(clock=clock)) as other:
        one.put("session", b"a", headers={**TEXT, "Stream-TTL": "100"})
        assert other.get("session").status == 200
        for _ in range(5):
            clock.advance(60)
            assert one.get("session").status == 200
        clock.advance(60)
        assert other.get("session").status == 200


def test_a_clock_that_jumps_ends_no_stream_that_is_read(tmp_path):
    clock = ManualClock()
    with served(f"file://{tmp_path}/streams", env=Env(clock=clock)) as http:
        http.put("session", b"a", headers={**TEXT, "Stream-TTL": "100"})
        clock.set_wall(clock.now() + 10**12)
        assert http.get("session").status == 200


def test_an_expired_stream_is_removed_only_when_two_sweeps_have_found_it(tmp_path):
    clock = ManualClock()
    root = StreamRoot(f"file://{tmp_path}/streams", env=Env(clock=clock))
    with served(root, env=Env(clock=clock)) as http:
        http.put("session", b"a", headers={**TEXT, "Stream-TTL": "10"})
        http.put("kept", b"a")
        clock.advance(20)
        ((name, state),) = root.expired()
        assert name == "session"
        assert root.delete_expired(name, state)
        assert not root.delete_expired(name, state)
        assert root.expired() == []
        assert http.put("session", b"new").status == 201
        assert not root.delete_expired(name, state)
        assert http.get("session").body == b"new"


# --- two servers -----------------------------------------------------------------------------------------------------


def test_two_servers_over_one_bucket_serve_the_same_stream(tmp_path):
    root = f"file://{tmp_path}/streams"
    with served(root) as one, served(root) as other:
        assert sorted([one.put("orders", b"").status, other.put("orders", b"").status]) == [200, 201]
        threads = [
            threading.Thread(target=lambda http=http: [http.post("orders", b"x") for _ in range(10)])
            for http in (one, other, one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.get("orders").body == other.get("orders").body == b"x" * 40
        assert one("DELETE", "orders").status == 204
        assert other.get("orders").status == 404
        assert other.post("orders", b"x").status == 404
        assert other.put("orders", b"new").status == 201
        assert one.get("orders").body == b"new"


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_an_offset_of_a_stream_that_another_server_made_again_is_refused_by_every_server(tmp_path, live):
    root, query = f"file://{tmp_path}/streams", {} if live is None else {"live": live}
    with served(root) as one, served(root) as other:
        one.put("orders", b"old")
        old = one.post("orders", b"older").next
        assert other.get("orders", offset=old).body == b""
        assert other("DELETE", "orders").status == 204
        assert other.put("orders", b"new and longer than it was before").status == 201
        for http in (one, other):
            for _ in range(3):
                http.post("orders", b"more")
            assert http.get("orders", offset=old, **query).status == 410
            assert http.get("orders").body.startswith(b"new")


# --- configured logs --------------------------------------------------------------------------------------------------


def test_a_configured_log_is_read_and_appended_and_neither_made_nor_deleted(tmp_path):
    with sl.open(f"file://{tmp_path}/log", create=True) as log:
        log.append(pa.table({"value": [b"from python"]}), writer=WriterId(UUID(int=7)), number=0)
        with served(logs={"orders": LogEntry(log, "text/plain")}) as http:
            assert http.get("orders").body == b"from python"
            assert http.post("orders", b", from http").status == 204
            assert http.put("orders").status == 200
            assert http("DELETE", "orders").status == 403
            assert http.put("another").status == 403
        assert [batch.column("value").to_pylist() for batch in log.read("beginning")] == [
            [b"from python"],
            [b", from http"],
        ]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["..", ".", ".hidden", "a%2fb", "%2e%2e", "a%00", "a/b", "", "a" * 129, "a%20b", "caf%C3%A9", "_streams", "a%25"],
)
def test_a_name_that_is_not_plain_is_refused(name, tmp_path):
    with served(f"file://{tmp_path}/streams") as http:
        for method in ("PUT", "POST", "GET", "DELETE"):
            assert http(method, name, b"x", headers=TEXT).status == 400
    assert not (tmp_path / "streams").exists() or not list((tmp_path / "streams").rglob("*.json"))


def test_too_large_a_body_is_refused_before_it_has_come(tmp_path):
    with served(f"memory://{tmp_path.name}-large", limits=HttpLimits(body_bytes=1000)) as http:
        http.put("orders")
        assert http.post("orders", b"x" * 1000).status == 204
        assert http.post("orders", b"x" * 1001).status == 413
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            raw.sendall(b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
            assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_that_never_ends_is_refused_by_size_and_by_time(tmp_path):
    with served(f"memory://{tmp_path.name}-chunks", limits=HttpLimits(body_bytes=10_000, body_seconds=0.3)) as http:
        http.put("orders")
        begin = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            raw.sendall(begin)
            assert raw.recv(4096).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            raw.sendall(begin + (b"400\r\n" + b"x" * 0x400 + b"\r\n") * 20)
            assert raw.recv(4096).startswith(b"HTTP/1.1 413")
        assert http.get("orders").body == b""


def test_bodies_of_all_requests_are_bounded_together(tmp_path):
    limits = HttpLimits(body_bytes=10_000, memory_bytes=10_000, body_seconds=30)
    with served(f"memory://{tmp_path.name}-memory", limits=limits) as http:
        http.put("orders")
        begin = (
            b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 9000\r\n\r\n"
        )
        held = [socket.create_connection(("127.0.0.1", http.port), timeout=60) for _ in range(2)]
        for raw in held:
            raw.sendall(begin + b"x" * 6000)
        refused = [raw for raw in held if _answers(raw, b"HTTP/1.1 429", b"retry-after: 1")]
        assert len(refused) == 1
        for raw in held:
            raw.close()
        assert _until(lambda: http.post("orders", b"y" * 9000).status == 204)


def _answers(raw, *parts):
    raw.settimeout(2)
    try:
        found = raw.recv(65536)
    except TimeoutError:
        return False
    return all(part in found for part in parts)


def _until(check):
    return any(check() for _ in range(1000))


def test_headers_are_bounded_in_size_and_in_time(tmp_path):
    limits = HttpLimits(header_bytes=2000, header_seconds=0.3)
    with served(f"memory://{tmp_path.name}-headers", limits=limits) as http:
        assert http.get("orders", headers={"X": "y" * 5000}).status == 431
        for begin in (b"", b"GET /v1/stream/orders HTTP/1.1\r\nHost: x\r\n"):
            with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
                raw.sendall(begin)
                assert raw.recv(4096) == b""
        assert http.get("orders").status == 404


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 3\r\nContent-Length: 30\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked, identity\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: 3\r\nStream-Closed: true\r\nStream-Closed: false\r\n",
    ],
)
def test_a_request_that_two_servers_may_read_differently_is_refused(headers, tmp_path):
    with served(f"memory://{tmp_path.name}-smuggling") as http:
        http.put("orders")
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
                + headers
                + b"\r\nabcGET /v1/stream/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            assert raw.recv(4096).startswith(b"HTTP/1.1 400")
        assert http.get("orders").body == b""


def test_access_is_asked_for_each_request_and_a_refusal_changes_nothing(tmp_path):
    asked = []

    def authorise(headers, access, stream):
        asked.append((access, stream))
        if headers.get("authorization") == "Bearer writer":
            return None
        return Denied(401, "Give a token.") if access is not Access.READ else None

    with served(f"memory://{tmp_path.name}-access", authorise=authorise) as http:
        refused = http.put("orders")
        assert (refused.status, refused["WWW-Authenticate"]) == (401, "Bearer")
        assert http.get("orders").status == 404
        assert http.put("orders", b"a", headers={**TEXT, "Authorization": "Bearer writer"}).status == 201
        assert [http.post("orders", b"x").status, http("DELETE", "orders").status] == [401, 401]
        assert http.get("orders").body == b"a"
        assert {access for access, _ in asked} == {Access.ADMIN, Access.READ, Access.APPEND}


def test_pages_of_other_origins_are_not_let_in_unless_they_are_listed(tmp_path):
    origin = {"Origin": "https://app.example"}
    with served(f"memory://{tmp_path.name}-cors") as http:
        http.put("orders", b"a")
        assert http.get("orders", headers=origin)["Access-Control-Allow-Origin"] is None
        assert http("OPTIONS", "orders", headers=origin)["Access-Control-Allow-Origin"] is None
    with served(f"memory://{tmp_path.name}-cors", origins=["https://app.example"]) as http:
        found = http.get("orders", headers=origin)
        assert (found["Access-Control-Allow-Origin"], found["Vary"]) == ("https://app.example", "Origin")
        assert http.get("orders", headers={"Origin": "https://evil.example"})["Access-Control-Allow-Origin"] is None


def test_every_answer_protects_browsers(tmp_path):
    with served(f"memory://{tmp_path.name}-browsers") as http:
        answers = [
            http.put("orders", b"a"),
            http.get("orders"),
            http("HEAD", "orders"),
            http.get("none"),
            http.get(".."),
        ]
        assert [answer["X-Content-Type-Options"] for answer in answers] == ["nosniff"] * 5
        assert all(answer["Cross-Origin-Resource-Policy"] for answer in answers)
        assert answers[2]["Cache-Control"] == "no-store"


def test_the_location_of_a_new_stream_has_the_scheme_of_its_request():
    scope = {
        "method": "PUT",
        "path": "/v1/stream/a",
        "scheme": "https",
        "query_string": b"",
        "headers": [(b"host", b"h:1")],
    }
    assert _address(Request.of(scope)) == "https://h:1/v1/stream/a"
