"""A node's calls, against a real node process: what no Flight client would send, over a connection made of bytes.

The node must go on serving, write no trace of an unexpected error, and stay within its memory.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from strandline.formats.node.ticket import FeedTicket, FileTicket, ReadTicket, ReportTicket, encode_ticket
from strandline.formats.node.wire import Advance, encode_advance
from strandline.model.cursor import Cursor
from strandline.model.records import RECORD_SCHEMA
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.server.actions import ACTIONS
from tests.formats.forging import some_records
from tests.fuzz.mutation import damage, in_place, json_damage, times
from tests.fuzz.targets import Target, Try
from tests.node.flight.raw_grpc import RawGrpc, Refused, action, field, flight_data, message_of

_NODE: Final = """
import sys, signal, time, logging
from strandline.node.running import NodeConfig, RunningNode
logging.basicConfig(level=logging.WARNING)
told = []
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
with RunningNode(NodeConfig(folder=sys.argv[1], name="a", lead=True, create=True)) as node:
    print(node.server.port, flush=True)
    while not told and node.failure is None:
        time.sleep(0.2)
    sys.exit(0 if node.failure is None else 3)
"""
_START: Final = 120.0
_WAIT: Final = 0.4
"""So long an answer is waited for: streams that follow the log have no end."""
_MEMORY: Final = 1 << 30
_OFTEN: Final = 20
_METHODS: Final = (
    "DoGet", "DoAction", "DoPut", "DoExchange", "GetFlightInfo", "GetSchema", "ListFlights", "ListActions",
    "Handshake", "PollFlightInfo", "None",
)  # fmt: skip


# --- what is sent ----------------------------------------------------------------------------------------------


def _case(method: str, *messages: bytes) -> bytes:
    return json.dumps({"method": method, "messages": [message.hex() for message in messages]}).encode()


def _hostile_json(chance: random.Random, *seeds: dict[str, Any]) -> bytes:
    good = json.dumps(chance.choice(seeds)).encode()
    if chance.random() < 0.3:
        return good
    if chance.random() < 0.8:
        return json_damage(good, chance)
    data = bytearray(good)
    damage(data, chance, good, is_text=True)
    return bytes(data)


_LOG: Final = str(UUID(int=7)).encode()
"""Stands for the log's id, which is known only when the node runs."""
_CURSOR: Final = str(Cursor(UUID(int=7), 0))
_BODIES: Final = (
    {},
    {"name": "b", "term": 1},
    {"name": "b", "term": 0, "region": "north"},
    {"name": "b", "term": 1, "since": _CURSOR},
    {"name": "b", "term": 1, "kind": "strandline-wal"},
    {"name": "b", "term": 1, "cursor": _CURSOR},
    {"name": "b", "term": 1, "keep_slot": True},
    {"name": "b", "term": 1, "members_term": 1, "members_number": 3},
)
_CHANGES: Final = (
    {"change": "add", "name": "b", "url": "grpc://127.0.0.1:1", "force": True},
    {"change": "remove", "name": "b", "force": False},
    {"change": "policy", "policy": "quorum(a)", "force": True},
    {"change": "policy", "policy": "ack_n(1) and regions(eu=1)"},
    {"change": "cancel", "term": 1, "number": 3},
)
_CHANGE: Final = "change-members"
_TICKETS: Final = tuple(
    json.loads(encode_ticket(ticket))
    for ticket in (
        ReadTicket(),
        ReadTicket(None, 3, columns=("offset", "value")),
        ReadTicket(follow=True),
        FeedTicket("b", 1, Cursor(UUID(int=7), 0)),
        ReportTicket("b"),
        FileTicket("b", 1, "s", "data/x", 0, 100),
    )
)
_COMMANDS: Final = ({}, {"writer": UUID(int=9).hex, "number": 1}, {"policy": "local"}, {"timeout": 1.0})


def _action(chance: random.Random) -> bytes:
    name = chance.choice([*ACTIONS, *ACTIONS, *[_CHANGE] * 8, "", "x" * 300, "\0"])
    return _case("DoAction", action(name, _hostile_json(chance, *(_CHANGES if name == _CHANGE else _BODIES))))


def _ticket(chance: random.Random) -> bytes:
    ticket = _hostile_json(chance, *_TICKETS)
    method = chance.choice(["DoGet", "GetFlightInfo", "GetSchema"])
    if method == "DoGet":
        return _case(method, field(1, ticket))
    return _case(method, b"\x08\x02" + field(2, ticket))


def _batches(chance: random.Random) -> list[tuple[bytes, bytes]]:
    batch = some_records(chance.choice([1, 5, 40]))
    if chance.random() < 0.3:
        batch = pa.RecordBatch.from_arrays([batch.column("value"), pa.nulls(batch.num_rows)], ["value", "key"])
    told = message_of(batch.schema if chance.random() < 0.9 else RECORD_SCHEMA)
    return [told, message_of(batch), message_of(batch)][: chance.choice([1, 2, 2, 3])]


def _messages(chance: random.Random, command: bytes) -> list[bytes]:
    messages = []
    for place, (header, body) in enumerate(_batches(chance)):
        new_header, new_body = bytearray(header), bytearray(body)
        # A damaged schema is noticed before anything else is looked at, and a message that was cut by Arrow itself.
        for _ in range(times(chance) if chance.random() < (0.6 if place else 0.05) else 0):
            part = new_header if chance.random() < 0.6 or not new_body else new_body
            if chance.random() < 0.8:
                in_place(part, chance)
            else:
                damage(part, chance, header)
        note = chance.choice([b"", encode_advance(Advance(1, 2, 3, 4, 5)), chance.randbytes(20)])
        messages.append(
            flight_data(bytes(new_header), bytes(new_body), command=None if place else command, metadata=note)
        )
    return messages


def _put(chance: random.Random) -> bytes:
    command = b"{}" if chance.random() < 0.7 else _hostile_json(chance, *_COMMANDS)
    return _case("DoPut", *_messages(chance, command))


def _exchange(chance: random.Random) -> bytes:
    return _case("DoExchange", *_messages(chance, _hostile_json(chance, *_TICKETS)))


def _bytes(chance: random.Random) -> bytes:
    good = chance.choice(
        [
            action("bounds", b"{}"),
            field(1, b"{}"),
            b"\x08\x02" + field(2, b"{}"),
            *_messages(random.Random(1), b"{}"),
            b"",
        ]
    )
    data = bytearray(good)
    for _ in range(times(chance)):
        damage(data, chance, good)
    return _case(chance.choice(_METHODS), *[bytes(data)] * chance.choice([1, 1, 3]))


# --- the node --------------------------------------------------------------------------------------------------


class _Node:
    """A node process on loopback."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "log.txt").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _NODE, str(folder / "node")],
            stdout=subprocess.PIPE,
            stderr=self._log,
            preexec_fn=_without_limit,  # noqa: PLW1509 - nothing else runs in this process
        )
        assert self.process.stdout is not None
        self.url = f"grpc://127.0.0.1:{int(self.process.stdout.readline())}"
        self._memory = self._used()
        self._seen = 0

    def check(self) -> None:
        """It runs, has logged no unexpected error, and has taken no more than it may."""
        status = self.process.poll()
        assert status is None, f"the node ended with {status}: {self._new_log()[-2000:]}"
        log = self._new_log()
        assert "Traceback" not in log, log[-3000:]
        grown = self._used() - self._memory
        assert grown < _MEMORY, f"the node has taken {grown >> 20:,} MiB"

    def answers(self) -> None:
        """It still answers a caller who behaves."""
        with RemoteLog(self.url, timeout=30.0) as log:
            log.status()

    def _new_log(self) -> str:
        self._log.flush()
        data = Path(self._log.name).read_bytes()
        new, self._seen = data[self._seen :], len(data)
        return new.decode(errors="replace")

    def _used(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()


def _without_limit() -> None:
    """The node's memory is watched from outside; and it does not outlive the fuzzer."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@cache
def _running() -> tuple[_Node, bytes]:
    """The node of this process, with some records in it, and its log's id. It ends with the process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    node = _Node(Path(folder.name))
    atexit.register(node.close)
    with RemoteLog(node.url, timeout=_START) as log:
        log.append(some_records(20))
        return node, str(log.log_id).encode()


@contextlib.contextmanager
def _served() -> Iterator[Try]:
    node, log_id = _running()
    count = 0

    def attempt(case: bytes) -> str:
        nonlocal count
        count += 1
        try:
            told = json.loads(case)
            messages = [bytes.fromhex(message).replace(_LOG, log_id) for message in told["messages"]]
            method = str(told["method"])
        except (ValueError, KeyError, TypeError):
            return "no case"
        outcome = _sent(node.url, method, messages)
        node.check()
        if count % _OFTEN == 0:
            node.answers()
        return outcome

    yield attempt
    node.answers()


def _sent(url: str, method: str, messages: list[bytes]) -> str:
    until = time.monotonic() + _WAIT
    with RawGrpc(url, timeout=_WAIT) as caller:
        try:
            stream = caller.call(method)
            for place, message in enumerate(messages):
                caller.send(stream, message, last=place + 1 == len(messages))
            while stream not in caller.ended and time.monotonic() < until:
                caller._receive()
        except TimeoutError:
            return "goes on"
        except Refused:
            return "refused"
    return "ended" if stream in caller.ended else "goes on"


def _target(name: str, make: Callable[[random.Random], bytes]) -> Target:
    return Target(name, make, _served, seconds=120.0)


TARGETS = (
    _target("flight-actions", _action),
    _target("flight-tickets", _ticket),
    _target("flight-puts", _put),
    _target("flight-exchanges", _exchange),
    _target("flight-bytes", _bytes),
)
