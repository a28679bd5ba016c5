from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn.server

import strandline as sl
from strandline.serve import server as serve_server
from strandline.serve.api import app as serve_app
from strandline.serve.api.app import served
from strandline.serve.config.changes import PartName
from strandline.serve.config.reading import parse_config
from strandline.serve.opening import access_of
from strandline.serve.parts.states import PartState, Status
from strandline.serve.server import Server
from strandline.storage.env import SYSTEM, Env
from tests.cli.conftest import run, start

__all__ = ["run", "start"]


class Running:
    """A server in this process."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url

    def state(self, section: str, name: str) -> PartState:
        return self.server.part(PartName(section, name)).state

    def lag(self, section: str, name: str) -> int | None:
        lag = self.server.lag_of(PartName(section, name))
        return None if lag is None else lag.records

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition: the test's own limit of time ends what hangs."""
        clock = SYSTEM.clock
        deadline = clock.monotonic() + 120
        while not condition():
            assert clock.monotonic() < deadline, self.server.states()
            clock.sleep(0.02)

    def until_ready(self) -> None:
        self.until(lambda: self.server.why_not_ready() is None)

    def until_works(self, section: str, name: str) -> None:
        self.until(lambda: self.state(section, name).status is Status.RUNNING)

    def ask(self, path: str, *, method: str = "GET", body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """Status and JSON, or text, of a request."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()


Serve = Callable[..., Running]


class _Quick:
    """``asyncio`` for the HTTP library, which looks ten times a second whether it should end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server of this process measure lags, read certificates again and see that it should end, without a wait."""
    monkeypatch.setattr(serve_server, "_LAG_EVERY", 0.2)
    monkeypatch.setattr(serve_app, "REREAD_SECONDS", 0.2)
    monkeypatch.setattr(uvicorn.server, "asyncio", _Quick())


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A server of these settings in this process, in a folder of the test; port 0 by default."""
    monkeypatch.chdir(tmp_path)
    started: list[tuple[Server, Any]] = []

    def serve(text: str, *, env: Env = SYSTEM, environment: dict[str, str] | None = None) -> Running:
        if "[http]" not in text:
            text = f'[http]\nlisten = "127.0.0.1:0"\n{text}'
        settings = parse_config(text, "strandline.toml").settings
        access = access_of(settings, environment or {}, env)
        server = Server(settings, access, str(tmp_path / "own"))
        port = served(settings, server, access)
        url = port.__enter__()
        server.start()
        started.append((server, port))
        return Running(server, url)

    yield serve
    for server, port in started:
        port.__exit__(None, None, None)
        server.stop()


def append(log: Any, *values: bytes) -> None:
    """Append records with a key."""
    with log.producer() as producer:
        for value in values:
            producer.append(key=value, value=value)


@pytest.fixture
def orders(tmp_path: Path) -> Any:
    """An object log that the server finds as ./orders."""
    return sl.open(str(tmp_path / "orders"), create=True)
