"""Verifying: every kind of damage is found and named, and a log that was only used, crashed and trimmed has none."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from strandline.bulk.verifying import verify as verify_log
from strandline.errors import StrandlineError, TransientStorageError
from strandline.formats.object.head import decode_head, encode_head
from strandline.log.findings import Finding, FindingKind, Severity
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head.index import chunk_path
from strandline.log.object.maintain.checks import Inventory, Writers
from strandline.model.cursor import Cursor
from strandline.model.head import ChunkRef, Entry, Head, MetadataRange, Pin, WriterId
from strandline.model.retention import SlotLimits
from strandline.model.stamp import Stamped
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import paths
from tests.contracts.logs import writer_named
from tests.contracts.slots import append
from tests.matrix_cases import some

GRACE = 600.0


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strandline.log.object.head.edits.CHUNK", 3)
    monkeypatch.setattr("strandline.log.object.head.edits.SPILL_AT", 4)


def verified(log: ObjectLog, *, quick: bool = False) -> list[Finding]:
    return verify_log(log, quick=quick).findings


def damage(log: ObjectLog, *, quick: bool = False) -> list[Finding]:
    return [found for found in verified(log, quick=quick) if found.severity is Severity.DAMAGE]


class Bench:
    """A queue with forty batches, of which ten are trimmed, and whatever else a log may have."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = PlainStore()
        self.log = self.open(create=True, retention="consumed")
        for number in range(20):
            append(self.log, b"%d" % number, b"x", number=number)
        self.log.trim()
        for number in range(20, 40):
            append(self.log, b"%d" % number, number=number)
        append(self.log, b"other", writer=writer_named(2), number=0)
        self.log.slots.create("billing", 20)
        self.log.slots.create("reports", 30)
        self.log.trim()

    def open(self, store=None, **options) -> ObjectLog:
        return open_log(store or self.store, env=Env(clock=self.clock, chance=SeededChance(7)), **options)

    def reopened(self) -> ObjectLog:
        """The log, opened again with empty caches."""
        return open_log(self.store, env=Env(clock=self.clock))

    def edit_head(self, edit: Callable[[Head], Head]) -> None:
        state = decode_head(self.store.get("head").data, "head")
        self.store.put("head", encode_head(Stamped(edit(state.value), state.revision, state.recent)))

    def edit_entry(self, index: int, **changes) -> None:
        """Change an entry in the head's tail."""

        def edit(head: Head) -> Head:
            tail = list(head.tail)
            tail[index] = replace(tail[index], **changes)
            return replace(head, tail=tuple(tail))

        self.edit_head(edit)

    def spoil(self, path: str, change: Callable[[bytes], bytes]) -> None:
        self.store.put(path, change(bytes(self.store.get(path).data)))

    def chunks(self, level: int) -> list[str]:
        """The chunks of a level that the head itself refers to, wholly above the floor."""
        head = self.log.head()
        return [chunk_path(ref, level) for ref in head.levels[level] if ref.first >= head.floor]

    def entries(self) -> list[Entry]:
        return [span.entry for span in self.log.plan(self.log.start())]


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    head = bench.log.head()
    assert len(head.levels) >= 2
    assert head.floor == 20
    assert head.trimmed
    return bench


# --- a healthy log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_a_healthy_log_has_nothing_to_say(bench: Bench, quick: bool):
    found = verify_log(bench.log, quick=quick)
    assert found.findings == []
    assert (found.examined["batches"], found.examined["records"], found.examined["slots"]) == (31, 41, 2)
    assert found.examined["trims"] == 1
    assert found.examined["chunks"] > 5


@pytest.mark.parametrize("quick", [False, True])
def test_an_empty_log_is_healthy(quick: bool):
    assert verified(open_log(PlainStore(), create=True), quick=quick) == []


def test_verifying_writes_nothing(bench: Bench):
    store = FaultyStore(bench.store)
    verified(bench.open(store))
    assert store.named("put", "put_if", "delete") == ()


def test_a_store_that_fails_is_not_called_damage(bench: Bench):
    store = FaultyStore(bench.store)
    store.fail_next("get", path_prefix="batches/", error=TransientStorageError("The store is away."))
    with pytest.raises(TransientStorageError):
        verified(bench.open(store))


# --- every kind of damage --------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


def lose_entry(bench: Bench) -> None:
    bench.edit_head(lambda head: replace(head, tail=(*head.tail[:1], *head.tail[2:])))


def lose_last_entry(bench: Bench) -> None:
    bench.edit_head(lambda head: replace(head, tail=head.tail[:-1]))


def list_offsets_twice(bench: Bench) -> None:
    bench.edit_head(lambda head: replace(head, tail=(*head.tail[:2], head.tail[1], *head.tail[2:])))


def list_an_object_twice(bench: Bench) -> None:
    bench.edit_entry(2, location=bench.log.head().tail[1].location)


def list_a_trimmed_object(bench: Bench) -> None:
    (gone,) = bench.log.head().trimmed
    listed = {entry.location for entry in bench.entries()}
    trimmed = next(path for path in paths(bench.store, "batches/") if path not in listed)
    assert gone
    bench.edit_entry(2, location=trimmed)


def swap_batches(bench: Bench) -> None:
    first, second = bench.log.head().tail[:2]
    bench.store.put(first.location, bytes(bench.store.get(second.location).data))


def swap_chunks(bench: Bench) -> None:
    first, second = bench.chunks(0)[:2]
    bench.store.put(first, bytes(bench.store.get(second).data))


def edit_reference(bench: Bench, level: int, change: Callable[[ChunkRef], dict[str, int]]) -> None:
    def edit(head: Head) -> Head:
        levels = [list(refs) for refs in head.levels]
        reference = levels[level][-1]
        changed = replace(reference, **change(reference))
        bench.store.put(chunk_path(changed, level), bytes(bench.store.get(chunk_path(reference, level)).data))
        levels[level][-1] = changed
        return replace(head, levels=tuple(map(tuple, levels)))

    bench.edit_head(edit)


def edit_writer(bench: Bench, writer: WriterId, **changes) -> None:
    bench.edit_head(
        lambda head: replace(head, writers={**head.writers, writer: replace(head.writers[writer], **changes)})
    )


def edit_slot(bench: Bench, old: bytes, new: bytes) -> None:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    bench.spoil("slots/billing.json", change)


SOMEBODY = writer_named(1)

DAMAGE: dict[str, tuple[FindingKind, Callable[[Bench], object]]] = {
    "the head is gone": (FindingKind.HEAD, lambda b: b.store.delete("head")),
    "the head is damaged": (FindingKind.HEAD, lambda b: b.spoil("head", flipped)),
    "the head is another log's": (
        FindingKind.HEAD,
        lambda b: b.store.put("head", bytes(open_log(other := PlainStore(), create=True) and other.get("head").data)),
    ),
    "the generations are out of order": (
        FindingKind.HEAD,
        lambda b: b.edit_head(lambda h: replace(h, min_generation=9)),
    ),
    "more was swept than could be": (FindingKind.HEAD, lambda b: b.edit_head(lambda h: replace(h, swept_generation=9))),
    "the floor is past the end": (
        FindingKind.HEAD,
        lambda b: b.edit_head(lambda h: replace(h, floor=h.next_offset + 1)),
    ),
    "an empty log lists batches": (FindingKind.HEAD, lambda b: b.edit_head(lambda h: replace(h, floor=h.next_offset))),
    "a writer is ahead of the log": (FindingKind.HEAD, lambda b: edit_writer(b, SOMEBODY, sequence=99)),
    "the floor is within a batch": (FindingKind.LISTING, lambda b: b.edit_head(lambda h: replace(h, floor=21))),
    "an entry is gone": (FindingKind.LISTING, lose_entry),
    "the last entry is gone": (FindingKind.LISTING, lose_last_entry),
    "offsets are listed twice": (FindingKind.LISTING, list_offsets_twice),
    "an object is listed twice": (FindingKind.LISTING, list_an_object_twice),
    "a trimmed object is listed": (FindingKind.LISTING, list_a_trimmed_object),
    "an entry holds too many": (FindingKind.LISTING, lambda b: b.edit_entry(1, count=2)),
    "an entry holds nothing": (FindingKind.LISTING, lambda b: b.edit_entry(1, count=0)),
    "a sequence is wrong": (FindingKind.LISTING, lambda b: b.edit_entry(1, sequence=77)),
    "listing time goes back": (FindingKind.LISTING, lambda b: b.edit_entry(1, listed=5)),
    "times are the wrong way round": (FindingKind.LISTING, lambda b: b.edit_entry(1, oldest=9)),
    "metadata without records": (FindingKind.LISTING, lambda b: b.edit_entry(1, metadata=(MetadataRange(1, 0, b""),))),
    "an object is elsewhere": (FindingKind.LISTING, lambda b: b.edit_entry(1, location="head")),
    "a generation goes back": (
        FindingKind.LISTING,
        lambda b: (
            b.edit_entry(0, location=f"batches/{2:016d}/{'a' * 32}.batch"),
            b.edit_entry(1, location=f"batches/{0:016d}/{'a' * 32}.batch"),
        ),
    ),
    "a number is repeated": (FindingKind.WRITER, lambda b: b.edit_entry(2, number=b.log.head().tail[1].number)),
    "a number is missing": (FindingKind.WRITER, lambda b: b.edit_entry(1, number=99)),
    "a writer is remembered wrongly": (FindingKind.WRITER, lambda b: edit_writer(b, SOMEBODY, number=5)),
    "a writer is not remembered": (FindingKind.WRITER, lambda b: b.edit_head(lambda h: replace(h, writers={}))),
    "a chunk is gone": (FindingKind.CHUNK, lambda b: b.store.delete(b.chunks(0)[0])),
    "a chunk is damaged": (FindingKind.CHUNK, lambda b: b.spoil(b.chunks(0)[0], flipped)),
    "a chunk of chunks is gone": (FindingKind.CHUNK, lambda b: b.store.delete(b.chunks(1)[0])),
    "a chunk is another one": (FindingKind.CHUNK, swap_chunks),
    "a chunk's size is wrong": (FindingKind.CHUNK, lambda b: edit_reference(b, 0, lambda ref: {"size": ref.size + 1})),
    "a chunk's time is wrong": (FindingKind.CHUNK, lambda b: edit_reference(b, 1, lambda _: {"listed_last": 5})),
    "a chunk's end is wrong": (FindingKind.CHUNK, lambda b: edit_reference(b, 0, lambda ref: {"next": ref.next + 1})),
    "a batch is gone": (FindingKind.BATCH, lambda b: b.store.delete(b.log.head().tail[0].location)),
    "a batch in a chunk is gone": (FindingKind.BATCH, lambda b: b.store.delete(b.entries()[0].location)),
    "a batch is cut off": (FindingKind.BATCH, lambda b: b.spoil(b.entries()[3].location, lambda data: data[:-1])),
    "a slot is gone": (FindingKind.SLOT, lambda b: b.store.delete("slots/billing.json")),
    "a slot is damaged": (FindingKind.SLOT, lambda b: b.spoil("slots/billing.json", lambda data: data[:-5])),
    "a slot is another one": (FindingKind.SLOT, lambda b: edit_slot(b, b"billing", b"milling")),
    "a slot is past the end": (FindingKind.SLOT, lambda b: edit_slot(b, b'"position": 20', b'"position": 200')),
    "a slot needs what is gone": (FindingKind.SLOT, lambda b: edit_slot(b, b'"position": 20', b'"position": 19')),
    "a listed slot was dropped": (FindingKind.SLOT, lambda b: edit_slot(b, b'"epoch"', b'"dropped": true, "epoch"')),
    "a pin is outside of the log": (
        FindingKind.SLOT,
        lambda b: b.edit_head(lambda h: replace(h, slots={**h.slots, "billing": Pin(3, 1)})),
    ),
    "a trim is damaged": (FindingKind.TRIM, lambda b: b.spoil(b.log.head().trimmed[0].location, flipped)),
    "a trim went past the floor": (FindingKind.TRIM, lambda b: b.edit_head(lambda h: replace(h, floor=18))),
    "a trim is listed twice": (FindingKind.TRIM, lambda b: b.edit_head(lambda h: replace(h, trimmed=h.trimmed * 2))),
}

ONLY_IN_FULL: dict[str, Callable[[Bench], object]] = {
    "a batch is damaged": lambda b: b.spoil(b.entries()[3].location, flipped),
    "a batch is another one": swap_batches,
    "a batch's times are wrong": lambda b: b.edit_entry(1, newest=9),
    "a batch's writer is wrong": lambda b: b.edit_entry(1, writer=writer_named(9)),
}


def one_of_each_kind(damage: dict[str, tuple[FindingKind, Callable[[Bench], object]]]) -> Iterator[ParameterSet]:
    """All kinds of damage, of which the default suite tries one for each kind of finding."""
    found: set[FindingKind] = set()
    for name, (kind, break_it) in damage.items():
        yield pytest.param(kind, break_it, id=name, marks=[pytest.mark.matrix] if kind in found else [])
        found.add(kind)


@pytest.mark.parametrize("quick", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("kind", "break_it"), list(one_of_each_kind(DAMAGE)))
def test_damage_is_found_and_named(bench: Bench, kind: FindingKind, break_it: Callable[[Bench], object], quick: bool):
    break_it(bench)
    found = damage(bench.reopened(), quick=quick)
    assert kind in {finding.kind for finding in found}
    for finding in found:
        assert finding.where in finding.message
        assert bench.store.url in finding.message
        assert finding.message.endswith(".")


@pytest.mark.parametrize("break_it", ONLY_IN_FULL.values(), ids=ONLY_IN_FULL.keys())
def test_damage_within_a_batch_is_found_by_reading_it(bench: Bench, break_it: Callable[[Bench], object]):
    break_it(bench)
    found = [finding for finding in damage(bench.reopened()) if finding.kind is FindingKind.BATCH]
    assert found
    assert all("ffsets" in finding.message for finding in found)


@pytest.mark.parametrize("quick", [False, True])
def test_one_damaged_batch_is_one_finding(bench: Bench, quick: bool):
    location = bench.entries()[5].location
    bench.store.delete(location)
    (finding,) = verified(bench.reopened(), quick=quick)
    assert (finding.severity, finding.kind, finding.where) == (Severity.DAMAGE, FindingKind.BATCH, location)
    assert "is listed as offsets" in finding.message


@pytest.mark.parametrize("quick", [False, True])
def test_after_a_chunk_that_is_gone_everything_else_is_still_looked_at(bench: Bench, quick: bool):
    """And what that chunk listed is not taken for garbage."""
    chunk = bench.chunks(0)[0]
    bench.store.delete(chunk)
    location = bench.log.head().tail[-1].location
    bench.store.delete(location)
    found = verified(bench.reopened(), quick=quick)
    (note,) = (one for one in found if one.severity is Severity.NOTE)
    assert "not searched for" in note.message
    assert [(one.where, one.kind) for one in found if one.where in {chunk, location}] == [
        (chunk, FindingKind.CHUNK),
        (location, FindingKind.BATCH),
    ]
    (hole,) = (one for one in found if one.where not in {chunk, location, "head"})
    assert (hole.severity, hole.kind) == (Severity.DAMAGE, FindingKind.HOLE)
    assert chunk in hole.message


# --- waste and notes -------------------------------------------------------------------------------------------


def orphan(bench: Bench, generation: int) -> str:
    path = f"batches/{generation:016d}/{'f' * 32}.batch"
    bench.store.put(path, b"never listed")
    return path


@pytest.mark.parametrize("quick", some([False, True], 1))
@pytest.mark.parametrize(
    ("behind", "severity", "rounds", "everything"),
    [
        (0, Severity.NOTE, 2, False),
        (1, Severity.NOTE, 1, False),
        (2, Severity.WASTE, 1, True),
    ],
)
def test_an_object_that_nothing_lists_is_found_with_what_becomes_of_it(
    bench: Bench, behind: int, severity: Severity, rounds: int, everything: bool, quick: bool
):
    path = orphan(bench, bench.log.head().generation - behind)
    (finding,) = verified(bench.reopened(), quick=quick)
    assert (finding.severity, finding.kind, finding.where) == (severity, FindingKind.ORPHAN, path)
    assert ("--everything" in finding.message) is everything
    assert ("trim after the next" in finding.message) is (rounds == 2)
    for _ in range(rounds):
        assert path in paths(bench.store, "batches/")
        bench.log.trim(everything=everything)
    assert path not in paths(bench.store, "batches/")
    assert verified(bench.reopened(), quick=quick) == []


def test_leftovers_of_a_trim_that_died_are_waste(bench: Bench):
    """The generation was raised, and nothing was deleted yet."""
    path = orphan(bench, bench.log.head().generation)
    for _ in range(2):
        bench.edit_head(lambda head: replace(head, generation=head.generation + 1, min_generation=head.generation))
    (finding,) = verified(bench.reopened())
    assert (finding.severity, finding.where) == (Severity.WASTE, path)
    assert "the next trim deletes it" in finding.message
    bench.reopened().trim()
    assert path not in paths(bench.store, "batches/")


@pytest.mark.parametrize("folder", ["chunks", "trimmed"])
def test_chunks_and_trims_that_nothing_refers_to_are_found(bench: Bench, folder: str):
    name = {"chunks": f"00-{7:020d}-{9:020d}.chunk", "trimmed": f"{'a' * 32}.cut"}[folder]
    path = f"{folder}/{0:016d}/{name}"
    bench.store.put(path, b"?")
    (finding,) = verified(bench.reopened())
    assert (finding.severity, finding.kind, finding.where) == (Severity.WASTE, FindingKind.ORPHAN, path)


@pytest.mark.parametrize("path", ["batches/README", "chunks/x", "trimmed/0/x.cut", "slots/notes.txt"])
def test_foreign_objects_are_noted(bench: Bench, path: str):
    bench.store.put(path, b"mine")
    (finding,) = verified(bench.reopened())
    assert (finding.severity, finding.kind, finding.where) == (Severity.NOTE, FindingKind.STRANGER, path)


def test_invalid_slots_ended_holds_and_dead_letters_are_reported(bench: Bench):
    bench.log.set_retention("consumed", SlotLimits(idle_seconds=60))
    for _ in range(2):
        bench.clock.advance(31)
        bench.log.trim()
    bench.store.put("slots/hold-abc.json", b"{}")
    bench.store.put("dead-letter/billing/00000000000000000003.json", b"{}")
    found = {(one.severity, one.kind, one.where) for one in verified(bench.reopened())}
    assert found == {
        (Severity.NOTE, FindingKind.SLOT, "slots/billing.json"),
        (Severity.NOTE, FindingKind.SLOT, "slots/reports.json"),
        (Severity.WASTE, FindingKind.SLOT, "slots/hold-abc.json"),
        (Severity.NOTE, FindingKind.DEAD_LETTER, "dead-letter"),
    }


# --- while the log is used -------------------------------------------------------------------------------------


def interfered(bench: Bench, when: Callable[[Call], bool], act: Callable[[], object]) -> ObjectLog:
    """The log through a store on which, once, something happens just before an operation."""
    store = FaultyStore(bench.store)
    happened: list[object] = []

    def meddle(call: Call) -> None:
        if call.stage == "before" and when(call) and not happened:
            happened.append(True)
            act()

    store.hook(meddle)
    return bench.open(store)


@pytest.mark.parametrize("quick", some([False, True], 1))
@pytest.mark.parametrize("name", ["batches/", "chunks/", "slots/"])
def test_a_log_that_is_trimmed_meanwhile_is_not_damaged(bench: Bench, name: str, quick: bool):
    def trim() -> None:
        for slot in ("billing", "reports"):
            bench.log.slots.reset(slot, 58)
        bench.log.trim(grace=0)
        bench.log.slots.drop("reports")
        append(bench.log, b"more", number=40)

    reads = {"list", "get"}
    log = interfered(bench, lambda call: call.name in reads and call.path.startswith(name), trim)
    assert damage(log, quick=quick) == []
    assert bench.log.bounds().first == 58


@pytest.mark.parametrize("quick", [False, True])
def test_a_batch_that_is_appended_meanwhile_is_no_orphan(bench: Bench, quick: bool):
    def use() -> None:
        for number in range(40, 60):
            append(bench.log, b"more", number=number)

    log = interfered(bench, lambda call: call.name == "list" and call.path == "batches/", use)
    assert verified(log, quick=quick) == []


@pytest.mark.parametrize("quick", [False, True])
def test_an_upload_that_outlived_a_trim_is_listed_among_younger_ones_and_is_no_orphan(bench: Bench, quick: bool):
    def trim() -> None:
        bench.log.trim()
        append(bench.log, b"younger", number=40)

    log = interfered(bench, lambda call: call.name == "put_if" and call.path == "head", trim)
    append(log, b"older", writer=writer_named(3), number=0)
    append(bench.log, b"youngest", number=41)
    generations = [int(entry.location.split("/")[1]) for entry in bench.log.head().tail[-3:]]
    assert generations == [3, 2, 3]
    found = verified(bench.reopened(), quick=quick)
    assert [one for one in found if one.where.startswith("batches/")] == []


class Chaos:
    """A log that is used at random."""

    STEPS = ("append", "append", "append", "create", "reset", "move", "drop", "hold", "trim", "trim_late")

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = Bench()

    def steps(self) -> Iterator[Bench]:
        """The log after each of many steps, most of which die somewhere."""
        for _ in range(40):
            store = FaultyStore(self.bench.store)
            seed = self.chance.getrandbits(60)
            log = open_log(store, env=Env(clock=self.bench.clock, chance=SeededChance(seed)))
            if self.chance.random() < 0.7:
                store.crash_at(self.chance.randint(1, 12), after=self.chance.random() < 0.5)
            with contextlib.suppress(Crash, StrandlineError):
                getattr(self, self.chance.choice(self.STEPS))(log)
            yield self.bench

    def name(self) -> str:
        return self.chance.choice(["billing", "reports", "third"])

    def somewhere(self, log: ObjectLog) -> int:
        bounds = log.bounds()
        return self.chance.randint(bounds.first, bounds.next)

    def append(self, log: ObjectLog) -> None:
        writer = writer_named(self.chance.randint(100, 102))
        last = log.head().writers.get(writer)
        values = [b"v"] * self.chance.randint(1, 4)
        append(log, *values, writer=writer, number=0 if last is None else last.number + 1)

    def create(self, log: ObjectLog) -> None:
        log.slots.create(self.name(), self.somewhere(log))

    def reset(self, log: ObjectLog) -> None:
        log.slots.reset(self.name(), self.somewhere(log))

    def move(self, log: ObjectLog) -> None:
        log.slots.claim(self.name(), "me").advance(Cursor(log.log_id, self.somewhere(log)))

    def drop(self, log: ObjectLog) -> None:
        log.slots.drop(self.name())

    def hold(self, log: ObjectLog) -> None:
        hold = log.hold(self.somewhere(log), 60)
        if self.chance.random() < 0.5:
            hold.release()

    def trim(self, log: ObjectLog) -> None:
        log.trim(grace=self.chance.choice([0, GRACE]))

    def trim_late(self, log: ObjectLog) -> None:
        self.bench.clock.advance(GRACE)
        log.trim()


@pytest.mark.matrix
@pytest.mark.parametrize("seed", some(range(8), 1))
def test_a_log_that_was_used_trimmed_and_crashed_at_random_is_never_damaged(seed: int):
    chaos = Chaos(seed)
    for bench in chaos.steps():
        log = bench.reopened()
        assert damage(log) == damage(log, quick=True) == []
    for _ in range(3):
        chaos.bench.clock.advance(GRACE)
        chaos.bench.reopened().trim(everything=True)
    left = [one for one in verified(chaos.bench.reopened()) if one.kind is not FindingKind.SLOT]
    assert left == []


# --- the parts -------------------------------------------------------------------------------------------------


def entry(writer: int, number: int, sequence: int) -> Entry:
    return Entry(sequence, "x", sequence, 1, 10, 0, 0, 0, writer_named(writer), number)


def test_a_writer_that_the_head_has_forgotten_may_begin_again_and_others_may_not():
    writers = Writers()
    assert list(writers.check(entry(1, 0, 0))) == []
    assert [severity for severity, _ in writers.check(entry(1, 0, 1))] == [Severity.DAMAGE]
    for other in range(512):
        assert list(writers.check(entry(2 + other, 0, 2 + other))) == []
    assert [severity for severity, _ in writers.check(entry(1, 0, 600))] == [Severity.NOTE]


def test_listed_and_stored_objects_are_compared_by_name_size_and_place():
    store = PlainStore()
    one, two, three, four, five = (f"batches/{3:016d}/{number:032x}.batch" for number in range(5))
    for path, size in [(one, 10), (two, 11), (five, 10)]:
        store.put(path, bytes(size))
    inventory = Inventory(store)
    for path, size, sequence in [(one, 10, 7), (two, 10, 8), (three, 10, 9), (two, 10, 10), (four, 0, -1)]:
        assert inventory.add(path, size, sequence)
    (found,) = inventory.compared(is_end=True)
    assert (found.absent, found.resized, found.doubled, found.unlisted) == ([9], [8], [10], [five])
