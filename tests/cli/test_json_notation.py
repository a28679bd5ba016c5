"""One notation of records as JSON: whatever one command writes each other one reads."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.model.records import READ_SCHEMA, record_batch
from tests.cli.conftest import Run

Record = tuple[int, sl.Op, bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]

RECORDS: list[Record] = [
    (1_700_000_000_123_456, sl.Op.PUT, b"k", "größe\n\u2028".encode(), None),
    (1_700_000_000_000_000, sl.Op.PUT, b"\xff\xfe", b"\x00\xff", [("h", b"\xff"), ("g", b"text")]),
    (-1, sl.Op.DELETE, b"k", None, []),
    (0, sl.Op.PURGE, b"k", None, [("a", b"1"), ("a", None), ("a", b""), ("b", None)]),
    (-62_135_596_800_000_000, sl.Op.PUT, None, b"", [("a", b"\xff"), ("a", b"2"), ("b", None)]),  # the year 1
    (2**63 - 1, sl.Op.PUT, b"", None, [("", b"")]),  # outside the calendar
    (-(2**63), sl.Op.PUT, b"null", b"null", None),
    (5, sl.Op.PUT, b'{"base64":"/w=="}', b'{"base64":"/w=="}', [("h", b'{"base64":"/w=="}')]),
]


def filled(url: str) -> pa.Table:
    times, ops, keys, values, headers = zip(*RECORDS, strict=True)
    batch = record_batch(timestamps=times, ops=ops, keys=keys, values=values, headers=headers)
    log = sl.open(url, create=True)
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))
    return content(url)


def content(url: str) -> pa.Table:
    return pa.Table.from_batches(sl.open(url).read(), READ_SCHEMA)


def in_earlier_builds(table: pa.Table) -> str:
    """What an export of an earlier build wrote."""

    def text(data: bytes | None) -> Any:
        try:
            return data if data is None else data.decode()
        except UnicodeDecodeError:
            assert data is not None
            return {"base64": b64encode(data).decode()}

    lines = []
    times = table.schema.get_field_index("timestamp")
    for row in table.set_column(times, "timestamp", table.column(times).cast(pa.int64())).to_pylist():
        headers: dict[str, list[Any]] = {}
        for name, value in row["headers"] or ():
            headers.setdefault(name, []).append(text(value))
        plain = {name: given if len(given) > 1 else given[0] for name, given in headers.items()}
        fields = {
            "key": text(row["key"]),
            "value": text(row["value"]),
            "headers": plain if row["headers"] is not None else None,
        }
        lines.append(json.dumps({**row, **fields}))
    return "\n".join(lines) + "\n"


def written(run: Run, writer: str, log: str, folder: Path) -> Path:
    """The records of the log in a file, as this command writes them."""
    if writer == "export":
        assert run("export", log, folder / "out", "--format", "jsonl").exit_code == 0
        (path,) = (folder / "out").glob("part-*.jsonl")
        return path
    path = folder / "records.jsonl"
    text = run("tail", log, "--json").stdout if writer == "tail" else in_earlier_builds(content(log))
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("reader", ["produce", "produce files", "load"])
@pytest.mark.parametrize("writer", ["tail", "export", "an export of an earlier build"])
def test_what_one_command_writes_each_other_one_reads(
    run: Run, log: str, tmp_path: Path, writer: str, reader: str
) -> None:
    records = filled(log)
    path = written(run, writer, log, tmp_path)
    if reader == "produce":
        done = run("produce", log + "-copy", "--create", "--format", "json", given=path.read_bytes())
    elif reader == "produce files":
        done = run("produce", log + "-copy", path, "--create")
    else:
        done = run("load", path, log + "-copy", "--job", "copy", "--create")
    assert done.exit_code == 0, done.output
    assert content(log + "-copy").equals(records)


def test_two_commands_write_the_same_lines(run: Run, log: str, tmp_path: Path) -> None:
    filled(log)
    (tmp_path / "a").mkdir()
    tailed = written(run, "tail", log, tmp_path).read_text("utf-8").split("\n")
    exported = written(run, "export", log, tmp_path / "a").read_text("utf-8").split("\n")
    assert [json.loads(line) for line in tailed if line] == [json.loads(line) for line in exported if line]


def test_the_folder_of_an_export_is_read_as_records(run: Run, log: str, tmp_path: Path) -> None:
    records = filled(log)
    written(run, "export", log, tmp_path)
    assert run("load", tmp_path / "out", log + "-copy", "--job", "copy", "--create").exit_code == 0
    assert content(log + "-copy").equals(records)


def test_values_that_could_not_be_decoded_are_read_with_what_was_said_of_them(run: Run, log: str) -> None:
    with sl.open(log, create=True).producer() as producer:
        for value in (b'{"n": 1}', b"no JSON", b"\xff"):
            producer.append(value=value)
    schema = Path(log.removeprefix("file://")).parent / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    lines = run("tail", log, "--json", "--decode", "--schema", schema).stdout
    assert lines.count('"error"') == 2
    assert run("produce", log + "-copy", "--create", "--format", "json", given=lines).exit_code == 0
    assert content(log + "-copy").column("value").to_pylist() == [b'{"n":1}', b"no JSON", b"\xff"]


def test_rows_that_only_resemble_records_are_values(run: Run, log: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = ['{"key": "a", "value": "b"}', '{"offset": 1, "timestamp": 2, "op": "put", "city": "Oslo"}']
    for number, row in enumerate(rows):
        path.write_text(row + "\n")
        assert run("load", path, log, "--job", str(number), "--create").exit_code == 0
    path.write_text('{"offset": 1, "timestamp": 2, "op": "put", "key": "a", "value": "b"}\n')
    assert run("load", path, log, "--job", "named", "--value", "value").exit_code == 0
    assert content(log).column("value").to_pylist() == [row.encode() for row in rows] + [b"b"]


def test_a_line_among_records_that_is_none_is_named(run: Run, log: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"offset": 1, "timestamp": 2, "op": "put", "key": "a"}\n\n{"city": "Oslo"}\n')
    done = run("load", path, log, "--job", "wrong", "--create")
    assert done.exit_code == 1
    assert "rows.jsonl, line 3, has the unknown field 'city'" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"timestamp": 9223372036854775808}', "more than 64 bits"),
        ('{"value_base64": 1234}', "1234 is not base64"),
        ('{"op": 3}', "not 3"),
        ('{"op": true}', "not True"),
        ('{"op": 0, "key": {"base64": "?"}}', "not base64"),
        ('{"op": 0, "value": [1]}', "neither text nor base64"),
        ('{"op": "put", "key": {"base64": "/w=="}}', "a key is text"),
        ('{"key": "\\ud800"}', "cannot be a record"),
    ],
)
def test_a_line_that_cannot_be_a_record_is_one_sentence(run: Run, log: str, line: str, said: str) -> None:
    done = run("produce", log, "--create", "--format", "json", given=line + "\n")
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
