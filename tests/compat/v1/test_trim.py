"""Trimming of queues of version 1: which objects are deleted, and which are kept."""

from __future__ import annotations

import pytest

from strandline.compat.v1.edits import list_batches, new_location, stored_as
from strandline.compat.v1.log import QueueLog
from strandline.compat.v1.queue import V1Queue
from strandline.compat.v1.trimming import QueueTrimmer, QueueTrimResult, is_old, names_in, unlisted
from strandline.errors import CorruptData, NotFound, TransientStorageError
from strandline.model.head import QueueEntry, QueueManifest
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectInfo
from strandline.testing.clock import ManualClock
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.plain import PlainStore
from tests.compat.v1.filled_queues import (
    GRACE,
    append,
    content,
    encode_manifest,
    foreign_batch,
    manifest_in,
    opened,
    paths,
    values,
    writer,
)


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


def listed_by_others(store: PlainStore, *locations: str) -> None:
    """A queue as an implementation on Rust's ``object_store`` leaves it: it lists locations as it was given them."""
    for number, location in enumerate(locations):
        store.put(stored_as(location), foreign_batch(b"%d" % number))
    entries = tuple(QueueEntry(number, location) for number, location in enumerate(locations))
    store.put("ingest/manifest", encode_manifest(QueueManifest(entries, len(entries))))


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


def test_acknowledged_batches_in_the_folder_of_a_producer_s_run_go(place):
    """The Go implementation names batches ``<data>/<run>/<ordinal>``; the run is a ULID."""
    run = "ingest/01HF7YAT00ZRK3CGQKNXK2TJ3B"
    locations = [f"{run}/{ordinal:016x}" for ordinal in range(3)]
    listed_by_others(place.store, *locations)
    place.log.slots.claim("queue", "me").advance(place.log.start().at(2))
    place.clock.advance(GRACE - 1)
    assert gone(place.log.trim()) == []
    place.clock.advance(1)
    assert set(locations[:2]) <= set(gone(place.log.trim()))
    assert content(place.log) == [(2, b"2")]


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


ULID = "01HF7YAT00ZRK3CGQKNXK2TJ3B"

STRANGERS = [
    "ingest2/x.batch",
    f"ingest2/{ULID}.batch",
    "ingest-dead/1.json",
    "other",
    "ingest/eu/manifest",
    f"ingest/eu/{ULID}.batch",
    f"ingest/eu/{ULID}/{1:016x}",
    "a/b",
    "ingest/README.md",
    "ingest/part-1.batch",
    "ingest/0000",
    f"ingest/{ULID}",
    f"ingest/{ULID}/README",
    f"ingest/{ULID}/{1:015x}",
    f"ingest/x{ULID}.batch",
]


def test_nothing_is_deleted_that_is_not_named_like_a_batch_in_the_data_folder(place):
    for path in STRANGERS:
        place.store.put(path, b"not ours")
    strangers = STRANGERS
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
    orphan = place.ulid(0)
    place.store.put(orphan, b"x")
    place.clock.advance(10 * GRACE)
    place.line.fail_next(failing)
    with pytest.raises(TransientStorageError):
        place.log.trim()
    assert orphan in paths(place.store)


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


SPELLINGS = ["/ingest/{}", "ingest/{}/", "ingest//{}", "//ingest///{}//"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_listed_batch_stays_and_is_read_however_its_location_is_spelled(place, spelling):
    listed_by_others(place.store, spelling.format(f"{ULID}.batch"), spelling.format(f"{ULID}/{1:016x}"))
    place.clock.advance(10 * GRACE)
    place.log.trim()
    assert content(place.log) == [(0, b"0"), (1, b"1")]
    assert all(span.size for span in place.log.plan(place.log.start()))
    place.log.slots.claim("queue", "me").advance(place.log.end())
    assert len(place.log.trim().garbage) == 2


def test_a_location_with_a_dot_is_read_where_the_format_s_path_rules_put_it(place):
    listed_by_others(place.store, f"ingest/./{ULID}.batch", f"ingest/../{ULID}.batch")
    assert [path for path in paths(place.store) if "%" in path] == [
        f"ingest/%2E%2E/{ULID}.batch",
        f"ingest/%2E/{ULID}.batch",
    ]
    place.store.put(f"ingest/{ULID}.batch", b"another object")
    assert content(place.log) == [(0, b"0"), (1, b"1")]


def test_unlisted_objects_are_found_by_their_whole_path():
    names = [new_location("ingest", 0, writer(1), number).removeprefix("ingest/") for number in range(3)]
    manifest = QueueManifest((QueueEntry(0, f"ingest/{names[0]}"), QueueEntry(1, f"other/{names[1]}")), 2)
    there = (
        f"ingest/{names[0]}",
        f"ingest/{names[1]}",
        "ingest/manifest",
        f"ingest/a/{names[2]}",
        f"ingestx/{names[2]}",
    )
    objects = [ObjectInfo(path, 1, 0) for path in there]
    assert [item.path for item in unlisted(objects, names_in(manifest), "ingest")] == [f"ingest/{names[1]}"]


# --- queues that share a data folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", ["ingest/other", "ingest/eu/list", "elsewhere/manifest"])
@pytest.mark.parametrize("remember", [False, True])
def test_two_queues_in_one_data_folder_delete_nothing_of_each_other(place, manifest, remember):
    neighbour = opened(place.line, clock=place.clock, manifest=manifest)
    append(neighbour, b"c", by=9, number=0)
    place.store.put("ingest/README.md", b"not a manifest, and longer than its 22 bytes")
    before = paths(place.store)
    trimmers = [place.log.trimmer(remember=remember), neighbour.trimmer(remember=remember)]
    for _ in range(3):
        place.clock.advance(10 * GRACE)
        for trimmer in trimmers:
            assert trimmer.run() == QueueTrimResult()
    assert paths(place.store) == before
    neighbour.slots.claim("queue", "me").advance(neighbour.end())
    for _ in range(2):
        place.clock.advance(GRACE)
        trimmers[1].run()
    assert [value for _, value in content(place.log)] == [b"a", b"b"]
    assert len(paths(place.store)) == len(before) - 1


def test_a_damaged_manifest_of_another_queue_in_the_folder_deletes_nothing(place):
    append(opened(place.store, clock=place.clock, manifest="ingest/other"), b"c", by=9, number=0)
    place.store.put("ingest/other", b"X" + bytes(place.store.get("ingest/other").data)[1:])
    place.clock.advance(10 * GRACE)
    with pytest.raises(CorruptData, match="ingest/other is damaged"):
        place.log.trim()
    assert len(paths(place.store)) == 5


def test_a_batch_with_a_name_of_its_own_that_ends_in_zeros_is_not_taken_for_a_damaged_manifest(place):
    place.store.put("ingest/part-7.batch", foreign_batch(b"zeros" + bytes(40)))
    orphan = place.ulid(0)
    place.store.put(orphan, b"orphan")
    place.clock.advance(10 * GRACE)
    assert gone(place.log.trim()) == [orphan]
    assert "ingest/part-7.batch" in paths(place.store)


def test_a_lost_manifest_of_a_registered_queue_deletes_nothing_and_says_what_to_do(place):
    append(opened(place.store, clock=place.clock, manifest="elsewhere/list"), b"c", by=9, number=0)
    place.store.delete("elsewhere/list")
    place.clock.advance(10 * GRACE)
    with pytest.raises(
        NotFound, match=r"Restore it, or delete .*ingest/queue-[0-9a-f]{16}\.json if that queue is gone"
    ):
        place.log.trim()
    assert len(paths(place.store)) == 5


def test_a_damaged_registration_deletes_nothing(place):
    append(opened(place.store, clock=place.clock, manifest="elsewhere/list"), b"c", by=9, number=0)
    registration = next(path for path in paths(place.store) if path.startswith("ingest/queue-"))
    place.store.put(registration, b"{}")
    place.clock.advance(10 * GRACE)
    with pytest.raises(CorruptData, match=registration):
        place.log.trim()
    assert len(paths(place.store)) == 6


def test_a_twin_that_does_not_register_loses_the_neighbour_s_batches(place, monkeypatch):
    monkeypatch.setattr("strandline.compat.v1.neighbours.Neighbours.register", lambda _: None)
    append(opened(place.store, clock=place.clock, manifest="elsewhere/list"), b"c", by=9, number=0)
    place.clock.advance(10 * GRACE)
    assert len(place.log.trim().garbage) == 1


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
    orphan = place.ulid(0)
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
        now = self.env.clock.now()
        assert manifest is not None
        garbage = [item for item in unlisted(objects, names_in(manifest), self.folder) if is_old(item, now, self.grace)]
        for item in garbage:
            self.store.delete(item.path)
        return QueueTrimResult(tuple(garbage))


def test_a_twin_that_reads_the_manifest_first_is_caught(place):
    twin = ManifestFirst(
        place.line, manifest="ingest/manifest", folder="ingest", grace=GRACE, env=Env(clock=place.clock), remember=False
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
