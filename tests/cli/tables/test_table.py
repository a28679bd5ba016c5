"""``strandline table``: what people see, and what it does."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.log.wal.log import WalLog

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "city": {"type": "string"}}}


@pytest.fixture
def place(tmp_path):
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for n in range(20):
            producer.append(key=b"k%d" % (n % 4), value=json.dumps({"id": n, "city": "Oslo"}).encode())
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    value = sl.values.Json(json.dumps(SCHEMA))
    sl.follow(log, sl.DeltaSink(str(tmp_path / "table"), mode="append", value=value), upto="end")
    return tmp_path


def call(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["table", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def common(place) -> list[str]:
    return [str(place / "table"), str(place / "log"), "--schema", str(place / "schema.json")]


def test_a_table_is_described_with_its_cursor(place):
    text = call("describe", *common(place))
    assert "append, version 1" in text
    assert "20 rows in 1 file" in text
    assert "id: int64" in text
    assert "applied up to offset 20; 0 records behind" in text
    fields = json.loads(call("describe", *common(place), "--json"))
    assert (fields["rows"], fields["records_behind"]) == (20, 0)


def test_a_table_is_compared_with_a_write_ahead_log_beside_the_process_that_writes_it(place):
    with WalLog.open(place / "wal") as log, log.producer() as producer:
        producer.append(key=b"k", value=b'{"id": 1, "city": "Oslo"}').result(60)
        value = sl.values.Json(json.dumps(SCHEMA))
        sl.follow(log, sl.DeltaSink(str(place / "copy"), mode="append", value=value), upto="end")
        for address in (f"wal://{place}/wal", f"{place}/wal"):
            compared = call("verify", str(place / "copy"), address, "--schema", str(place / "schema.json"))
            assert "1 row, up to offset 1: each is as the log says" in compared


def test_a_difference_is_shown_and_ends_with_status_1_and_a_rebuild_mends_it(place):
    assert "each is as the log says" in call("verify", *common(place))
    DeltaTable(str(place / "table")).delete("id = 7")
    log = sl.open(str(place / "log"))
    value = sl.values.Json(json.dumps(SCHEMA))
    sl.DeltaSink(str(place / "table"), mode="append", value=value).adopt(log.log_id)
    text = call("verify", *common(place), status=1)
    assert "1 missing, 0 too many" in text
    assert "strandline table rebuild" in text
    assert json.loads(call("verify", *common(place), "--json", status=1))["clean"] is False
    assert "20 rows were built again" in call("rebuild", *common(place), "--yes")
    assert json.loads(call("verify", *common(place), "--json"))["clean"] is True


def test_a_table_that_others_changed_is_repaired(place):
    DeltaTable(str(place / "table")).delete("id = 7")
    assert "at offset 20" in call("repair", *common(place))
    call("verify", *common(place))


def test_files_are_joined_and_removed(place):
    assert "0 files fewer" in call("optimize", str(place / "table"))
    assert "removed" in call("vacuum", str(place / "table"))


def test_a_table_of_another_program_is_refused(place):
    pa_table = pa.table({"x": [1]})
    from deltalake import write_deltalake

    write_deltalake(str(place / "other"), pa_table)
    done = CliRunner().invoke(app, ["table", "describe", str(place / "other")])
    assert done.exit_code == 1
    assert "follows no log" in done.output


def test_a_table_is_moved_to_a_copy_of_its_log_and_a_second_time_says_so(place):
    table, log, copy = (str(place / name) for name in ("table", "log", "copy"))
    schema = ["--schema", str(place / "schema.json")]
    sl.ingest(log, copy)
    text = call("move", table, log, copy, *schema)
    assert "The table follows that log now, from offset 20 on; no row was changed." in text
    assert "already" in call("move", table, log, copy, *schema)
    fields = json.loads(call("move", table, log, copy, *schema, "--json"))
    assert fields == {"cursor": str(sl.open(copy).cursor_at(20)), "moved": False}
    assert "each is as the log says" in call("verify", table, copy, *schema)
    assert "but log" in call("verify", table, log, *schema, status=1)


def test_ctrl_c_in_a_move_says_how_to_find_out_whether_the_table_was_moved(place, monkeypatch):
    table, log, copy = (str(place / name) for name in ("table", "log", "copy"))
    schema = ["--schema", str(place / "schema.json")]
    sl.ingest(log, copy)
    real = sl.DeltaSink.move

    def interrupted(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(sl.DeltaSink, "move", interrupted)
    assert call("move", table, log, copy, *schema, status=130).startswith("interrupted: repeat the command: it says")
    assert "already" in call("move", table, log, copy, *schema)


def test_a_table_is_not_moved_to_a_log_with_other_offsets(place):
    log, copy = (str(place / name) for name in ("log", "copy"))
    with sl.open(copy, create=True).producer() as producer:
        producer.append(key=b"k", value=b"{}")
    sl.ingest(log, copy)
    schema = ["--schema", str(place / "schema.json")]
    text = call("move", str(place / "table"), log, copy, *schema, status=1)
    assert "Build the table again from the other log" in " ".join(text.split())
    assert "each is as the log says" in call("verify", *common(place))
