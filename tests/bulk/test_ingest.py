"""Parallel ingest: every record of a source once and in order, as an ingest in one process would have appended it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import strandline as sl
from strandline.bulk import ingesting
from strandline.errors import CursorExpired, InvalidInput, OutcomeUnknown, TransientStorageError, Unsupported
from strandline.ingestion.run import IngestProgress
from strandline.log.object.log import open_log
from strandline.log.object.upload import Lister
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.matrix_cases import sampled

R = TypeVar("R")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingesting, "TASK_BYTES", 1)
    monkeypatch.setattr(ingesting, "WAVE", 2)


class Backwards:
    """A pool whose tasks are done and answer in reverse order; ``between`` is called after each."""

    count = 2

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        self.between = between
        self.jobs = 0

    def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
        self.jobs += 1
        for number, task in reversed([*enumerate(tasks)]):
            done = task()
            self.between()
            yield number, done


def filled(url: str, first: int = 0, count: int = 10) -> sl.Log:
    log = sl.open(url, create=True)
    for number in range(first, first + count):
        with log.producer() as producer:
            producer.append(key=b"k%d" % (number % 3), value=b"%d" % number)
            producer.append(key=b"k", op=sl.Op.DELETE)
    return log


def content(log: sl.Log) -> pa.Table:
    return pa.Table.from_batches(log.read("beginning")).drop_columns(["offset"])


@pytest.mark.parametrize("kind", ["file", "wal"])
def test_all_records_arrive_once_and_in_order_and_both_ways_continue_each_other(kind: str, tmp_path: Path) -> None:
    source = filled(f"{kind}://{tmp_path}/source")
    target, pool = sl.open(f"file://{tmp_path}/target", create=True), Backwards()
    seen = []
    done = sl.bulk.ingest(source, target, pool=pool, on_progress=seen.append)
    assert (done.records, done.source.next, done.target) == (20, 20, target.end())
    assert pool.jobs > 1
    assert [progress.records for progress in seen] == sorted(progress.records for progress in seen)
    assert content(target) == content(source)
    assert sl.bulk.ingest(source, target, pool=pool).records == 0
    filled(f"{kind}://{tmp_path}/source", 10, 5) if kind == "file" else _more(source)
    assert sl.ingest(source, target).records == 10
    filled(f"{kind}://{tmp_path}/source", 15, 5) if kind == "file" else _more(source)
    assert sl.bulk.ingest(source, target, pool=pool).records == 10
    assert content(target) == content(source)
    back = sl.bulk.translate_cursor(done.source.at(7), source=source, target=target)
    assert back.next == 7
    assert not list(target.store.list("staged/"))  # type: ignore[attr-defined]


def _more(log: sl.Log) -> None:
    for number in range(5):
        with log.producer() as producer:
            producer.append(value=b"more %d" % number)
            producer.append(value=b"more")


@pytest.mark.parametrize("every", sampled(4))
def test_killed_at_any_request_it_goes_on_and_doubles_nothing(tmp_path: Path, every: int) -> None:
    source = filled(f"file://{tmp_path}/source", count=6)
    truth = content(source)

    def run(store: FaultyStore) -> None:
        sl.bulk.ingest(source, open_log(store), pool=Backwards())

    calm = PlainStore()
    open_log(calm, create=True)
    counting = FaultyStore(calm)
    calls: list[Call] = []
    counting.hook(calls.append)
    run(counting)
    total = len(calls)
    assert total > 20
    for at in range(0, total, every):
        plain = PlainStore()
        open_log(plain, create=True)
        store, count = FaultyStore(plain), iter(range(1 << 30))

        def die(_: Call, at: int = at, count: Iterator[int] = count) -> None:
            if next(count) == at:
                raise Crash

        store.hook(die)
        with pytest.raises(Crash):
            run(store)
        again = open_log(plain)
        sl.bulk.ingest(source, again, pool=Backwards())
        assert content(again) == truth, at


def test_a_task_that_fails_leaves_nothing_staged(tmp_path: Path) -> None:
    source = filled(f"file://{tmp_path}/source")
    target = sl.open(f"file://{tmp_path}/target", create=True)

    def fail() -> None:
        raise TransientStorageError("the line is down")

    with pytest.raises(TransientStorageError):
        sl.bulk.ingest(source, target, pool=Backwards(fail))
    assert target.bounds().next == 0
    assert not list(target.store.list("staged/"))  # type: ignore[attr-defined]


def test_what_cannot_be_ingested_in_parallel_is_one_sentence(tmp_path: Path) -> None:
    source = filled(f"file://{tmp_path}/source", count=1)
    with pytest.raises(InvalidInput, match="into itself"):
        sl.bulk.ingest(source, source)
    with (
        pytest.raises(Unsupported, match="'strandline ingest' without --workers"),
        sl.open(f"wal://{tmp_path}/wal", create=True) as wal,
    ):
        sl.bulk.ingest(source, wal)


def test_a_source_that_was_trimmed_before_it_was_ingested_is_refused_or_skipped(tmp_path: Path) -> None:
    source = filled(f"file://{tmp_path}/source")
    target = sl.open(f"file://{tmp_path}/target", create=True)
    sl.bulk.ingest(source, target, pool=Backwards())
    filled(f"file://{tmp_path}/source", 10, 10)
    source.set_retention("bytes:1")  # type: ignore[attr-defined]
    source.slots.create("pin", 30)
    source.trim(grace=0.0)  # type: ignore[attr-defined]
    assert source.bounds().first > 20
    with pytest.raises(CursorExpired, match="--skip-trimmed"):
        sl.bulk.ingest(source, target, pool=Backwards())
    done = sl.bulk.ingest(source, target, pool=Backwards(), skip_trimmed=True)
    assert done.records == 40 - source.bounds().first
    assert sl.bulk.ingest(source, target, pool=Backwards()).records == 0


def test_another_kind_of_log_is_refused_before_it_is_created(tmp_path: Path) -> None:
    source = sl.open(f"file://{tmp_path}/source", create=True)
    with pytest.raises(Unsupported, match="ingest with one worker"):
        sl.bulk.ingest(source, f"wal://{tmp_path}/target")
    assert not (tmp_path / "target").exists()


def test_of_two_runs_at_once_each_counts_what_it_listed_itself(tmp_path: Path) -> None:
    source = filled(f"file://{tmp_path}/source")
    target = sl.open(f"file://{tmp_path}/target", create=True)
    inner: list[int] = []

    def other() -> None:
        if not inner:
            inner.append(0)
            inner[0] = sl.bulk.ingest(source, sl.open(target.url), pool=Backwards()).records  # type: ignore[attr-defined]

    outer = sl.bulk.ingest(source, target, pool=Backwards(other)).records
    assert (outer, inner) == (0, [20])
    assert content(target) == content(source)


def test_a_wave_that_another_run_has_listed_in_part_counts_the_rest(tmp_path: Path) -> None:
    """The other one dies after a smaller wave."""
    source = filled(f"file://{tmp_path}/source")
    target = sl.open(f"file://{tmp_path}/target", create=True)
    begun: list[int] = []

    class Dies(Backwards):
        count = 1

        def run(self, tasks: Sequence[Callable[[], R]], title: str) -> Iterator[tuple[int, R]]:
            if self.jobs:
                raise Crash
            return super().run(tasks, title)

    def other() -> None:
        if not begun:
            begun.append(1)
            with pytest.raises(Crash):
                sl.bulk.ingest(source, sl.open(target.url), pool=Dies(), on_progress=seen.append)  # type: ignore[attr-defined]

    seen: list[IngestProgress] = []
    outer = sl.bulk.ingest(source, target, pool=Backwards(other)).records
    assert 0 < seen[-1].records < 20
    assert outer == 20 - seen[-1].records
    assert content(target) == content(source)


@pytest.mark.parametrize("is_landed", [False, True])
def test_records_whose_listing_is_in_doubt_are_counted_if_they_are_listed(is_landed: bool, tmp_path: Path) -> None:
    source = filled(f"file://{tmp_path}/source")
    store = PlainStore()
    target = open_log(store, create=True)
    lost: list[str] = []
    enlist = Lister.enlist_all

    def uncertain(self: Lister, listings: Sequence[Any]) -> int:
        if not lost:
            lost.append("once")
            if is_landed:
                enlist(self, listings)
            raise OutcomeUnknown("the answer was lost")
        return enlist(self, listings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lister, "enlist_all", uncertain)
        assert sl.bulk.ingest(source, target, pool=Backwards()).records == 20
    assert content(target) == content(source)
