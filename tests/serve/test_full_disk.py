"""A disk that is really full: appends are refused with what to do, reads go on, and it heals without a restart."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Serve

BODY = b"x" * 200_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


LOG = '[logs.pay]\naddress = "wal://{disk}/pay"\ncreate = true\n'
STREAMS = '[streams]\nroot = "wal://{disk}/streams"\n'


@pytest.mark.parametrize("text", [LOG, STREAMS], ids=["log", "stream"])
def test_a_full_disk_refuses_appends_and_reads_go_on_until_there_is_room(
    small_disk: Path, serve: Serve, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(text.format(disk=small_disk))
    running.until_ready()
    path = "/v1/stream/pay"

    def appended() -> tuple[int, Any]:
        return running.ask(path, method="POST", body=BODY)

    if text is STREAMS:
        assert running.ask(path, method="PUT", body=b"")[0] == 201
    assert appended()[0] == 204
    ballast = fill(small_disk)

    def is_only_read() -> None:
        status, refused = appended()
        assert (status, refused["status"]) == (507, 507)
        assert "Make room there: the log then takes appends again by itself." in refused["detail"]
        assert str(small_disk) not in refused["detail"]
        assert running.ask(f"{path}?offset=-1") == (200, BODY.decode())

    for _ in range(5):
        is_only_read()
    if text is LOG:
        running.until(lambda: running.state("logs", "pay").failures > 1)
        assert running.ask("/v1/logs/pay")[1]["next"] == 1
    else:
        running.until(lambda: "opened again and again" in caplog.text)
    is_only_read()
    ballast.unlink()
    running.until(lambda: appended()[0] == 204)
    assert len(running.ask(f"{path}?offset=-1")[1]) == 2 * len(BODY), "what was refused is not in it"
    assert running.ask(path, method="POST", body=b"more")[0] == 204
