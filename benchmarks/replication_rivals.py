"""What catching up costs elsewhere: PostgreSQL's logical replication, from one server to another on this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.postgres import PostgresServer

_PATIENCE = 900.0


class _Publisher(PostgresServer):
    """Logical decoding is off by default; nothing else is changed."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "wal_level=logical", "-c", "max_wal_size=8GB"]


class _Subscriber(PostgresServer):
    """As by default, but for the size up to which its log may grow before everything is written out."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "max_wal_size=8GB"]


def _do(server: PostgresServer, statement: str) -> str:
    """A statement that may take long."""
    quiet = ["--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set", "ON_ERROR_STOP=1"]
    done = subprocess.run(
        [server.tool("psql"), *quiet, "--command", statement],
        env=server.environment, capture_output=True, text=True, timeout=_PATIENCE, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"PostgreSQL failed: {done.stderr[-500:].strip()}")
    return done.stdout.strip()


@contextmanager
def _servers(folder: str) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    with _Publisher(within=folder) as publisher, _Subscriber(within=folder) as subscriber:
        yield publisher, subscriber


def postgres_catch_up(folder: str, *, rows: int, size: int, per_transaction: int) -> float:
    """Seconds until a subscriber that was away has so many rows, durably; ``NoServer`` if there is no PostgreSQL.

    Both sides have a table with a number and a payload, and no index. The subscription is there before the rows, so
    that they come through the log, as a replica's do.
    """
    table = "CREATE TABLE log (lsn bigint NOT NULL, payload bytea NOT NULL)"
    with _servers(folder) as (publisher, subscriber):
        for server in (publisher, subscriber):
            _do(server, table)
        _do(publisher, "CREATE PUBLICATION everything FOR TABLE log")
        place = f"host={publisher.host} port={publisher.port} user={publisher.user} dbname=postgres"
        _do(subscriber, f"CREATE SUBSCRIPTION follower CONNECTION '{place}' PUBLICATION everything")
        _wait(subscriber, "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", "0")
        _do(subscriber, "ALTER SUBSCRIPTION follower DISABLE")
        payload = f"decode(repeat('76', {size}), 'hex')"
        insert = "INSERT INTO log SELECT number, {} FROM generate_series({}, {}) AS number"
        for first in range(0, rows, per_transaction):
            _do(publisher, insert.format(payload, first, min(rows, first + per_transaction) - 1))
        end = _do(publisher, "SELECT pg_current_wal_flush_lsn()")
        began = time.perf_counter()
        _do(subscriber, "ALTER SUBSCRIPTION follower ENABLE")
        # What it confirms is durable there.
        _wait(publisher, f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots", "t")
        took = time.perf_counter() - began
        found = _do(subscriber, "SELECT count(*) FROM log")
        if int(found) != rows:
            raise RuntimeError(f"PostgreSQL's subscriber has {found} rows of {rows}.")
        return took


def _wait(server: PostgresServer, question: str, answer: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while _do(server, question) != answer:
        if time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not come to answer {answer} to {question}.")
        time.sleep(0.05)
