"""Deletes without a value in a table whose key is made of fields of the values: told what they mean, or refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.types as pt
import pytest

import strandline as sl
from strandline.errors import BadRecord, InvalidInput
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.matrix_cases import some

ROW = sl.values.Json(pa.schema({"id": pa.int64(), "name": pa.string()}))


def a_log(*keys: bytes | None) -> Any:
    """Two rows, and a delete of each key."""
    log = sl.log.MemoryLog()
    with log.producer() as producer:
        for number in (1, 2):
            producer.append(key=b"%d" % number, value=b'{"id": %d, "name": "n"}' % number)
        for key in keys:
            producer.append(key=key, op=sl.Op.DELETE)
    return log


def sink(kind: str, folder: Path, **options: Any) -> Any:
    options = {"value": ROW, "key": "id", **options}
    if kind == "delta":
        return sl.DeltaSink(folder / "table", dead_letters=folder / "letters", **options)
    return sl.SqliteSink(folder / "shop.db", table="t", dead_letters=True, **options)


KINDS = pytest.mark.parametrize("kind", some(["delta", "sqlite"], 2))


@KINDS
def test_the_first_delete_without_a_value_is_refused_also_with_dead_letters(kind: str, tmp_path: Path) -> None:
    log = a_log(b"1")
    with pytest.raises(BadRecord, match=r"offset 2 is a delete without a value.*tombstones.*: 'key'"):
        sl.follow(log, sink(kind, tmp_path), upto="end")
    sl.follow(log, sink(kind, tmp_path, tombstones="dead-letters"), upto="end")
    assert sl.tables.letters(sink(kind, tmp_path), log)["offset"].to_pylist() == [2]
    assert sl.tables.replay_letters(sink(kind, tmp_path), log).unreadable == 1
    with pytest.raises(BadRecord, match="name its tombstones"):
        sl.tables.verify(sink(kind, tmp_path), log)
    corrected = sink(kind, tmp_path, tombstones="key")
    assert sl.tables.replay_letters(corrected, log).applied == 1
    found = sl.tables.verify(corrected, log)
    assert (found.is_clean, found.rows) == (True, 1)


AVRO = '{"type": "record", "name": "k", "fields": [{"name": "id", "type": "long"}]}'


@KINDS
@pytest.mark.parametrize(
    ("tombstones", "key", "bad"),
    [
        ("key", b"1", b"one"),
        ("json", b'{"id": 1}', b"1"),
        ("json", b'{"schema": {}, "payload": {"id": 1}}', b"[]"),
        (sl.values.Avro(AVRO), b"\x02", b""),
    ],
    ids=["key", "json", "payload", "codec"],
)
def test_the_key_of_the_record_names_the_row(
    kind: str, tombstones: Any, key: bytes, bad: bytes, tmp_path: Path
) -> None:
    log = a_log(key, bad, None)
    sl.follow(log, sink(kind, tmp_path, tombstones=tombstones), upto="end")
    found = sl.tables.verify(sink(kind, tmp_path, tombstones=tombstones), log)
    assert (found.is_clean, found.rows) == (True, 1)
    assert sl.tables.letters(sink(kind, tmp_path, tombstones=tombstones), log)["offset"].to_pylist() == [3, 4]


@pytest.mark.parametrize(
    ("column", "tombstones", "key", "bad"),
    [
        (pa.decimal128(9, 2), "key", b"1.00", b"1e-9999999"),
        (pa.decimal128(9, 2), "key", b"1e0", b"0." + b"0" * 3_000_000 + b"1"),
        (pa.decimal128(9, 2), sl.values.Json(pa.schema({"id": pa.string()})), b'{"id": "1"}', b'{"id": "1e-9999999"}'),
        (pa.int32(), sl.values.Avro(AVRO), b"\x02", b"\x80\x80\x80\x80\x80\x01"),
        (pa.int64(), "key", b"1", b"\xff"),
    ],
    ids=["exponent", "digits", "codec of text", "wider codec", "no text"],
)
def test_a_key_that_its_column_cannot_hold_is_a_dead_letter(
    column: pa.DataType, tombstones: Any, key: bytes, bad: bytes, tmp_path: Path
) -> None:
    log = a_log(key, bad)
    options = {"value": sl.values.Json(pa.schema({"id": column, "name": pa.string()})), "tombstones": tombstones}
    sl.follow(log, sink("sqlite", tmp_path, **options), upto="end")
    found = sl.tables.verify(sink("sqlite", tmp_path, **options), log)
    assert (found.is_clean, found.rows) == (True, 1)
    letters = sl.tables.letters(sink("sqlite", tmp_path, **options), log)
    assert letters["offset"].to_pylist() == [3]
    assert f"'id', which is {column}" in letters["reason"][0].as_py()


def test_a_transform_is_given_the_key_of_a_tombstone(tmp_path: Path) -> None:
    log = a_log(b"1")
    sl.follow(log, sink("delta", tmp_path, tombstones="key", transform=_as_it_is), upto="end")
    assert sink("delta", tmp_path).rows()["id"].to_pylist() == [2]


def _as_it_is(changes: pa.Table) -> pa.Table:
    return changes


def test_tombstones_that_mean_nothing_to_a_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="without key columns"):
        sl.DeltaSink(tmp_path / "t", value=ROW, tombstones="key")
    with pytest.raises(InvalidInput, match="2 columns"):
        sl.DeltaSink(tmp_path / "t", value=ROW, key=("id", "name"), tombstones="key")
    with pytest.raises(InvalidInput, match="no column 'id'"):
        sl.DeltaSink(tmp_path / "t", value=ROW, key="id", tombstones=sl.values.Json(pa.schema({"x": pa.int64()})))


@pytest.mark.parametrize(
    ("column", "codec"),
    [(pa.int64(), pa.bool_()), (pa.int64(), pa.list_(pa.int64())), (pa.date32(), pa.float64()), (pa.bool_(), None)],
)
def test_a_key_whose_type_cannot_become_that_of_its_column_is_refused_at_the_start(
    column: pa.DataType, codec: pa.DataType | None, tmp_path: Path
) -> None:
    def made(kind: pa.DataType | None) -> Any:
        keys = "key" if kind is None else sl.values.Json(pa.schema({"id": kind}))
        return sink("delta", tmp_path, value=sl.values.Json(pa.schema({"id": column})), tombstones=keys)

    if codec is None or pt.is_boolean(codec):
        made(codec)  # bool and text are numbers, and the other way round
        return
    with pytest.raises(InvalidInput, match=f"cannot name a row by 'id', which is {column}".replace("[", r"\[")):
        made(codec)


def test_the_command_says_which_option_to_give_and_takes_it(run: Run, tmp_path: Path) -> None:  # noqa: F811
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    log = sl.open(tmp_path / "log", create=True)
    with log.producer() as producer:
        producer.append(key=b"1", value=b'{"id": 1}')
        producer.append(key=b"1", op=sl.Op.DELETE)
    table = f"sqlite:{tmp_path}/shop.db#t"
    command = ["follow", str(tmp_path / "log"), table, "--schema", str(schema), "--key", "id", "--until", "end"]
    refused = run(*command, "--dead-letters", "yes")
    assert refused.exit_code == 1
    assert "(--tombstones): 'key' if" in " ".join(refused.output.split())
    assert run(*command, "--tombstones", "key").exit_code == 0
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    options = ["--schema", str(schema), "--key", "id", "--tombstones", "key"]
    assert run("table", "verify", table, str(tmp_path / "log"), *options).exit_code == 0
