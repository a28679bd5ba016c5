"""Appending from the shell, and looking at what was appended."""

from __future__ import annotations

import json
import signal
import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import strandline as sl
from strandline.cli.logs.produce import made_up
from strandline.cli.logs.tail import held
from strandline.model.records import record_batch
from strandline.model.retention import MaxAge
from tests.cli.conftest import Run, Start


def records(url: str) -> list[dict[str, object]]:
    return [row for batch in sl.open(url).read() for row in batch.to_pylist(maps_as_pydicts="strict")]


def test_lines_become_values(run: Run, log: str) -> None:
    done = run("produce", log, "--create", given="one\ntwo\n")
    assert done.exit_code == 0, done.output
    assert "2 records" in done.stdout
    assert "offset 1" in done.stdout
    assert [(row["key"], row["value"]) for row in records(log)] == [(None, b"one"), (None, b"two")]


def test_a_key_separator_splits_a_line_once(run: Run, log: str) -> None:
    assert run("produce", log, "--create", "--key-separator", "=", given="a=1=x\nb=\n").exit_code == 0
    assert [(row["key"], row["value"]) for row in records(log)] == [(b"a", b"1=x"), (b"b", b"")]


def test_a_bad_line_is_named_and_what_came_before_it_is_durable(run: Run, log: str) -> None:
    done = run("produce", log, "--create", "--key-separator", "=", given="a=1\nb\nc=3\n")
    assert done.exit_code == 1
    assert "Line 2" in done.stderr
    assert "1 record before it was appended" in done.stderr
    assert [row["key"] for row in records(log)] == [b"a"]


def test_json_lines_carry_operations_headers_bytes_and_any_json_value(run: Run, log: str) -> None:
    lines = [
        {"key": "a", "value": {"n": 1}, "headers": {"h": "x"}},
        {"key": "a", "op": "delete"},
        {"key_base64": "/w==", "value_base64": "AP8=", "op": "put", "timestamp": "2024-05-06T07:08:09.000010Z"},
    ]
    given = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    assert run("produce", log, "--create", "--format", "json", given=given).exit_code == 0
    first, second, third = records(log)
    assert (first["value"], first["headers"]) == (b'{"n":1}', {"h": b"x"})
    assert (second["op"], second["value"]) == (sl.Op.DELETE, None)
    assert (third["key"], third["value"]) == (b"\xff", b"\x00\xff")
    assert str(third["timestamp"]) == "2024-05-06 07:08:09.000010+00:00"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 1 is not JSON"),
        ("[]", "no JSON object"),
        ('{"ky": "a"}', "unknown field 'ky'"),
        ('{"key": 1}', "a key is text"),
        ('{"op": "upsert"}', "not 'upsert'"),
        ('{"value_base64": "?"}', "not base64"),
        ('{"value": "a", "value_base64": "YQ=="}', "both value and value_base64"),
        ('{"timestamp": "2024-05-06T07:08:09"}', "no time zone"),
        ('{"timestamp": "soon"}', "Line 1"),
        ('{"headers": []}', "Line 1"),
    ],
)
def test_json_that_cannot_be_a_record_is_refused_in_one_sentence(run: Run, log: str, line: str, said: str) -> None:
    done = run("produce", log, "--create", "--format", "json", given=line + "\n")
    assert done.exit_code == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_one_log_can_be_piped_into_another(run: Run, log: str) -> None:
    producer = sl.open(log, create=True).producer()
    producer.append(key=b"\xff\xfe", value="größe".encode(), headers={"h": b"\xff", "g": b"text"})
    producer.append(key=b"k", value=None)
    producer.append(key=b"k", op=sl.Op.PURGE)
    producer.close()
    copied = run("tail", log, "--json").stdout
    assert run("produce", log + "-copy", "--create", "--format", "json", given=copied.encode()).exit_code == 0
    assert records(log + "-copy") == records(log)


def test_headers_that_are_there_twice_or_empty_are_printed_and_piped(run: Run, log: str) -> None:
    def headers(url: str) -> list[object]:
        return [row["headers"] for batch in sl.open(url).read() for row in batch.to_pylist()]

    given = [
        [("a", b"1"), ("a", b"2"), ("b", None)],
        [("a", b"\xff"), ("a", b"2")],
        [("a", b"1")],
        None,
    ]
    batch = record_batch(timestamps=[1, 2, 3, 4], ops=[0] * 4, keys=[b"k"] * 4, values=[b"v"] * 4, headers=given)
    with sl.open(log, create=True).producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))
    lines = run("tail", log, "--json").stdout
    shown = [json.loads(line) for line in lines.splitlines()]
    assert [row.get("headers") for row in shown] == [{"a": ["1", "2"], "b": None}, None, {"a": "1"}, None]
    assert shown[1]["headers_base64"] == {"a": ["/w==", "Mg=="]}
    assert run("produce", log + "-copy", "--create", "--format", "json", given=lines.encode()).exit_code == 0
    assert headers(log + "-copy") == headers(log) == given
    text = run("tail", log).stdout.splitlines()
    assert text[0].endswith("a=1 a=2 b=-")


@pytest.mark.matrix
def test_made_up_records_are_the_same_each_time(run: Run, log: str) -> None:
    done = run("produce", log, "--create", "--count", 25_000, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "records": 25_000,
        "bytes": json.loads(done.stdout)["bytes"],
        "seconds": json.loads(done.stdout)["seconds"],
        "records_per_second": json.loads(done.stdout)["records_per_second"],
        "next": 25_000,
        "interrupted": False,
    }
    found = [(row["key"], row["value"]) for row in records(log)]
    again = [(row["key"], row["value"]) for table in made_up(25_000) for row in table.to_pylist()]
    assert found == again
    assert {len(value) for _, value in again} == {100}
    assert len({key for key, _ in again}) == 1000
    assert [table.num_rows for table in made_up(3)] == [3]


def test_an_empty_input_is_reported(run: Run, log: str) -> None:
    assert "nothing was appended" in run("produce", log, "--create", given="").stdout
    assert json.loads(run("produce", log, "--json", given="").stdout)["next"] is None


def fill(url: str, count: int) -> None:
    with sl.open(url, create=True).producer() as producer:
        for number in range(count):
            producer.append(key=b"k%d" % number, value=b"v%d" % number)


def offsets(output: str) -> list[int]:
    return [json.loads(line)["offset"] for line in output.splitlines()]


def test_tail_shows_the_last_ten_records_by_default(run: Run, log: str) -> None:
    fill(log, 25)
    assert offsets(run("tail", log, "--json").stdout) == list(range(15, 25))
    assert run("tail", log).stdout.splitlines()[0].split()[0] == "15"


def test_tail_begins_at_since_and_stops_at_its_limit(run: Run, log: str) -> None:
    fill(log, 25)
    assert offsets(run("tail", log, "--json", "--from", "beginning").stdout) == list(range(25))
    assert offsets(run("tail", log, "--json", "--from", 7, "--limit", 3).stdout) == [7, 8, 9]
    assert offsets(run("tail", log, "--json", "--from", 24, "--limit", 5).stdout) == [24]
    assert offsets(run("tail", log, "--json", "-n", 2).stdout) == [23, 24]
    assert len(offsets(run("tail", log, "--json", "-n", 12).stdout)) == 12
    assert run("tail", log, "--json", "--from", "now").stdout == ""
    assert offsets(run("tail", log, "--json", "--from", 3, "--limit", 2, "--follow").stdout) == [3, 4]


def test_tail_shows_text_as_text_and_everything_else_so_that_no_terminal_is_harmed(run: Run, log: str) -> None:
    with sl.open(log, create=True).producer() as producer:
        producer.append(key=b"\x1b[2J", value="grün".encode())
        producer.append(key=b"\xff\x00", value=None, op=sl.Op.DELETE)
    first, second = run("tail", log).stdout.splitlines()
    assert first.endswith(r"put     \x1b[2J  grün")
    assert second.endswith("delete  0xff00  -")
    fields = json.loads(run("tail", log, "--json").stdout.splitlines()[1])
    assert (fields["op"], fields["key_base64"], fields["value"]) == ("delete", "/wA=", None)


@pytest.mark.parametrize("command", ["produce", "tail", "lag", "slots", "trim", "verify"])
def test_an_address_without_a_log_is_one_sentence_and_status_1(run: Run, log: str, command: str) -> None:
    done = run(command, log)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: There is no log at ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["produce", "tail", "lag", "slots", "trim", "verify"])
def test_an_unknown_scheme_is_one_sentence_and_status_1(run: Run, command: str) -> None:
    done = run(command, "ftp://host/log", "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "There are no logs at ftp://: use " in done.stderr
    assert "wal://, grpc://" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_debug_keeps_the_error_itself(run: Run, log: str) -> None:
    done = run("tail", log, "--debug")
    assert isinstance(done.exception, sl.errors.NotALog)


def test_an_offset_past_the_end_is_an_error_and_nonsense_is_wrong_usage(run: Run, log: str) -> None:
    fill(log, 3)
    past = run("tail", log, "--from", 4)
    assert past.exit_code == 1
    assert "past the log's end at 3" in past.stderr
    assert run("tail", log, "--from", "yesterday").exit_code == 2
    assert run("tail", log, "--from", "2026-01-15T05:29:00").exit_code == 2  # of which time zone?
    assert run("tail", log, "--hold", "long").exit_code == 2
    assert run("tail").exit_code == 2
    assert run("tail", log, "--limit", 0).exit_code == 2
    assert run("produce", log, "--format", "json", "--key-separator", "=").exit_code == 2


def test_tail_follow_shows_what_is_appended_and_ends_cleanly_on_ctrl_c(start: Start, log: str) -> None:
    fill(log, 1)
    process = start("tail", log, "--follow", "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["offset"] == 0
    fill(log, 1)
    assert json.loads(process.stdout.readline())["offset"] == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.matrix
def test_ctrl_c_while_producing_keeps_what_was_read_and_says_so(start: Start, log: str) -> None:
    opened = sl.open(log, create=True)
    process = start("produce", log)
    assert process.stdin is not None
    process.stdin.write("one\ntwo\n")
    process.stdin.flush()
    assert opened.wait(opened.start().at(1), timeout=120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out.startswith("stopped: 2 records")
    assert err == ""


@pytest.mark.matrix
def test_a_reader_that_goes_away_is_no_error(start: Start, log: str) -> None:
    fill(log, 20_000)
    process = start("tail", log, "--from", "beginning")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=600)
    assert err == ""
    assert process.returncode == 141


def test_tail_begins_with_what_was_listed_at_a_time_or_later(run: Run, log: str) -> None:
    fill(log, 3)
    listed = sl.open(log).head().tail[-1].listed
    fill(log, 2)
    later = datetime.fromtimestamp((listed + 1) / 1e6, UTC).isoformat()
    assert offsets(run("tail", log, "--json", "--from", later).stdout) == [3, 4]
    assert offsets(run("tail", log, "--json", "--from", "2020-01-01T00:00:00Z").stdout) == [0, 1, 2, 3, 4]
    assert run("tail", log, "--json", "--from", "2999-01-01T00:00:00Z").stdout == ""


@pytest.mark.matrix
def test_a_hold_keeps_what_tail_still_has_to_read_and_is_gone_with_it(start: Start, log: str) -> None:
    opened = sl.open(log, create=True, retention="consumed")
    fill(log, 5)
    opened.slots.create("done", 5)
    process = start("tail", log, "--from", 2, "--follow", "--json", "--hold", "10m")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["offset"] == 2
    held = [state for state in opened.slots.list() if state.expires is not None]
    assert [state.position for state in held] == [2]
    opened.trim()
    assert opened.bounds().first == 0  # one batch, which the hold is in the middle of
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 0
    assert [state.name for state in opened.slots.list()] == ["done"]


def test_a_hold_is_renewed_as_tail_goes_on_and_taken_anew_if_it_had_ended(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sl.open(log, create=True)
    fill(log, 5)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with held(opened, 1, 60) as still_needed:
        (first,) = opened.slots.list()
        still_needed(2)
        assert opened.slots.list() == [first]  # too early to write anything
        now = 21.0
        still_needed(3)
        (renewed,) = opened.slots.list()
        assert (renewed.name, renewed.position) == (first.name, 3)
        opened.slots.drop(first.name)
        now = 42.0
        still_needed(4)
        (again,) = opened.slots.list()
        assert again.name != first.name
        assert again.position == 4
    assert opened.slots.list() == []


def test_a_log_is_made_with_the_retention_that_is_asked_for(run: Run, log: str) -> None:
    assert run("produce", log, "--create", "--retention", "age:7d", given="x\n").exit_code == 0
    assert sl.open(log).identity.retention == MaxAge(7 * 86400)
    other = run("produce", log, "--create", "--retention", "consumed", given="x\n")
    assert other.exit_code == 1
    assert "opening does not change that" in other.stderr
    assert run("produce", log, "--retention", "age:7d", given="").exit_code == 2
    assert run("produce", log, "--create", "--retention", "sometimes", given="").exit_code == 2


def test_tail_decodes_values_as_the_log_names_them_and_shows_those_that_it_cannot(run: Run, log: str) -> None:
    opened = sl.open(
        log, create=True, value=sl.values.Json(pa.schema({"id": pa.int32(), "price": pa.decimal128(5, 2)}))
    )
    with opened.producer() as producer:
        producer.append(key=b"a", value={"id": 1, "price": "2.50"})
        producer.append(key=b"b", value=b"\x1b[2Jbad")
        producer.append(key=b"c", op=sl.Op.DELETE)
    lines = run("tail", log, "--decode").stdout.splitlines()
    assert lines[0].endswith('a  {"id": 1, "price": "2.50"}')
    assert "\\x1b[2Jbad (not decoded: JSON is malformed" in lines[1]
    assert lines[2].endswith("c  -")
    first, second, third = map(json.loads, run("tail", log, "--decode", "--json").stdout.splitlines())
    assert (first["value"], "error" in first) == ({"id": 1, "price": "2.50"}, False)
    assert (second["value"], second["error"][:17]) == ("\x1b[2Jbad", "JSON is malformed")
    assert (third["value"], "error" in third) == (None, False)
    assert "values json, version 1" in run("lag", log).stdout
    assert json.loads(run("lag", log, "--json").stdout)["values"] == "json, version 1"


def test_tail_decodes_by_a_schema_where_the_log_names_none(run: Run, log: str, tmp_path) -> None:
    assert run("produce", log, "--create", given='{"id": 7, "x": NaN}\n{"id": 7}\n').exit_code == 0
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    done = run("tail", log, "--schema", str(schema), "--json")
    assert json.loads(done.stdout.splitlines()[1])["value"] == {"id": 7}
    assert "--schema" in run("tail", log, "--decode").stderr
    assert run("tail", log, "--schema", str(tmp_path / "none")).exit_code == 1


def test_decoded_fields_that_json_lacks_are_text_in_their_rows_alone(run: Run, log: str) -> None:
    schema = pa.schema({"share": pa.float64(), "id": pa.int64()})
    opened = sl.open(log, create=True, value=sl.values.MessagePack(schema))
    with opened.producer() as producer:
        producer.append_batch(pa.table({"share": [0.5, float("nan"), None], "id": [1, 2, None]}))
    found = [json.loads(line)["value"] for line in run("tail", log, "--decode", "--json").stdout.splitlines()]
    assert found == [{"share": 0.5, "id": 1}, {"share": "nan", "id": 2}, {"share": None, "id": None}]


def test_a_date_of_a_year_that_python_lacks_is_shown_as_the_error_that_it_is(run: Run, log: str) -> None:
    days = pa.array([0, -800_000], pa.int32())
    table = pa.table({"day": days.cast(pa.date32()), "at": pa.array([0, 10**12], pa.timestamp("s"))})
    with sl.open(log, create=True, value=sl.values.Arrow(table.schema)).producer() as producer:
        for row in table.to_batches(1):  # as another program may write it: this one refuses to
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_batch(pa.concat_batches([row]))
            producer.append(value=sink.getvalue().to_pybytes())
    first, second = [json.loads(line) for line in run("tail", log, "--decode", "--json").stdout.splitlines()]
    assert first["value"] == {"day": "1970-01-01", "at": "1970-01-01T00:00:00"}
    assert "value" not in second
    assert second["error"] == "The field 'day' is outside of the years 1 to 9999."
