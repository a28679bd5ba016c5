"""Replay of dead letters: each once and in its place, whatever the kind of table, at every crash, beside a follower."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import InvalidInput, NotFound, Unsupported
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.rows.shape import BAD_SCHEMA
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.matrix_cases import some

NARROW = sl.values.Json(pa.schema({"id": pa.int8()}))
WIDE = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()}))
BIG = 1000
"""Fits only the wide schema."""


class Place:
    """A log, a table that follows it, and its dead letters."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.log: Any = sl.open(f"{folder}/log", create=True)
        self.writer = 0

    def append(self, *rows: tuple[bytes, Any]) -> None:
        """A value is a number, bytes as they are, or an operation."""
        with self.log.producer() as producer:
            for key, value in rows:
                if isinstance(value, sl.Op):
                    producer.append(key=key, op=value)
                else:
                    data = value if isinstance(value, bytes) else json.dumps({"id": value}).encode()
                    producer.append(key=key, value=data)

    def sink(self, codec: Any, **options: Any) -> sl.DeltaSink:
        letters = f"{self.folder}/letters"
        return sl.DeltaSink(f"{self.folder}/table", value=codec, dead_letters=letters, **{**self.options, **options})

    def follow(self, codec: Any = NARROW) -> None:
        sl.follow(self.log, self.sink(codec), upto="end")

    def replay(self) -> sl.tables.Replayed:
        return sl.tables.replay_letters(self.sink(WIDE), self.log)

    def letters(self) -> list[int]:
        return sorted(DeltaTable(f"{self.folder}/letters").to_pyarrow_table()["offset"].to_pylist())

    def check(self) -> None:
        found = sl.tables.verify(self.sink(WIDE), self.log)
        assert found.is_clean, found.first


SHAPES: list[dict[str, Any]] = [
    {"mode": "append"},
    {"mode": "latest"},
    {"mode": "history"},
    {"mode": "marked"},
    {"mode": "latest", "key": "id", "tombstones": "dead-letters"},
    {"mode": "history", "key": "id", "tombstones": "dead-letters"},
]


@pytest.mark.parametrize("options", some(SHAPES, 3), ids=lambda options: "-".join(map(str, options.values())))
def test_letters_land_in_their_place(tmp_path: Path, options: dict[str, Any]) -> None:
    place = Place(tmp_path, **options)
    place.append((b"a", 1), (b"b", BIG), (b"a", BIG + 1), (b"c", BIG + 2), (b"d", 2), (b"e", b"never"))
    place.follow()
    place.append((b"a", 3), (b"c", sl.Op.DELETE), (b"d", BIG + 3), (b"b", 4), (b"f", BIG))
    place.follow()
    never = [5, 7] if "key" in options else [5]  # a delete without a value has no key of its own
    assert place.letters() == sorted([1, 2, 3, 8, 10, *never])
    done = place.replay()
    assert (done.applied, done.unreadable, done.expired) == (5, len(never), 0)
    assert done.first_reason.startswith("offset 5: ")
    assert place.letters() == never
    place.check()
    version = DeltaTable(f"{tmp_path}/table").version()
    assert place.replay().applied == 0
    assert DeltaTable(f"{tmp_path}/table").version() == version
    place.append((b"a", BIG), (b"g", 1))
    place.follow(WIDE)
    place.check()


def test_a_newer_row_and_a_newer_delete_win_over_a_letter(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="latest")
    place.append((b"row", BIG), (b"gone", BIG), (b"row", 1), (b"gone", sl.Op.DELETE))
    place.follow()
    assert place.replay().applied == 2
    rows = place.sink(WIDE).rows()
    assert list(zip(rows["_key"].to_pylist(), rows["id"].to_pylist(), strict=True)) == [(b"row", 1)]
    assert place.letters() == []


def test_a_letter_of_a_history_lies_between_the_versions_around_it(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="history")
    place.append((b"k", 1), (b"k", BIG), (b"k", 2))
    place.follow()
    place.replay()
    rows = place.sink(WIDE).rows().sort_by("_valid_from_offset")
    spans = [rows[name].to_pylist() for name in ("id", "_valid_from_offset", "_valid_to_offset")]
    assert spans == [[1, BIG, 2], [0, 1, 2], [1, 2, None]]


_VALUES = st.sampled_from([1, 2, BIG, BIG + 1, b"never", sl.Op.DELETE, sl.Op.PURGE])
_ROWS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), _VALUES), min_size=1, max_size=8)


@pytest.mark.parametrize("options", SHAPES[:4], ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.matrix
def test_whatever_is_replayed_whenever_the_table_is_as_if_it_had_never_been_bad(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(_ROWS, st.booleans()), min_size=1, max_size=4))
    def check(ranges: list[tuple[list[tuple[bytes, Any]], bool]]) -> None:
        place = Place(tmp_path_factory.mktemp("replay"), **options)
        for rows, replays in ranges:
            place.append(*rows)
            place.follow()
            if replays:
                place.replay()
        place.replay()
        place.append((b"z", 1))
        place.follow(WIDE)
        place.check()

    check()


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["append", "latest", "history"])
@pytest.mark.parametrize("step", some(range(6), 2))
def test_a_crash_at_any_step_is_repaired_by_the_next_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, step: int
) -> None:
    place = Place(tmp_path, mode=mode)
    place.append((b"a", BIG), (b"a", 1), (b"b", BIG), (b"c", b"never"))
    place.follow()
    calls = 0
    real, widen = DeltaCommits.commit, DeltaCommits.evolved

    class Crash(BaseException):
        pass

    def at(number: int) -> None:
        nonlocal calls
        calls += 1
        if number == step:
            raise Crash

    def commit(self: DeltaCommits, *args: Any, **options: Any) -> None:
        is_letters = self.url.endswith("letters")
        at(4 if is_letters else 2)
        real(self, *args, **options)
        at(5 if is_letters else 3)

    def evolved(self: DeltaCommits, *args: Any) -> Any:
        at(0)
        found = widen(self, *args)
        at(1)
        return found

    monkeypatch.setattr(DeltaCommits, "commit", commit)
    monkeypatch.setattr(DeltaCommits, "evolved", evolved)
    with pytest.raises(Crash):
        place.replay()
    assert calls == step + 1
    monkeypatch.undo()
    place.replay()
    assert place.letters() == [3]
    place.check()


@pytest.mark.parametrize("mode", some(["append", "latest"], 1))
def test_a_follower_that_commits_meanwhile_loses_nothing_and_neither_does_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    place = Place(tmp_path, mode=mode)
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    place.append((b"a", 2), (b"b", b"never"))
    real, is_first = DeltaCommits.commit, True

    def commit(self: DeltaCommits, *args: Any, **options: Any) -> None:
        nonlocal is_first
        if is_first and not self.url.endswith("letters"):
            is_first = False
            place.follow(WIDE)
        real(self, *args, **options)

    monkeypatch.setattr(DeltaCommits, "commit", commit)
    assert place.replay().applied == 1
    assert not is_first
    assert place.letters() == [3]
    place.check()


def test_a_follower_whose_range_was_begun_before_a_replay_commits_after_it(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="latest")
    place.append((b"a", BIG), (b"b", BIG))
    place.follow()
    place.append((b"a", 7))
    sink, since, upto = place.sink(WIDE), place.log.cursor_at(2), place.log.end()
    begun = sink.begin(since=since, upto=upto, tasks=1)
    assert begun is not None
    place.replay()
    with pytest.raises(sl.errors.Conflict):
        begun.commit([part.write(place.log.read(2)) for part in begun.parts])
    place.follow(WIDE)
    place.check()


def test_letters_above_the_cursor_and_of_other_logs_are_left_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG), (b"b", BIG))
    sink = place.sink(NARROW)
    since, upto = place.log.start(), place.log.cursor_at(1)
    sink.apply(pa.Table.from_batches(place.log.read(upto=1)), since=since, upto=upto)
    begun = sink.begin(since=upto, upto=place.log.end(), tasks=1)
    assert begun is not None
    assert begun.letters is not None
    written = [part.write(place.log.read(1)) for part in begun.parts]
    table_id = str(DeltaTable(f"{tmp_path}/table").metadata().id)
    begun.letters.commit(written, table_id, begun.since, begun.upto)
    assert place.letters() == [0, 1]  # and then the follower died
    assert place.replay().applied == 1
    assert place.letters() == [1]
    place.follow(WIDE)
    place.check()
    other = Place(tmp_path / "other", mode="append")
    other.append((b"x", BIG))
    sl.follow(
        other.log,
        sl.DeltaSink(f"{tmp_path}/other-table", value=NARROW, dead_letters=f"{tmp_path}/letters"),
        upto="end",
    )
    with pytest.raises(InvalidInput, match="of several logs"):
        place.replay()


def test_two_tables_that_share_their_letters_each_replay_their_own(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG))

    def second(codec: Any) -> sl.DeltaSink:
        return sl.DeltaSink(f"{tmp_path}/second", value=codec, dead_letters=f"{tmp_path}/letters")

    place.follow()
    sl.follow(place.log, second(NARROW), upto="end")
    assert place.letters() == [0, 0]
    assert place.replay().applied == 1
    assert place.letters() == [0]
    assert sl.tables.replay_letters(second(WIDE), place.log).applied == 1
    assert place.letters() == []
    place.check()
    assert sl.tables.verify(second(WIDE), place.log).is_clean


def test_a_table_leaves_the_letters_of_another_table_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", 1), (b"b", BIG))
    lenient = sl.DeltaSink(f"{tmp_path}/second", mode="append", value=WIDE, dead_letters=f"{tmp_path}/letters")
    place.follow()
    sl.follow(place.log, lenient, upto="end")
    rows = DeltaTable(f"{tmp_path}/letters").to_pyarrow_table()
    assert (rows["offset"].to_pylist(), rows["of_table"].to_pylist()) == ([1], [f"{tmp_path}/table"])
    assert sl.tables.replay_letters(lenient, place.log) == sl.tables.Replayed(0, 0, 0, of_others=1)
    assert place.letters() == [1]
    assert sl.tables.verify(lenient, place.log).is_clean
    assert place.replay() == sl.tables.Replayed(1, 0, 0)
    assert place.letters() == []
    place.check()


def test_a_table_that_was_built_again_takes_all_letters_of_its_address_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    shutil.rmtree(tmp_path / "table")
    monkeypatch.chdir(tmp_path)
    sl.follow(place.log, sl.DeltaSink("table", mode="append", value=NARROW, dead_letters="letters"), upto="end")
    assert place.letters() == [0]
    same = sl.DeltaSink(f"file://{tmp_path}/table/", mode="append", value=WIDE, dead_letters="letters")
    assert sl.tables.replay_letters(same, place.log) == sl.tables.Replayed(1, 0, 0)
    assert place.letters() == []
    place.check()


def test_a_table_that_is_built_again_from_another_log_loses_none_of_its_letters(tmp_path: Path) -> None:
    """An offset of another log is another record."""
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    shutil.rmtree(tmp_path / "table")
    place.log = sl.open(f"{tmp_path}/other", create=True)
    place.append((b"c", BIG), (b"d", BIG))
    place.follow()
    assert place.letters() == [0, 0, 1]


@pytest.mark.matrix
@pytest.mark.parametrize("done", [1, 2, 3])
@pytest.mark.parametrize("step", ["created", "commit", "_settle"])
def test_a_table_that_is_built_again_has_each_letter_once_also_after_a_crash_in_its_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, done: int
) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG), (b"b", 1), (b"c", BIG))
    place.follow()
    shutil.rmtree(tmp_path / "table")
    real, calls = getattr(DeltaCommits, step), iter(range(1, 100))

    def crashing(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        if next(calls) == done:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(DeltaCommits, step, crashing)
        place.follow()
    place.follow()
    assert place.letters() == [0, 2]
    assert place.replay() == sl.tables.Replayed(2, 0, 0)
    place.check()


def test_letters_that_do_not_say_whose_they_are_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG))
    place.follow()
    properties = DeltaTable(f"{tmp_path}/letters").metadata().configuration
    shutil.rmtree(tmp_path / "letters")
    DeltaTable.create(f"{tmp_path}/letters", BAD_SCHEMA, configuration=dict(properties), raise_if_key_not_exists=False)
    place.append((b"b", BIG))
    for act in (place.replay, place.follow):
        with pytest.raises(InvalidInput, match="do not say of which table"):
            act()


@pytest.mark.parametrize("mode", some(["latest", "history"], 1))
def test_files_that_others_have_written_again_are_replayed(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path, mode=mode, transform=_as_it_is)
    place.append((b"a", BIG), (b"b", BIG), (b"c", 1))
    place.follow()
    place.append((b"a", 2))
    place.follow()
    DeltaTable(f"{tmp_path}/letters").delete('"offset" = 1')  # with other Arrow types than ours
    DeltaTable(f"{tmp_path}/table").optimize.z_order(["id"])
    assert place.replay() == sl.tables.Replayed(1, 0, 0)
    assert place.letters() == []
    assert sorted(place.sink(WIDE).rows()["id"].to_pylist()) == ([1, 2] if mode == "latest" else [1, 2, BIG])


def _other_keys(changes: pa.Table) -> pa.Table:
    keys = pc.binary_join_element_wise(changes["_key"], pa.scalar(b"x"), pa.scalar(b"-"))
    return changes.set_column(changes.column_names.index("_key"), "_key", keys)


def _as_it_is(changes: pa.Table) -> pa.Table:
    return changes


@pytest.mark.parametrize(
    ("mode", "later"),
    some([("latest", 3), ("history", 3), ("history", sl.Op.DELETE)], 1),
    ids=["latest", "history", "history-ended"],
)
def test_a_fix_that_gives_later_records_other_keys_is_refused_before_anything_is_written(
    tmp_path: Path, mode: str, later: Any
) -> None:
    place = Place(tmp_path, mode=mode)
    place.append((b"a", 1), (b"a", BIG), (b"a", later), (b"b", sl.Op.DELETE))
    sl.follow(place.log, place.sink(NARROW, transform=_as_it_is), upto="end")
    before = DeltaTable(f"{tmp_path}/table")
    with pytest.raises(InvalidInput, match=r"offset 2 under a key .* rebuild"):
        sl.tables.replay_letters(place.sink(WIDE, transform=_other_keys), place.log)
    assert DeltaTable(f"{tmp_path}/table").version() == before.version()
    assert place.letters() == [1]
    sl.tables.rebuild(place.sink(WIDE, transform=_other_keys), place.log)
    sl.tables.replay_letters(place.sink(WIDE, transform=_other_keys), place.log)
    assert place.letters() == []
    assert sl.tables.verify(place.sink(WIDE, transform=_other_keys), place.log).is_clean


@pytest.mark.parametrize("mode", ["latest", "history"])
def test_a_fix_by_which_a_later_record_has_no_row_any_more_is_refused(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path, mode=mode)
    place.append((b"a", BIG), (b"a", b'{"id": 1, "note": [5]}'))
    place.follow()
    rows = place.sink(NARROW).rows()
    assert (rows["id"].to_pylist(), place.letters()) == ([1], [0])
    with pytest.raises(InvalidInput, match=r"offset 1 under a key .* rebuild"):
        place.replay()
    assert place.sink(NARROW).rows().equals(rows)
    assert place.letters() == [0]


@pytest.mark.parametrize("mode", some(["append", "latest"], 1))
def test_letters_from_before_a_table_began_are_not_its_own(tmp_path: Path, mode: str) -> None:
    place = Place(tmp_path, mode=mode)
    place.append((b"a", BIG), (b"b", BIG))

    def late(codec: Any) -> sl.DeltaSink:
        return sl.DeltaSink(f"{tmp_path}/late", mode=mode, value=codec, dead_letters=f"{tmp_path}/letters")

    place.follow()
    sl.follow(place.log, late(NARROW), start=1, upto="end")
    assert place.letters() == [0, 1, 1]
    assert sl.tables.replay_letters(late(WIDE), place.log).applied == 1
    assert place.letters() == [0, 1]
    assert late(WIDE).rows()["_key"].to_pylist() == [b"b"]


def test_letters_that_only_take_new_rows_are_refused_before_anything_is_applied(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    place.append((b"a", BIG))
    place.follow()
    DeltaTable(f"{tmp_path}/letters").alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(InvalidInput, match="a replay removes letters"):
        place.replay()
    assert DeltaTable(f"{tmp_path}/table").to_pyarrow_table().num_rows == 0


def test_what_the_log_no_longer_has_stays_a_letter_but_for_a_table_of_all_changes(tmp_path: Path) -> None:
    for mode, counts, left in (("latest", (1, 1), [0]), ("history", (1, 1), [0]), ("append", (2, 0), [])):
        place = Place(tmp_path / mode, mode=mode)
        place.append((b"a", BIG))
        place.append((b"b", BIG))
        place.follow()
        place.log.slots.create("reader", 1)
        place.log.set_retention("consumed")
        place.log.trim(grace=0)
        assert place.log.bounds().first == 1
        done = place.replay()
        assert (done.applied, done.expired) == counts, mode
        assert place.letters() == left


def test_a_replay_says_what_it_lacks(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append")
    with pytest.raises(NotFound, match="no table"):
        place.replay()
    place.append((b"a", 1))
    place.follow()
    assert place.replay() == sl.tables.Replayed(0, 0, 0)
    with pytest.raises(InvalidInput, match="name their table"):
        sl.tables.replay_letters(sl.DeltaSink(f"{tmp_path}/table", mode="append", value=WIDE), place.log)


def test_a_table_without_offsets_says_to_be_built_again(tmp_path: Path) -> None:
    place = Place(tmp_path, mode="append", transform=_only_ids)
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    with pytest.raises(InvalidInput, match=r"rebuild it \('strandline table rebuild'\)"):
        place.replay()
    assert place.letters() == [0]


def _only_ids(changes: pa.Table) -> pa.Table:
    return changes.select(["id"])


def test_the_command_replays_by_a_schema_and_as_the_log_says(run: Run, tmp_path: Path) -> None:  # noqa: F811
    place = Place(tmp_path, mode="latest")
    place.append((b"a", BIG), (b"b", b"never"))
    place.follow()
    place.log.evolve_value(WIDE)
    arguments = ("table", "replay", f"{tmp_path}/table", place.log.url, "--dead-letters", f"{tmp_path}/letters")
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert "1 dead letter applied" in done.stdout
    assert "1 still cannot become rows (first: offset 1: " in done.stdout
    assert json.loads(run(*arguments, "--json").stdout)["applied"] == 0
    place.check()


def test_the_command_names_its_option_if_the_place_of_the_letters_is_missing(run: Run, tmp_path: Path) -> None:  # noqa: F811
    place = Place(tmp_path)
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    refused = run("table", "replay", f"{tmp_path}/table", place.log.url)
    assert refused.exit_code != 0
    assert "name their table with --dead-letters" in " ".join(refused.output.split())
    assert "dead_letters=" not in refused.output


def test_the_command_finds_the_letters_of_a_table_in_a_database_by_itself(run: Run, tmp_path: Path) -> None:  # noqa: F811
    place = Place(tmp_path)
    place.append((b"a", BIG), (b"b", b"never"))
    database = f"{tmp_path}/shop.db"
    sl.follow(place.log, sl.SqliteSink(database, table="orders", value=NARROW, dead_letters=True), upto="end")
    place.log.evolve_value(WIDE)
    done = run("table", "replay", f"sqlite:{database}#orders", place.log.url)
    assert done.exit_code == 0, done.output
    assert "1 dead letter applied" in done.stdout
    sink = sl.SqliteSink(database, table="orders", value=WIDE, dead_letters=True)
    assert sl.tables.verify(sink, place.log).is_clean


def test_letters_of_a_queue_whose_records_share_offsets_are_counted_by_record_and_not_replayed(tmp_path: Path) -> None:
    queue = sl.open(f"{tmp_path}/queue", create=True, format="queue-v1")
    with queue.producer() as producer:
        producer.produce([json.dumps({"id": number}).encode() for number in (1, BIG, 2, BIG + 1, BIG + 2)])

    def sink(codec: Any) -> sl.DeltaSink:
        places = {"dead_letters": f"{tmp_path}/letters", "max_bad_share": 0.6}
        return sl.DeltaSink(f"{tmp_path}/table", mode="append", value=codec, **places)

    sl.follow(queue, sink(NARROW), upto="end")
    with pytest.raises(Unsupported, match=r"share the offset of their batch.*nothing was changed"):
        sl.tables.replay_letters(sink(WIDE), queue)
    assert DeltaTable(f"{tmp_path}/letters").to_pyarrow_table().num_rows == 3
