"""Nodes as processes, with real sockets: whatever dies, stops or is cut off, what was acknowledged is there, once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from strandline.errors import Fenced, NotReady, StrandlineError, TransientStorageError
from strandline.log.wal.log import WalLog
from strandline.log.wal.read.reading import WalReader
from strandline.model.head import WriterId
from strandline.node.messages import Commit, Reached, TimedOut
from tests.node.flight.recording_client import Mark, Recorder, append, check, new_writer, value_of
from tests.node.processes import ClusterOfProcesses, Nest

Start = Callable[..., ClusterOfProcesses]
MIB = 1 << 20


@pytest.fixture
def start(nest: Nest, tmp_path: Path) -> Iterator[Start]:
    """Makes clusters, which do not outlive the test; what they logged is shown if it fails."""
    with ExitStack() as made:
        yield lambda **options: made.enter_context(ClusterOfProcesses(nest, tmp_path, **options))


def leave_a_tail(cluster: ClusterOfProcesses, leader: str) -> None:
    """Let a primary have records that nobody else has, and is told nothing of.

    They are of a writer of their own: what others append and are not told of may have left before the line was held.
    """
    cluster.lines[leader].hold()
    try:
        commit = append(cluster.clients[leader], new_writer(), 0, count=3, timeout=0.3)
    except Fenced as error:  # on a busy machine its lease may run out first
        assert "the records are durable here" in str(error)  # noqa: PT017 - either answer is right
    else:
        assert isinstance(commit.outcome, TimedOut), "it reached somebody"


def lose(cluster: ClusterOfProcesses, name: str) -> None:
    """Kill a node, and with it all that it has sent and nobody has got yet."""
    cluster.kill(name)
    cluster.lines[name].cut()
    cluster.lines[name].heal()


class TestAPrimaryThatIsKilled:
    @pytest.mark.matrix
    def test_is_replaced_by_hand_and_follows_when_it_returns_with_its_tail_in_quarantine(self, start):
        cluster = start()
        old = cluster.begin()
        with Recorder(cluster) as recorder:
            recorder.more()
            leave_a_tail(cluster, old)
            lose(cluster, old)
            new = cluster.promote(*cluster.running)
            recorder.more()
            cluster.start(old)
            recorder.more()
        assert recorder.by.keys() == {old, new}
        check(cluster, recorder)
        [aside] = cluster.quarantine(old)
        assert list(aside.rglob("*.log"))
        assert not cluster.quarantine(new)

    @pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
    def test_is_replaced_by_itself_where_a_quorum_commits(self, start, times):
        cluster = start(automatic=True)
        cluster.begin()
        with Recorder(cluster) as recorder:
            for turn in range(times):
                old = cluster.leader()
                recorder.more()
                if turn % 2 == 0:
                    leave_a_tail(cluster, old)
                lose(cluster, old)
                recorder.more()
                cluster.start(old)
                recorder.more()
        assert len(recorder.by) >= 2
        check(cluster, recorder)
        assert any(cluster.quarantine(name) for name in cluster.names)

    def test_is_not_replaced_by_one_that_lacks_what_was_acknowledged(self, start):
        cluster = start()
        old = cluster.begin()
        behind, ahead = (name for name in cluster.names if name != old)
        with Recorder(cluster) as recorder:
            recorder.more()
            cluster.kill(behind)
            recorder.more()
            cluster.kill(old)
            cluster.start(behind)
            with pytest.raises(NotReady, match=f"{ahead} has more .*: promote {ahead}"):
                cluster.promote(behind)
            assert cluster.promote(ahead) == ahead
            cluster.start(old)
            recorder.more()
        check(cluster, recorder)

    @pytest.mark.matrix
    def test_goes_on_by_itself_if_it_is_back_first(self, start):
        cluster = start()
        old = cluster.begin()
        with Recorder(cluster) as recorder:
            recorder.more()
            cluster.kill(old)
            cluster.start(old)
            recorder.more()
        assert recorder.by.keys() == {old}
        check(cluster, recorder)
        assert not any(cluster.quarantine(name) for name in cluster.names)


@pytest.mark.matrix
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_replicas_that_are_killed_while_they_apply_lose_nothing_and_need_no_bootstrap(start, kills):
    cluster = start()
    leader = cluster.begin()
    victims = [name for name in cluster.names if name != leader]
    with Recorder(cluster) as recorder:
        for turn in range(kills):
            victim = victims[turn % 2]
            recorder.more(20)
            cluster.kill(victim)
            if turn % 3 == 0:
                recorder.more(20)  # the other one and the primary are enough
            cluster.start(victim)
    check(cluster, recorder)
    assert {cluster.node_state(name).generation for name in cluster.names} == {1}


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_all_are_killed_at_once_and_everything_that_was_acknowledged_is_there(start, times):
    cluster = start(automatic=True)
    cluster.begin()
    with Recorder(cluster) as recorder:
        for _ in range(times):
            recorder.more()
            cluster.kill(*cluster.names)
            cluster.start(*cluster.names)
        recorder.more()
    check(cluster, recorder)


class TestBootstrap:
    SIZE = 32 * MIB
    BATCH = 4 * MIB
    HELD = 24 * MIB
    RECEIVED = 20 * MIB
    """What surely is in a replica's files of so much that the line let through: it writes whole pieces."""
    SPOILED = 8 * MIB
    """A crash may spoil so much of what was written last."""

    @pytest.fixture
    def pair(self, start) -> tuple[ClusterOfProcesses, Recorder]:
        """A primary with much to bring over, and a replica that is not there yet."""
        cluster = start(names="ab", policy="local")
        recorder = Recorder(cluster)
        cluster.start("a", create=True)
        cluster.leader()
        writer = new_writer()
        for number in range(self.SIZE // self.BATCH):
            recorder.acknowledge(writer, number, append(cluster.clients["a"], writer, number, count=4, size=MIB))
        return cluster, recorder

    @pytest.mark.matrix
    @pytest.mark.parametrize("killed", [pytest.param("a", marks=pytest.mark.matrix), "b"])
    def test_goes_on_where_it_was_when_one_of_the_two_is_killed(self, pair, killed):
        cluster, recorder = pair
        line = cluster.lines["a"]
        line.hold("down", after=self.HELD)
        cluster.start("b")
        incoming = cluster.folder / "b/incoming"

        def received() -> int:
            return sum(found.stat().st_size for found in incoming.rglob("*") if found.is_file())

        # What the line let through may still be on its way into the replica's files.
        cluster.until(lambda: line.is_holding("down") and received() >= self.RECEIVED, "most of it is in b's files")
        cluster.kill(killed)
        before, had = line.passed["down"], received()
        line.hang_up()
        line.heal()
        cluster.start(killed)
        check(cluster, recorder)
        # What a crash may have spoiled is brought over again, and nothing else that the replica had. One batch
        # more than the snapshot is sent in a bootstrap that nothing disturbs, too.
        sent = line.passed["down"] - before
        assert sent < self.SIZE - had + self.SPOILED + self.BATCH + MIB
        assert cluster.node_state("b").generation == 1

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        "held", [pytest.param(0, marks=pytest.mark.matrix), HELD, pytest.param(SIZE, marks=pytest.mark.matrix)]
    )
    @pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.matrix)])
    def test_outlives_a_restart_of_the_primary_and_leaves_no_snapshot_behind(self, pair, held, end):
        cluster, recorder = pair
        line = cluster.lines["a"]
        line.hold("down", after=held)  # of the first answer nothing, most of the snapshot, or almost all of it
        cluster.start("b")
        cluster.until(lambda: line.is_holding("down"), "so much of the snapshot is on its way")
        getattr(cluster, end)("a")
        line.hang_up()
        cluster.start("a")
        cluster.leader()
        writer = new_writer()
        for number in range(3):  # what the snapshot does not have
            recorder.acknowledge(writer, number, append(cluster.clients["a"], writer, number, count=4))
        line.heal()
        check(cluster, recorder)
        assert [path.name for path in (cluster.folder / "a/snapshots").glob("*")] == []
        assert not (cluster.folder / "b/incoming").exists()
        assert [slot.name for slot in WalReader(cluster.data("a")).slots.list()] == ["b"]

    @pytest.mark.matrix
    def test_a_piece_that_does_not_arrive_as_it_was_sent_is_brought_over_again(self, pair):
        cluster, recorder = pair
        line = cluster.lines["a"]
        known = value_of(next(iter(recorder.acknowledged)), MIB)[5000:5008]
        hit = []

        def spoil(piece: bytes) -> bytes:
            if known not in piece or hit:
                return piece
            hit.append(piece)
            return piece.replace(known, b"tampered")

        line.alter("down", spoil)
        cluster.start("b")
        check(cluster, recorder)
        assert hit, "the record was not seen on the wire"
        assert cluster.logged("b", "does not match its checksum") == 1

    @pytest.mark.matrix
    def test_bytes_that_flip_anywhere_on_the_way_do_not_reach_the_copy(self, pair):
        cluster, recorder = pair
        line = cluster.lines["a"]
        line.flip("down", every=8 * MIB)
        cluster.start("b")
        cluster.until(lambda: line.spoiled >= 4, "bytes have flipped")
        line.heal()
        check(cluster, recorder)


class TestTheNetwork:
    @pytest.mark.matrix
    @pytest.mark.parametrize("how", [pytest.param("cut", marks=pytest.mark.matrix), "hold"])
    def test_a_primary_that_nobody_reaches_acknowledges_nothing_until_it_heals(self, start, how):
        cluster = start()
        leader = cluster.begin()
        line = cluster.lines[leader]
        with Recorder(cluster) as recorder:
            recorder.more()
            getattr(line, how)()
            cluster.until(lambda: recorder.doubts["TimedOut"] >= recorder.writers, "appends wait in vain")
            told = len(recorder.acknowledged)
            cluster.until(lambda: recorder.doubts["TimedOut"] >= 2 * recorder.writers, "they are told again")
            assert len(recorder.acknowledged) == told
            line.heal()
            recorder.more()
        check(cluster, recorder)

    @pytest.mark.matrix
    def test_acknowledgements_that_are_lost_come_later_and_nothing_is_there_twice(self, start):
        cluster = start()
        leader = cluster.begin()
        line, log, writer = cluster.lines[leader], cluster.clients[leader], new_writer()
        recorder = Recorder(cluster)
        for number in range(10):
            cluster.settled()
            line.hold("up")
            commit = append(log, writer, number, timeout=0.5)
            assert isinstance(commit.outcome, TimedOut)
            assert cluster.status(leader).position.next == number + 1, "it is durable there"
            has_it = any(cluster.status(name).position.next > number for name in cluster.names if name != leader)
            again = append(log, writer, number, timeout=0.1)
            assert isinstance(again.outcome, TimedOut), "the primary has not heard of anybody"
            line.heal()
            commit = append(log, writer, number, timeout=30.0)
            assert isinstance(commit.outcome, Reached)
            recorder.acknowledge(writer, number, commit)
            if has_it:  # and not only because the two were saying something just when the line went dead
                break
        assert has_it
        assert check(cluster, recorder) == [Mark(str(writer), each, 0) for each in range(number + 1)]


def append_when_ready(cluster: ClusterOfProcesses, name: str, writer: WriterId, number: int) -> Commit:
    """Append to a node that has just taken over: it may have to wait until the others have registered."""
    found: list[Commit] = []

    def tried() -> bool:
        with contextlib.suppress(NotReady):
            found.append(append(cluster.clients[name], writer, number, timeout=20.0))
        return bool(found)

    cluster.until(tried, "it is ready")
    return found[0]


@pytest.mark.matrix
def test_a_primary_that_sleeps_past_its_lease_acknowledges_nothing_when_it_wakes_and_follows(start):
    cluster = start(automatic=True)
    old = cluster.begin()
    line, log, writer = cluster.lines[old], cluster.clients[old], new_writer()
    recorder = Recorder(cluster)
    recorder.acknowledge(writer, 0, append(log, writer, 0))
    line.hold()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(append, log, writer, 1, timeout=40.0)
        cluster.until(lambda: cluster.status(old).position.next == 2, "it is durable there")
        assert not waiting.done()
        cluster.pause(old)
        new = cluster.leader()
        other = new_writer()
        commit = append_when_ready(cluster, new, other, 0)
        assert isinstance(commit.outcome, Reached)
        recorder.acknowledge(other, 0, commit)
        cluster.wake(old)
        line.heal()
        with pytest.raises((Fenced, NotReady, TransientStorageError)):
            waiting.result()
    with pytest.raises((Fenced, NotReady, TransientStorageError)):
        append(log, writer, 1)
    cluster.settled()
    commit = append_when_ready(cluster, new, writer, 1)
    recorder.acknowledge(writer, 1, commit)
    found = check(cluster, recorder)
    assert [mark.writer for mark in found] == [str(writer), str(other), str(writer)]
    assert len(cluster.quarantine(old)) == 1


def go_its_own_way(cluster: ClusterOfProcesses, name: str, writer: WriterId, number: int) -> None:
    """Let a stopped replica's copy gain a record that its primary never wrote."""
    with WalLog.open(cluster.data(name), create=False, background=False) as log:
        own = pa.table({"value": pa.array([value_of(Mark(str(writer), number, 0), 50)], pa.binary())})
        log.append_batch(own, writer=writer, number=number, term=log.term).result()


class TestACopyThatDiverged:
    @pytest.mark.matrix
    @pytest.mark.parametrize("behind", [pytest.param(False, marks=pytest.mark.matrix), True])
    def test_stops_until_it_is_built_again_and_a_restart_does_not_change_that(self, start, behind):
        cluster = start(names="ab", policy="local", lease_seconds=15.0)  # all in one term: a failover would explain it
        leader = cluster.begin()
        writer, recorder = new_writer(), Recorder(cluster)
        recorder.acknowledge(writer, 0, append(cluster.clients[leader], writer, 0))
        cluster.settled()
        cluster.stop("b")
        go_its_own_way(cluster, "b", new_writer(), 0)
        if behind:  # the primary has another record there, and more
            for number in (1, 2):
                recorder.acknowledge(writer, number, append(cluster.clients[leader], writer, number))
        for _ in range(2):
            cluster.start("b")
            cluster.until(lambda: cluster.status("b").condition == "diverged", "it stops")
            assert cluster.status("b").trouble
            assert cluster.status("b").position.next == 2, "nothing was discarded or applied"
            cluster.stop("b")
        number = 3 if behind else 1
        recorder.acknowledge(writer, number, append(cluster.clients[leader], writer, number))
        cluster.start("b")
        cluster.clients["b"].rebootstrap()
        cluster.settled()
        assert cluster.status("b").trouble is None
        check(cluster, recorder)
        assert cluster.node_state("b").generation == 2


class TestWallClocksThatJump:
    @pytest.mark.matrix
    def test_harm_neither_the_lease_nor_acknowledged_records_nor_the_registry(self, start):
        cluster = start(automatic=True, lease_seconds=10.0)
        leader = cluster.begin()
        others = [name for name in cluster.names if name != leader]

        def is_healthy(name: str) -> bool:
            members = cluster.clients[leader].topology().members
            return next(member.healthy for member in members if member.name == name)

        with Recorder(cluster) as recorder:
            for mine, theirs in ((5, -7), (-30, 100), (0, 0)):
                cluster.set_clock(leader, hours=mine)
                for name in others:
                    cluster.set_clock(name, hours=theirs)
                recorder.more()
                cluster.until(lambda: all(map(is_healthy, others)), "all are healthy")
            # After all of that its last words are in the future, and still it is missed as soon as ever.
            cluster.kill(others[0])
            cluster.until(lambda: not is_healthy(others[0]), "it is missed", patience=30)
            cluster.start(others[0])
            recorder.more()
            cluster.until(lambda: is_healthy(others[0]), "it is back")
        assert cluster.leader() == leader
        assert cluster.status(leader).term == 1
        check(cluster, recorder)
        assert {cluster.node_state(name).generation for name in cluster.names} == {1}

    @pytest.mark.matrix
    def test_do_not_take_a_silent_replica_for_idle_which_goes_on_from_its_copy_and_lacks_nothing(self, start):
        cluster = start(names="ab", policy="local", max_idle=3600)
        leader = cluster.begin()
        with Recorder(cluster) as recorder:
            recorder.more()
            cluster.kill("b")
            recorder.more()

            def is_silent():
                with contextlib.suppress(StrandlineError):  # on a busy machine its lease may have run out for a moment
                    return not all(each.healthy for each in cluster.clients[leader].topology().members)
                return False

            # Its slot was last seen before the jump, too.
            cluster.until(is_silent, "silent")
            cluster.set_clock(leader, hours=5)
            cluster.until(lambda: cluster.logged(leader, "clock was set ahead by"), "the jump is noticed")
            recorder.more()
            cluster.start("b")
            cluster.settled()
            recorder.more()
        assert not cluster.logged(leader, "(idle-timeout)")
        assert cluster.node_state("b").generation == 1, "it has not bootstrapped again"
        check(cluster, recorder)


class TestFlippedBytes:
    @pytest.mark.matrix
    @pytest.mark.parametrize("way", ["down", "up"])
    def test_under_tls_only_break_connections(self, start, certificate_folder, way):
        self.flip(start(tls=certificate_folder), way)

    @pytest.mark.matrix
    def test_of_records_in_plain_text_are_found_by_their_checksums(self, start):
        self.flip(start(), "down")

    def flip(self, cluster, way):
        line = cluster.lines[cluster.begin()]
        with Recorder(cluster, size=2000) as recorder:
            for _ in range(4):
                before = line.spoiled
                line.flip(way, every=20_000)
                cluster.until(lambda before=before: line.spoiled > before, "a byte has flipped")
                line.heal()
                recorder.more()
        check(cluster, recorder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_in_whatever_order(start, seed):
    """Faults overlap: a line may be dead while its node is killed, or while another one sleeps."""
    cluster, chance = start(automatic=True), random.Random(seed)
    cluster.begin()
    with Recorder(cluster) as recorder:
        for _ in range(15):
            likely = cluster.leader()
            dead: list[str] = []
            asleep: list[str] = []
            for _ in range(chance.randrange(1, 4)):
                name = chance.choice([likely, *cluster.names])
                line = cluster.lines[name]
                match chance.randrange(5):
                    case 0 if name in cluster.running:
                        cluster.kill(name)
                        dead.append(name)
                    case 1 if name in cluster.running:
                        cluster.pause(name)
                        asleep.append(name)
                    case 2:
                        line.cut()
                    case 3:
                        line.hold(chance.choice(["up", "down"]))
                    case _:
                        line.hang_up()
                enough = progress(recorder) + chance.choice([1, 5, 20])
                with contextlib.suppress(AssertionError):  # while nobody leads nothing is told
                    cluster.until(lambda enough=enough: progress(recorder) > enough, "time passes", 2.0)
            for name in asleep:
                cluster.wake(name)
            cluster.start(*dead)
            for line in cluster.lines.values():
                line.heal()
            recorder.more(10)
    check(cluster, recorder)


def progress(recorder: Recorder) -> int:
    """What its writers were told, good or bad."""
    return len(recorder.acknowledged) + sum(recorder.doubts.values())
