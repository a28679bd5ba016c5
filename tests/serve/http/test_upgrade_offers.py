"""Requests that offer HTTP/2, as the HTTP client of Java sends them: read as if nothing were offered."""

import socket

import pytest

from strandline.serve.http.limits import HttpLimits
from tests.serve.http.client import served

OFFER = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
"""What the HTTP client of Java sends with each request without TLS: it would take HTTP/2."""
WHOLE = b"POST /v1/stream/orders HTTP/1.1\r\n" + OFFER + b"Content-Type: text/plain\r\nContent-Length: 3\r\n\r\n"
CHUNKED = WHOLE.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked")
PLAIN = b"POST /v1/stream/orders HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_an_offer_of_http_2_is_ignored_and_the_request_is_read_whole_however_it_comes(size, tmp_path):
    sent = WHOLE + b"one" + CHUNKED + b"3\r\ntwo\r\n0\r\n\r\n" + PLAIN + b"ten" + WHOLE + b"six"
    with served(f"memory://{tmp_path.name}-{size}") as http:
        http.put("orders")
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            for start in range(0, len(sent), size):
                raw.sendall(sent[start : start + size])
            found = b""
            while found.count(b"HTTP/1.1 204") < 4:
                found += raw.recv(65536) or pytest.fail(f"the connection ended: {found!r}")
        assert http.get("orders").body == b"onetwotensix"


def test_a_request_that_is_nothing_without_its_upgrade_ends_the_connection(tmp_path):
    with served(f"memory://{tmp_path.name}-tunnel") as http:
        with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
            raw.sendall(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not raw.recv(4096).startswith(b"HTTP/1.1 2")
        assert http.put("orders").status == 201


def test_headers_of_a_request_with_an_offer_are_bounded_as_those_of_others(tmp_path):
    with served(f"memory://{tmp_path.name}-bound", limits=HttpLimits(header_bytes=2000, header_seconds=0.3)) as http:
        for begin, answer in ((OFFER + b"X: " + b"y" * 5000, b"HTTP/1.1 431"), (OFFER, b"")):
            with socket.create_connection(("127.0.0.1", http.port), timeout=60) as raw:
                raw.sendall(b"GET /v1/stream/orders HTTP/1.1\r\n" + begin)
                assert raw.recv(4096)[:12] == answer
