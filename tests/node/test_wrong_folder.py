"""The wrong kind of folder: nothing new begins inside something else, and a node takes a write-ahead log over."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import strandline as sl
from strandline.errors import CorruptData, Fenced, InvalidInput, NotALog, NotReady, WrongKind
from strandline.log.topic.logs import open_object_topic, open_wal_topic
from strandline.log.wal.log import WalLog
from strandline.model.cursor import Bounds
from strandline.node.api import Primary, Replica
from strandline.node.node_folder import NodeFolder
from strandline.storage.disk import DISK
from strandline.testing.simdisk import CrashMode, SimulatedDisk
from tests import path_contents
from tests.matrix_cases import some
from tests.node.nodes_by_hand import Cluster, records

WRITER = sl.log.WriterId(UUID(int=7))

OPENERS = {
    "a primary": (path_contents.node, lambda path: Primary.open(path).close()),
    "a replica": (path_contents.node, lambda path: Replica.open(path, "grpc://127.0.0.1:1").close()),
    "a write-ahead log": (path_contents.wal, lambda path: sl.compat.WriteAheadLog.open(path).close()),
    "a write-ahead log with offsets": (path_contents.wal, lambda path: WalLog.open(str(path)).close()),
    "an object log": (path_contents.object_log, lambda path: sl.open(path.as_uri(), create=True).close()),
    "an object log by its path": (path_contents.object_log, lambda path: sl.open(str(path), create=True).close()),
    "an append-log store": (
        path_contents.append_log_store,
        lambda path: sl.followers.AppendLogStore.open(str(path)).close(),
    ),
    "a RocksDB store": (path_contents.rocksdb_store, lambda path: sl.followers.RocksStore.open(str(path)).close()),
    "a topic of write-ahead logs": (path_contents.topic, lambda path: open_wal_topic(str(path), 1).close()),
    "a topic of object logs": (path_contents.topic, lambda path: open_object_topic(path.as_uri(), 1).close()),
}
OTHERS = {
    path_contents.wal: "a write-ahead log",
    path_contents.node: "the folder of a node",
    path_contents.object_log: "an object log",
    path_contents.append_log_store: "an append-log store",
    path_contents.rocksdb_store: "a RocksDB store",
    path_contents.topic: "a topic",
    path_contents.snapshot: "a snapshot",
    path_contents.queue_v1: "a queue of version 1",
    path_contents.spool_beside: "a spool",
}
OPENED_WITH = {
    path_contents.wal: "(open it as wal:|--take-over)",
    path_contents.node: "a Primary or a Replica",
    path_contents.object_log: "by its address",
    path_contents.append_log_store: "AppendLogStore",
    path_contents.rocksdb_store: "RocksStore",
    path_contents.topic: "as a topic",
    path_contents.snapshot: "imports it into a store",
    path_contents.queue_v1: "in the format queue-v1",
    path_contents.spool_beside: "(with migrate|wal migrate)",
}
LOOKERS = {
    "a write-ahead log": ({path_contents.wal}, lambda path: sl.compat.WriteAheadLog.open(path, create=False).close()),
    "a reader of a write-ahead log": ({path_contents.wal}, sl.log.WalReader),
    "an object log": ({path_contents.object_log}, lambda path: sl.open(path.as_uri())),
    "a consumer": ({path_contents.object_log}, lambda path: sl.Consumer(str(path), slot="billing").close()),
    "a queue": ({path_contents.queue_v1, path_contents.object_log}, lambda path: sl.open(str(path), format="queue-v1")),
}
"""Who makes nothing: what each opens, and how."""
LOOKED_FOR = [(opener, other) for opener, (own, _) in LOOKERS.items() for other in OTHERS if other not in own]
WRONG = [(opener, other) for opener, (own, _) in OPENERS.items() for other in OTHERS if other is not own]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each; making them takes longer than looking at them."""
    folder = tmp_path_factory.mktemp("made")
    for make in OTHERS:
        (folder / make.__name__).mkdir()
        make(folder / make.__name__ / "it")
    return folder


@pytest.mark.parametrize(("opener", "other"), WRONG, ids=[f"{opener}-{other.__name__}" for opener, other in WRONG])
def test_nothing_begins_where_something_else_is(made: Path, tmp_path: Path, opener: str, other) -> None:
    _, open_there = OPENERS[opener]
    shutil.copytree(made / other.__name__, tmp_path, dirs_exist_ok=True)
    before = path_contents.state_of(tmp_path)
    with pytest.raises(WrongKind, match=f"{OTHERS[other]}.*{OPENED_WITH[other]}"):
        open_there(tmp_path / "it")
    assert path_contents.state_of(tmp_path) == before, "nothing was changed"


@pytest.mark.parametrize("opener", OPENERS)
def test_nothing_begins_within_a_delta_table_where_a_vacuum_would_delete_it(tmp_path: Path, opener: str) -> None:
    write_deltalake(str(tmp_path / "table"), pa.table({"number": [1]}))
    before = path_contents.state_of(tmp_path)
    with pytest.raises(WrongKind, match=rf"is within the Delta table {tmp_path}/table, and a VACUUM"):
        OPENERS[opener][1](tmp_path / "table" / "deep" / "it")
    assert path_contents.state_of(tmp_path) == before, "nothing was changed"


@pytest.mark.parametrize("depth", ["it", "deep/it"])
def test_no_delta_table_begins_around_a_log_that_a_vacuum_of_it_would_delete(tmp_path: Path, depth: str) -> None:
    log = sl.open(str(tmp_path / "data" / depth), create=True)
    with log.producer() as producer:
        producer.produce([b"one"])
    before = path_contents.state_of(tmp_path)
    with pytest.raises(WrongKind, match=r"data holds other files \((it|deep)\), which a VACUUM"):
        sl.follow(log, sl.DeltaSink(tmp_path / "data", mode="append"), upto="end")
    assert path_contents.state_of(tmp_path) == before, "nothing was changed"


def test_a_log_that_is_within_a_table_already_is_still_opened(tmp_path: Path) -> None:
    sl.open(str(tmp_path / "table" / "it"), create=True).close()
    write_deltalake(str(tmp_path / "table"), pa.table({"number": [1]}))
    sl.open(str(tmp_path / "table" / "it"), create=True).close()


@pytest.mark.parametrize(
    "make", [path_contents.empty, path_contents.absent, path_contents.something_else], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("opener", OPENERS)
def test_everything_begins_where_nothing_of_the_kind_is(tmp_path: Path, opener: str, make) -> None:
    make(tmp_path / "it")
    OPENERS[opener][1](tmp_path / "it")
    OPENERS[opener][1](tmp_path / "it")


@pytest.mark.parametrize(
    ("opener", "other"), LOOKED_FOR, ids=[f"{opener}-{other.__name__}" for opener, other in LOOKED_FOR]
)
def test_what_is_opened_without_making_it_says_what_is_there_instead(
    made: Path, tmp_path: Path, opener: str, other
) -> None:
    shutil.copytree(made / other.__name__, tmp_path, dirs_exist_ok=True)
    before = path_contents.state_of(tmp_path)
    with pytest.raises(WrongKind, match=f"{OTHERS[other]}.*, and no .*: .*{OPENED_WITH[other]}"):
        LOOKERS[opener][1](tmp_path / "it")
    assert path_contents.state_of(tmp_path) == before, "nothing was changed, and no lock is left there"


def test_the_error_can_be_caught_as_not_a_log_and_as_invalid_input(made: Path) -> None:
    for kind in (NotALog, InvalidInput):
        with pytest.raises(kind):
            sl.open((made / "wal/it").as_uri(), create=True)


def test_opening_a_primary_on_a_write_ahead_log_advises_to_take_it_over(made: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'strandline node run FOLDER --take-over .*/wal/it'"):
        Primary.open(made / "wal/it")
    with pytest.raises(InvalidInput, match=r"'strandline wal migrate .*/it\.logical\.wal', and let a node"):
        Primary.open(made / "spool_beside/it")


class TestANodeThatLostItsMemory:
    def test_is_refused_and_its_copies_stay(self, tmp_path: Path) -> None:
        path_contents.node(tmp_path / "a")
        (tmp_path / "a/node.json").unlink()
        with pytest.raises(CorruptData, match=r"node\.json is missing, and data-00000001 beside it"):
            NodeFolder.open(str(tmp_path / "a"), "a")
        assert (tmp_path / "a/data-00000001/log.json").exists()

    @pytest.mark.parametrize("mode", some(CrashMode, 1))
    def test_is_no_node_that_crashed_while_it_was_made(self, mode) -> None:
        calls = 0
        while True:
            disk = SimulatedDisk(1)
            disk.stop(calls)
            cluster = Cluster(Path("/"), policy="local", leased=False, names="a", disk=disk)
            try:
                cluster.start("a", create=True, lead=True)
            except BaseException:  # noqa: BLE001 - however a stopped machine says so
                assert disk.stopped
            else:
                return
            cluster.nodes.clear()
            disk.crash(mode)
            cluster.start("a", create=True, lead=True)
            calls += 1


class TestTakingOver:
    @pytest.fixture
    def wal(self, tmp_path: Path) -> Path:
        with WalLog.open(str(tmp_path / "wal"), roll_bytes=200) as log:
            for number in range(8):
                log.append(records(b"%d" % number), writer=WRITER, number=number).result()
            log.slots.create("billing", 3)
            log.slots.create("late", 1)
            log.trim(2, beyond_slots=True)
        return tmp_path / "wal"

    @pytest.mark.parametrize("lease", [None, "lease"])
    def test_a_primary_leads_from_a_write_ahead_log_with_its_writers_and_slots(
        self, wal: Path, tmp_path: Path, lease
    ) -> None:
        before = path_contents.state_of(wal)
        with WalLog.open(str(wal)) as log:
            log_id, slots, end = log.log_id, log.slots.list(), log.end()
        leased = {} if lease is None else {"lease": (tmp_path / lease).as_uri()}
        with Primary.open(tmp_path / "a", name="a", take_over=wal, **leased) as primary:
            reading = primary.reading()
            assert (reading.log_id, reading.bounds()) == (log_id, Bounds(2, 8))
            assert primary.node.primary.log.slots.list() == slots
            assert reading.plan(end) == []
            again = primary.append(records(b"7"), writer=WRITER, number=7)
            assert (again.receipt.first, reading.bounds().next) == (7, 8), "its writer is known"
            assert primary.append_values([b"8"]).ensure().first == 8
        changed = {name for name, data in path_contents.state_of(wal).items() if before.get(name) != data}
        assert changed <= {"lock", "mark"}, "the original is as it was"
        with Primary.open(tmp_path / "a", name="a", take_over=wal, **leased) as primary:
            assert primary.reading().bounds() == Bounds(2, 9), "it is taken over once"

    def test_a_migrated_spool_is_led_from_as_well(self, tmp_path: Path) -> None:
        path_contents.spool_beside(tmp_path / "orders")
        with pytest.raises(InvalidInput, match="wal migrate"):
            Primary.open(tmp_path / "a", take_over=tmp_path / "orders")
        sl.compat.WriteAheadLog.open(tmp_path / "orders", migrate=True).close()
        with Primary.open(tmp_path / "a", take_over=tmp_path / "orders") as primary:
            assert [value.as_py() for batch in primary.reading().read() for value in batch["value"]] == [b"one"]

    def test_a_log_of_a_later_term_is_gone_on_with_in_that_or_a_later_one(self, tmp_path: Path) -> None:
        with WalLog.open(str(tmp_path / "wal")) as log:
            log.append_batch(records(b"x"), term=5).result()
        cluster = Cluster(tmp_path, policy="local", names="a")
        node = cluster.start("a", take_over=str(tmp_path / "wal"))
        cluster.until(lambda: node.is_primary)
        assert node.primary.term == 6
        assert cluster.append(b"y").result(0).receipt.first == 1
        cluster.close()
        cluster = Cluster(tmp_path, policy="local", names="b", leased=False)
        assert cluster.start("b", take_over=str(tmp_path / "wal"), lead=True).primary.term == 5
        assert cluster.append(b"y", on="b").result(0).receipt.first == 1
        cluster.close()

    def test_what_readers_of_the_log_have_seen_is_shown_when_the_policy_has_it(self, wal: Path, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, policy="ack_n(1)", names="ab", leased=False)
        node = cluster.start("a", take_over=str(wal), lead=True)
        with pytest.raises(NotReady):
            node.reading()
        cluster.start("b")
        cluster.settled("b")
        assert node.reading().bounds().next == 8
        assert cluster.content("b") == cluster.content("a")
        cluster.close()

    def test_its_writer_has_to_be_stopped_first(self, wal: Path, tmp_path: Path) -> None:
        with WalLog.open(str(wal)), pytest.raises(Fenced, match="open for writing by process"):
            Primary.open(tmp_path / "a", take_over=wal)
        with Primary.open(tmp_path / "a", take_over=wal) as primary:
            assert primary.committed == 8

    def test_where_there_is_a_primary_already_it_is_refused(self, wal: Path, tmp_path: Path) -> None:
        lease = (tmp_path / "lease").as_uri()
        with (
            Primary.open(tmp_path / "a", name="a", lease=lease),
            pytest.raises(InvalidInput, match="There has been a primary of this log before"),
        ):
            Primary.open(tmp_path / "b", name="b", lease=lease, take_over=wal)

    def test_where_there_is_no_log_nothing_begins(self, tmp_path: Path) -> None:
        with pytest.raises(NotALog):
            Primary.open(tmp_path / "a", take_over=tmp_path / "nothing")
        assert NodeFolder.open(str(tmp_path / "a"), "primary").state.generation == 0

    def test_a_replica_does_not_take_over_a_log(self, wal: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="let the primary take a log over"):
            Replica.open(tmp_path / "b", "grpc://127.0.0.1:1", take_over=str(wal))

    @pytest.mark.matrix
    def test_cut_off_anywhere_it_has_all_of_it_or_begins_again(self, wal: Path) -> None:
        files = {f"/wal/{found.name}": found.read_bytes() for found in wal.iterdir()}
        assert DISK.scan(str(wal))
        for at in range(1000):
            disk = SimulatedDisk(1)
            disk.make_folders("/wal")
            for path, data in files.items():
                disk.write_new(path, [data])
            disk.sync_folder("/wal")
            disk.sync_folder("/")
            disk.stop(len(disk.calls) + at)
            cluster = Cluster(Path("/"), policy="local", leased=False, names="a", disk=disk)
            try:
                cluster.start("a", take_over="/wal", lead=True)
            except BaseException:  # noqa: BLE001 - however a stopped machine says so
                assert disk.stopped
            else:
                assert at > 20
                return
            cluster.nodes.clear()
            disk.crash(CrashMode.NOTHING)
            node = cluster.start("a", take_over="/wal", lead=True)
            assert node.reading().bounds() == Bounds(2, 8)
