"""Random histories of a table in PostgreSQL against a plain model of it: lost connections and commits, crashes of the
server, two followers, rebuilds and replays beside them, and records that PostgreSQL cannot store."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import Conflict, Contended, Fenced, StrandlineError, TransientStorageError
from strandline.followers.run import Batching
from strandline.log.memory import MemoryLog
from strandline.model.head import WriterId
from strandline.model.records import record_batch
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from tests.node.flight.cuttable_tcp import TcpProxy
from tests.postgres import PostgresServer

NARROW = sl.values.Json(pa.schema({"id": pa.int32(), "s": pa.string()}))
WIDE = sl.values.Json(pa.schema({"id": pa.int64(), "s": pa.string()}))
KINDS = ["good"] * 8 + ["delete", "purge", "nul", "junk", "time", "long", "none", "big", "huge"]
STEPS = ["stage", "lock", "read_table", "merge", "store", "put_dead_letters"]
ALLOWED = (TransientStorageError, Contended, Conflict, Fenced)
Row = tuple[bytes | None, int, int | None, str | None]


class History:
    """A log, a table that follows it over a line that breaks, and what the table should hold."""

    def __init__(self, server: PostgresServer, line: TcpProxy, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server, self.line = server, line
        self.mode: Any = self.chance.choice(["latest", "append"])
        self.table = f"history_{uuid4().hex}"
        self.log = MemoryLog()
        self.records: list[tuple[str, bytes | None, int]] = []
        self.codec = NARROW
        self.sinks = [self.sink(), self.sink()]
        self.seen: list[str] = []
        """What was done, and what happened."""

    def sink(self) -> sl.PostgresSink:
        dsn = f"host=127.0.0.1 port={self.line.port} user={self.server.user} dbname=postgres connect_timeout=60"
        return sl.PostgresSink(dsn, table=self.table, mode=self.mode, value=self.codec, dead_letters=True)

    def asked(self, ask: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        """What the server answers over a line that does not break; again while it recovers."""
        dsn = f"host=127.0.0.1 port={self.server.port} user={self.server.user} dbname=postgres"
        while True:
            with suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as connection:
                return ask(connection)

    # --- what happens --------------------------------------------------------------------------------------------

    def append(self) -> None:
        for _ in range(self.chance.randrange(1, 9)):
            at, kind = len(self.records), self.chance.choice(KINDS)
            key = {"none": None, "long": b"x" * 5_000}.get(kind, b"k%d" % self.chance.randrange(5))
            fields = {"id": 2**40 if kind == "big" else at, "s": "s" * (1 << 20 if kind == "huge" else 3)}
            value: bytes | None = json.dumps(fields | ({"s": "a\0"} if kind == "nul" else {})).encode()
            value = {"junk": b"\xff{", "delete": None, "purge": None}.get(kind, value)
            op = {"delete": 1, "purge": 2}.get(kind, 0)
            time = -(2**63) if kind == "time" else 10**15 + at
            batch = record_batch(timestamps=[time], ops=[op], keys=[key], values=[value])
            self.log.append(batch, writer=WriterId(uuid4()), number=0).result(60)
            self.records.append((kind, key, at))

    def follow(self) -> None:
        number = self.chance.randrange(2)
        if self.chance.random() < 0.3:
            self.sinks[number] = self.sink()
        batching = Batching(records=self.chance.choice([1, 3, 100]))
        slot = self.chance.choice([None, "s", f"slot{number}"])
        sl.follow(self.log, self.sinks[number], slot, upto="end", batching=batching)

    def race(self) -> None:
        """Two followers at once, or one beside a rebuild or a replay."""
        other = self.chance.choice([self.follow, self.rebuild, self.replay])
        failed: list[BaseException] = []

        def run() -> None:
            try:
                other()
            except ALLOWED:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            self.follow()
        finally:
            thread.join()
        if failed:
            raise failed[0]

    def rebuild(self) -> None:
        with suppress(sl.errors.NotFound):
            sl.tables.rebuild(self.sink(), self.log)

    def replay(self) -> None:
        with suppress(sl.errors.NotFound):
            sl.tables.replay_letters(self.sink(), self.log)

    def widen(self) -> None:
        """Correct the codec: letters become rows."""
        self.settled(lambda: sl.follow(self.log, self.sink(), upto="end"))
        if not self.records:
            return
        self.codec = WIDE
        self.sinks = [self.sink(), self.sink()]
        self.settled(lambda: sl.tables.replay_letters(self.sink(), self.log))

    def settled(self, work: Callable[[], object]) -> None:
        for _ in range(100):
            try:
                work()
            except ALLOWED:
                continue
            return
        raise AssertionError("it never succeeds")

    # --- what goes wrong -----------------------------------------------------------------------------------------

    @contextmanager
    def fault(self) -> Iterator[None]:
        """What happens while the block runs, at most once."""
        kind = self.chance.choice(["none", "none", "bytes", "commit", "answer", "terminate", "crash"])
        self.seen.append(kind)
        self.breaks: list[threading.Timer] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS if kind in ("terminate", "crash") else ():
                patch.setattr(PostgresTransaction, name, self.struck(getattr(PostgresTransaction, name), kind))
            if kind == "bytes":
                self.line.hold("up", "down", after=self.chance.randrange(20_000))
                self.break_soon()
            elif kind in ("commit", "answer"):
                self.line.alter("up", lambda piece: self.at_commit(piece, kind))
            try:
                yield
            finally:
                for timer in self.breaks:
                    timer.join()
                self.line.heal()

    def break_soon(self) -> None:
        def broken() -> None:
            self.line.hang_up()
            self.line.heal()

        timer = threading.Timer(0.05, broken)
        timer.start()
        self.breaks.append(timer)

    def at_commit(self, piece: bytes, kind: str) -> bytes:
        """Lose a commit, or the answer to it."""
        if b"COMMIT" in piece and not self.breaks and self.chance.random() < 0.4:
            if kind == "commit":
                self.line.hang_up()
            else:
                self.line.hold("down")
            self.break_soon()
        return piece

    def struck(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The step of a transaction, before which the server's process of the connection may end."""

        def called(transaction: PostgresTransaction, *arguments: Any, **options: Any) -> Any:
            if kind not in self.seen[-1:] or self.chance.random() < 0.9:
                return real(transaction, *arguments, **options)
            self.seen.append("struck")
            self.strike(transaction.connection.info.backend_pid, is_crash=kind == "crash")
            return real(transaction, *arguments, **options)

        return called

    def strike(self, pid: int, *, is_crash: bool) -> None:
        """End the server's process of a connection; a killed one takes all others with it, and the server recovers."""
        if not is_crash:
            self.asked(lambda connection: connection.execute("SELECT pg_terminate_backend(%s)", [pid]))
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    # --- what it should be ---------------------------------------------------------------------------------------

    def expected(self, end: int) -> tuple[list[Row], list[int]]:
        rows: list[Row] = []
        newest: dict[bytes | None, Row] = {}
        letters = []
        bad = {"nul", "junk", "time"} | ({"big"} if self.codec is NARROW else set())
        bad |= {"long", "none"} if self.mode == "latest" else set()
        for kind, key, at in self.records[:end]:
            if kind in bad:
                letters.append(at)
                continue
            is_put = kind not in ("delete", "purge")
            number = 2**40 if kind == "big" else at
            text = "s" * (1 << 20 if kind == "huge" else 3)
            row = (key, at, number if is_put else None, text if is_put else None)
            rows.append(row)
            newest.pop(key, None)
            if is_put:
                newest[key] = row
        return (rows if self.mode == "append" else list(newest.values())), letters

    def stored(self, connection: psycopg.Connection[Any]) -> tuple[int, list[Row], list[int]] | None:
        """The cursor, the rows and the offsets of the letters; None if there is no table."""
        if connection.execute("SELECT to_regclass(%s)", [self.table]).fetchone() == (None,):
            return None
        cursor = connection.execute("SELECT next FROM strandline_cursors WHERE target = %s", [self.table])
        rows = connection.execute(f"SELECT _key, _offset, id, s FROM {self.table} ORDER BY _offset").fetchall()
        letters = connection.execute(f'SELECT "offset" FROM {self.table}_dead_letters ORDER BY 1').fetchall()
        return (cursor.fetchone() or (0,))[0], rows, [offset for (offset,) in letters]

    def check(self, end: int | None = None) -> None:
        """The table is exact at its cursor, and no slot is ahead of that."""
        stored = self.asked(self.stored)
        at, found, letters = stored or (0, [], [])
        assert end in (None, at)
        rows, bad = self.expected(at)
        assert [row[:3] for row in found] == [row[:3] for row in rows], self.seen
        assert found == rows
        assert letters == bad, self.seen
        assert all(state.position <= at for state in self.log.slots.list())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            move = self.chance.choice([self.append, self.append, self.follow, self.follow, self.race, self.replay])
            move = self.rebuild if self.chance.random() < 0.07 else move
            if self.codec is NARROW and self.chance.random() < 0.05:
                move = self.widen
            self.seen.append(move.__name__)
            with self.fault():
                try:
                    move()
                except ALLOWED as error:
                    self.seen.append(type(error).__name__)
                except StrandlineError as error:
                    raise AssertionError(self.seen) from error
            self.check()
        self.settled(lambda: sl.follow(self.log, self.sink(), upto="end"))
        self.check(len(self.records))
        assert not self.records or sl.tables.verify(self.sink(), self.log).is_clean


@pytest.fixture(scope="module")
def line(postgres: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy() as found:
        found.lead_to(postgres.port)
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_table_in_postgres_is_exact_whatever_happens(postgres: PostgresServer, line: TcpProxy, seed: int) -> None:
    History(postgres, line, seed).run(20)
