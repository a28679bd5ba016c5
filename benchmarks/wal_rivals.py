"""What a durable append costs elsewhere: a bare file, SQLite and PostgreSQL, on one disk.

Every function appends payloads of 200 bytes for a while, each acknowledged only when it is on the disk, and tells how
many there were and how long one took. They are what the log's own numbers stand beside, in the same run: disks and
machines differ, and so do their slow spells. ``python -m benchmarks.wal_rivals`` shows them alone.

PostgreSQL is asked by pgbench, its own load generator, in C, over its local socket: no client in Python could ask for
as much. SQLite and the bare file are called from Python, as the log is. Where there is a choice it is made in favour of
the rival, but for durability and for the settings that a user would find.
"""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.harness import scratch
from tests.postgres import PostgresServer
from tests.servers import NoServer

PAYLOAD = b"strandline" * 20
SECONDS = 1.5
WARM = 20
"""Appends of each thread before the clock starts: files are there, statements prepared, pages cached."""

CLIENTS = 64
SCHEMA = "CREATE TABLE log (lsn INTEGER PRIMARY KEY, payload BLOB NOT NULL)"
INSERT = "INSERT INTO log (payload) VALUES (?)"


@dataclass(frozen=True, slots=True)
class Appends:
    """What one way of appending did: durable records in so many seconds, and how long one append took its caller."""

    name: str
    records: int
    seconds: float
    p50: float
    p99: float
    longest: float = math.nan

    @property
    def rate(self) -> float:
        """Durable records per second."""
        return self.records / self.seconds


def percentile(delays: Sequence[float], share: float) -> float:
    """The delay within which this share of the appends was durable; NaN if there are none."""
    ranked = sorted(delays)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def _appends(name: str, records: int, seconds: float, delays: Sequence[float]) -> Appends:
    middle, slow, longest = (percentile(delays, share) for share in (0.5, 0.99, 1.0))
    return Appends(name, records, seconds, middle, slow, longest)


def timed(
    name: str,
    appenders: Sequence[Callable[[], object]],
    *,
    seconds: float = SECONDS,
    warm: int = WARM,
    rows: int = 1,
) -> Appends:
    """Call each appender over and over in a thread of its own, all at once, for so long.

    A call appends ``rows`` records and returns when they are durable. Records that are durable in time count; delays
    are of all, also of those that came too late: a starved thread must not stretch the time, nor hide how long it took.
    """
    delays: list[list[float]] = [[] for _ in appenders]
    late = [0] * len(appenders)
    failures: list[BaseException] = []
    until = math.inf

    def begin() -> None:
        nonlocal until
        until = time.perf_counter() + seconds

    # All begin at once, when the last thread is warm: the first would run alone for a while.
    start = threading.Barrier(len(appenders), action=begin)

    def work(number: int) -> None:
        clock, append, own = time.perf_counter, appenders[number], delays[number]
        try:
            for _ in range(warm):
                append()
            start.wait()
            began = clock()
            while began < until:
                append()
                ended = clock()
                own.append(ended - began)
                began = ended
            late[number] = 1 if own else 0  # the last one ended after the time, or the loop would have gone on
        except BaseException as failure:  # noqa: BLE001 - raised again below, in the caller's thread
            failures.append(failure)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(appenders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((each for each in failures if not isinstance(each, threading.BrokenBarrierError)), failures[0])
    each = [delay for own in delays for delay in own]
    return _appends(name, rows * (len(each) - sum(late)), seconds, each)


# --- a bare file -------------------------------------------------------------------------------------------------


def bare_appends(folder: str, *, seconds: float = SECONDS, reserved: int = 0) -> Appends:
    """``write`` and ``fdatasync`` for each record, in one thread: what the disk allows who does not share a sync.

    With ``reserved`` bytes the file is filled with zeros first and then written over, so that no sync has to write the
    file's new length too; a round that fills it goes on at its beginning.
    """
    path = Path(_fresh(folder), "bare")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        if reserved:
            os.write(descriptor, bytes(reserved))
            os.fsync(descriptor)
            os.lseek(descriptor, 0, os.SEEK_SET)
        written = 0

        def append() -> None:
            nonlocal written
            if reserved and written + len(PAYLOAD) > reserved:
                os.lseek(descriptor, 0, os.SEEK_SET)
                written = 0
            written += os.write(descriptor, PAYLOAD)
            os.fdatasync(descriptor)

        how = "write + fdatasync" + (", file reserved" if reserved else "")
        return timed(f"bare {how}", [append], seconds=seconds)
    finally:
        os.close(descriptor)


# --- SQLite ------------------------------------------------------------------------------------------------------


def _connect(path: str) -> sqlite3.Connection:
    """A connection that acknowledges a transaction when the log of SQLite is on the disk; each statement is one."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60.0)
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous=FULL")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    if (mode, level) != ("wal", 2):
        raise RuntimeError(f"SQLite did not take its settings: journal_mode={mode}, synchronous={level}.")
    return connection


@contextmanager
def _sqlite(folder: str) -> Iterator[sqlite3.Connection]:
    with closing(_connect(str(Path(_fresh(folder), "log.sqlite")))) as connection:
        connection.execute(SCHEMA)
        yield connection


def sqlite_appends(folder: str, *, threads: int = 1, rows: int = 1, seconds: float = SECONDS) -> Appends:
    """So many threads share one connection; a transaction has ``rows`` rows.

    One connection under a lock, and not one each: SQLite has one writer at a time anyway, so both append about as many,
    but who finds it busy sleeps, longer each time, and may find it busy for seconds; a lock wakes who waits for it.
    ``sqlite_connections`` is the other way.
    """
    lock = threading.Lock()
    with _sqlite(folder) as connection:

        def append() -> None:
            with lock:
                connection.execute(INSERT, (PAYLOAD,))

        def append_rows() -> None:
            with lock:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(INSERT, [(PAYLOAD,)] * rows)
                connection.execute("COMMIT")

        how = f"{_count(threads, 'thread')}, {_count(rows, 'row')} a transaction"
        act = append if rows == 1 else append_rows
        return timed(f"SQLite, {how}", [act] * threads, seconds=seconds, rows=rows)


def sqlite_connections(folder: str, *, threads: int = CLIENTS, seconds: float = SECONDS) -> Appends:
    """As most programs do it: a connection for each thread, which waits when another writes; a row a transaction.

    A few threads do nearly all the work, and the others starve: look at ``longest``, not at the percentiles.
    """
    path = str(Path(_fresh(folder), "log.sqlite"))
    with closing(_connect(path)) as first:
        first.execute(SCHEMA)
    connections = [_connect(path) for _ in range(threads)]
    try:
        appenders = [lambda own=own: own.execute(INSERT, (PAYLOAD,)) for own in connections]
        name = f"SQLite, {_count(threads, 'thread')} with a connection each"
        return timed(name, appenders, seconds=seconds, warm=1)
    finally:
        for connection in connections:
            connection.close()


def sqlite_grouped(folder: str, *, threads: int = CLIENTS, seconds: float = SECONDS) -> Appends:
    """Group commit by hand: threads hand records to one writer, which puts all that wait into one transaction.

    The best that a program can make of SQLite for threads that each wait for their own record.
    """
    waiting: SimpleQueue[tuple[bytes, threading.Lock] | None] = SimpleQueue()
    failures: list[BaseException] = []

    def write(connection: sqlite3.Connection) -> None:
        while (first := waiting.get()) is not None:
            group = [first]
            while not waiting.empty():  # the end is said when nobody waits any more: here are only records
                group.append(waiting.get())
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(INSERT, [(payload,) for payload, _ in group])
                connection.execute("COMMIT")
            except BaseException as failure:  # noqa: BLE001 - the threads that wait raise it
                failures.append(failure)
            for _, done in group:
                done.release()

    def appender() -> Callable[[], object]:
        done = threading.Lock()
        done.acquire()

        def append() -> None:
            waiting.put((PAYLOAD, done))
            done.acquire()
            if failures:
                raise failures[0]

        return append

    with _sqlite(folder) as connection:
        writer = threading.Thread(target=write, args=(connection,))
        writer.start()
        try:
            name = f"SQLite, {_count(threads, 'thread')}, grouped by one writer"
            return timed(name, [appender() for _ in range(threads)], seconds=seconds)
        finally:
            waiting.put(None)
            writer.join()


# --- PostgreSQL --------------------------------------------------------------------------------------------------


@contextmanager
def postgres(folder: str) -> Iterator[PostgresServer]:
    """A server with its data on the disk of this folder, and with the table; ``NoServer`` if it is not installed."""
    with PostgresServer(within=_fresh(folder)) as server:
        columns = "lsn bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload bytea NOT NULL"
        server.query(f"CREATE TABLE log ({columns})")
        yield server


def postgres_appends(server: PostgresServer, *, clients: int = 1, seconds: float = SECONDS) -> Appends:
    """So many clients, each with a connection and a prepared statement, a row a transaction; settings as by default.

    pgbench counts whole seconds only; the clock is its own, without the time that connecting takes.
    """
    with tempfile.TemporaryDirectory(dir=server.folder) as notes:
        script = Path(notes, "insert.sql")
        script.write_text("INSERT INTO log (payload) VALUES (:payload);\n")
        threads = min(clients, os.cpu_count() or 1)
        _pgbench(server, script, clients, threads, ["--transactions", str(WARM)])
        prefix = Path(notes, "times")
        how = ["--time", str(max(1, round(seconds))), "--log", "--log-prefix", str(prefix)]
        said = _pgbench(server, script, clients, threads, how)
        # A line for each transaction: client, number, microseconds, …
        lines = [line.split() for each in Path(notes).glob("times.*") for line in each.read_text().splitlines()]
    delays = [int(line[2]) / 1e6 for line in lines]
    rate = float(said.partition("tps = ")[2].split()[0])
    name = f"PostgreSQL, {_count(clients, 'client')}"
    return _appends(name, len(delays), len(delays) / rate, delays)


def _pgbench(server: PostgresServer, script: Path, clients: int, threads: int, how: Sequence[str]) -> str:
    load = ["--no-vacuum", "--protocol", "prepared", "--file", str(script), "--define", f"payload={PAYLOAD.decode()}"]
    command = [server.tool("pgbench"), *load, "--client", str(clients), "--jobs", str(threads), *how]
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0 or "number of failed transactions: 0 " not in done.stdout:
        raise RuntimeError(f"pgbench failed: {(done.stderr + done.stdout)[-500:].strip()}")
    return done.stdout


# --- all of them -------------------------------------------------------------------------------------------------


def _fresh(folder: str) -> str:
    """A new folder in this one: no round finds what another left."""
    return tempfile.mkdtemp(prefix="rival-", dir=folder)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def rivals(folder: str, *, seconds: float = SECONDS) -> Iterator[Appends]:
    """All of them, one after another; without PostgreSQL if that is not installed."""
    yield bare_appends(folder, seconds=seconds)
    yield bare_appends(folder, seconds=seconds, reserved=8 << 20)
    yield sqlite_appends(folder, seconds=seconds)
    yield sqlite_appends(folder, seconds=seconds, threads=CLIENTS)
    yield sqlite_connections(folder, seconds=seconds)
    yield sqlite_grouped(folder, seconds=seconds)
    yield sqlite_appends(folder, seconds=seconds, rows=CLIENTS)
    try:
        with postgres(folder) as server:
            yield postgres_appends(server, seconds=seconds)
            yield postgres_appends(server, seconds=seconds, clients=CLIENTS)
    except NoServer as missing:
        print(f"PostgreSQL is left out: {missing}", file=sys.stderr)


def main() -> None:
    """Show all of them, beside the bare file."""
    with scratch() as folder:
        bare = 0.0
        for found in rivals(folder):
            bare = bare or found.rate
            delays = (
                f"p50 {1e3 * found.p50:7.3f} ms  p99 {1e3 * found.p99:7.3f} ms  longest {1e3 * found.longest:6.0f} ms"
            )
            print(f"{found.name:<48} {found.rate:>10,.0f}/s  x {found.rate / bare:5.2f}   {delays}", flush=True)


if __name__ == "__main__":
    main()
