"""``strandline follow`` from every kind of log into every kind of table, stopped half-way and continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

import strandline as sl
from tests.cli.conftest import Run
from tests.cli.logs.test_any_log import KINDS
from tests.postgres import PostgresServer

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "city": {"type": "string"}}}

Rows = Callable[[], list[tuple[int, str]]]


def lines(*numbers: int, city: str) -> str:
    return "".join(
        json.dumps({"key": f"o-{number}", "value": {"id": number, "city": city}}) + "\n" for number in numbers
    )


class Tables:
    """Makes the address of a table of each kind, and a function that reads its rows by another library."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
        self.folder, self.patch, self.request = folder, patch, request

    def delta(self) -> tuple[str, Rows]:
        place = f"{self.folder}/tables/orders"
        return place, lambda: _rows(DeltaTable(place).to_pyarrow_table())

    def iceberg(self) -> tuple[str, Rows]:
        settings = {
            "type": "sql",
            "uri": f"sqlite:///{self.folder}/catalog.db",
            "warehouse": f"file://{self.folder}/ice",
        }
        for name, value in settings.items():
            self.patch.setenv(f"PYICEBERG_CATALOG__SHOP__{name.upper()}", value)
        self.patch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # it was read when the library was imported
        catalog = SqlCatalog("shop", **{key: value for key, value in settings.items() if key != "type"})
        catalog.create_namespace("sales")
        return "iceberg://shop/sales.orders", lambda: _rows(catalog.load_table("sales.orders").scan().to_arrow())

    def postgres(self) -> tuple[str, Rows]:
        server: PostgresServer = self.request.getfixturevalue("postgres")
        self.patch.setenv("PGUSER", server.user)
        table = f"orders_{abs(hash(str(self.folder)))}"

        def rows() -> list[tuple[int, str]]:
            with psycopg.connect(host="127.0.0.1", port=server.port, user=server.user, dbname="postgres") as database:
                return database.execute(f"select id, city from {table} order by id").fetchall()

        return f"postgresql://127.0.0.1:{server.port}/postgres#{table}", rows


def _rows(table: Any) -> list[tuple[int, str]]:
    return sorted(zip(table.column("id").to_pylist(), table.column("city").to_pylist(), strict=True))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


PAIRS = [
    *(pytest.param(kind, "postgres", id=f"{kind.__name__} to postgres") for kind in KINDS),
    *(pytest.param(KINDS[-1], table, id=f"node to {table}") for table in ("delta", "iceberg")),
    *(
        pytest.param(kind, table, id=f"{kind.__name__} to {table}", marks=pytest.mark.matrix)
        for kind in KINDS[:-1]
        for table in ("delta", "iceberg")
    ),
]


@pytest.mark.parametrize(("kind", "table"), PAIRS)
def test_a_table_of_any_kind_follows_a_log_of_any_kind_by_commands(  # noqa: PLR0917 - fixtures
    run: Run,
    kind: Callable[[Path, ExitStack], str],
    table: str,
    tmp_path: Path,
    opened: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    url = kind(tmp_path, opened)
    schema = tmp_path / "order.json"
    schema.write_text(json.dumps(SCHEMA))
    place, rows = getattr(Tables(tmp_path, monkeypatch, request), table)()

    def document(*arguments: object, given: str | None = None) -> Mapping[str, Any]:
        done = run(*arguments, "--json", given=given)
        assert done.exit_code == 0, done.output
        found: Mapping[str, Any] = json.loads(done.stdout)
        return found

    create = [] if url.startswith("grpc") else ["--create"]
    document("produce", url, *create, "--format", "json", given=lines(1, 2, 3, city="Rome"))
    follow = ("follow", url, place, "--schema", schema, "--slot", "orders")
    assert document(*follow, "--until", "2")["next"] in {2, 3}  # a batch is not divided
    document("produce", url, "--format", "json", given=lines(3, 4, city="Oslo"))
    done = document(*follow, "--until", "end")
    assert (done["next"], done["behind"]) == (5, 0)
    assert document(*follow, "--until", "end")["records"] == 0
    assert rows() == [(1, "Rome"), (2, "Rome"), (3, "Oslo"), (4, "Oslo")]
    [slot] = document("slots", url)["slots"]
    assert (slot["slot"], slot["position"]) == ("orders", 5)
    verified = run("table", "verify", place, url, "--schema", schema)
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize("place", ["iceberg://nowhere/sales.orders", "postgresql://127.0.0.1:1/shop#orders"])
def test_a_table_that_cannot_be_reached_is_one_sentence_and_nothing_is_claimed(run: Run, log: str, place: str) -> None:
    run("produce", log, "--create", given="a\n")
    done = run("follow", log, place, "--slot", "orders", "--until", "end")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    opened = sl.open(log)
    assert isinstance(opened, sl.log.ObjectLog)
    assert opened.slots.list() == []
