"""Commits are bounded by what records take in memory, not by their stored bytes; less is tried if that is too much."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import JobFailed, StorageError
from strandline.followers.committer import begin
from strandline.followers.events import Batching
from strandline.followers.table_route import NoObserver, StoredRange, TableRoute
from strandline.log.object import ObjectLog
from strandline.log.read.decoded_sizes import DecodedSizes
from strandline.model.cursor import Cursor, Limit, Span
from strandline.model.sink import Part, Written
from strandline.storage.clock import CLOCK
from strandline.tables.files import part as parts_module
from strandline.tables.work import InProcess

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
class Commits(NoObserver):
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
    return TableRoute(log, committer, committer.table, workers or InProcess(), CLOCK, commits), commits


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
    """A sink that is no table: it remembers how much it was given at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.at: Cursor | None = None

    def cursor(self, log_id: UUID | None = None) -> Cursor | None:
        return self.at

    def apply(self, batches: pa.Table, *, since: Cursor, upto: Cursor) -> None:
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


class Small(InProcess):
    """Workers with little memory: more than some spans at once are too many."""

    def __init__(self, most: int, error: BaseException) -> None:
        super().__init__()
        self.most, self.error = most, error
        self.tried: list[int] = []

    def run(self, parts: Sequence[Part], spans: Sequence[Span], title: str) -> Sequence[Written]:
        self.tried.append(len(spans))
        if len(spans) > self.most:
            raise self.error
        return super().run(parts, spans, title)


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
    monkeypatch.setattr("strandline.tables.files.input_count._CHUNK_ROWS", ROWS)
    made, commits = route(log, tmp_path / "table")
    spans, since, upto = everything(log)
    made.store([spans], since, upto)
    (only,) = commits.ranges
    assert sum(len(one.added) for one in only.written) == 6
    assert offsets(tmp_path / "table") == ALL


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
    assert sizes.of(larger) == 500_000, "half of what it was"
    sizes.learn([], 0, 0)
    assert sizes.of(larger) == 500_000, "nothing was read"


def test_a_worker_without_memory_answers_so_and_the_driver_raises_it() -> None:
    workers = pytest.importorskip("strandline.spark.pipelines.workers")
    from strandline.spark.task_payload import packed

    item = packed((Hungry(), []), "The sink")
    answer = workers._task(item)
    assert isinstance(pickle.loads(answer), MemoryError)
    with pytest.raises(MemoryError, match="too little memory"):
        workers._result(answer)


class Hungry:
    """A part that takes more memory than there is."""

    def write(self, batches: Any) -> Written:
        raise pa.ArrowMemoryError("malloc of size 1099511627776 failed")
