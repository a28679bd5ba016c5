"""``by`` of a table: one log into a table for each name among its records, in one part of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

import strandline as sl
from strandline.followers.routes import follower, pacing
from strandline.serve.config.changes import PartName
from tests.serve.conftest import Running, Serve
from tests.serve.test_parts import LOG

MANY = (
    '[tables.shop]\nlog = "orders"\nsink = "./tables/{name}"\nby = "table"\nschema = "./schemas/{name}.json"\n'
    'mode = "append"\npartition_by = ["day(_timestamp)"]\nslot = "shop"\ndead_letters = "./letters/{name}"\n'
)


def add(log: Any, *rows: tuple[str | None, Any]) -> None:
    with log.producer() as producer:
        for table, x in rows:
            producer.append(value=json.dumps({"table": table, "x": x}).encode())


def held(folder: Path, name: str) -> list[int]:
    try:
        return sorted(DeltaTable(str(folder / "tables" / name)).to_pyarrow_table()["x"].to_pylist())
    except TableNotFoundError:  # the folder is there before the table
        return []


@pytest.fixture
def shop(orders: Any, tmp_path: Path) -> Any:
    """A log of two tables' rows, with a schema for each and one for a third."""
    (tmp_path / "schemas").mkdir()
    for name in ("orders", "users", "new"):
        fields = {"x": {"type": "integer"}}
        (tmp_path / "schemas" / f"{name}.json").write_text(json.dumps({"type": "object", "properties": fields}))
    add(orders, ("orders", 1), ("users", 2), ("orders", 3))
    return orders


def members(running: Running) -> dict[str, dict[str, Any]]:
    [found] = running.ask("/v1/tables")[1]["tables"]
    return {one["name"]: one for one in found["tables"]}


def test_each_name_has_its_table_and_a_new_one_gets_it_when_it_appears(
    serve: Serve, shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "ALIGNED_SECONDS", 0.5)
    monkeypatch.setattr(follower, "_NAMES_SECONDS", 0.5)  # the slot waits for the names, and the names for this
    running = serve(LOG + MANY)
    running.until(lambda: (held(tmp_path, "orders"), held(tmp_path, "users")) == ([1, 3], [2]))
    add(shop, ("new", 4), ("users", 5), ("users", "no number"))
    running.until(lambda: (held(tmp_path, "new"), held(tmp_path, "users")) == ([4], [2, 5]))
    running.until(lambda: running.state("tables", "shop").position == 6)
    running.until(lambda: {one["position"] for one in members(running).values()} == {6})
    found = members(running)
    assert {name: one["status"] for name, one in found.items()} == dict.fromkeys(
        ("orders", "users", "new"), "following"
    )
    assert [found[name]["dead_letters"] for name in ("orders", "users")] == [0, 1]
    assert (tmp_path / "letters" / "users" / "_delta_log").is_dir()
    assert DeltaTable(str(tmp_path / "tables" / "new")).metadata().partition_columns == ["_timestamp_day"]
    running.until(lambda: shop.slots.get("shop").position == 6)
    assert running.ask("/v1/tables/shop/letters")[0] == 501
    assert running.ask("/v1/tables/shop/rebuild", method="POST", body={"dry_run": True})[0] == 501


def test_a_restarted_server_goes_on_with_every_table(serve: Serve, shop: Any, tmp_path: Path) -> None:
    first = serve(LOG + MANY)
    first.until(lambda: first.state("tables", "shop").position == 3)
    first.server.stop()
    add(shop, ("users", 4))
    again = serve(LOG + MANY)
    again.until(lambda: held(tmp_path, "users") == [2, 4])
    assert held(tmp_path, "orders") == [1, 3], "each record once"
    for name in ("orders", "users"):
        schema = (tmp_path / "schemas" / f"{name}.json").read_text()
        sink = sl.tables.existing(str(tmp_path / "tables" / name), value=sl.values.Json(schema))
        assert sl.tables.verify(sink, shop).is_clean


def test_a_table_that_fails_is_told_and_stops_no_other(serve: Serve, shop: Any, tmp_path: Path) -> None:
    (tmp_path / "schemas" / "users.json").unlink()
    running = serve(LOG + MANY)
    running.until(lambda: held(tmp_path, "orders") == [1, 3])
    running.until(lambda: members(running)["users"]["status"] == "failing")
    assert "users.json" in members(running)["users"]["error"]
    assert running.state("tables", "shop").status == "running"
    fields = {"x": {"type": "integer"}}
    (tmp_path / "schemas" / "users.json").write_text(json.dumps({"type": "object", "properties": fields}))
    running.until(lambda: held(tmp_path, "users") == [2])


def test_change_events_of_many_tables_become_rows_and_a_delete_takes_its_row_away(
    serve: Serve, orders: Any, tmp_path: Path
) -> None:
    (tmp_path / "schemas").mkdir()
    for name, field, kind in (("orders", "city", "string"), ("users", "age", "integer")):
        fields = {"id": {"type": "integer"}, field: {"type": kind}}
        (tmp_path / "schemas" / f"{name}.json").write_text(json.dumps({"type": "object", "properties": fields}))
    first, second = {"id": 1, "city": "Oslo"}, {"id": 2, "city": "Turin"}
    events = [
        ("r", "orders", None, first),
        ("r", "orders", None, second),
        ("c", "users", None, {"id": 1, "age": 30}),
        ("u", "orders", None, {**second, "city": "Rome"}),
        ("d", "orders", {"id": 1, "city": None}, None),
    ]
    with orders.producer() as producer:
        for op, table, before, after in events + events[3:]:  # a capture tool may repeat its last events
            event = {"op": op, "source": {"table": table}, "before": before, "after": after}
            producer.append(value=json.dumps(event).encode())
    many = 'log = "orders"\nby = "source.table"\nschema = "./schemas/{name}.json"\nenvelope = "debezium"\n'
    latest = f'[tables.shop]\n{many}sink = "./tables/{{name}}"\nkey = ["id"]\n'
    running = serve(LOG + latest + f'[tables.all]\n{many}sink = "./all/{{name}}"\nmode = "append"\n')
    running.until(lambda: {running.state("tables", name).position for name in ("shop", "all")} == {7})

    def rows(name: str) -> list[dict[str, Any]]:
        found = DeltaTable(str(tmp_path / name)).to_pyarrow_table().to_pylist()
        return [{key: value for key, value in row.items() if not key.startswith("_")} for row in found]

    running.until(lambda: rows("tables/orders") == [{"id": 2, "city": "Rome"}])
    assert rows("tables/users") == [{"id": 1, "age": 30}]
    assert [row["city"] for row in rows("all/orders")].count("Rome") == 2, "a table of all changes has repetitions"


def test_records_without_a_name_stop_the_part_or_go_where_the_file_says(
    serve: Serve, shop: Any, tmp_path: Path
) -> None:
    add(shop, (None, 4), ("audit", 5))
    without = 'without = ["audit"]\n'
    running = serve(LOG + MANY + without)
    running.until(lambda: running.state("tables", "shop").status == "stopped")
    assert "no table of the route" in running.state("tables", "shop").error
    running.server.stop()
    again = serve(LOG + MANY + without + 'unrouted = "./tables/rest"\n')
    again.until(lambda: again.state("tables", "shop").position == 5)
    rest = DeltaTable(str(tmp_path / "tables" / "rest")).to_pyarrow_table()
    assert sorted(rest["offset"].to_pylist()) == [3, 4]


def test_a_part_of_many_tables_is_paused_and_goes_on(serve: Serve, shop: Any, tmp_path: Path) -> None:
    running = serve(LOG + MANY)
    running.until(lambda: running.state("tables", "shop").position == 3)
    path = "/v1/parts/tables/shop"
    assert running.ask(f"{path}/pause", method="POST")[1]["status"] == "paused"
    add(shop, ("users", 4))
    assert running.ask(f"{path}/resume", method="POST")[0] == 200
    running.until(lambda: held(tmp_path, "users") == [2, 4])
    assert running.server.part(PartName("tables", "shop")).state.status == "running"
