"""``strandline follow --by``: a table for each name among the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from strandline.tables.routes.named import names_beside
from tests.cli.conftest import Run

TABLES = "./tables/{name}"


@pytest.fixture
def shop(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run("create", "./shop")
    append(run, ("orders", 1), ("users", 2), ("orders", 3))
    return tmp_path


def append(run: Run, *rows: tuple[str | None, int], **more: object) -> None:
    lines = [{"key": f"{table}/{x}", "value": {"table": table, "x": x, **more}} for table, x in rows]
    run("produce", "./shop", "--format", "json", given="".join(json.dumps(line) + "\n" for line in lines))


def held(folder: Path, name: str, column: str = "x") -> list[object]:
    return sorted(DeltaTable(str(folder / "tables" / name)).to_pyarrow_table()[column].to_pylist())


def schema(folder: Path, name: str, **types: str) -> None:
    (folder / "schemas").mkdir(exist_ok=True)
    document = {"type": "object", "properties": {field: {"type": kind} for field, kind in types.items()}}
    (folder / "schemas" / f"{name}.json").write_text(json.dumps(document))


@pytest.mark.parametrize("by", ["table", "key:/"])
def test_each_name_has_its_table_and_a_new_one_gets_it_when_it_appears(run, shop, by):
    for name in ("orders", "users", "new"):
        schema(shop, name, x="integer")
    follow = ("follow", "./shop", TABLES, "--by", by, "--schema", "./schemas/{name}.json", "--slot", "s")
    done = json.loads(run(*follow, "--until", "end", "--json").stdout)
    assert {one["name"]: one["records"] for one in done["tables"]} == {"orders": 2, "users": 1}
    assert (done["records"], done["next"], done["behind"], done["interrupted"]) == (3, 3, 0, False)
    append(run, ("new", 4), ("users", 5))
    assert "2 records in 3 commits to 3 tables" in run(*follow, "--until", "end").stdout
    assert [held(shop, name) for name in ("orders", "users", "new")] == [[1, 3], [2, 5], [4]]
    verified = run("table", "verify", "./tables/new", "./shop", "--schema", "./schemas/new.json")
    assert verified.exit_code == 0


def test_a_table_without_a_schema_file_is_told_and_stops_no_other(run, shop):
    schema(shop, "users", x="integer")
    follow = ("follow", "./shop", TABLES, "--by", "table", "--schema", "./schemas/{name}.json", "--until", "end")
    failed = run(*follow)
    assert "The table orders is at offset -: The rule has no sink for the name 'orders'" in failed.stderr
    assert held(shop, "users") == [2]
    schema(shop, "orders", x="integer")
    run(*follow)
    assert held(shop, "orders") == [1, 3]


def test_records_without_a_name_end_the_command_or_go_to_a_table_or_are_skipped(run, shop):
    append(run, (None, 4))
    follow = ("follow", "./shop", TABLES, "--by", "table", "--until", "end")
    assert "1 record is for no table of the route (first: offset 3, key b'None/4')" in run(*follow).stderr
    assert json.loads(run(*follow, "--unrouted", "skip", "--json").stdout)["unrouted"] == 1
    run(*follow, "--unrouted", "./tables/rest")
    assert held(shop, "rest", "offset") == [3]


def test_tables_of_a_database_remember_their_names_where_they_are_told_to(run, shop):
    follow = ("follow", "./shop", "sqlite:shop.db#{name}", "--by", "table", "--until", "end", "--slot", "s")
    assert "name another one by --names" in " ".join(run(*follow).stderr.replace("│", "").split())
    for _ in range(2):
        done = json.loads(run(*follow, "--names", "./names", "--json").stdout)
        assert {one["name"]: one["next"] for one in done["tables"]} == {"orders": 3, "users": 3}
    assert (shop / "names" / "names.json").exists()


def test_a_name_is_left_out(run, shop):
    follow = ("follow", "./shop", TABLES, "--by", "table", "--until", "end", "--json")
    done = json.loads(run(*follow, "--without", "users", "--unrouted", "skip").stdout)
    assert ([one["name"] for one in done["tables"]], done["unrouted"]) == (["orders"], 1)


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("./t/{name}", "./t/_strandline_route"),
        ("{name}", "_strandline_route"),
        ("/{name}", "/_strandline_route"),
        ("s3://b/{name}/orders", "s3://b/_strandline_route"),
        ("./t/shop_{name}", None),
        ("./t/{name}_shop", None),
        ("s3://{name}", None),
        ("iceberg://catalog/{name}", None),
        ("postgresql://host/db#shop.{name}", None),
    ],
)
def test_names_are_remembered_beside_the_tables(table, place):
    assert names_beside(table) == place


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("./tables/x", "--by", "table"), "has {name} where the name goes"),
        ((TABLES,), "say by --by where the names are"),
        ((TABLES, "--by", "column:x"), "header:NAME or key:SEPARATOR"),
        ((TABLES, "--by", "a..b"), "field is a path such as"),
        (("./tables/x", "--unrouted", "skip"), "give --by, too"),
        (("./tables/x", "--names", "./x"), "give --by, too"),
        (("./tables/x_{name}", "--by", "table"), "name another one by --names"),
    ],
)
def test_what_does_not_fit_together_is_said(run, shop, more, said):
    assert said in " ".join(run("follow", "./shop", *more, "--until", "end").stderr.replace("│", "").split())


def test_change_events_become_rows_by_the_envelope_and_the_table_is_verified_with_it(run, shop):
    schema(shop, "orders", id="integer", x="integer")
    run("create", "./events")
    rows = [{"id": 1, "x": 1}, {"id": 2, "x": 2}]
    changes = [("r", None, rows[0]), ("c", None, rows[1]), ("u", rows[1], {"id": 2, "x": 3}), ("d", rows[0], None)]
    lines = [{"op": op, "before": before, "after": after, "table": "orders"} for op, before, after in changes]
    given = "".join(json.dumps({"value": line}) + "\n" for line in lines)
    run("produce", "./events", "--format", "json", given=given)
    schemas = ("--schema", "./schemas/{name}.json", "--envelope", "debezium", "--key", "id")
    run("follow", "./events", TABLES, "--by", "table", *schemas, "--until", "end")
    assert held(shop, "orders") == [3]
    verify = ("table", "verify", "./tables/orders", "./events", "--schema", "./schemas/orders.json", "--key", "id")
    assert run(*verify, "--envelope", "debezium").exit_code == 0
    assert run(*verify).exit_code != 0


@pytest.mark.parametrize("more", [(), ("--infer",)])
def test_an_envelope_without_a_schema_is_refused(run, shop, more):
    refused = run("follow", "./shop", "./tables/all", "--envelope", "debezium", *more, "--until", "end")
    assert refused.exit_code != 0
    assert "--schema" in refused.stderr
    assert not (shop / "tables").exists()
