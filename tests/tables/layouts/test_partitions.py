"""Tables partitioned for queries: each file holds one partition, readers skip the others, and the table stays exact."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

import strandline as sl
from strandline.errors import Diverged, InvalidInput
from strandline.log.memory import MemoryLog
from strandline.model.records import record_batch
from strandline.tables import Layout
from strandline.tables.maintain.opening import existing
from tests.tables.layouts.formats import PLACES, counts, stored

ODD = "a b-c=é/%20"
ORDER = pa.schema(
    {
        "id": pa.int32(),
        "city": pa.string(),
        "made": pa.timestamp("us", "UTC"),
        "on": pa.date32(),
        "vip": pa.bool_(),
        ODD: pa.string(),
    }
)
CODEC = sl.values.Json(ORDER)
START = datetime(2026, 1, 15, 22, 30, tzinfo=UTC)
CITIES = ["Oslo", "Bergen", None, "", "a/b=c%20d 'é'", "__HIVE_DEFAULT_PARTITION__", "null", "x" * 300, "..", "\x00"]


def order(n: int, **more: Any) -> dict[str, Any]:
    at = START + timedelta(hours=n)
    row = {"id": n, "city": CITIES[n % len(CITIES)], "made": at.isoformat(), "on": at.date().isoformat()}
    return {**row, "vip": [True, False, None][n % 3], ODD: f"é{n % 2}", **more}


def append(log: MemoryLog, *values: dict[str, Any] | bytes) -> None:
    first = log.end().next
    batch = record_batch(
        timestamps=[int(START.timestamp() * 1e6) + n * 3_600_000_000 for n in range(first, first + len(values))],
        ops=[0] * len(values),
        keys=[b"k%d" % (n % 7) for n in range(first, first + len(values))],
        values=[one if isinstance(one, bytes) else json.dumps(one).encode() for one in values],
    )
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([batch]))


@pytest.fixture(params=sorted(PLACES))
def place(request, tmp_path):
    found = PLACES[request.param](tmp_path)
    yield found
    found.close()


@pytest.fixture
def delta(tmp_path):
    return PLACES["delta"](tmp_path)


@pytest.fixture
def log() -> MemoryLog:
    log = MemoryLog()
    append(log, *[order(n) for n in range(60)])
    return log


def followed(log: Any, place: Any, *partition_by: str, mode: Any = "append", **more: Any) -> Any:
    options = {"value": CODEC, **more}
    sink = place.sink(mode=mode, layout=Layout(partition_by), **options)
    sl.follow(log, sink, upto="end")
    return sink


def expected(place: Any, *fields: Any) -> set[tuple[Any, ...]]:
    """The partitions of the first 60 orders."""
    return {tuple(field(n) for field in fields) for n in range(60)}


def check(sink: Any, log: Any, rows: int = 60) -> None:
    found = sl.tables.verify(sink, log)
    assert (found.missing, found.extra, found.rows) == (0, 0, rows), found.first


def city(place: Any, n: int) -> str | None:
    """Delta takes an empty text for null."""
    name = CITIES[n % len(CITIES)]
    return None if place.name == "delta" and not name else name


def at(n: int) -> datetime:
    return START + timedelta(hours=n)


# --- partitions and their values -------------------------------------------------------------------------------------


def test_each_file_holds_the_rows_of_one_partition_and_the_table_all_rows(place, log):
    sink = followed(log, place, "city", "vip")
    assert {*counts(place)} == expected(place, lambda n: city(place, n), lambda n: [True, False, None][n % 3])
    for path, values in place.files().items():
        rows = stored(path)
        assert {*zip(rows["city"].to_pylist(), rows["vip"].to_pylist(), strict=True)} == {values}
    assert sorted(place.rows()["id"].to_pylist()) == list(range(60))
    check(sink, log)


def test_a_day_and_an_hour_are_in_utc(place, log):
    sink = followed(log, place, "day(made)", "hour(_timestamp)")
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    if place.name == "delta":
        whole = expected(place, lambda n: at(n).date(), lambda n: at(n).replace(minute=0))
        assert place.table().metadata().partition_columns == ["_made_day", "_timestamp_hour"]
    else:
        whole = expected(place, lambda n: (at(n) - epoch).days, lambda n: (at(n) - epoch) // timedelta(hours=1))
        assert [str(one.transform) for one in place.table().spec().fields] == ["day", "hour"]
    assert {*counts(place)} == whole
    check(sink, log)


def test_dates_and_odd_names_are_partitions(place, log):
    sink = followed(log, place, "on", ODD)
    assert len(counts(place)) == len(expected(place, lambda n: at(n).date(), lambda n: n % 2))
    assert sorted(place.rows()["id"].to_pylist()) == list(range(60))
    check(sink, log)


def test_times_before_1970_and_far_ones_are_partitions_too(place):
    log = MemoryLog()
    times = [None, "1969-12-31T23:59:59.999999Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]
    append(log, *[order(n, made=time) for n, time in enumerate(times)])
    sink = followed(log, place, "day(made)")
    if place.name == "delta":
        assert {*counts(place)} == {(None,), (date(1969, 12, 31),), (date.min,), (date.max,)}
    else:
        assert {*counts(place)} == {(None,), (-1,), (-719162,), (2932896,)}
    check(sink, log, 4)


@pytest.mark.parametrize("unit", ["day(_timestamp)", pytest.param("hour(_timestamp)", marks=pytest.mark.matrix)])
def test_a_clock_that_is_far_off_stops_no_follower(place, unit):
    log = MemoryLog()
    far = record_batch(timestamps=[2**62, -(2**62)], ops=[0, 0], keys=[b"a", b"b"], values=[b"{}", b"{}"])
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([far]))
    sink = followed(log, place, unit)
    with log.producer() as producer:
        producer.append_batch(pa.Table.from_batches([far]))
    sl.follow(log, sink, upto="end")
    assert sl.tables.optimize(sink) == 2, "its files are replaced, too"
    assert sink.cursor(log.log_id).next == 4
    assert len(counts(place)) == 2
    assert place.rows().num_rows == 4
    for condition in ("_timestamp > TIMESTAMPTZ '20000-01-01'", "_timestamp < TIMESTAMPTZ '0100-01-01 (BC)'"):
        assert place.duck(condition)[0] == 2, "no partition is left out that has rows"


def test_hundreds_of_partitions_in_one_range_are_written(place):
    log = MemoryLog()
    append(log, *[order(n, city=f"c{n}") for n in range(200)])
    sink = followed(log, place, "city")
    assert len(counts(place)) == 200
    check(sink, log, 200)


def test_the_log_of_delta_has_partitions_as_its_protocol_writes_them(delta, log):
    followed(log, delta, "city", "on", "hour(made)", "vip")
    commits = sorted((delta.folder / "table" / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for commit in commits for line in commit.read_text().splitlines()]
    adds = [line["add"] for line in lines if "add" in line]
    found = [tuple(add["partitionValues"][name] for name in ("city", "on", "_made_hour", "vip")) for add in adds]
    hours = [f"{at(n):%Y-%m-%dT%H}:00:00.000000Z" for n in range(60)]
    vip = ["true", "false", None]
    assert {*found} == {(city(delta, n), f"{at(n):%Y-%m-%d}", hours[n], vip[n % 3]) for n in range(60)}
    assert not any("city" in json.loads(add["stats"])["nullCount"] for add in adds)


# --- readers skip the rest -------------------------------------------------------------------------------------------


def test_duckdb_reads_only_the_files_of_a_partition(place, log):
    followed(log, place, "city")
    assert len(place.files()) > 5
    assert place.duck("city = 'Oslo'") == (6, 1)
    assert place.duck("city IS NULL")[0] == (12 if place.name == "delta" else 6)


def test_duckdb_skips_other_days(place, log):
    followed(log, place, "day(made)")
    if place.name == "delta":  # its extension compares no times with the bounds of files
        assert place.duck("_made_day = DATE '2026-01-16'") == (24, 1)
    else:
        until = "made < TIMESTAMPTZ '2026-01-17 00:00:00+00'"
        assert place.duck(f"made >= TIMESTAMPTZ '2026-01-16 00:00:00+00' AND {until}") == (24, 1)


def test_deltalake_skips_other_days_by_the_time_itself(delta, log):
    followed(log, delta, "day(made)")
    made = pc.field("made")
    of_day = (made >= datetime(2026, 1, 16, tzinfo=UTC)) & (made < datetime(2026, 1, 17, tzinfo=UTC))
    dataset = delta.table().to_pyarrow_dataset()
    assert len(list(dataset.get_fragments())) == 4
    assert len(list(dataset.get_fragments(of_day))) == 1
    assert dataset.to_table(filter=of_day).num_rows == 24


def test_polars_gives_the_rows_of_a_partition(place, log):
    followed(log, place, "city", "day(made)")
    frame = pl.scan_delta(place.address) if place.name == "delta" else pl.scan_iceberg(place.table())
    for n, name in enumerate(CITIES):
        if name != "" or place.name == "iceberg":
            is_it = pl.col("city").is_null() if name is None else pl.col("city") == name
            found = frame.filter(is_it & (pl.col("made") < START + timedelta(hours=20))).collect()
            ids = [i for i in range(20) if city(place, i) == name]
            assert sorted(found["id"].to_list()) == ids, n


def test_pyiceberg_plans_only_the_files_of_a_day(tmp_path, log):
    place = PLACES["iceberg"](tmp_path)
    followed(log, place, "day(made)", "city")
    scan = place.table().scan("made >= '2026-01-16T00:00:00+00:00' and made < '2026-01-17T00:00:00+00:00'")
    assert 0 < len(list(scan.plan_files())) < len(place.files()) / 2
    assert scan.to_arrow().num_rows == 24
    assert {one.file.partition[0] for one in place.table().scan("city = 'Oslo'").plan_files()} <= {
        20468,
        20469,
        20470,
        20471,
    }
    place.close()


def test_deltalake_names_only_the_files_of_a_partition(delta, log):
    followed(log, delta, "city")
    oslo = delta.table().to_pyarrow_dataset().get_fragments(pc.field("city") == "Oslo")
    assert [fragment.count_rows() for fragment in oslo] == [6]


# --- the same table, and no other ------------------------------------------------------------------------------------


def test_another_layout_of_a_table_is_refused_with_what_to_do(place, log):
    followed(log, place, "city")
    for layout in (None, Layout("vip"), Layout(["city", "vip"])):
        with pytest.raises(InvalidInput, match=r"was made with the partitions .'city'.*with the other layout"):
            place.sink(mode="append", value=CODEC, layout=layout).cursor(log.log_id)
    append(log, order(60))
    assert followed(log, place, "city").cursor(log.log_id).next == 61


def test_a_table_without_partitions_gets_none(place, log):
    sl.follow(log, place.sink(mode="append", value=CODEC), upto="end")
    with pytest.raises(InvalidInput, match=r"was made with the partitions \[\]"):
        followed(log, place, "city")
    assert place.sink(mode="append", value=CODEC).cursor(log.log_id).next == 60


def test_a_table_that_is_opened_by_its_address_keeps_its_layout(delta, log):
    followed(log, delta, "day(made)", "city")
    sink = existing(delta.address, value=CODEC)
    append(log, *[order(n) for n in range(60, 80)])
    sl.follow(log, sink, upto="end")
    check(sink, log, 80)
    copy = existing(delta.address, value=CODEC, into=str(delta.folder / "copy"))
    assert sl.tables.rebuild(copy, log).next == 80
    assert DeltaTable(str(delta.folder / "copy")).metadata().partition_columns == ["_made_day", "city"]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"partition_by": "nothing"}, "no column 'nothing' to partition by"),
        ({"partition_by": "made"}, r"write day\(made\) or hour\(made\)"),
        ({"partition_by": "day(city)"}, r"'city' is string, and day\(\) is of a time"),
        ({"partition_by": "_key"}, "is partitioned by text, integers, booleans and dates"),
        ({"cluster_by": "nothing"}, "no simple column 'nothing' to cluster by"),
    ],
)
def test_a_layout_that_the_columns_do_not_allow_is_refused(place, log, layout, sentence):
    sink = place.sink(mode="append", value=CODEC, layout=Layout(**layout))
    with pytest.raises(InvalidInput, match=sentence):
        sl.follow(log, sink, upto="end")


@pytest.mark.parametrize("mode", ["latest", "marked"])
def test_a_table_of_the_latest_rows_has_no_partitions(place, mode):
    with pytest.raises(InvalidInput, match="divides its files by the keys"):
        place.sink(mode=mode, layout=Layout("city"))


def test_a_layout_names_each_column_once():
    with pytest.raises(InvalidInput, match="or one twice"):
        Layout(["city", "city"])
    with pytest.raises(InvalidInput, match="empty name"):
        Layout(cluster_by="")
    with pytest.raises(InvalidInput, match="name 4 at most"):
        Layout(cluster_by=list("abcde"))


def test_a_table_of_self_describing_values_is_partitioned_by_what_each_record_has(place):
    log = MemoryLog()
    rows = [pa.table({"id": [n], "made": [START]}) for n in range(30)]
    append(log, *[sl.values.Arrow().encode(pa.record_batch(row.to_batches()[0]))[0].as_py() for row in rows])
    sink = followed(log, place, "day(_timestamp)", value=sl.values.Arrow())
    assert len(counts(place)) == 3
    assert sorted(place.rows()["id"].to_pylist()) == list(range(30))
    check(sink, log, 30)


# --- what happens to a table -----------------------------------------------------------------------------------------


def test_columns_change_in_a_partitioned_table(place, log):
    followed(log, place, "city", "day(made)")
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())).append(pa.field("note", pa.string())))
    append(log, order(0, id=1 << 40, note="new"))
    sink = followed(log, place, "city", "day(made)", value=wide)
    assert place.rows()["id"].type == pa.int64()
    assert place.rows()["note"].drop_null().to_pylist() == ["new"]
    assert sorted(place.rows()["id"].to_pylist()) == [*range(60), 1 << 40]
    check(sink, log, 61)


def test_a_partition_column_becomes_wider(place, log):
    followed(log, place, "id")
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())))
    append(log, order(0, id=1 << 40))
    sink = followed(log, place, "id", value=wide)
    assert sorted(values[0] for values in counts(place)) == [*range(60), 1 << 40]
    check(sink, log, 61)
    assert place.duck(f"id = {1 << 40}")[0] == 1
    assert place.duck("id = 3")[0] == 1


def test_a_rebuild_keeps_the_layout(place, log):
    sink = followed(log, place, "city", "day(made)")
    before = counts(place)
    assert sl.tables.rebuild(sink, log).next == 60
    assert counts(place) == before
    check(sink, log)


def test_dead_letters_are_replayed_into_their_partitions(place):
    log = MemoryLog()
    append(log, order(1), order(2, id=1 << 40))
    followed(log, place, "city", "day(made)")
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())))
    sink = place.sink(mode="append", value=wide, layout=Layout(["city", "day(made)"]))
    assert sl.tables.replay_letters(sink, log).applied == 1
    assert sorted(place.rows()["id"].to_pylist()) == [1, 1 << 40]
    check(sink, log, 2)


def test_a_table_that_lost_a_partition_is_repaired(place, log):
    sink = followed(log, place, "city")
    place.table().delete("city = 'Oslo'")
    with pytest.raises(Diverged):
        place.sink(mode="append", value=CODEC, layout=Layout("city")).cursor(log.log_id)
    assert sink.repair(log.log_id, lambda _: True).next == 60
    check(sink, log)
    append(log, order(60))
    check(followed(log, place, "city"), log, 61)


def test_files_that_deltalake_has_joined_keep_the_values_of_their_partition(delta, log):
    sink = followed(log, delta, "city", "hour(made)", "vip")
    append(log, *[order(n, made=at(0).isoformat()) for n in range(60, 80)])
    followed(log, delta, "city", "hour(made)", "vip")
    append(log, *[order(n, made=at(0).isoformat()) for n in range(80, 120)])
    sink = followed(log, delta, "city", "hour(made)", "vip")
    before = len(delta.files())
    with pytest.raises(DeltaError, match="name too long"):
        delta.table().optimize.compact()
    delta.table().optimize.compact(partition_filters=[("city", "=", "Oslo")])
    assert len(delta.files()) < before
    joined = [path for path in delta.files() if "=" in path]
    assert joined, "nothing was joined"
    assert "city" not in stored(joined[0]).column_names, "the library keeps these columns now: read them there"
    check(sink, log, 120)
    assert sorted(sink.rows()["id"].to_pylist()) == list(range(120))
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())))
    append(log, order(0, id=1 << 40))
    check(followed(log, delta, "city", "hour(made)", "vip", value=wide), log, 121)  # all files are written again
    assert sl.tables.vacuum(sink, 1) == 0


def test_routes_write_tables_with_layouts(tmp_path, log):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    append(log, *[order(n, city="ab"[n % 2]) for n in range(60, 120)])
    made = {}

    def sink_of(name: str) -> Any:
        made[name] = PLACES["delta"](tmp_path / name)
        return made[name].sink(mode="append", value=CODEC, layout=Layout("vip", "id"))

    by_city = sl.tables.by(sink=sink_of, field="city", unrouted="skip", names=str(tmp_path))
    sl.follow(log, by_city, upto="end", start=60)
    assert {name: sorted(place.rows()["id"].to_pylist()) for name, place in made.items()} == {
        "a": [*range(60, 120, 2)],
        "b": [*range(61, 120, 2)],
    }
    assert all({*counts(place)} == {(True,), (False,), (None,)} for place in made.values())


# --- every version of every key --------------------------------------------------------------------------------------

HISTORIES = [
    ("city",),
    ("day(_valid_from)", "vip"),
    pytest.param(("hour(_valid_to)",), marks=pytest.mark.matrix, id="hour(_valid_to)"),
    ("city", "day(_valid_to)"),
]


@pytest.mark.parametrize("fields", HISTORIES, ids="-".join)
def test_a_history_is_partitioned_by_what_its_versions_have(place, fields):
    log = MemoryLog()
    for first in range(0, 100, 20):
        append(log, *[order(n) for n in range(first, first + 20)])
        sink = followed(log, place, *fields, mode="history")
    check(sink, log, 100)
    rows = place.rows()
    assert rows["_valid_to"].null_count == 7, "each key has a current version"
    assert sorted(rows["id"].to_pylist()) == list(range(100))
    assert sum(counts(place).values()) == 100
    assert sl.tables.rebuild(sink, log).next == 100
    check(sink, log, 100)
    assert place.duck("vip IS NULL")[0] == 33


def test_a_history_keeps_the_files_of_other_partitions(place):
    log = MemoryLog()
    append(log, *[order(n, city=f"c{n % 7}") for n in range(7)])  # a key for each city
    followed(log, place, "city", mode="history")
    before = place.files()
    append(log, order(7, city="c3"), order(8, city="c1"))  # of the keys 0 and 1, which were in c0 and c1
    sink = followed(log, place, "city", mode="history")
    gone = {before[path][0] for path in before.keys() - place.files().keys()}
    assert gone == {"c0", "c1", "c3"}
    check(sink, log, 9)


def test_a_replay_finds_its_place_in_a_partitioned_history(place):
    log = MemoryLog()
    append(log, *[order(n, id=n if n % 10 else 1 << 40) for n in range(40)])
    followed(log, place, "city", "day(_valid_to)", mode="history")
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())))
    sink = place.sink(mode="history", value=wide, layout=Layout(["city", "day(_valid_to)"]))
    assert sl.tables.replay_letters(sink, log).applied == 4
    check(sink, log, 40)


def test_a_history_whose_files_deltalake_has_joined_stays_right(delta):
    log = MemoryLog()
    for first in range(0, 80, 20):
        append(log, *[order(n, city="Oslo") for n in range(first, first + 20)])
        sink = followed(log, delta, "city", "vip", mode="history")
    delta.table().optimize.compact()
    assert any("=" in path for path in delta.files())
    append(log, *[order(n, city="Moss") for n in range(80, 100)])
    sink = followed(log, delta, "city", "vip", mode="history")
    check(sink, log, 100)
    assert {values[0] for values in counts(delta)} == {"Oslo", "Moss"}


def test_columns_change_in_a_partitioned_history(place, log):
    followed(log, place, "city", "hour(_valid_to)", mode="history")
    wide = sl.values.Json(ORDER.set(0, pa.field("id", pa.int64())).append(pa.field("note", pa.string())))
    append(log, order(3, id=1 << 40, note="new"))
    check(followed(log, place, "city", "hour(_valid_to)", mode="history", value=wide), log, 61)
