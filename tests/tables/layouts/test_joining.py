"""``optimize`` of tables with a layout: files of one partition are joined, and ordered over all of them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.errors import Conflict, InvalidInput
from strandline.log.memory import MemoryLog
from strandline.tables import Layout
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.files import data_files, followed, joining
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.testing.crashing import crashing_at, interrupted
from tests.tables.layouts.formats import PLACES, counts, stored
from tests.tables.layouts.test_partitions import CODEC, append, check, order

COMMITS = {"delta": (DeltaCommits, "commit"), "iceberg": (FollowedIceberg, "commit")}


@pytest.fixture(params=sorted(PLACES))
def place(request, tmp_path):
    found = PLACES[request.param](tmp_path)
    yield found
    found.close()


def grown(place: Any, log: Any, *, triggers: int = 5, **options: Any) -> Any:
    """A table of five commits with 40 orders each, whose numbers and cities are in no order."""
    sink = place.sink(value=CODEC, **{"mode": "append", **options})
    for _ in range(triggers):
        first = log.end().next
        append(log, *[order(n, id=n * 37 % 997, city=f"c{n % 3}") for n in range(first, first + 40)])
        sl.follow(log, sink, upto="end")
    return sink


def test_rows_of_a_file_are_sorted_by_one_column(place):
    grown(place, MemoryLog(), layout=Layout(cluster_by="id"))
    for path in place.files():
        ids = stored(path)["id"].to_pylist()
        assert ids == sorted(ids)


@pytest.mark.parametrize("mode", ["latest", "history"])
def test_rows_of_keyed_tables_are_sorted_within_their_files(place, mode):
    log = MemoryLog()
    sink = grown(place, log, mode=mode, key="id", layout=Layout(cluster_by="_key"))
    for path in place.files():
        keys = stored(path)["_key"].to_pylist()
        assert keys == sorted(keys)
    check(sink, log, 200)


def test_the_row_groups_of_a_file_are_narrow_in_each_column_of_a_z_order(place, monkeypatch):
    monkeypatch.setattr(data_files, "ROW_GROUP", 64)
    log = MemoryLog()
    append(log, *[order(n, id=n * 37 % 1024, city=f"c{n * 91 % 1024:04}") for n in range(1024)])
    sink = place.sink(mode="append", value=CODEC, layout=Layout(cluster_by=["id", "city"]))
    sl.follow(log, sink, upto="end")
    (path,) = place.files()
    with pq.ParquetFile(path) as file:
        at = {file.schema.column(i).path: i for i in range(len(file.schema))}
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        spans = {
            name: [(group.column(at[name]).statistics.min, group.column(at[name]).statistics.max) for group in groups]
            for name in ("id", "city")
        }
    assert len(groups) == 16
    for name, one in (("id", 500), ("city", "c0500")):
        assert sum(low <= one <= high for low, high in spans[name]) <= 5, name


def test_files_of_a_partition_are_joined_and_ordered_over_all_of_them(place, monkeypatch):
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city", "id"))
    assert len(place.files()) == 15
    assert sl.tables.optimize(sink) == 12
    assert {*counts(place)} == {("c0",), ("c1",), ("c2",)}
    assert all(stored(path)["id"].to_pylist() == sorted(stored(path)["id"].to_pylist()) for path in place.files())
    assert sl.tables.optimize(sink) == 0, "there is one file for each partition"
    check(sink, log, 200)
    sink = grown(place, log, triggers=1, layout=Layout("city", "id"))
    monkeypatch.setattr(joining, "JOINED_FILE", 2000)
    sl.tables.optimize(sink)
    check(sink, log, 240)
    for name in ("c0", "c1", "c2"):
        ids = [sorted(stored(path)["id"].to_pylist()) for path, (city,) in place.files().items() if city == name]
        ordered = sorted(ids)
        assert len(ordered) > 1
        assert all(one[-1] <= other[0] for one, other in pairwise(ordered)), "they overlap"


def test_a_table_that_is_not_clustered_is_joined_within_its_partitions(place):
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    assert sl.tables.optimize(sink) == 12
    assert len(counts(place)) == 3
    check(sink, log, 200)
    sink = grown(place, log, triggers=1, layout=Layout("city"))
    check(sink, log, 240)


def test_versions_of_a_history_that_have_ended_are_joined(place):
    log = MemoryLog()
    sink = grown(place, log, mode="history", layout=Layout("city"))
    assert sl.tables.optimize(sink) > 0
    check(sink, log, 200)
    closed = [path for path in place.files() if "/closed-" in path]
    assert len(closed) == 3, "one for each partition"
    sink = grown(place, log, triggers=2, mode="history", layout=Layout("city"))
    check(sink, log, 280)


def test_a_history_without_a_layout_is_joined_too(place):
    log = MemoryLog()
    sink = grown(place, log, mode="history")
    assert sl.tables.optimize(sink) == 4
    assert sum("/closed-" in path for path in place.files()) == 1
    check(sink, log, 200)


def test_tables_of_the_latest_rows_have_nothing_to_join(place):
    with pytest.raises(InvalidInput, match="has no files to join"):
        sl.tables.optimize(grown(place, MemoryLog(), mode="latest"))


def test_a_follower_that_commits_meanwhile_goes_on_and_so_does_the_joining(place):
    log = MemoryLog()
    options = {"layout": Layout("city", "id")}
    sink = grown(place, log, **options)
    append(log, order(200, city="c0"))
    follower = place.sink(mode="append", value=CODEC, **options)
    with interrupted(*COMMITS[place.name], lambda: sl.follow(log, follower, upto="end")):
        assert sl.tables.optimize(sink) == 12
    check(sink, log, 201)
    assert len(place.files()) == 4
    append(log, order(201, city="c0"))
    sl.follow(log, follower, upto="end")
    assert follower.cursor(log.log_id).next == 202


def test_a_follower_whose_files_are_joined_while_it_commits_is_not_fenced(place):
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    append(log, order(200, city="c0"))
    with interrupted(
        *COMMITS[place.name], lambda: sl.tables.optimize(place.sink(mode="append", layout=Layout("city"), value=CODEC))
    ):
        sl.follow(log, sink, upto="end")
    check(sink, log, 201)
    assert len(place.files()) == 4


def test_two_jobs_that_join_the_same_files_do_it_once(place):
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    with (
        interrupted(*COMMITS[place.name], lambda: sl.tables.optimize(sink)),
        pytest.raises(Conflict, match="try again"),
    ):
        sl.tables.optimize(place.sink(mode="append", value=CODEC, layout=Layout("city")))
    check(sink, log, 200)
    assert len(place.files()) == 3


def test_joined_files_that_may_have_been_removed_as_orphans_are_not_committed(tmp_path, monkeypatch):
    """Upkeep or a vacuum removes files whose names tell a version that the table has passed without them."""
    place = PLACES["iceberg"](tmp_path)  # of a Delta table they have no version in their names
    monkeypatch.setattr(followed, "MOST_BETWEEN", 3)
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    follower = place.sink(mode="append", value=CODEC, layout=Layout("city", upkeep="auto"))

    def overtakes():
        for n in range(3):
            append(log, order(200 + n, city="c0"))
            sl.follow(log, follower, upto="end")

    with interrupted(joining, "_commit", overtakes), pytest.raises(Conflict, match="got 3 other commits"):
        sl.tables.optimize(sink)
    check(sink, log, 203)
    assert sl.tables.optimize(sink) == 15


@pytest.mark.parametrize("step", ["commit", "make_durable", "commit_in_effect"])
def test_joining_that_is_killed_at_any_step_has_changed_nothing_or_all(place, step):
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city", "id"))
    owner = COMMITS[place.name][0]
    with crashing_at(owner, step) as reached:
        sl.tables.optimize(place.sink(mode="append", value=CODEC, layout=Layout("city", "id")))
    assert reached
    assert len(place.files()) in {3, 15}
    check(sink, log, 200)
    append(log, order(200, city="c0"))
    sl.follow(log, place.sink(mode="append", value=CODEC, layout=Layout("city", "id")), upto="end")
    check(place.sink(mode="append", value=CODEC, layout=Layout("city", "id")), log, 201)


def test_readers_of_deltas_changes_see_none_in_joined_files(tmp_path):
    place = PLACES["delta"](tmp_path)
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    version = place.table().version()
    sl.tables.optimize(sink)
    commit = tmp_path / "table" / "_delta_log" / f"{version + 1:020d}.json"
    lines = [json.loads(line) for line in commit.read_text().splitlines()]
    changes = [line[kind]["dataChange"] for line in lines for kind in ("add", "remove") if kind in line]
    assert (len(changes), set(changes)) == (18, {False})
    removed = [line["remove"]["partitionValues"]["city"] for line in lines if "remove" in line]
    assert set(removed) == {"c0", "c1", "c2"}
    table = pa.table(place.table().to_pyarrow_table())
    assert sorted(table["_offset"].to_pylist()) == list(range(200))


def test_a_damaged_file_stops_the_joining_and_changes_nothing(tmp_path):
    place = PLACES["delta"](tmp_path)
    log = MemoryLog()
    sink = grown(place, log, layout=Layout("city"))
    before = place.files()
    path = min(before)
    with open(path, "r+b") as file:
        file.truncate(10)
    with pytest.raises(sl.errors.CorruptData, match="is damaged"):
        sl.tables.optimize(sink)
    assert place.files() == before


def test_a_table_is_joined_by_its_address_whatever_its_codec_and_key(tmp_path):
    place = PLACES["delta"](tmp_path)
    log = MemoryLog()
    options = {"mode": "history", "key": "id", "layout": Layout("city", "id")}
    sink = grown(place, log, **options)
    for n in range(40):
        append(log, order(n, id=n))
        if n % 10 == 9:
            sl.follow(log, sink, upto="end")
    assert sl.tables.optimize(place.address) > 0
    check(sink, log, 240)


def test_a_sink_of_another_mode_or_layout_joins_nothing(place):
    log = MemoryLog()
    grown(place, log, mode="history", layout=Layout("city"))
    before = place.files()
    with pytest.raises(InvalidInput, match="made with mode 'history'"):
        sl.tables.optimize(place.sink(mode="append", value=CODEC, layout=Layout("city")))
    with pytest.raises(InvalidInput, match="made with the partitions"):
        sl.tables.optimize(place.sink(mode="history", value=CODEC, layout=Layout("vip")))
    assert place.files() == before
