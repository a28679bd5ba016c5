"""Lost answers of every conditional write of a log: no append is duplicated or lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strandline.errors import (
    AlreadyExists,
    Conflict,
    ExpectationFailed,
    Fenced,
    OutcomeUnknown,
    StorageError,
    TransientStorageError,
    WriterExpired,
)
from strandline.log.object import ObjectLog, open_log
from strandline.log.writers.numbered import MAX_WRITERS
from strandline.model.cursor import Bounds
from strandline.model.head import Receipt
from strandline.model.stamp import REMEMBERED
from strandline.storage.env import Env
from strandline.storage.objects.store import ObjectStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Call, Crash, FaultyStore
from strandline.testing.plain import PlainStore
from tests.contracts.logs import content, writer_named
from tests.contracts.slots import append

OURS, THEIRS = writer_named(1), writer_named(2)


def opened(store: ObjectStore, seed: int = 1) -> ObjectLog:
    return open_log(store, create=True, env=Env(clock=ManualClock(), chance=SeededChance(seed)))


@pytest.fixture
def place() -> PlainStore:
    return PlainStore()


@pytest.fixture
def theirs(place: PlainStore) -> ObjectLog:
    """The log as another process sees it, through a store without faults."""
    return opened(place, 2)


@pytest.fixture
def line(place: PlainStore, theirs: ObjectLog) -> FaultyStore:
    """The store of this process, which a test may let fail."""
    return FaultyStore(place)


@pytest.fixture
def ours(line: FaultyStore) -> ObjectLog:
    log = opened(line)
    line.log.clear()
    return log


def once(line: FaultyStore, path: str, then: Callable[[], object], *, stage: str = "after") -> None:
    """Call a function when the next conditional write of this object is stored and its answer is lost."""
    left = [then]

    def callback(call: Call) -> None:
        if call.name == "put_if" and call.path.startswith(path) and call.stage == stage and left:
            left.pop()()

    line.hook(callback)


def others_append(log: ObjectLog, times: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(times):
            append(log, b"theirs", writer=THEIRS, number=number)

    return work


class TestAppend:
    @pytest.mark.parametrize("times", [1, 2, 5])
    def test_a_listing_whose_answer_was_lost_is_found(self, ours: ObjectLog, line: FaultyStore, times: int) -> None:
        line.lose_answers(times, path_prefix="head")
        assert append(ours, b"a", b"b", number=0) == Receipt(0, 2)
        assert append(ours, b"c", number=1) == Receipt(2, 1)
        assert content(ours) == [(0, b"a"), (1, b"b"), (2, b"c")]

    @pytest.mark.parametrize("times", [1, 10, REMEMBERED - 1, REMEMBERED, 3 * REMEMBERED])
    def test_it_is_found_however_often_others_appended_since(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, times: int
    ) -> None:
        once(line, "head", others_append(theirs, times))
        line.lose_answers(1, path_prefix="head")
        assert append(ours, b"ours", number=0) == Receipt(0, 1)
        assert [value for _, value in content(theirs)] == [b"ours", *[b"theirs"] * times]

    def test_a_listing_that_looks_like_a_conflict_is_found(self, ours: ObjectLog, line: FaultyStore) -> None:
        line.fail_next("put_if", path_prefix="head", after=True, error=Conflict("someone, maybe you"))
        assert append(ours, b"a", number=0) == Receipt(0, 1)
        assert ours.bounds() == Bounds(0, 1)

    def test_a_listing_that_lands_late_is_not_doubled(self, ours: ObjectLog, line: FaultyStore) -> None:
        line.delay_next("put_if", path_prefix="head")
        once(line, "head", line.land_late, stage="before")
        line.hook(lambda call: line.land_late() if call.name == "put_if" and call.stage == "before" else None)
        assert append(ours, b"a", number=0) == Receipt(0, 1)
        assert ours.bounds() == Bounds(0, 1)

    def test_an_upload_whose_answer_was_lost_is_no_loss(self, ours: ObjectLog, line: FaultyStore) -> None:
        line.lose_answers(1, path_prefix="batches/")
        with pytest.raises(TransientStorageError):
            append(ours, b"a", number=0)
        assert ours.bounds() == Bounds(0, 0)
        assert append(ours, b"a", number=0) == Receipt(0, 1)
        assert content(ours) == [(0, b"a")]

    @pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
    def test_an_outcome_that_stays_unknown_is_settled_by_the_same_call_again(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, *, landed: bool
    ) -> None:
        once(line, "head", line.turn_down, stage="after" if landed else "before")
        line.lose_answers(1, path_prefix="head")
        with pytest.raises(OutcomeUnknown):
            append(ours, b"a", number=0)
        assert theirs.bounds() == Bounds(0, int(landed))
        append(theirs, b"theirs", writer=THEIRS, number=0)
        line.unhook()
        line.heal()
        assert append(ours, b"a", number=0) == Receipt(0 if landed else 1, 1)
        assert sorted(value for _, value in content(theirs)) == [b"a", b"theirs"]

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_process_that_died_at_any_operation_appends_again_under_the_same_number(
        self, place: PlainStore, theirs: ObjectLog, *, after: bool
    ) -> None:
        for number in range(5):
            line = FaultyStore(place)
            line.crash_at(number, after=after)
            try:
                append(opened(line, 10 + number), b"%d" % number, number=number)
            except Crash:
                append(opened(place, 20 + number), b"%d" % number, number=number)
        assert content(theirs) == [(number, b"%d" % number) for number in range(5)]

    def test_a_conditional_append_whose_answer_was_lost_is_not_refused_by_itself(
        self, ours: ObjectLog, line: FaultyStore
    ) -> None:
        line.lose_answers(1, path_prefix="head")
        assert append(ours, b"a", number=0, expect=0) == Receipt(0, 1)

    def test_a_conditional_append_that_lost_the_race_is_refused_and_changes_nothing(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        once(line, "head", others_append(theirs, 1), stage="before")
        with pytest.raises(ExpectationFailed, match="ends at 1"):
            append(ours, b"a", number=0, expect=0)
        assert content(theirs) == [(0, b"theirs")]

    @pytest.mark.matrix
    def test_a_writer_that_was_forgotten_while_its_answer_was_lost_gets_an_error_and_no_duplicate(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        def many_others_append() -> None:
            for number in range(MAX_WRITERS + 1):
                append(theirs, b"x", writer=writer_named(100 + number), number=0)

        append(ours, b"a", number=0)
        once(line, "head", many_others_append)
        line.lose_answers(1, path_prefix="head")
        with pytest.raises((WriterExpired, OutcomeUnknown)):
            append(ours, b"b", number=1)
        assert [value for _, value in content(theirs)].count(b"b") == 1
        with pytest.raises(WriterExpired, match="new producer"):
            append(ours, b"b", number=1)
        assert [value for _, value in content(theirs)].count(b"b") == 1


class TestSlots:
    @pytest.fixture(autouse=True)
    def ten(self, theirs: ObjectLog) -> None:
        append(theirs, *[b"x"] * 10, writer=THEIRS, number=0)

    @pytest.mark.parametrize("path", ["head", "slots/", ""])
    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_a_creation_whose_answers_were_lost_happened_once(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, path: str, times: int
    ) -> None:
        line.lose_answers(times, path_prefix=path)
        assert ours.slots.create("s", 4).position == 4
        assert [state.position for state in theirs.slots.list()] == [4]
        assert theirs.head().slots == {"s": None}
        with pytest.raises(AlreadyExists):
            ours.slots.create("s", 4)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_creation_that_died_at_any_operation_pins_or_left_nothing_and_can_be_finished(
        self, place: PlainStore, *, after: bool
    ) -> None:
        unfinished = set()
        for number in range(12):
            name = f"s{number}"
            line = FaultyStore(place)
            log = opened(line, 10 + number)
            line.crash_at(len(line.log) + number, after=after)
            try:
                log.slots.create(name, 4)
            except Crash:
                survivor = opened(place, 30 + number)
                pinned = name in survivor.head().slots
                assert survivor.slots.floor() == (4 if pinned or survivor.slots.list() else None)
                if pinned:
                    unfinished.add(number)
                try:
                    assert survivor.slots.create(name, 4).position == 4
                except AlreadyExists:
                    assert pinned
            survivor = opened(place, 50 + number)
            assert survivor.slots.claim(name, "h").state().position == 4
            assert survivor.head().slots[name] is None
        assert len(unfinished) >= 2  # between pin and cell, and between cell and settling

    def test_a_slot_that_is_being_created_pins_before_its_cell_is_written(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        floors = []
        once(line, "slots/", lambda: floors.append((theirs.slots.floor(), theirs.slots.list())), stage="before")
        ours.slots.create("s", 4)
        assert floors == [(4, [])]

    def test_a_slot_whose_creator_died_after_the_pin_still_pins_and_is_finished_by_its_first_claim(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        def die() -> None:
            raise Crash("before the cell was written")

        once(line, "slots/", die, stage="before")
        with pytest.raises(Crash):
            ours.slots.create("s", 4)
        assert theirs.slots.floor() == 4
        assert theirs.slots.list() == []
        slot = theirs.slots.claim("s", "h")
        assert theirs.head().slots == {"s": None}
        assert (slot.epoch, slot.state().position) == (1, 4)
        with pytest.raises(AlreadyExists):
            ours.slots.create("s", 4)

    @pytest.mark.parametrize("position", [2, 8])
    def test_finishing_the_creation_of_another_does_not_pin_the_own_position(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, position: int
    ) -> None:
        def die() -> None:
            raise Crash("before the cell was written")

        once(line, "slots/", die, stage="before")
        with pytest.raises(Crash):
            ours.slots.create("s", 4)
        with pytest.raises(AlreadyExists, match="4"):
            theirs.slots.create("s", position)
        assert [state.position for state in theirs.slots.list()] == [4]
        assert theirs.slots.floor() == 4

    def test_a_slow_creator_does_not_put_back_a_slot_that_another_finished_and_advanced(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        def finish_claim_and_advance() -> None:
            with pytest.raises(AlreadyExists, match="finished"):
                theirs.slots.create("s", 4)
            theirs.slots.claim("s", "h").advance(theirs.start().at(7))

        once(line, "slots/", finish_claim_and_advance, stage="before")
        ours.slots.create("s", 4)
        (state,) = theirs.slots.list()
        assert (state.position, state.holder, state.epoch) == (7, "h", 1)
        assert theirs.head().slots == {"s": None}

    def test_a_creator_whose_pin_was_settled_by_another_before_its_answer_learns_that_the_slot_exists(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        def finish() -> None:
            with pytest.raises(AlreadyExists, match="finished"):
                theirs.slots.create("s", 4)

        once(line, "head", finish)
        line.lose_answers(1, path_prefix="head")
        assert ours.slots.create("s", 4).position == 4
        assert theirs.head().slots == {"s": None}

    def test_a_name_whose_re_creation_was_broken_off_can_be_created_again(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        def die() -> None:
            raise Crash("before the cell was written")

        theirs.slots.create("s", 2)
        former = theirs.slots.claim("s", "h")
        theirs.slots.drop("s")
        once(line, "slots/", die, stage="before")
        with pytest.raises(Crash):
            ours.slots.create("s", 4)
        with pytest.raises(AlreadyExists, match=r"at 4.*finished"):
            theirs.slots.create("s", 5)
        assert [(state.position, state.dropped) for state in theirs.slots.list()] == [(4, False)]
        assert theirs.slots.claim("s", "h").epoch > former.epoch

    def test_two_creators_at_once_make_one_slot(self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore) -> None:
        results: list[object] = []

        def attempt(log: ObjectLog, position: int) -> None:
            try:
                results.append(log.slots.create("s", position).position)
            except AlreadyExists:
                results.append("exists")

        for stage, path in (("before", "head"), ("after", "head"), ("before", "slots/"), ("after", "slots/")):
            results.clear()
            store = PlainStore()
            other = opened(store, 2)
            append(other, *[b"x"] * 10, number=0)
            own = FaultyStore(store)
            log = opened(own)
            once(own, path, lambda other=other: attempt(other, 7), stage=stage)
            attempt(log, 4)
            (state,) = other.slots.list()
            assert len(results) == 2
            assert results.count("exists") >= 1, (stage, path)
            assert {*results} <= {state.position, "exists"}, (stage, path)
            assert other.slots.claim("s", "h").state().position == state.position

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_claim_whose_answer_was_lost_raised_the_epoch_once(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, times: int
    ) -> None:
        theirs.slots.create("s", 4)
        theirs.slots.claim("s", "them")
        line.lose_answers(times, path_prefix="slots/")
        assert ours.slots.claim("s", "us").epoch == 2
        assert [(state.holder, state.epoch) for state in theirs.slots.list()] == [("us", 2)]

    def test_a_claim_that_was_overtaken_while_its_answer_was_lost_does_not_get_the_other_s_epoch(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        theirs.slots.create("s", 4)
        once(line, "slots/", lambda: theirs.slots.claim("s", "them"))
        line.lose_answers(1, path_prefix="slots/")
        try:
            slot = ours.slots.claim("s", "us")
        except Fenced:
            pass
        else:
            assert slot.epoch == 1
            with pytest.raises(Fenced):
                slot.advance(ours.end())
        assert [(state.holder, state.epoch, state.position) for state in theirs.slots.list()] == [("them", 2, 4)]

    @pytest.mark.parametrize("times", [1, 3])
    def test_an_advance_whose_answer_was_lost_moved(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, times: int
    ) -> None:
        theirs.slots.create("s", 4)
        slot = ours.slots.claim("s", "us")
        line.lose_answers(times, path_prefix="slots/")
        slot.advance(ours.start().at(7))
        slot.advance(ours.start().at(9))
        assert [state.position for state in theirs.slots.list()] == [9]

    def test_an_advance_that_lost_its_answer_and_then_its_slot_changes_nothing_more(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore
    ) -> None:
        theirs.slots.create("s", 4)
        slot = ours.slots.claim("s", "us")

        def take_over() -> None:
            theirs.slots.claim("s", "them").advance(theirs.start().at(9))

        once(line, "slots/", take_over)
        line.lose_answers(1, path_prefix="slots/")
        slot.advance(ours.start().at(7))  # it did land, before the other came
        with pytest.raises(Fenced):
            slot.advance(ours.start().at(8))
        assert [(state.holder, state.position) for state in theirs.slots.list()] == [("them", 9)]

    @pytest.mark.parametrize("landed", [True, False], ids=["landed", "not landed"])
    def test_an_advance_that_stays_unknown_can_be_repeated(
        self, ours: ObjectLog, theirs: ObjectLog, line: FaultyStore, *, landed: bool
    ) -> None:
        theirs.slots.create("s", 4)
        slot = ours.slots.claim("s", "us")
        once(line, "slots/", line.turn_down, stage="after" if landed else "before")
        line.lose_answers(1, path_prefix="slots/")
        with pytest.raises(StorageError):
            slot.advance(ours.start().at(7))
        line.unhook()
        line.heal()
        slot.advance(ours.start().at(7))
        assert [state.position for state in theirs.slots.list()] == [7]


class TestCreation:
    @pytest.mark.parametrize("path", ["head", "log.json", ""])
    def test_a_log_whose_creation_lost_its_answers_is_there_once(self, path: str) -> None:
        place = PlainStore()
        line = FaultyStore(place)
        line.lose_answers(2, path_prefix=path)
        created = opened(line)
        again = opened(place, 3)
        assert created.log_id == again.log_id == again.head().log_id
        append(created, b"a", number=0)
        assert content(again) == [(0, b"a")]

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_creation_that_died_at_any_operation_can_be_finished(self, *, after: bool) -> None:
        deaths = 0
        for number in range(16):
            place = PlainStore()
            line = FaultyStore(place)
            line.crash_at(number, after=after)
            try:
                opened(line)
            except Crash:
                deaths += 1
            survivor = opened(place, 3)
            assert survivor.bounds() == Bounds(0, 0)
            assert survivor.log_id == survivor.head().log_id == opened(place, 4).log_id
        assert deaths >= 2  # between head and identity, and behind both

    def test_a_store_that_refuses_the_creation_is_an_error_and_it_can_be_tried_again(self) -> None:
        place = PlainStore()
        line = FaultyStore(place)
        line.fail_next("put_if", path_prefix="log.json")
        with pytest.raises(TransientStorageError):
            opened(line)
        log = opened(line)
        assert opened(place, 3).log_id == log.log_id == log.head().log_id
