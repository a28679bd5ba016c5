"""A whole cluster in a simulation: nothing acknowledged is lost, nothing is there twice; broken twins are caught.

A failure names its seed: ``play(seed, steps)`` of ``tests.cluster`` tells the same history again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from strandline.log.slots import rules, trimming
from strandline.log.wal.slots import WalSlots
from strandline.model.addresses import CONSUMER_SUFFIX, COPIED_SUFFIX
from strandline.model.cursor import Cursor
from strandline.node.elect import candidacy, election
from strandline.node.elect.node_lease import Leadership
from strandline.node.lead import begin, tiering
from strandline.node.lead.commit_watermark import CommitHandle, CommitWatermark
from strandline.node.lead.committed_log import ReadableLog
from strandline.node.lead.feed import LogFeed
from strandline.node.lead.primary import PrimaryRole
from strandline.node.lead.replicas import ReplicaRegistry, Replicas, bootstrapping
from strandline.node.lead.tiering import TiererSlots
from strandline.node.messages import Caller, ReplicaProgress
from strandline.node.node import Node
from strandline.node.node_folder import NodeFolder
from strandline.node.replicate.log_copy import LogCopy, from_offset
from strandline.node.replicate.replica import ReplicaRole
from strandline.node.replicate.watermark import ReplicaWatermark
from strandline.testing.simdisk import CrashMode
from strandline.tier.claim import ClaimCell
from strandline.tier.copy.expiry import Expiry
from strandline.tier.copy.segment_files import forget_tails
from tests.cluster import Broken, Climate, World, check, play
from tests.cluster.changing_members import of_changes, reshape
from tests.cluster.clients import read
from tests.cluster.forced_promotions import operate
from tests.cluster.history import (
    Acknowledged,
    Final,
    HistoryEntry,
    Promised,
    Read,
    Refused,
    SealAcknowledged,
    Shown,
    TermsSeen,
    Wiped,
)
from tests.cluster.network import Weather
from tests.cluster.sealing import seal
from tests.matrix_cases import sampled


def play_many(seeds, steps=500, climate=None, *, tiered=False):
    """Play them all; what happened in total."""
    total = Counter()
    for seed in seeds:
        forget_tails()  # of the worlds before
        told = play(seed, steps, climate, tiered=tiered)
        total += told.counts
        total["steps"] += told.steps
    return total


def operate_many(seeds, retention=None):
    """Play histories of forced promotions; what happened in total."""
    total = Counter()
    for seed in seeds:
        forget_tails()  # of the worlds before
        total += operate(seed, retention=retention).counts
    return total


def seal_many(seeds, **options):
    """Play histories in which a client seals the log; what happened in total."""
    return sum((seal(seed, **options).counts for seed in seeds), Counter())


class TestHistories:
    @pytest.mark.parametrize("every", sampled(18, matrix=4))
    def test_nothing_acknowledged_is_lost_or_doubled_in_a_hundred_thousand_steps(self, every):
        total = play_many(range(0, 180, every))
        assert total["steps"] >= 100_000 / every
        for what, least in {
            "acknowledged": 3000,
            "failovers": 60,
            "bootstraps": 200,
            "rewinds": 10,
            "timeouts": 50,
            "crashes": 300,
            "stalls": 50,
            "wipes": 5,
            "sent ahead": 500,
            "reads": 1000,
            "confirmed": 1000,
            "slots read": 1000,
            "shown": 10_000,
        }.items():
            assert total[what] >= max(1, least // every), f"{what} happened {total[what]} times only, in {dict(total)}"

    @pytest.mark.parametrize("every", sampled(20, matrix=4))
    def test_nothing_is_lost_or_doubled_in_either_tier_of_a_log_that_fails_over(self, every):
        total = play_many(range(0, 60, every), steps=300, tiered=True)
        for what, least in {
            "acknowledged": 800,
            "failovers": 12,
            "segments": 500,
            "switches": 500,
            "expired": 10,
            "rounds failed": 40,
            "died tiering": 5,
        }.items():
            assert total[what] >= least // every, f"{what} happened {total[what]} times only, in {dict(total)}"

    @pytest.mark.matrix
    @pytest.mark.parametrize("every", sampled(30, matrix=5))
    def test_a_primary_keeps_what_it_has_whatever_former_ones_do_that_were_replaced_by_force(self, every):
        total = operate_many(range(0, 60, every))
        for what, least in {
            "promotions": 200,
            "overtaken": 200,
            "whole": 200,
            "judged": 600,
            "segments": 1000,
            "retired": 60,
            "expired": 60,
        }.items():
            assert total[what] >= least // every, f"{what} happened {total[what]} times only, in {dict(total)}"

    @pytest.mark.parametrize("every", sampled(120, matrix=4))
    def test_nothing_is_lost_or_doubled_while_the_members_of_the_log_change(self, every):
        total = sum((reshape(seed).counts for seed in range(0, 120, every)), Counter())
        total += sum((reshape(seed, climate=of_changes()).counts for seed in range(200, 320, every)), Counter())
        for what, least in {"acknowledged": 2000, "failovers": 40, "pending": 300, "complete": 300}.items():
            assert total[what] >= least // every, f"{what} happened {total[what]} times only, in {dict(total)}"

    @pytest.mark.parametrize("every", sampled(60, matrix=6))
    def test_an_acknowledged_seal_ends_the_log_for_good(self, every):
        total = seal_many(range(0, 240, every))
        total += seal_many(range(0, 240, every), climate=Climate.of_elections())
        for what, least in {"sealed": 200, "seals in doubt": 200, "refused": 200, "failovers": 60}.items():
            assert total[what] >= least // every, f"{what} happened {total[what]} times only, in {dict(total)}"

    @pytest.mark.matrix
    def test_an_acknowledged_seal_ends_the_log_while_its_members_change_and_in_either_tier(self):
        seal_many(range(0, 200, 10), climate=of_changes(), reshaped=True)
        seal_many(range(0, 200, 20), climate=Climate.of_tiers(), tiered=True)

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_an_acknowledged_seal_ends_the_log_for_good_in_a_long_time(self):
        seal_many(range(60_000, 60_400))
        seal_many(range(61_000, 61_400), climate=of_changes(), reshaped=True)

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_nothing_is_lost_or_doubled_while_the_members_change_for_a_long_time(self):
        for seed in range(50_000, 50_300):
            reshape(seed)
            reshape(seed, climate=of_changes())

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_a_primary_keeps_what_it_has_in_a_long_time(self):
        operate_many(range(40_000, 40_400))

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_nothing_is_lost_or_doubled_in_either_tier_in_a_long_time(self):
        play_many(range(30_000, 30_400), tiered=True)
        play_many(range(31_000, 31_100), climate=Climate.of_tiers(), tiered=True)

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_nothing_acknowledged_is_lost_or_doubled_in_a_long_time(self):
        play_many(range(10_000, 12_000))
        play_many(range(20_000, 20_040), 8000)

    @pytest.mark.matrix
    def test_a_seed_gives_the_same_history_each_time(self):
        assert play(7, 300) == play(7, 300)


# --- the judge -------------------------------------------------------------------------------------------------


def entry(writer, number, part=0, parts=1):
    return HistoryEntry(writer, number, part, parts)


def told(node, term, writer, number, first, count=1):
    return Acknowledged(node, term, writer, number, first, count)


def final(*entries, first=0, **others):
    logs = {"a": (first, entries), "b": (first, entries)} | others
    return Final(logs, ("a",), {}, first + len(entries))


GOOD = [
    TermsSeen("a", 1, 1, 1),
    told("a", 1, "w0", 0, 0),
    Read("b", 0, (entry("w0", 0),)),
    told("b", 2, "w1", 0, None, 2),
    final(entry("w0", 0), entry("w1", 0, 0, 2), entry("w1", 0, 1, 2)),
]

SEALED = [
    told("a", 1, "w0", 0, 0),
    SealAcknowledged("a", 1, 1),
    told("b", 2, "w0", 0, 0),
    Refused("a", 1),
    Shown("b", 1, leads=True, sealed=True),
    replace(final(entry("w0", 0)), committed=2, sealed=("a", "b")),
]

BAD = {
    "an append behind a seal": [SealAcknowledged("a", 1, 1), told("b", 2, "w0", 1, 1)],
    "a seal below an append": [told("b", 2, "w0", 1, 1), SealAcknowledged("a", 2, 1)],
    "a seal in an old term": [told("b", 2, "w0", 0, 0), SealAcknowledged("a", 1, 1)],
    "a record that was read behind a seal": [Refused("a", 0), Read("b", 0, (entry("w0", 0),))],
    "two seals": [Shown("a", 1, leads=False, sealed=True), Refused("b", 2)],
    "a node that shows no seal any more": [Shown("a", 1, leads=False, sealed=True), Shown("a", 1, leads=False)],
    "a primary that shows no seal": [SealAcknowledged("a", 1, 1), Shown("b", 1, leads=True)],
    "a seal that is lost": [SealAcknowledged("a", 1, 1), final(entry("w0", 0))],
    "a seal of some nodes": [replace(final(entry("w0", 0)), committed=2, sealed=("a",))],
    "a seal that is not committed": [replace(final(entry("w0", 0)), sealed=("a", "b"))],
    "a lost acknowledgement": [told("a", 1, "w0", 1, 1), final(entry("w0", 0))],
    "one of unknown place that is lost": [told("a", 1, "w0", 1, None), final(entry("w0", 0))],
    "an acknowledged append elsewhere": [told("a", 1, "w1", 0, 0), final(entry("w0", 0), entry("w1", 0))],
    "a record that was read and is another one": [Read("a", 0, (entry("w1", 0),)), final(entry("w0", 0))],
    "two records at one offset": [Read("a", 0, (entry("w1", 0),)), Read("b", 0, (entry("w0", 0),))],
    "a record that was read behind the end": [Read("a", 0, (entry("w0", 0), entry("w0", 1))), final(entry("w0", 0))],
    "an append twice": [final(entry("w0", 0), entry("w0", 0))],
    "numbers out of order": [final(entry("w0", 1), entry("w0", 0))],
    "a missing number": [final(entry("w0", 0), entry("w0", 2))],
    "half an append": [final(entry("w0", 0, 0, 2), entry("w1", 0))],
    "an acknowledgement in an old term": [told("a", 2, "w0", 0, 0), told("b", 1, "w1", 0, 1)],
    "a node that shows less than before": [Shown("a", 3, leads=False), Shown("a", 2, leads=False)],
    "a node that shows nothing any more": [Shown("a", 3, leads=False), Shown("b", 3, leads=True), Shown("a", 0, False)],
    "a primary that shows less than was acknowledged": [told("a", 1, "w0", 0, 0), Shown("b", 0, leads=True)],
    "a term that was forgotten": [TermsSeen("a", 3, 2, 0), TermsSeen("a", 2, 2, 0)],
    "a term that was promised and forgotten": [Promised("a", 3), TermsSeen("a", 2, 2, 0)],
    "nodes that hold different records": [final(entry("w0", 0), c=(0, (entry("w1", 0),)))],
    "a node that is behind": [final(entry("w0", 0), c=(0, ()))],
    "nobody who leads": [replace(final(entry("w0", 0)), primaries=())],
    "two who lead": [replace(final(entry("w0", 0)), primaries=("a", "b"))],
    "a node in trouble": [replace(final(entry("w0", 0)), troubles={"c": "diverged"})],
    "something that nobody vouches for": [final(entry("w0", 1), first=1)],
    "a tail that is not committed": [replace(final(entry("w0", 0)), committed=0)],
}


class TestTheChecker:
    def test_a_good_history_passes(self):
        check(GOOD)

    def test_a_good_history_of_a_sealed_log_passes(self):
        check(SEALED)
        check([Shown("a", 0, leads=True), Wiped("b"), *SEALED])

    def test_a_node_that_lost_its_disk_may_begin_with_lower_terms(self):
        check([TermsSeen("a", 3, 3, 3), Wiped("a"), TermsSeen("a", 1, 0, 0)])

    def test_a_node_that_lost_its_disk_may_show_less_and_a_replica_less_than_was_acknowledged(self):
        check([Shown("b", 3, leads=False), Wiped("b"), told("a", 1, "w0", 0, 0), Shown("b", 0, leads=False)])

    @pytest.mark.parametrize("events", BAD.values(), ids=BAD)
    def test_the_checker_rejects_a_broken_history(self, events):
        with pytest.raises(Broken):
            check(events)


# --- broken twins ----------------------------------------------------------------------------------------------


def acknowledges_before_it_is_durable(patch):
    """Broken: a replica counts what it has written and not synced."""

    def take(self, batches, *, since, upto):
        del since, upto
        at = self.log._committer.next
        self.log._committer.commit_all()
        for batch in batches:
            if batch.next > at:
                self.log.append_copy(batch if batch.first == at else from_offset(batch, at))
                at = batch.next

    def progress(self, durable):
        del durable
        written = self.copy.log._committer.next
        return ReplicaProgress(written, written)

    patch.setattr(LogCopy, "take", take)
    patch.setattr(ReplicaRole, "_progress", progress)


def forgets_the_term_on_restart(patch):
    """Broken: the highest term is known until the process ends."""
    opened = NodeFolder.open.__func__

    def open_home(cls, *args, **options):
        home = opened(cls, *args, **options)
        home._state = replace(home._state, seen=home._state.adopted)
        return home

    patch.setattr(NodeFolder, "open", classmethod(open_home))


def resumes_at_the_slot(patch):
    """Broken: a replica goes on at the higher of its own position and its slot's."""

    def feed(self, caller, since):
        slot = self.replicas.slot(caller.name)
        since = Cursor(since.log_id, max(since.next, slot.position))
        return LogFeed(self.log, since, self.heartbeat, lambda upto: self.replicas.sent(caller.name, upto))

    def resume_at(self, name, at):
        del at
        self.now = bootstrapping(self.now, name, flag=False)

    patch.setattr(Replicas, "resume_at", resume_at)
    patch.setattr(PrimaryRole, "feed", feed)


def checks_the_lease_before_the_write_only(patch):
    """Broken: nobody asks whether the node still leads when it tells."""

    told = CommitHandle.result

    def result(self, timeout):
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Leadership, "check", lambda *_: None)
            return told(self, timeout)

    patch.setattr(CommitHandle, "result", result)


def is_elected_by_whoever_answers(patch):
    """Broken: no quorum has to be heard."""
    patch.setattr(election, "covers", lambda *_, **__: True)


def counts_replicas_below_the_beginning_of_its_term(patch):
    """Broken: a replica counts although it may lose what it has to a log of a higher term."""
    offsets = ReplicaRegistry.durable_offsets
    patch.setattr(
        ReplicaRegistry, "durable_offsets", lambda self, primary, durable, **_: offsets(self, primary, durable)
    )


def does_not_fence_when_it_reports(patch):
    """Broken: who was asked by a candidate goes on with the former primary."""
    patch.setattr(Node, "report", lambda self, _: self._report())


def notes_what_it_adopted_too_late(patch):
    """Broken: that it has the beginning of a term is not durable when it acknowledges."""

    def adopt(self, term, start, durable):
        if self._node_folder.state.adopted < term and durable >= start:
            self._node_folder._state = replace(self._node_folder._state, adopted=term)

    patch.setattr(ReplicaRole, "_adopt", adopt)


def is_elected_by_its_length_alone(patch):
    """Broken: the longer log wins, of whatever term."""
    for module in (election, candidacy):
        patch.setattr(module, "log_rank", lambda report: (0, report.durable))


def shows_what_is_durable(patch):
    """Broken: readers of a replica see everything that it has."""

    def durable(self):
        copy = self._copy()
        return 0 if copy is None else copy.log.bounds().extent

    patch.setattr(ReplicaWatermark, "_reached", property(durable))


def believes_a_watermark_before_the_logs_agree(patch):
    """Broken: what a new primary has committed is taken for what is here in the same place."""
    learn = ReplicaRole._update_topology

    def learn_too_much(self, topology):
        learn(self, topology)
        self.watermark.shown = max(self.watermark.shown, topology.committed)

    patch.setattr(ReplicaRole, "_update_topology", learn_too_much)


def shows_what_it_remembers_after_a_crash(patch):
    """Broken: a node that was killed takes the watermark that it last wrote down for all that it has shown."""
    patch.setattr(ReplicaWatermark, "is_known", property(lambda _: True, lambda *_: None), raising=False)


def shows_what_it_remembers_when_it_leads(patch):
    """Broken: a new primary shows its watermark before that covers what was acknowledged before its term."""
    patch.setattr(CommitWatermark, "is_known", True)


def keeps_a_tail_that_the_primary_never_had(patch):
    """Broken: a position that the primary retains is taken for the same log."""
    patch.setattr("strandline.node.lead.primary.agreement", lambda *_, **__: None)


def leads_on_with_a_log_that_failed(patch):
    """Broken: a primary whose log has failed leads on."""
    patch.setattr("strandline.log.wal.log.WalLog.failed", False)


ANYTHING = None
ELECTIONS = Climate.of_elections()
PAUSES = Climate.of_pauses()

LONG = pytest.mark.matrix
"""Twins that are found only after many histories."""

TWINS = [
    (acknowledges_before_it_is_durable, ANYTHING, "holds something else|both were committed"),
    (forgets_the_term_on_restart, ANYTHING, "forgot"),
    (resumes_at_the_slot, ANYTHING, "gap|never acknowledged|holds something else"),
    pytest.param(checks_the_lease_before_the_write_only, PAUSES, "acknowledged in term", marks=LONG),
    (is_elected_by_whoever_answers, ELECTIONS, "diverged|both were committed|leads and shows"),
    (does_not_fence_when_it_reports, ELECTIONS, "promised term"),
    pytest.param(notes_what_it_adopted_too_late, ANYTHING, "forgot terms", marks=LONG),
    pytest.param(shows_what_is_durable, ELECTIONS, "both were committed|has shown everything below", marks=LONG),
    pytest.param(believes_a_watermark_before_the_logs_agree, ELECTIONS, "both were committed|diverged", marks=LONG),
    (shows_what_it_remembers_after_a_crash, ANYTHING, "has shown everything below"),
    (shows_what_it_remembers_when_it_leads, ELECTIONS, "leads and shows|has shown everything below"),
    (keeps_a_tail_that_the_primary_never_had, ELECTIONS, "diverged|both were committed"),
    pytest.param(leads_on_with_a_log_that_failed, ANYTHING, "never acknowledged", marks=LONG),
    pytest.param(
        is_elected_by_its_length_alone,
        ELECTIONS,
        "diverged|both were committed|leads and shows",
        marks=pytest.mark.slow,
    ),
]


class TestAPrimaryOfOldRecords:
    """A record on most nodes may still be lost: if its primary is of a later term, and its log was not yet whole there.

    Chance needs long for this one, so that it is told by hand.
    """

    def test_does_not_commit_them_one_by_one(self):
        self.tell()

    @pytest.mark.matrix
    def test_is_caught_if_it_does(self, monkeypatch):
        counts_replicas_below_the_beginning_of_its_term(monkeypatch)
        shows_what_it_remembers_when_it_leads(monkeypatch)  # or nobody would see it yet
        with pytest.raises(Broken, match=r"both were committed|diverged"):
            self.tell()

    def tell(self):
        world = self.world = World(1, Climate.of_elections().calm())
        world.network.weather = Weather(held=1e-9)  # batches arrive one by one
        a, b, c = world.machines.values()
        self.turn_until(lambda: [machine.condition for machine in (a, b, c)] == ["leading", "following", "following"])
        self.hold(b, c)
        self.append(a, world.writers)
        self.lose(a)
        b.paused = c.paused = 0.0
        self.turn_until(lambda: "leading" in (b.condition, c.condition))
        second, third = (b, c) if b.condition == "leading" else (c, b)
        self.hold(third)  # it has elected the other one, and heard nothing of it since
        self.append(second, world.writers[1:2])
        self.lose(second)
        a.starts = third.paused = 0.0
        self.turn_until(lambda: a.condition == "leading")
        self.turn_until(lambda: a.running.primary.registry.replicas[third.name].durable)
        assert third.running.report(Caller("", 0)).durable < a.running.primary.term_start
        seen = read("a", a.running)
        if seen is not None:  # it shows nothing before all from before its term is committed
            world.checker.take(seen)
        self.lose(third)  # and with it what has arrived there, and is not stored
        self.lose(a)
        second.starts = third.starts = 0.0
        self.turn_until(lambda: second.condition == "leading")
        world.play(0)

    def turn_until(self, condition):
        for _ in range(2000):
            if condition():
                return
            self.world.turn()
        raise AssertionError("it did not come to that")

    def hold(self, *machines):
        for machine in machines:
            machine.paused = 1e9

    def lose(self, machine):
        self.world.crash(machine, CrashMode.KILL)
        machine.starts = 1e9

    def append(self, machine, writers):
        for writer in writers:
            writer.submit(machine.name, machine.running, machine.life, self.world.time.now)
            assert writer.poll(0, writer.open[0], self.world.time.now) == ""


def trims_before_its_tierer_has_looked(patch):
    """Broken: a new primary does not pin what is in no segment."""
    patch.setattr(begin, "pin_uncopied", lambda *_, **__: None)


def trims_beyond_what_is_copied(patch):
    """Broken: the tierer's slot moves to the end of the log, whatever was copied."""
    advance = TiererSlots.advance

    def too_far(self, name, holder, epoch, to):
        advance(self, name, holder, epoch, Cursor(to.log_id, max(to.next, self.table._bounds().next)))

    patch.setattr(TiererSlots, "advance", too_far)


def tiers_what_is_durable(patch):
    """Broken: a primary copies records to the cold tier before they are committed."""
    committed = tiering.CommittedLog

    def unbounded(readable, slots):
        mark = readable.__self__
        return committed(lambda: ReadableLog(mark._log, lambda durable: durable, mark._wait_durable), slots)

    patch.setattr(tiering, "CommittedLog", unbounded)


def takes_over_slots_at_the_end(patch):
    """Broken: a new primary takes its log's end for what consumers have confirmed."""
    taken_over = rules.taken_over
    patch.setattr(rules, "taken_over", lambda state, term, end: replace(taken_over(state, term, end), position=end))


def trims_without(patch, suffix):
    proven = WalSlots.proven
    patch.setattr(WalSlots, "proven", lambda self: [slot for slot in proven(self) if not slot.name.endswith(suffix)])


def trims_whatever_consumers_need(patch):
    """Broken: slots of consumers pin nothing on a primary."""
    trims_without(patch, CONSUMER_SUFFIX)


def trims_its_copy_whatever_consumers_need(patch):
    """Broken: what consumers need is pinned on the primary, and not on the replica that leads next."""
    trims_without(patch, COPIED_SUFFIX)
    patch.setattr(trimming, "retained_first", lambda *_: 0)  # else it invalidates them, which is no loss in silence


def keeps_slots_that_it_cannot_serve(patch):
    """Broken: a new primary takes over slots at offsets that only the former one retained."""
    patch.setattr(trimming, "retained_first", lambda *_: 0)


TRIMS = Climate.of_tiers()
RESTARTS = Climate.of_restarts()

SLOT_TWINS = [
    (takes_over_slots_at_the_end, ANYTHING, "is at .* and only what is below .* was confirmed"),
    (trims_whatever_consumers_need, TRIMS, "a slot on . needs offset"),
    (keeps_slots_that_it_cannot_serve, RESTARTS, "a slot on . needs offset"),
    pytest.param(trims_its_copy_whatever_consumers_need, TRIMS, "a slot on . needs offset", marks=pytest.mark.slow),
]


def acknowledges_the_seal_before_it_is_durable(patch):
    """Broken: a replica counts a seal of which it has only heard."""

    def is_heard(self, heartbeat):
        return heartbeat.sealed and heartbeat.durable == self.log.bounds().next + 1

    patch.setattr(LogCopy, "seal_with", is_heard)


def shows_a_seal_that_is_not_committed(patch):
    """Broken: readers of a node see a seal as soon as its copy has it."""
    bounds = ReadableLog.bounds
    patch.setattr(ReadableLog, "bounds", lambda self: replace(bounds(self), sealed=self.log.bounds().sealed))


def keeps_a_seal_that_the_primary_never_had(patch):
    """Broken: a replica takes no seal back."""
    patch.setattr("strandline.node.replicate.replica.drop_uncommitted_seal", lambda *_: None)


def refuses_appends_for_a_seal_that_is_not_committed(patch):
    """Broken: a client is told that the log was sealed while that may get lost."""
    patch.setattr(CommitWatermark, "check_seal", lambda _: None)


SEALING_TWINS = [
    (refuses_appends_for_a_seal_that_is_not_committed, ANYTHING, "shows no seal|sealed at"),
    (acknowledges_the_seal_before_it_is_durable, ELECTIONS, "shows no seal|was sealed|show that the log was sealed"),
    (shows_a_seal_that_is_not_committed, ELECTIONS, "shows none|sealed at|shows no seal"),
    (
        keeps_a_seal_that_the_primary_never_had,
        ELECTIONS,
        "does not know yet|was sealed|never acknowledged|show that the log was sealed",
    ),
]


def is_not_fenced_in_the_store(patch):
    """Broken: a primary that was replaced finds the later claim, and goes on."""
    patch.setattr(ClaimCell, "_own", lambda _, known: known)


def checks_its_claim_before_it_deletes(patch):
    """Broken: a deletion is preceded by a check, and not by a note that the next primary finds."""
    patch.setattr(ClaimCell, "retire", lambda self, _: self.check())


def keeps_the_position_of_its_tierer(patch):
    """Broken: a primary trims what it had copied when it led last, though another one has led since."""
    pin = begin.pin_uncopied
    patch.setattr(begin, "pin_uncopied", lambda log, **_: pin(log, led_by_another=False))


def expires_after_it_was_replaced(patch):
    """Broken: expiry looks at the slots of its own primary, whether another one has claimed the cold tier or not."""
    run = Expiry.run
    patch.setattr(Expiry, "run", lambda self, _: run(self, SimpleNamespace(touch=lambda: None)))


OPERATED_TWINS = [
    (is_not_fenced_in_the_store, None, 40),
    pytest.param(checks_its_claim_before_it_deletes, None, 0, marks=pytest.mark.slow),
    (keeps_the_position_of_its_tierer, None, 0),
    pytest.param(expires_after_it_was_replaced, "consumed", 0, marks=pytest.mark.slow),
]
"""With the history to begin at: from 0 on it takes 44 of them to catch the first one, about a second each."""

TIERED_TWINS = [
    (tiers_what_is_durable, "only what is committed may be in segments"),
    (trims_beyond_what_is_copied, "in neither tier|cannot be tiered|a slot on . needs offset"),
    (trims_before_its_tierer_has_looked, "in neither tier|cannot be tiered|a slot on . needs offset"),
]


class TestBrokenTwins:
    @pytest.mark.matrix
    @pytest.mark.parametrize(("twin", "climate", "finding"), TWINS)
    def test_a_broken_twin_is_caught(self, twin, climate, finding, monkeypatch):
        twin(monkeypatch)
        with pytest.raises(Broken, match=finding):
            play_many(range(600), climate=climate)

    @pytest.mark.matrix
    @pytest.mark.parametrize(("twin", "climate", "finding"), SLOT_TWINS)
    def test_a_broken_twin_is_caught_by_the_slots_of_consumers(self, twin, climate, finding, monkeypatch):
        twin(monkeypatch)
        with pytest.raises(Broken, match=finding):
            play_many(range(400), climate=climate)

    @pytest.mark.matrix
    @pytest.mark.parametrize(("twin", "retention", "first"), OPERATED_TWINS)
    def test_is_caught_when_primaries_are_replaced_by_force(self, twin, retention, first, monkeypatch):
        twin(monkeypatch)
        with pytest.raises(Broken, match="leads, and has"):
            operate_many([*range(first, 400), *range(first)], retention)

    @pytest.mark.matrix
    @pytest.mark.parametrize(("twin", "climate", "finding"), SEALING_TWINS)
    def test_is_caught_in_a_log_that_is_sealed(self, twin, climate, finding, monkeypatch):
        twin(monkeypatch)
        with pytest.raises(Broken, match=finding):
            seal_many(range(400), climate=climate)

    @pytest.mark.matrix
    @pytest.mark.parametrize(("twin", "finding"), TIERED_TWINS)
    def test_is_caught_in_a_log_with_a_cold_tier(self, twin, finding, monkeypatch):
        twin(monkeypatch)
        with pytest.raises(Broken, match=finding):
            play_many(range(200), climate=Climate.of_tiers(), tiered=True)
