"""A followed table that others change: restored, overwritten, removed, replaced or copied; and harmless changes."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from strandline.errors import Conflict, CursorExpired, Diverged, Fenced, StorageError
from strandline.followers.run import Batching, follow
from strandline.log.memory import MemoryLog
from strandline.model.cursor import Cursor
from strandline.model.head import WriterId
from strandline.model.records import Op
from strandline.storage.clock import CHANCE
from strandline.storage.env import Env
from strandline.tables.delta.commits import DeltaCommits
from strandline.tables.delta.sink import DeltaSink
from strandline.tables.delta.table import FollowedDelta
from strandline.testing.sinks import DELETE, LOG, changes, folded
from tests.matrix_cases import some
from tests.tables.delta.commits import around_commits

ROWS = [(b"%d" % (n % 5), DELETE if n % 7 == 6 else b"v%d" % n) for n in range(40)]


def fill(log, rows):
    table = changes(0, *rows).drop_columns("offset")
    log.append(table, writer=WriterId(CHANCE.uuid()), number=0).result()


@pytest.fixture
def log():
    log = MemoryLog()
    for first in range(0, 30, 10):
        fill(log, ROWS[first : first + 10])
    return log


@pytest.fixture(params=["latest", "append"])
def sink(tmp_path, request):
    return DeltaSink(str(tmp_path / "table"), mode=request.param)


def again(sink):
    """The sink of another process: its only state is the table."""
    return DeltaSink(sink.url, mode=sink.mode)


def rows_of(sink):
    return pa.table(DeltaTable(sink.url).to_pyarrow_table()).sort_by("offset").to_pylist()


def assert_exact(sink, rows):
    """Check that the table has the state of the first rows of the log, with each change once."""
    found = rows_of(sink)
    if sink.mode == "append":
        assert [row["offset"] for row in found] == list(range(len(rows)))
        found = [row for row in found if row["op"] is not None]
        assert [(row["key"], DELETE if row["op"] == Op.DELETE else row["value"]) for row in found] == rows
    else:
        assert len({row["key"] for row in found}) == len(found)
        assert {row["key"]: row["value"] for row in found} == folded(rows)


def in_steps(log, sink, *ends, slot="s"):
    for end in ends:
        follow(log, sink, slot, upto=end)


def running(log, sink):
    """The sink continues within one run: the table was changed between two of its commits."""
    at = Cursor(log.log_id, 20)
    sink.apply(changes(20, *ROWS[20:25]), since=at, upto=at.at(25))


def restarted(log, sink):
    """A follower starts, in another process."""
    follow(log, again(sink), "s", upto="end")


MEETINGS = (running, restarted)
both = pytest.mark.parametrize("meet", MEETINGS, ids=lambda meet: meet.__name__)


def alternating(name, kinds):
    """Every kind in both ways; the default suite takes the two by turns."""
    pairs = [(kind, meet) for kind in kinds for meet in MEETINGS]
    left_to_the_matrix = [(number + number // 2) % 2 for number in range(len(pairs))]
    return pytest.mark.parametrize(
        (name, "meet"),
        [
            pytest.param(*pair, marks=[pytest.mark.matrix] * left, id="-".join(part.__name__ for part in pair))
            for pair, left in zip(pairs, left_to_the_matrix, strict=True)
        ],
    )


# --- a table that was changed ----------------------------------------------------------------------------------------


def restored(sink):
    DeltaTable(sink.url).restore(1)


def overwritten(sink):
    write_deltalake(sink.url, DeltaTable(sink.url).to_pyarrow_table().slice(0, 1), mode="overwrite")


def rows_deleted(sink):
    DeltaTable(sink.url).delete("offset = 12 or offset = 18")


def rows_added(sink):
    write_deltalake(sink.url, DeltaTable(sink.url).to_pyarrow_table().slice(0, 1), mode="append")


def replaced(sink):
    DeltaTable.create(sink.url, schema=DeltaTable(sink.url).schema(), mode="overwrite")


def replaced_with_our_properties(sink):
    table = DeltaTable(sink.url)
    properties = table.metadata().configuration
    DeltaTable.create(
        sink.url, table.schema(), mode="overwrite", configuration=properties, raise_if_key_not_exists=False
    )


def restored_and_compacted(sink):
    restored(sink)
    DeltaTable(sink.url).optimize.compact()
    DeltaTable(sink.url).create_checkpoint()


CHANGES = [
    *(restored, overwritten, rows_deleted, rows_added, replaced, replaced_with_our_properties),
    restored_and_compacted,
]
each_change = pytest.mark.parametrize("change", some(CHANGES, 3), ids=lambda change: change.__name__)


@alternating("change", CHANGES)
def test_a_table_that_others_changed_is_diverged_and_nothing_moves(log, sink, change, meet):
    in_steps(log, sink, 10, 20)
    change(sink)
    before = DeltaTable(sink.url).version(), rows_of(sink)
    with pytest.raises(Diverged, match="'strandline table repair'"):
        meet(log, sink)
    assert (DeltaTable(sink.url).version(), rows_of(sink)) == before
    assert log.slots.get("s").position == 20


@each_change
def test_repair_goes_back_to_the_last_right_version_and_on_from_its_cursor(log, sink, change):
    in_steps(log, sink, 10, 20)
    change(sink)
    assert follow(log, again(sink), "s", upto="end", repair=True) == log.end()
    assert_exact(sink, ROWS[:30])
    fill(log, ROWS[30:])
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS)


def test_repair_takes_an_older_version_if_the_files_of_the_last_one_are_gone(log, sink):
    in_steps(log, sink, 10, 20)
    last = set(DeltaTable(sink.url).file_uris())
    DeltaTable(sink.url).restore(1)
    for gone in last - set(DeltaTable(sink.url).file_uris()):
        Path(gone.removeprefix("file://")).unlink()
    follow(log, again(sink), "s", upto="end", repair=True)
    assert_exact(sink, ROWS[:30])


def test_repair_that_finds_no_version_the_log_can_continue_from_raises(log, sink):
    in_steps(log, sink, 10, 20)
    last = set(DeltaTable(sink.url).file_uris())
    DeltaTable(sink.url).restore(1)
    for gone in last - set(DeltaTable(sink.url).file_uris()):
        Path(gone.removeprefix("file://")).unlink()
    log.trim(20)
    with pytest.raises(Diverged, match="cannot be repaired"):
        follow(log, again(sink), "s", upto="end", repair=True)


def test_the_start_is_found_after_commits_were_cleaned_up_under_an_open_sink(log, sink):
    in_steps(log, sink, 10, 20)
    used = again(sink)
    follow(log, used, "s", upto="end")
    commits_cleaned_up(sink)
    assert used.start() == 0


def test_repair_leaves_a_table_alone_that_needs_none(log, sink):
    in_steps(log, sink, 10, 20)
    version = DeltaTable(sink.url).version()
    follow(log, again(sink), "s", upto=20, repair=True)
    assert DeltaTable(sink.url).version() == version


def test_a_table_that_its_owner_knows_to_be_right_can_be_adopted(log, sink):
    in_steps(log, sink, 10, 20)
    rows_deleted(sink)
    left = rows_of(sink)
    assert sink.adopt(log.log_id) == Cursor(log.log_id, 20)
    assert rows_of(sink) == left
    follow(log, again(sink), "s", upto="end")
    assert again(sink).cursor(log.log_id) == log.end()


def adopted_while(sink, log, monkeypatch, meanwhile):
    """Adopt the table, and change it after it was read and before the commit."""
    accept, adopting = DeltaCommits.accept, again(sink)

    def too_late(self, *arguments, **options):
        if self is adopting._followed:
            meanwhile()
        accept(self, *arguments, **options)

    monkeypatch.setattr(DeltaCommits, "accept", too_late)
    return adopting.adopt(log.log_id)


def test_of_two_that_adopt_a_table_at_once_each_finds_it_adopted(log, sink, monkeypatch):
    in_steps(log, sink, 10, 20)
    rows_deleted(sink)
    at = adopted_while(sink, log, monkeypatch, lambda: again(sink).adopt(log.log_id))
    assert at == Cursor(log.log_id, 20)
    follow(log, again(sink), "s", upto="end")
    assert again(sink).cursor(log.log_id) == log.end()


def test_changes_during_an_adoption_are_not_adopted_unseen(log, sink, monkeypatch):
    in_steps(log, sink, 10, 20)
    with pytest.raises(Conflict, match=r"Check the table again, and adopt it if it is right\.$"):
        adopted_while(sink, log, monkeypatch, lambda: rows_deleted(sink))
    with pytest.raises(Diverged):
        again(sink).cursor(log.log_id)
    assert again(sink).adopt(log.log_id) == Cursor(log.log_id, 20)


def test_a_table_that_is_changed_while_it_is_committed_to_is_diverged(log, sink, monkeypatch):
    in_steps(log, sink, 10, 20)
    write = DeltaCommits.commit

    def too_late(self, *arguments, **options):
        if DeltaTable(sink.url).version() == version:
            restored(sink)
        write(self, *arguments, **options)

    version = DeltaTable(sink.url).version()
    monkeypatch.setattr(DeltaCommits, "commit", too_late)
    with pytest.raises(Diverged, match="RESTORE to 1"):
        follow(log, again(sink), "s", upto="end")
    assert log.slots.get("s").position == 20


# --- a table that is gone, or another one ----------------------------------------------------------------------------


def removing_after(sink, offset):
    """A sink whose table is removed right after it has stored that offset."""

    def removing(upto):
        if upto.next == offset:
            shutil.rmtree(sink.url)

    return around_commits(sink.url, mode=sink.mode, after=removing)


@pytest.mark.parametrize("slot", ["s", None])
def test_a_table_that_is_removed_while_it_is_followed_is_not_created_again_from_the_middle(log, sink, slot):
    with pytest.raises(Diverged, match="was removed while it was followed"):
        follow(log, removing_after(sink, 10), slot, upto="end", batching=Batching(records=10))
    assert not os.path.exists(sink.url)


def test_a_table_that_is_removed_between_two_commits_is_not_created_again_from_the_middle(sink):
    at = Cursor(LOG, 2)
    sink.apply(changes(0, (b"a", b"1"), (b"b", b"2")), since=Cursor(LOG, 0), upto=at)
    shutil.rmtree(sink.url)
    with pytest.raises(Diverged, match="up to offset 2"):
        sink.apply(changes(2, (b"c", b"3")), since=at, upto=at.at(3))
    assert not os.path.exists(sink.url)


def test_a_table_that_was_removed_between_runs_is_built_again_from_the_beginning(log, sink, caplog):
    in_steps(log, sink, 10, 20)
    shutil.rmtree(sink.url)
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])
    assert "it is built again from offset 0 on" in caplog.text


@pytest.mark.parametrize("start", ["now", 15])
def test_a_table_that_was_removed_between_runs_does_not_begin_in_the_middle(log, sink, start):
    follow(log, sink, "s", upto=20, start=5)
    shutil.rmtree(sink.url)
    with pytest.raises(Diverged, match="drop the slot"):
        follow(log, again(sink), "s", upto="end", start=start)
    assert not os.path.exists(sink.url)
    assert log.slots.get("s").position == 20
    log.slots.drop("s")
    follow(log, again(sink), "s", upto="end", start=start)


def test_a_table_that_was_removed_is_not_built_from_what_a_trimmed_log_has_left(log, sink):
    in_steps(log, sink, 10, 20)
    shutil.rmtree(sink.url)
    log.trim(20)
    with pytest.raises(CursorExpired):
        follow(log, again(sink), "s", upto="end")
    assert not os.path.exists(sink.url)
    assert log.slots.get("s").position == 20


@both
def test_a_table_that_someone_else_created_at_the_same_place_is_diverged(log, sink, meet):
    in_steps(log, sink, 10, 20)
    shutil.rmtree(sink.url)
    write_deltalake(sink.url, pa.table({"x": [1]}))
    with pytest.raises(Diverged):
        meet(log, sink)
    assert rows_table(sink).column_names == ["x"]


def rows_table(sink):
    return pa.table(DeltaTable(sink.url).to_pyarrow_table())


def test_a_commit_that_lands_in_a_table_created_again_meanwhile_is_not_taken_for_stored(log, sink, monkeypatch):
    in_steps(log, sink, 10, 20)
    write = DeltaCommits.commit

    def into_another(self, found, *arguments, **options):
        version, schema = found.number, found.table.schema()
        shutil.rmtree(sink.url)
        other = DeltaTable.create(sink.url, schema)
        for _ in range(version):
            other.create_write_transaction([], mode="append", schema=schema)
            other.update_incremental()
        write(self, found, *arguments, **options)

    monkeypatch.setattr(DeltaCommits, "commit", into_another)
    with pytest.raises((Diverged, StorageError)):
        follow(log, again(sink), "s", upto="end")
    assert log.slots.get("s").position == 20


def test_an_older_copy_of_the_table_is_noticed_by_a_running_follower_and_taken_by_one_that_starts(log, sink):
    in_steps(log, sink, 10)
    shutil.copytree(sink.url, sink.url + "-backup")
    in_steps(log, sink, 20)
    shutil.rmtree(sink.url)
    shutil.copytree(sink.url + "-backup", sink.url)
    with pytest.raises(Diverged, match="an older copy"):
        running(log, sink)
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])


def test_a_copy_of_a_table_is_followed_beside_it_with_a_slot_of_its_own(log, sink):
    in_steps(log, sink, 10, 20)
    copy = DeltaSink(sink.url + "-copy", mode=sink.mode)
    shutil.copytree(sink.url, copy.url)
    follow(log, copy, "copy", upto="end")
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])
    assert_exact(copy, ROWS[:30])


def test_a_copy_that_takes_the_slot_of_its_original_fences_that_and_both_stay_exact(log, sink):
    in_steps(log, sink, 10)
    copy = DeltaSink(sink.url + "-copy", mode=sink.mode)
    shutil.copytree(sink.url, copy.url)

    def overtaken(upto):
        if upto.next == 20:
            follow(log, copy, "s", upto="end")

    stale = around_commits(sink.url, mode=sink.mode, after=overtaken)
    with pytest.raises(Fenced):
        follow(log, stale, "s", upto="end", batching=Batching(records=10))
    assert_exact(copy, ROWS[:30])
    assert_exact(sink, ROWS[:20])
    follow(log, again(sink), "original", upto="end")
    assert_exact(sink, ROWS[:30])


# --- what harms nobody -----------------------------------------------------------------------------------------------


def compacted(sink):
    DeltaTable(sink.url).optimize.compact()


def sorted_anew(sink):
    DeltaTable(sink.url).optimize.z_order(["offset"])


def vacuumed(sink):
    DeltaTable(sink.url).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def checkpointed(sink):
    DeltaTable(sink.url).create_checkpoint()


def commits_cleaned_up(sink):
    """A checkpoint, and no commit file that it makes needless."""
    DeltaTable(sink.url).create_checkpoint()
    folder = Path(sink.url, "_delta_log")
    for file in folder.glob("*.json"):
        os.utime(file, (1, 1))
    DeltaTable(sink.url).cleanup_metadata()
    assert len(list(folder.glob("*.json"))) <= 1


def properties_changed(sink):
    DeltaTable(sink.url).alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})


def all_maintenance(sink):
    for job in (compacted, vacuumed, sorted_anew, properties_changed, checkpointed):
        job(sink)


HARMLESS = [
    *(compacted, sorted_anew, vacuumed, checkpointed, commits_cleaned_up, properties_changed),
    all_maintenance,
]


@pytest.mark.matrix
@alternating("job", HARMLESS)
def test_maintenance_does_not_stop_a_follower(log, sink, job, meet):
    in_steps(log, sink, 10, 20)
    job(sink)
    meet(log, sink)
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])


def test_maintenance_that_commits_at_the_same_moment_does_not_stop_a_follower(log, sink, monkeypatch):
    in_steps(log, sink, 10, 20)
    write, jobs = DeltaCommits.commit, [properties_changed, compacted]

    def meanwhile(self, *arguments, **options):
        if jobs:
            jobs.pop()(sink)
        write(self, *arguments, **options)

    monkeypatch.setattr(DeltaCommits, "commit", meanwhile)
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])


def test_commits_since_ours_that_are_gone_are_unknown_and_not_harmless(log, sink):
    in_steps(log, sink, 10, 20)
    compacted(sink)
    properties_changed(sink)
    properties_changed(sink)
    commits_cleaned_up(sink)
    with pytest.raises(Diverged, match="is missing, so that it is unknown"):
        follow(log, again(sink), "s", upto="end")
    assert again(sink).adopt(log.log_id) == Cursor(log.log_id, 20)
    follow(log, again(sink), "s", upto="end")
    assert_exact(sink, ROWS[:30])


def test_a_checkpoint_alone_proves_that_our_commit_is_the_last_one(log, sink):
    in_steps(log, sink, 10, 20)
    commits_cleaned_up(sink)
    for file in Path(sink.url, "_delta_log").glob("*.json"):
        file.unlink()
    assert again(sink).cursor(log.log_id) == Cursor(log.log_id, 20)


def test_columns_that_were_changed_stop_a_follower_before_it_creates_anything(log, sink):
    from deltalake import Field
    from deltalake.schema import PrimitiveType

    in_steps(log, sink, 10, 20)
    DeltaTable(sink.url).alter.add_columns(Field("extra", PrimitiveType("string")))
    with pytest.raises(Diverged, match="columns"):
        follow(log, again(sink), "other", upto="end")
    assert [slot.name for slot in log.slots.list()] == ["s"]


# --- tables of earlier releases --------------------------------------------------------------------------------------


def as_written_before(sink):
    """Remove the fields from every commit that earlier releases did not write."""
    for file in Path(sink.url, "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [action for action in actions if action.get("txn", {}).get("appId", "").count("/") < 3]
        for action in kept:
            action.get("commitInfo", {}).pop("strandline.table", None)
        file.write_text("".join(json.dumps(action) + "\n" for action in kept))


def test_a_table_of_an_earlier_release_is_adopted_and_guarded_from_then_on(log, sink):
    in_steps(log, sink, 10)
    as_written_before(sink)
    compacted(sink)
    in_steps(log, again(sink), 20)
    assert_exact(sink, ROWS[:20])
    restored(sink)
    with pytest.raises(Diverged):
        follow(log, again(sink), "s", upto="end")


@each_change
def test_a_table_of_an_earlier_release_that_others_changed_since_is_diverged(log, sink, change):
    in_steps(log, sink, 10, 20)
    as_written_before(sink)
    change(sink)
    with pytest.raises(Diverged):
        follow(log, again(sink), "s", upto="end")


# --- what is durable -------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("before", ["_settle", "make_durable"])
def test_the_commit_that_is_synced_is_ours_also_if_another_job_commits_right_after_it(log, sink, before, monkeypatch):
    from strandline.storage.disk import LocalDisk

    synced = []

    class Watching(LocalDisk):
        def sync_file(self, path):
            synced.append(path)
            super().sync_file(path)

    owner = DeltaCommits if before == "_settle" else FollowedDelta
    real, seen = getattr(owner, before), set()

    def crowd(followed, *given, **more):
        """Let another job commit right after each commit of the sink, before that is read back or synced."""
        if given[-1] not in seen:
            seen.add(given[-1])
            properties_changed(sink)
        return real(followed, *given, **more)

    monkeypatch.setattr(owner, before, crowd)
    crowded = DeltaSink(sink.url, mode=sink.mode, env=Env(disk=Watching()))
    follow(log, crowded, "s", upto="end", batching=Batching(records=10))
    assert len(seen) == 4
    folder = Path(sink.url, "_delta_log")
    ours = [file for file in folder.glob("*.json") if '"txn"' in file.read_text()]
    assert len(ours) == 4
    assert {str(file) for file in ours} <= set(synced)
    assert_exact(sink, ROWS[:30])


def test_the_name_of_a_new_table_is_synced_with_its_first_commit(log, tmp_path):
    from strandline.storage.disk import LocalDisk

    synced = []

    class Watching(LocalDisk):
        def sync_folder(self, path):
            synced.append(path)
            super().sync_folder(path)

    table = tmp_path / "tables" / "orders"
    follow(log, DeltaSink(str(table), mode="append", env=Env(disk=Watching())), "s", upto="end")
    assert {str(folder) for folder in (tmp_path, table.parent, table, table / "_delta_log")} <= set(synced)


def test_the_commits_of_a_table_without_rows_are_synced_with_the_name_of_their_folder(tmp_path):
    from strandline.storage.disk import LocalDisk

    table, synced = tmp_path / "orders", set()

    class Watching(LocalDisk):
        def sync_folder(self, path):
            super().sync_folder(path)
            if list((table / "_delta_log").glob("*.json")):  # what was synced before does not count
                synced.add(path)

    follow(MemoryLog(), DeltaSink(str(table), env=Env(disk=Watching())), "s", upto="end")
    assert {str(table), str(table / "_delta_log")} <= synced


def test_the_term_of_a_cursor_is_stored_with_it(sink):
    cursor = Cursor(LOG, 2, 7)
    sink.apply(changes(0, (b"a", b"1"), (b"b", b"2")), since=Cursor(LOG, 0, 7), upto=cursor)
    assert again(sink).cursor(LOG) == cursor
