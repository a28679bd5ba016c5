"""``strandline follow --infer``: a table whose columns are inferred once, recorded in it, and kept."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

import strandline as sl
from tests.cli.conftest import Run
from tests.cli.tables.test_follow_everywhere import Rows, Tables, lines

ABOUT = "For a first look: columns inferred from 3 records of the offsets 0 up to 3, and fixed since."


def description(kind: str, place: str) -> str | None:
    """What a table says about itself, as other programs see it."""
    match kind:
        case "delta":
            return DeltaTable(place).metadata().description
        case "iceberg":
            return load_catalog("shop").load_table("sales.orders").properties["comment"]
        case "postgres":
            url, _, table = place.partition("#")
            with psycopg.connect(url) as connection:
                found = connection.execute("SELECT obj_description(%s::regclass)", [table]).fetchone()
            return None if found is None else found[0]
    return ABOUT  # SQLite has no place for it


def sqlite_table(folder: Path) -> tuple[str, Rows]:
    def rows() -> list[tuple[int, str]]:
        return sqlite3.connect(folder / "shop.db").execute("SELECT id, city FROM orders").fetchall()

    return f"sqlite:{folder}/shop.db#orders", rows


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tables:
    return Tables(tmp_path, monkeypatch, request)


@pytest.mark.parametrize("kind", ["delta", "iceberg", "postgres", "sqlite"])
def test_a_restart_uses_the_columns_that_the_table_has_recorded(run: Run, log: str, tables: Tables, kind: str) -> None:
    place, rows = sqlite_table(tables.folder) if kind == "sqlite" else getattr(tables, kind)()
    letters = {"delta": f"{tables.folder}/letters", "iceberg": "sales.letters"}.get(kind, "yes")
    follow = ("follow", log, place, "--until", "end")
    run("produce", log, "--create", "--format", "json", given=lines(1, 2, 3, city="Oslo"))
    first = run(*follow, "--infer")
    assert (first.exit_code, sorted(rows())) == (0, [(1, "Oslo"), (2, "Oslo"), (3, "Oslo")])
    assert description(kind, place) == ABOUT
    recorded = sl.tables.existing(place).recorded()
    assert recorded is not None
    assert json.loads(recorded.inferred or "")["description"] == ABOUT

    # A sample of all records would leave the field out by now; the table keeps it, and the misfit is a dead letter.
    run("produce", log, "--format", "json", given='{"key": "o-4", "value": {"id": "four", "city": "Rome"}}\n')
    run("produce", log, "--format", "json", given=lines(2, 5, city="Rome"))
    refused = run(*follow, "--infer")
    assert refused.exit_code == 1
    assert "Expected `int | null`, got `str` - at `$.id`" in refused.stderr
    for again in ((), ("--infer",)):
        done = run(*follow, *again, "--dead-letters", letters)
        assert done.exit_code == 0, done.stderr
    assert sorted(rows()) == [(1, "Oslo"), (2, "Rome"), (3, "Oslo"), (5, "Rome")]
    assert description(kind, place) == ABOUT
    checked = run("table", "verify", place, log)
    assert checked.exit_code == 0, checked.stdout + checked.stderr


def test_what_was_ambiguous_is_said_and_all_sampled_records_become_rows(run: Run, log: str, tmp_path: Path) -> None:
    values = [{"id": n, "code": n if n % 2 else "x", "price": "9.50", "at": 1767225600000 + n} for n in range(50)]
    given = "".join(json.dumps({"key": f"{n}", "value": value}) + "\n" for n, value in enumerate(values))
    run("produce", log, "--create", "--format", "json", given=given)
    done = run("follow", log, tmp_path / "table", "--infer", "--until", "end", "--dead-letters", tmp_path / "letters")
    assert done.exit_code == 0
    assert done.stderr.count("note: ") == 3
    assert "dead letter" not in done.stdout
    table = DeltaTable(tmp_path / "table").to_pyarrow_table()
    assert (table.num_rows, table.column_names[:3]) == (50, ["id", "price", "at"])


def test_a_first_look_becomes_a_table_with_an_edited_schema(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--format", "json", given=lines(1, city="Oslo"))
    follow: tuple[Any, ...] = ("follow", log, tmp_path / "table", "--until", "end")
    assert run(*follow, "--infer").exit_code == 0
    recorded = sl.tables.existing(tmp_path / "table").recorded()
    assert recorded is not None
    edited = json.loads(recorded.inferred or "")
    edited["properties"]["gift"] = {"type": "boolean"}
    (tmp_path / "order.json").write_text(json.dumps(edited))
    given = '{"key": "o-2", "value": {"id": 2, "city": "Rome", "gift": true}}\n'
    run("produce", log, "--format", "json", given=given)
    done = run(*follow, "--schema", tmp_path / "order.json")
    assert done.exit_code == 0, done.stderr
    assert DeltaTable(tmp_path / "table").to_pyarrow_table().sort_by("id")["gift"].to_pylist() == [None, True]


def test_a_first_look_is_refused_where_nothing_is_to_be_inferred(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--format", "json", given="")
    follow: tuple[Any, ...] = ("follow", log, tmp_path / "table", "--until", "end")
    empty = run(*follow, "--infer")
    assert empty.exit_code == 1
    assert "There is no value to infer a schema from" in empty.stderr
    run("produce", log, "--format", "json", given=lines(1, city="Oslo"))
    assert run(*follow).exit_code == 0
    there = run(*follow, "--infer")
    assert there.exit_code == 1
    assert "its columns were not inferred: leave out --infer" in there.stderr
    for other in (("--no-decode",), ("--schema", "x.json"), ("--by", "source.table")):
        assert run(*follow, "--infer", *other).exit_code == 2
