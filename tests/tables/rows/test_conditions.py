"""Conditions: which records of a log a table takes, and what the table remembers of that."""

import json

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import BadRecord, InvalidInput, Unsupported
from strandline.model.records import HEADERS
from strandline.tables.rows.conditions import FieldLabel, RestOf, recorded_condition, where

VALUES = sl.values.Json(pa.schema({"x": pa.int64()}))


def records(*, keys=None, values=None, headers=None) -> pa.Table:
    count = len(keys or values or headers)
    nothing = [None] * count
    return pa.table(
        {
            "key": pa.chunked_array([pa.array(keys or nothing, pa.binary())]),
            "value": pa.chunked_array([pa.array(values or nothing, pa.binary())]),
            "headers": pa.chunked_array([pa.array(headers or nothing, HEADERS)]),
        }
    )


def taken(condition, found: pa.Table) -> list[bool]:
    return condition.mask(found).to_pylist()


def labels(paths: tuple[str, ...], *values: bytes | None) -> list[str | None]:
    return FieldLabel(paths).of(records(values=list(values))).to_pylist()


def test_a_key_prefix_takes_the_keys_that_begin_with_it():
    found = records(keys=[b"orders/1", b"order", None, b"\xff", b"orders/"])
    assert taken(where(key_prefix=b"orders/"), found) == [True, False, False, False, True]
    assert taken(where(key_prefix=b"\xff"), found) == [False, False, False, True, False]


def test_a_key_up_to_a_separator_is_compared_as_text():
    found = records(keys=[b"orders/1", b"orders", None, b"\xff/2", b"orders/a/b", b"/"])
    assert taken(where(key_until=b"/", equals="orders"), found) == [True, False, False, False, True, False]
    assert taken(where(key_until=b"/", equals=""), found) == [False, False, False, False, False, True]


def test_a_header_is_compared_by_its_first_value():
    found = records(headers=[[("t", b"a")], [("t", b"b"), ("t", b"a")], None, [], [("T", b"a")], [("t", None)]])
    assert taken(where(header="t", equals="a"), found) == [True, False, False, False, False, False]


def test_a_field_is_found_at_the_top_and_within_the_payload_of_a_debezium_event():
    plain, wrapped = b'{"source":{"table":"a"},"n":1}', b'{"schema":{},"payload":{"source":{"table":"b"}}}'
    assert labels(("source.table",), plain, wrapped, b'{"payload":7,"source":{"table":"c"}}') == ["a", "b", "c"]
    assert labels(("payload.kind",), b'{"payload":{"kind":"x"}}') == ["x"]


def test_a_value_without_the_field_has_no_label():
    odd = [None, b"", b"{}", b"[1]", b"{", b'{"source":3}', b'{"source":{"table":1.5}}', b'{"source":{"table":true}}']
    odd += [b'{"source":{"table":"\xff"}}', b'{"source":{"table":null}}', b'{"source":{"table":{}}}', b"[" * 100_000]
    assert labels(("source.table",), *odd) == [None] * len(odd)


def test_several_fields_are_joined_and_numbers_are_text():
    assert labels(("s.schema", "s.table"), b'{"s":{"schema":"public","table":7}}', b'{"s":{"table":7}}') == [
        "public.7",
        None,
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"field": "a"},
        {"field": "a", "header": "b", "equals": "c"},
        {"field": "a..b", "equals": "c"},
        {"field": [], "equals": "c"},
        {"field": ["a", "a"], "equals": "c"},
        {"key_until": b"", "equals": "c"},
        {"key_prefix": b"a", "equals": "c"},
        {"equals": "c"},
        {"field": 'a"b', "equals": "x"},
        {"field": "a\x00b", "equals": "x"},
    ],
)
def test_a_condition_that_says_too_little_or_too_much_is_refused(given):
    with pytest.raises(InvalidInput):
        where(**given)


@pytest.mark.parametrize(
    "condition",
    [
        where(key_prefix=b"a\xff/"),
        where(key_until=b"\x00", equals="x"),
        where(header="h", equals="ü"),
        where(field=["a.b", "c"], equals="1.2"),
    ],
)
def test_a_recorded_condition_is_the_same_again(condition):
    assert recorded_condition(json.dumps({"only": condition.recorded()}), "here") == condition


def test_the_rest_of_a_route_is_known_to_the_route_alone():
    with pytest.raises(Unsupported, match="only that route can tell"):
        recorded_condition(json.dumps({"only": RestOf(len).recorded()}), "here")


def event(table: str, number: int) -> bytes:
    return json.dumps({"source": {"table": table}, "x": number}).encode()


@pytest.fixture
def log(tmp_path):
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for number in range(60):
            producer.append(key=b"%d" % (number % 7), value=event("ab"[number % 2], number))
    return log


ONLY_A = {"field": "source.table", "equals": "a"}


@pytest.mark.parametrize("mode", ["latest", "marked", "append", "history"])
def test_a_table_holds_its_own_records_after_following_verifying_and_rebuilding(log, tmp_path, mode):
    def sink():
        return sl.DeltaSink(str(tmp_path / "table"), mode=mode, value=VALUES).taking(where(**ONLY_A))

    sl.follow(log, sink(), upto=31)
    sl.follow(log, sink(), upto="end")
    assert sink().cursor(log.log_id).next == 60
    assert set(sink().rows()["x"].to_pylist()) <= set(range(0, 60, 2))
    assert sink().rows().num_rows == (30 if mode in ("append", "history") else 7)
    assert sl.tables.verify(sink(), log).is_clean
    before = sink().rows().num_rows
    sl.tables.rebuild(sink(), log)
    assert sl.tables.verify(sink(), log).is_clean
    assert sink().rows().num_rows == before


@pytest.mark.parametrize("mode", ["latest", "append"])
def test_a_table_of_a_database_holds_its_own_records(log, tmp_path, mode):
    def sink():
        return sl.SqliteSink(str(tmp_path / "db"), table="t", mode=mode, value=VALUES).taking(where(**ONLY_A))

    sl.follow(log, sink(), upto="end")
    assert sink().size().rows == (30 if mode == "append" else 7)
    assert sl.tables.verify(sink(), log).is_clean
    again = sl.tables.existing(f"sqlite:{tmp_path / 'db'}#t", value=VALUES)
    assert again.takes == where(**ONLY_A)
    sl.tables.rebuild(again, log)
    assert sl.tables.verify(again, log).is_clean


def test_an_existing_table_is_opened_with_the_condition_that_it_records(log, tmp_path):
    sl.follow(log, sl.DeltaSink(str(tmp_path / "t"), value=VALUES).taking(where(**ONLY_A)), upto="end")
    found = sl.tables.existing(str(tmp_path / "t"), value=VALUES)
    assert found.takes == where(**ONLY_A)
    assert sl.tables.verify(found, log).is_clean


@pytest.mark.parametrize("other", [None, {"field": "source.table", "equals": "b"}, {"key_prefix": b"1"}])
def test_a_table_is_not_continued_with_another_condition(log, tmp_path, other):
    sl.follow(log, sl.DeltaSink(str(tmp_path / "t"), value=VALUES).taking(where(**ONLY_A)), upto=30)
    sink = sl.DeltaSink(str(tmp_path / "t"), value=VALUES)
    with pytest.raises(InvalidInput, match="open it as it was made"):
        sl.follow(log, sink if other is None else sink.taking(where(**other)), upto="end")


def test_a_sink_takes_one_condition():
    sink = sl.DeltaSink("memory://conditions/t").taking(where(**ONLY_A))
    with pytest.raises(InvalidInput, match=r"takes records already of which field source.table is 'a'"):
        sink.taking(where(**ONLY_A))


def test_bad_records_of_other_tables_are_neither_refused_nor_counted(tmp_path):
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for number in range(100):
            producer.append(key=b"k", value=b"not json" if number % 10 else event("a", number))
    sink = sl.DeltaSink(str(tmp_path / "t"), mode="append", value=VALUES).taking(where(**ONLY_A))
    sl.follow(log, sink, upto="end")
    assert sink.rows().num_rows == 10


def test_the_share_of_bad_records_is_that_of_the_tables_own(tmp_path):
    log = sl.open(str(tmp_path / "log"), create=True)
    with log.producer() as producer:
        for number in range(100):
            bad = json.dumps({"source": {"table": "a"}, "x": "no number"}).encode()
            producer.append(key=b"k", value=event("b", number) if number >= 2 else bad)
        producer.append(key=b"k", value=event("a", 1))
    sink = sl.DeltaSink(
        str(tmp_path / "t"), mode="append", value=VALUES, dead_letters=str(tmp_path / "letters"), max_bad_share=0.5
    ).taking(where(**ONLY_A))
    with pytest.raises(BadRecord, match="2 of 3 records"):
        sl.follow(log, sink, upto="end")
