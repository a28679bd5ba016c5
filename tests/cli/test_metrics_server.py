"""The metrics port of a node, and callers that keep connections open."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from strandline.cli.node.metrics_server import MOST, MetricsServer, metrics_at
from strandline.errors import StorageError

WAIT = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_silent_connections_take_a_bounded_number_of_threads_and_keep_no_scraper_out() -> None:
    port = free_port()
    before = threading.active_count()
    with metrics_at(("127.0.0.1", port)), ExitStack() as opened:
        for _ in range(10 * MOST):
            silent = opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as answer:
            assert b"strandline_term" in answer.read()
        assert threading.active_count() - before <= MOST + 1
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), WAIT)


def test_a_scrape_under_way_outlives_a_crowd_of_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, crowd_came = threading.Event(), threading.Event()
    has_asked = MetricsServer.has_asked

    def slow(server: MetricsServer, request: object) -> bool:
        is_open = has_asked(server, request)
        asked.set()
        return crowd_came.wait(WAIT) and is_open

    monkeypatch.setattr(MetricsServer, "has_asked", slow)
    port = free_port()
    with metrics_at(("127.0.0.1", port)), ExitStack() as opened, ThreadPoolExecutor(1) as pool:
        scrape = pool.submit(lambda: urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT).read())
        assert asked.wait(WAIT)
        crowd = [opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT)) for _ in range(2 * MOST)]
        assert crowd[MOST].recv(1) == b"", "it made room"
        crowd_came.set()
        assert b"strandline_term" in scrape.result(WAIT)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=rf"Metrics cannot be served on 127\.0\.0\.1:{port}: "):
            metrics_at(("127.0.0.1", port)).__enter__()
