"""Drills with real processes: followers killed and suspended between any two steps, races, full disks, lost answers.

After each of them the table equals an independent truth, and the slot is never ahead of the table.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.errors import Diverged
from tests.proxy import FaultyProxy, Weather, answer, reset
from tests.servers import BUCKET, S3Server, started
from tests.tables.processes.follower import Orders, sink_of

FORMATS = ["delta", "iceberg", "sqlite", "postgres"]
PART, SLOT = ("TablePart", "write"), ("SinkCommitter", "advance")
STEPS = {
    "delta": [
        *[("FollowedDelta", name) for name in ("open", "last_commit", "make_durable")],
        *[("DeltaCommits", name) for name in ("commit", "_settle")],
        *(PART, SLOT),
    ],
    "iceberg": [
        *[("FollowedIceberg", name) for name in ("begin", "make_durable")],
        *[("FollowedIceberg", name) for name in ("commit", "_committed")],
        PART,
        SLOT,
    ],
    "sqlite": [*[("SqliteTransaction", name) for name in ("read_table", "stage", "lock", "merge", "store")], SLOT],
    "postgres": [*[("PostgresTransaction", name) for name in ("read_table", "stage", "lock", "merge", "store")], SLOT],
}
COMMIT = {
    "delta": ("DeltaCommits", "commit"),
    "iceberg": ("FollowedIceberg", "commit"),
    "sqlite": ("SqliteTransaction", "stage"),
    "postgres": ("PostgresTransaction", "stage"),
}
"""Where a follower is stopped: it has written, holds no lock, and has not committed."""

ROUND = 600
"""Seconds that a round of a race may take; it only guards against hanging."""
Row = tuple[bytes, bytes | None]


_NUMBERS = iter(range(1, 10_000))


class World:
    """A log, and a table that follows it."""

    def __init__(self, folder: Any, kind: str, mode: str, dsn: str = "") -> None:
        self.rows: list[Row] = []
        self.log = sl.open(f"{folder}/log", create=True)
        place = {"delta": f"{folder}/table", "iceberg": str(folder), "sqlite": f"{folder}/shop.db"}.get(kind, dsn)
        self.orders = Orders(kind, place, f"{folder}/log", mode, slot="s")

    def extend(self, count: int) -> None:
        with self.log.producer() as producer:
            for n in range(len(self.rows), len(self.rows) + count):
                row = (b"k%d" % (n * 7 % 11), b"v%d" % n)
                producer.append(key=row[0], value=row[1])
                self.rows.append(row)

    @contextmanager
    def follower(self, **changed: Any) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "tests.tables.processes.follower", replace(self.orders, **changed).text()]
        pipes: Any = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, **changed: Any) -> str:
        """The outcome of a follower that runs to its end."""
        with self.follower(**changed) as process:
            out, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), errors
        assert "Traceback" not in errors, errors
        return out

    def raced(self, **changed: Any) -> tuple[list[str], bool]:
        """The outcomes of two followers that begin at the same moment, and whether both were at work at one time."""
        with (
            self.follower(records=2, waits=True, **changed) as one,
            self.follower(records=3, waits=True, **changed) as other,
        ):
            for process in (one, other):
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in (one, other):
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            said = [process.communicate(timeout=300) for process in (one, other)]
        assert all("Traceback" not in errors for _, errors in said), said
        lines = [out.splitlines() for out, _ in said]
        (began, ended), (began_too, ended_too) = (map(float, times.split()) for _, times in lines)
        return [outcome.split()[0] for outcome, _ in lines], began < ended_too and began_too < ended

    def killed(self, step: tuple[str, str], *, after: bool = False) -> None:
        """A follower is killed at a step."""
        with self.follower(step=step, after=after) as process:
            out, errors = process.communicate(timeout=120)
        assert (process.returncode, "here" in out) == (-signal.SIGKILL, True), (step, out, errors)

    def found(self) -> list[Row]:
        """Key and value of all rows, in the order of their offsets, as other programs read them."""
        orders = self.orders
        if orders.format in ("delta", "iceberg"):
            if orders.format == "delta":
                table = DeltaTable(orders.place, storage_options=orders.options or None).to_pyarrow_table()
            else:
                catalog = SqlCatalog("c", uri=f"sqlite:///{orders.place}/catalog.db")
                table = catalog.load_table("shop.orders").scan().to_arrow()
                catalog.close()
            rows = table.sort_by("offset").to_pylist()
            return [(row["key"], row["value"]) for row in rows]
        statement = 'SELECT key, value FROM orders ORDER BY "offset"'
        if orders.format == "sqlite":
            with closing(sqlite3.connect(orders.place)) as connection:
                return connection.execute(statement).fetchall()
        with psycopg.connect(orders.place) as connection:
            return [(bytes(key), bytes(value)) for key, value in connection.execute(statement).fetchall()]

    def truth(self, end: int) -> list[Row]:
        if self.orders.mode == "append":
            return self.rows[:end]
        newest: dict[bytes, bytes | None] = {}
        for key, value in self.rows[:end]:
            newest.pop(key, None)
            newest[key] = value
        return list(newest.items())

    def check(self, end: int | None = None) -> int:
        """The table is exact at its cursor, and its slot is not ahead of that; returns the cursor."""
        sink = sink_of(self.orders)
        cursor = sink.cursor(self.log.log_id)
        at = 0 if cursor is None else cursor.next
        slots = {state.name: state.position for state in self.log.slots.list()}
        assert slots.get("s", 0) <= at, "the slot is ahead of the table"
        if cursor is not None:
            assert self.found() == self.truth(at)
        assert end is None or at == end
        return at


@pytest.fixture
def world(request, tmp_path):
    kind, mode = request.param
    dsn = ""
    if kind == "postgres":
        server, name = request.getfixturevalue("postgres"), f"drill_{next(_NUMBERS)}"
        dsn = f"host={server.host} port={server.port} user={server.user} dbname=postgres"
        with psycopg.connect(dsn) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        dsn += f" options='-c search_path={name}'"
    return World(tmp_path, kind, mode, dsn)


def worlds(*modes: str) -> list[Any]:
    """One world of each format; further modes are left to the slow suite."""
    return [
        pytest.param((kind, mode), marks=[] if mode == modes[0] else pytest.mark.slow, id=f"{kind}-{mode}")
        for kind in FORMATS
        for mode in modes
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("world", worlds("latest", "append"), indirect=True)
def test_a_follower_killed_between_any_two_steps_leaves_a_right_table(world):
    steps = STEPS[world.orders.format]
    world.extend(4)
    world.run()
    at = 4
    for step in steps:
        for after in (False, True) if step is steps[-2] else (False,):
            world.extend(3)
            world.killed(step, after=after)
            at_before, at = at, world.check()
            assert at_before <= at <= len(world.rows), step
    assert world.run() == f"ok {len(world.rows)}\n"
    world.check(len(world.rows))


UPKEEP = {
    "delta": [("FileTableSink", "_join"), ("DeltaCommits", "keep_removed"), ("DeltaCommits", "raise_floor")],
    "iceberg": [("FileTableSink", "_join"), ("FollowedIceberg", "accept"), ("FollowedIceberg", "commit_updates")],
}


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", pytest.param("latest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=pytest.mark.slow)])
def test_a_follower_killed_within_its_upkeep_leaves_a_right_table_with_its_layout(tmp_path, kind, mode):
    world = World(tmp_path, kind, mode)
    world.orders = replace(world.orders, is_kept=True, records=1)

    def extend() -> None:
        # A Delta table has a checkpoint every twenty versions, at which its history is cut off.
        for _ in range(24 if kind == "delta" else 6):
            world.extend(1)

    for step in UPKEEP[kind]:
        for after in (False, True):
            extend()
            world.killed(step, after=after)
            world.check()
    if kind == "delta":
        extend()
        world.killed(("DeltaFiles", "remove"), after=True)
        world.check()
    assert world.run() == f"ok {len(world.rows)}\n"
    world.check(len(world.rows))
    extend()
    outcomes, _ = world.raced()
    assert set(outcomes) <= {"ok", "Fenced", "TransientStorageError", "Contended"}, outcomes
    assert world.run() == f"ok {len(world.rows)}\n"
    world.check(len(world.rows))
    assert sink_of(world.orders).size().files < 24 or mode == "latest"


@pytest.mark.matrix
def test_a_follower_killed_before_its_commit_leaves_nothing_of_it(tmp_path):
    world = World(tmp_path, "sqlite", "append")
    world.extend(4)
    world.killed(("SqliteTransaction", "store"))
    assert world.check() == 0
    assert sl.follow(world.log, sink_of(world.orders), "s", upto="end").next == 4
    world.check(4)


@pytest.mark.matrix
@pytest.mark.parametrize("world", worlds("latest"), indirect=True)
def test_a_follower_killed_before_its_first_commit_leaves_no_half_table(world):
    world.extend(5)
    for step in (COMMIT[world.orders.format], SLOT):
        world.killed(step)
        assert world.check() in {0, 4, 5}
    assert world.run() == "ok 5\n"
    world.check(5)


@pytest.mark.matrix
@pytest.mark.parametrize("world", worlds("latest", "append"), indirect=True)
def test_a_follower_that_was_suspended_past_its_replacement_is_fenced(world):
    world.extend(4)
    world.run()
    world.extend(4)
    with world.follower(step=COMMIT[world.orders.format], how="stop") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        world.extend(5)
        assert world.run() == "ok 13\n"
        os.kill(process.pid, signal.SIGCONT)
        out, errors = process.communicate(timeout=120)
    assert out == "Fenced\n", errors
    world.check(13)
    world.extend(2)
    assert world.run() == "ok 15\n"
    world.check(15)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "rounds", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(100 * ROUND)])], ids=["few", "many"]
)
@pytest.mark.parametrize("world", worlds("append", "latest"), indirect=True)
def test_two_followers_that_race_apply_each_record_once(world, rounds, record_property):
    seen: Counter[str] = Counter()
    for number in range(rounds):
        world.extend(9)
        outcomes, is_race = world.raced(**({} if number % 2 else {"slot": None}))
        seen.update(outcomes)
        seen["races"] += is_race
        assert set(outcomes) <= {"ok", "Fenced", "TransientStorageError", "Contended"}, outcomes
        world.check()
        assert world.run() == f"ok {len(world.rows)}\n"
        world.check(len(world.rows))
    record_property("seen", dict(seen))
    assert seen["races"], "they never ran at one time"


@pytest.mark.matrix
@pytest.mark.parametrize("world", worlds("append", "latest"), indirect=True)
def test_a_full_disk_is_one_clear_error_and_the_table_is_right_afterwards(world):
    """A limit on the size of files stands for the full disk."""
    if world.orders.format == "postgres":
        pytest.skip("The server has the disk.")
    world.extend(4)
    world.run()
    for limit in (0, 600, 1_500, 3_000):
        world.extend(3)
        outcome = world.run(file_limit=limit, slot=None).split()[0]
        assert outcome in {"ok", "DiskFull", "StorageError", "TransientStorageError"}, (limit, outcome)
        assert outcome != "ok" or limit, "nothing could be written, and yet it was"
        world.check()
    assert world.run() == f"ok {len(world.rows)}\n"
    world.check(len(world.rows))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest"])
def test_a_bucket_that_loses_answers_and_goes_down_makes_no_row_twice(
    tmp_path, s3_server: S3Server, s3_url: str, s3_proxy: FaultyProxy, mode
):
    """The follower is a process of its own, so that the library's retries are those of production."""
    world = World(tmp_path, "delta", mode)
    table = {"place": s3_url, "options": s3_server.options_through(s3_proxy.endpoint)}
    world.orders = replace(world.orders, place=s3_url, options=s3_server.options)
    world.extend(4)
    assert world.run(**table) == "ok 4\n"
    for number, fault in enumerate((reset(landed=True), answer(500, "InternalError", landed=True))):
        world.extend(4)
        version = DeltaTable(s3_url, storage_options=s3_server.options).version() + 1
        s3_proxy.fail_next(fault, "PUT", containing=f"{version:020d}.json")
        assert world.run(slot=None, **table) == f"ok {8 + 4 * number}\n"
        world.check(8 + 4 * number)
    lost = [seen for seen in s3_proxy.seen if seen.fault is not None]
    assert len(lost) == 2, "no answer was lost"
    s3_proxy.weather = Weather({reset(): 0.1, reset(landed=True): 0.1, answer(503, "SlowDown"): 0.1}, seed=3)
    for _ in range(4):
        world.extend(5)
        assert world.run(**table).split()[0] in {"ok", "TransientStorageError", "Contended"}
        world.check()
    s3_proxy.heal()
    s3_proxy.weather = None
    assert world.run(**table) == f"ok {len(world.rows)}\n"
    world.check(len(world.rows))


def _until_somebody_calls(port: int) -> None:
    """Return when a client has tried to connect to a port on which no server listens; its connection is closed."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(120)
        listener.accept()[0].close()


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest"])
@pytest.mark.parametrize("is_back", [True, False], ids=["back-before-the-next-call", "down-at-the-next-call"])
def test_a_bucket_whose_server_is_killed_and_started_again_between_two_steps_loses_and_doubles_nothing(
    tmp_path, mode, is_back
):
    with started(S3Server()) as server:
        server.create_bucket(BUCKET)
        world = World(tmp_path, "delta", mode)
        world.orders = replace(world.orders, place=server.url(BUCKET, "table"), options=server.options)
        world.extend(4)
        assert world.run() == "ok 4\n"
        for step in STEPS["delta"]:
            world.extend(3)
            with world.follower(step=step, how="stop") as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "here\n", step
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                server.kill()
                if is_back:
                    server.restart()
                os.kill(process.pid, signal.SIGCONT)
                if not is_back and step != SLOT:  # the slot is in the log, which has another store
                    _until_somebody_calls(server.port)
                if not is_back:
                    server.restart()
                out, errors = process.communicate(timeout=300)
            assert out.split()[0] in {"ok", "TransientStorageError", "Contended"}, (step, out, errors)
            assert not is_back or out.split()[0] == "ok", (step, errors)
            world.check()
        assert world.run() == f"ok {len(world.rows)}\n"
        world.check(len(world.rows))


@pytest.mark.matrix
def test_the_check_catches_a_row_that_is_missing_and_a_slot_that_is_ahead(tmp_path):
    """The drills can fail."""
    world = World(tmp_path, "sqlite", "append")
    world.extend(4)
    world.run()
    with closing(sqlite3.connect(world.orders.place)) as connection, connection:
        connection.execute('DELETE FROM orders WHERE "offset" = 2')
    with pytest.raises(AssertionError):
        world.check()
    twin = World(tmp_path / "twin", "delta", "append")
    twin.extend(4)
    twin.run()
    twin.extend(4)
    twin.log.slots.claim("s", "thief").advance(twin.log.end())
    with pytest.raises((AssertionError, Diverged), match="ahead"):
        twin.check()
