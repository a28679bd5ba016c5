"""The PostgreSQL that benchmarks stand beside: it is a real one, it is durable, and it leaves nothing behind."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import PostgresServer
from tests.servers import NoServer, started

LASTING = "from tests.postgres import PostgresServer as P; s = P(); s.start(); print(s.pid, flush=True); input()"


def _started(folder: Path) -> PostgresServer:
    return started(PostgresServer(within=str(folder)))


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with _started(tmp_path_factory.mktemp("tables")) as server:
        yield server


def test_a_commit_is_answered_only_when_it_is_on_the_disk(postgres: PostgresServer) -> None:
    names = ("fsync", "synchronous_commit", "full_page_writes")
    assert {name: postgres.query(f"SHOW {name}") for name in names} == dict.fromkeys(names, "on")


def test_no_setting_of_its_write_ahead_log_is_weakened(postgres: PostgresServer) -> None:
    changed = postgres.query("SELECT name FROM pg_settings WHERE name LIKE 'wal_%' AND setting <> boot_val")
    assert changed in {"", "wal_buffers"}  # this one is counted from the memory


def test_inserted_rows_are_read_back_and_stored_in_the_data_folder(postgres: PostgresServer) -> None:
    postgres.query("CREATE TABLE kept (id bigint PRIMARY KEY, payload bytea)")
    postgres.query("INSERT INTO kept VALUES (7, 'seven')")
    assert postgres.query("SELECT id, encode(payload, 'escape') FROM kept") == "7|seven"
    assert postgres.query("SHOW data_directory") == postgres.data
    assert "tables" in postgres.data
    assert postgres.query("SELECT inet_server_port()") == ""  # through its socket


def test_root_does_not_run_the_server_as_root(postgres: PostgresServer) -> None:
    assert Path(postgres.data).stat().st_uid == (os.geteuid() or 65534)


def test_a_wrong_statement_is_an_error_that_says_why(postgres: PostgresServer) -> None:
    with pytest.raises(RuntimeError, match="syntax error"):
        postgres.query("SELEKT 1")


def test_a_stopped_server_ends_its_streams_and_leaves_nothing(tmp_path: Path) -> None:
    with _started(tmp_path) as server:
        folder, port = server.folder, server.port
        sleeper = [server.tool("psql"), "--command", "SELECT pg_sleep(600)"]
        client = subprocess.Popen(sleeper, env=server.environment, stderr=subprocess.PIPE)
        try:
            while server.query("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'") == "0":
                assert client.poll() is None
            server.stop()
            client.wait(120)
        finally:
            client.kill()
            _, said = client.communicate()
        # In so many words: a server that was killed, because it waited too long for its clients, says nothing of it.
        assert b"terminating connection due to administrator command" in said
        assert server.pid is None
    assert not Path(folder).exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)


@pytest.mark.matrix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_a_server_ends_with_the_process_that_started_it(postgres: PostgresServer, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", LASTING],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        watched = os.pidfd_open(int(starter.stdout.readline()))
    finally:
        starter.kill()
        starter.communicate()
    try:
        # The descriptor of a process can be read from once the process has ended.
        assert select.select([watched], [], [], 30.0)[0]
    finally:
        os.close(watched)


@pytest.mark.matrix
def test_a_folder_whose_path_is_too_long_for_a_socket_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with _started(tmp_path) as server:
        assert server.query("SELECT inet_server_port()") == str(server.port)


def test_a_server_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.servers.HOME", tmp_path)
    with pytest.raises(NoServer, match=r"^no server: postgres .*make services"):
        PostgresServer().start()


def test_root_without_a_way_to_drop_its_privileges_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "postgres").touch()
    monkeypatch.setattr("tests.servers.HOME", tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoServer, match=r"^no server: postgres does not run as root"):
        PostgresServer().start()
