"""Spark keeps a table in step with a replicated log of two tiers while the nodes that lead it are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import strandline as sl
from strandline.errors import StrandlineError
from tests.node.flight.recording_client import Recorder, check, mark_in
from tests.node.processes import ClusterOfProcesses, Nest

BUSY = {"pause": 0.02, "linger": 0.0, "target": 2000}
"""Settings of a tierer that copies all the time."""
AVAILABLE = {"availableNow": True}
PATIENCE = 240.0


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_table_follows_exactly_while_primaries_are_killed_and_records_move_to_the_cold_tier(
    nest: Nest, tmp_path: Path, spark: Any
) -> None:
    settings: dict[str, Any] = {"cold": (tmp_path / "cold").as_uri(), "tiering": BUSY, "retention": "consumed"}
    with ClusterOfProcesses(nest, tmp_path, automatic=True, **settings) as cluster:
        cluster.begin()
        with sl.open(cluster.url) as log, Recorder(cluster) as recorder:
            recorder.more()
            for _ in range(2):
                followed(spark, log, tmp_path / "table")
                old = cluster.leader()
                following = sl.spark.follow(spark, log, sink(tmp_path / "table"), slot="billing", trigger=AVAILABLE)
                cluster.kill(old)  # while it plans, reads or commits
                ended(following)
                recorder.more()
                cluster.start(old)
                recorder.more()
        with sl.open(cluster.url) as log:
            cluster.settled()
            followed(spark, log, tmp_path / "table")
        found = check(cluster, recorder, tiered=True)
    rows = DeltaTable(str(tmp_path / "table")).to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
    assert rows["offset"].to_pylist() == list(range(len(found)))
    assert [mark_in(value) for value in rows["value"].to_pylist()] == found


def sink(table: Path) -> sl.DeltaSink:
    return sl.DeltaSink(table, mode="append")


def ended(following: Any) -> bool:
    """Whether it came to its end; a failure that can be repeated ends it, too."""
    try:
        return bool(following.await_termination(PATIENCE))
    except StrandlineError as error:
        if not error.retryable:
            raise
        return False


def followed(spark: Any, log: Any, table: Path) -> None:
    """Follow to the end as of now, as a job does that is repeated until it succeeds."""
    for _ in range(10):
        try:
            following = sl.spark.follow(spark, log, sink(table), slot="billing", trigger=AVAILABLE)
        except StrandlineError as error:
            if not error.retryable:
                raise
            continue
        if ended(following):
            return
    raise AssertionError("It never came to its end.")
