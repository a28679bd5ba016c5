"""The metrics port of commands that run on: health, readiness and metrics; and callers that keep connections open."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
from prometheus_client import REGISTRY

import strandline as sl
from strandline.cli.shared.monitoring import Metrics
from strandline.errors import Fenced, StorageError
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity
from strandline.node.running import NodeConfig, RunningNode
from strandline.serve.http_server import MOST, HttpServer
from strandline.serve.monitoring import Health
from tests.cli.conftest import Start

WAIT = 60.0
OTHERS = ("follow", "ingest", "tier", "node")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_silent_connections_take_a_bounded_number_of_threads_and_keep_no_scraper_out() -> None:
    port = free_port()
    before = threading.active_count()
    with Metrics(("127.0.0.1", port)).served(), ExitStack() as opened:
        for _ in range(10 * MOST):
            silent = opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as answer:
            assert b"strandline_build_info" in answer.read()
        assert threading.active_count() - before <= MOST + 1
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), WAIT)


def test_a_scrape_under_way_outlives_a_crowd_of_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, crowd_came = threading.Event(), threading.Event()
    has_asked = HttpServer.has_asked

    def slow(server: HttpServer, request: object) -> bool:
        is_open = has_asked(server, request)
        asked.set()
        return crowd_came.wait(WAIT) and is_open

    monkeypatch.setattr(HttpServer, "has_asked", slow)
    port = free_port()
    with Metrics(("127.0.0.1", port)).served(), ExitStack() as opened, ThreadPoolExecutor(1) as pool:
        scrape = pool.submit(lambda: urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT).read())
        assert asked.wait(WAIT)
        crowd = [opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT)) for _ in range(2 * MOST)]
        assert crowd[MOST].recv(1) == b"", "it made room"
        crowd_came.set()
        assert b"strandline_build_info" in scrape.result(WAIT)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=rf"Metrics cannot be served on 127\.0\.0\.1:{port}: "):
            Metrics(("127.0.0.1", port)).served().__enter__()


def answer(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", method=method), timeout=WAIT) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_and_readiness_are_asked_for_and_other_paths_are_not_found() -> None:
    port = free_port()
    with Metrics(("127.0.0.1", port)).served() as health:
        assert answer(port, "/healthz") == (200, "ok\n")
        assert answer(port, "/readyz") == (503, "it is starting\n")
        health.ready()
        assert answer(port, "/readyz?verbose=1") == (200, "ok\n")
        health.waits("its last trim failed")
        health.failed = lambda: "it has failed"
        assert answer(port, "/readyz") == (503, "its last trim failed\n")
        assert answer(port, "/healthz") == (503, "it has failed\n")
        assert answer(port, "/healthz", "HEAD") == (503, "")
        assert f'version="{version("strandline")}"' in answer(port, "/metrics")[1]
        assert answer(port, "/") == answer(port, "/metrics/x") == (404, "here are /healthz, /readyz and /metrics\n")
        assert answer(port, "/metrics", "POST")[0] == 405


def test_nothing_is_served_where_it_is_not_asked_for() -> None:
    with Metrics().served() as health:
        assert isinstance(health, Health)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_node_s_condition_offsets_disk_lease_and_slots_are_measured_and_removed_when_it_closes(
    tmp_path: Path,
) -> None:
    config = NodeConfig(
        folder=str(tmp_path / "a"), name="measured", create=True, lease=f"file://{tmp_path}/lease", poll_seconds=0.02
    )
    with RunningNode(config) as running:
        assert running.wait_until(lambda: running.why_not_ready() is None, WAIT)
        with RemoteLog(running.url) as log:
            log.append(pa.table({"value": pa.array([b"1", b"2"], pa.binary())}))
            log.slots.create("billing", 1)
            log_id = str(log.log_id)
        assert sample("strandline_node_condition", node="measured", condition="leading") == 1
        assert sample("strandline_node_condition", node="measured", condition="following") == 0
        assert sample("strandline_term", node="measured") == 1
        assert sample("strandline_durable_offset", node="measured") == 2
        assert sample("strandline_committed_offset", node="measured") == 2
        assert 0 <= sample("strandline_lease_age_seconds", node="measured") < 15
        assert sample("strandline_disk_free_bytes", node="measured") > 0
        of_slot = {"log": log_id, "slot": "billing"}
        assert running.wait_until(lambda: sample("strandline_slot_lag_records", **of_slot) == 1, WAIT)
        assert sample("strandline_slot_pins", **of_slot) == 1
        assert sample("strandline_floor", log=log_id) == 1
        assert sample("strandline_next_offset", log=log_id) == 2
    assert running.why_not_ready() == "it is stopping"
    assert sample("strandline_durable_offset", node="measured") is None
    assert sample("strandline_node_condition", node="measured", condition="leading") is None
    assert sample("strandline_slot_lag_records", **of_slot) is None
    assert sample("strandline_floor", log=log_id) is None


def test_calls_are_counted_by_outcome_and_failed_authentications_among_them(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("app client a-secret-that-is-long-enough\n")
    (tmp_path / "tokens").chmod(0o600)
    config = NodeConfig(
        folder=str(tmp_path / "a"),
        name="a",
        lead=True,
        create=True,
        server=ServerSecurity.load(tokens=str(tmp_path / "tokens")),
    )

    def outcomes(outcome: str) -> float:
        return sample("strandline_calls_total", method="DoAction", outcome=outcome) or 0.0

    with RunningNode(config) as running:
        before = outcomes("unauthenticated"), outcomes("denied"), outcomes("ok")
        with RemoteLog(running.url) as stranger, pytest.raises(Fenced):
            stranger.bounds()
        with RemoteLog(running.url, security=ClientSecurity(token="a-secret-that-is-long-enough")) as client:
            client.bounds()
            with pytest.raises(Fenced):
                client.promote()
    assert outcomes("unauthenticated") > before[0]
    assert outcomes("denied") > before[1]
    assert outcomes("ok") > before[2]


def is_ready(port: int) -> bool:
    try:
        return answer(port, "/readyz") == (200, "ok\n")
    except URLError:  # it does not listen yet
        return False


@pytest.mark.parametrize("command", ["trim", *(pytest.param(each, marks=pytest.mark.matrix) for each in OTHERS)])
def test_commands_that_run_on_serve_their_state_and_say_when_they_stop(
    command: str, tmp_path: Path, start: Start
) -> None:
    log = sl.open(f"file://{tmp_path}/log", create=True)
    with log.producer() as producer:
        producer.append(key=b"k", value=b"v")
    if command == "tier":
        sl.tier.attach(log)
    port = free_port()
    arguments = {
        "follow": ("follow", tmp_path / "log", f"sqlite:{tmp_path}/t.db#orders"),
        "ingest": ("ingest", tmp_path / "log", f"file://{tmp_path}/copy", "--follow"),
        "trim": ("trim", tmp_path / "log", "--every", "1h"),
        "tier": ("tier", "serve", tmp_path / "log"),
        "node": ("node", "run", tmp_path / "a", "--name", "a", "--lead", "--create", "--listen", "127.0.0.1:0"),
    }
    process = start("--log-format", "json", *arguments[command], "--metrics", f"127.0.0.1:{port}")
    deadline = time.monotonic() + WAIT
    while not is_ready(port):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    measured = {"trim": "strandline_next_offset{", "node": "strandline_disk_free_bytes{"}
    measured |= dict.fromkeys(("follow", "ingest"), "strandline_pipeline_lag_records{")
    assert measured.get(command, "strandline_build_info{") in answer(port, "/metrics")[1]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT)
    lines = [json.loads(line) for line in said.splitlines()]
    assert "SIGTERM: stopping." in [line["message"] for line in lines]
    assert {line["level"] for line in lines} == {"INFO"}
    assert process.returncode == 0
