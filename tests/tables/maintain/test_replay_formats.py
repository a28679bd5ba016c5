"""Replay of dead letters in every format: each once and in its place, at every crash, beside a follower."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.memory import InMemoryCatalog

import strandline as sl
from strandline.errors import Diverged, InvalidInput, NotFound
from strandline.followers.run import Batching
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.replay import ReplayedFiles
from strandline.tables.iceberg.table import FollowedIceberg
from strandline.tables.maintain import replay
from strandline.tables.rows.shape import DeadLetters
from strandline.tables.sql.postgres_transaction import PostgresTransaction
from strandline.tables.sql.sqlite_transaction import SqliteTransaction
from tests.matrix_cases import some

NARROW = sl.values.Json(pa.schema({"id": pa.int8()}))
WIDE = sl.values.Json(pa.schema({"id": pa.int64(), "note": pa.string()}))
BIG = 1000
"""Fits only the wide schema."""

_NUMBERS = iter(range(1, 10_000))


class Place:
    """A log, a table that follows it, and its dead letters."""

    steps: tuple[tuple[Any, str], ...]
    """What a replay does to store something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.begin()

    def begin(self) -> None:
        """A new log and a new table."""
        self.number += 1
        self.name = f"t{self.number}"
        self.log: Any = sl.log.MemoryLog()
        self.options: dict[str, Any] = {}

    def append(self, *rows: tuple[bytes, Any]) -> None:
        """A value is a number, bytes as they are, or an operation."""
        with self.log.producer() as producer:
            for key, value in rows:
                if isinstance(value, sl.Op):
                    producer.append(key=key, op=value)
                else:
                    data = value if isinstance(value, bytes) else json.dumps({"id": value}).encode()
                    producer.append(key=key, value=data, headers={"h": b"\0x"})

    def sink(self, codec: Any, **options: Any) -> Any:
        raise NotImplementedError

    def letters(self) -> list[int]:
        raise NotImplementedError

    def drop(self) -> None:
        """Drop the table, and not its letters."""
        raise NotImplementedError

    def follow(self, codec: Any = NARROW, **options: Any) -> None:
        sl.follow(self.log, self.sink(codec, **options), upto="end")

    def replay(self, codec: Any = WIDE, **options: Any) -> sl.tables.Replayed:
        return sl.tables.replay_letters(self.sink(codec, **options), self.log)

    def check(self, **options: Any) -> None:
        found = sl.tables.verify(self.sink(WIDE, **options), self.log)
        assert found.is_clean, found.first

    def close(self) -> None:
        pass


class Delta(Place):
    steps = ((DeltaCommits, "evolved"), (DeltaCommits, "commit"), (FollowedDelta, "make_durable"))

    def sink(self, codec: Any, **options: Any) -> Any:
        place = {"dead_letters": f"{self.folder}/{self.name}-letters", **self.options, **options}
        return sl.DeltaSink(f"{self.folder}/{self.name}", value=codec, **place)

    def letters(self) -> list[int]:
        return sorted(DeltaTable(f"{self.folder}/{self.name}-letters").to_pyarrow_table()["offset"].to_pylist())

    def drop(self) -> None:
        shutil.rmtree(f"{self.folder}/{self.name}")


class Iceberg(Place):
    steps = ((FollowedIceberg, "commit"), (FollowedIceberg, "_committed"), (FollowedIceberg, "make_durable"))

    def __init__(self, folder: Path) -> None:
        self.catalog = InMemoryCatalog("t", warehouse=f"file://{folder}/warehouse")
        super().__init__(folder)

    def sink(self, codec: Any, **options: Any) -> Any:
        place = {"dead_letters": f"shop.{self.name}_letters", **self.options, **options}
        return sl.IcebergSink(self.catalog, f"shop.{self.name}", value=codec, **place)

    def letters(self) -> list[int]:
        table = self.catalog.load_table(f"shop.{self.name}_letters").scan().to_arrow()
        return sorted(table["offset"].to_pylist())

    def drop(self) -> None:
        self.catalog.drop_table(f"shop.{self.name}")

    def close(self) -> None:
        self.catalog.close()


class Sqlite(Place):
    steps = tuple((SqliteTransaction, name) for name in ("lock", "alter", "merge", "remove_letters"))

    def sink(self, codec: Any, **options: Any) -> Any:
        place = {"dead_letters": True, **self.options, **options}
        return sl.SqliteSink(f"{self.folder}/shop.db", table=self.name, value=codec, **place)

    def letters(self) -> list[int]:
        with closing(sqlite3.connect(f"{self.folder}/shop.db")) as connection:
            found = connection.execute(f'SELECT "offset" FROM {self.name}_dead_letters ORDER BY 1').fetchall()
        return [offset for (offset,) in found]

    def drop(self) -> None:
        with closing(sqlite3.connect(f"{self.folder}/shop.db")) as connection, connection:
            connection.execute(f"DROP TABLE {self.name}")


class Postgres(Place):
    steps = tuple((PostgresTransaction, name) for name in ("stage", "lock", "alter", "merge", "remove_letters"))

    def __init__(self, folder: Path, dsn: str) -> None:
        self.dsn = dsn
        super().__init__(folder)

    def sink(self, codec: Any, **options: Any) -> Any:
        place = {"dead_letters": True, **self.options, **options}
        return sl.PostgresSink(self.dsn, table=self.name, value=codec, **place)

    def letters(self) -> list[int]:
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(f'SELECT "offset" FROM {self.name}_dead_letters ORDER BY 1').fetchall()
        return [offset for (offset,) in found]

    def drop(self) -> None:
        with psycopg.connect(self.dsn) as connection:
            connection.execute(f"DROP TABLE {self.name}")


@pytest.fixture(params=some(["delta", "iceberg", "sqlite", "postgres"], 2))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found: Place
    if request.param == "postgres":
        server, name = request.getfixturevalue("postgres"), f"replay_{next(_NUMBERS)}"
        dsn = f"host={server.host} port={server.port} user={server.user} dbname=postgres"
        with psycopg.connect(dsn) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        found = Postgres(tmp_path, f"{dsn} options='-c search_path={name}'")
    else:
        kinds: dict[str, type[Place]] = {"delta": Delta, "iceberg": Iceberg, "sqlite": Sqlite}
        found = kinds[request.param](tmp_path)
    yield found
    found.close()


SHAPES: list[dict[str, Any]] = [
    {"mode": "append"},
    {"mode": "latest"},
    {"mode": "marked"},
    {"mode": "latest", "key": "id", "tombstones": "dead-letters"},
    {"mode": "history"},
]


def shapes_of(place: Place) -> list[dict[str, Any]]:
    """SQL tables have no history."""
    return SHAPES[:-1] if isinstance(place, Sqlite | Postgres) else SHAPES


def test_letters_land_in_their_place(place: Place) -> None:
    for options in shapes_of(place):
        place.begin()
        place.options = options
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
        assert place.replay().applied == 0
        place.append((b"a", BIG), (b"g", 1))
        place.follow(WIDE)
        place.check()


_VALUES = st.sampled_from([1, 2, BIG, BIG + 1, b"never", sl.Op.DELETE, sl.Op.PURGE])
_ROWS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), _VALUES), min_size=1, max_size=8)


@pytest.mark.matrix
def test_whatever_is_replayed_whenever_the_table_is_as_if_it_had_never_been_bad(place: Place) -> None:
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from([one for one in shapes_of(place) if "key" not in one]),
        st.lists(st.tuples(_ROWS, st.booleans()), min_size=1, max_size=4),
    )
    def check(options: dict[str, Any], ranges: list[tuple[list[tuple[bytes, Any]], bool]]) -> None:
        place.begin()
        place.options = options
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


class Crash(BaseException):
    """The end of a process."""


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_crash_at_any_step_is_repaired_by_the_next_replay(place: Place, mode: str) -> None:
    crashed = set()
    for owner, name in place.steps:
        for nth, after in [(nth, after) for nth in (1, 2) for after in (False, True)]:
            place.begin()
            place.options = {"mode": mode}
            place.append((b"a", BIG), (b"a", 1), (b"b", BIG), (b"c", b"never"))
            place.follow()
            with pytest.MonkeyPatch.context() as patch:
                real, calls = getattr(owner, name), iter(range(1, 100))

                def step(*arguments: Any, **options: Any) -> Any:
                    number = next(calls)  # noqa: B023 - called within this round
                    if number == nth and not after:  # noqa: B023
                        raise Crash
                    found = real(*arguments, **options)  # noqa: B023
                    if number == nth:  # noqa: B023
                        raise Crash
                    return found

                patch.setattr(owner, name, step)
                try:
                    place.replay()
                except Crash:
                    crashed.add(name)
            place.replay()
            assert place.letters() == [3], (name, nth, after)
            place.check()
    assert crashed == {name for _, name in place.steps}


@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_follower_that_commits_meanwhile_loses_nothing_and_neither_does_the_replay(
    place: Place, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.options = {"mode": mode}
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    place.append((b"a", 2), (b"b", b"never"))
    real, rounds = replay.prove_letters, []

    def proved(*arguments: Any) -> None:
        real(*arguments)
        rounds.append(arguments)
        if len(rounds) == 1:
            place.follow(WIDE)

    monkeypatch.setattr(replay, "prove_letters", proved)
    assert place.replay().applied == 1
    assert len(rounds) == 2
    assert place.letters() == [3]
    place.check()


@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_follower_that_runs_goes_on_after_a_replay(place: Place, mode: str) -> None:
    place.options = {"mode": mode}
    place.append((b"a", BIG), (b"b", 1))
    running = place.sink(WIDE)
    place.follow(NARROW)
    sl.follow(place.log, running, upto="end")
    cursor = place.log.end()
    assert place.replay().applied == 1
    place.append((b"a", BIG + 1))
    running.apply(pa.Table.from_batches(place.log.read(cursor)), since=cursor, upto=place.log.end())
    place.check()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options", [{"mode": "append"}, {"mode": "append", "transform": 1}, {"mode": "latest"}], ids=str
)
def test_two_replays_at_once_apply_each_letter_once(
    place: Place, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.options = {**options, **({"transform": _as_it_is} if "transform" in options else {})}
    place.append((b"a", BIG), (b"b", 1), (b"c", BIG))
    place.follow()
    place.append((b"d", 2))
    place.follow(WIDE)  # so that a replay changes no column
    real, others = replay.prove_letters, []

    def proved(*arguments: Any) -> None:
        real(*arguments)
        if not others:
            others.append(None)
            others.append(place.replay())

    monkeypatch.setattr(replay, "prove_letters", proved)
    assert place.replay().applied == 0
    assert others[1].applied == 2
    assert place.letters() == []
    place.check()


@pytest.mark.matrix
@pytest.mark.parametrize("mode", some(["latest", "append"], 1))
def test_a_record_that_has_no_row_any_more_after_a_rebuild_is_a_letter(place: Place, mode: str) -> None:
    place.options = {"mode": mode}
    place.append((b"a", BIG), (b"b", 1), (b"c", b"never"), (b"d", 2))
    place.follow(WIDE)
    assert place.letters() == [2]
    for _ in range(2):
        sl.tables.rebuild(place.sink(NARROW), place.log)
        assert place.letters() == [0, 2]
    place.append((b"e", BIG))
    place.follow()
    assert place.letters() == [0, 2, 4]
    assert place.replay().applied == 2
    place.check()


@pytest.mark.matrix
def test_a_record_that_has_no_row_any_more_after_a_crash_is_a_letter(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letters of a table of files are stored first; the follower that comes next has another schema."""
    place.options = {"mode": "append"}
    place.append((b"a", 1), (b"b", b"never"))
    place.follow(WIDE)
    place.append((b"c", BIG), (b"d", b"never"), (b"e", 2))
    with monkeypatch.context() as patch:
        for owner in (DeltaCommits, FollowedIceberg):
            patch.setattr(owner, "commit", _only_letters(owner.commit))
        for session in (PostgresTransaction, SqliteTransaction):
            patch.setattr(session, "store", _died)
        with pytest.raises(RuntimeError):
            place.follow(WIDE)
    place.follow(NARROW)
    assert place.letters() == [1, 2, 3]
    place.replay()
    place.check()


def _died(*_: Any, **__: Any) -> Any:
    raise RuntimeError("It died.")


def _only_letters(commit: Any) -> Any:
    def commit_or_die(commits: Any, *arguments: Any, **options: Any) -> Any:
        is_letters = isinstance(commits.shape, DeadLetters)
        return (commit if is_letters else _died)(commits, *arguments, **options)

    return commit_or_die


def _other_keys(changes: pa.Table) -> pa.Table:
    at = changes.schema.get_field_index("_key")
    return changes.set_column(at, changes.schema.field(at), pa.array([b"x"] * changes.num_rows, pa.binary()))


def _as_it_is(changes: pa.Table) -> pa.Table:
    return changes


@pytest.mark.matrix
@pytest.mark.parametrize("records", some([2, 1, 100], 1))
def test_a_table_that_was_dropped_and_is_built_again_has_each_letter_once(place: Place, records: int) -> None:
    for row in ((b"a", 1), (b"b", BIG), (b"c", 2), (b"d", b"never"), (b"e", 3)):
        place.append(row)  # a batch of its own: ranges do not divide batches
    place.follow()
    place.drop()
    for _ in range(2):
        place.append((b"f", BIG), (b"g", 4))
        sl.follow(place.log, place.sink(NARROW), upto="end", batching=Batching(records=records))
    assert place.letters() == [1, 3, 5, 7]
    assert place.replay().applied == 3
    assert place.letters() == [3]
    place.check()


def test_a_replay_leaves_the_letters_alone_that_a_rebuild_has_stored_before_its_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(place, Delta | Iceberg):
        return  # rows and letters are one transaction
    place.options = {"mode": "append"}
    place.append((b"a", 1), (b"b", BIG), (b"c", 2))
    place.follow()
    with monkeypatch.context() as patch:
        patch.setattr(ReplayedFiles, "_remove", _died)
        with pytest.raises(RuntimeError):
            place.replay()  # the row is there, and its letter, too
    owner: Any = DeltaCommits if isinstance(place, Delta) else FollowedIceberg
    commit = owner.commit

    def commit_later(commits: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(commits.shape, DeadLetters):
            monkeypatch.setattr(owner, "commit", commit)
            place.replay()
        return commit(commits, *arguments, **options)

    monkeypatch.setattr(owner, "commit", commit_later)
    sl.tables.rebuild(place.sink(NARROW), place.log)
    rows = place.sink(WIDE).rows()["_offset"].to_pylist()
    assert sorted([*rows, *place.letters()]) == [0, 1, 2]


@pytest.mark.matrix
@pytest.mark.parametrize("options", some(SHAPES, 2), ids=lambda options: "-".join(map(str, options.values())))
def test_letters_of_a_history_that_the_log_lost_are_neither_applied_nor_removed(
    place: Place, options: dict[str, Any]
) -> None:
    if options not in shapes_of(place):
        return
    place.options, folder = options, f"{place.folder}/log"
    place.log = sl.open(folder, create=True)
    place.append((b"a", 1), (b"b", 2))
    place.log.close()
    shutil.copytree(folder, f"{folder}-backup")
    place.log = sl.open(folder)
    place.append((b"a", BIG), (b"c", 3))
    place.follow()
    rows = sl.tables.describe(place.sink(NARROW)).rows
    place.log.close()
    shutil.rmtree(folder)
    shutil.move(f"{folder}-backup", folder)
    place.log = sl.open(folder)
    place.append((b"x", 4), (b"y", 5), (b"z", 6))
    for _ in ("cursor", "letter"):
        with pytest.raises(Diverged, match="restored from a copy"):
            place.replay()
        assert place.letters() == [2]
        assert sl.tables.describe(place.sink(NARROW)).rows == rows
        place.sink(NARROW).adopt(place.log.log_id)  # a cursor without a fingerprint, in tables of files
    sl.tables.rebuild(place.sink(WIDE), place.log)
    assert place.letters() == []
    assert place.replay().applied == 0
    place.check()


def restored(place: Place, step: Callable[[], object]) -> None:
    """The log goes back to what it was before ``step``."""
    folder = f"{place.folder}/log"
    place.log.close()
    shutil.copytree(folder, f"{folder}-backup")
    place.log = sl.open(folder)
    step()
    place.log.close()
    shutil.rmtree(folder)
    shutil.move(f"{folder}-backup", folder)
    place.log = sl.open(folder)


@pytest.mark.matrix
@pytest.mark.parametrize("repair", ["rebuild", "drop"])
def test_a_letter_of_a_lost_history_does_not_stand_for_the_record_that_is_there_now(place: Place, repair: str) -> None:
    """The lost history was longer than the log when the table was built again."""
    place.log = sl.open(f"{place.folder}/log", create=True)
    place.append((b"a", 1))

    def lost() -> None:
        place.append((b"a", BIG), (b"b", BIG), (b"c", BIG))
        place.follow()

    restored(place, lost)
    assert place.letters() == [1, 2, 3]
    if repair == "rebuild":
        sl.tables.rebuild(place.sink(NARROW), place.log)
    else:
        place.drop()
        place.follow()
    place.append((b"x", 2), (b"y", BIG + 1), (b"c", BIG))
    place.follow()
    assert place.letters() == [2, 3]
    assert place.replay().applied == 2
    assert place.letters() == []
    place.check()


@pytest.mark.matrix
@pytest.mark.parametrize("upto", [None, 0], ids=["whole", "begun again"])
def test_a_rebuild_with_the_former_schema_while_a_letter_is_removed_leaves_a_row_or_a_letter_of_each_record(
    place: Place, monkeypatch: pytest.MonkeyPatch, upto: int | None
) -> None:
    """A job with the corrected schema has committed its rows, and not removed their letters yet."""
    if not isinstance(place, Delta | Iceberg):
        return  # rows and letters are one transaction
    jobs = {"replay_letters": "_remove", "rebuild": "replace_letters"}
    for job, step in jobs.items():
        place.begin()
        place.options = {"mode": "latest"}
        place.append((b"a", 1), (b"b", BIG), (b"c", 2))
        place.follow()
        real = getattr(ReplayedFiles, step)

        def beaten(files: Any, *arguments: Any, real: Any = real, step: str = step) -> None:
            monkeypatch.setattr(ReplayedFiles, step, real)
            sl.tables.rebuild(place.sink(NARROW), place.log, upto=upto)
            place.follow()
            real(files, *arguments)

        monkeypatch.setattr(ReplayedFiles, step, beaten)
        getattr(sl.tables, job)(place.sink(WIDE), place.log)
        rows = place.sink(WIDE).rows()["_offset"].to_pylist()
        assert sorted([*rows, *place.letters()]) == [0, 1, 2], job
        place.replay()
        place.check()


def test_a_fix_that_gives_later_records_other_keys_is_refused_before_anything_is_written(place: Place) -> None:
    place.append((b"a", 1), (b"a", BIG), (b"a", 3))
    place.follow(NARROW, transform=_as_it_is)
    with pytest.raises(InvalidInput, match=r"offset 2 under a key .* rebuild"):
        place.replay(WIDE, transform=_other_keys)
    assert place.letters() == [1]
    sl.tables.rebuild(place.sink(WIDE, transform=_other_keys), place.log)
    place.check(transform=_other_keys)


def test_a_replay_says_what_it_lacks(place: Place) -> None:
    place.options = {"mode": "append"}
    with pytest.raises(NotFound, match="no table"):
        place.replay()
    place.append((b"a", 1))
    place.follow()
    assert place.replay() == sl.tables.Replayed(0, 0, 0)
    nothing = False if isinstance(place, Sqlite | Postgres) else None
    with pytest.raises(InvalidInput, match=r"(name their table|open it with them)"):
        place.replay(WIDE, dead_letters=nothing)
    with pytest.raises(Diverged):
        sl.tables.replay_letters(place.sink(WIDE), sl.log.MemoryLog())


def _only_ids(changes: pa.Table) -> pa.Table:
    return changes.select(["id"])


def test_a_table_without_offsets_says_to_be_built_again(place: Place) -> None:
    place.options = {"mode": "append", "transform": _only_ids}
    place.append((b"a", BIG), (b"b", 1))
    place.follow()
    with pytest.raises(InvalidInput, match=r"rebuild it \('strandline table rebuild'\)"):
        place.replay()
    assert place.letters() == [0]
