"""The Delta sink: the contract of sinks in both modes, and the rules of tables."""

import json
import shutil
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from strandline.errors import Diverged, Fenced, InvalidInput, NullKey, StorageError
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op
from strandline.storage.disk import LocalDisk
from strandline.storage.env import Env
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.delta.table import FollowedDelta
from strandline.tables.files.part import TablePart
from strandline.tables.rows.kinds import RAW, in_offset_order, newest_per_key
from strandline.testing.sinks import DELETE, LOG, changes
from tests.contracts.tables import TableContract


def table_of(sink):
    return pa.table(DeltaTable(sink.url).to_pyarrow_table())


def sleep_after_looking(sink, monkeypatch):
    """Let the next read of the sink return the table as it is now, even if it changes meanwhile."""
    looks = [sink._followed.open()]
    look = sink._followed.open
    monkeypatch.setattr(sink._followed, "open", lambda: looks.pop() if looks else look())


class _Contract(TableContract):
    steps = (
        (DeltaCommits, "created"),
        (FollowedDelta, "open"),
        (FollowedDelta, "last_commit"),
        (TablePart, "write"),
        (DeltaCommits, "commit"),
        (DeltaCommits, "_settle"),
        (FollowedDelta, "make_durable"),
    )

    def again(self, sink):
        return DeltaSink(sink.url, mode=sink.mode)

    def offsets(self, sink):
        return table_of(sink)["offset"].to_pylist()


class TestLatest(_Contract):
    @pytest.fixture
    def sink(self, tmp_path):
        return DeltaSink(str(tmp_path / "table"))

    def content(self, sink):
        table = table_of(sink)
        rows = dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        assert len(rows) == table.num_rows, "a key has two rows"
        return rows

    def test_a_record_without_key_is_refused_with_its_position_and_nothing_is_applied(self, sink):
        at = self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(NullKey, match="offset 2 has no key"):
            self.apply(sink, 1, (b"b", b"2"), (None, b"3"), (None, b"4"))
        assert sink.cursor(LOG) == at
        assert self.content(sink) == {b"a": b"1"}

    def test_offset_timestamp_and_headers_come_along(self, sink):
        record = changes(7, (b"a", b"1"))
        headers = pa.array([{"source": b"x"}], record.schema.field("headers").type)
        record = record.set_column(5, READ_SCHEMA.field("headers"), headers)
        sink.apply(record, since=Cursor(LOG, 7), upto=Cursor(LOG, 8))
        (row,) = table_of(sink).to_pylist()
        assert row["offset"] == 7
        assert row["timestamp"].microsecond == 7
        assert row["headers"] == [("source", b"x")]

    def test_a_purge_removes_like_a_delete(self, sink):
        self.apply(sink, 0, (b"a", b"1"))
        purge = changes(1, (b"a", DELETE))
        purge = purge.set_column(2, READ_SCHEMA.field("op"), pa.array([int(Op.PURGE)], pa.int8()))
        sink.apply(purge, since=Cursor(LOG, 1), upto=Cursor(LOG, 2))
        assert self.content(sink) == {}

    def test_of_two_followers_one_of_which_has_nothing_to_change_only_one_commits(self, sink, monkeypatch):
        self.apply(sink, 0, (b"a", b"1"))
        slow = DeltaSink(sink.url)
        sleep_after_looking(slow, monkeypatch)
        self.apply(sink, 1, (b"b", b"2"))
        with pytest.raises(Fenced, match="one follower per table"):
            self.apply(slow, 1, (b"absent", DELETE), (b"absent too", DELETE))
        assert sink.cursor(LOG) == Cursor(LOG, 2)
        assert self.content(sink) == {b"a": b"1", b"b": b"2"}

    def test_two_followers_that_looked_at_the_same_table_cannot_both_commit(self, sink, monkeypatch):
        self.apply(sink, 0, (b"a", b"1"))
        slow = DeltaSink(sink.url)
        sleep_after_looking(slow, monkeypatch)
        self.apply(sink, 1, (b"b", b"2"))
        with pytest.raises(Fenced, match="one follower per table"):
            self.apply(slow, 1, (b"b", b"2"), (b"c", b"3"))
        assert sink.cursor(LOG) == Cursor(LOG, 2)
        assert self.content(sink) == {b"a": b"1", b"b": b"2"}

    def test_a_stale_follower_that_looks_again_finds_nothing_to_do(self, sink):
        self.apply(sink, 0, (b"a", b"1"), (b"b", b"2"))
        version = DeltaTable(sink.url).version()
        self.apply(DeltaSink(sink.url), 0, (b"a", b"1"))
        assert DeltaTable(sink.url).version() == version

    def test_two_creators_of_one_table_cannot_both_create_it(self, sink, monkeypatch):
        slow = DeltaSink(sink.url)
        sleep_after_looking(slow, monkeypatch)
        self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(Fenced):
            self.apply(slow, 0, (b"a", b"2"))
        assert self.content(sink) == {b"a": b"1"}

    def test_a_creator_whose_table_is_committed_to_by_another_at_once_is_fenced(self, sink, monkeypatch):
        create = DeltaTable.create

        def created_and_used(*arguments, **options):
            table = create(*arguments, **options)
            self.apply(DeltaSink(sink.url), 0, (b"a", b"1"))
            table.update_incremental()
            return table

        monkeypatch.setattr(DeltaTable, "create", created_and_used)
        with pytest.raises(Fenced):
            self.apply(sink, 0, (b"a", b"1"))
        assert DeltaTable(sink.url).version() == 1

    def test_a_table_that_is_not_ours_is_diverged_and_left_alone(self, sink, tmp_path):
        write_deltalake(sink.url, pa.table({"x": [1]}))
        with pytest.raises(Diverged, match="no log at all"):
            self.apply(sink, 0, (b"a", b"1"))
        assert table_of(sink).column_names == ["x"]

    def test_another_mode_than_the_tables_is_refused(self, sink):
        self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(InvalidInput, match="mode 'latest'"):
            DeltaSink(sink.url, mode="append").cursor(LOG)

    def test_an_unknown_mode_is_refused(self):
        with pytest.raises(InvalidInput, match="'latest', 'marked', 'append' or 'history'"):
            DeltaSink("x", mode="newest")

    def test_a_commit_is_on_disk_before_apply_returns(self, tmp_path):
        synced = []

        class Watching(LocalDisk):
            def sync_file(self, path):
                synced.append(path)
                super().sync_file(path)

            def sync_folder(self, path):
                synced.append(path)
                super().sync_folder(path)

        sink = DeltaSink(str(tmp_path / "table"), env=Env(disk=Watching()))
        self.apply(sink, 0, (b"a", b"1"))
        root = tmp_path / "table"
        newest = max((root / "_delta_log").glob("*.json"))
        added = [json.loads(line)["add"]["path"] for line in newest.read_text().splitlines() if '"add"' in line]
        assert added
        assert {str(root / path) for path in added} | {str(newest), str(root), str(newest.parent)} <= set(synced)

    def test_a_removed_table_is_a_newcomer_again_for_a_follower_that_starts(self, sink):
        self.apply(sink, 0, (b"a", b"1"))
        shutil.rmtree(sink.url)
        assert sink.resume(LOG) is None
        assert DeltaSink(sink.url).cursor(LOG) is None

    def test_a_table_that_cannot_be_written_raises_and_stays(self, sink, monkeypatch):
        at = self.apply(sink, 0, (b"a", b"1"))

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(DeltaTable, "create_write_transaction", full)
        with pytest.raises(StorageError, match="stays at its cursor"):
            self.apply(sink, 1, (b"a", b"2"))
        monkeypatch.undo()
        assert sink.cursor(LOG) == at
        assert self.content(sink) == {b"a": b"1"}

    def test_a_file_address_is_the_same_table_as_its_path(self, sink):
        self.apply(sink, 0, (b"a", b"1"))
        assert DeltaSink(Path(sink.url).as_uri()).cursor(LOG) == Cursor(LOG, 1)

    def test_sinks_of_another_name_do_not_share_a_table(self, sink):
        self.apply(sink, 0, (b"a", b"1"))
        with pytest.raises(Diverged):
            DeltaSink(sink.url, name="other").cursor(LOG)


class TestAppend(_Contract):
    keeps_all = True

    @pytest.fixture
    def sink(self, tmp_path):
        return DeltaSink(str(tmp_path / "table"), mode="append")

    def content(self, sink):
        state = {}
        table = table_of(sink).sort_by("offset")
        assert table["offset"].to_pylist() == sorted(set(table["offset"].to_pylist())), "an offset is there twice"
        for row in table.to_pylist():
            if row["op"] == Op.PUT:
                state[row["key"]] = row["value"]
            else:
                state.pop(row["key"], None)
        return state

    def test_every_change_is_kept_also_without_key(self, sink):
        self.apply(sink, 0, (b"a", b"1"), (b"a", DELETE), (None, b"3"), (b"a", None))
        table = table_of(sink).sort_by("offset")
        assert table.schema.names == READ_SCHEMA.names
        assert table["op"].to_pylist() == [0, 1, 0, 0]
        assert table["key"].to_pylist() == [b"a", b"a", None, b"a"]

    def test_a_stale_appender_is_refused(self, sink, monkeypatch):
        self.apply(sink, 0, (b"a", b"1"))
        slow = DeltaSink(sink.url, mode="append")
        sleep_after_looking(slow, monkeypatch)
        self.apply(sink, 1, (b"b", b"2"))
        with pytest.raises(Fenced):
            self.apply(slow, 1, (b"b", b"2"))
        assert table_of(sink).num_rows == 2


def test_the_newest_record_of_each_key_is_found_in_any_order():
    table = changes(0, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", DELETE))
    shuffled = table.take([2, 0, 3, 1])
    assert newest_per_key(in_offset_order([shuffled], RAW))["offset"].to_pylist() == [2, 3]


def test_a_log_of_another_identity_finds_no_cursor_in_the_table(tmp_path):
    sink = DeltaSink(str(tmp_path / "table"))
    sink.apply(changes(0, (b"a", b"1")), since=Cursor(LOG, 0), upto=Cursor(LOG, 1))
    with pytest.raises(Diverged, match=str(LOG)):
        sink.cursor(UUID(int=99))
