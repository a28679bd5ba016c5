"""What a worker holds at once is bounded by the bytes in memory of a commit, however well the log compresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.followers.committer import begin
from strandline.followers.engine import Engine
from strandline.followers.events import Batching
from strandline.followers.run import Follower
from strandline.log.contract import Log
from strandline.model.cursor import Span
from strandline.storage.env import SYSTEM
from strandline.tables.files import part as parts_module
from strandline.tables.files.part import TablePart
from strandline.tables.work import InProcess, assigned, written
from strandline.tables.written import Written
from tests.matrix_cases import some

MIB = 1 << 20
BOUND = 8 * MIB
RECORDS, ROWS = 81_920, 2048
LINE = b"GET /index.html HTTP/1.1 200 " + b"-" * 391
CODEC = sl.values.Json(pa.schema({"id": pa.int64(), "line": pa.string()}))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Lines of a log, forty MiB in memory, each with a key of its own; a seventieth of that or so is stored."""
    log = sl.open(f"{tmp_path_factory.mktemp('lines')}/log", create=True)
    with log.producer(compression="zstd") as producer:
        for first in range(0, RECORDS, ROWS):
            numbers = range(first, first + ROWS)
            values = [b'{"id": %d, "line": "%b"}' % (number, LINE) for number in numbers]
            keys = pa.array([b"%08d" % number for number in numbers], pa.binary())
            producer.append_batch(pa.table({"key": keys, "value": pa.array(values, pa.binary())}))
            producer.flush()
    assert sum(span.size for span in log.plan(log.start())) < RECORDS * len(LINE) // 40
    return log


class Measured(InProcess):
    """Two workers, one after the other: remembers the most that one of them held in Arrow's memory, and was given."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.given = 0

    def tasks(self, spans: Sequence[Span]) -> int:
        return 2

    def run(
        self, parts: Sequence[TablePart], spans: Sequence[Span], title: str, most: int | None = None
    ) -> Sequence[Written]:
        return [self._measured(part, own, most) for part, own in assigned(parts, spans)]

    def _measured(self, part: TablePart, spans: Sequence[Span], most: int | None) -> Written:
        usual = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(pool)
        try:
            done = written(part, spans, most)
        finally:
            pa.set_memory_pool(usual)
        self.peak, self.given = max(self.peak, pool.max_memory()), max(self.given, done.decoded)
        return done


def follow(log: Log, sink: Any, bound: int) -> Measured:
    workers = Measured()
    committer = begin(log, sink, None, start="beginning", holder="me")
    engine = Engine(Batching(bytes=bound), upto=log.end().next)
    Follower(engine, log, committer, None, SYSTEM, workers=workers).run(committer.start, None)
    return workers


CASES = {
    "latest": ({"mode": "latest"}, 2),
    "append": ({"mode": "append"}, 1),
    "history": ({"mode": "history"}, 2),
    "append, decoded": ({"mode": "append", "value": CODEC}, 2),
    "latest, decoded": ({"mode": "latest", "value": CODEC}, 2),
    "history, decoded, key": ({"mode": "history", "value": CODEC, "key": "id"}, 3),
}


@pytest.mark.parametrize("case", some([*CASES], 1))
def test_a_worker_holds_a_few_times_the_bound_of_a_commit_also_when_its_table_is_larger(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings, times = CASES[case]
    # As large beside the bound as they are by default.
    monkeypatch.setattr(parts_module, "KEYED_BYTES", BOUND // 4)
    monkeypatch.setattr(parts_module, "FILE_BYTES", BOUND)
    sink = sl.DeltaSink(tmp_path / "table", **settings)  # type: ignore[arg-type]
    found = follow(log, sink, BOUND)
    assert found.given <= BOUND * 5 // 4, "an estimate may be a quarter too low"
    assert found.peak <= times * BOUND
    assert sink.rows().num_rows == RECORDS
