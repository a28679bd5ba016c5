"""Nodes of one log as processes of their own, for tests that kill them, stop them and cut them off.

``python -m tests.node.processes`` is a nest: it starts one node for each line that it is given, by forking, since a new
interpreter takes longer than most tests. It tells in lines of JSON where each node serves, and when it has ended. All
nodes end with the nest, and the nest ends with the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from strandline.errors import NotReady, StrandlineError
from strandline.formats.node.state import decode_node
from strandline.model.node import NodeState
from strandline.model.retention import SlotLimits
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.messages import NodeStatus
from strandline.node.options import TierSettings
from strandline.node.running import NodeConfig, RunningNode
from strandline.storage.clock import SystemClock
from strandline.storage.env import Env
from tests.node.flight.cuttable_tcp import TcpProxy

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
LEASE = 1.0
_LOOK = 0.02
_TOLD = 3000
_JUMP = struct.Struct("<q")
_WITH_PARENT = 1  # PR_SET_PDEATHSIG


# --- inside ------------------------------------------------------------------------------------------------------


class JumpingClock(SystemClock):
    """The machine's clock, whose wall time is as far off as eight bytes in a file say, in microseconds."""

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            self._jump = mmap.mmap(file.fileno(), _JUMP.size, access=mmap.ACCESS_READ)

    def now(self) -> int:
        return super().now() + int(_JUMP.unpack_from(self._jump)[0])

    def now_ns(self) -> int:
        return time.time_ns() + 1000 * int(_JUMP.unpack_from(self._jump)[0])


def _tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")  # short enough to come whole, whoever else writes


def config_of(options: dict[str, Any]) -> NodeConfig:
    """A node's configuration from what JSON can say of it."""
    options = dict(options)
    tls = options.pop("tls", None)
    if tls is not None:
        options["server"] = ServerSecurity.load(certificate=f"{tls}/node.pem", key=f"{tls}/node.key")
        options["client"] = ClientSecurity.load(roots=f"{tls}/ca.pem")
    if "tokens" in options:
        options["server"] = ServerSecurity(tokens=Tokens.parse(options.pop("tokens"), "the test's tokens"))
    if "server_limits" in options:
        options["server_limits"] = ServerLimits(**options["server_limits"])
    if "max_idle" in options:
        options["limits"] = SlotLimits(idle_seconds=options.pop("max_idle"))
    if "tiering" in options:
        options["tiering"] = TierSettings(**options["tiering"])
    return NodeConfig(**options)


def _be_node(order: dict[str, Any]) -> None:
    """Be a node until told to stop by SIGTERM."""
    _tell(started=os.getpid())  # by the child, so that it comes before the port
    with contextlib.suppress(AttributeError, OSError):  # elsewhere the nest has to be asked to end
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 2)
    name = order["config"]["name"]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", force=True)
    told: list[int] = []  # no event: the handler may run while this thread holds its lock
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with RunningNode(config_of(order["config"]), env=Env(clock=JumpingClock(order["clock"]))) as running:
        _tell(pid=os.getpid(), port=running.server.port)
        while not told and running.failure is None:
            time.sleep(0.05)
    assert running.failure is None


def nest() -> None:
    """Start nodes as told by lines on standard input, until that ends."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    living: dict[int, int] = {}
    lines = b""
    while True:
        for handle, _ in waiting.poll():
            if handle in living:
                # The node had the other end of this pipe, and nobody else.
                waiting.unregister(handle)
                os.close(handle)
                pid = living.pop(handle)
                _tell(pid=pid, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            piece = os.read(0, 1 << 16)
            if not piece:
                for pid in living.values():
                    os.kill(pid, signal.SIGKILL)
                return
            *whole, lines = (lines + piece).split(b"\n")
            for line in whole:
                life, held = os.pipe()
                pid = os.fork()
                if not pid:
                    _child(json.loads(line), [0, life, *living])
                os.close(held)
                living[life] = pid
                waiting.register(life, select.POLLHUP)


def _child(order: dict[str, Any], others: list[int]) -> None:
    status = 1
    try:
        for handle in others:
            os.close(handle)
        _be_node(order)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as the nest
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


# --- from outside ------------------------------------------------------------------------------------------------


class Nest:
    """The process that starts nodes, seen by the test. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.processes"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._told = threading.Condition()
        self._started: list[int] = []
        self.ports: dict[int, int] = {}
        """Where each node serves, by process id."""
        self.statuses: dict[int, int] = {}
        """How each has ended."""
        self._is_over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what = json.loads(line)
            with self._told:
                if "started" in what:
                    pid = what["started"]
                    self.ports.pop(pid, None)  # of an earlier process with the same number
                    self.statuses.pop(pid, None)
                    self._started.append(pid)
                elif "port" in what:
                    self.ports[what["pid"]] = what["port"]
                else:
                    self.statuses[what["pid"]] = what["status"]
                self._told.notify_all()
        with self._told:
            self._is_over = True
            self._told.notify_all()

    def start(self, order: dict[str, Any]) -> int:
        """Start a node; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        self.wait(lambda: bool(self._started))
        return self._started.pop()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Block until the nest has told what makes something so."""
        with self._told:
            assert self._told.wait_for(lambda: self._is_over or condition(), PATIENCE), "the nest said nothing"
            assert condition(), "the nest has ended"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ClusterOfProcesses:
    """Nodes by name, each a process, each reached by the others through a line of its own. A context manager.

    Clients use ``clients[name]``, which goes past the line.
    """

    def __init__(
        self, nest: Nest, folder: Path, *, names: str = "abc", tls: Path | None = None, **options: Any
    ) -> None:
        """Nothing runs yet. ``options`` are those of a :class:`NodeConfig`, for all nodes."""
        self.folder = folder
        self.names = names
        self.lines = {name: TcpProxy(index) for index, name in enumerate(names)}
        self.clients: dict[str, RemoteLog] = {}
        """Of the nodes that run."""
        self._nest = nest
        self._tls = tls
        self._pids: dict[str, int] = {}
        self._paused: set[str] = set()
        self._old: list[RemoteLog] = []
        self._options = {
            "lease": f"file://{folder}/lease",
            "lease_seconds": LEASE,
            "policy": f"quorum({','.join(names)})",
            "poll_seconds": 0.2,
            "timeout": 1.5,
            "nodes": {name: self._url(line.port) for name, line in self.lines.items()},
            **options,
        }
        if tls is not None:
            self._options["tls"] = str(tls)
        for name in names:
            self._clock(name).write_bytes(_JUMP.pack(0))

    def _url(self, port: int) -> str:
        return f"grpc{'' if self._tls is None else '+tls'}://127.0.0.1:{port}"

    @property
    def url(self) -> str:
        """The address of the log: those of all nodes, which they keep when they are started again."""
        first, *others = (self._url(line.port) for line in self.lines.values())
        return ",".join([first, *(other.partition("://")[2] for other in others)])

    def _clock(self, name: str) -> Path:
        return self.folder / f"{name}.clock"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    # --- processes -----------------------------------------------------------------------------------------------

    def start(self, *names: str, **more: Any) -> None:
        """Start nodes, or start them again, and wait until they serve."""
        for name in names:
            config = {**self._options, "folder": str(self.folder / name), "name": name, **more}
            config["url"] = self._url(self.lines[name].port)
            order = {"config": config, "log": str(self._log(name)), "clock": str(self._clock(name))}
            self._pids[name] = self._nest.start(order)
        for name in names:
            pid = self._pids[name]
            self._nest.wait(lambda pid=pid: pid in self._nest.ports or pid in self._nest.statuses)
            assert pid in self._nest.ports, f"{name} did not start: {self._log(name).read_text()[-_TOLD:]}"
            port = self._nest.ports[pid]
            self.lines[name].lead_to(port)
            security = None if self._tls is None else ClientSecurity.load(roots=str(self._tls / "ca.pem"))
            self.clients[name] = RemoteLog(self._url(port), security=security, timeout=10.0)

    def begin(self) -> str:
        """Start all, the first of them as the one that makes the log, and wait until they follow it.

        And know of one another: a node that takes over before that has to wait until the others have registered.
        """
        first, *others = self.names
        self.start(first, create=True)
        self.start(*others)
        self.settled()
        self.until(lambda: all(self._knows(name) >= {*self.names} for name in self.names), "everybody knows everybody")
        return self.leader()

    def _knows(self, name: str) -> set[str]:
        home = self.node_state(name)
        return {name, home.primary, *(peer.name for peer in home.peers)}

    def kill(self, *names: str) -> None:
        """``kill -9``: nothing is said to anybody."""
        for name in names:
            os.kill(self._pids[name], signal.SIGKILL)
        for name in names:
            assert self._ended(name) == -signal.SIGKILL

    def stop(self, *names: str) -> None:
        """Ask nodes to end, and wait until they have ended in order."""
        for name in names:
            os.kill(self._pids[name], signal.SIGTERM)
        for name in names:
            assert self._ended(name) == 0, f"{name} did not end well: {self._log(name).read_text()[-_TOLD:]}"

    def _ended(self, name: str) -> int:
        pid = self._pids[name]
        self._nest.wait(lambda: pid in self._nest.statuses)
        del self._pids[name]
        if name in self.clients:
            self._old.append(self.clients.pop(name))
        self._paused.discard(name)
        self.lines[name].lead_to(None)
        return self._nest.statuses[pid]

    def pid(self, name: str) -> int:
        """The process id of a node that runs."""
        return self._pids[name]

    def port(self, name: str) -> int:
        """Where a node that runs serves."""
        return self._nest.ports[self._pids[name]]

    def pause(self, name: str) -> None:
        """SIGSTOP: it does not know that time passes."""
        self._paused.add(name)
        os.kill(self._pids[name], signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self._pids[name], signal.SIGCONT)
        self._paused.discard(name)

    def set_clock(self, name: str, *, hours: float) -> None:
        """Shift a node's wall clock by ``hours``, from this moment."""
        with self._clock(name).open("r+b") as file:
            file.write(_JUMP.pack(int(hours * 3600e6)))

    @property
    def running(self) -> list[str]:
        """Who runs, and is not paused."""
        return [name for name in list(self._pids) if name not in self._paused]

    # --- what they say -------------------------------------------------------------------------------------------

    def status(self, name: str) -> NodeStatus | None:
        """How a node is; None if it does not say."""
        try:
            return self.clients[name].status()
        except (StrandlineError, KeyError):
            return None

    def statuses(self) -> dict[str, NodeStatus]:
        """All who answer."""
        return {name: status for name in self.running if (status := self.status(name)) is not None}

    def leader(self) -> str:
        """Who leads; waits until somebody does."""
        found: list[str] = []

        def look() -> bool:
            leading = [status for status in self.statuses().values() if status.condition == "leading"]
            found[:] = [max(leading, key=lambda status: status.term).name] if leading else []
            return bool(found)

        self.until(look, "somebody leads")
        return found[0]

    def promote(self, *candidates: str) -> str:
        """Promote by hand as people do: if a node says that another one has more, promote that."""
        for name in candidates:
            try:
                return self.clients[name].promote().primary
            except NotReady as error:
                refused = error
        raise refused

    def until(self, condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < deadline, f"it never came to be that {what}: {self.statuses()}"
            time.sleep(_LOOK)

    def settled(self) -> None:
        """Wait until all run, one leads, and everybody has everything and knows that it is committed."""

        def look() -> bool:
            seen = self.statuses()
            conditions = sorted(status.condition for status in seen.values())
            ends = {(status.position and status.position.next, status.term) for status in seen.values()}
            committed = {status.committed for status in seen.values()}
            return (
                conditions == ["following"] * (len(self.names) - 1) + ["leading"]
                and len(ends) == 1
                and committed == {end for end, _ in ends}
            )

        self.until(look, "all agree")

    def node_state(self, name: str) -> NodeState:
        """What a node remembers."""
        path = self.folder / name / "node.json"
        return decode_node(path.read_bytes(), str(path))

    def data(self, name: str) -> str:
        """The folder of a node's copy of the log."""
        return str(self.folder / name / f"data-{self.node_state(name).generation:08d}")

    def quarantine(self, name: str) -> list[Path]:
        """What a node has set aside."""
        folder = self.folder / name / "quarantine"
        return sorted(folder.iterdir()) if folder.exists() else []

    def logged(self, name: str, what: str) -> int:
        """How often a node has logged something."""
        return self._log(name).read_text(errors="replace").count(what)

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that is left, however it is."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in list(self._pids):
            self._ended(name)
        for client in self._old:
            client.close()
        for line in self.lines.values():
            line.close()
        for name in self.names:  # shown for tests that fail
            if self._log(name).exists():
                print(f"--- {name} ---\n{self._log(name).read_text(errors='replace')[-20 * _TOLD :]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    nest()
