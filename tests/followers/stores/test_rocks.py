"""The store on RocksDB: the contract of stores, and its own rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from rocksdict import Options, Rdict

from strandline.errors import (
    CorruptData,
    Fenced,
    InvalidInput,
    MissingExtra,
    NotFound,
    UnsupportedVersion,
    UsedAcrossFork,
)
from strandline.followers.stores.rocks import RocksStore
from strandline.model.cursor import Cursor
from strandline.model.records import READ_SCHEMA, Op, record_batch, with_offsets
from strandline.model.sink import StorePosition
from strandline.snapshots.sealed import check_snapshot
from strandline.testing.store_snapshots import ExportingStoreContract
from tests.matrix_cases import partly

ROOT = Path(__file__).resolve().parents[3]
LOG = UUID(int=1)


def table(first: int, *rows: tuple[bytes, bytes | None]) -> pa.Table:
    ops = [Op.PUT if value is not None else Op.DELETE for _, value in rows]
    batch = record_batch(
        timestamps=[0] * len(rows), ops=ops, keys=[key for key, _ in rows], values=[value for _, value in rows]
    )
    return pa.Table.from_batches(with_offsets([batch], first), READ_SCHEMA)


def put(store: RocksStore, *rows: tuple[bytes, bytes | None]) -> Cursor:
    at = store.cursor(LOG) or Cursor(LOG, 0)
    upto = at.at(at.next + len(rows))
    store.apply(table(at.next, *rows), since=at, upto=upto)
    return upto


class TestRocksStore(ExportingStoreContract):
    sync = True

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Iterator[RocksStore]:
        self.opened = [RocksStore.open(str(tmp_path / "store"), sync=self.sync)]
        yield self.opened[0]
        for store in self.opened:
            store.close()

    def reopen(self, store: RocksStore) -> RocksStore:
        store.close()
        self.opened.append(RocksStore.open(store._folder, sync=self.sync))
        return self.opened[-1]

    def import_from(self, snapshot: str, dest: str) -> RocksStore:
        self.opened.append(RocksStore.import_from(snapshot, dest, sync=self.sync))
        return self.opened[-1]


@pytest.mark.matrix
class TestRocksStoreUnsynced(TestRocksStore):
    sync = False


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def store(place: str) -> Iterator[RocksStore]:
    with RocksStore.open(place, sync=False) as opened:
        yield opened


def flushed(store: RocksStore, keys: int) -> Path:
    """Write ``count`` keys to a table file, and return the file."""
    put(store, *((b"k%06d" % number, os.urandom(100)) for number in range(keys)))
    store._db.flush()
    store.close()
    (path, *_) = sorted(Path(store._folder).glob("*.sst"), key=lambda file: -file.stat().st_size)
    return path


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x00\xa5" * 100)


# --- opening ---------------------------------------------------------------------------------------------------


def test_a_second_opener_is_refused_with_a_clear_sentence(store: RocksStore, place: str) -> None:
    with pytest.raises(Fenced, match=r"is open elsewhere; nothing was changed\. Close it there first"):
        RocksStore.open(place)
    program = """
        import sys
        from strandline.followers.stores.rocks import RocksStore
        from strandline.errors import Fenced
        try:
            RocksStore.open(sys.argv[1])
        except Fenced as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), place],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert "is open elsewhere" in done.stdout
    put(store, (b"a", b"1"))


def test_a_missing_library_names_its_extra(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    for call in (lambda: RocksStore.open(place), lambda: RocksStore.import_from("snapshot", place)):
        with pytest.raises(MissingExtra, match=r"strandline\[rocksdb\]"):
            call()
    assert not Path(place).exists()


def test_a_database_of_another_program_is_refused(place: str) -> None:
    other = Rdict(place, Options(raw_mode=True))
    other[b"a"] = b"1"
    other.close()
    with pytest.raises(InvalidInput, match="no store of strandline"):
        RocksStore.open(place)


def test_a_fold_of_a_later_version_is_refused(store: RocksStore, place: str) -> None:
    store._own.put(b"format", b"2")
    store.close()
    with pytest.raises(UnsupportedVersion, match="version 1"):
        RocksStore.open(place)


def test_a_file_in_the_way_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(InvalidInput, match="is a file"):
        RocksStore.open(str(tmp_path / "store"))


def test_a_closed_store_raises_a_clear_error_and_can_be_opened_again(store: RocksStore, place: str) -> None:
    at = put(store, *((b"%d" % number, b"1") for number in range(10)))
    reading = store.range()
    next(reading)
    store.close()
    for call in (
        lambda: store.get(b"a"),
        store.range,
        lambda: next(reading),
        lambda: store.apply(table(10, (b"a", b"2")), since=at, upto=at.at(11)),
        lambda: store.begin_resync(LOG),
        lambda: store.export_to(place + "-snapshot"),
    ):
        with pytest.raises(InvalidInput, match="closed"):
            call()
    with RocksStore.open(place) as again:
        assert again.cursor(LOG) == at


def test_a_store_is_not_written_to_in_a_forked_child(store: RocksStore) -> None:
    put(store, (b"a", b"1"))
    child = os.fork()
    if not child:
        try:
            put(store, (b"a", b"2"))
        except UsedAcrossFork:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get(b"a") == b"1"


# --- damage ----------------------------------------------------------------------------------------------------


def test_a_range_over_damage_raises_instead_of_ending_early(store: RocksStore, place: str) -> None:
    path = flushed(store, 5000)
    damage(path, path.stat().st_size // 2)
    with RocksStore.open(place) as again:
        given: list[object] = []
        with pytest.raises(CorruptData, match="damaged"):
            given.extend(map(given.append, again.range()))
        assert 0 < len(given) < 5000
        with pytest.raises(CorruptData, match="damaged"):
            [again.get(b"k%06d" % number) for number in range(5000)]
        assert len(list(again.range(b"k0000"))) == 100, "what lies before the damage can be read"
    with RocksStore.open(place):
        pass  # not even damage keeps it from being closed


def test_damage_at_the_first_key_of_a_range_raises(store: RocksStore, place: str) -> None:
    damage(flushed(store, 5000), 0)
    with RocksStore.open(place) as again, pytest.raises(CorruptData, match="damaged"):
        list(again.range())


def test_damage_of_what_a_database_is_made_of_is_corrupt_data(store: RocksStore, place: str) -> None:
    put(store, (b"a", b"1"))
    store.close()
    (manifest,) = Path(place).glob("MANIFEST-*")
    damage(manifest, 30)
    with pytest.raises(CorruptData, match="import a snapshot into another folder"):
        RocksStore.open(place)


def copied_log(store: RocksStore, place: str, copy: str) -> Path:
    """A copy of the files as a crash would leave them, with everything still in the write-ahead log."""
    subprocess.run(["cp", "-r", place, copy], check=True)
    (log,) = Path(copy).glob("*.log")
    return log


@pytest.mark.parametrize("sync", [True, False])
def test_a_torn_write_is_dropped_with_its_cursor(store: RocksStore, place: str, sync: bool) -> None:
    ends = [put(store, (b"a", b"%d" % number), (b"b", b"%d" % number)) for number in range(20)]
    log = copied_log(store, place, place + "-crashed")
    os.truncate(log, log.stat().st_size - 7)
    with RocksStore.open(place + "-crashed", sync=sync) as again:
        assert again.cursor(LOG) == ends[-2]
        assert dict(again.range()) == {b"a": b"18", b"b": b"18"}


def test_damage_below_what_was_synced_is_an_error_and_without_sync_data_and_cursor_go_back_together(
    store: RocksStore, place: str
) -> None:
    ends = [put(store, (b"a", b"%d" % number), (b"b", b"%d" % number)) for number in range(40)]
    damage(copied_log(store, place, place + "-crashed"), 2000)
    with pytest.raises(CorruptData):
        RocksStore.open(place + "-crashed", sync=True)
    with RocksStore.open(place + "-crashed", sync=False) as again:
        at = again.cursor(LOG)
        assert at in ends
        assert at != ends[-1]
        assert dict(again.range()) == dict.fromkeys((b"a", b"b"), b"%d" % ends.index(at))


# --- crashes ---------------------------------------------------------------------------------------------------

WRITER = """
    import sys
    from uuid import UUID
    import pyarrow as pa
    from strandline.followers.stores.rocks import RocksStore
    from strandline.model.cursor import Cursor
    from strandline.model.records import READ_SCHEMA, record_batch, with_offsets

    store = RocksStore.open(sys.argv[1], sync=False)
    store._db.set_options({"write_buffer_size": "65536"})
    at = store.cursor(UUID(int=1)) or Cursor(UUID(int=1), 0)
    while True:
        turn = at.next // 50
        keys = [b"%d" % number for number in range(50)]
        batch = record_batch(timestamps=[0] * 50, ops=[0] * 50, keys=keys, values=[b"%d" % turn + b"." * 200] * 50)
        upto = at.at(at.next + 50)
        store.apply(pa.Table.from_batches(with_offsets([batch], at.next), READ_SCHEMA), since=at, upto=upto)
        at = upto
        print(at.next, flush=True)
"""


def kill_a_writer(place: str, writes: int) -> int:
    """Kill a real writer after some of its writes returned; returns the last offset that it reported."""
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), place],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        told = [int(writer.stdout.readline()) for _ in range(writes)]
    finally:
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate(timeout=600)
    return max([*told, *map(int, rest.split("\n")[:-1])])


def check_together(place: str, told: int) -> None:
    with RocksStore.open(place, sync=False) as store:
        at = store.cursor(LOG)
        assert at.next >= told, "what was answered is there"
        values = {value.rstrip(b".") for _, value in store.range()}
        assert values == {b"%d" % (at.next // 50 - 1)}, "data and cursor are of the same write"


@pytest.mark.parametrize("kills", partly([150], [1, 7, 150]))
def test_a_killed_writer_leaves_data_and_cursor_together(place: str, kills: list[int]) -> None:
    for writes in kills:
        check_together(place, kill_a_writer(place, writes))


@pytest.mark.slow
def test_a_writer_killed_many_times_leaves_data_and_cursor_together(place: str) -> None:
    for round_ in range(20):
        check_together(place, kill_a_writer(place, 1 + round_ * 37 % 500))


# --- reading while it is written -------------------------------------------------------------------------------


def test_a_range_is_one_moment_however_slowly_it_is_read(store: RocksStore) -> None:
    put(store, *((b"%03d" % number, b"old") for number in range(200)))
    reading = store.range(b"0")
    given = [next(reading) for _ in range(3)]
    put(store, *((b"%03d" % number, None) for number in range(0, 200, 2)), (b"0045", b"new"))
    store._db.flush()
    store._db.compact_range(None, None)
    given += reading
    assert given == [(b"%03d" % number, b"old") for number in range(100)]


@pytest.mark.parametrize("prefix", [b"", b"a", b"a\xff", b"\xff", b"\xff\xff", b"\xfe\xff", b"a\x00"])
def test_a_prefix_of_any_bytes_finds_its_keys_and_no_others(store: RocksStore, prefix: bytes) -> None:
    keys = [b"", b"a", b"a\x00", b"a\x00b", b"a\xff", b"a\xff\xff", b"b", b"\xfe\xff", b"\xfe\xff\x01", b"\xff"]
    keys += [b"\xff\x00", b"\xff\xff", b"\xff\xff\xff"]
    put(store, *((key, b"1") for key in keys))
    assert [key for key, _ in store.range(prefix)] == sorted(key for key in keys if key.startswith(prefix))


# --- snapshots -------------------------------------------------------------------------------------------------


def test_an_export_links_the_files_of_the_store_and_copies_none(store: RocksStore, tmp_path: Path) -> None:
    put(store, *((b"%d" % number, os.urandom(100)) for number in range(2000)))
    snapshot = store.export_to(str(tmp_path / "snapshot"))
    assert (snapshot.kind, snapshot.kind_version) == ("rocksdb", 1)
    tables = list((tmp_path / "snapshot" / "data").glob("*.sst"))
    assert tables
    assert all(file.stat().st_nlink == 2 for file in tables)
    check_snapshot(str(tmp_path / "snapshot"))


def test_an_import_shares_no_file_with_its_snapshot(store: RocksStore, tmp_path: Path) -> None:
    put(store, (b"a", b"1"))
    store.export_to(str(tmp_path / "snapshot"))
    with RocksStore.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made")) as made:
        put(made, (b"a", b"2"), (b"b", b"2"))
        assert all(file.stat().st_nlink == 1 for file in (tmp_path / "made").iterdir())
    check_snapshot(str(tmp_path / "snapshot"))
    assert dict(store.range()) == {b"a": b"1"}


def test_exports_under_writes_and_compaction_each_hold_exactly_their_cursor(store: RocksStore, tmp_path: Path) -> None:
    keys = [b"%d" % number for number in range(20)]
    put(store, *((key, b"0") for key in keys))
    stop = threading.Event()

    def write() -> None:
        turn = 1
        while not stop.is_set():
            put(store, *((key, b"%d" % turn) for key in keys))
            if turn % 3 == 0:
                store._db.flush()
                store._db.compact_range(None, None)  # so that files go away under the export
            turn += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        made = [store.export_to(str(tmp_path / f"snapshot-{number}")) for number in range(8)]
    finally:
        stop.set()
        writer.join()
    for number, snapshot in enumerate(made):
        with RocksStore.import_from(snapshot.folder, str(tmp_path / f"made-{number}"), sync=False) as imported:
            assert imported.position() == StorePosition(snapshot.cursor)
            assert dict(imported.range()) == dict.fromkeys(keys, b"%d" % (snapshot.cursor.next // 20 - 1))


def test_a_snapshot_whose_cursor_is_not_its_datas_is_refused(store: RocksStore, tmp_path: Path) -> None:
    put(store, (b"a", b"1"))
    store.export_to(str(tmp_path / "snapshot"))
    manifest = tmp_path / "snapshot" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"next": 1', b'"next": 2'))
    with pytest.raises(CorruptData, match="cursor"):
        RocksStore.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


def test_there_is_nothing_to_import_where_there_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        RocksStore.import_from(str(tmp_path / "absent"), str(tmp_path / "made"))


def test_exporting_and_importing_leave_nothing_beside_them(store: RocksStore, tmp_path: Path) -> None:
    put(store, (b"a", b"1"))
    store.export_to(str(tmp_path / "snapshot"))
    RocksStore.import_from(str(tmp_path / "snapshot"), str(tmp_path / "made")).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "snapshot", "store"]
    assert sorted(path.name for path in (tmp_path / "snapshot").iterdir()) == ["MANIFEST.json", "data"]
