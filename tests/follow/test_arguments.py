"""Arguments that can never work are refused at the door, alike in all buckets and stores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import strandline as sl
from strandline.follow.engine import Engine
from strandline.follow.keyed.log import LogBucket
from strandline.follow.keyed.memory import MemoryBucket
from strandline.follow.steps import Batching
from strandline.follow.stores.appendlog import AppendLogStore
from strandline.follow.stores.memory import MemoryStore
from strandline.follow.stores.rocks import RocksStore
from strandline.follow.watching import Options, Watch
from strandline.model.cursor import Cursor
from strandline.model.errors import InvalidInput
from strandline.model.keyed import Update, Updates
from strandline.model.records import Op
from strandline.storage.ambient import CLOCK

STREAM = UUID(int=1)


@pytest.fixture(params=["memory", "log"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryBucket() if request.param == "memory" else LogBucket(sl.open(str(tmp_path / "log"), create=True))


@pytest.mark.parametrize("value", ["text", None, 7])
def test_a_bucket_takes_no_value_but_bytes_and_stays_in_step_with_its_folds(bucket: Any, value: Any) -> None:
    version = bucket.put("a", b"1")
    for call in (
        lambda: bucket.put("a", value),
        lambda: bucket.create("b", value),
        lambda: bucket.update("a", value, version),
    ):
        with pytest.raises(InvalidInput, match="bytes"):
            call()
    bucket.put("a", b"2")
    store = MemoryStore()
    with bucket.watch() as watch:
        taken = watch.take(10, 10)
        store.apply(taken, since=Cursor(taken.upto.log_id, 0), upto=taken.upto)
    assert dict(store.range()) == {entry.key: entry.value for entry in bucket.scan()} == {b"a": b"2"}


@pytest.mark.parametrize("key", [None, 7])
def test_a_bucket_takes_no_key_but_bytes_and_text(bucket: Any, key: Any) -> None:
    for call in (lambda: bucket.put(key, b"1"), lambda: bucket.get(key), lambda: bucket.delete(key)):
        with pytest.raises(InvalidInput, match="bytes"):
            call()


@pytest.fixture(params=["memory", "appendlog", "rocks"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kinds = {"memory": MemoryStore, "appendlog": lambda: AppendLogStore.open(tmp_path / "fold")}
    opened = kinds.get(request.param, lambda: RocksStore.open(tmp_path / "fold"))()
    with opened:
        yield opened


def test_a_store_asked_for_text_does_not_say_that_it_is_absent(store: Any) -> None:
    start = Cursor(STREAM, 0)
    store.apply(Updates.of([Update(Op.PUT, b"text", b"1", 0)], start), since=start, upto=Cursor(STREAM, 1))
    assert store.get(b"text") == b"1"
    for call in (lambda: store.get("text"), lambda: store.get(None), lambda: store.range("te")):
        with pytest.raises(InvalidInput, match="bytes"):
            call()


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore])
def test_a_store_is_opened_by_path_or_text_alike(kind: Any, tmp_path: Path) -> None:
    start = Cursor(STREAM, 0)
    with kind.open(tmp_path / "fold") as store:
        store.apply(Updates.of([Update(Op.PUT, b"a", b"1", 0)], start), since=start, upto=Cursor(STREAM, 1))
        store.export_to(str(tmp_path / "snapshot"))
    with kind.open(str(tmp_path / "fold")) as again:
        assert again.get(b"a") == b"1"
    with kind.import_from(tmp_path / "snapshot", tmp_path / "copy") as copy:
        assert copy.get(b"a") == b"1"


def test_a_batching_that_names_no_window_leaves_the_usual_one() -> None:
    def window(batching: Batching) -> float:
        watch = Watch(MemoryBucket(), print, None, None, Options(batching=batching), None, CLOCK, asyncio.run)
        return watch.engine._window

    assert Engine(Batching(records=4))._window == 1.0
    assert window(Batching(records=4)) == 0.01
    assert window(Batching(records=4, window=0.5)) == 0.5
