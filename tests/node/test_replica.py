"""A replica: pulls, checks, applies, makes durable, acknowledges; and stops by name when something is wrong."""

from __future__ import annotations

from itertools import islice
from uuid import UUID

import pytest
from prometheus_client import REGISTRY

from strandline.errors import CorruptData, Diverged, Fenced, Gap, NotReady, TransientStorageError
from strandline.model.cursor import Bounds, Cursor
from strandline.model.head import LogBatch, WriterId
from strandline.model.node import Heartbeat
from strandline.model.retention import InvalidReason
from strandline.node.lead import bootstrap_snapshots as offers
from strandline.node.lead.committed_log import CommittedLog
from strandline.node.lead.replicas import bootstrapping
from strandline.node.messages import Caller, SnapshotChunk
from strandline.node.replicate import bootstrap
from strandline.node.replicate.incoming import BatchDecision, decide
from tests.matrix_cases import some
from tests.node.nodes_by_hand import Cluster, Link, records

LOG = UUID(int=3)
HEARTBEAT = Heartbeat(term=5, term_start=0, durable=100, committed=100, epoch=1)


def arriving(first, count=3, term=5):
    return LogBatch(first, term, 0, None, (records(*[b"v"] * count),))


class TestJudging:
    @pytest.mark.parametrize(
        ("first", "decision"),
        [
            (10, BatchDecision.APPLY),
            (7, BatchDecision.COMPARE),
            (6, BatchDecision.SKIP),
            (0, BatchDecision.SKIP),
            (8, BatchDecision.COMPARE_AND_APPLY),
            (9, BatchDecision.COMPARE_AND_APPLY),
        ],
    )
    def test_next_is_applied_the_one_before_compared_older_skipped(self, first, decision):
        assert decide(arriving(first), Cursor(LOG, 10, 5), HEARTBEAT, seen=5) is decision

    def test_a_batch_past_the_next_offset_is_a_gap(self):
        with pytest.raises(Gap, match="from offset 11 on arrived, and this replica needs 10: 1 are missing"):
            decide(arriving(11), Cursor(LOG, 10, 5), HEARTBEAT, seen=5)

    def test_a_primary_of_a_lower_term_is_fenced_whatever_it_sends(self):
        for first in (0, 7, 10, 20):
            with pytest.raises(Fenced, match="term 5 sends records, but this replica has seen term 6"):
                decide(arriving(first), Cursor(LOG, 10, 5), HEARTBEAT, seen=6)

    def test_records_of_a_lower_term_behind_those_of_a_higher_one_are_fenced(self):
        with pytest.raises(Fenced, match="Records of term 4"):
            decide(arriving(10, term=4), Cursor(LOG, 10, 5), HEARTBEAT, seen=5)
        assert decide(arriving(10, term=4), Cursor(LOG, 10, 4), HEARTBEAT, seen=5) is BatchDecision.APPLY

    def test_records_of_a_term_that_the_primary_has_not_reached_are_damage(self):
        with pytest.raises(CorruptData):
            decide(arriving(10, term=6), Cursor(LOG, 10, 5), HEARTBEAT, seen=5)


@pytest.fixture
def pair(tmp_path):
    cluster = Cluster(tmp_path, policy="ack_n(1)", leased=False, names="ab")
    cluster.start("a", create=True, lead=True)
    cluster.start("b")
    cluster.settled("b")
    yield cluster
    cluster.close()


def registered(pair):
    return pair.nodes["a"].primary.registry.replica("b")


class TestFollowing:
    def test_acknowledged_records_are_durable_here_in_the_same_batches(self, pair):
        writer = WriterId(UUID(int=9))
        pair.append(b"1", b"2", append=(writer, 0))
        pair.append(b"3")
        pair.settled("b")
        mine, theirs = (
            [
                (span.batch().first, span.batch().term, span.batch().timestamp, span.batch().append, span.batch().count)
                for span in pair.nodes[name].copy.log.plan(pair.nodes[name].copy.log.start())
            ]
            for name in "ab"
        )
        assert mine == theirs
        assert mine[0][3] == (writer, 0)
        assert registered(pair).durable == 3

    def test_an_acknowledgement_that_was_lost_is_sent_again(self, pair):
        lost = []

        def lose(name, answer):
            lost.append(name)
            if len(lost) == 1:
                raise TransientStorageError("the answer was lost")
            return answer

        def refuse(name):
            del pair.before["acknowledge_nowait"]
            pair.after["acknowledge"] = lose
            raise TransientStorageError("the acknowledgement was lost")

        pair.before["acknowledge_nowait"] = refuse
        handle = pair.append(b"x")
        pair.until(handle.done)
        pair.settled("b")
        assert len(lost) > 1
        assert pair.content("b") == [(0, b"x")]

    def test_a_lost_acknowledgement_is_repeated_within_a_heartbeat_interval(self, pair, monkeypatch):
        monkeypatch.setattr(Link, "acknowledge_nowait", lambda *_: None, raising=False)
        handle = pair.append(b"x")
        pair.until(lambda: pair.end("b") == 1)
        assert not handle.done()
        since = pair.clock.monotonic()
        pair.until(handle.done)
        assert 0 < pair.clock.monotonic() - since < 2
        assert pair.nodes["b"].condition == "following"

    def test_it_acknowledges_durable_records_before_anything_else(self, pair):
        log = pair.nodes["b"].replica.copy.log
        seen = []
        pair.before["acknowledge_nowait"] = lambda _: seen.append((log.bounds().next, registered(pair).durable))
        pair.append(b"x")
        pair.settled("b")
        assert seen == [(0, 0)]
        assert (log.bounds().next, registered(pair).durable) == (1, 1)

    def test_a_report_that_fails_is_followed_by_another_try_to_reach_the_primary(self, pair):
        resumed = []

        def refuse(name):
            del pair.before["acknowledge_nowait"]
            pair.before["resume"] = lambda _: resumed.append(pair.end("b"))
            raise TransientStorageError("nobody is there")

        pair.before["acknowledge_nowait"] = refuse
        pair.append(b"x")
        pair.settled("b")
        assert resumed == [1]

    def test_it_asks_for_an_answer_once_in_a_poll_interval(self, pair):
        asked = []
        pair.before["acknowledge_nowait"] = lambda _: asked.append("acknowledge_nowait")
        pair.before["acknowledge"] = lambda _: asked.append("acknowledge")
        for _ in range(5):
            pair.append(b"x")
            pair.settled("b")
        assert set(asked) == {"acknowledge_nowait"}
        pair.clock.advance(1.5)
        for _ in range(5):
            pair.append(b"x")
            pair.settled("b")
        assert asked.count("acknowledge") == 1

    def test_a_repeated_event_changes_nothing(self, pair):
        pair.append(b"x")
        pair.settled("b")
        for _ in range(3):
            pair.nodes["b"].replica.disconnect()
            pair.append(b"y")
            pair.settled("b")
        assert pair.content("b") == pair.content("a")

    def test_its_slot_follows_what_is_durable_here(self, pair):
        pair.append(b"x")
        pair.settled("b")
        pair.nodes["a"].primary.tick()
        assert pair.nodes["a"].primary.log.slots.floor() == 1

    def test_records_that_the_primary_has_trimmed_are_trimmed_here(self, pair):
        for number in range(8):
            pair.append(b"%d" % number)
        pair.settled("b")
        pair.nodes["a"].primary.trim(5)
        pair.until(lambda: pair.nodes["b"].copy.log.bounds() == Bounds(5, 8))

    def test_after_a_restart_its_readers_see_no_less_than_was_written_down(self, pair):
        handle = pair.append(b"x")
        pair.until(handle.done)
        pair.step(200)
        pair.kill("b")
        pair.cut |= {"a"}
        assert pair.start("b").replica.committed == 1

    def test_an_idle_replica_sends_acknowledgements_too(self, pair):
        for _ in range(40):
            pair.step(seconds=0.5)
            pair.nodes["a"].primary.tick()
            assert registered(pair).healthy

    def test_a_replica_that_was_dropped_registers_again(self, pair):
        pair.append(b"x")
        pair.settled("b")
        pair.nodes["a"].primary.unregister(Caller("b", 1))
        pair.until(lambda: "b" in pair.nodes["a"].primary.registry.replicas)
        pair.settled("b")


class TestTrouble:
    def spoil(self, pair, value=b"other"):
        """Give the replica a last record of its own, in the place of the primary's."""
        pair.kill("b")
        node = pair.start("b")
        log = node.copy.log
        log.append_batch(records(value), term=1).result()
        return node

    def test_another_content_in_the_same_place_is_divergence_and_stops_it_by_name(self, pair):
        pair.append(b"x")
        pair.settled("b")
        node = self.spoil(pair)
        pair.append(b"y")
        pair.until(lambda: node.condition == "diverged")
        assert node.node_folder.state.trouble.state == "diverged"
        assert "differs between the primary and this replica" in node.node_folder.state.trouble.reason
        assert pair.content("b") == [(0, b"x"), (1, b"other")], "nothing was applied or discarded"
        assert node.replica.committed <= 1, "what is only here is not shown"
        assert registered(pair).durable <= 1, "nor does it count"

    def test_it_lasts_across_restarts_until_it_is_dealt_with(self, pair):
        pair.append(b"x")
        pair.settled("b")
        node = self.spoil(pair)
        pair.append(b"y")
        pair.until(lambda: node.condition == "diverged")
        pair.kill("b")
        node = pair.start("b")
        pair.step(50)
        assert node.condition == "diverged"
        node.replica.rebootstrap()
        pair.settled("b")
        assert pair.content("b") == pair.content("a") == [(0, b"x"), (1, b"y")]
        assert node.node_folder.state.trouble is None
        assert registered(pair).divergences == 1, "that it happened is known for good"

    def diverged(self, pair):
        """Let the replica stop with a divergence."""
        pair.append(b"x")
        pair.settled("b")
        node = self.spoil(pair)
        pair.append(b"y")
        pair.until(lambda: node.condition == "diverged")
        return node

    def test_its_primary_gets_the_report_while_it_lasts_and_shows_it(self, pair):
        self.diverged(pair)
        pair.until(lambda: registered(pair).divergences == 1)
        primary = pair.nodes["a"]
        assert primary.status().divergences == pair.nodes["b"].status().divergences == 1
        assert primary.primary.topology(Caller("", 1)).members[0].divergences == 1
        primary.primary.tick()
        labels = {"log": str(primary.primary.log.log_id), "replica": "b"}
        assert REGISTRY.get_sample_value("strandline_divergences", labels) == 1
        assert registered(pair).durable <= 1, "what it has does not count"
        primary.primary.unregister(Caller("b", 1))
        assert REGISTRY.get_sample_value("strandline_divergences", labels) is None

    def test_it_reports_to_its_primary_when_that_can_be_reached_again(self, pair):
        self.diverged(pair)
        pair.cut |= {"a"}
        pair.step(20)
        assert registered(pair).divergences == 0
        pair.cut.clear()
        pair.until(lambda: registered(pair).divergences == 1)

    def test_it_reports_to_its_primary_once_and_again_after_a_restart(self, pair):
        told = []
        pair.before["register"] = told.append
        self.diverged(pair)
        pair.until(lambda: registered(pair).divergences == 1)
        told.clear()
        pair.step(50)
        assert told == []
        pair.kill("b")
        pair.start("b")
        pair.until(lambda: told == ["a"])

    def test_its_primary_remembers_it_over_a_restart(self, pair):
        self.diverged(pair)
        pair.until(lambda: registered(pair).divergences == 1)
        pair.kill("b")
        pair.kill("a")
        pair.start("a", lead=True)
        assert registered(pair).divergences == 1

    def test_it_is_counted_although_its_slot_is_invalid(self, pair):
        self.diverged(pair)
        replicas = pair.nodes["a"].primary.replicas
        pair.nodes["a"].primary.log.slots.invalidate("b", InvalidReason.HORIZON)
        replicas.now = bootstrapping(replicas.now, "b", flag=True)
        pair.until(lambda: registered(pair).divergences == 1)
        assert registered(pair).durable is None

    def test_the_count_of_divergences_is_reported(self, pair):
        pair.append(b"x")
        pair.settled("b")
        node = self.spoil(pair)
        pair.append(b"y")
        pair.until(lambda: node.condition == "diverged")
        node.replica.rebootstrap()
        pair.settled("b")
        assert registered(pair).divergences == 1

    def test_equal_content_in_the_same_place_goes_on(self, pair):
        pair.append(b"x")
        pair.settled("b")
        self.spoil(pair, b"y")
        pair.append(b"y")
        pair.append(b"z")
        pair.settled("b")
        assert pair.content("b") == pair.content("a")

    def test_a_gap_stops_it_by_name(self, pair):
        pair.append(b"x")
        pair.settled("b")

        class Skipping:
            def __init__(self, feed):
                self._feed = feed
                self.heartbeat = feed.heartbeat

            def take(self, timeout):
                return [batch for batch in self._feed.take(timeout) if batch.first != 1]

            def close(self):
                self._feed.close()

        pair.nodes["b"].replica.disconnect()
        pair.after["feed"] = lambda _, feed: Skipping(feed)
        pair.append(b"y")
        pair.append(b"z")
        pair.until(lambda: pair.nodes["b"].condition == "gap")
        pair.step(20)
        assert pair.nodes["b"].condition == "gap"
        assert pair.end("b") == 1

    def test_a_record_that_only_the_replica_has_in_this_term_is_divergence(self, pair):
        pair.append(b"x")
        pair.settled("b")
        node = self.spoil(pair)
        pair.until(lambda: node.condition == "diverged")
        assert pair.end("b") == 2

    def test_bytes_that_are_no_batch_are_not_applied_and_asked_for_again(self, pair):
        def spoil(_, feed):
            del pair.after["feed"]

            class Spoilt:
                heartbeat = feed.heartbeat

                def take(self, timeout):
                    raise CorruptData("what arrived is damaged")

                def close(self):
                    feed.close()

            return Spoilt()

        pair.nodes["b"].replica.disconnect()
        pair.after["feed"] = spoil
        pair.append(b"x")
        pair.settled("b")
        assert pair.content("b") == [(0, b"x")]
        assert registered(pair).apply_errors == 1


class TestBootstrap:
    @pytest.fixture
    def small(self, monkeypatch):
        """Pieces of a few bytes, so that there are many."""
        monkeypatch.setattr(offers, "CHUNK_BYTES", 100)
        monkeypatch.setattr(bootstrap, "_SYNC_BYTES", 300)

    def fall_behind(self, pair, count=20):
        pair.append(b"first")
        pair.settled("b")
        pair.cut |= {"a"}
        pair.step(3)
        for number in range(count):
            pair.append(f"{number}".encode() * 20)
        pair.nodes["a"].primary.log.trim(count - 1, beyond_slots=True)
        pair.cut.clear()

    def test_one_that_fell_behind_too_far_is_built_again_and_goes_on(self, pair):
        self.fall_behind(pair)
        pair.settled("b")
        assert pair.content("b") == pair.content("a")
        assert pair.nodes["b"].copy.log.bounds() == Bounds(19, 21)
        handle = pair.append(b"after")
        pair.until(handle.done)
        assert pair.nodes["a"].primary.log.slots.list()[0].invalid is None
        assert not (pair.folder / "a" / "snapshots" / "b").exists()
        assert len(list((pair.folder / "b").glob("data-*"))) == 2, "the one before is kept for its readers"

    def test_a_cut_is_gone_on_from_and_no_piece_is_brought_twice_but_the_last(self, pair, small):
        self.fall_behind(pair)
        asked, brought = [], []

        def cut(_, pieces):
            def some():
                for number, piece in enumerate(pieces):
                    if number == 12:
                        raise TransientStorageError("cut")
                    brought.append(piece.offset)
                    yield piece

            return some()

        pair.after["chunks"] = cut
        pair.before["chunks"] = asked.append
        pair.settled("b")
        assert len(asked) > 3
        size = max(path.stat().st_size for path in (pair.folder / "b").rglob("*.log"))
        assert len(brought) < 4 * size / 100
        assert pair.content("b") == pair.content("a")

    @pytest.mark.parametrize("restarted", some([False, True], 1))
    def test_a_line_that_breaks_after_each_piece_brings_every_piece_once(self, pair, monkeypatch, restarted):
        monkeypatch.setattr(offers, "CHUNK_BYTES", 1000)  # far less than what a crash of the machine may spoil
        self.fall_behind(pair)
        brought = []

        class Killed(BaseException):
            pass

        def cut(_, pieces):
            def some():
                for piece in pieces:
                    brought.append((piece.offset, piece.data[:8]))
                    yield piece
                    raise Killed if restarted else TransientStorageError("cut")

            return some()

        pair.after["chunks"] = cut
        while "b" not in pair.nodes or not pair.nodes["b"].replica or pair.content("b") != pair.content("a"):
            assert len(brought) < 100, "it does not get on"
            try:
                pair.step(30)
            except Killed:
                pair.kill("b")
                pair.start("b")
        assert len(brought) > 10
        assert len(set(brought)) == len(brought)

    def test_bytes_that_a_machine_crash_may_have_damaged_are_fetched_again(self, pair, small, monkeypatch):
        monkeypatch.setattr(bootstrap, "boot_id", lambda: boots[-1])
        boots = [UUID(int=1)]
        self.fall_behind(pair)
        asked = []

        def chunks(_, pieces):
            def some():
                for number, piece in enumerate(pieces):
                    if number == 0:
                        asked.append(piece.offset)
                    if number == 5 and len(boots) == 1:
                        boots.append(UUID(int=2))
                        raise TransientStorageError("the machine went down")
                    yield piece

            return some()

        pair.after["chunks"] = chunks
        pair.settled("b")
        assert 200 in asked, "five pieces of 100 bytes arrived, and the last 300 bytes of them are not trusted"
        assert pair.content("b") == pair.content("a")

    def test_a_piece_that_was_altered_is_thrown_away_and_asked_for_again(self, pair, small):
        self.fall_behind(pair)
        altered = []

        def alter(_, pieces):
            for number, piece in enumerate(pieces):
                if number == 2 and len(altered) < 3:
                    altered.append(piece)
                    yield SnapshotChunk(piece.offset, piece.data[:-1] + b"?", piece.checksum)
                else:
                    yield piece

        pair.after["chunks"] = alter
        pair.settled("b")
        assert len(altered) == 3
        assert pair.content("b") == pair.content("a")

    def test_an_object_altered_with_its_checksum_is_detected_by_the_manifest(self, pair, small):
        self.fall_behind(pair)
        altered = []

        def alter(_, pieces):
            for piece in pieces:
                if not altered and len(piece.data) == 100:
                    altered.append(piece)
                    data = piece.data[:-1] + b"?"
                    yield SnapshotChunk(piece.offset, data, bootstrap.crc32c(data))
                else:
                    yield piece

        pair.after["chunks"] = alter
        pair.settled("b")
        assert altered
        assert pair.content("b") == pair.content("a")

    def test_a_primary_that_forgot_the_snapshot_is_asked_for_another(self, pair, small):
        self.fall_behind(pair)
        calls = []

        def forget(_):
            calls.append(1)
            if len(calls) == 3:
                pair.nodes["a"].primary._bootstrap_snapshots.end("b")

        pair.before["chunks"] = forget
        pair.settled("b")
        assert pair.content("b") == pair.content("a")

    @pytest.mark.parametrize("method", ["begin_snapshot", "chunks", "end_snapshot"])
    @pytest.mark.parametrize("when", some(["before", "after"], 1))
    def test_a_restart_in_the_middle_is_no_harm(self, pair, small, method, when):
        self.fall_behind(pair)
        killed = []

        class Killed(BaseException):
            pass

        def kill(name, answer=None):
            if not killed:
                killed.append(name)
                raise Killed
            return answer

        getattr(pair, when)[method] = kill
        with pytest.raises(Killed):
            pair.settled("b")
        pair.kill("b")
        pair.start("b")
        pair.settled("b")
        assert pair.content("b") == pair.content("a")
        handle = pair.append(b"after")
        pair.until(handle.done)
        pair.settled("b")
        assert pair.content("b") == pair.content("a")

    def test_reads_go_on_while_the_copy_is_built_and_swapped(self, tmp_path, small):
        pair = Cluster(tmp_path, policy="local", leased=False, names="ab")
        pair.start("a", create=True, lead=True)
        pair.start("b")
        pair.append(*[b"%d" % number for number in range(10)])
        pair.settled("b")
        pair.step(30)
        old = pair.nodes["b"].replica.watermark.readable()
        before = CommittedLog(lambda: old, lambda: None)
        seen = []

        def read(*_):
            reading = pair.nodes["b"].reading()
            seen.append(sum(batch.num_rows for batch in reading.read()))
            with pytest.raises(NotReady, match="builds its copy again"):
                pair.nodes["b"].replica.watermark.readable(after=pair.nodes["b"].copy.end(), timeout=0)

        self.fall_behind(pair)
        pair.before["chunks"] = read
        pair.before["end_snapshot"] = lambda _: seen.append(
            sum(batch.num_rows for batch in pair.nodes["b"].reading().read())
        )
        pair.settled("b")
        assert set(seen[:-1]) == {11}
        assert seen[-1] == 12, "the new one, from the moment on that it is there"
        assert sum(batch.num_rows for batch in before.read()) == 11, "who reads the old one goes on"
        pair.close()

    def test_a_newcomer_bootstraps_even_if_everything_is_retained(self, pair):
        pair.append(b"x")
        pair.names = "abc"
        pair.start("c")
        pair.settled("b", "c")
        assert pair.content("c") == [(0, b"x")]


class TestReading:
    def test_up_to_what_is_committed_and_no_further(self, pair):
        handle = pair.append(b"x")
        pair.until(handle.done)
        pair.step(40)
        assert pair.nodes["b"].replica.committed == 1
        pair.names = "abc"
        for name in ("acknowledge_nowait", "acknowledge"):
            pair.before[name] = lambda _: (_ for _ in ()).throw(TransientStorageError("no"))
        pair.append(b"y")
        pair.until(lambda: pair.end("b") == 2)
        assert [batch.num_rows for batch in pair.nodes["b"].reading().read()] == [1]

    def test_after_a_bookmark_waits_until_it_is_here(self, pair):
        handle = pair.append(b"x")
        pair.until(handle.done)
        bookmark = Cursor(pair.nodes["a"].primary.log.log_id, 1, 1)
        replica = pair.nodes["b"].replica
        pair.until(lambda: replica.committed == 1)
        assert replica.watermark.readable(after=bookmark, timeout=0).bounds() == Bounds(0, 1)
        with pytest.raises(NotReady, match="offset 1 is not here yet"):
            replica.watermark.readable(after=bookmark.at(2), timeout=0)

    def test_a_bookmark_of_a_record_that_was_lost_is_not_answered_with_another_one(self, pair):
        handle = pair.append(b"x")
        pair.until(handle.done)
        replica = pair.nodes["b"].replica
        pair.until(lambda: replica.committed == 1)
        with pytest.raises(Diverged, match="of term 1 here, and the bookmark says 7"):
            replica.watermark.readable(after=Cursor(pair.nodes["a"].primary.log.log_id, 1, 7), timeout=0)

    def test_bounded_staleness_is_counted_from_when_it_last_had_everything(self, pair):
        pair.append(b"x")
        pair.settled("b")
        pair.step(5)
        replica = pair.nodes["b"].replica
        assert replica.watermark.readable(max_staleness=1.0, timeout=0).bounds().next >= 0
        pair.cut |= {"a"}
        pair.step(30, seconds=0.1)
        with pytest.raises(NotReady, match="s behind"):
            replica.watermark.readable(max_staleness=1.0, timeout=0)
        assert list(islice(pair.nodes["b"].reading().read(), 1))

    def test_a_replica_without_a_copy_says_so(self, pair):
        pair.names = "abc"
        node = pair.start("c")
        with pytest.raises(NotReady, match="no copy of the log yet"):
            node.reading()
