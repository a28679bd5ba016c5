"""What one body may make the server hold: its messages are counted before they are decoded."""

import contextlib
import json
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.serve.http.limits import HttpLimits
from strandline.serve.http.protocol import counting
from strandline.serve.http.protocol.counting import check_count
from strandline.serve.http.protocol.records import LINES
from strandline.serve.http.requests import TooLarge
from tests.serve.http.client import JSON, served

VALUES = st.recursive(
    st.none() | st.integers() | st.text('a,"\\[]{}\n\N{SNOWMAN}', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(',"\\]', max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(VALUES, min_size=1), st.booleans(), st.sampled_from([None, 2]), st.integers(1, 50))
def test_messages_are_counted_as_a_decoder_counts_them(values, is_ascii, indent, window):
    body = json.dumps(values, ensure_ascii=is_ascii, indent=indent).encode()
    before, counting._WINDOW = counting._WINDOW, window
    try:
        check_count(body, "application/json; charset=utf-8", len(values))
        if len(values) > 1:
            with pytest.raises(TooLarge):
                check_count(body, "application/json", len(values) - 1)
    finally:
        counting._WINDOW = before


@given(VALUES)
def test_a_single_message_is_one_however_large_it_is(value):
    check_count(json.dumps({"a": [value] * 9, "b": 1}).encode(), "application/json", 1)


def test_more_messages_than_the_limit_are_413_and_append_nothing(tmp_path):
    limits = HttpLimits(body_messages=3)
    with served(f"memory://{tmp_path.name}", limits=limits) as http:
        assert http.put("refused", b"[1,2,3,4]", headers=JSON).status == 413
        http.put("orders", headers=JSON)
        assert http.post("orders", b'[1,[2,2],{"a":3,"b":"4,4"}]', headers=JSON).status == 204
        refused = http.post("orders", b"[1,2,3,4]", headers=JSON)
        assert refused.status == 413
        assert json.loads(refused.body)["detail"].startswith("The body holds more than 3 messages, which is the limit")
        assert http.post("orders", b"{}\n" * 4, headers={"Content-Type": LINES}).status == 413
        assert http.post("orders", b"{}\n" * 3, headers={"Content-Type": LINES}).status == 204
        assert http.get("orders").body == b'[1,[2,2],{"a":3,"b":"4,4"},null,null,null]'
        assert http.get("refused").status == 404


MEASURED = """
import resource
from strandline.serve.http.limits import HttpLimits
from tests.serve.http.client import served

limits = HttpLimits()
size = limits.body_bytes
with served("memory://measured", limits=limits) as http:
    http.put("orders", headers={"Content-Type": "application/json"})
    bodies = [(b"[" + b"1," * (size // 2 - 2) + b"1]", "application/json"), (b"{}\\n" * (size // 3), LINES)]
    for item in (b"1", b"{}", b'"' + b"x" * 120 + b'"'):
        many = min(limits.body_messages, size // (len(item) + 1) - 1)
        bodies.append((b"[" + b",".join([item] * many) + b"]", "application/json"))
    for start in (b'{"value":[', b'{"timestamp":0,"value":[', b'{"key":['):
        bodies.append((start + b"{}," * (size // 3 - 20) + b"1]}\\n", LINES))
    bodies.append((b"[" + b"[]," * (size // 3 - 2) + b"[]", "application/json"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses = [http.post("orders", body, headers={"Content-Type": kind}).status for body, kind in bodies]
    print(*statuses, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_process_takes_a_few_times_the_size_of_the_largest_body_whatever_it_holds():
    done = subprocess.run(
        [sys.executable, "-c", f"LINES = {LINES!r}\n{MEASURED}"], capture_output=True, text=True, check=True
    )
    *statuses, grown = map(int, done.stdout.split())
    assert statuses == [413, 413, 204, 204, 204, 204, 400, 400, 413]
    assert grown < 20 * 32, f"{grown} MiB more for bodies of 32 MiB"


def test_a_body_of_10_mb_comes_back_as_it_was_sent_whole_and_in_chunks(tmp_path):
    body = bytes(range(256)) * 40_000
    with served(f"memory://{tmp_path.name}-large") as http:
        http.put("whole", body)
        http.put("chunked")
        assert http.post("chunked", iter([body[at : at + 70_000] for at in range(0, len(body), 70_000)])).status == 204
        for name in ("whole", "chunked"):
            found, offset = b"", "-1"
            while (answer := http.get(name, offset=offset)).body != b"":
                found, offset = found + answer.body, answer.next
            assert found == body


def sent(port, *parts):
    """All that the server answers to these bytes, until it ends the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        with contextlib.suppress(OSError):
            for part in parts:
                raw.sendall(part)
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(65536):
                found += part
        return found


def test_a_flood_of_small_headers_is_refused_before_the_request_is_read(tmp_path):
    flood = [b"X-%d: %s\r\n" % (number, b"y" * 90) for number in range(1000)]
    with served(f"memory://{tmp_path.name}-flood") as http:
        http.put("orders")
        found = sent(http.port, b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\n", *flood, b"\r\n")
        assert found.startswith(b"HTTP/1.1 431") or found == b""  # reset by the bytes that nobody reads
        assert http.get("orders").body == b""


@pytest.mark.parametrize(
    "headers",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x3\r\n",
        b"Content-Length: 3\r\n folded: 1\r\n",
        b"Content-Length: 3\nX: y\r\n",
    ],
)
def test_a_length_that_a_proxy_may_read_otherwise_lets_no_second_request_in(headers, tmp_path):
    asked = []

    def authorise(_headers, _access, stream):
        asked.append(stream)

    with served(f"memory://{tmp_path.name}-smuggling", authorise=authorise) as http:
        begin = b"PUT /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        found = sent(http.port, begin + headers + b"\r\n0\r\n\r\nPUT /v1/stream/smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 400 " in found.split(b"\r\n")[0]
        assert "smuggled" not in asked
        assert http.get("smuggled").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/stream/../logs", "/v1/stream/a/../b", "/v1/stream//a", "/v1/stream/a\\b", "/v1/stream/%2e%2e/logs",
        "/v1/stream/..%2flogs", "/v1/stream/a%2Fb", "/v1/stream/a%5cb", "/v1/stream/a%00", "/v1/stream/a;b",
        "/v1/stream/%C3%A9", "/v1/stream/\u00e9".encode().decode("latin-1"), "/v1/stream/a%E2%80%AE",
    ],
)  # fmt: skip
def test_no_path_leads_to_another_stream_or_out_of_the_folder(path, tmp_path):
    with served(f"file://{tmp_path}/streams") as http:
        for method in ("PUT", "POST", "GET", "DELETE"):
            found = sent(
                http.port,
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx".encode(
                    "latin-1"
                ),
            )
            assert found.split(b" ")[1] in (b"400", b"404"), (method, found)
    assert not list(tmp_path.rglob("*.json"))
