"""Parts of one file: each setting does what it says, and no part stops another."""

from __future__ import annotations

import sqlite3
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import NotFound, NotReady, StrandlineError
from strandline.serve.config.changes import PartName
from strandline.serve.config.reading import parse_config
from strandline.serve.parts.states import Status
from strandline.storage.env import Env
from strandline.testing import SimulatedDisk
from strandline.tier.verify import untiered
from tests.serve.conftest import Serve, append

LOG = '[logs.orders]\naddress = "./orders"\n'
TABLE = '[tables.orders]\nlog = "orders"\nsink = "sqlite:t.db#orders"\nmode = "append"\n'


def cold_records(log: Any) -> int:
    """How many records are in the cold tier; 0 before there is one."""
    try:
        return int(log.bounds().next - untiered(log).records)
    except StrandlineError:
        return 0


def rows(path: Path, table: str = "orders") -> list[bytes]:
    """The values in a table."""
    with sqlite3.connect(path) as database:
        try:
            return [value for (value,) in database.execute(f'SELECT value FROM "{table}" ORDER BY "offset"')]
        except sqlite3.OperationalError:  # the file is there before the table
            return []


def test_a_log_and_a_table_from_one_file(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1", b"2")
    running = serve(LOG + TABLE + 'slot = "billing"\n')
    running.until(lambda: running.state("tables", "orders").position == 2)
    assert rows(tmp_path / "t.db") == [b"1", b"2"]
    append(orders, b"3")
    running.until(lambda: running.state("tables", "orders").position == 3)
    assert rows(tmp_path / "t.db") == [b"1", b"2", b"3"]
    assert [slot.name for slot in orders.slots.list()] == ["billing"]


def test_every_setting_of_a_table_reaches_its_sink(serve: Serve, orders: Any, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"id": {"type": "integer"}, "c": {"type": "string"}}}'
    )
    with orders.producer() as producer:
        producer.append(key=b"1", value=b'{"id": 1, "c": "x"}')
        producer.append(key=b"1", value=b'{"id": 1, "c": "y"}')
        producer.append(key=b"bad", value=b"no json")
    running = serve(
        LOG + '[tables.t]\nlog = "orders"\nsink = "./table"\nmode = "append"\nschema = "schema.json"\nkey = ["id"]\n'
        'tombstones = "dead-letters"\npartition_by = ["c"]\ncluster_by = ["id"]\nupkeep = "24h"\n'
        'dead_letters = "./letters"\nslot = "s"\nstart = "retained"\n'
    )
    running.until(lambda: running.state("tables", "t").position == 3)
    sink = sl.tables.existing(
        str(tmp_path / "table"),
        value=sl.values.Json((tmp_path / "schema.json").read_text()),
        key="id",
        dead_letters=str(tmp_path / "letters"),
    )
    recorded = sink.recorded()
    assert recorded is not None
    assert (recorded.opened_as, recorded.layout.partition_by, recorded.layout.cluster_by) == ("append", ("c",), ("id",))
    assert sl.tables.describe(sink).rows == 2
    assert (tmp_path / "letters" / "_delta_log").is_dir()


def test_a_table_that_another_process_follows_is_only_watched(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    running = serve(LOG + TABLE + "follow = false\n")
    running.until_works("tables", "orders")
    assert running.state("tables", "orders").position is None
    sl.follow(orders, sl.SqliteSink(str(tmp_path / "t.db"), table="orders", mode="append"), upto="end")
    running.until(lambda: running.state("tables", "orders").position == 1)
    append(orders, b"2")
    running.until(lambda: running.lag("tables", "orders") == 1)
    assert rows(tmp_path / "t.db") == [b"1"]


def test_a_table_that_fails_is_shown_and_stops_no_other(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    (tmp_path / "file").write_text("in the way")
    running = serve(
        LOG + TABLE + '[tables.bad]\nlog = "orders"\nsink = "./file"\nmode = "append"\n'
        '[tables.wrong]\nlog = "orders"\nsink = "./typed"\nmode = "append"\nschema = "missing.json"\n'
    )
    running.until(lambda: running.state("tables", "orders").position == 1)
    running.until(lambda: running.state("tables", "bad").error and running.state("tables", "wrong").error)
    assert "missing.json cannot be read" in running.state("tables", "wrong").error
    assert running.ask("/readyz") == (200, "ok\n")
    append(orders, b"2")
    running.until(lambda: running.state("tables", "orders").position == 2)


def test_a_table_that_diverged_stops_with_its_sentence_until_it_is_resumed(
    serve: Serve, orders: Any, tmp_path: Path
) -> None:
    other = sl.open(str(tmp_path / "other"), create=True)
    append(other, b"x", b"y")
    sl.follow(other, sl.SqliteSink(str(tmp_path / "t.db"), table="orders", mode="append"), upto="end")
    append(orders, b"1")
    running = serve(LOG + TABLE)
    running.until(lambda: running.state("tables", "orders").status is Status.STOPPED)
    assert "follow" in running.state("tables", "orders").error
    (tmp_path / "t.db").unlink()
    running.server.part(PartName("tables", "orders")).resume()
    running.until(lambda: running.state("tables", "orders").position == 1)


def test_ingests_of_a_log_of_the_file_and_of_an_address(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1", b"2")
    running = serve(
        LOG + '[logs.copy]\naddress = "./copy"\ncreate = true\n'
        '[ingest.one]\nsource = "orders"\ntarget = "copy"\nslot = "mine"\nstart = "beginning"\nskip_trimmed = true\n'
        '[ingest.two]\nsource = "./orders"\ntarget = "./second"\n'
    )
    running.until(lambda: running.state("ingest", "one").position == 2)
    running.until(lambda: running.state("ingest", "two").position == 2)
    assert sl.open(str(tmp_path / "copy")).bounds().next == 2
    assert "mine" in [slot.name for slot in orders.slots.list()]


def test_retention_and_limits_of_the_file_are_stored_with_an_object_log(
    serve: Serve, orders: Any, tmp_path: Path
) -> None:
    running = serve(LOG + 'retention = "consumed"\nslot_lag = "1GiB"\nslot_idle = "7d"\n')
    running.until_ready()
    found = sl.open(str(tmp_path / "orders"))
    assert str(found.identity.retention) == "consumed"
    assert (found.slot_limits().lag_bytes, found.slot_limits().idle_seconds) == (1 << 30, 604800)


@pytest.mark.parametrize("address", ["./orders", "wal://{}/wal"])
def test_a_log_is_trimmed_in_rounds(serve: Serve, tmp_path: Path, address: str) -> None:
    address = address.format(tmp_path)
    log = sl.open(address if "://" in address else str(tmp_path / "orders"), create=True)
    for value in (b"1", b"2", b"3"):
        append(log, value)
    log.slots.create("s", 2)
    log.close()
    running = serve(f'[logs.orders]\naddress = "{address}"\nretention = "consumed"\ntrim = "1s"\ngrace = "0s"\n')
    running.until_ready()
    if "wal" in address:  # trims whole files: here that there are rounds, and that they measure
        running.until_works("trim", "orders")
    else:
        running.until(lambda: running.server.log("orders").bounds().first == 2)
    running.until(lambda: 'slot="s"' in running.ask("/metrics")[1])


def test_a_cold_tier_is_attached_and_kept_in_step(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1", b"2")
    running = serve(
        LOG
        + '[logs.orders.cold]\nstore = "./cold"\nevents = "./events"\nevery = "1s"\ntarget = "1MiB"\n'
        'linger = "0s"\nretention = "forever"\ncompact = true\n'.replace("./", f"file://{tmp_path}/")
    )
    running.until(lambda: cold_records(orders) == 2)
    append(orders, b"3")
    running.until(lambda: cold_records(orders) == 3)
    running.until_works("cold", "orders")


def test_a_second_tierer_fences_that_of_the_server_which_stops_with_its_sentence(
    serve: Serve, orders: Any, tmp_path: Path
) -> None:
    running = serve(LOG + f'[logs.orders.cold]\nstore = "file://{tmp_path}/cold"\nevery = "1s"\nlinger = "0s"\n')
    running.until_works("cold", "orders")
    with sl.tier.tiering(orders, linger=0) as tierer:
        append(orders, b"1")
        tierer.run_once()
        running.until(lambda: running.state("cold", "orders").status is Status.STOPPED)
        assert running.state("cold", "orders").error


def test_a_snapshot_is_published_again_when_the_log_has_grown(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    published = sl.snapshots.Artifacts(str(tmp_path / "snapshots"))
    running = serve(LOG + '[snapshots.s]\nlog = "orders"\npublish = "./snapshots"\nevery = "1s"\nkind = "append-log"\n')
    running.until(lambda: published.newest() is not None)
    append(orders, b"2")
    running.until(lambda: (published.newest() or orders).cursor.next == 2)


def test_a_node_serves_over_flight_and_its_log_to_tables(serve: Serve, tmp_path: Path) -> None:
    running = serve(
        '[flight]\nlisten = "127.0.0.1:0"\n'
        '[logs.orders]\naddress = "./node"\ncreate = true\n'
        'node = { name = "a", lead = true, policy = "local", region = "eu" }\n' + TABLE + 'slot = "n"\n'
    )
    running.until_ready()
    node = running.server.served("orders").node
    assert node is not None
    append(sl.open(node.url), b"1", b"2")
    running.until(lambda: running.state("tables", "orders").position == 2)
    assert rows(tmp_path / "t.db") == [b"1", b"2"]


def test_a_log_that_is_not_there_is_opened_when_it_is_made(serve: Serve, tmp_path: Path) -> None:
    running = serve(LOG)
    running.until(lambda: running.state("logs", "orders").status is Status.FAILING)
    assert "There is no log" in (running.server.why_not_ready() or "")
    assert running.ask("/readyz")[0] == 503
    with pytest.raises(NotReady, match="The log 'orders' is not open: There is no log"):
        running.server.log("orders")
    with pytest.raises(NotFound, match="no log 'other' here"):
        running.server.log("other")
    sl.open(str(tmp_path / "orders"), create=True)
    running.until_ready()


def test_a_changed_file_changes_only_what_it_says(serve: Serve, orders: Any, tmp_path: Path) -> None:
    append(orders, b"1")
    running = serve(LOG + TABLE + 'slot = "billing"\n')
    running.until(lambda: running.state("tables", "orders").position == 1)
    log, before = running.server.log("orders"), running.state("tables", "orders").since
    more = '[http]\nlisten = "127.0.0.1:0"\n' + LOG + 'trim = "1h"\n' + TABLE + 'slot = "billing"\n'
    more += TABLE.replace("orders]", "second]").replace("#orders", "#second")
    changes = running.server.change(parse_config(more, "f").settings)
    assert changes.lines() == ["logs.orders is changed", "tables.second is added"]
    running.until(lambda: running.state("tables", "second").position == 1)
    running.until_works("trim", "orders")
    assert running.server.log("orders") is log, "the log stayed open"
    assert running.state("tables", "orders").since == before, "the other table went on"
    less = parse_config('[http]\nlisten = "127.0.0.1:9"\n' + LOG, "f").settings
    assert set(running.server.change(less).lines()) == {
        "logs.orders is changed",
        "tables.orders is removed",
        "tables.second is removed",
        "[http] is changed: restart the process for that",
    }
    assert [str(state.part) for state in running.server.states()] == ["logs.orders"]


def test_a_log_that_was_removed_from_the_file_and_added_again_is_served_anew(
    serve: Serve, orders: Any, tmp_path: Path
) -> None:
    append(orders, b"1")
    other = sl.open(str(tmp_path / "other"), create=True)
    append(other, b"2", b"3")
    http = '[http]\nlisten = "127.0.0.1:0"\n'
    running = serve(LOG)
    running.until_ready()
    assert running.ask("/v1/stream/orders?offset=-1") == (200, 1)
    running.server.change(parse_config(http, "f").settings)
    assert running.ask("/v1/stream/orders?offset=-1")[0] == 404
    running.server.change(parse_config(http + LOG.replace("./orders", "./other"), "f").settings)
    running.until_ready()
    assert running.ask("/v1/stream/orders?offset=-1") == (200, 23)


def test_a_full_disk_refuses_appends_and_heals_by_itself(serve: Serve) -> None:
    disk = SimulatedDisk(capacity=1 << 20)
    env = Env(disk=disk)
    running = serve('[logs.pay]\naddress = "wal:///pay"\ncreate = true\n', env=env)
    running.until_ready()
    append(running.server.log("pay"), b"first")
    big = [bytes(60_000 + n) for n in range(40)]
    with pytest.raises(StrandlineError, match=r"full|room|held back"):
        append(running.server.log("pay"), *big)
    held = running.server.log("pay").bounds().next
    running.until(lambda: running.state("logs", "pay").failures or not running.server.log("pay").failed)
    batches = list(running.server.log("pay").read(0))
    assert sum(batch.num_rows for batch in batches) >= held >= 1, "what is durable can be read"
    disk.capacity = None

    def appends() -> bool:
        try:
            append(running.server.log("pay"), b"last")
        except Exception:  # noqa: BLE001 - until there is room
            return False
        return True

    running.until(appends)
    assert running.state("logs", "pay").status is Status.RUNNING


def test_clients_create_logs_under_the_root_of_the_streams(serve: Serve, tmp_path: Path) -> None:
    running = serve('[streams]\nroot = "./streams"\n')
    assert running.ask("/v1/stream/made", method="PUT", body=b"1")[0] == 201
    assert running.ask("/v1/stream/made?offset=-1") == (200, 1)
    assert (tmp_path / "streams").is_dir()
    assert serve('[process]\nfolder = "other"\n').ask("/v1/stream/made", method="PUT", body=b"1")[0] in (403, 404, 501)


@pytest.mark.parametrize("kind", ["objects", "wal", "node"])
def test_a_log_that_the_file_makes_has_its_content_type_and_no_other(serve: Serve, tmp_path: Path, kind: str) -> None:
    address = {"objects": "./new", "wal": f"wal://{tmp_path}/new", "node": "./new"}[kind]
    node = '[logs.new.node]\nname = "a"\nlead = true\nlisten = "127.0.0.1:0"\n' if kind == "node" else ""
    section = f'[logs.new]\naddress = "{address}"\ncreate = true\ncontent_type = "%s"\n{node}'
    running = serve(section % "application/json")
    running.until_works("logs", "new")
    request = urllib.request.Request(
        f"{running.url}/v1/stream/new", b'[{"n": 1}, {"n": 2}]', {"Content-Type": "application/json"}, method="POST"
    )
    running.until(lambda: running.state("logs", "new").status is Status.RUNNING)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 204
    assert running.ask("/v1/stream/new?offset=-1") == (200, [{"n": 1}, {"n": 2}])
    running.server.stop()
    other = serve(section % "text/plain")
    other.until(lambda: other.state("logs", "new").error)
    assert "application/json" in str(other.state("logs", "new").error)
