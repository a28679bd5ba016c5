"""Copying a queue of version 1 into an object log: each batch once, however often it is killed and restarted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pyarrow as pa
import pytest

from strandline.compat.v1.upgrade import UpgradeProgress, upgrade
from strandline.errors import CorruptData, Diverged, NotFound, OutcomeUnknown, TransientStorageError
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head import edits
from strandline.log.writers import numbered as writers
from strandline.model.head import MetadataRange, QueueEntry, QueueManifest, WriterId
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.compat.v1.filled_queues import (
    append,
    encode_manifest,
    fill,
    foreign_batch,
    manifest_in,
    opened,
    values,
    writer,
)


class Scene:
    """A queue with batches 5 to 8 and an empty object log, each in a store of its own that may be made to fail."""

    def __init__(self, *, batches: int = 4) -> None:
        self.source = PlainStore("plain://queue")
        self.target = PlainStore("plain://own")
        self.clock = ManualClock()
        fill(self.source, *[(b"%d" % n, b"%d'" % n) for n in range(5, 5 + batches)], first=5, epoch=2)
        open_log(self.target, create=True, env=Env(clock=self.clock, chance=SeededChance(7)))
        self._opened = 0

    def run(self, *, line: FaultyStore | None = None, source_line: FaultyStore | None = None, **options):
        """One process that copies, and ends."""
        self._opened += 1
        chance = SeededChance(100 + self._opened)
        queue = opened(source_line or self.source, clock=self.clock)
        target = open_log(line or self.target, env=Env(clock=self.clock, chance=chance))
        return upgrade(queue, target, **options)

    @property
    def log(self) -> ObjectLog:
        return open_log(self.target, env=Env(clock=self.clock))

    def copied(self) -> list[bytes]:
        return [value for batch in self.log.read() for value in batch.column("value").to_pylist()]

    def batches(self) -> list[bytes]:
        """The first value of each batch in the target."""
        return [span.fetch()[0].column("value")[0].as_py() for span in self.log.plan(self.log.start())]

    def ack(self, through: int) -> None:
        opened(self.source, clock=self.clock).slots.reset("queue", through + 1)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_every_listed_batch_becomes_one_of_the_log_with_its_metadata(scene):
    told: list[UpgradeProgress] = []
    progress = scene.run(on_progress=told.append)
    assert progress == UpgradeProgress(9, 9, copied=4, records=8)
    assert [item.next for item in told] == [6, 7, 8, 9]
    assert scene.copied() == [b"5", b"5'", b"6", b"6'", b"7", b"7'", b"8", b"8'"]
    tail = scene.log.head().tail
    assert [entry.count for entry in tail] == [2, 2, 2, 2]
    assert [entry.metadata for entry in tail] == [entry.metadata for entry in manifest_in(scene.source).entries]
    table = pa.Table.from_batches(scene.log.read())
    assert [int(stamp.timestamp()) for stamp in table["timestamp"].to_pylist()] == [5, 5, 6, 6, 7, 7, 8, 8]


def test_nothing_is_changed_on_the_queue_unless_asked(scene):
    before = {item.path: scene.source.get(item.path).data for item in scene.source.list("")}
    scene.run()
    assert {item.path: scene.source.get(item.path).data for item in scene.source.list("")} == before


def test_asked_to_it_claims_the_queue_and_acknowledges_what_is_copied(scene):
    scene.run(acknowledge=True)
    manifest = manifest_in(scene.source)
    assert (manifest.entries, manifest.next_sequence, manifest.epoch) == ((), 9, 3)
    scene.run(acknowledge=True)
    assert manifest_in(scene.source) == manifest, "there was nothing left to acknowledge, and nobody was fenced"
    assert len(scene.copied()) == 8


def test_running_it_again_copies_nothing_twice(scene):
    scene.run()
    calls = FaultyStore(scene.target)
    assert scene.run(line=calls) == UpgradeProgress(9, 9)
    assert not calls.named("put", "put_if")
    assert len(scene.copied()) == 8


def test_running_it_again_copies_what_came_since(scene):
    scene.run()
    append(opened(scene.source), b"9", number=0)
    assert scene.run() == UpgradeProgress(10, 10, copied=1, records=1)
    scene.ack(9)
    append(opened(scene.source), b"10", number=1)
    assert scene.run() == UpgradeProgress(11, 11, copied=1, records=1)
    assert scene.batches() == [b"5", b"6", b"7", b"8", b"9", b"10"]


def test_an_empty_queue_is_copied_at_once():
    scene = Scene(batches=0)
    assert scene.run(acknowledge=True) == UpgradeProgress(5, 5)
    assert scene.copied() == []
    append(opened(scene.source), b"5", number=0)
    assert scene.run().copied == 1


def test_a_queue_without_a_manifest_is_empty(scene):
    scene.source.delete("ingest/manifest")
    assert scene.run(acknowledge=True) == UpgradeProgress(0, 0)


def test_batches_that_were_acknowledged_before_they_could_be_copied_are_counted(scene):
    line = FaultyStore(scene.target)
    line.fail_next("put_if", times=10_000)
    scene.ack(5)
    with pytest.raises((OutcomeUnknown, TransientStorageError)):
        scene.run(line=line)
    line.heal()
    killed = FaultyStore(scene.target)
    killed.hook(_dying("put_if", 1))
    with pytest.raises(Crash):
        scene.run(line=killed)
    assert scene.batches() == [b"6"]
    scene.ack(7)
    assert scene.run() == UpgradeProgress(9, 9, copied=1, records=2, missed=1)
    assert scene.batches() == [b"6", b"8"]
    assert scene.run() == UpgradeProgress(9, 9)


def _dying(name: str, times: int) -> Callable[[Call], None]:
    left = times

    def hook(call: Call) -> None:
        nonlocal left
        if call.name == name and call.stage == "after":
            left -= 1
            if not left:
                raise Crash(str(call))

    return hook


def test_a_batch_that_is_acknowledged_and_trimmed_while_it_is_copied_is_missed_and_not_an_error(scene):
    line = FaultyStore(scene.source)

    def trim(call: Call) -> None:
        if call.name == "get" and call.path.endswith("part-6.batch") and call.stage == "before":
            line.unhook()
            scene.ack(6)
            scene.source.delete("ingest/part-6.batch")

    line.hook(trim)
    progress = scene.run(source_line=line)
    assert (progress.copied, progress.missed) == (3, 1)
    assert scene.batches() == [b"5", b"7", b"8"]


def test_a_batch_that_is_listed_and_cannot_be_read_ends_the_copy_and_is_named(scene):
    scene.source.delete("ingest/part-6.batch")
    with pytest.raises(NotFound, match=r"ingest/part-6\.batch"):
        scene.run()
    scene.source.put("ingest/part-6.batch", b"rubbish")
    with pytest.raises(CorruptData, match=r"ingest/part-6\.batch"):
        scene.run()
    assert scene.batches() == [b"5"]
    scene.source.put("ingest/part-6.batch", foreign_batch(b"6", b"again"))
    assert scene.run().copied == 3


def test_a_batch_without_records_is_passed_over_and_counted(scene):
    scene.source.put("ingest/part-6.batch", foreign_batch())
    assert scene.run() == UpgradeProgress(9, 9, copied=3, records=6, empty=1)
    assert scene.batches() == [b"5", b"7", b"8"]
    assert scene.run().copied == 0
    assert scene.run(acknowledge=True).next == 9
    assert manifest_in(scene.source).entries == ()


def test_times_that_an_object_log_cannot_hold_become_the_nearest_that_it_can(scene):
    metadata = (MetadataRange(0, (2**63 - 1) * 1000, b"far"), MetadataRange(1, -(2**63) * 1000, b""))
    scene.source.put("ingest/x", foreign_batch(b"a", b"b"))
    scene.source.put("ingest/manifest", encode_manifest(QueueManifest((QueueEntry(0, "ingest/x", metadata),), 1)))
    scene.run()
    (copied,) = scene.log.head().tail
    assert [item.ingested for item in copied.metadata] == [2**63 - 1, -(2**63)]


def test_two_queues_can_be_copied_into_one_log(scene):
    other = PlainStore("plain://other")
    fill(other, (b"x",), (b"y",))
    scene.run()
    assert upgrade(opened(other), scene.log).copied == 2
    assert upgrade(opened(other), scene.log).copied == 0
    assert scene.batches() == [b"5", b"6", b"7", b"8", b"x", b"y"]


def test_a_queue_that_was_replaced_by_a_shorter_one_is_refused(scene):
    scene.run()
    fill(scene.source, (b"new",))
    with pytest.raises(Diverged, match=r"copies through batch 8.*ends at 1"):
        scene.run()


def test_others_that_append_to_the_target_meanwhile_do_no_harm(scene):
    line = FaultyStore(scene.target)
    rival = scene.log
    numbers = iter(range(3))

    def race(call: Call) -> None:
        if call.name == "put_if" and call.stage == "before":
            number = next(numbers, None)
            if number is not None:
                rival.append(values(b"rival"), writer=writer(9), number=number).result(120)

    line.hook(race)
    assert scene.run(line=line).copied == 4
    found = scene.batches()
    assert [value for value in found if value != b"rival"] == [b"5", b"6", b"7", b"8"]
    assert len(found) == 7


def test_two_that_copy_at_the_same_time_copy_each_batch_once(scene):
    line = FaultyStore(scene.target)
    done = iter([True])

    def race(call: Call) -> None:
        if call.name == "put_if" and call.stage == "before" and next(done, False):
            scene.run()

    line.hook(race)
    assert scene.run(line=line).next == 9
    assert scene.batches() == [b"5", b"6", b"7", b"8"]


@pytest.mark.matrix
def test_two_that_have_seen_different_holes_do_not_copy_a_batch_twice(scene):
    # The first looks, then 5 and 6 are acknowledged and the second begins at 7, then the first goes on.
    line = FaultyStore(scene.target)
    done = iter([True])

    def race(call: Call) -> None:
        if call.name == "put_if" and call.stage == "before" and next(done, False):
            scene.ack(6)
            scene.run()

    line.hook(race)
    scene.run(line=line)
    assert scene.batches() == [b"7", b"8"]


def test_an_upgrade_resumes_although_the_log_has_forgotten_its_writer(scene, monkeypatch):
    monkeypatch.setattr(writers, "MAX_WRITERS", 3)
    scene.run()
    for number in range(6):
        scene.log.append(values(b"other"), writer=writer(50 + number), number=0).result(120)
    assert not any(entry.bytes[6] >> 4 == 8 for entry in scene.log.head().writers)
    append(opened(scene.source), b"9", number=0)
    assert scene.run().copied == 1
    assert [value for value in scene.batches() if value != b"other"] == [b"5", b"6", b"7", b"8", b"9"]


def test_a_log_that_has_forgotten_all_about_it_is_refused(scene, monkeypatch):
    monkeypatch.setattr(writers, "MAX_WRITERS", 3)
    scene.run()
    for number in range(6):
        scene.log.append(values(b"other"), writer=writer(50 + number), number=0).result(120)
    scene.log.set_retention("consumed")
    scene.log.slots.create("me", 0)
    scene.log.slots.claim("me", "me").advance(scene.log.end())
    scene.log.trim()
    assert scene.log.head().floor > 0
    with pytest.raises(OutcomeUnknown, match="another log"):
        scene.run()


def test_its_writer_ids_are_distinguished_from_random_ones(scene):
    scene.run()
    (mine,) = scene.log.head().writers
    assert mine.version == 8
    assert SeededChance(1).uuid().version == 4
    assert WriterId(UUID(bytes=mine.bytes)) == mine


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("acknowledge", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["target", "source"])
def test_killed_at_any_operation_and_begun_again_it_has_copied_each_batch_once(where, after, acknowledge):
    for number in range(200):
        scene = Scene(batches=3)
        line, source_line = FaultyStore(scene.target), FaultyStore(scene.source)
        (line if where == "target" else source_line).crash_at(number, after=after)
        died = False
        try:
            scene.run(line=line, source_line=source_line, acknowledge=acknowledge)
        except Crash:
            died = True
        scene.run(acknowledge=acknowledge)
        assert scene.batches() == [b"5", b"6", b"7"], number
        assert len(manifest_in(scene.source).entries) == (0 if acknowledge else 3)
        if not died:
            return
    pytest.fail("the copy is longer than the test")


def test_killed_again_and_again_it_gets_there_in_the_end():
    scene = Scene(batches=6)
    for _ in range(100):
        line = FaultyStore(scene.target)
        line.hook(_dying("put_if", 1))
        try:
            progress = scene.run(line=line)
        except Crash:
            continue
        assert progress.next == 11
        break
    assert scene.batches() == [b"5", b"6", b"7", b"8", b"9", b"10"]


@pytest.mark.parametrize("lost", [1, 2, 3, 8])
def test_lost_answers_double_nothing(scene, lost):
    line = FaultyStore(scene.target)
    line.lose_answers(lost, path_prefix="head")
    assert scene.run(line=line).copied == 4
    assert scene.batches() == [b"5", b"6", b"7", b"8"]


def test_killed_between_the_copy_and_the_acknowledgement_nothing_is_lost(scene):
    line = FaultyStore(scene.source)
    line.hook(_dying("put_if", 1))
    with pytest.raises(Crash):
        scene.run(source_line=line, acknowledge=True)
    assert scene.batches() == [b"5", b"6", b"7", b"8"]
    scene.run(acknowledge=True)
    append(opened(scene.source), b"9", number=0)
    assert scene.run(acknowledge=True).copied == 1
    assert scene.batches() == [b"5", b"6", b"7", b"8", b"9"]


# --- broken twins ----------------------------------------------------------------------------------------------------


def test_a_twin_that_does_not_expect_the_end_it_saw_is_caught(scene, monkeypatch):
    honest = edits.list_batches

    def unexpecting(head, listings, now):
        return honest(head, [replace(listing, expect=None) for listing in listings], now)

    monkeypatch.setattr("strandline.log.object.upload.list_batches", unexpecting)
    with pytest.raises(AssertionError):
        test_two_that_have_seen_different_holes_do_not_copy_a_batch_twice(scene)
