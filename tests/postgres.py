"""A real PostgreSQL for tests and benchmarks, as durable as it is by default, in folders of its own.

``make services`` installs it, with ``psql`` and ``pgbench``: so nothing here needs a client in Python.

    with PostgresServer() as server:
        print(server.query("SHOW fsync"))

PostgreSQL refuses to run as root. Root therefore starts it as ``nobody``, who keeps one right of root's, to reach files
whatever their owner: the checkout and the folders that ``tempfile`` makes are closed to others.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.servers import PATIENCE, NoServer, Process

NOBODY = "65534"
REACH = "-all,+dac_override"
LONGEST = 80
"""A socket's path may have about 100 bytes, its own name included."""


class PostgresServer(Process):
    """PostgreSQL with the settings it has by default: an answered commit is on the disk.

    Clients connect to ``host`` and ``port`` as ``user``, without a password.
    """

    name = "postgres"
    user = "strandline"
    goodbye = signal.SIGINT  # clients are sent home at once; with SIGTERM it would wait until they go
    grace = 20.0  # it writes out what is dirty; with less it is killed, and leaves shared memory behind

    def __init__(self, *, within: str | None = None) -> None:
        """Keep the data in a new folder ``within`` this one, to choose the disk; nothing is started yet."""
        super().__init__()
        self._within = within
        self._data = ""

    @property
    def host(self) -> str:
        """The folder of the server's socket; loopback where that folder's path is longer than a socket's may be."""
        return self.folder if len(self.folder) < LONGEST else "127.0.0.1"

    @property
    def data(self) -> str:
        """The folder of the tables and of the write-ahead log."""
        return self._data

    def program(self) -> Path:
        """The program's own file; ``NoServer`` if it is not installed, or if root has no way to start it."""
        program = super().program()
        if os.geteuid() == 0 and not shutil.which("setpriv"):
            raise NoServer("no server: postgres does not run as root, install 'setpriv' or run as somebody else")
        return program

    def tool(self, name: str) -> str:
        """The path of a program that comes with the server: ``psql``, ``pgbench``."""
        return str(self.program().resolve().with_name(name))

    def bond(self) -> list[str]:
        """As for every server; root becomes somebody else on the way."""
        bond = super().bond()
        if os.geteuid() != 0:
            return bond
        who = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        return [*bond[:-1], *who, "--inh-caps", REACH, "--ambient-caps", REACH, "--"]

    def prepare(self) -> None:
        """Make the data folder, synced, so that no benchmark pays for it."""
        parent = tempfile.mkdtemp(prefix="postgres-", dir=self._within or self.folder)
        self._data = str(Path(parent, "data"))
        how = ["--username", self.user, "--auth", "trust", "--no-locale", "--encoding", "UTF8"]
        self._run([*self.bond(), self.tool("initdb"), "--pgdata", self._data, *how], _without_postgres())

    def command(self) -> list[str]:
        """Only where it listens is said, and where shared memory is: in its folder, which goes away however it ends."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": self.folder if self.host == self.folder else "",
            "dynamic_shared_memory_type": "mmap",
        }
        return ["-D", self._data, *(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))]

    def start(self) -> None:
        """As for every server; ends when queries are answered, a moment after connections are."""
        if self._process is not None:
            return
        super().start()
        began = time.monotonic()
        try:
            while True:
                try:
                    self.query("SELECT 1")
                except RuntimeError:
                    if time.monotonic() - began > PATIENCE:
                        raise
                    time.sleep(0.02)
                else:
                    return
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process and remove its folders; a stopped one is left as it is."""
        super().stop()
        if self._data:
            shutil.rmtree(Path(self._data).parent, ignore_errors=True)

    @property
    def pid(self) -> int | None:
        """The process that listens, or None if there is none."""
        return self._process.pid if self._process else None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which every client of PostgreSQL finds this server, and nothing of other servers."""
        ours = {"PGHOST": self.host, "PGPORT": str(self.port), "PGUSER": self.user, "PGDATABASE": "postgres"}
        return {**_without_postgres(), **ours}

    def query(self, statement: str) -> str:
        """What a statement answers, as text: a line per row, ``|`` between columns."""
        quiet = ["--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set", "ON_ERROR_STOP=1"]
        return self._run([self.tool("psql"), *quiet, "--command", statement], self.environment)

    def _run(self, command: list[str], environment: dict[str, str]) -> str:
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name} failed: {(done.stderr or done.stdout)[-500:].strip()}")
        return done.stdout.strip()


def _without_postgres() -> dict[str, str]:
    """The environment, less what it says about somebody's own PostgreSQL."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}
