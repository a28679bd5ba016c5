"""Everything that keeps a log in order goes on after its seal, and nothing takes the seal away or appends behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import strandline as sl
from strandline.errors import Sealed
from tests.contracts.logs import writer_named

SCHEMES = pytest.mark.parametrize("scheme", ["file", "wal"])
RECORDS = 6


def ended(tmp_path: Path, scheme: str) -> Any:
    options = {"retention": "consumed"} if scheme == "file" else {}
    log = sl.open(f"{scheme}://{tmp_path}/log", create=True, **options)
    for number in range(RECORDS):
        table = pa.table({"key": [b"k%d" % number], "value": [b"%d" % number]})
        log.append(table, writer=writer_named(1), number=number).result()
    log.seal()
    return log


@SCHEMES
def test_a_sealed_log_is_tiered_trimmed_verified_and_exported(tmp_path: Path, scheme: str) -> None:
    with ended(tmp_path, scheme) as log:
        sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
        log.slots.create("passing", 4)
        if scheme == "file":
            log.slots.claim("passing", "me", hot=True)
            log.trim()
        else:
            log.trim(4)
        log.slots.drop("passing")
        assert (log.bounds().first, log.bounds().next, log.bounds().sealed) == (4, RECORDS, True)
    with sl.open(f"{scheme}://{tmp_path}/log") as log:
        assert log.bounds() == sl.log.Bounds(0, RECORDS, sealed=True)
        assert log.ended(RECORDS)
        assert sum(batch.num_rows for batch in log.read("beginning")) == RECORDS
        assert sl.bulk.verify(log).is_clean
        assert sl.bulk.export(log, str(tmp_path / "export")).records == RECORDS
        store = sl.followers.MemoryStore()
        assert sl.follow(log, store).next == RECORDS
        assert len(list(store.range())) == RECORDS
        with pytest.raises(Sealed):
            log.append(pa.table({"value": [b"late"]}), writer=writer_named(1), number=RECORDS)


def test_a_load_into_a_sealed_log_is_refused_and_lists_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"key": "a", "value": "1"}\n')
    with ended(tmp_path, "file") as log:
        with pytest.raises(Sealed):
            sl.bulk.load(str(rows), log, job="backfill")
        assert log.bounds().next == RECORDS


@SCHEMES
def test_a_repeated_ingest_into_a_sealed_log_that_has_it_all_is_no_error(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "from").mkdir()
    with ended(tmp_path / "from", "wal") as source, sl.open(f"{scheme}://{tmp_path}/log", create=True) as target:
        assert sl.ingest(source, target).records == RECORDS
        target.seal()
        assert sl.ingest(source, target).records == 0
