"""Whatever follows a log ends where the log was sealed, with everything applied, and does not spin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import strandline as sl
from strandline.cli.app import app
from strandline.compat.v1.log import open_queue
from strandline.errors import Sealed
from strandline.log.memory import MemoryLog
from strandline.log.object import open_log
from strandline.log.read.reading import Arrival, wait_for_more
from strandline.testing.faulty import FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.sinks import MemorySink
from tests.contracts.logs import append, writer_named
from tests.contracts.logs.batches import SOON


@pytest.fixture(params=["file", "wal", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryLog()
        return
    with sl.open(f"{request.param}://{tmp_path}/log", create=True) as log:
        yield log


def keyed(log: Any, number: int) -> None:
    table = pa.table({"key": [b"k%d" % number], "value": [b"%d" % number]})
    log.append(table, writer=writer_named(1), number=number).result(SOON)


def sealed_meanwhile(log: Any, follow: Any) -> Any:
    """What ``follow`` returns; the log gets two records and its seal while it runs."""
    keyed(log, 0)
    found: list[Any] = []
    running = threading.Thread(target=lambda: found.append(follow()), daemon=True)
    running.start()
    keyed(log, 1)
    log.seal()
    running.join(SOON)
    assert found, "it does not end"
    return found[0]


@pytest.mark.parametrize("slot", [None, "billing"])
def test_a_follower_ends_at_the_seal_with_everything_stored(log: Any, slot: str | None) -> None:
    sink = MemorySink()
    assert sealed_meanwhile(log, lambda: sl.follow(log, sink, slot)).next == 2
    if slot is not None:
        assert log.slots.get(slot).position == 2
    assert sl.follow(log, sink, slot).next == 2  # again, at the end


def test_a_follower_of_an_empty_sealed_log_ends() -> None:
    log = MemoryLog()
    log.seal()
    assert sl.follow(log, MemorySink()).next == 0


def test_a_table_and_a_route_end_at_the_seal(log: Any, tmp_path: Path) -> None:
    sinks = [sl.DeltaSink(tmp_path / name, mode="append") for name in ("one", "two")]
    assert sealed_meanwhile(log, lambda: sl.follow(log, sinks)).next == 2
    for name in ("one", "two"):
        assert DeltaTable(str(tmp_path / name)).to_pyarrow_table().num_rows == 2


def test_a_watch_of_keys_ends_at_the_seal(log: Any) -> None:
    applied: dict[bytes, bytes | None] = {}

    def watch() -> Any:
        keys = sl.kv.LogKeyValue(log)
        return sl.watch_applied(keys, lambda batch: applied.update({update.key: update.value for update in batch}))

    sealed_meanwhile(log, watch)
    assert applied == {b"k0": b"0", b"k1": b"1"}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_gets_nothing_more_at_the_seal_however_long_it_waits(tmp_path: Path, *, is_async: bool) -> None:
    for scheme in ("file", "wal"):
        with sl.open(f"{scheme}://{tmp_path}/{scheme}", create=True) as log:
            keyed(log, 0)
            with sl.Consumer(log, slot="jobs") as consumer:
                log.seal()
                assert consumer.next_batch(timeout=None) is not None
                if is_async:
                    assert asyncio.run(consumer.next_batch_async(timeout=None)) is None
                else:
                    assert consumer.next_batch(timeout=None) is None


def test_an_ingest_ends_at_the_seal_of_its_source_and_is_refused_by_that_of_its_target(tmp_path: Path) -> None:
    with (
        sl.open(f"wal://{tmp_path}/source", create=True) as source,
        sl.open(f"file://{tmp_path}/target", create=True) as target,
    ):
        done = sealed_meanwhile(source, lambda: sl.ingest(source, target, follow=True))
        assert done.source.next == 2
        assert target.bounds() == sl.log.Bounds(0, 2)
        other = sl.open(f"file://{tmp_path}/other", create=True)
        append(other, b"x", number=0)
        target.seal()
        with pytest.raises(Sealed):
            sl.ingest(other, target)


def test_tail_follow_ends_at_the_seal(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with sl.open(url, create=True) as log:
        keyed(log, 0)
        log.seal()
    shown = CliRunner().invoke(app, ["tail", url, "--follow", "--from", "beginning"])
    assert (shown.exit_code, "k0" in shown.stdout) == (0, True), shown.output


def test_a_wait_tells_records_nothing_and_the_end() -> None:
    log = MemoryLog()
    assert wait_for_more(log, log.end(), 0.01) is Arrival.NOTHING
    append(log, b"a", number=0)
    assert wait_for_more(log, log.start(), SOON) is Arrival.MORE
    log.seal()
    assert wait_for_more(log, log.end(), SOON) is Arrival.END
    assert wait_for_more(log, log.start(), SOON) is Arrival.MORE


def test_asking_whether_a_log_has_ended_costs_no_request() -> None:
    line = FaultyStore(PlainStore())
    log = open_log(line, create=True)
    append(log, b"a", number=0)
    open_log(line).seal()
    assert wait_for_more(log, log.end(), SOON) is Arrival.END
    line.log.clear()
    assert log.ended(1)
    assert not log.ended(0)
    assert not line.log


def test_waiting_for_a_queue_of_version_1_which_cannot_be_sealed_costs_no_more_requests() -> None:
    line = FaultyStore(PlainStore())
    queue = open_queue(line)
    asked = []
    for wait in (queue.wait, lambda past, timeout: wait_for_more(queue, past, timeout)):
        start = queue.start()
        line.log.clear()
        wait(start, 0.0)
        asked.append([call.name for call in line.log])
    assert asked[0] == asked[1] != []
