"""Commits are bounded by what records take in memory, not by their stored bytes; less is tried if that is too much."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import strandline as sl
from strandline.errors import JobFailed, StorageError
from strandline.followers.committer import begin
from strandline.followers.engine import Engine
from strandline.followers.events import Batching
from strandline.followers.run import Follower
from strandline.followers.table_route import Observer, Pieces, StoredRange, TableRoute
from strandline.log.object import ObjectLog
from strandline.log.read.decoded_sizes import DecodedSizes
from strandline.log.read.reading import fetch_in_order
from strandline.model.cursor import Cursor, Limit, Span
from strandline.storage.env import SYSTEM
from strandline.tables.files import part as parts_module
from strandline.tables.files.part import TablePart
from strandline.tables.work import InProcess, written
from strandline.tables.written import Written

MIB = 1 << 20
BATCHES, ROWS = 24, 512
LINE = b"GET /index.html " + b"-" * 1000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> ObjectLog:
    """Twelve MiB of repetitive lines, which are stored in a fraction of that."""
    log = sl.open(f"{tmp_path_factory.mktemp('lines')}/log", create=True)
    with log.producer(compression="zstd") as producer:
        for _ in range(BATCHES):
            keys = pa.array([b"%d" % number for number in range(ROWS)], pa.binary())
            producer.append_batch(pa.table({"key": keys, "value": pa.array([LINE] * ROWS, pa.binary())}))
            producer.flush()
    assert sum(span.size for span in log.plan(log.start())) < MIB
    assert isinstance(log, ObjectLog)
    return log


@dataclass
class Commits(Observer):
    """Remembers the ranges that were committed."""

    ranges: list[StoredRange]

    def stored(self, found: StoredRange) -> None:
        self.ranges.append(found)

    @property
    def counts(self) -> list[int]:
        """The batches of each commit."""
        return [(one.upto.next - one.since.next) // ROWS for one in self.ranges]


def route(log: ObjectLog, place: Path, workers: InProcess | None = None) -> tuple[TableRoute, Commits]:
    sink = sl.DeltaSink(place, mode="append")
    committer = begin(log, sink, None, start="beginning", holder="me")
    assert committer.table is not None
    commits = Commits([])
    return TableRoute(log, committer, committer.table, Pieces(log), workers or InProcess(), SYSTEM, commits), commits


def everything(log: ObjectLog) -> tuple[Sequence[Span], Cursor, Cursor]:
    return log.plan(log.start()), log.start(), log.end()


def offsets(place: Path) -> list[int]:
    return sorted(sl.DeltaSink(place, mode="append").rows().column("offset").to_pylist())


ALL = list(range(BATCHES * ROWS))


def test_a_commit_of_a_table_is_bounded_by_its_bytes_in_memory(log: ObjectLog, tmp_path: Path) -> None:
    made, _ = route(log, tmp_path / "table")
    cursor, sizes = log.start(), []
    while (found := made.receive(cursor, Limit(bytes=2 * MIB))) is not None:
        sizes.append(sum(batch.nbytes for span in found.chunk for batch in span.fetch()))
        assert found.size >= sizes[-1] * 0.9, "the engine counts what the records take in memory"
        cursor = found.upto
    assert max(sizes) <= 2 * MIB
    assert len(sizes) == 8
    assert made.receive(log.start(), Limit()).upto == log.end(), "without a bound nothing is divided"  # type: ignore[union-attr]


def test_a_follower_with_its_default_bytes_takes_all_that_fits(log: ObjectLog, tmp_path: Path) -> None:
    made, _ = route(log, tmp_path / "table")
    found = made.receive(log.start(), Limit(bytes=Batching().bytes))
    assert found is not None
    assert found.upto == log.end()


class Rows:
    """A sink that is no table: it remembers how much it was given at once, and has memory for some batches only."""

    def __init__(self, most: int = BATCHES) -> None:
        self.most = most
        self.sizes: list[int] = []
        self.tried: list[int] = []
        self.at: Cursor | None = None

    def cursor(self, log_id: UUID | None = None) -> Cursor | None:
        return self.at

    def apply(self, batches: pa.Table, *, since: Cursor, upto: Cursor) -> None:
        assert batches.column("offset").to_pylist() == list(range(since.next, upto.next))
        assert since.next == (0 if self.at is None else self.at.next)
        self.tried.append(batches.num_rows // ROWS)
        if batches.num_rows > self.most * ROWS:
            raise MemoryError
        self.sizes.append(batches.nbytes)
        self.at = upto

    def replace(self, snapshot: Any) -> None:
        raise NotImplementedError


def test_a_commit_of_any_other_sink_is_bounded_too(log: ObjectLog) -> None:
    rows = Rows()
    sl.follow(log, rows, batching=Batching(bytes=2 * MIB), upto="end")
    assert rows.at == log.end()
    assert max(rows.sizes) <= 3 * MIB, "one batch more at most"
    assert sum(rows.sizes) > BATCHES * ROWS * len(LINE)


def test_any_sink_without_enough_memory_is_given_smaller_pieces(log: ObjectLog) -> None:
    rows = Rows(most=7)
    sl.follow(log, rows, upto="end")
    assert rows.tried == [24, 12, 6, 6, 6, 6]
    assert rows.at == log.end(), "with the proof of its last batch"
    with pytest.raises(MemoryError) as raised:
        sl.follow(log, Rows(most=0), upto="end")
    assert raised.value.__notes__[0].startswith(f"Offsets 0 to {ROWS - 1} of ")


def test_records_that_do_not_fit_while_they_are_fetched_are_fetched_in_smaller_pieces(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, calls = type(log.plan(log.start())[0]).fetch, iter(range(100))

    def sometimes(span: Any, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        if next(calls) in (0, 5):
            raise pa.ArrowMemoryError("malloc of size 64 failed")
        return fetch(span, columns)

    monkeypatch.setattr(type(log.plan(log.start())[0]), "fetch", sometimes)
    rows = Rows()
    sl.follow(log, rows, upto="end")
    assert rows.at == log.end()
    assert sum(rows.tried) == BATCHES


class Small(InProcess):
    """Workers with little memory: more than some spans at once are too many."""

    def __init__(self, most: int, error: BaseException) -> None:
        super().__init__()
        self.most, self.error = most, error
        self.tried: list[int] = []

    def run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        self.tried.append(len(spans))
        if len(spans) > self.most:
            raise self.error
        return super().run(parts, spans, title, most)


@pytest.mark.parametrize(
    "error", [MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed")], ids=["python", "arrow"]
)
def test_a_range_that_does_not_fit_into_memory_is_committed_in_pieces(
    log: ObjectLog, tmp_path: Path, error: MemoryError
) -> None:
    workers = Small(7, error)
    made, commits = route(log, tmp_path / "table", workers)
    spans, since, upto = everything(log)
    made.store([spans], since, upto)
    assert workers.tried == [24, 12, 6, 6, 6, 6]
    assert commits.counts == [6, 6, 6, 6]
    assert offsets(tmp_path / "table") == ALL


def test_one_batch_that_does_not_fit_says_which_and_what_helps(log: ObjectLog, tmp_path: Path) -> None:
    made, commits = route(log, tmp_path / "table", Small(0, MemoryError()))
    spans, since, upto = everything(log)
    with pytest.raises(MemoryError) as raised:
        made.store([spans], since, upto)
    (note,) = raised.value.__notes__
    assert note.startswith(f"Offsets 0 to {ROWS - 1} of ")
    assert "more memory" in note
    assert commits.ranges == []


def test_a_job_that_lost_its_workers_takes_less_when_it_is_tried_again(log: ObjectLog, tmp_path: Path) -> None:
    workers = Small(7, JobFailed("A worker was killed."))
    made, commits = route(log, tmp_path / "table", workers)
    spans, since, upto = everything(log)
    for _ in range(2):  # with the pauses of the engine in between
        with pytest.raises(JobFailed):
            made.store([spans], since, upto)
    made.store([spans], since, upto)
    assert workers.tried == [24, 12, 6, 6, 6, 6]
    assert offsets(tmp_path / "table") == ALL
    assert commits.counts == [6, 6, 6, 6]
    made.store([spans], since, upto)
    assert workers.tried == [24, 12, 6, 6, 6, 6], "what the table has is not written again"
    assert offsets(tmp_path / "table") == ALL


def test_files_of_an_append_are_closed_by_bytes_before_all_rows_are_in_memory(
    log: ObjectLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "FILE_BYTES", 2 * MIB)
    monkeypatch.setattr("strandline.tables.files.part._CHUNK_ROWS", ROWS)
    made, commits = route(log, tmp_path / "table")
    spans, since, upto = everything(log)
    made.store([spans], since, upto)
    (only,) = commits.ranges
    assert sum(len(one.added) for one in only.written) == 6
    assert offsets(tmp_path / "table") == ALL


@pytest.mark.parametrize("mode", ["latest", pytest.param("history", marks=pytest.mark.matrix)])
def test_files_of_a_keyed_table_are_split_by_bytes_since_a_merge_holds_their_rows_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["latest", "history"]
) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer(compression="zstd") as producer:
        for first in range(0, 3 * 2048, 2048):
            keys = pa.array([b"%d" % (number % 4096) for number in range(first, first + 2048)], pa.binary())
            producer.append_batch(pa.table({"key": keys, "value": pa.array([LINE] * 2048, pa.binary())}))
            producer.flush()
    monkeypatch.setattr(parts_module, "KEYED_BYTES", MIB // 2)
    sink = sl.DeltaSink(tmp_path / "table", mode=mode)
    sl.follow(log, sink, batching=Batching(bytes=9 * MIB // 4), upto="end")
    rows = [pq.read_table(file) for file in (tmp_path / "table").glob("*.parquet")]
    assert max(table.nbytes for table in rows) <= MIB // 2
    assert len(sink.rows()) == (4096 if mode == "latest" else 3 * 2048)


@pytest.mark.parametrize("mode", ["append", "latest"])
def test_a_sudden_change_to_repetitive_records_is_noticed_while_they_are_read(
    tmp_path: Path, mode: Literal["append", "latest"]
) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer(compression="zstd") as producer:
        kinds = [(50, 100, 4), (1, MIB // 4, 12), (50, 100, 4)]
        for records, size, times in kinds:
            for number in range(times):
                value = bytes(size) if records == 1 else random.Random(number).randbytes(size)
                producer.append_batch(pa.table({"key": [b"k"] * records, "value": [value] * records}))
                producer.flush()
    sink, commits = sl.DeltaSink(tmp_path / "table", mode=mode), Commits([])
    committer = begin(log, sink, None, start="beginning", holder="me")
    engine = Engine(Batching(bytes=MIB), upto=log.end().next)
    Follower(engine, log, committer, None, SYSTEM, observer=commits).run(committer.start, None)
    assert max(one.decoded for found in commits.ranges for one in found.written) <= MIB * 5 // 4
    assert [found.since.next for found in commits.ranges[1:]] == [found.upto.next for found in commits.ranges[:-1]]
    assert len(commits.ranges) < 10
    assert sink.rows().num_rows == (log.end().next if mode == "append" else 1)


def test_one_batch_that_takes_more_than_the_bound_is_committed_by_itself(tmp_path: Path) -> None:
    log = sl.open(f"{tmp_path}/log", create=True)
    with log.producer(compression="zstd") as producer:
        for size in (100, 100, 2 * MIB, 100, 100):
            producer.append(value=bytes(size))
            producer.flush()
    sl.follow(log, sl.DeltaSink(tmp_path / "table", mode="append"), batching=Batching(bytes=MIB), upto="end")
    assert offsets(tmp_path / "table") == [0, 1, 2, 3, 4]


def test_a_transform_without_enough_memory_is_given_smaller_pieces(log: ObjectLog, tmp_path: Path) -> None:
    tried: list[int] = []

    def hungry(rows: pa.Table) -> pa.Table:
        tried.append(rows.num_rows // ROWS)
        if rows.num_rows > 12 * ROWS:
            raise MemoryError
        return rows.select(["_offset"])

    sink = sl.DeltaSink(tmp_path / "table", mode="append", transform=hungry)
    sl.follow(log, sink, upto="end")
    assert [count for count in tried if count] == [24, 12, 12]
    assert sorted(sink.rows().column("_offset").to_pylist()) == ALL


def test_a_value_is_bad_if_it_takes_too_much_memory_but_not_if_the_process_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec, values = sl.values.Json(pa.schema({"number": pa.int64()})), pa.array([b'{"number": 1}'], pa.binary())

    def hungry(value: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(codec, "_decode", hungry)
    assert codec._decode_rows(values.to_pylist(), bad := {}) == [codec._empty]
    assert bad == {0: "MemoryError."}
    monkeypatch.setattr("strandline.values.codecs.columns._SPARE", 1 << 60)
    with pytest.raises(MemoryError):
        codec._decode_rows(values.to_pylist(), {})


# --- the estimate ----------------------------------------------------------------------------------------------


@dataclass
class Listed:
    """A span that knows what a listing does, and what fetching it gives."""

    first: int
    next: int
    size: int
    decoded: int = 0
    error: Exception | None = None
    fetched: int = 0

    def fetch(self, columns: Sequence[str] | None = None) -> list[pa.RecordBatch]:
        self.fetched += 1
        if self.error is not None:
            raise self.error
        each = pa.array(
            [b"x" * (self.decoded // (self.next - self.first))] * (self.next - self.first), pa.large_binary()
        )
        return [pa.RecordBatch.from_arrays([each], ["value"])]


def listed(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Listed]:
    at = 0
    for records, stored, decoded in sizes:
        yield Listed(at, at + records, stored, decoded)
        at += records


def test_what_is_not_known_is_measured_once_at_the_densest_span() -> None:
    sizes, spans = DecodedSizes(), [*listed([(10, 1000, 1000), (10, 100, 10_000), (10, 500, 1000)])]
    assert sizes.total(spans) == 1600, "the stored bytes at least"
    assert sizes.within(spans, 15_000) == spans[:1], "others may be as dense"
    assert [span.fetched for span in spans] == [0, 1, 0]
    assert sizes.within(spans, 1) == spans[:1], "at least one"
    sizes.within(spans, 1 << 40)
    assert [span.fetched for span in spans] == [0, 1, 0]


def test_one_span_and_an_unbounded_range_are_not_measured() -> None:
    sizes, spans = DecodedSizes(), [*listed([(10, 100, 10_000), (10, 100, 10_000)])]
    assert sizes.within(spans, None) == spans
    assert sizes.within(spans[:1], 1) == spans[:1]
    assert [span.fetched for span in spans] == [0, 0]


def test_a_span_that_cannot_be_read_is_left_to_whoever_reads_all_of_it() -> None:
    sizes, spans = DecodedSizes(), [*listed([(10, 100, 100), (10, 100, 100), (10, 100, 100)])]
    spans[0].error = StorageError("the store is away")
    assert sizes.within(spans, 250) == spans[:2]


def test_an_estimate_counts_records_and_bytes_and_forgets_slowly() -> None:
    sizes = DecodedSizes()
    (dense, larger, plain) = listed([(100, 1_000, 0), (10, 10_000, 0), (100, 100_000, 0)])
    sizes.learn([dense], 200, 200_000)  # read twice
    assert sizes.of(dense) == 100_000
    assert sizes.of(larger) == 1_000_000, "by its bytes"
    assert sizes.of(Listed(0, 1000, 10)) == 1_000_000, "by its records"
    sizes.learn([plain], 100, 100_000)
    assert sizes.of(dense) == 100_000, "per record as before"
    assert sizes.of(larger) == 100_000, "between what it was and what it is"
    sizes.learn([], 0, 0)
    assert sizes.of(larger) == 100_000, "nothing was read"


@dataclass
class Remote(Listed):
    """A span of a node: one call reads several of them."""

    def join(self, following: Remote) -> Remote:
        return Remote(self.first, following.next, self.size + following.size, self.decoded + following.decoded)


def remote(count: int, stored: int, decoded: int) -> list[Remote]:
    return [Remote(10 * number, 10 * number + 10, stored, decoded) for number in range(count)]


def test_spans_of_a_node_are_read_together_as_far_as_their_records_fit_into_memory() -> None:
    read = [span for span, _ in fetch_in_order(remote(100, 1000, 100_000), ahead=1_010_000)]
    assert [span.next for span in read[:-1]] == [span.first for span in read[1:]]
    assert (read[0].first, read[-1].next) == (0, 1000)
    assert read[0].decoded == 100_000, "the first one tells what the others take"
    assert {span.decoded for span in read[1:-1]} == {500_000}


def test_small_spans_of_a_node_are_read_in_one_call_and_what_they_take_is_remembered() -> None:
    assert len([*fetch_in_order(remote(20, 10, 10), ahead=1_010_000)]) == 1
    sizes = DecodedSizes()
    for _ in range(2):
        read = [span.decoded for span, _ in fetch_in_order(remote(20, 1000, 100_000), ahead=1_010_000, sizes=sizes)]
    assert read == [500_000] * 4


def test_what_is_fetched_ahead_is_bounded_by_records_where_stored_bytes_are_unknown() -> None:
    spans = [Listed(10 * number, 10 * number + 10, 0, 100_000) for number in range(9)]
    read = fetch_in_order(spans, ahead=200_000)
    for at in range(1, 4):
        next(read)
        assert sum(span.fetched for span in spans) <= at + 2


def test_a_worker_without_memory_answers_so_and_the_driver_raises_it() -> None:
    pool = pytest.importorskip("strandline.spark.executor_pool")
    from strandline.spark.task_payload import packed

    item = packed(partial(written, Hungry(), [], None), "The sink")
    answer = pickle.loads(pool._done(item))
    assert isinstance(answer, MemoryError)
    with pytest.raises(MemoryError, match="too little memory"):
        pool._raised(answer)


class Hungry:
    """A part that takes more memory than there is."""

    def write(self, batches: Any) -> Written:
        raise pa.ArrowMemoryError("malloc of size 1099511627776 failed")
