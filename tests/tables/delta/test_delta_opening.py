"""Opening a Delta table: once for each commit, and its cost does not grow with the number of commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import deltalake
import pyarrow as pa
import pytest

from strandline.errors import CorruptData, Diverged
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.storage.disk import LocalDisk
from strandline.storage.env import Env
from strandline.tables.delta.commits import DeltaCommits
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


@pytest.mark.matrix
def test_a_new_table_has_a_checkpoint_every_twenty_commits(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    for offset in range(45):
        put(sink, offset)
    checkpoints = sorted(tmp_path.glob("table/_delta_log/*.checkpoint.parquet"))
    assert len(checkpoints) == 2


class Watching(LocalDisk):
    """A disk that remembers the names of the files that were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync_file(self, path: str) -> None:
        self.synced.append(Path(path).name)
        super().sync_file(path)


def test_a_checkpoint_is_synced_with_its_commit(tmp_path: Path) -> None:
    disk = Watching()
    sink = DeltaSink(str(tmp_path / "table"), mode="append", env=Env(disk=disk))
    for offset in range(22):
        put(sink, offset)
    (checkpoint,) = tmp_path.glob("table/_delta_log/*.checkpoint.parquet")
    assert {checkpoint.name, "_last_checkpoint"} <= set(disk.synced)


def test_a_commit_whose_process_died_before_its_sync_is_synced_before_its_cursor_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: Any) -> None:
        raise KeyboardInterrupt

    put(DeltaSink(str(tmp_path / "table")), 0)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaCommits, "_settle", died)
        with pytest.raises(KeyboardInterrupt):
            put(DeltaSink(str(tmp_path / "table")), 1)
    disk = Watching()
    assert DeltaSink(str(tmp_path / "table"), env=Env(disk=disk)).cursor(LOG) == Cursor(LOG, 2)
    assert f"{2:020d}.json" in disk.synced
    assert any(name.endswith(".parquet") for name in disk.synced)


@pytest.mark.matrix
@pytest.mark.parametrize("rest", [None, 0, 100])
def test_a_damaged_checkpoint_is_an_error_that_says_how_the_table_can_be_opened_again(
    tmp_path: Path, rest: int | None
) -> None:
    for offset in range(22):
        put(DeltaSink(str(tmp_path / "table")), offset)
    (checkpoint,) = tmp_path.glob("table/_delta_log/*.checkpoint.parquet")
    if rest is None:
        checkpoint.unlink()
    else:
        checkpoint.write_bytes(checkpoint.read_bytes()[:rest])
    with pytest.raises(CorruptData, match="remove it and _last_checkpoint from _delta_log"):
        put(DeltaSink(str(tmp_path / "table")), 22)
    checkpoint.unlink(missing_ok=True)
    checkpoint.with_name("_last_checkpoint").unlink()
    put(DeltaSink(str(tmp_path / "table")), 22)
    assert DeltaSink(str(tmp_path / "table")).cursor(LOG) == Cursor(LOG, 23)


def test_a_compaction_does_not_move_the_handle_on_which_a_follower_is_about_to_commit(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"), mode="append")
    for offset in range(3):
        put(sink, offset)
    begun = sink.begin(since=Cursor(LOG, 3), upto=Cursor(LOG, 4), tasks=1)
    assert begun is not None
    assert begun.version.table is not None
    sink.optimized()
    assert deltalake.DeltaTable(tmp_path / "table").version() > 3
    assert begun.version.table.version() == 3


def test_a_commit_of_another_writer_is_seen_by_a_sink_that_has_the_table_open(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "table"))
    put(sink, 0)
    deltalake.DeltaTable(tmp_path / "table").delete()
    with pytest.raises(Diverged, match=r"Version 2 .* was not committed by its follower"):
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
