"""Tables whose followers look after them, for tests: short runs, the files on disk, and clocks that are ahead."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

import strandline as sl
from strandline.model.cursor import Cursor
from strandline.storage.env import Env
from strandline.tables.delta import commits
from strandline.tables.files import upkeep, upkeep_rounds
from strandline.tables.files.sink import FileTableSink
from strandline.testing.clock import ManualClock
from strandline.testing.sinks import LOG, Change, changes, folded

KEPT = sl.tables.Layout(upkeep="auto")
FEW, TRIM_EVERY, CHECKPOINT = 8, 16, 5
"""A quarter of what tables have: files of a join, versions between two trims, and between two checkpoints."""
YEAR = 365 * 86_400 * 1_000_000


def row(offset: int) -> Change:
    """The change at an offset: 7 keys in turn."""
    return b"%d" % (offset % 7), b"value-%d" % offset


def looked_after_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have joins, trims and checkpoints after a quarter of the commits: each kind of round without so many of them."""
    for module in (upkeep, upkeep_rounds):
        monkeypatch.setattr(module, "FEW", FEW)
    monkeypatch.setattr(upkeep_rounds, "TRIM_EVERY", TRIM_EVERY)
    monkeypatch.setattr(commits, "_CHECKPOINTS", {"delta.checkpointInterval": str(CHECKPOINT)})


def later() -> Env:
    """A machine whose clock is a year ahead: all that was replaced is older than any retention."""
    return Env(clock=ManualClock(now=time.time_ns() // 1000 + YEAR))


@dataclass
class KeptTable(ABC):
    """A table of 7 keys that is followed by short runs."""

    folder: Path
    mode: Any = "append"

    @abstractmethod
    def sink(self, **options: Any) -> FileTableSink:
        """A sink of another process; with ``layout=KEPT`` unless ``options`` say otherwise."""

    @abstractmethod
    def versions(self) -> list[int]:
        """The versions that the table has kept."""

    @abstractmethod
    def rows_at(self, version: int) -> int:
        """How many rows another reader finds in a version."""

    @abstractmethod
    def data_files(self) -> set[str]:
        """The data files on disk."""

    @abstractmethod
    def entries(self) -> set[str]:
        """The files of the history on disk."""

    def apply(self, sink: FileTableSink, upto: int) -> None:
        """One commit for each record that the table does not have yet."""
        at = sink.cursor(LOG)
        for offset in range(0 if at is None else at.next, upto):
            since = Cursor(LOG, offset)
            sink.apply(changes(offset, row(offset)), since=since, upto=since.at(offset + 1))

    def followed(self, upto: int, **options: Any) -> FileTableSink:
        """The sink of a run that has applied the records below an offset."""
        sink = self.sink(**options)
        sink.resume(LOG)
        self.apply(sink, upto)
        return sink

    def check(self, upto: int) -> None:
        """The table holds the log below an offset, each change once."""
        sink = self.sink(layout=None)
        cursor = sink.resume(LOG)
        assert cursor is not None
        assert cursor.next == upto
        rows, given = sink.rows(), [row(offset) for offset in range(upto)]
        found = sorted(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
        assert found == sorted(folded(given).items() if self.mode == "latest" else given)

    def check_versions(self) -> None:
        """Each version that the table still names is whole."""
        for version in self.versions():
            assert self.rows_at(version) >= 0


class KeptDelta(KeptTable):
    """A Delta table."""

    def sink(self, **options: Any) -> FileTableSink:
        return sl.DeltaSink(str(self.folder / "table"), mode=self.mode, **{"layout": KEPT, **options})

    def versions(self) -> list[int]:
        newest = DeltaTable(str(self.folder / "table")).version()
        commits = {int(name.partition(".")[0]) for name in self.entries() if name.endswith(".json")}
        checkpoints = {int(name.partition(".")[0]) for name in self.entries() if name.endswith(".checkpoint.parquet")}
        oldest = min(checkpoints) if 0 not in commits else 0
        return list(range(oldest, newest + 1))

    def rows_at(self, version: int) -> int:
        table = DeltaTable(str(self.folder / "table"), version=version)
        missing = [path for path in table.file_uris() if not Path(path).is_file()]
        assert not missing, f"version {version} has lost {missing}"
        return sum(table.get_add_actions(flatten=True)["num_records"].to_pylist())

    def data_files(self) -> set[str]:
        return {file.name for file in (self.folder / "table").glob("*.parquet")}

    def entries(self) -> set[str]:
        return {file.name for file in (self.folder / "table" / "_delta_log").iterdir() if file.name[0].isdigit()}


class KeptIceberg(KeptTable):
    """An Iceberg table."""

    @property
    def catalog(self) -> SqlCatalog:
        (self.folder / "warehouse").mkdir(exist_ok=True)
        return SqlCatalog(
            "kept", uri=f"sqlite:///{self.folder}/catalog.db", warehouse=f"file://{self.folder}/warehouse"
        )

    def sink(self, **options: Any) -> FileTableSink:
        return sl.IcebergSink(self.catalog, "shop.orders", mode=self.mode, **{"layout": KEPT, **options})

    def versions(self) -> list[int]:
        return [one.snapshot_id for one in self.catalog.load_table("shop.orders").metadata.snapshots]

    def rows_at(self, version: int) -> int:
        files = [one.file for one in self.catalog.load_table("shop.orders").scan(snapshot_id=version).plan_files()]
        missing = [file.file_path for file in files if not Path(file.file_path.removeprefix("file://")).is_file()]
        assert not missing, f"snapshot {version} has lost {missing}"
        return sum(file.record_count for file in files)

    def data_files(self) -> set[str]:
        return {file.name for file in (self.folder / "warehouse").rglob("data/*.parquet")}

    def entries(self) -> set[str]:
        return {file.name for file in (self.folder / "warehouse").rglob("metadata/*") if not file.name.startswith(".")}
