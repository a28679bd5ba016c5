"""A real HTTP proxy on loopback that delays, loses, resets and makes up answers: faults over the wire.

``FaultyProxy`` runs in a thread of the test, which tells it what goes wrong. ``latency_proxy`` runs one in a process of
its own, so that a benchmark does not pay for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

_PATIENCE = 120.0
_PIECE = 256 << 10
_LONGEST_HEAD = 64 << 10
_REASONS = {409: "Conflict", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a request: with ``landed`` the server does it first, and its answer is thrown away."""

    kind: Literal["answer", "reset", "hang"]
    landed: bool = False
    status: int = 503
    code: str = "SlowDown"


def answer(status: int, code: str, *, landed: bool = False) -> Fault:
    """An answer that the server did not give, in the form of S3's errors."""
    return Fault("answer", landed, status, code)


def reset(*, landed: bool = False) -> Fault:
    """The connection breaks."""
    return Fault("reset", landed)


def hang(*, landed: bool = False) -> Fault:
    """No answer ever comes, until the client hangs up."""
    return Fault("hang", landed)


@dataclass(slots=True)
class Exchange:
    """One request as the proxy saw it, the status that the server gave (None if it was not asked), and the fault."""

    method: str
    target: str
    headers: dict[str, str]
    status: int | None = None
    fault: Fault | None = None


@dataclass(slots=True)
class _Script:
    fault: Fault
    methods: tuple[str, ...]
    containing: str
    left: int


@dataclass(slots=True)
class Weather:
    """How likely each fault is, per request, drawn from a seed."""

    likely: dict[Fault, float]
    seed: int = 0
    spares_conditional: bool = False
    """Whether conditional writes, which nobody may repeat blindly, are left alone."""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def draw(self, exchange: Exchange) -> Fault | None:
        """The next request's fault."""
        if self.spares_conditional and not exchange.headers.keys().isdisjoint(("if-match", "if-none-match")):
            return None
        at = self.chance.random()
        for fault, likelihood in self.likely.items():
            at -= likelihood
            if at < 0:
                return fault
        return None


class FaultyProxy:
    """Passes requests on to a server, keeping connections alive, unless told otherwise. A context manager."""

    def __init__(self, host: str, port: int, *, latency: float = 0.0, port_here: int = 0) -> None:
        self._server = (host, port)
        self._socket = socket.create_server(("127.0.0.1", port_here), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.latency = latency
        """Seconds that every request waits before it is passed on; may be changed at any time."""
        self.weather: Weather | None = None
        """Random faults; a script goes before them."""
        self.seen: list[Exchange] = []
        """Every request in the order in which it came; not kept if ``remember`` is off."""
        self.remember = True
        self._scripts: list[_Script] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="faulty-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """What a client takes for the server's address."""
        return f"http://127.0.0.1:{self.port}"

    def fail_next(self, fault: Fault, *methods: str, containing: str = "", times: int = 1) -> None:
        """Do this to the next ``times`` requests of these methods whose target contains the given text."""
        with self._lock:
            self._scripts.append(_Script(fault, methods, containing, times))

    def heal(self) -> None:
        """End every fault, and forget what was seen."""
        with self._lock:
            self._scripts.clear()
            self.seen.clear()
            self.weather, self.latency = None, 0.0

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until the proxy has seen something; False if that takes too long."""
        until = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # --- inside: all of it in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, sock=self._socket, limit=_LONGEST_HEAD)
        )
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
            self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        # Without this the small pieces of an answer wait for each other's acknowledgements, 40 ms each time.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _Line(self, reader, writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await line.exchange():
                    pass
        finally:
            self._connections.discard(task)
            line.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection to the server."""
        return await asyncio.open_connection(*self._server, limit=_LONGEST_HEAD)

    def note(self, exchange: Exchange) -> Fault | None:
        """Remember a request, and decide what happens to it."""
        with self._lock:
            if self.remember:
                self.seen.append(exchange)
            for script in self._scripts:
                fits = not script.methods or exchange.method in script.methods
                if script.left and fits and script.containing in exchange.target:
                    script.left -= 1
                    exchange.fault = script.fault
                    return script.fault
            exchange.fault = self.weather.draw(exchange) if self.weather else None
            return exchange.fault


class _Line:
    """One client's connection, and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultyProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self) -> bool:
        """One request and its answer; whether another may follow on this connection."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, headers = _parse(head)
        method, target, _ = first.split(" ", 2)
        seen = Exchange(method, target, headers)
        fault = self._proxy.note(seen)
        if self._proxy.latency:
            await asyncio.sleep(self._proxy.latency)
        if fault is None or fault.landed:
            alive = await self._pass_on(seen, head, silent=fault is not None)
            if fault is None:
                return alive
        elif fault.kind == "reset":
            return self._hang_up()
        else:
            await _copy_body(self._reader, headers, None)
        if fault.kind == "reset":
            return self._hang_up()
        if fault.kind == "hang":
            await self._reader.read(1)  # ends when the client does
            return False
        self._writer.write(_made_up(fault, method))
        await self._writer.drain()
        return True

    async def _pass_on(self, seen: Exchange, head: bytes, *, silent: bool) -> bool:
        # A connection that the server has given up is replaced before anything is sent: sending a request twice
        # would be a fault of ours, not of the line.
        if self._server is None or self._server[0].at_eof():
            self._close_server()
            self._server = await self._proxy.connect()
        reader, writer = self._server
        writer.write(head)
        await _copy_body(self._reader, seen.headers, writer)
        head = await reader.readuntil(b"\r\n\r\n")
        first, headers = _parse(head)
        seen.status = int(first.split(" ", 2)[1])
        out = None if silent else self._writer
        if out is not None:
            out.write(head)
        ends = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
        if seen.method != "HEAD" and seen.status not in (204, 304):
            await _copy_body(reader, headers, out, to_the_end=not ends)
        else:
            ends = True
        return ends and "close" not in headers.get("connection", "").lower()

    def _hang_up(self) -> bool:
        raw = self._writer.get_extra_info("socket")
        # Closing with a linger of zero sends a reset rather than a polite end.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        return False

    def _close_server(self) -> None:
        if self._server is not None:
            self._server[1].transport.abort()
            self._server = None

    def close(self) -> None:
        """End both connections."""
        self._close_server()
        self._writer.close()


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


async def _copy_body(
    source: asyncio.StreamReader,
    headers: dict[str, str],
    target: asyncio.StreamWriter | None,
    *,
    to_the_end: bool = False,
) -> None:
    if "chunked" in headers.get("transfer-encoding", ""):
        size = 1
        while size:
            line = await source.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if target is not None:
                target.write(line)
            await _copy(source, size + 2, target)
    else:
        await _copy(source, None if to_the_end else int(headers.get("content-length", "0")), target)
    if target is not None:
        await target.drain()


async def _copy(source: asyncio.StreamReader, count: int | None, target: asyncio.StreamWriter | None) -> None:
    """Copy ``count`` bytes, or all if it is None."""
    while count != 0:
        piece = await source.read(_PIECE if count is None else min(count, _PIECE))
        if not piece:
            if count is None:
                return
            raise ConnectionResetError
        if count is not None:
            count -= len(piece)
        if target is not None:
            target.write(piece)
            await target.drain()


def _made_up(fault: Fault, method: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>made up by a test</Message></Error>"
    head = f"HTTP/1.1 {fault.status} {_REASONS.get(fault.status, 'Odd')}\r\ncontent-type: application/xml\r\n"
    length = f"content-length: {len(body)}\r\n\r\n"
    return (head + length + ("" if method == "HEAD" else body)).encode()


@contextlib.contextmanager
def latency_proxy(host: str, port: int, latency: float) -> Iterator[str]:
    """The endpoint of a proxy in a process of its own, which holds back every request for ``latency`` seconds."""
    command = [sys.executable, "-m", "tests.proxy", host, str(port), str(latency)]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            assert endpoint, "The proxy did not start."
            yield endpoint
        finally:
            process.kill()


def _main() -> None:
    parser = argparse.ArgumentParser(description="A proxy that holds back every request.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("latency", type=float)
    arguments = parser.parse_args()
    with FaultyProxy(arguments.host, arguments.port, latency=arguments.latency) as proxy:
        proxy.remember = False
        print(proxy.endpoint, flush=True)
        sys.stdin.read()  # ends with whoever started this, however that ends


if __name__ == "__main__":
    _main()
