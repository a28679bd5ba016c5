"""What the port tells of segments, nodes and dead letters, and the actions on them; dry runs change nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.serve.api.routes import ROUTES
from strandline.serve.config.changes import PartName
from tests.serve.conftest import Running, Serve, append
from tests.serve.test_parts import LOG, cold_records

KEPT = 'retention = "consumed"\ntrim = "1s"\ngrace = "1s"\n'
COLD = '[logs.orders.cold]\nstore = "{store}"\nevery = "1s"\nlinger = "1s"\n'
NODE = (
    '[flight]\nlisten = "127.0.0.1:0"\n[logs.orders]\naddress = "./node"\ncreate = true\n'
    'node = {{ name = "a", lead = {lead}, {more} }}\n'
)
TYPED = (
    '[tables.t]\nlog = "orders"\nsink = "sqlite:t.db#t"\nmode = "append"\nschema = "schema.json"\n'
    'dead_letters = "yes"\n'
)


def post(running: Running, path: str, **body: Any) -> tuple[int, Any]:
    return running.ask(path, method="POST", body=body)


def kept(log: Any) -> str:
    """What is stored of a log's retention."""
    return str(sl.open(log.url).identity.retention)


# --- segments --------------------------------------------------------------------------------------------------


def test_the_segments_of_a_log_and_its_trimmed_records_are_served(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1", b"2")
    orders.slots.create("billing", 2)
    running = serve(LOG + KEPT + COLD.format(store=f"file://{tmp_path}/cold"))
    running.until(lambda: cold_records(orders) == 2)
    running.until(lambda: orders.bounds().first == 2)
    status, found = running.ask("/v1/logs/orders/segments")
    assert status == 200, found
    assert found["hot"] == {"first": 2, "next": 2}
    assert [(one["start"], one["end"], one["records"], one["state"]) for one in found["segments"]] == [
        (0, 1, 2, "copy-finished")
    ]
    assert running.ask("/v1/stream/orders?since=beginning") == (200, 12), "from the segment: the log is trimmed"


def test_a_log_is_not_trimmed_before_its_cold_tier_pins_what_is_not_copied(serve: Serve, orders: Any) -> None:
    append(orders, b"1", b"2")
    orders.slots.create("billing", 2)
    running = serve(LOG + KEPT + COLD.format(store="./no-whole-address"))
    running.until(lambda: running.state("cold", "orders").status == "stopped")
    running.until(lambda: "cold.orders" in running.state("trim", "orders").error)
    assert post(running, "/v1/logs/orders/trim")[0] == 503
    assert orders.bounds().first == 0
    assert running.ask("/v1/logs/orders/segments")[0] == 404


# --- nodes -----------------------------------------------------------------------------------------------------


def test_the_nodes_of_a_log_and_what_a_log_without_nodes_says(serve: Serve, orders: Any) -> None:
    running = serve(LOG + NODE.format(lead="true", more='policy = "local", region = "eu"').replace("orders]", "led]"))
    running.until_ready()
    status, found = running.ask("/v1/logs/led/nodes")
    assert status == 200, found
    assert (found["node"]["name"], found["node"]["condition"], found["error"]) == ("a", "leading", None)
    topology = found["topology"]
    assert (topology["primary"], topology["term"], topology["policy"], topology["members"]) == ("a", 1, "local", [])
    assert running.ask("/v1/logs/orders/nodes")[0] == 404
    assert post(running, "/v1/logs/orders/promote")[0] == 404


def test_a_node_is_promoted_and_a_dry_run_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    first = serve(NODE.format(lead="true", more='policy = "local"'))
    first.until_ready()
    leader = first.server.served("orders").node
    assert leader is not None
    append(sl.open(leader.url), b"1")
    more = f'policy = "local", upstream = "{leader.url}", nodes = {{ a = "{leader.url}" }}'
    text = NODE.format(lead="false", more=more).replace("./node", "./copy")
    second = serve(text.replace('name = "a"', 'name = "b"').replace("create = true\n", ""))
    node = second.server.served
    second.until(lambda: node("orders").node is not None and node("orders").node.condition == "following")
    found = second.ask("/v1/logs/orders/nodes")[1]
    assert (found["node"]["name"], found["node"]["condition"], found["topology"]["primary"]) == ("b", "following", "a")
    assert [member["name"] for member in found["topology"]["members"]] == ["b"]
    first.server.stop()
    status, would = post(second, "/v1/logs/orders/promote", dry_run=True)
    assert (status, would["was"], would["promoted"], would["dry_run"]) == (200, would["node"]["condition"], False, True)
    assert (would["was"] != "leading", would["node"]["term"], node("orders").node.status().term) == (True, 1, 1)
    status, done = post(second, "/v1/logs/orders/promote", force=True)
    assert (status, done["promoted"], done["node"]["condition"], done["node"]["term"] > 1) == (
        200,
        True,
        "leading",
        True,
    ), done
    assert post(second, "/v1/logs/orders/promote")[1]["promoted"] is False, "it leads already"
    assert second.ask("/v1/logs/orders/nodes")[1]["topology"]["primary"] == "b"


# --- retention -------------------------------------------------------------------------------------------------


def test_retention_changes_and_a_dry_run_changes_nothing(serve: Serve, orders: Any) -> None:
    running = serve(LOG)
    running.until_ready()
    for dry_run in (True, False):
        status, found = post(running, "/v1/logs/orders/retention", retention="age:7d", dry_run=dry_run)
        assert (status, found["from"], found["retention"], found["dry_run"]) == (200, "forever", "age:7d", dry_run)
        assert kept(orders) == ("forever" if dry_run else "age:7d")
    assert post(running, "/v1/logs/orders/retention", retention="age:never")[0] == 400
    assert kept(orders) == "age:7d"


def test_retention_that_the_file_says_is_changed_in_the_file(serve: Serve, orders: Any, tmp_path: Path) -> None:
    running = serve(LOG + KEPT + f'[logs.local]\naddress = "wal://{tmp_path}/local"\ncreate = true\n')
    running.until_ready()
    status, found = post(running, "/v1/logs/orders/retention", retention="forever")
    assert (status, "file" in found["detail"]) == (400, True)
    assert post(running, "/v1/logs/local/retention", retention="forever")[0] == 501
    assert kept(orders) == "consumed"


# --- dead letters and rebuilds ---------------------------------------------------------------------------------


def schema(tmp_path: Path, kind: str) -> None:
    (tmp_path / "schema.json").write_text(f'{{"type": "object", "properties": {{"id": {{"type": "{kind}"}}}}}}')


def rows(tmp_path: Path) -> list[Any]:
    with sqlite3.connect(tmp_path / "t.db") as database:
        return [one for (one,) in database.execute("SELECT id FROM t ORDER BY 1")]


@pytest.fixture
def lettered(orders: Any, tmp_path: Path) -> Any:
    """A log with two values that fit, and three that do not, for two reasons."""
    schema(tmp_path, "integer")
    append(orders, b'{"id": 1}', b'{"id": "2"}', b'{"id": "3"}', b"no JSON", b'{"id": 4}')
    return orders


def test_dead_letters_are_told_by_reason_and_replayed_once(serve: Serve, lettered: Any, tmp_path: Path) -> None:
    running = serve(LOG + TYPED)
    running.until(lambda: running.state("tables", "t").position == 5)
    status, found = running.ask("/v1/tables/t/letters")
    assert (status, found["letters"], found["more_reasons"]) == (200, 3, 0)
    assert [(one["letters"], one["first"], one["last"]) for one in found["reasons"]] == [(2, 1, 2), (1, 3, 3)]
    assert (found["first"][0]["offset"], found["first"][0]["value"]) == (1, '{"id": "2"}')
    assert post(running, "/v1/tables/t/replay")[1]["applied"] == 0, "the schema is the same"
    assert running.ask("/v1/tables/none/letters")[0] == 404
    assert post(running, "/v1/tables/none/replay")[0] == 404


def test_a_replay_after_a_corrected_schema_and_a_restart(serve: Serve, lettered: Any, tmp_path: Path) -> None:
    settings = LOG + TYPED.replace("sqlite:t.db#t", "./table").replace('"yes"', '"./letters"')
    first = serve(settings)
    first.until(lambda: first.state("tables", "t").position == 5)
    first.server.stop()
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"id": {"type": "integer"}, "more": {"type": "string"}}}'
    )
    again = serve(settings)
    again.until(lambda: again.state("tables", "t").position == 5)
    assert again.ask("/v1/tables/t/letters")[1]["letters"] == 3, "letters outlive the process"
    for dry_run in (True, False):
        status, found = post(again, "/v1/tables/t/replay", dry_run=dry_run)
        assert (status, found["applied"], found["unreadable"], found["dry_run"]) == (200, 0, 3, dry_run)


def test_a_dry_replay_says_what_a_replay_would_apply_and_changes_nothing(orders: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    append(orders, b'{"id": 3000000000}', b"no JSON")

    def sink(kind: pa.DataType) -> Any:
        value = sl.values.Json(pa.schema({"id": kind}))
        return sl.DeltaSink(str(tmp_path / "table"), mode="append", value=value, dead_letters=str(tmp_path / "letters"))

    sl.follow(orders, sink(pa.int32()), upto="end")
    for _ in range(2):
        would = sink(pa.int64()).replay_letters(orders, dry_run=True)
        assert (would.applied, would.unreadable) == (1, 1)
        assert sink(pa.int64()).stored_letters(orders).num_rows == 2
        assert sl.tables.describe(sink(pa.int64())).rows == 0
    assert sink(pa.int64()).replay_letters(orders).applied == 1


def test_a_table_is_built_again_by_its_follower_which_goes_on(serve: Serve, lettered: Any, tmp_path: Path) -> None:
    running = serve(LOG + TYPED)
    running.until(lambda: running.state("tables", "t").position == 5)
    assert rows(tmp_path) == [1, 4]
    with sqlite3.connect(tmp_path / "t.db") as database:
        database.execute("DELETE FROM t WHERE id = 4")
    status, would = post(running, "/v1/tables/t/rebuild", dry_run=True)
    assert (status, would) == (200, {"part": "tables.t", "start": 0, "upto": 5, "dry_run": True})
    append(lettered, b'{"id": 5}')
    running.until(lambda: running.state("tables", "t").position == 6)
    assert rows(tmp_path) == [1, 5]
    assert post(running, "/v1/tables/t/rebuild", start=1)[1]["start"] == 1
    running.until(lambda: running.state("tables", "t").position == 6 and rows(tmp_path) == [4, 5])
    append(lettered, b'{"id": 6}')
    running.until(lambda: rows(tmp_path) == [4, 5, 6])
    assert running.state("tables", "t").status == "running"


def test_what_cannot_be_rebuilt_is_refused_before_the_follower_is_stopped(serve: Serve, lettered: Any) -> None:
    lettered.set_retention("consumed")
    watched = TYPED.replace("tables.t]", "tables.w]").replace("#t", "#w") + "follow = false\n"
    running = serve(LOG + TYPED + 'slot = "s"\n' + watched)
    running.until(lambda: running.state("tables", "t").position == 5)
    append(lettered, b'{"id": 5}')
    running.until(lambda: running.state("tables", "t").position == 6)
    lettered.trim()
    assert lettered.bounds().first == 6
    for body, status in [
        ({}, 410),
        ({"start": 0}, 410),
        ({"start": "soon"}, 400),
        ({"start": 9}, 410),
        ({"x": 1}, 400),
    ]:
        assert running.ask("/v1/tables/t/rebuild", method="POST", body=body)[0] == status, body
    assert running.ask("/v1/tables/t/rebuild", method="POST", body={"start": 6})[0] == 400, "the table would be empty"
    assert post(running, "/v1/tables/w/rebuild")[0] == 400
    assert post(running, "/v1/tables/none/rebuild")[0] == 404
    assert running.state("tables", "t").status == "running"


def test_a_rebuild_that_fails_leaves_the_table_as_it_was(serve: Serve, lettered: Any, tmp_path: Path) -> None:
    running = serve(LOG + TYPED.replace('dead_letters = "yes"\n', ""))
    running.until(lambda: running.state("tables", "t").status == "stopped")
    assert "offset 1" in running.state("tables", "t").error
    running = serve(LOG + TYPED)
    running.until(lambda: running.state("tables", "t").position == 5)
    follower = running.server.table("t")
    broken = serve_broken(follower)
    assert post(running, "/v1/tables/t/rebuild")[0] == 200
    running.until(lambda: running.state("tables", "t").status == "stopped")
    assert (rows(tmp_path), running.state("tables", "t").error) == ([1, 4], broken)
    assert post(running, "/v1/parts/tables/t/resume")[0] == 200
    running.until(lambda: running.state("tables", "t").position == 5)


def serve_broken(follower: Any) -> str:
    """Let the next rebuild of a table fail in a way that trying again does not help."""
    original, said = follower.repairs._sink, "the codec is wrong"

    def sink(log: Any) -> Any:
        if follower.repairs._wanted is not None:
            raise sl.errors.InvalidInput(said)
        return original(log)

    follower.repairs._sink = sink
    return said


# --- dry runs --------------------------------------------------------------------------------------------------

BODIES: dict[str, dict[str, Any]] = {
    "/v1/logs/{log}/slots": {"name": "new", "at": 0},
    "/v1/logs/{log}/slots/{slot}/reset": {"at": 0},
    "/v1/logs/{log}/retention": {"retention": "bytes:1"},
    "/v1/tables/{table}/rebuild": {"start": 1},
}
ACTIONS = [route.path for route in ROUTES if route.method == "POST"]


def test_a_dry_run_of_any_action_changes_nothing(serve: Serve, lettered: Any, tmp_path: Path) -> None:
    lettered.slots.create("billing", 3)
    running = serve(LOG + TYPED)
    running.until(lambda: running.state("tables", "t").position == 5)

    def seen() -> Any:
        log = running.ask("/v1/logs/orders")[1]
        slots = [(one["slot"], one["position"], one["epoch"], one["holder"]) for one in log["slots"]]
        part = running.state("tables", "t")
        stored = sorted(path.relative_to(tmp_path) for path in (tmp_path / "orders").rglob("*"))
        letters = running.ask("/v1/tables/t/letters")[1]["letters"]
        return log["first"], log["next"], slots, kept(lettered), rows(tmp_path), letters, part, stored

    before = seen()
    for path in ACTIONS:
        where = path.format(log="orders", slot="billing", table="t", section="tables", name="t", verb="pause")
        status, done = post(running, where, dry_run=True, **BODIES.get(path, {}))
        if path.endswith("promote"):
            assert status == 404, "the log has no node"
        else:
            assert (status, done["dry_run"]) == (200, True), (path, done)
        assert seen() == before, path


# --- who may ---------------------------------------------------------------------------------------------------


CALLERS = {
    "admin": "admin", "reader": "read", "app": "client", "scoped": "read:orders,append:orders",
    "billing": "consume:orders/billing", "appender": "append", "elsewhere": "client:payments",
}  # fmt: skip


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """A file with a token for each caller."""
    (tmp_path / "tokens").write_text("\n".join(f"{name} {may} {token(name)}" for name, may in CALLERS.items()))
    return '[security]\ntokens = "tokens"\n'


def token(name: str) -> str:
    return f"token-of-{name}-and-more"


def test_these_actions_take_the_admin_of_their_log(serve: Serve, tokens: str, lettered: Any) -> None:
    running = serve(tokens + LOG + TYPED)
    running.until(lambda: running.state("tables", "t").position == 5)
    actions = [("logs/orders/retention", {"retention": "consumed"}), ("logs/orders/promote", {})]
    actions += [("tables/t/replay", {}), ("tables/t/rebuild", {}), ("tables/none/rebuild", {})]
    for name in ("reader", "appender", "app", "scoped", "billing", "elsewhere", None):
        for path, body in actions:
            given = None if name is None else token(name)
            status, _ = running.ask(f"/v1/{path}", method="POST", body=body, token=given)
            assert status == (401 if name is None else 403), (name, path)
    for name, may in [("reader", 200), ("scoped", 200), ("billing", 200), ("appender", 403), ("elsewhere", 403)]:
        assert running.ask("/v1/tables/t/letters", token=token(name))[0] == may, name
        assert running.ask("/v1/logs/orders/segments", token=token(name))[0] == (404 if may == 200 else 403), name
    assert running.ask("/v1/tables/none/letters", token=token("scoped"))[0] == 403
    assert running.ask("/v1/tables/none/letters", token=token("admin"))[0] == 404
    assert kept(lettered) == "forever"
    assert running.server.part(PartName("tables", "t")).state.status == "running"
