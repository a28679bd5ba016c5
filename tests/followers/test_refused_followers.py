"""A follower that is refused before it has stored anything leaves no table, no slot and no pin."""

import contextlib
import os

import pytest
from deltalake import DeltaTable

from strandline.errors import (
    CursorExpired,
    Diverged,
    Fenced,
    InvalidInput,
    MissingExtra,
    NullKey,
    SlotInvalid,
    StorageError,
    StrandlineError,
)
from strandline.followers.committer import SinkCommitter
from strandline.followers.run import Batching, follow
from strandline.log.memory import MemoryLog
from strandline.log.object import open_log
from strandline.model.cursor import Cursor
from strandline.model.retention import SlotLimits
from strandline.tables.delta import table as delta
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.sink import DeltaSink
from strandline.testing.sinks import MemorySink, changes
from tests.tables.delta.commits import around_commits
from tests.tables.maintain.test_table_recovery import fill

ROWS = [(b"a", b"1"), (b"b", b"2"), (None, b"3"), (b"c", b"4")]


@pytest.fixture
def log():
    log = MemoryLog()
    fill(log, ROWS)
    return log


@pytest.fixture
def table(tmp_path):
    return str(tmp_path / "table")


def assert_nothing_is_left(log, table):
    assert log.slots.list() == []
    assert log.slots.floor() is None
    assert not os.path.exists(table)


def test_records_without_key_leave_neither_a_table_nor_a_slot(log, table):
    with pytest.raises(NullKey):
        follow(log, DeltaSink(table), "s", upto="end")
    assert_nothing_is_left(log, table)


def without_the_extra():
    raise MissingExtra("Delta tables need the extra 'delta'.")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start": "middle"}, InvalidInput),
        ({"start": 99}, Diverged),
        ({"start": Cursor(MemoryLog().log_id, 0)}, Diverged),
        ({"upto": "end", "batching": "much"}, InvalidInput),
    ],
)
def test_a_refused_follower_leaves_neither_a_table_nor_a_slot(log, table, options, error):
    with pytest.raises(error):
        follow(log, DeltaSink(table), "s", **{"upto": "end", **options})
    assert_nothing_is_left(log, table)


def test_a_missing_extra_leaves_neither_a_table_nor_a_slot(log, table, monkeypatch):
    monkeypatch.setattr(delta, "deltalake_library", without_the_extra)
    with pytest.raises(MissingExtra):
        follow(log, DeltaSink(table), "s", upto="end")
    assert_nothing_is_left(log, table)


@pytest.mark.parametrize("start", ["beginning", "now"])
def test_a_table_that_cannot_be_created_leaves_no_slot(log, tmp_path, start):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        follow(log, DeltaSink(str(tmp_path / "file" / "table"), mode="append"), "s", start=start, upto="end")
    assert log.slots.list() == []


def test_a_name_that_no_slot_can_have_leaves_no_table(log, table):
    with pytest.raises(StrandlineError):
        follow(log, DeltaSink(table), "a/b", upto="end")
    assert_nothing_is_left(log, table)


def test_a_slot_that_was_there_before_stays_as_it_was(log, table):
    before = log.slots.create("s", 3)
    with pytest.raises(NullKey):
        follow(log, DeltaSink(table), "s", upto="end")
    assert (log.slots.get("s").position, log.slots.get("s").holder) == (before.position, None)
    assert not os.path.exists(table)


def test_a_slot_that_was_used_before_is_put_back_if_a_rebuild_is_refused(log, table):
    follow(log, MemorySink(), "s", upto="end")
    with pytest.raises(NullKey):
        follow(log, DeltaSink(table), "s", upto="end")
    assert log.slots.get("s").position == 4


def test_an_invalidated_slot_is_reported_before_a_table_is_created(table, tmp_path):
    log = open_log(str(tmp_path / "log"), create=True)
    fill(log, ROWS)
    log.slots.create("s", 0)
    log.set_retention("bytes:1", SlotLimits(lag_bytes=1))
    log.trim()
    assert log.slots.get("s").invalid is not None
    with pytest.raises(SlotInvalid):
        follow(log, DeltaSink(table, mode="append"), "s", start="retained", upto="end")
    assert not os.path.exists(table)


def test_records_stored_before_a_refusal_stay_with_their_slot(log, table):
    log = MemoryLog()
    fill(log, ROWS[:2])
    fill(log, ROWS[2:])
    sink = DeltaSink(table)
    with pytest.raises(NullKey):
        follow(log, sink, "s", upto="end", batching=Batching(records=1))
    assert sink.cursor(log.log_id).next == log.slots.get("s").position == 2


@pytest.mark.parametrize("options", [{"upto": 0}, {"start": "now", "upto": "end"}])
def test_a_newcomer_with_nothing_to_store_remembers_where_it_starts(log, table, options):
    end = follow(log, DeltaSink(table, mode="append"), "s", **options)
    assert DeltaSink(table, mode="append").cursor(log.log_id) == end
    assert log.slots.get("s").position == end.next


class Killed(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("start", ["now", "beginning"])
def test_a_newcomer_killed_before_its_first_commit_can_start_again(log, table, start, monkeypatch):
    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(SinkCommitter, "abandon", lambda _: None)  # a dead process takes nothing back
        patch.setattr(DeltaSink, "begin", killed)
        follow(log, DeltaSink(table, mode="append"), "s", start=start, upto="end")
    assert [slot.holder for slot in log.slots.list()] == [None]
    fill(log, ROWS[:1])
    sink = DeltaSink(table, mode="append")
    follow(log, sink, "s", start=start, upto="end")
    assert sink.cursor(log.log_id).next == log.slots.get("s").position == 5


def test_a_first_commit_that_landed_without_an_answer_keeps_its_slot(log, table):
    def deaf(_):
        raise StorageError("no answer")

    with pytest.raises(StorageError):
        follow(log, around_commits(table, mode="append", after=deaf), "s", upto="end")
    assert log.slots.get("s").position == 0


def test_a_refused_newcomer_does_not_take_back_the_slot_of_one_that_was_faster(log, table, tmp_path):
    def slow(_):
        follow(log, DeltaSink(str(tmp_path / "faster"), mode="append"), "s", upto="end")

    with pytest.raises(NullKey):
        follow(log, around_commits(table, before=slow), "s", upto="end")
    assert log.slots.get("s").position == 4
    assert log.slots.get("s").holder is not None


def test_of_two_newcomers_with_one_slot_the_slower_is_fenced_and_moves_nothing(log, table, tmp_path):
    def slow(_):
        follow(log, DeltaSink(str(tmp_path / "faster"), mode="append"), "s", upto=2)

    with pytest.raises(Fenced):
        follow(log, around_commits(table, mode="append", after=slow), "s", upto="end")
    assert log.slots.get("s").position == 2


def test_a_follower_that_took_over_is_not_stopped_by_the_last_commit_of_the_one_before(log, table, monkeypatch):
    """The slot decides which is newer: what the older one still committed is dropped from the newer one's range."""
    old = DeltaSink(table, mode="append")
    follow(log, old, "s", upto=1)
    write, late = DeltaCommits.commit, []

    def meanwhile(self, *arguments, **options):
        if self is not old._followed and not late:
            late.append(True)
            at = Cursor(log.log_id, 1)
            old.apply(changes(1, ROWS[1]), since=at, upto=at.at(2))
        write(self, *arguments, **options)

    monkeypatch.setattr(DeltaCommits, "commit", meanwhile)
    new = DeltaSink(table, mode="append")
    assert follow(log, new, "s", upto="end") == log.end()
    offsets = DeltaTable(table).to_pyarrow_table()["offset"].to_pylist()
    assert sorted(offsets) == [0, 1, 2, 3]


def test_a_position_that_is_no_longer_retained_leaves_neither_a_table_nor_a_slot(log, table):
    fill(log, ROWS[:2])
    log.trim(4)
    with pytest.raises(CursorExpired):
        follow(log, DeltaSink(table), "s", start=1, upto="end")
    assert_nothing_is_left(log, table)
