"""One node as a process, for tests that attack it: is it alive, does it serve, and how much memory it took."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.flight as fl

from strandline.formats.json.fields import write_fields
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity
from tests.node.processes import ClusterOfProcesses, Nest

MIB = 1 << 20
ONE = pa.table({"value": pa.array([b"one"], pa.binary())})


class Victim:
    """A primary without replicas, by default as ``strandline node run --lead`` starts it: without credentials."""

    def __init__(self, nest: Nest, folder: Path, *, token: str | None = None, **options: Any) -> None:
        """Start it, and wait until it serves. ``token`` is one that it knows, for who looks after it."""
        alone = {"lease": None, "lead": True, "create": True, "policy": "local", "nodes": {}}
        self.folder = folder
        self._cluster = ClusterOfProcesses(nest, folder, names="a", **alone, **options)
        self._cluster.start("a")
        self.pid = self._cluster.pid("a")
        self.url = f"grpc://127.0.0.1:{self._cluster.port('a')}"
        self.security = None if token is None else ClientSecurity(token=token)
        self.base = self.peak()

    def connect(self, **options: Any) -> RemoteLog:
        """A well-behaved client."""
        return RemoteLog(self.url, security=self.security, **{"timeout": 10.0, **options})

    def act(self, action: str, fields: dict[str, Any] | bytes, *, token: str | None = None) -> list[bytes]:
        """An action as anybody can send it."""
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        options = fl.FlightCallOptions(timeout=10, headers=headers)
        body = fields if isinstance(fields, bytes) else write_fields(fields)
        with fl.connect(self.url) as client:
            answers = client.do_action(fl.Action(action, body), options)
            return [answer.body.to_pybytes() for answer in answers]

    def check_serves(self) -> None:
        """It is the same process, which takes an append and gives it back."""
        os.kill(self.pid, 0)
        with self.connect() as log:
            receipt = log.append(ONE, timeout=20).ensure()
            assert log.bounds().next == receipt.first + 1
            assert log.status().condition == "leading"

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so."""
        self._cluster.until(condition, what)

    @property
    def data(self) -> Path:
        """The folder of its log."""
        return Path(self._cluster.data("a"))

    def resident(self) -> int:
        """How much memory it has now, in bytes."""
        return self._status("VmRSS")

    def peak(self) -> int:
        """The most memory that it ever had, in bytes."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        """Count the peak from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, line: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{line}:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()
