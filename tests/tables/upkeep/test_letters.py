"""Upkeep of dead-letter tables: small files are joined, and no letter is lost, doubled, or shown too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.tables.files import letters as letter_box
from strandline.tables.files import sink as file_sink
from strandline.tables.files import upkeep, upkeep_rounds
from strandline.tables.files.letters import LetterBox
from strandline.testing.crashing import crashing_at, interrupted

FEW = 4
"""Files that are joined, instead of 32."""
NARROW = sl.values.Json(pa.schema({"id": pa.int64(), "extra": pa.int64()}))
CORRECTED = sl.values.Json(pa.schema({"id": pa.int64()}))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (upkeep, upkeep_rounds):
        monkeypatch.setattr(module, "FEW", FEW)


class Shop:
    """A log whose every second record is bad, and a table of it with dead letters and upkeep."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.log = sl.open(str(folder / "log"), create=True)
        if kind == "iceberg":
            (folder / "warehouse").mkdir()
            self.catalog = SqlCatalog("c", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")

    def sink(self, value: Any = NARROW, table: str = "orders", **more: Any) -> Any:
        options = {"mode": "append", "value": value, "layout": sl.tables.Layout(upkeep="auto"), **more}
        if self.kind == "delta":
            return sl.DeltaSink(str(self.folder / table), dead_letters=str(self.folder / "letters"), **options)
        return sl.IcebergSink(self.catalog, f"shop.{table}", dead_letters="shop.letters", **options)

    def grow(self, *sinks: Any, commits: int = FEW) -> None:
        for _ in range(commits):
            number = self.log.end().next
            with self.log.producer() as producer:
                producer.append(key=b"a", value=json.dumps({"id": number}).encode())
                producer.append(key=b"b", value=json.dumps({"id": number + 1, "extra": "no number"}).encode())
            for sink in sinks:
                sl.follow(self.log, sink, upto="end")

    def files(self, sink: Any) -> int:
        box = sink._letters("")
        return len(box.sizes(box.open()))

    def check(self, sink: Any, letters: int) -> None:
        found = sl.tables.letters(sink, self.log)
        assert [one["offset"] for one in found.to_pylist()] == [2 * at + 1 for at in range(letters)]
        assert sl.tables.verify(sink, self.log).is_clean


@pytest.fixture(params=["delta", "iceberg"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(request.param, tmp_path)


def test_small_files_of_letters_are_joined_and_each_letter_is_replayed_once(shop: Shop) -> None:
    sink = shop.sink()
    shop.grow(sink, commits=FEW + 2)
    assert sink.upkeep.failures == 0, sink.upkeep.error
    assert sink.upkeep.joins >= 2, "of the table, and of its letters"
    assert shop.files(sink) <= FEW
    shop.check(sink, FEW + 2)
    replayed = sl.tables.replay_letters(shop.sink(CORRECTED), shop.log)
    assert replayed.applied == FEW + 2
    assert sorted(sink.rows()["id"].to_pylist()) == [*range(2 * FEW + 4)]
    assert shop.files(sink) == 0


@pytest.mark.matrix
def test_a_kill_around_the_join_of_letters_loses_and_doubles_none(shop: Shop) -> None:
    sink = shop.sink()
    shop.grow(sink, commits=FEW - 2)
    for step in ("joined_files", "join_letters"):
        owner = letter_box if step == "joined_files" else file_sink
        with crashing_at(owner, step) as reached:
            shop.grow(shop.sink(), commits=FEW)
        sl.follow(shop.log, shop.sink(), upto="end")
        assert reached, step
        shop.check(shop.sink(), shop.log.end().next // 2)
    shop.grow(shop.sink(), commits=FEW)
    shop.check(shop.sink(), shop.log.end().next // 2)


def test_a_replay_beside_the_join_of_letters_applies_each_once(shop: Shop) -> None:
    sink = shop.sink()
    shop.grow(sink, commits=FEW - 2)
    replayed = []

    def replays() -> None:
        replayed.append(sl.tables.replay_letters(shop.sink(CORRECTED), shop.log).applied)

    with interrupted(letter_box, "joined_files", replays, after=True) as reached:
        shop.grow(sink, commits=4)
    assert reached
    assert sink.upkeep.failures == 1, "its letters were removed meanwhile"
    left = sl.tables.letters(sink, shop.log).num_rows
    assert replayed[0] + left == FEW + 2
    assert sl.tables.replay_letters(shop.sink(CORRECTED), shop.log).applied == left
    ids = sorted(sink.rows()["id"].to_pylist())
    assert ids == [*range(2 * FEW + 4)]


def test_two_tables_that_share_letters_join_their_own(tmp_path: Path) -> None:
    shop = Shop("delta", tmp_path)
    one, other = shop.sink(), shop.sink(table="other")
    shop.grow(one, other, commits=FEW + 2)
    assert one.upkeep.failures == other.upkeep.failures == 0
    assert shop.files(one) <= 2 * FEW
    shop.check(one, FEW + 2)
    shop.check(other, FEW + 2)


def test_letters_that_an_interrupted_rebuild_has_left_are_joined_and_count_once(shop: Shop) -> None:
    sink = shop.sink()
    shop.grow(sink, commits=FEW - 1)
    with crashing_at(LetterBox, "commit", after=True) as reached:
        sl.tables.rebuild(shop.sink(), shop.log)
    assert reached
    shop.check(shop.sink(), FEW - 1)
    sink = shop.sink()
    shop.grow(sink, commits=FEW)
    assert sink.upkeep.failures == 0, sink.upkeep.error
    assert shop.files(sink) <= FEW
    shop.check(shop.sink(), 2 * FEW - 1)
    assert sl.tables.replay_letters(shop.sink(CORRECTED), shop.log).applied == 2 * FEW - 1
    assert sorted(sink.rows()["id"].to_pylist()) == [*range(4 * FEW - 2)]
