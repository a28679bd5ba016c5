"""Typed Delta tables: columns from values, schema changes, records that cannot be rows, derived keys, transforms."""

from __future__ import annotations

import json
from importlib import resources
from itertools import pairwise

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import BadRecord, Diverged, InvalidInput, SchemaRefused
from strandline.model.cursor import Cursor
from strandline.tables.delta.sink import DeltaSink
from strandline.testing.sinks import DELETE, LOG, changes
from tests.matrix_cases import some

ORDER = pa.schema({"id": pa.int64(), "city": pa.string(), "total": pa.float64()})


def order(number: int, **fields: object) -> bytes:
    return json.dumps({"id": number, "city": "Oslo", "total": number / 2, **fields}).encode()


def apply(sink: DeltaSink, first: int, *rows) -> None:
    sink.apply(changes(first, *rows), since=Cursor(LOG, first), upto=Cursor(LOG, first + len(rows)))


def rows_of(url) -> list[dict[str, object]]:
    table = DeltaTable(str(url)).to_pyarrow_table()
    by = next(name for name in ("_offset", "_valid_from_offset", "offset") if name in table.column_names)
    return table.sort_by(by).to_pylist()


def duck_extension(name: str) -> str:
    """The extension's file; DuckDB itself would download it."""
    folder = resources.files(f"duckdb_extension_{name}") / "extensions" / f"v{duckdb.__version__}"
    return str(folder / f"{name}.duckdb_extension")


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "table")


def test_the_fields_of_values_are_columns(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER))
    apply(sink, 0, (b"1", order(1)), (b"2", order(2)), (b"1", order(1, city="Bergen")), (b"2", DELETE))
    (row,) = rows_of(place)
    row.pop("_timestamp")
    assert row == {"id": 1, "city": "Bergen", "total": 0.5, "_key": b"1", "_offset": 2}


def test_every_change_is_kept_with_its_operation(place):
    sink = DeltaSink(place, mode="append", value=sl.values.Json(ORDER))
    apply(sink, 0, (b"1", order(1)), (b"1", DELETE))
    assert [(row["id"], row["_key"], row["_op"], row["_offset"]) for row in rows_of(place)] == [
        (1, b"1", 0, 0),
        (None, b"1", 1, 1),
    ]


def test_a_history_shows_what_was_known_at_an_offset(place):
    sink = DeltaSink(place, mode="history", value=sl.values.Json(ORDER))
    apply(sink, 0, (b"1", order(1)), (b"1", order(1, city="Bergen")))
    apply(sink, 2, (b"1", DELETE), (b"1", order(1, city="Moss")))
    assert [(row["city"], row["_valid_from_offset"], row["_valid_to_offset"]) for row in rows_of(place)] == [
        ("Oslo", 0, 1),
        ("Bergen", 1, 2),
        ("Moss", 3, None),
    ]


def test_other_readers_see_the_same_rows_and_skip_files_by_statistics(place):
    sink = DeltaSink(place, mode="append", value=sl.values.Json(ORDER))
    for first in range(0, 30, 10):
        apply(sink, first, *[(b"%d" % n, order(n)) for n in range(first, first + 10)])
    assert pl.read_delta(place).filter(pl.col("id") >= 25)["id"].sort().to_list() == [25, 26, 27, 28, 29]
    duck = duckdb.connect()
    duck.execute(f"load '{duck_extension('delta')}'")
    assert duck.execute(f"select sum(id) from delta_scan('{place}')").fetchone() == (sum(range(30)),)
    stats = pa.table(DeltaTable(place).get_add_actions(flatten=True))
    assert sorted(zip(stats["min.id"].to_pylist(), stats["max.id"].to_pylist(), strict=True)) == [
        (0, 9),
        (10, 19),
        (20, 29),
    ]
    assert stats["null_count.city"].to_pylist() == [0, 0, 0]


# --- schema changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_new_field_is_a_new_column_that_is_null_before(place, mode):
    apply(DeltaSink(place, mode=mode, value=sl.values.Json(ORDER)), 0, (b"1", order(1)))
    wider = sl.values.Json(ORDER.append(pa.field("vip", pa.bool_())))
    apply(DeltaSink(place, mode=mode, value=wider), 1, (b"2", order(2, vip=True)))
    assert [(row["id"], row["vip"]) for row in rows_of(place)] == [(1, None), (2, True)]
    older = DeltaSink(place, mode=mode, value=sl.values.Json(ORDER))
    apply(older, 2, (b"3", order(3)))
    assert [row["vip"] for row in rows_of(place)] == [None, True, None]
    assert older.cursor(LOG) == Cursor(LOG, 3)


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_number_that_becomes_wider_rewrites_the_table_at_the_same_cursor(place, mode):
    narrow = pa.schema({"id": pa.int32(), "total": pa.float64()})
    apply(DeltaSink(place, mode=mode, value=sl.values.Json(narrow)), 0, (b"1", order(1)), (b"2", order(2)))
    wide = pa.schema({"id": pa.int64(), "total": pa.float64()})
    sink = DeltaSink(place, mode=mode, value=sl.values.Json(wide))
    apply(sink, 2, (b"3", order(1 << 40)))
    assert [row["id"] for row in rows_of(place)] == [1, 2, 1 << 40]
    assert [row["total"] for row in rows_of(place)] == [0.5, 1.0, (1 << 40) / 2]
    assert DeltaSink(place, mode=mode, value=sl.values.Json(wide)).cursor(LOG) == Cursor(LOG, 3)


def test_any_other_change_is_refused_and_nothing_is_changed(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER))
    apply(sink, 0, (b"1", order(1)))
    version = DeltaTable(place).version()
    other = DeltaSink(place, value=sl.values.Json(ORDER.set(0, pa.field("id", pa.string()))))
    with pytest.raises(SchemaRefused, match="id"):
        apply(other, 1, (b"2", b'{"id": "x"}'))
    assert DeltaTable(place).version() == version


def test_a_crash_behind_a_schema_change_loses_nothing(place, monkeypatch):
    apply(DeltaSink(place, value=sl.values.Json(ORDER)), 0, (b"1", order(1)))
    wider = sl.values.Json(ORDER.append(pa.field("vip", pa.bool_())))
    sink = DeltaSink(place, value=wider)
    begun = sink.begin(since=Cursor(LOG, 1), upto=Cursor(LOG, 2), tasks=1)
    assert begun is not None  # the columns are committed; the process dies here
    again = DeltaSink(place, value=wider)
    assert again.cursor(LOG) == Cursor(LOG, 1)
    apply(again, 1, (b"2", order(2, vip=False)))
    assert [row["vip"] for row in rows_of(place)] == [None, False]


def test_a_column_that_somebody_else_dropped_or_retyped_is_not_continued(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER))
    apply(sink, 0, (b"1", order(1)))
    from deltalake import write_deltalake

    write_deltalake(place, pa.table({"id": ["x"]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises((Diverged, SchemaRefused)):
        DeltaSink(place, value=sl.values.Json(ORDER)).cursor(LOG)


# --- records that cannot be rows ---------------------------------------------------------------------------------


def letters(tmp_path) -> list[tuple[int, bytes | None, bool]]:
    rows = rows_of(tmp_path / "letters")
    return [(row["offset"], row["value"], bool(row["reason"])) for row in rows]


def test_a_record_that_cannot_be_decoded_is_named_and_nothing_is_applied(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER))
    with pytest.raises(BadRecord, match="offset 1"):
        apply(sink, 0, (b"1", order(1)), (b"2", b"{no json"))
    assert sink.cursor(LOG) is None


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_bad_records_go_to_the_dead_letter_table_once(place, tmp_path, mode):
    sink = DeltaSink(place, mode=mode, value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))
    apply(sink, 0, (b"1", order(1)), (b"2", b"{no json"), (b"3", order(3)))
    apply(sink, 3, (b"4", order(4)))
    apply(sink, 4, (b"5", b'{"id": "text"}'))
    apply(sink, 0, (b"1", order(1)), (b"2", b"{no json"), (b"3", order(3)))
    assert [row["id"] for row in rows_of(place)] == [1, 3, 4]
    assert letters(tmp_path) == [(1, b"{no json", True), (4, b'{"id": "text"}', True)]


def test_a_bad_newest_value_leaves_the_row_of_the_good_one_before_in_any_cuts(tmp_path):
    rows = [(b"1", order(1)), (b"1", order(2)), (b"1", b"bad")]
    found = []
    for name, cuts in (("whole", [0, 3]), ("parts", [0, 1, 2, 3])):
        sink = DeltaSink(
            str(tmp_path / name), value=sl.values.Json(ORDER), dead_letters=str(tmp_path / f"{name}-letters")
        )
        for low, high in pairwise(cuts):
            apply(sink, low, *rows[low:high])
        found.append([row["id"] for row in rows_of(tmp_path / name)])
    assert found == [[2], [2]]


def test_a_crash_between_the_letters_and_the_table_doubles_no_letter(place, tmp_path, monkeypatch):
    def sink():
        return DeltaSink(place, mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))

    apply(sink(), 0, (b"1", order(1)))
    dying = sink()
    begun = dying.begin(since=Cursor(LOG, 1), upto=Cursor(LOG, 3), tasks=1)
    written = [part.write(changes(1, (b"2", b"bad"), (b"3", order(3))).to_batches()) for part in begun.parts]
    begun.letters.commit(written, str(DeltaTable(place).metadata().id), begun.since, begun.upto)
    assert letters(tmp_path) == [(1, b"bad", True)]
    apply(sink(), 1, (b"2", b"bad"), (b"3", order(3)), (b"4", b"bad, too"))
    assert letters(tmp_path) == [(1, b"bad", True), (3, b"bad, too", True)]
    assert [row["_offset"] for row in rows_of(place)] == [0, 2]


def test_too_many_bad_records_stop_it(place, tmp_path):
    sink = DeltaSink(
        place, mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"), max_bad_share=0.3
    )
    apply(sink, 0, *[(b"k", b"bad" if n == 5 else order(n)) for n in range(10)])
    with pytest.raises(BadRecord, match="2 of 4 records"):
        apply(sink, 10, (b"k", b"bad"), (b"k", order(1)), (b"k", b"bad"), (b"k", order(1)))
    assert sink.cursor(LOG) == Cursor(LOG, 10)


def test_a_record_without_key_is_a_dead_letter_of_a_keyed_table(place, tmp_path):
    sink = DeltaSink(place, value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))
    apply(sink, 0, (None, order(1)), (b"2", order(2)))
    assert [row["id"] for row in rows_of(place)] == [2]
    assert letters(tmp_path) == [(0, order(1), True)]


# --- keys from values, and transforms --------------------------------------------------------------------------------


def test_rows_can_be_identified_by_fields_of_the_value(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER), key=["city", "id"])
    apply(sink, 0, (None, order(1)), (b"x", order(1, city="Moss")), (b"y", order(1, total=9.0)))
    assert [(row["city"], row["total"], row["_offset"]) for row in rows_of(place)] == [
        ("Moss", 0.5, 1),
        ("Oslo", 9.0, 2),
    ]


def expensive(rows: pa.Table) -> pa.Table:
    rows = rows.filter(pc.greater(rows["total"], 1.0))
    return rows.append_column("vat", pc.multiply(rows["total"], 0.25))


@pytest.mark.parametrize("mode", ["latest", "append", "history"])
def test_a_transform_filters_and_computes(place, mode):
    sink = DeltaSink(place, mode=mode, value=sl.values.Json(ORDER), transform=expensive)
    apply(sink, 0, *[(b"%d" % n, order(n)) for n in range(6)])
    assert [(row["id"], row["vat"]) for row in rows_of(place)] == [(3, 0.375), (4, 0.5), (5, 0.625)]
    assert sink.cursor(LOG) == Cursor(LOG, 6)


def test_a_transform_that_drops_what_a_keyed_table_needs_is_refused(place):
    sink = DeltaSink(place, value=sl.values.Json(ORDER), transform=lambda rows: rows.drop_columns(["_offset"]))
    with pytest.raises(InvalidInput, match="'_offset' is missing"):
        apply(sink, 0, (b"1", order(1)))


def test_a_field_that_is_named_like_a_column_of_the_table_is_refused(place):
    with pytest.raises(InvalidInput, match="'_offset' begins with an underscore"):
        apply(DeltaSink(place, value=sl.values.Json(pa.schema({"_offset": pa.int64()}))), 0, (b"1", b"{}"))


# --- crossings -------------------------------------------------------------------------------------------------------


def rekeyed(rows: pa.Table) -> pa.Table:
    at = rows.schema.get_field_index("_key")
    return rows.set_column(at, "_key", rows["city"].cast(pa.binary()))


@pytest.mark.parametrize("mode", ["latest", "history"])
@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_keys_that_a_transform_sets_reach_their_worker(place, mode, tasks):
    sink = DeltaSink(place, mode=mode, value=sl.values.Json(ORDER), transform=rekeyed)
    records = changes(0, *[(b"%d" % n, order(n, city=f"c{n % 7}")) for n in range(40)])
    begun = sink.begin(since=Cursor(LOG, 0), upto=Cursor(LOG, 40), tasks=tasks)
    begun.commit([part.write(records.to_batches()) for part in begun.parts])
    rows = [row for row in rows_of(place) if row.get("_valid_to_offset") is None]
    assert sorted(row["city"] for row in rows) == [f"c{n}" for n in range(7)]
    assert len(rows_of(place)) == (7 if mode == "latest" else 40)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.uint32(), "4294967295", 4294967295),
        (pa.uint64(), "18446744073709551615", 18446744073709551615),
        (pa.timestamp("ms", "UTC"), '"2026-01-01T00:00:00.123Z"', None),
        (pa.timestamp("ns", "UTC"), '"2026-01-01T00:00:00.123456789Z"', None),
    ],
)
def test_types_that_delta_does_not_have_become_wider_ones_from_the_first_commit_on(place, kind, text, value):
    for first in range(2):
        sink = DeltaSink(place, value=sl.values.Json(pa.schema({"x": kind})))
        apply(sink, first, (b"%d" % first, b'{"x": %s}' % text.encode()))
    found = [row["x"] for row in rows_of(place)]
    assert len(found) == 2
    assert found[0] == found[1]
    assert value is None or found[0] == value


def test_a_type_that_no_table_stores_is_refused_in_one_sentence(place):
    with pytest.raises(SchemaRefused, match="'x' has the type time64"):
        apply(DeltaSink(place, value=sl.values.Json(pa.schema({"x": pa.time64("us")}))), 0, (b"1", b"{}"))


@pytest.mark.parametrize("other", [{"key": "id"}, {"mode": "marked"}])
def test_a_table_is_not_continued_with_another_key_or_other_deletes(place, other):
    apply(DeltaSink(place, value=sl.values.Json(ORDER)), 0, (b"1", order(1)))
    with pytest.raises(InvalidInput, match="was made with"):
        DeltaSink(place, value=sl.values.Json(ORDER), **other).cursor(LOG)


def test_two_tables_share_a_dead_letter_table_and_each_has_all_of_its_letters(tmp_path):
    for name in ("one", "two"):
        sink = DeltaSink(
            str(tmp_path / name), mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters")
        )
        apply(sink, 0, (b"1", b"bad"), (b"2", order(2)), (b"3", b"bad"))
    assert sorted(offset for offset, *_ in letters(tmp_path)) == [0, 0, 2, 2]


def test_a_table_that_is_built_again_has_each_letter_once(place, tmp_path):
    import shutil

    def sink():
        return DeltaSink(place, mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))

    apply(sink(), 0, (b"1", b"bad"))
    shutil.rmtree(place)
    apply(sink(), 0, (b"1", b"bad"), (b"2", b"bad"))
    assert sorted(offset for offset, *_ in letters(tmp_path)) == [0, 1]


def test_letters_may_be_deleted_by_anybody(place, tmp_path):
    sink = DeltaSink(place, mode="append", value=sl.values.Json(ORDER), dead_letters=str(tmp_path / "letters"))
    apply(sink, 0, (b"1", b"bad"))
    DeltaTable(str(tmp_path / "letters")).delete()
    apply(sink, 1, (b"2", b"bad"))
    assert letters(tmp_path) == [(1, b"bad", True)]


@pytest.mark.parametrize("within", ["", "/letters"])
def test_dead_letters_within_the_table_are_refused(place, within):
    with pytest.raises(InvalidInput, match="choose another path"):
        DeltaSink(place, dead_letters=place + within)


def test_times_that_statistics_cannot_have_stop_nobody(place):
    schema = pa.schema({"at": pa.timestamp("us", "UTC")})
    sink = DeltaSink(place, mode="append", value=sl.values.Json(schema))
    apply(sink, 0, (b"1", b'{"at": "0001-01-01T00:00:00Z"}'), (b"2", b'{"at": "9999-12-31T23:59:59.999999Z"}'))
    old = pa.scalar("0999-01-01T00:00:00", pa.string()).cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    table = DeltaTable(place).to_pyarrow_table(filters=pc.field("at") < old)
    assert table.num_rows == 1


def test_a_record_beyond_the_year_9999_is_applied(place):
    record = changes(0, (b"1", b"x"))
    late = pa.array([1 << 60], pa.int64()).cast(record.schema.field("timestamp").type)
    record = record.set_column(1, record.schema.field("timestamp"), late)
    sink = DeltaSink(place, mode="append")
    sink.apply(record, since=Cursor(LOG, 0), upto=Cursor(LOG, 1))
    assert sink.cursor(LOG) == Cursor(LOG, 1)


@pytest.mark.parametrize(
    ("schema", "text"),
    some(
        [
            ({"a": pa.int64(), "b": pa.float64()}, b'{"a": 1, "b": 1.5}'),
            ({"a": pa.int64(), "b": pa.string()}, b'{"a": 1, "b": "%s"}' % (b"x" * 300)),
            ({"a": pa.int64(), "b": pa.decimal128(10, 2)}, b'{"a": 1, "b": "1.50"}'),
            ({"a": pa.int64(), "b": pa.struct({"c": pa.int64()})}, b'{"a": 1, "b": {"c": 1}}'),
            ({"a": pa.int64(), "b": pa.bool_()}, b'{"a": 1, "b": true}'),
            ({"a": pa.int64(), "b": pa.date32()}, b'{"a": 1, "b": "2026-01-01"}'),
            ({"a": pa.int64(), "b": pa.int64()}, b'{"a": 1}'),
        ],
        3,
    ),
)
def test_no_reader_skips_a_row_because_of_statistics(place, schema, text):
    sink = DeltaSink(place, mode="append", value=sl.values.Json(pa.schema(schema)))
    apply(sink, 0, (b"1", text))
    apply(sink, 1, (b"2", text), (b"3", text))
    dataset = DeltaTable(place).to_pyarrow_dataset()
    for name in ("a", "b", "_offset", "_timestamp", "_key"):
        valid = pc.field(name).is_valid()
        count = dataset.to_table(filter=valid).num_rows
        assert count == (0 if name == "b" and text == b'{"a": 1}' else 3), name
        values = [row[name] for row in rows_of(place)]
        if values[0] is None or isinstance(values[0], dict):
            continue
        low = pa.scalar(min(values), DeltaTable(place).to_pyarrow_table().schema.field(name).type)
        if name != "b" or schema["b"] != pa.bool_():
            assert dataset.to_table(filter=pc.field(name) >= low).num_rows == 3, name
    assert pl.scan_delta(place).filter(pl.col("a") == 1).collect().height == 3
