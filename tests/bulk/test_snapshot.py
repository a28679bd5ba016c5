"""Snapshots that are built from the log in parallel: what a store that followed the log has, at one cursor."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strandline as sl
from strandline.bulk.snapshot_tasks import ReduceTask
from strandline.errors import AlreadyExists, CorruptData, CursorExpired, Diverged, InvalidInput, NullKey
from strandline.log.read.span_tasks import spans_between
from strandline.model.records import Op
from strandline.storage.objects.urls import open_store
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.bulk.test_export import Interrupted
from tests.matrix_cases import sampled

NUMBERS = itertools.count()
CHANGES = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from([Op.PUT, Op.PUT, Op.DELETE, Op.PURGE]),
            st.sampled_from([b"", b"a", b"b", b"key-3", b"\xff" * 9, b"a longer key than eight bytes"]),
            st.one_of(st.none(), st.binary(max_size=6)),
        ),
        min_size=1,
        max_size=6,
    ),
    max_size=8,
)


def new_log(batches: list[list[tuple[Op, bytes | None, bytes | None]]], url: str | None = None) -> Any:
    log = sl.open(url or f"memory://snapshot-{next(NUMBERS)}", create=True)
    with log.producer(linger=0) as producer:
        for batch in batches:
            ops, keys, values = zip(*batch, strict=True)
            columns = {"op": pa.array(ops, pa.int8()), "key": pa.array(keys, pa.binary())}
            producer.append_batch(pa.table({**columns, "value": pa.array(values, pa.binary())}))
            producer.flush()
    return log


def content(snapshot: Path | str, into: Any = sl.followers.AppendLogStore) -> tuple[list[tuple[bytes, bytes]], Any]:
    with tempfile.TemporaryDirectory() as place, into.import_from(snapshot, f"{place}/store") as store:
        return list(store.range()), store.position()


def followed(log: Any, upto: int | None = None) -> tuple[list[tuple[bytes, bytes]], Any]:
    store = sl.followers.MemoryStore()
    if upto is None:
        sl.follow(log, store, upto="end")
    else:
        records = pa.Table.from_batches(log.read(upto=upto))
        store.apply(records, since=log.cursor_at(0), upto=log.cursor_at(upto))
    return list(store.range()), store.position()


@pytest.fixture
def log(tmp_path: Path) -> Any:
    """Forty keys, ten batches, every seventh change a delete."""
    rows = [(Op.DELETE if n % 7 == 6 else Op.PUT, b"k%d" % (n % 40), b"v%d" % n) for n in range(100)]
    return new_log([rows[first : first + 10] for first in range(0, 100, 10)], f"file://{tmp_path}/log")


@given(CHANGES, st.sampled_from([1, 200, 1 << 20]))
def test_a_built_snapshot_has_what_a_store_that_followed_has(batches: Any, group_bytes: int) -> None:
    log = new_log(batches)
    with tempfile.TemporaryDirectory() as place:
        done = sl.bulk.build_snapshot(log, f"{place}/snapshot", group_bytes=group_bytes)
        assert done.cursor == log.end()
        assert content(done.folder)[0] == followed(log)[0]


def test_a_snapshot_up_to_an_offset_does_not_have_what_came_later(log: Any, tmp_path: Path) -> None:
    done = sl.bulk.build_snapshot(log, tmp_path / "snapshot", upto=33, group_bytes=1)
    assert done.cursor.next == 33
    assert content(done.folder) == followed(log, 33)
    with pytest.raises(InvalidInput, match="the log ends at 100"):
        sl.bulk.build_snapshot(log, tmp_path / "later", upto=101)


@pytest.mark.parametrize("into", [sl.followers.AppendLogStore, sl.followers.RocksStore])
def test_a_store_bootstraps_from_it_and_follows_on_without_gap_or_overlap(log: Any, tmp_path: Path, into: Any) -> None:
    kind = "append-log" if into is sl.followers.AppendLogStore else "rocksdb"
    sl.bulk.build_snapshot(log, tmp_path / "snapshot", kind=kind, group_bytes=1)  # type: ignore[arg-type]
    with log.producer() as producer:
        producer.append(key=b"k1", value=b"later")
        producer.append(key=b"k2", op=Op.DELETE)
    with sl.snapshots.bootstrap(tmp_path / "snapshot", tmp_path / "store", into, log=log) as store:
        assert store.position().cursor.next == 100
        sl.follow(log, store, upto="end")
        assert (list(store.range()), store.position()) == followed(log)
    assert not list(tmp_path.glob("*.scratch")) + list(tmp_path.glob("*.rocksdb"))


def test_it_is_published_for_others(log: Any, tmp_path: Path) -> None:
    artifacts = sl.snapshots.Artifacts(f"file://{tmp_path}/published")
    for _ in range(2):  # the second call finds it sealed and published
        done = sl.bulk.build_snapshot(log, tmp_path / "snapshot", publish=artifacts)
    newest = artifacts.newest()
    assert newest is not None
    assert newest.cursor == done.cursor
    with sl.snapshots.bootstrap(artifacts, tmp_path / "store", sl.followers.AppendLogStore, log=log) as store:
        assert list(store.range()) == followed(log)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("every", sampled(7))
@pytest.mark.parametrize("after", [False, True])
def test_a_build_that_is_killed_at_any_request_continues(
    log: Any, tmp_path: Path, after: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = followed(log)
    for number in range(0, 300, every):
        inner = PlainStore()
        store = FaultyStore(inner)
        monkeypatch.setattr("strandline.bulk.snapshot_building.open_store", lambda *_, store=store: store)
        store.crash_at(number, after=after)
        folder = tmp_path / str(number)
        with contextlib.suppress(Crash):
            sl.bulk.build_snapshot(log, folder, scratch="plain", group_bytes=2500, pool=sl.bulk.ThreadPool(1))
        requests = len(store.log)
        store.unhook()
        done = sl.bulk.build_snapshot(log, folder, scratch="plain", group_bytes=2500, pool=sl.bulk.ThreadPool(1))
        assert content(done.folder) == expected
        assert not list(inner.list(""))
        if requests < number:
            break
    assert number > 15


def test_a_build_that_is_continued_keeps_its_cursor_and_reduces_nothing_twice(log: Any, tmp_path: Path) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot", group_bytes=1, pool=Interrupted(5, end))
    with log.producer() as producer:
        producer.append(key=b"k1", value=b"later")
    told: list[tuple[int, int]] = []
    done = sl.bulk.build_snapshot(log, tmp_path / "snapshot", on_progress=lambda *one: told.append(one))
    assert (done.cursor.next, told[0]) == (100, (50, 100))
    assert content(done.folder) == followed(log, 100)
    with pytest.raises(AlreadyExists, match="another folder"):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot", upto=101)


def test_neither_files_of_others_nor_the_scratch_of_another_build_are_removed(log: Any, tmp_path: Path) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    (tmp_path / "a.scratch").mkdir()
    (tmp_path / "a.scratch" / "mine").write_bytes(b"kept")
    (tmp_path / "b.rocksdb").mkdir()
    sl.bulk.build_snapshot(log, tmp_path / "a", upto=50)
    sl.bulk.build_snapshot(log, tmp_path / "b", kind="rocksdb")
    assert [path.name for path in (tmp_path / "a.scratch").iterdir()] == ["mine"]
    with pytest.raises(KeyboardInterrupt):
        sl.bulk.build_snapshot(log, tmp_path / "c", scratch=tmp_path / "shared", pool=Interrupted(0, end))
    sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "shared", upto=50)  # is sealed
    assert (tmp_path / "shared" / "snapshot-plan.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a", "a.scratch", "b", "b.rocksdb", "log", "shared"),
    ]


def test_a_record_without_key_ends_it(tmp_path: Path) -> None:
    log = new_log([[(Op.PUT, b"a", b"1")], [(Op.PUT, b"b", b"2"), (Op.PUT, None, b"3")]])
    with pytest.raises(NullKey, match="offset 2 has no key, and a store keeps one value per key"):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot")
    assert not list(tmp_path.iterdir()), "no scratch, which no other call could use"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("of another program")
    with pytest.raises(NullKey):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot", scratch=tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note"]
    assert sl.bulk.build_snapshot(log, tmp_path / "snapshot", upto=2).cursor.next == 2


def test_a_log_without_its_first_records_is_refused(log: Any, tmp_path: Path) -> None:
    log.set_retention("bytes:1")
    log.trim(grace=0)
    with pytest.raises(CursorExpired):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot")


def test_the_scratch_of_another_snapshot_is_refused(log: Any, tmp_path: Path) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "scratch", pool=Interrupted(0, end))
    with pytest.raises(InvalidInput, match="scratch of another snapshot"):
        sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "scratch", upto=3)
    with pytest.raises(InvalidInput, match="scratch of another snapshot"):
        sl.bulk.build_snapshot(new_log([]), tmp_path / "a", scratch=tmp_path / "scratch")
    plan = tmp_path / "scratch" / "snapshot-plan.json"
    fields = json.loads(plan.read_text())
    for broken in ({"cuts": [3]}, {"shares": 3}, {"version": 2}):
        plan.write_text(json.dumps({**fields, **broken}))
        with pytest.raises(CorruptData, match="is damaged"):
            sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "scratch")
    plan.unlink()
    (tmp_path / "scratch" / "merged-x").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"no snapshot-plan\.json"):
        sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "scratch")
    with pytest.raises(InvalidInput, match="holds a log"):
        sl.bulk.build_snapshot(log, tmp_path / "a", scratch=tmp_path / "log")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"")
    with pytest.raises(AlreadyExists):
        sl.bulk.build_snapshot(log, tmp_path / "full")


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_restored_log_with_other_records_is_refused(tmp_path: Path, is_sealed: bool) -> None:
    url = f"file://{tmp_path}/log"
    new_log([[(Op.PUT, b"a", b"1")]], url)
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    log = new_log([[(Op.PUT, b"b", b"lost")]], url)

    def end() -> None:
        if not is_sealed:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot", pool=Interrupted(0, end))
    shutil.rmtree(tmp_path / "log")
    shutil.copytree(tmp_path / "copy", tmp_path / "log")
    restored = new_log([[(Op.PUT, b"c", b"new")]], url)
    with pytest.raises(Diverged, match="restored from a copy"):
        sl.bulk.build_snapshot(restored, tmp_path / "snapshot")


def test_a_task_that_gets_other_records_than_planned_stores_nothing(log: Any) -> None:
    store = PlainStore()
    spans = spans_between(log, 0, 100)
    for broken in (spans[1:], spans[:-1], ()):
        with pytest.raises(CorruptData):
            ReduceTask(store, "reduced", 4, 0, 100, broken)()
    assert not list(store.list(""))


@pytest.mark.matrix
def test_many_keys_and_large_values_are_cut_into_pieces(tmp_path: Path) -> None:
    rows = [(Op.PUT, b"%d" % (n % 90_000), b"x") for n in range(180_000)]
    large = [(Op.PUT, b"large-%d" % n, bytes(3 << 20)) for n in range(7)]
    log = new_log([rows[:100_000], rows[100_000:], large], f"file://{tmp_path}/log")
    done = sl.bulk.build_snapshot(log, tmp_path / "snapshot")
    assert content(done.folder) == followed(log)


@pytest.mark.parametrize("kind", ["reduced-", "merged-"])
def test_damaged_scratch_is_refused_and_never_becomes_a_snapshot(
    log: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("strandline.bulk.snapshot_building.seal_frames", end)
    with pytest.raises(KeyboardInterrupt):
        sl.bulk.build_snapshot(log, tmp_path / "snapshot", group_bytes=3000)
    monkeypatch.undo()
    scratch = tmp_path / "snapshot.scratch"
    if kind == "reduced-":
        for path in scratch.glob("merged-*"):
            path.unlink()
    path = max(scratch.glob(f"{kind}*"), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        for merged in scratch.glob("merged-*") if kind == "reduced-" else ():
            merged.unlink()
        with pytest.raises((CorruptData, InvalidInput)):
            sl.bulk.build_snapshot(log, tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()


def test_a_build_that_another_process_finishes_meanwhile_answers_as_that_one(log: Any, tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    for after in (1, 3):

        def build() -> None:
            sl.bulk.build_snapshot(log, folder, group_bytes=3000)

        done = sl.bulk.build_snapshot(log, folder, group_bytes=3000, pool=Interrupted(after, build))
        assert content(done.folder) == followed(log)
        assert not (tmp_path / "snapshot.scratch").exists()
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_build_that_another_process_makes_while_its_plan_is_read_answers_as_that_one(
    log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "snapshot"
    if is_begun:
        with pytest.raises(KeyboardInterrupt):
            sl.bulk.build_snapshot(log, folder, group_bytes=3000, pool=Interrupted(1, end))
    store = FaultyStore(open_store(f"{folder}.scratch"))

    def build(call: Call) -> None:
        if (call.name, call.path, call.stage) == ("get", "snapshot-plan.json", "before"):
            store.unhook()
            monkeypatch.undo()
            sl.bulk.build_snapshot(log, folder, group_bytes=3000)

    store.hook(build)
    monkeypatch.setattr("strandline.bulk.snapshot_building.open_store", lambda *_: store)
    done = sl.bulk.build_snapshot(log, folder, group_bytes=3000)
    assert content(done.folder) == followed(log)
    assert not (tmp_path / "snapshot.scratch").exists()


def test_what_a_task_of_an_earlier_build_writes_late_is_not_taken(log: Any, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    kept: dict[str, bytes] = {}

    def keep() -> None:
        kept.update((path.name, path.read_bytes()) for path in scratch.iterdir() if "plan" not in path.name)

    def late() -> None:
        for name, data in kept.items():
            (scratch / name).write_bytes(data)

    sl.bulk.build_snapshot(log, tmp_path / "first", upto=50, scratch=scratch, group_bytes=1, pool=Interrupted(7, keep))
    assert any(name.startswith("merged-") for name in kept)
    done = sl.bulk.build_snapshot(log, tmp_path / "second", scratch=scratch, group_bytes=1, pool=Interrupted(1, late))
    assert content(done.folder) == followed(log)
