"""``strandline table`` on each kind of table: every command, what it refuses, and Ctrl-C at its steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

import strandline as sl
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.matrix_cases import some
from tests.postgres import PostgresServer

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "city": {"type": "string"}}}
NARROW = sl.values.Json(pa.schema({"id": pa.int64()}))
VALUE = sl.values.Json(json.dumps(SCHEMA))


class Place:
    """A log with a record that cannot become a row, and a table that follows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = sl.open(f"{folder}/log", create=True)
        with self.log.producer() as producer:
            for number in range(20):
                producer.append(key=b"k%d" % (number % 4), value=json.dumps({"id": number, "city": "Oslo"}).encode())
            producer.append(key=b"bad", value=b"no JSON")
        (folder / "schema.json").write_text(json.dumps(SCHEMA))
        self.schema = ("--schema", f"{folder}/schema.json")

    def delta(self, **options: Any) -> str:
        sink = sl.DeltaSink(
            f"{self.folder}/table", mode="append", value=VALUE, dead_letters=f"{self.folder}/letters", **options
        )
        sl.follow(self.log, sink, upto="end")
        return sink.url

    def sqlite(self) -> str:
        sink = sl.SqliteSink(f"{self.folder}/shop.db", table="orders", value=VALUE, dead_letters=True)
        sl.follow(self.log, sink, upto="end")
        return f"sqlite:{self.folder}/shop.db#orders"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_every_command_on_a_table_in_postgres(
    run: Run,  # noqa: F811
    place: Place,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dsn = f"host={postgres.host} port={postgres.port} user={postgres.user} dbname=postgres"
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE SCHEMA shop")
    sl.follow(place.log, sl.PostgresSink(dsn, table="shop.orders", value=VALUE, dead_letters=True), upto="end")
    monkeypatch.setenv("PGUSER", postgres.user)
    url, log = f"postgresql://127.0.0.1:{postgres.port}/postgres#shop.orders", place.log.url

    def said(*arguments: str, status: int = 0) -> str:
        done = run("table", *arguments)
        assert done.exit_code == status, done.output
        return " ".join(done.output.split())

    assert "applied up to offset 21; 0 records behind" in said("describe", url, log, *place.schema)
    assert "each is as the log says" in said("verify", url, log, *place.schema)
    assert "1 still cannot become rows (first: offset 20:" in said("replay", url, log, *place.schema)
    with psycopg.connect(dsn) as connection:
        connection.execute("DELETE FROM shop.orders WHERE id = 17")
    assert "1 missing, 0 too many" in said("verify", url, log, *place.schema, status=1)
    assert "4 rows were built again" in said("rebuild", url, log, "--yes", *place.schema)
    assert "each is as the log says" in said("verify", url, log, *place.schema)
    with psycopg.connect(dsn) as connection:
        assert connection.execute('SELECT "offset" FROM shop.orders_dead_letters').fetchall() == [(20,)]
    assert "at offset 21" in said("repair", url, log, *place.schema)
    assert "or its database" in said("optimize", url, status=1)
    assert "let it run its own VACUUM" in said("vacuum", url, status=1)
    assert "There is no table" in said("describe", url.replace("shop.orders", "absent"), status=1)
    assert "names a database, and no table in it" in said("describe", url.partition("#")[0], status=1)
    assert "secret" not in said("describe", url.replace("127", "me:secret@127"), status=1)


@pytest.mark.parametrize("kind", ["delta", "sqlite"])
def test_a_rebuild_sets_bad_records_aside_as_the_follower_did(run: Run, place: Place, kind: str) -> None:  # noqa: F811
    url = place.delta() if kind == "delta" else place.sqlite()
    arguments = ("table", "rebuild", url, place.log.url, "--yes", *place.schema)
    if kind == "delta":
        refused = run(*arguments)
        assert refused.exit_code == 1
        assert "as dead letters" in " ".join(refused.output.split())
        assert "dead_letters=" not in refused.output
        arguments = (*arguments, "--dead-letters", f"{place.folder}/letters")
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert run("table", "verify", url, place.log.url, *place.schema).exit_code == 0
    if kind == "delta":
        assert DeltaTable(f"{place.folder}/letters").to_pyarrow_table().column("offset").to_pylist() == [20]


@pytest.mark.parametrize("kind", ["delta", "sqlite"])
def test_a_table_is_built_again_from_a_start_and_into_another_one(run: Run, place: Place, kind: str) -> None:  # noqa: F811
    url = place.delta() if kind == "delta" else place.sqlite()
    other = f"{place.folder}/other" if kind == "delta" else f"sqlite:{place.folder}/shop.db#other"
    letters = ("--dead-letters", f"{place.folder}/letters") if kind == "delta" else ()
    arguments = ("table", "rebuild", url, place.log.url, "--yes", *place.schema, *letters)

    def said(*further: str, status: int = 0) -> str:
        done = run(*arguments, *further)
        assert done.exit_code == status, done.output
        return " ".join(done.output.split())

    rows = {"delta": (8, 20), "sqlite": (4, 4)}[kind]
    text = f"{rows[0]} rows were built again, from offset 10 up to 18, and each is as the log says."
    assert said("--from", "10", "--until", "18", "--into", other) == text
    assert said("--into", other, "--no-verify").startswith(f"{min(rows[1], 10)} rows were built again, from offset 10")
    assert f"{rows[1]} rows were built again, from offset 0 up to 21" in said()
    assert "nor a time such as" in said("--from", "soon", status=2)
    assert run("table", "verify", other, place.log.url, *place.schema).exit_code == 0


SLOW = """
import importlib, sys, time
module, owner, name, *arguments = sys.argv[1:]
owner = getattr(importlib.import_module(module), owner)
step = getattr(owner, name)
def slow(*given, **options):
    print("here", flush=True)
    for _ in range(3000):  # in slices: a thread of a library may get the signal, and would not wake a long sleep
        time.sleep(0.1)
setattr(owner, name, slow)
sys.argv = ["strandline", *arguments]
from strandline.cli.app import app
app()
"""
"""A command that waits for ever at a step, and says so."""
DELTA = ("strandline.tables.delta.table", "FollowedDelta")
COMMITS = ("strandline.tables.delta.commits", "DeltaCommits")
SINK = ("strandline.tables.delta.sink", "DeltaSink")
SQLITE = ("strandline.tables.sql.sqlite_transaction", "SqliteTransaction")


@pytest.mark.parametrize(
    ("command", "owner", "step"),
    some(
        [
            ("describe", DELTA, "open_again"),
            ("verify", DELTA, "open_again"),
            ("rebuild", COMMITS, "commit"),
            ("rebuild", COMMITS, "_settle"),
            ("rebuild", SQLITE, "merge"),
            ("rebuild", SQLITE, "store"),
            ("replay", COMMITS, "evolved"),
            ("replay", COMMITS, "commit"),
            ("repair", COMMITS, "restored"),
            ("optimize", SINK, "optimized"),
            ("vacuum", SINK, "vacuumed"),
        ],
        1,
    ),
)
def test_ctrl_c_at_any_step_is_quiet_and_leaves_a_table_that_is_right(
    run: Run,  # noqa: F811
    place: Place,
    command: str,
    owner: tuple[str, str],
    step: str,
) -> None:
    url = place.sqlite() if owner is SQLITE else place.delta()
    letters = ("--dead-letters", f"{place.folder}/letters") if owner is not SQLITE else ()
    further: tuple[str, ...] = () if command in ("optimize", "vacuum") else (place.log.url, *place.schema)
    if command == "rebuild":
        further = (*further, "--yes", *letters)
    if command == "replay":
        with place.log.producer() as producer:
            producer.append(key=b"c", value=b'{"id": 1, "city": 5}')
        place.delta()
        text = {"type": "object", "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}}
        (place.folder / "schema.json").write_text(json.dumps(text))
        further = (*further, *letters)
    if command == "repair":
        DeltaTable(url).delete("id = 7")
    arguments = ("table", command, url, *further)
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *owner, step, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert (first, rest, process.returncode) == ("here\n", "", 130), errors
    assert "Traceback" not in errors
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert run("table", "verify", url, place.log.url, *place.schema).exit_code == 0 or command == "replay"
