"""The head, compared with a plain list of entries: searches across spilled chunks, a small head, known writers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import (
    AlreadyExists,
    Contended,
    CursorExpired,
    Diverged,
    ExpectationFailed,
    NotFound,
    OutOfOrder,
    WriterExpired,
)
from strandline.formats.object.head import encode_head
from strandline.log.object import ObjectLog, open_log
from strandline.log.object.head import edits
from strandline.log.object.head.edits import (
    BatchListing,
    Spill,
    StaleUpload,
    apply_spills,
    list_batches,
    pin_slot,
    plan_spills,
    repin_slot,
    settle_slot,
    unlist_slot,
)
from strandline.log.object.head.index import chunk_path, entries_from
from strandline.log.read.planning import plan_entries
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.model.cursor import Bounds, Limit
from strandline.model.head import ChunkRef, Entry, Head, Pin, Receipt, WriterId
from strandline.model.stamp import OpId, Stamped
from strandline.storage.env import Env
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, FaultyStore
from strandline.testing.plain import PlainStore
from strandline.testing.stores import paths
from tests.contracts.logs import content, writer_named
from tests.contracts.slots import append
from tests.matrix_cases import examples

SOON = 120.0
WRITER = writer_named(1)


def listing(number: int, count: int = 1, *, writer: WriterId = WRITER, **options: int) -> BatchListing:
    fields = {"generation": 0, "size": 10 * count, "oldest": number, "newest": number, "born": 0, **options}
    return BatchListing(location=f"b{writer.int}-{number}", count=count, writer=writer, number=number, **fields)


@dataclass
class Model:
    """A log without I/O: the head, the chunks that were written, and the naive list of all entries."""

    head: Head = field(default_factory=lambda: Head(UUID(int=7)))
    chunks: dict[str, tuple[Entry, ...] | tuple[ChunkRef, ...]] = field(default_factory=dict)
    naive: list[Entry] = field(default_factory=list)
    reads: int = 0

    def append(self, count: int) -> None:
        number = self.head.next_sequence
        spills = plan_spills(self.head)
        self.write(spills)
        first = self.head.next_offset
        self.head = apply_spills(list_batches(self.head, [listing(number, count)], now=number), spills)
        self.naive.append(
            Entry(number, f"b1-{number}", first, count, 10 * count, number, number, number, WRITER, number)
        )

    def write(self, spills: list[Spill]) -> None:
        for spill in spills:
            self.chunks[chunk_path(spill.reference, spill.level)] = spill.items

    def read(self, reference: ChunkRef, level: int) -> tuple[Any, ...]:
        self.reads += 1
        return self.chunks[chunk_path(reference, level)]

    def found(self, offset: int) -> Iterator[Entry]:
        return entries_from(self.head, offset, self)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a few hundred entries make many levels."""
    monkeypatch.setattr(edits, "CHUNK", 3)
    monkeypatch.setattr(edits, "SPILL_AT", 4)


class TestSpilling:
    def test_thousands_of_appends_are_all_found_again(self) -> None:
        model = Model()
        for number in range(7000):
            model.append(1 + number % 5)
        assert len(model.head.levels) == 2
        assert list(model.found(0)) == model.naive
        for at in range(0, 7000, 97):
            entry = model.naive[at]
            for offset in (entry.first, entry.next - 1):
                found = model.found(offset)
                assert [next(found, None) for _ in range(3)] == (model.naive + [None] * 3)[at : at + 3]
        assert list(model.found(model.head.next_offset)) == []

    @pytest.mark.usefixtures("tiny")
    def test_many_levels_hold_the_same_entries(self) -> None:
        model = Model()
        for number in range(600):
            model.append(1 + number % 3)
            if number % 37 == 0:
                assert list(model.found(0)) == model.naive
        assert len(model.head.levels) >= 4
        for offset in range(0, model.head.next_offset, 7):
            assert list(model.found(offset)) == [entry for entry in model.naive if entry.next > offset]

    @pytest.mark.matrix
    @given(
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=120),
        since=st.integers(0, 400),
        records=st.none() | st.integers(1, 50),
        size=st.none() | st.integers(1, 500),
        batches=st.none() | st.integers(1, 20),
        upto=st.none() | st.integers(0, 500),
    )
    @settings(max_examples=examples(200), deadline=None)
    def test_a_plan_over_levels_is_the_plan_over_the_naive_list(
        self,
        counts: list[int],
        since: int,
        records: int | None,
        size: int | None,
        batches: int | None,
        upto: int | None,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(edits, "CHUNK", 3)
            patch.setattr(edits, "SPILL_AT", 4)
            model = Model()
            for count in counts:
                model.append(count)
        since = min(since, model.head.next_offset)
        planned = plan_entries(model.found(since), since, Limit(records, size, batches, upto))
        assert planned == naive_plan(model.naive, since, records, size, batches, upto)

    def test_seeking_reads_one_chunk_of_each_level_at_most(self) -> None:
        model = Model()
        for _ in range(7000):
            model.append(2)
        for offset in (0, 1, 5000, 12_345, 13_999):
            model.reads = 0
            assert len(plan_entries(model.found(offset), offset, Limit(batches=1))) == 1
            assert model.reads <= len(model.head.levels)

    def test_the_head_stays_small_however_long_the_log(self) -> None:
        model, sizes = Model(), []
        for number in range(12_000):
            model.append(1)
            if number % 1000 == 999:
                sizes.append(len(encode_head(Stamped(model.head))))
            assert len(model.head.tail) <= edits.SPILL_AT + 1
            assert all(len(level) <= edits.SPILL_AT + 1 for level in model.head.levels)
        assert max(sizes) < 40_000

    @pytest.mark.usefixtures("tiny")
    def test_spills_that_others_made_meanwhile_are_passed_over(self) -> None:
        one = Model()
        for _ in range(30):
            one.append(1)
        while not plan_spills(one.head):
            one.append(1)
        stale = plan_spills(one.head)
        one.write(stale)
        ahead = one.head
        for _ in range(20):
            one.append(1)
        assert apply_spills(one.head, stale) == one.head
        assert apply_spills(ahead, stale) != ahead
        assert list(one.found(0)) == one.naive

    @pytest.mark.usefixtures("tiny")
    def test_a_chunk_that_a_trim_may_have_deleted_is_not_referred_to(self) -> None:
        model = Model()
        while not plan_spills(model.head):
            model.append(1)
        spills = plan_spills(model.head)
        trimmed = replace(model.head, generation=1, min_generation=1)
        assert apply_spills(trimmed, spills) == trimmed
        anew = plan_spills(trimmed)
        assert [spill.reference.generation for spill in anew] == [1] * len(anew)
        assert apply_spills(trimmed, anew) != trimmed

    def test_a_real_log_spills_and_is_read_by_a_newcomer(self) -> None:
        place = PlainStore()
        log = open_log(place, create=True)
        for number in range(250):
            append(log, b"%d" % number, number=number)
        assert len(paths(place, "chunks/")) == 3
        assert content(open_log(place)) == [(number, b"%d" % number) for number in range(250)]
        assert content(open_log(place), log.start().at(60), Limit(upto=70)) == [
            (number, b"%d" % number) for number in range(60, 70)
        ]

    @pytest.mark.matrix
    def test_producers_that_list_one_batch_each_keep_the_head_small_too(self) -> None:
        log = open_log(PlainStore(), create=True)
        for number in range(150):
            with log.producer(linger=0.0) as producer:
                producer.append(value=b"%d" % number)
        assert len(log.head().tail) <= edits.SPILL_AT + 1
        assert log.bounds() == Bounds(0, 150)

    def test_two_writers_that_spill_at_once_write_the_same_chunk(self) -> None:
        place = PlainStore()
        line = FaultyStore(place)
        ours, theirs = open_log(line, create=True), open_log(place)
        for number in range(edits.SPILL_AT + 1):
            append(theirs, b"x", writer=writer_named(2), number=number)
        left = [edits.SPILL_AT + 1]

        def let_them_in(call: Call) -> None:
            if call.path.startswith("chunks/") and call.stage == "after" and left:
                append(theirs, b"theirs", writer=writer_named(2), number=left.pop())

        line.hook(let_them_in)
        append(ours, b"ours", number=0)
        assert not left
        assert len(paths(place, "chunks/")) == 1
        assert [value for _, value in content(theirs)][-2:] == [b"theirs", b"ours"]
        assert len(content(theirs)) == edits.SPILL_AT + 3


def naive_plan(
    entries: list[Entry], since: int, records: int | None, size: int | None, batches: int | None, upto: int | None
) -> list[tuple[Entry, int, int]]:
    """The plan by its definition: take batches while all limits hold, but at least one."""
    wanted = [
        (entry, max(entry.first, since), min(entry.next, entry.next if upto is None else upto)) for entry in entries
    ]
    wanted = [(entry, first, end) for entry, first, end in wanted if first < end]
    planned: list[tuple[Entry, int, int]] = []
    for piece in wanted:
        together = [*planned, piece]
        fits = (
            (records is None or sum(end - first for _, first, end in together) <= records)
            and (size is None or sum(entry.size for entry, _, _ in together) <= size)
            and (batches is None or len(together) <= batches)
        )
        if planned and not fits:
            break
        planned = together
    return planned


class TestWriters:
    def test_the_ones_silent_for_longest_are_forgotten(self) -> None:
        head = Head(UUID(int=7))
        for name in range(MAX_WRITERS + 10):
            head = list_batches(head, [listing(0, writer=writer_named(name), born=head.next_sequence)], now=0)
            if name % 100 == 0:
                head = list_batches(head, [listing(name // 100 + 1, writer=writer_named(0))], now=0)
        assert len(head.writers) == MAX_WRITERS
        assert writer_named(0) in head.writers
        assert writer_named(MAX_WRITERS + 9) in head.writers
        assert writer_named(1) not in head.writers

    @pytest.fixture
    def crowded(self) -> Head:
        """A head that has forgotten writers 0 to 9, whose last append was sequence 9."""
        head = Head(UUID(int=7))
        for name in range(MAX_WRITERS + 10):
            head = list_batches(head, [listing(0, writer=writer_named(name), born=head.next_sequence)], now=0)
        return head

    def test_a_forgotten_writer_gets_writer_expired_and_lists_nothing(self, crowded: Head) -> None:
        for number in (0, 1, 2):
            with pytest.raises(WriterExpired, match="new producer"):
                list_batches(crowded, [listing(number, writer=writer_named(3), born=3)], now=0)

    def test_an_unknown_writer_that_is_younger_than_all_forgotten_ones_is_new(self, crowded: Head) -> None:
        stranger = writer_named(99_999)
        assert crowded.writers_floor == 10
        with pytest.raises(WriterExpired):
            list_batches(crowded, [listing(0, writer=stranger, born=9)], now=0)
        listed = list_batches(crowded, [listing(0, writer=stranger, born=10)], now=0)
        assert listed.writers[stranger].number == 0
        with pytest.raises(WriterExpired):
            list_batches(crowded, [listing(1, writer=stranger, born=10)], now=0)

    def test_a_remembered_writer_continues_whenever_it_was_born(self, crowded: Head) -> None:
        listed = list_batches(crowded, [listing(1, writer=writer_named(50), born=0)], now=0)
        assert listed.next_offset == crowded.next_offset + 1

    def test_a_producer_that_was_forgotten_before_its_first_batch_gets_an_error(self) -> None:
        log = open_log(PlainStore(), create=True)
        producer = log.producer(linger=3600.0)
        for name in range(MAX_WRITERS + 1):
            append(log, b"x", writer=writer_named(name), number=0)
        handle = producer.append(value=b"late")
        with pytest.raises(WriterExpired):
            producer.flush(SOON)
        with pytest.raises(WriterExpired):
            handle.result(SOON)
        assert log.bounds() == Bounds(0, MAX_WRITERS + 1)

    def test_several_batches_of_a_writer_are_listed_together_and_listed_ones_passed_over(self) -> None:
        head = list_batches(Head(UUID(int=7)), [listing(0, 2), listing(1, 3)], now=5)
        assert [(entry.number, entry.first) for entry in head.tail] == [(0, 0), (1, 2)]
        again = list_batches(head, [listing(0, 2), listing(1, 3), listing(2, 4)], now=6)
        assert [(entry.number, entry.first) for entry in again.tail] == [(0, 0), (1, 2), (2, 5)]
        assert list_batches(again, [listing(0, 2), listing(2, 4)], now=7) is again

    def test_a_number_that_was_left_out_lists_none_of_them(self) -> None:
        with pytest.raises(OutOfOrder):
            list_batches(Head(UUID(int=7)), [listing(0), listing(2)], now=0)

    def test_a_failed_expectation_lists_nothing(self) -> None:
        with pytest.raises(ExpectationFailed):
            list_batches(Head(UUID(int=7)), [listing(0, expect=1)], now=0)

    def test_listing_time_never_goes_back_though_the_clock_does(self) -> None:
        clock = ManualClock()
        log = open_log(PlainStore(), create=True, env=Env(clock=clock))
        for number, wall in enumerate([1000, 2000, 500, 1500, 3000]):
            clock.set_wall(wall)
            append(log, b"x", number=number)
        assert [entry.listed for entry in log.head().tail] == [1000, 2000, 2000, 2000, 3000]


class TestGenerations:
    def trim(self, log: ObjectLog) -> None:
        """The first step of a trimmer: no object of an older generation may be listed from now on."""
        log._lister.cell.update(
            OpId(uuid4()),
            lambda head: replace(head, generation=head.generation + 1, min_generation=head.generation + 1),
        )

    def test_a_batch_of_an_older_generation_cannot_be_listed(self) -> None:
        head = Head(UUID(int=7), generation=2, min_generation=2)
        with pytest.raises(StaleUpload):
            list_batches(head, [listing(0, generation=1)], now=0)
        assert list_batches(head, [listing(0, generation=2)], now=0).next_offset == 1

    def test_a_batch_that_was_uploaded_before_a_trim_is_uploaded_again(self) -> None:
        place = PlainStore()
        line = FaultyStore(place)
        log, trimmer = open_log(line, create=True), open_log(place)
        left = [trimmer]

        def collect_before_the_listing(call: Call) -> None:
            if call.name == "put_if" and call.path == "head" and call.stage == "before" and left:
                self.trim(left.pop())

        line.hook(collect_before_the_listing)
        assert append(log, b"a", number=0) == Receipt(0, 1)
        (entry,) = log.head().tail
        assert entry.location.startswith("batches/0000000000000001/")
        place.delete(next(path for path in paths(place, "batches/") if path != entry.location))
        assert content(log) == [(0, b"a")]

    def test_a_producer_from_before_a_trim_continues(self) -> None:
        log = open_log(PlainStore(), create=True)
        with log.producer(linger=3600.0) as producer:
            for number in range(4):
                handle = producer.append(value=b"%d" % number)
                self.trim(log)
                producer.flush(SOON)
                assert handle.result(0) == Receipt(number, 1)
        assert content(log) == [(number, b"%d" % number) for number in range(4)]

    def test_a_listed_batch_is_not_uploaded_again(self) -> None:
        place = PlainStore()
        log = open_log(place, create=True)
        append(log, b"a", number=0)
        self.trim(log)
        assert append(log, b"a", number=0) == Receipt(0, 1)
        assert len(paths(place, "batches/0000000000000001/")) <= 1
        assert log.head().tail[0].location.startswith("batches/0000000000000000/")

    def test_a_trim_at_every_try_ends_in_an_error_that_says_to_try_again(self) -> None:
        place = PlainStore()
        line = FaultyStore(place)
        log, trimmer = open_log(line, create=True, env=Env(clock=ManualClock())), open_log(place)

        def collect_again(call: Call) -> None:
            if call.name == "put_if" and call.path == "head" and call.stage == "before":
                self.trim(trimmer)

        line.hook(collect_again)
        with pytest.raises(Contended, match="Try again"):
            append(log, b"a", number=0)
        line.unhook()
        assert append(log, b"a", number=0) == Receipt(0, 1)


class TestSlotEdits:
    def test_a_pin_counts_as_membership_and_settling_does_not(self) -> None:
        head = list_batches(Head(UUID(int=7)), [listing(0, 10)], now=0)
        pinned = pin_slot(head, "s", 4)
        assert (pinned.slots, pinned.membership) == ({"s": Pin(4, 1)}, 1)
        settled = settle_slot(pinned, "s", 1)
        assert (settled.slots, settled.membership) == ({"s": None}, 1)
        assert settle_slot(settled, "s", 1) is settled
        assert settle_slot(settled, "other", 1) is settled
        with pytest.raises(AlreadyExists):
            pin_slot(settled, "s", 4)

    def test_only_the_last_pin_of_a_slot_can_be_taken_away_and_both_positions_count_until_then(self) -> None:
        head = list_batches(Head(UUID(int=7)), [listing(0, 10)], now=0)
        once = pin_slot(head, "s", 4)
        twice = repin_slot(once, "s", 8)
        assert (twice.slots, twice.membership) == ({"s": Pin(4, 2)}, 2)
        assert settle_slot(twice, "s", 1) is twice
        assert settle_slot(twice, "s", 2).slots == {"s": None}

    def test_a_slot_that_is_taken_off_the_list_counts_as_membership(self) -> None:
        head = pin_slot(list_batches(Head(UUID(int=7)), [listing(0, 10)], now=0), "s", 4)
        assert (unlist_slot(head, "s").slots, unlist_slot(head, "s").membership) == ({}, 2)
        assert unlist_slot(head, "other") is head
        with pytest.raises(NotFound):
            repin_slot(head, "other", 4)

    def test_a_pin_is_checked_against_the_floor_and_the_end(self) -> None:
        head = replace(list_batches(Head(UUID(int=7)), [listing(0, 10)], now=0), floor=3)
        with pytest.raises(CursorExpired):
            pin_slot(head, "s", 2)
        with pytest.raises(Diverged):
            pin_slot(head, "s", 11)
        assert pin_slot(head, "s", 3).slots == {"s": Pin(3, 1)}


def test_a_log_that_was_replaced_behind_a_producer_s_back_takes_none_of_its_records() -> None:
    place = PlainStore()
    log = open_log(place, create=True, env=Env(chance=SeededChance(1)))
    producer = log.producer(linger=3600.0)
    producer.append(value=b"for the old log")
    place.delete("head")
    place.delete("log.json")
    other = open_log(place, create=True, env=Env(chance=SeededChance(2)))
    with pytest.raises(Diverged, match="replaced"):
        producer.flush(SOON)
    assert other.bounds() == Bounds(0, 0)
