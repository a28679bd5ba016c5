"""The server as a process: killed, stopped, started twice, supervised, and read again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.serve.config.settings import HttpSection
from strandline.storage.env import SYSTEM
from tests.cli.conftest import Run, Start
from tests.serve.conftest import append
from tests.serve.test_parts import LOG, TABLE, rows
from tests.servers import free_port


def until(condition: Callable[[], object]) -> None:
    deadline = SYSTEM.clock.monotonic() + 120
    while not condition():
        assert SYSTEM.clock.monotonic() < deadline
        SYSTEM.clock.sleep(0.05)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def status_of(url: str) -> int:
    """The status of a HEAD request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def file_of(folder: Path, text: str, port: int | None = None) -> str:
    (folder / "s.toml").write_text(f'[http]\nlisten = "127.0.0.1:{port or free_port()}"\n{text}')
    return str(folder / "s.toml")


def address(process: subprocess.Popen[str]) -> str:
    """Where a server that was started says that it is served."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " is served at " in line, line + process.communicate()[1]
    return line.rsplit(" ", 1)[1].strip().rstrip(".")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_killed_at_any_moment_the_tables_are_exact_after_a_restart(start: Start, orders: Any, tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        LOG + f'[logs.pay]\naddress = "wal://{tmp_path}/pay"\ncreate = true\n'
        '[ingest.copy]\nsource = "orders"\ntarget = "pay"\n'
        + TABLE.replace('log = "orders"', 'log = "pay"') + 'slot = "billing"\n',
    )  # fmt: skip
    wanted: list[bytes] = []
    for life in range(3):
        process = start("serve", file)
        address(process)
        for number in range(5):
            values = [f"{life}-{number}-{each}".encode() for each in range(100)]
            append(orders, *values)
            wanted += values
        if life:  # the first life is killed as it comes, the others while the table moves
            until((tmp_path / "t.db").exists)
        process.kill()
        process.wait()
    process = start("serve", file)
    address(process)

    def is_done() -> bool:
        try:
            return (tmp_path / "t.db").exists() and len(rows(tmp_path / "t.db")) >= len(wanted)
        except sqlite3.OperationalError:  # it was killed between the file and its table
            return False

    until(is_done)
    assert rows(tmp_path / "t.db") == wanted
    process.terminate()
    assert process.wait(60) == 0
    assert rows(tmp_path / "t.db") == wanted


def test_sigterm_lets_everything_finish_and_ends_with_status_0(start: Start, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    process = start("serve", file_of(tmp_path, '[process]\ndrain = "60s"\n' + LOG + TABLE))
    url = address(process)
    until(lambda: is_ready(url))
    until(lambda: (tmp_path / "t.db").exists() and rows(tmp_path / "t.db") == [b"1"])
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Stopped." in err
    assert not is_ready(url)


def test_a_second_process_on_one_folder_refuses_and_names_the_first(start: Start, run: Run, tmp_path: Path) -> None:
    process = start("serve", file_of(tmp_path, ""))
    address(process)
    file_of(tmp_path, "")
    done = run("serve", tmp_path / "s.toml")
    assert done.exit_code == 1
    assert f"in use by process {process.pid}, which runs since 20" in done.stderr


def test_a_log_that_another_process_writes_is_not_taken_from_it(start: Start, serve: Any, tmp_path: Path) -> None:
    text = f'[logs.pay]\naddress = "wal://{tmp_path}/pay"\ncreate = true\n'
    process = start("serve", file_of(tmp_path, text))
    url = address(process)
    until(lambda: is_ready(url))
    running = serve(text)
    running.until(lambda: running.state("logs", "pay").error)
    assert f"is open for writing by process {process.pid}" in running.state("logs", "pay").error


def test_a_changed_file_is_applied_by_reload_and_by_sighup(start: Start, run: Run, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    port = free_port()
    file = file_of(tmp_path, LOG, port)
    process = start("serve", file)
    url = address(process)
    until(lambda: is_ready(url))
    file_of(tmp_path, LOG + TABLE, port)
    done = run("config", "reload", file)
    assert (done.exit_code, done.stdout) == (0, "tables.orders is added\n"), done.stderr
    until(lambda: (tmp_path / "t.db").exists() and rows(tmp_path / "t.db") == [b"1"])
    file_of(tmp_path, LOG + TABLE)
    done = run("--json", "config", "reload", file)
    found = json.loads(done.stdout)
    assert found == {"pid": process.pid, "changed": [], "restart": ["[http] is changed: restart the process for that"]}
    file_of(tmp_path, LOG + TABLE + "nonsense = 1\n", port)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 0
    done = run("config", "reload", file)
    assert "nonsense" in done.stderr, "a file with an error is refused before anybody is asked"
    file_of(tmp_path, LOG, port)
    assert "No server of" in run("config", "reload", file).stderr


def test_a_file_that_is_applied_under_load_loses_no_request_of_what_stays(
    start: Start, orders: Any, tmp_path: Path
) -> None:
    """Logs and tables come and go while clients append to a log that stays, and one of them follows it."""
    port = free_port()
    other = '[logs.other]\naddress = "./other"\n'
    sl.open(str(tmp_path / "other"), create=True).close()
    process = start("serve", file_of(tmp_path, LOG, port))
    url = address(process)
    until(lambda: is_ready(url))
    over = threading.Event()
    sent: list[list[str]] = [[], []]

    def write(writer: int) -> None:
        while not over.is_set():
            text = f"{writer}.{len(sent[writer])}"
            request = urllib.request.Request(
                f"{url}/v1/stream/orders", text.encode(), {"Content-Type": "application/octet-stream"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=60) as answer:  # an error ends the thread, and the test fails
                assert answer.status == 204
            sent[writer].append(text)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for added in (other, TABLE, other + TABLE, "", TABLE):
        file_of(tmp_path, LOG + added, port)
        before = len(sent[0])
        process.send_signal(signal.SIGHUP)
        here = 200 if added.startswith(other) else 404
        until(lambda here=here: status_of(f"{url}/v1/stream/other") == here)  # type: ignore[misc]
        until(lambda before=before: len(sent[0]) > before + 3)  # type: ignore[misc]
    assert all(thread.is_alive() for thread in threads)
    over.set()
    for thread in threads:
        thread.join(60)
    found = [value for batch in orders.read() for value in batch.column("value").to_pylist()]
    for writer in range(2):
        assert [value.decode() for value in found if value.startswith(b"%d." % writer)] == sent[writer]
    until(lambda: set(rows(tmp_path / "t.db")) == set(found))


def test_the_supervisor_is_told_when_it_is_ready_alive_and_stopping(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(place))
        listening.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", str(place))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        process = start("serve", file_of(tmp_path, ""))
        assert listening.recv(100) == b"READY=1"
        assert listening.recv(100) == b"WATCHDOG=1"
        process.terminate()
        while (told := listening.recv(100)) == b"WATCHDOG=1":
            pass
        assert told == b"STOPPING=1"
        assert process.wait(120) == 0


def test_log_lines_are_json_if_asked_for(start: Start, orders: Any, tmp_path: Path) -> None:
    process = start("--log-format", "json", "serve", file_of(tmp_path, LOG + 'retention = "consumed"\n'))
    url = address(process)
    until(lambda: is_ready(url))
    process.terminate()
    _, err = process.communicate(timeout=120)
    lines = [json.loads(line) for line in err.splitlines()]
    assert {"strandline.serve"} == {line["logger"] for line in lines if "keeps consumed" in line["message"]}


def test_a_look_at_one_log_without_a_file_stores_nothing(start: Start, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with socket.socket() as busy:
        try:
            busy.bind(HttpSection().listen.place)
        except OSError:
            pytest.skip("the default port is in use")
    process = start("serve", tmp_path / "orders")
    url = address(process)
    until(lambda: is_ready(url))
    with urllib.request.urlopen(f"{url}/v1/logs/orders", timeout=60) as answer:
        assert json.load(answer)["next"] == 1
    process.terminate()
    assert process.wait(120) == 0
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_300_idle_logs_cost_no_thread_and_little_memory(tmp_path: Path) -> None:
    """Memory and threads of a process with 300 logs, each trimmed in rounds, beside one with a single log."""

    def measured(count: int) -> tuple[int, int]:
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            append(sl.open(str(folder / f"l{number}"), create=True), b"1")
        text = "".join(f'[logs.l{n}]\naddress = "{folder}/l{n}"\ntrim = "1s"\n' for n in range(count))
        file = file_of(folder, f'[process]\nfolder = "{folder}/own"\n' + text)
        process = subprocess.Popen(
            [sys.executable, "-m", "strandline.cli", "serve", file], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        try:
            url = address(process)
            until(lambda: is_ready(url))
            until(lambda: trims(url) >= count)
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            return int(fields["VmRSS"].split()[0]), int(fields["Threads"])
        finally:
            process.terminate()
            process.wait()

    def trims(url: str) -> int:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            return sum(
                line.startswith(b'strandline_part_running{part="trim.') and line.endswith(b" 1.0\n") for line in answer
            )

    one, threads_one = measured(1)
    many, threads_many = measured(300)
    each = (many - one) / 299
    print(f"{each:.1f} kB for each log; {threads_one} and {threads_many} threads")
    assert threads_many <= threads_one + 8
    assert each < 100
