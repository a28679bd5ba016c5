"""From a file to a table that other programs query, by commands only."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import time
from pathlib import Path

import duckdb
import pytest

import strandline as sl
from tests.cli.conftest import Run, Start
from tests.tables.test_typed_delta import duck_extension

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "city": {"type": "string"}}}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    place = tmp_path / "order.json"
    place.write_text(json.dumps(SCHEMA))
    return place


def orders(*numbers: int) -> str:
    return "".join(
        json.dumps({"key": f"o-{number}", "value": {"id": number, "city": "Rome"}}) + "\n" for number in numbers
    )


def test_a_log_is_created_once_with_its_retention_and_the_format_of_its_values(
    run: Run, log: str, schema: Path
) -> None:
    first = json.loads(run("create", log, "--schema", schema, "--retention", "age:7d", "--json").stdout)
    again = json.loads(run("create", log, "--schema", schema, "--json").stdout)
    assert (first["created"], again["created"]) == (True, False)
    assert first["log_id"] == again["log_id"]
    assert first["retention"] == again["retention"] == "age:7d"
    opened = sl.open(log)
    assert isinstance(opened, sl.log.ObjectLog)
    assert opened.value == sl.values.Json(json.dumps(SCHEMA))


@pytest.mark.parametrize("kind", ["avro", "messagepack", "arrow"])
def test_the_format_of_values_is_the_one_that_was_asked_for(run: Run, log: str, schema: Path, kind: str) -> None:
    if kind == "avro":
        fields = [{"name": "id", "type": "long"}]
        schema.write_text(json.dumps({"type": "record", "name": "Order", "fields": fields}))
    made = run("create", f"wal://{log}", "--value", kind, "--schema", schema, "--json")
    assert json.loads(made.stdout)["value"] == f"{kind}, version 1"


def test_a_log_with_another_format_of_values_is_refused_and_stays(run: Run, log: str, schema: Path) -> None:
    assert run("create", log, "--schema", schema).exit_code == 0
    refused = run("create", log, "--value", "messagepack", "--schema", schema)
    assert refused.exit_code == 1
    assert json.loads(run("describe", log, "--json").stdout)["value"]["format"] == "json"


def test_a_format_without_its_fields_is_a_usage_error(run: Run, log: str) -> None:
    done = run("create", log, "--value", "avro")
    assert done.exit_code == 2
    assert not Path(log).exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"type": ', "is not JSON: Expecting value"),
        ("[]", "is neither a JSON Schema"),
        ("{}", "cannot be used: "),
    ],
)
def test_a_schema_that_cannot_be_used_is_named_by_its_file(
    run: Run, log: str, schema: Path, text: str, said: str
) -> None:
    schema.write_text(text)
    assert f"The schema {schema} {said}" in run("create", log, "--schema", schema).stderr


@pytest.mark.parametrize("place", ["/proc/x", "wal:///proc/x"])
def test_a_place_that_takes_no_folders_is_said_to_be_one(run: Run, place: str) -> None:
    assert "The folder /proc/x cannot be made: /proc takes no new folders." in run("create", place).stderr


def test_a_log_is_described_with_its_bounds_size_values_slots_and_cold_tier(run: Run, log: str, schema: Path) -> None:
    run("create", log, "--schema", schema)
    run("produce", log, "--format", "json", given=orders(1, 2, 3))
    run("slots", "create", log, "billing", "--at", 1)
    run("tier", "attach", log)
    found = json.loads(run("describe", log, "--json").stdout)
    assert (found["kind"], found["first"], found["next"]) == ("object log", 0, 3)
    assert found["bytes"] > 0
    assert found["value"] == {"format": "json", "version": 1, "columns": {"id": "int64", "city": "string"}}
    (slot,) = found["slots"]
    assert slot["bytes_behind"] > 0 < slot["seconds_behind"]
    expected = {"slot": "billing", "position": 1, "records_behind": 2, "invalid": None, "kind": "consumer"}
    assert expected.items() <= slot.items()
    assert found["cold"]["store"].endswith("/log/cold")
    text = run("describe", log).stdout
    assert "json, version 1 (id: int64, city: string)" in text
    assert re.search(r"billing at 1, 2 records \(.*B, .*s\) behind", text)


def test_a_write_ahead_log_is_described_beside_the_process_that_writes_it(run: Run, log: str) -> None:
    with sl.open(f"wal://{log}", create=True) as opened:
        assert isinstance(opened, sl.Log)
        with opened.producer() as producer:
            producer.append(value=b"v")
        found = json.loads(run("describe", log, "--json").stdout)
    assert (found["kind"], found["next"], found["value"], found["retention"]) == ("write-ahead log", 1, None, None)


def test_a_file_of_json_lines_becomes_a_typed_table_that_duckdb_reads(
    run: Run, log: str, tmp_path: Path, schema: Path
) -> None:
    table = tmp_path / "tables" / "orders"
    assert run("create", log, "--schema", schema).exit_code == 0
    lines = tmp_path / "orders.jsonl"
    lines.write_text("".join(json.dumps({"id": number, "city": "Rome"}) + "\n" for number in (*range(30), 7)))
    assert run("produce", log, lines, "--key", "id").exit_code == 0
    done = run("follow", log, table, "--slot", "orders", "--until", "end", "--json")
    assert done.exit_code == 0, done.output
    assert {**json.loads(done.stdout), "seconds": 0} == {
        "records": 31, "next": 31, "behind": 0, "dead_letters": 0, "seconds": 0, "interrupted": False,
    }  # fmt: skip
    duck = duckdb.connect()
    duck.execute(f"load '{duck_extension('delta')}'")
    read = f"select count(*), sum(id), min(city) from delta_scan('{table}')"
    assert duck.execute(read).fetchone() == (30, sum(range(30)), "Rome")
    assert json.loads(run("describe", log, "--json").stdout)["slots"][0]["position"] == 31


def test_a_table_that_is_there_keeps_its_mode_and_continues(run: Run, log: str, tmp_path: Path) -> None:
    place = f"sqlite:{tmp_path}/t.db#changes"
    run("produce", log, "--create", "--key-separator", "=", given="a=1\na=2\n")
    assert run("follow", log, place, "--mode", "append", "--until", "end").exit_code == 0
    run("produce", log, "--key-separator", "=", given="a=3\n")
    done = run("follow", log, place, "--until", "end")
    assert "1 record applied" in done.stdout
    rows = sqlite3.connect(tmp_path / "t.db").execute("select value from changes order by rowid").fetchall()
    assert rows == [(b"1",), (b"2",), (b"3",)]


def test_a_bad_record_stops_a_table_or_becomes_a_dead_letter(run: Run, log: str, tmp_path: Path, schema: Path) -> None:
    given = orders(1) + json.dumps({"key": "bad", "value": {"id": "one"}}) + "\n" + orders(2)
    run("produce", log, "--create", "--format", "json", given=given)
    options = ["--schema", schema, "--until", "end"]
    stopped = run("follow", log, f"sqlite:{tmp_path}/a.db#orders", *options)
    assert stopped.exit_code == 1
    assert "offset 1" in stopped.stderr
    done = run("follow", log, f"sqlite:{tmp_path}/b.db#orders", *options, "--dead-letters", "yes")
    assert done.exit_code == 0, done.output
    found = sqlite3.connect(tmp_path / "b.db")
    assert found.execute("select id from orders order by id").fetchall() == [(1,), (2,)]
    assert found.execute("select count(*) from orders_dead_letters").fetchone() == (1,)


def test_ctrl_c_ends_a_follower_with_what_it_has_applied(run: Run, start: Start, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--key-separator", "=", given="a=1\n")
    process = start("follow", log, f"sqlite:{tmp_path}/t.db#orders", "--slot", "orders", "--json")
    opened = sl.open(log)
    assert isinstance(opened, sl.log.ObjectLog)
    deadline = time.monotonic() + 300
    while not any(slot.position == 1 for slot in opened.slots.list()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["next"] == 1


@pytest.mark.parametrize("table", ["delta", "sqlite"])
def test_a_run_tells_how_many_records_it_has_set_aside(run: Run, log: str, tmp_path: Path, table: str) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    run("produce", log, "--create", "--key-separator", "=", given="a=no\nb={}\nc=no\n")
    place = ["t", "letters"] if table == "delta" else [f"sqlite:{tmp_path}/t.db#t", "yes"]
    if table == "delta":
        place = [str(tmp_path / one) for one in place]
    command = ["follow", log, place[0], "--dead-letters", place[1], "--schema", schema, "--until"]
    first = run(*command, "2")
    assert first.exit_code == 0
    assert first.stdout.endswith("behind, 1 dead letter\n")
    strict = run(*command, "end", "--json", "--fail-on-letters")
    assert (strict.exit_code, json.loads(strict.stdout)["dead_letters"]) == (1, 1)
    again = run(*command, "end", "--fail-on-letters")
    assert (again.exit_code, "dead letter" in again.stdout) == (0, False)


@pytest.mark.parametrize("until", ["tomorrow", "-1"])
def test_an_unknown_end_is_a_usage_error(run: Run, log: str, tmp_path: Path, until: str) -> None:
    run("create", log)
    assert run("follow", log, tmp_path / "t", "--until", until).exit_code == 2


def test_an_ingest_that_is_repeated_appends_what_is_new(run: Run, log: str) -> None:
    run("produce", log, "--create", given="a\nb\n")
    for expected in (2, 0):
        done = json.loads(run("ingest", log, f"wal://{log}-copy", "--json").stdout)
        assert (done["records"], done["target_next"]) == (expected, 2)


def test_a_table_is_described_on_lines_of_their_own(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--key-separator", "=", given="a=1\n")
    run("follow", log, tmp_path / "t", "--until", "end")
    shown = run("table", "describe", tmp_path / "t", log).stdout.splitlines()
    assert shown[1].startswith("1 row in 1 file")
    assert shown[-1] == "applied up to offset 1; 0 records behind"


def test_an_inferred_schema_is_printed_saved_and_used_unchanged(run: Run, log: str, tmp_path: Path) -> None:
    files = tmp_path / "orders.jsonl"
    files.write_text("".join(json.dumps({"id": n, "city": "Rome", "price": f"{n}.50"}) + "\n" for n in range(50)))
    proposed = run("create", log, "--infer", files)
    assert not Path(log).exists()
    assert "note: The field 'price' is text and always a number" in proposed.stderr
    assert f"strandline create {log} --schema FILE" in proposed.stderr
    schema = tmp_path / "order.json"
    schema.write_text(proposed.stdout)
    for command in (
        ("create", log, "--schema", schema),
        ("load", files, log, "--job", "one", "--key", "id"),
        ("follow", log, tmp_path / "table", "--until", "end", "--dead-letters", tmp_path / "letters"),
    ):
        done = run(*command)
        assert (done.exit_code, done.stderr) == (0, "")
    assert "0 records behind" in done.stdout
    assert "dead letter" not in done.stdout
    assert done.stdout.startswith("50 records applied")


def test_a_log_of_bytes_gives_the_schema_of_its_tables(run: Run, log: str, tmp_path: Path) -> None:
    run("produce", log, "--create", "--format", "json", given=orders(1, 2, 3))
    found = json.loads(run("create", log, "--infer", log, "--json").stdout)
    assert found["schema"]["properties"].keys() == {"id", "city"}
    assert (found["values"], found["unfit"], found["notes"]) == (3, 0, [])


def test_what_is_not_there_or_does_not_go_together_is_refused(run: Run, log: str, schema: Path) -> None:
    missing = run("create", log, "--infer", f"{log}.jsonl")
    assert missing.exit_code == 1
    assert "There is neither a log nor a file at" in missing.stderr
    assert run("create", log, "--infer", schema, "--schema", schema).exit_code == 2
