"""Arguments of watches and stores: a batching without a window, a folder as text or as a path object."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from strandline.followers.engine import Engine
from strandline.followers.events import Batching
from strandline.followers.stores.append_log import AppendLogStore
from strandline.followers.stores.rocks import RocksStore
from strandline.followers.watch.run import AppliedWatch
from strandline.kv.memory import MemoryKeyValue
from strandline.model.cursor import Cursor
from strandline.model.keyed import Update, Updates
from strandline.model.records import Op
from strandline.storage.env import SYSTEM

STREAM = UUID(int=1)


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
        watch = AppliedWatch(MemoryKeyValue(), print, None, None, None, SYSTEM, asyncio.run, batching=batching)
        return watch.engine._window

    assert Engine(Batching(records=4))._window == 1.0
    assert window(Batching(records=4)) == 0.01
    assert window(Batching(records=4, window=0.5)) == 0.5
