"""``strandline serve`` over HTTP: appends, a catch-up read, and a record that reaches a thousand idle live readers.

The server is a process of its own, started as a user starts it; beside it runs a bare application on the same HTTP
library, which counts the bytes that it is sent, or sends a file. Clients are sockets with requests that were made
before: they parse nothing but where an answer ends. Ratios are of processor seconds of the two servers, side by side in
turns, since other programs on the machine move them less than times; times are shown beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import pyarrow as pa

import strandline as sl
from benchmarks.harness import Result, scratch
from strandline.model.records import RECORD_SCHEMA, record_batch

_ROUNDS: Final = 5
_CONNECTIONS: Final = 4
_RECORDS: Final = 400_000
"""Records that each side of a round appends."""
_LINES: Final = 1_000
"""Records of a request with JSON lines."""
_ROWS: Final = 20_000
"""Records of a request with Arrow."""
_VALUE: Final = 100
_READERS: Final = 1_000
_NEWS: Final = 20
"""Records that are sent to the idle readers, one after another."""
_PIECE: Final = 64 << 10


# --- servers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A server that is a process of its own."""

    process: psutil.Process
    port: int

    def spent(self) -> float:
        """Processor seconds until now."""
        times = self.process.cpu_times()
        return times.user + times.system

    @property
    def resident(self) -> int:
        return int(self.process.memory_info().rss)


@contextlib.contextmanager
def _process(command: Sequence[str], port_of: Callable[[str], int]) -> Iterator[Served]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        if process.stdout is None:
            raise AssertionError
        yield Served(psutil.Process(process.pid), port_of(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def _strandline(folder: str, content_type: str = "text/plain") -> Iterator[Served]:
    """``strandline serve`` with one write-ahead log."""
    with sl.open(f"wal://{folder}/log", create=True, content_type=content_type):
        pass
    file = Path(folder, "strandline.toml")
    file.write_text(
        f'[process]\nfolder = "{folder}/own"\n[http]\nlisten = "127.0.0.1:0"\n'
        f'[logs.log]\naddress = "wal://{folder}/log"\n'
    )
    with _process(
        ["-m", "strandline.cli", "serve", str(file)], lambda line: int(line.rstrip().rstrip(".").rpartition(":")[2])
    ) as served:
        while _ask(served.port, b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") != 200:
            time.sleep(0.05)
        yield served


def _bare(path: str) -> None:
    """A server of the same library: counts the bytes of a body, or sends a file."""
    import uvicorn

    counted = 0
    size = str(Path(path).stat().st_size).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal counted
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            while True:
                message = await receive()
                counted += len(message["body"])
                if not message["more_body"]:
                    break
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
        with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 - blocking is the cheapest way
            while piece := file.read(_PIECE):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    asyncio.run(server.serve(sockets=[listening]))


# --- clients ---------------------------------------------------------------------------------------------------


def _request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Connection:
    """A connection that stays open: sends whole requests, and looks only for the end of each answer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._room = bytearray(1 << 20)
        self.head = b""

    def ask(self, request: bytes) -> int:
        """Status and length of an answer: its headers are kept, its body is dropped."""
        self._socket.sendall(request)
        found = b""
        while b"\r\n\r\n" not in found:
            found += self._received()
        self.head, _, body = found.partition(b"\r\n\r\n")
        self.head = self.head.lower()
        status = int(self.head[9:12])
        if not 200 <= status < 300:
            raise RuntimeError(f"a server of the benchmark answered {found[:500]!r}")
        length = int(self.header(b"content-length") or 0)
        left = length - len(body)
        while left > 0:
            taken = self._socket.recv_into(self._room, min(left, len(self._room)))
            if not taken:
                raise ConnectionError
            left -= taken
        return length

    def _received(self) -> bytes:
        part = self._socket.recv(_PIECE)
        if not part:
            raise ConnectionError
        return part

    def header(self, name: bytes) -> bytes | None:
        _, found, rest = self.head.partition(b"\r\n" + name + b": ")
        return rest.partition(b"\r\n")[0] if found else None

    def close(self) -> None:
        self._socket.close()


def _ask(port: int, request: bytes) -> int:
    connection = _Connection(port)
    try:
        connection.ask(request)
    except RuntimeError:
        pass
    finally:
        connection.close()
    return int(connection.head[9:12])


def _append(port: int, request: bytes, times: int) -> None:
    """Send a request again and again, over several connections at once."""
    failed: list[BaseException] = []

    def send() -> None:
        connection = _Connection(port)
        try:
            for _ in range(times // _CONNECTIONS):
                connection.ask(request)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# --- sides in turns --------------------------------------------------------------------------------------------


@dataclass
class Side:
    """What one side did: processor seconds of its server and of all processes, and how long it took, by round."""

    server: list[float]
    everything: list[float]
    took: list[float]

    def per_record(self, records: int) -> str:
        """The processor time of all processes, that of the server, and the rate."""
        return (
            f"{median(self.everything) / records * 1e6:.2f} ({median(self.server) / records * 1e6:.2f}) µs, "
            f"{records / median(self.took):,.0f}/s"
        )


def _in_turns(sides: Sequence[tuple[Callable[[], float], Callable[[], object]]]) -> list[Side]:
    """Each side is what its server has spent, and what to do. The first round warms up; the order alternates."""
    found = [Side([], [], []) for _ in sides]
    for round_ in range(_ROUNDS + 1):
        for index in range(len(sides)) if round_ % 2 else reversed(range(len(sides))):
            spent, act = sides[index]
            before, own, began = spent(), time.process_time(), time.perf_counter()
            act()
            took, own, server = time.perf_counter() - began, time.process_time() - own, spent() - before
            if round_:
                found[index].took.append(took)
                found[index].server.append(server)
                found[index].everything.append(server + own)
    return found


def _compared(name: str, ours: Side, theirs: Side, records: int, goal: str, beside: str) -> Result:
    ratio = median(theirs.server) / median(ours.server)
    return Result(name, ratio, "of it", goal, f"{ours.per_record(records)}; {beside}: {theirs.per_record(records)}")


# --- what is measured ------------------------------------------------------------------------------------------


def _values(count: int) -> list[bytes]:
    return [b"%010d" % number + b"v" * (_VALUE - 10) for number in range(count)]


def _lines(count: int) -> bytes:
    return b"".join(b'{"value":"%b"}\n' % value for value in _values(count))


def _batch(count: int) -> pa.RecordBatch:
    return record_batch(timestamps=[1] * count, ops=[0] * count, keys=[None] * count, values=_values(count))


def _arrow(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RECORD_SCHEMA) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _appends(lines: int = _LINES) -> list[Result]:
    """JSON lines beside a bare endpoint that is sent the same requests."""
    request = _request("POST", "/v1/stream/log", _lines(lines), Content_Type="application/x-ndjson")
    times = max(_CONNECTIONS, min(_RECORDS, lines * 2_000) // lines)
    records = times // _CONNECTIONS * _CONNECTIONS * lines
    with scratch() as folder, _strandline(folder) as ours, _process(["-m", __spec__.name, folder], int) as bare:
        our, their = _in_turns(
            [(served.spent, lambda served=served: _append(served.port, request, times)) for served in (ours, bare)]
        )
    what = f"{lines} a request"
    return [
        _compared(f"append_json_lines, {what}, beside a bare endpoint", our, their, records, ">= 0.5", "bare"),
        Result(f"append_json_lines, {what}", records / median(our.took), "records/s", ">= 150000"),
    ]


def _arrow_appends() -> list[Result]:
    """Arrow over HTTP beside ``append_batch`` of the same batches by as many threads, in this process."""
    batch, times = _batch(_ROWS), 100
    request = _request("POST", "/v1/stream/log", _arrow(batch), Content_Type="application/vnd.apache.arrow.stream")
    records = times * _ROWS

    def directly() -> None:
        def send() -> None:
            for _ in range(times // _CONNECTIONS):
                producer.append_batch(batch).result()

        threads = [threading.Thread(target=send) for _ in range(_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with (
        scratch() as folder,
        _strandline(folder) as ours,
        sl.open(f"wal://{folder}/direct", create=True) as log,
        log.producer(linger=0.0) as producer,
    ):
        our, their = _in_turns(
            [(ours.spent, lambda: _append(ours.port, request, times)), (time.process_time, directly)]
        )
    their.everything = their.server
    return [_compared("append_arrow, beside append_batch", our, their, records, ">= 0.4", "append_batch")]


def _catch_up() -> list[Result]:
    """A read from the beginning to the end, beside the same bytes as a file."""
    count, lines = 1_000_000, 10_000

    def read() -> int:
        connection, offset, size = _Connection(ours.port), b"-1", 0
        while True:
            size += connection.ask(_request("GET", f"/v1/stream/log?offset={offset.decode()}"))
            offset = connection.header(b"stream-next-offset") or b""
            if connection.header(b"stream-up-to-date"):
                connection.close()
                return size

    def download() -> int:
        connection = _Connection(bare.port)
        try:
            return connection.ask(_request("GET", "/"))
        finally:
            connection.close()

    with scratch() as folder, _strandline(folder) as ours:
        with Path(folder, "file").open("wb") as file:
            file.writelines(b"".join(_values(lines)) for _ in range(count // lines))
        request = _request("POST", "/v1/stream/log", _lines(lines), Content_Type="application/x-ndjson")
        _append(ours.port, request, count // lines)
        with _process(["-m", __spec__.name, f"{folder}/file"], int) as bare:
            if read() != download():
                raise AssertionError
            our, their = _in_turns([(ours.spent, read), (bare.spent, download)])
    return [_compared("catch_up, beside serving a file", our, their, count, ">= 0.5", "file")]


class _Readers:
    """Event streams at the end of a log, which wait for records."""

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        for _ in range(count):
            reader = socket.create_connection(("127.0.0.1", port))
            reader.sendall(_request("GET", "/v1/stream/log?offset=now&live=sse"))
            self._sockets.append(reader)
            self._selector.register(reader, selectors.EVENT_READ)
        self.all_have(b"upToDate")

    def all_have(self, text: bytes) -> float:
        """Wait until each reader has received a text; returns when the last one had."""
        waiting = dict.fromkeys(self._sockets, b"")
        while waiting:
            ready = self._selector.select(60)
            if not ready:
                raise TimeoutError(f"{len(waiting)} readers did not hear")
            for key, _ in ready:
                reader: Any = key.fileobj
                part = reader.recv(_PIECE)
                if not part:
                    raise ConnectionError
                if reader in waiting:
                    waiting[reader] += part
                    if text in waiting[reader]:
                        del waiting[reader]
        return time.perf_counter()

    def close(self) -> None:
        for reader in self._sockets:
            reader.close()
        self._selector.close()


def _idle_readers() -> list[Result]:
    """Memory of the server with idle readers, and from sending a record until all of them have it."""
    with scratch() as folder, _strandline(folder) as served:
        writer = _Connection(served.port)
        _Readers(served.port, 1).close()  # what is imported with the first reader is imported once
        writer.ask(_request("POST", "/v1/stream/log", b"warm", Content_Type="text/plain"))
        alone = served.resident
        readers = _Readers(served.port, _READERS)
        idle = served.resident
        spent = served.spent()
        waits = []
        for number in range(_NEWS):
            text = b"news %d;" % number
            request = _request("POST", "/v1/stream/log", text, Content_Type="text/plain")
            began = time.perf_counter()
            writer.ask(request)
            waits.append((readers.all_have(b"data:" + text) - began) * 1e3)
        spent = (served.spent() - spent) / _NEWS / _READERS
        busy = served.resident
        readers.close()
        writer.close()
    each = f"{(idle - alone) / _READERS / 1e3:.0f} kB a reader; {alone / 1e6:.0f} MB without, {busy / 1e6:.0f} MB later"
    heard = f"{spent * 1e6:.0f} µs of processor time of the server a reader; {max(waits):,.0f} ms at most"
    return [
        Result(f"{_READERS} idle readers, memory of the server", idle / 1e6, "MB", "<= 150", each),
        Result(f"{_READERS} idle readers, all have a record", median(waits), "ms", "<= 250", heard),
    ]


def run() -> list[Result]:
    """Measure; about a minute and a half."""
    return [*_appends(), *_arrow_appends(), *_catch_up(), *_idle_readers()]


if __name__ == "__main__":
    _bare(sys.argv[1])
