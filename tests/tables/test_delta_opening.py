"""Opening a Delta table: once for each commit, and its cost does not grow with the number of commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import deltalake
import pyarrow as pa
import pytest

from strandline.errors import Diverged
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.tables.delta.sink import DeltaSink

LOG = UUID(int=5)


def put(sink: DeltaSink, offset: int) -> None:
    row = {"offset": offset, "timestamp": 7, "op": 0, "key": b"%d" % (offset % 3), "value": b"v", "headers": None}
    records = pa.Table.from_pylist([row], schema=READ_SCHEMA)
    sink.apply(records, since=Cursor(LOG, offset), upto=Cursor(LOG, offset + 1))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that the library has opened."""
    found: list[str] = []
    original = deltalake.DeltaTable.__init__

    def counted(self: deltalake.DeltaTable, table_uri: str, **options: Any) -> None:
        found.append(table_uri)
        original(self, table_uri, **options)

    monkeypatch.setattr(deltalake.DeltaTable, "__init__", counted)
    return found


def test_a_trigger_opens_the_table_once(tmp_path: Path, opened: list[str]) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    put(sink, 0)
    for offset in range(1, 5):
        opened.clear()
        assert sink.cursor(LOG) == Cursor(LOG, offset)
        put(sink, offset)
        assert len(opened) == 1  # after the commit, which it proves


def test_a_new_table_has_a_checkpoint_every_twenty_commits(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    for offset in range(45):
        put(sink, offset)
    checkpoints = sorted(tmp_path.glob("table/_delta_log/*.checkpoint.parquet"))
    assert len(checkpoints) == 2


def test_a_commit_of_another_writer_is_seen_by_a_sink_that_has_the_table_open(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    put(sink, 0)
    deltalake.DeltaTable(tmp_path / "table").delete()
    with pytest.raises(Diverged):
        sink.cursor(LOG)


def test_a_table_that_was_created_again_with_as_many_commits_is_not_taken_for_the_open_one(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    for offset in range(3):
        put(sink, offset)
    (tmp_path / "table").rename(tmp_path / "old")
    other = DeltaSink(str(tmp_path / "table"))
    for offset in range(3):
        put(other, offset)
    with pytest.raises(Diverged):
        sink.cursor(LOG)
