"""Trimming of queues of version 1: which objects are deleted, and which are kept."""

from __future__ import annotations

import pytest

from strandline.compat.v1.edits import list_batches, new_location
from strandline.compat.v1.log import QueueLog
from strandline.compat.v1.manifest_format import encode_manifest
from strandline.compat.v1.queue import V1Queue
from strandline.compat.v1.trimming import QueueTrimmer, QueueTrimResult, is_old, unlisted
from strandline.errors import CorruptData, TransientStorageError
from strandline.model.head import QueueEntry, QueueManifest
from strandline.storage.objects.store import ObjectInfo
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.plain import PlainStore
from tests.log.v1_parts import GRACE, append, content, manifest_in, opened, paths, values, writer


class Place:
    """A store, a queue in it and a clock for both."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = PlainStore(clock=self.clock)
        self.line = FaultyStore(self.store, clock=self.clock)
        self.log: QueueLog = opened(self.line, clock=self.clock)

    def ulid(self, number: int, *, age: float = 0.0) -> str:
        return new_location("ingest", self.clock.now() - int(age * 1e6), writer(77), number)


@pytest.fixture
def place() -> Place:
    place = Place()
    append(place.log, b"a", number=0)
    append(place.log, b"b", number=1)
    return place


def gone(trim: QueueTrimResult) -> list[str]:
    return [item.path for item in trim.garbage]


# --- what goes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [365 * 86400, -365 * 86400])
def test_one_clock_that_is_wrong_takes_no_upload_that_is_not_listed_yet(skew):
    clock = ManualClock()
    store = PlainStore("s3://bucket", clock=clock)
    wrong = opened(store, clock=ManualClock(now=clock.now() + skew * 1_000_000))
    fresh = new_location("ingest", clock.now(), writer(77), 0)
    append(opened(store, clock=clock), b"a", number=0)
    store.put(fresh, b"just uploaded")
    assert gone(wrong.trim()) == []
    assert fresh in paths(store)
    clock.advance(GRACE)
    assert gone(opened(store, clock=clock).trim()) == [fresh]
    assert [path for path in paths(store) if "clock" in path] == []


def test_an_unlisted_object_goes_when_it_is_a_grace_period_old(place):
    orphan = place.ulid(0)
    place.store.put(orphan, b"orphan")
    place.clock.advance(GRACE - 1)
    assert place.log.trim() == QueueTrimResult((), 1)
    place.clock.advance(1)
    assert gone(place.log.trim()) == [orphan]
    assert orphan not in paths(place.store)
    assert [value for _, value in content(place.log)] == [b"a", b"b"]


def test_objects_that_others_named_differently_go_too(place):
    for name in ("ingest/part-1.batch", "ingest/x", "ingest/0000"):
        place.store.put(name, b"orphan")
    place.clock.advance(GRACE)
    assert gone(place.log.trim()) == ["ingest/0000", "ingest/part-1.batch", "ingest/x"]


def test_an_acknowledged_batch_goes(place):
    place.log.slots.claim("queue", "me").advance(place.log.start().at(1))
    place.clock.advance(GRACE)
    assert len(place.log.trim().garbage) == 1
    assert content(place.log) == [(1, b"b")]


def test_a_dry_run_reports_what_would_be_deleted_and_deletes_nothing(place):
    orphan = place.ulid(0)
    place.store.put(orphan, b"orphan")
    place.clock.advance(GRACE)
    before = paths(place.store)
    trim = place.log.trim(dry_run=True)
    assert (gone(trim), trim.size, trim.dry_run) == ([orphan], 6, True)
    assert paths(place.store) == before
    assert not place.line.named("delete")


def test_progress_is_reported(place):
    for number in range(3):
        place.store.put(place.ulid(number), b"orphan")
    place.clock.advance(GRACE)
    told: list[int] = []
    place.log.trim(on_progress=told.append)
    assert told == [1, 2, 3]


def test_a_delete_that_fails_is_made_up_for_in_the_next_round(place):
    for number in range(3):
        place.store.put(place.ulid(number), b"orphan")
    place.clock.advance(GRACE)
    place.line.fail_next("delete")
    with pytest.raises(TransientStorageError):
        place.log.trim()
    assert len(place.log.trim().garbage) == 3
    assert len(paths(place.store)) == 3


# --- what stays ------------------------------------------------------------------------------------------------------


def test_listed_objects_stay_forever(place):
    place.clock.advance(1000 * GRACE)
    assert place.log.trim() == QueueTrimResult((), 0)
    assert [value for _, value in content(place.log)] == [b"a", b"b"]


def test_the_manifest_stays_wherever_it_is():
    clock = ManualClock()
    store = PlainStore(clock=clock)
    for manifest in ("ingest/manifest", "ingest/odd.batch", "elsewhere/list"):
        log = opened(store, clock=clock, manifest=manifest)
        append(log, b"a", by=len(manifest), number=0)
        clock.advance(10 * GRACE)
        log.trim()
        assert manifest_in(store, manifest).next_sequence == 1
        for path in paths(store, "ingest/"):
            store.delete(path)


def test_nothing_outside_the_data_folder_or_in_a_folder_below_it_is_touched(place):
    strangers = ["ingest2/x.batch", "ingest-dead/1.json", "other", "ingest/eu/manifest", "ingest/eu/x.batch", "a/b"]
    for path in strangers:
        place.store.put(path, b"not ours")
    place.clock.advance(10 * GRACE)
    assert place.log.trim() == QueueTrimResult((), 0)
    assert set(strangers) < set(paths(place.store))


def test_without_a_manifest_nothing_is_deleted():
    # It may be lost, or its path mistyped: then every batch would look like garbage.
    clock = ManualClock()
    store = PlainStore(clock=clock)
    append(opened(store, clock=clock), b"a", number=0)
    clock.advance(10 * GRACE)
    assert opened(store, clock=clock, manifest="ingest/mnaifest").trim() == QueueTrimResult()
    before = paths(store)
    store.delete("ingest/manifest")
    assert opened(store, clock=clock).trim() == QueueTrimResult()
    assert paths(store) == [path for path in before if path != "ingest/manifest"]


def test_with_a_damaged_manifest_nothing_is_deleted(place):
    place.store.put("ingest/manifest", b"rubbish")
    place.clock.advance(10 * GRACE)
    with pytest.raises(CorruptData, match="ingest/manifest"):
        place.log.trim()
    assert len(paths(place.store)) == 3


@pytest.mark.parametrize("failing", ["list", "get"])
def test_with_a_store_that_fails_nothing_is_deleted(place, failing):
    place.store.put("ingest/orphan", b"x")
    place.clock.advance(10 * GRACE)
    place.line.fail_next(failing)
    with pytest.raises(TransientStorageError):
        place.log.trim()
    assert "ingest/orphan" in paths(place.store)


def test_a_ulid_that_is_younger_than_the_object_s_time_is_kept(place):
    young = place.ulid(0, age=-GRACE)  # uploaded by a machine whose clock is ahead
    place.store.put(young, b"x")
    place.clock.advance(GRACE)
    assert place.log.trim() == QueueTrimResult((), 1)
    place.clock.advance(GRACE)
    assert gone(place.log.trim()) == [young]


def test_an_object_whose_name_is_old_but_that_was_written_just_now_is_kept(place):
    place.store.put(place.ulid(0, age=10 * GRACE), b"copied from elsewhere")
    assert place.log.trim() == QueueTrimResult((), 1)


NOW = 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("age", "old"), [(GRACE, True), (GRACE - 0.001, False), (0, False), (-1, False), (-(10**9), False)]
)
def test_an_object_from_the_future_is_not_old(age, old):
    item = ObjectInfo("ingest/x", 1, NOW - int(age * 1e6))
    assert is_old(item, NOW, GRACE) == old


def test_unlisted_objects_are_found_by_their_whole_path():
    manifest = QueueManifest((QueueEntry(0, "ingest/a"), QueueEntry(1, "other/b")), 2)
    there = ("ingest/a", "ingest/b", "ingest/manifest", "ingest/a/b", "ingestx/c")
    objects = [ObjectInfo(path, 1, 0) for path in there]
    assert [item.path for item in unlisted(objects, manifest, "ingest", "ingest/manifest")] == ["ingest/b"]


# --- in the background -----------------------------------------------------------------------------------------------


def test_a_background_trimmer_deletes_only_what_it_saw_unlisted_for_a_grace_period(place):
    trimmer = place.log.trimmer(remember=True)
    place.clock.advance(10 * GRACE)  # both batches are old
    assert trimmer.run() == QueueTrimResult((), 0)
    held = place.log.plan(place.log.start())
    place.log.slots.claim("queue", "me").advance(place.log.end())
    assert trimmer.run() == QueueTrimResult((), 2)
    place.clock.advance(GRACE - 1)
    assert trimmer.run() == QueueTrimResult((), 2)
    assert held[0].fetch()[0].column("value").to_pylist() == [b"a"]
    place.clock.advance(1)
    assert len(trimmer.run().garbage) == 2
    assert paths(place.store) == ["ingest/manifest"]


def test_the_command_has_no_such_memory(place):
    place.clock.advance(GRACE)
    place.log.slots.claim("queue", "me").advance(place.log.end())
    assert len(place.log.trim().garbage) == 2


def test_a_background_trimmer_s_own_slowness_counts_for_nothing(place):
    """An object is unlisted since the manifest was read, and that may be long after the round began."""
    trimmer = place.log.trimmer(remember=True)
    place.clock.advance(10 * GRACE)

    def slow(call: Call) -> None:
        if call.name == "list" and call.stage == "after":
            place.clock.advance(GRACE)
            place.log.slots.claim("queue", "me").advance(place.log.end())
            place.line.unhook()

    place.line.hook(slow)
    assert trimmer.run() == QueueTrimResult((), 2)
    place.clock.advance(GRACE - 1)
    assert trimmer.run() == QueueTrimResult((), 2)


def test_a_background_trimmer_forgets_what_was_listed_again(place):
    orphan = "ingest/orphan.batch"
    place.store.put(orphan, b"x")
    trimmer = place.log.trimmer(remember=True)
    trimmer.run()
    place.clock.advance(GRACE / 2)
    manifest = manifest_in(place.store)
    relisted = QueueManifest((*manifest.entries, QueueEntry(2, orphan)), 3)
    place.store.put("ingest/manifest", encode_manifest(relisted))
    trimmer.run()
    other = QueueManifest((*manifest.entries, QueueEntry(2, "ingest/other")), 3)
    place.store.put("ingest/manifest", encode_manifest(other))
    place.clock.advance(GRACE / 2)
    assert trimmer.run().garbage == ()
    place.clock.advance(GRACE)
    assert gone(trimmer.run()) == [orphan]


def test_a_wall_clock_that_jumps_ahead_does_not_hurry_the_background_trimmer(place):
    place.store.put(place.ulid(0), b"just uploaded")
    trimmer = place.log.trimmer(remember=True)
    place.clock.set_wall(place.clock.now() + int(100 * GRACE * 1e6))
    assert trimmer.run() == QueueTrimResult((), 1)
    place.clock.advance(GRACE - 1)
    assert trimmer.run() == QueueTrimResult((), 1)


def test_the_consumer_s_queue_trims_with_memory(place):
    queue = V1Queue(place.log)
    queue.claim("me", None)
    place.clock.advance(10 * GRACE)
    queue.acknowledge(queue.peek(0).descriptors[-1])
    for _ in range(2):
        queue.trim()
        place.clock.advance(GRACE / 2)
        assert len(paths(place.store)) == 3
    queue.trim()
    assert paths(place.store) == ["ingest/manifest"]


# --- the order of listing and reading --------------------------------------------------------------------------------


def held_up(place: Place, trimmer: QueueTrimmer, first: str) -> list[str]:
    """Delay the trimmer for an hour after its first read, while a batch is uploaded and listed."""

    def hold(call: Call) -> None:
        if call.name == first and call.stage == "after":
            place.line.unhook()
            rival = opened(place.store, clock=place.clock, seed=9)
            rival.append(values(b"c"), writer=writer(9), number=0).result(120)
            place.clock.advance(3600)

    place.line.hook(hold)
    trimmer.run()
    return [entry.location for entry in manifest_in(place.store).entries]


def test_a_trimmer_that_is_held_up_between_its_reads_deletes_nothing_that_is_listed(place):
    for first in ("list", "get"):
        listed = held_up(place, place.log.trimmer(remember=False), first)
        assert set(listed) <= set(paths(place.store))


class ManifestFirst(QueueTrimmer):
    """Reads the manifest, then lists the objects: the wrong way round."""

    def run(self, **options) -> QueueTrimResult:
        manifest = self._read_manifest()
        objects = list(self.store.list(f"{self.folder}/"))
        now = self.clock.now()
        assert manifest is not None
        garbage = [
            item for item in unlisted(objects, manifest, self.folder, self.manifest) if is_old(item, now, self.grace)
        ]
        for item in garbage:
            self.store.delete(item.path)
        return QueueTrimResult(tuple(garbage))


def test_a_twin_that_reads_the_manifest_first_is_caught(place):
    twin = ManifestFirst(
        place.line, manifest="ingest/manifest", folder="ingest", grace=GRACE, clock=place.clock, remember=False
    )
    listed = held_up(place, twin, "get")
    assert not set(listed) <= set(paths(place.store)), "the twin has deleted what is listed"


def test_a_producer_that_lists_too_late_would_list_what_is_gone(place, monkeypatch):
    """The rule of half the grace period, and a twin without it."""

    def late(number: int) -> list[str]:
        def hold(call: Call) -> None:
            if call.name == "put" and call.stage == "after":
                place.line.unhook()
                place.clock.advance(GRACE)
                opened(place.store, clock=place.clock).trim()

        place.line.hook(hold)
        append(place.log, b"late", by=5, number=number)
        return [entry.location for entry in manifest_in(place.store).entries]

    assert set(late(0)) <= set(paths(place.store))
    monkeypatch.setattr("strandline.compat.v1.shipper.list_batches", _patient)
    assert not set(late(1)) <= set(paths(place.store)), "the twin has listed what was trimmed"


def _patient(manifest, listings, now, patience):
    return list_batches(manifest, listings, now, float("inf"))


def test_dead_letters_are_never_trimmed(place):
    V1Queue(place.log).dead_letter(manifest_in(place.store).entries[0], "because")
    place.clock.advance(100 * GRACE)
    place.log.trim()
    assert len(paths(place.store, "ingest-dead/")) == 2
