"""Contract suite of stores with keyed state that export and import snapshots."""
# ruff: noqa: D102 - the name of a test is its sentence, and its numbers are its example

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strandline.errors import AlreadyExists, NotReady
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA
from strandline.model.sink import Store, StorePosition
from strandline.testing.keyed_stores import DurableStoreContract, content
from strandline.testing.sinks import DELETE, LOG, Change


class ExportingStoreContract(DurableStoreContract):
    """The sentences about snapshots."""

    @abstractmethod
    def import_from(self, snapshot: str, dest: str) -> Store:
        """Open a store made from a snapshot; the fixture ``sink`` closes it, too."""

    def test_an_export_holds_exactly_what_is_below_its_cursor(self, store: Store, tmp_path: Path) -> None:
        self.apply(store, 0, (b"a", b"1"), (b"b", b"2"))
        at = self.apply(store, 2, (b"a", DELETE), (b"c", b"3"))
        snapshot = store.export_to(str(tmp_path / "snapshot"))
        assert snapshot.cursor == at
        self.apply(store, 4, (b"b", b"later"))
        made = self.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
        assert made.position() == StorePosition(at)
        assert content(made) == {b"b": b"2", b"c": b"3"}
        assert content(store) == {b"b": b"later", b"c": b"3"}

    def test_an_imported_store_follows_on_from_its_cursor(self, store: Store, tmp_path: Path) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.export_to(str(tmp_path / "snapshot"))
        made = self.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
        upto = self.apply(made, 1, (b"b", b"2"))
        again = self.reopen(made)
        assert again.cursor(LOG) == upto
        assert content(again) == {b"a": b"1", b"b": b"2"}

    def test_an_export_into_an_occupied_folder_is_refused_and_changes_nothing(
        self, store: Store, tmp_path: Path
    ) -> None:
        self.apply(store, 0, (b"a", b"1"))
        occupied = tmp_path / "occupied"
        occupied.mkdir()
        (occupied / "here").write_bytes(b"already")
        with pytest.raises(AlreadyExists):
            store.export_to(str(occupied))
        assert [path.name for path in occupied.iterdir()] == ["here"]
        self.apply(store, 1, (b"b", b"2"))
        assert content(store) == {b"a": b"1", b"b": b"2"}

    def test_an_empty_folder_takes_an_export(self, store: Store, tmp_path: Path) -> None:
        self.apply(store, 0, (b"a", b"1"))
        (tmp_path / "empty").mkdir()
        store.export_to(str(tmp_path / "empty"))
        assert content(self.import_from(str(tmp_path / "empty"), str(tmp_path / "made"))) == {b"a": b"1"}

    def test_a_store_without_cursor_is_not_ready_to_be_exported(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(NotReady):
            store.export_to(str(tmp_path / "snapshot"))
        assert not (tmp_path / "snapshot").exists()

    def test_a_store_of_a_cursor_and_no_keys_can_be_exported(self, store: Store, tmp_path: Path) -> None:
        cursor = Cursor(LOG, 40)
        store.apply(READ_SCHEMA.empty_table(), since=cursor, upto=cursor)
        assert store.export_to(str(tmp_path / "snapshot")).cursor == cursor
        made = self.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
        assert made.position() == StorePosition(cursor)
        assert content(made) == {}

    def test_an_import_into_an_occupied_folder_is_refused(self, store: Store, tmp_path: Path) -> None:
        self.apply(store, 0, (b"a", b"1"))
        store.export_to(str(tmp_path / "snapshot"))
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "here").write_bytes(b"already")
        with pytest.raises(AlreadyExists):
            self.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
        assert [path.name for path in (tmp_path / "made").iterdir()] == ["here"]

    def test_reads_and_writes_go_on_while_an_export_is_made(self, store: Store, tmp_path: Path) -> None:
        rows: list[Change] = [(b"k%04d" % number, b"%d" % number) for number in range(500)]
        self.apply(store, 0, *rows)
        offset = first = len(rows)
        with ThreadPoolExecutor(1) as pool:
            exporting = pool.submit(store.export_to, str(tmp_path / "snapshot"))
            while not exporting.done() and offset < 10 * first:
                self.apply(store, offset, *((key, b"%d" % offset) for key, _ in rows[:10]))
                assert store.get(b"k0000") == b"%d" % offset
                offset += 10
        at = exporting.result().cursor
        made = self.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
        assert made.cursor(LOG) == at
        assert first <= at.next <= offset
        assert made.get(b"k0000") == (b"0" if at.next == first else b"%d" % (at.next - 10))
        assert len(content(made)) == first
